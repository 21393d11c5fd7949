"""How launches are kept: which calls are of one kind, and that the short way passes what Triton's own would have."""

import importlib.util
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: there is nothing to launch with", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: Triton interprets and launches nothing", allow_module_level=True)

import triton
from attention_laws import offsets
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon.language import NVMMASharedLayout

from gem.kernels import launch
from gem.kernels.ops import jagged_batch
from gem.kernels.schedule import Batch

ROWS = torch.zeros(40, 2, 16, dtype=torch.bfloat16)
EDGES = offsets([10, 30])


def kind(batch: Batch | None = None, *tensors: torch.Tensor) -> Any:
    return launch.kind_of(batch or Batch(EDGES, EDGES, 40, 40), *(tensors or (ROWS, ROWS)))


def test_calls_that_compile_alike_are_of_one_kind():
    assert kind() == kind(None, ROWS.clone(), ROWS.clone())
    assert kind() == kind(Batch(EDGES.clone(), EDGES.clone(), 40, 40))


@pytest.mark.parametrize("other", [
    (Batch(EDGES, EDGES, 40, 40, left=3), ROWS, ROWS),
    (Batch(EDGES, EDGES, 40, 40, right=0), ROWS, ROWS),
    (Batch(None, EDGES, 40, 40, shared=20), ROWS, ROWS),
    (Batch(EDGES, EDGES, 40, 400), ROWS, ROWS),
    (None, ROWS.half(), ROWS.half()),
    (None, ROWS[:, :, :8], ROWS),
    (None, ROWS.transpose(0, 1).contiguous().transpose(0, 1), ROWS),
    (None, ROWS[:0], ROWS),
], ids=["left", "right", "shared", "longer keys", "type", "head_dim", "strides", "no rows"])  # fmt: skip
def test_whatever_decides_tells_kinds_apart(other):
    assert kind(*other) != kind()


def test_which_tensor_has_no_rows_is_told_apart():
    """The copy engine reads some of them: one flag for all would let it read at address 0."""
    assert kind(None, ROWS[:0], ROWS) != kind(None, ROWS, ROWS[:0])


def test_tensors_at_odd_addresses_are_of_no_kind():
    assert kind(None, torch.zeros(2 * 40 * 16 + 4, dtype=torch.bfloat16)[4:].view(40, 2, 16), ROWS) is None


@pytest.mark.parametrize("layout", [None, NVMMASharedLayout(32, 16, 4)], ids=["Triton", "Gluon"])
def test_the_short_way_passes_what_tritons_own_passes(layout):
    """Triton's wrapper around a launcher, with the launcher and the encoding of descriptors recorded and not run."""
    seen: list[tuple[Any, ...]] = []
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 16], "fp4_padded": False}
    signature = {"a": "*fp32", "k": "tensordesc<bf16[1, 1, 64, 16]>", "n": "i32", "v": "tensordesc<bf16[1, 1, 64, 16]>"}
    launcher = SimpleNamespace(
        launch=nvidia.wrap_handle_tensordesc(lambda *a: seen.append(a), signature, [meta, dict(meta)]),
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        launch_cooperative_grid=False, launch_pdl=True,
    )  # fmt: skip
    compiled: Any = SimpleNamespace(run=launcher, function=1234, packed_metadata="resources")
    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=lambda *a: ("map", *map(repr, a))))
    k, v = torch.zeros(40, 2, 16, dtype=torch.bfloat16), torch.zeros(40, 2, 16, dtype=torch.bfloat16)
    made = [ROWS, launch.ragged(k, 64, layout), 7, launch.ragged(v, 64, layout)]
    with (
        mock.patch.object(triton.runtime.driver, "_active", active),
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch._C._cuda_getCurrentRawStream", lambda device: 5, create=True),
    ):
        nvidia.CudaLauncher.__call__(launcher, 9, 1, 1, 5, 1234, "resources", None, None, None, *made, 64, "silu")  # pyright: ignore[reportArgumentType]
        ready = launch._Ready.of(compiled, tuple(made), (64, "silu"))
        assert ready is not None
        ready.run(9, (ROWS, k, 7, v))
    tritons, ours = seen
    assert len(tritons) == len(ours) == nvidia._BASE_ARGS_FORMAT_LEN + 1 + 9 + 1 + 9 + 2
    assert all(a is b or a == b for a, b in zip(tritons, ours, strict=True))


@pytest.mark.parametrize(("left", "right", "kept"), [
    (29, 9, (29, 9)),
    (30, 10, (-1, -1)),
    (2**31 - 1, 2**31 - 1, (-1, -1)),
    (-1, 0, (-1, 0)),
])  # fmt: skip
def test_windows_that_reach_all_rows_are_none(left, right, kept):
    """10 queries and 30 keys: a query 29 keys from the first, 9 queries from the last."""
    q, k = torch.zeros(10, 1, 16), torch.zeros(30, 1, 16)
    batch = jagged_batch(q, k, offsets([10]), offsets([30]), left, right)
    assert (batch.left, batch.right) == kept


def test_windows_that_do_not_fit_into_32_bits_are_refused():
    many = 3 * 2**29
    with pytest.raises(ValueError, match="window of 1610612735, 0"):
        Batch(EDGES, EDGES, 40, many, left=many - 1, right=0)
