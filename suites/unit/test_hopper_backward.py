"""Which kernels the backward of impl="gluon" is made of; and that, on an emulated machine, they give every row."""

import importlib.util
import os
from unittest import mock

import pytest
import torch

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)
pytest.importorskip("greenlet", reason="the emulator switches between partitions by greenlet, which is not installed")

from gluon_emulated import emulating
from gluon_laws import LENGTHS, Lengths, assert_near, gradients, inputs

from gem.data.lengths import load_profile
from gem.kernels import launch
from gem.kernels.hopper import backward, backward_few, backward_keep, backward_long, backward_short, ops
from gem.kernels.schedule import Batch, Limits

BF16 = torch.bfloat16
HOW = {"activation": "silu", "qk_scale": 0.3, "out_scale": 0.7}
FEW = Lengths((5, 0, 30, 64, 7, 1), (40, 5, 0, 70, 3, 9), rest_q=3, rest_k=2)
FEW_AND_MORE = Lengths((5, 0, 130, 1, 7, 1), (40, 5, 30, 0, 3, 9), rest_q=3, rest_k=2)  # one sample beyond 32
SHORT = Lengths((70, 100, 0, 90), (100, 17, 5, 0), rest_q=3, rest_k=2)
SHORT_AND_MORE = Lengths((70, 130, 0, 90, 100), (100, 17, 5, 0, 130), rest_q=3, rest_k=2)
LONG = Lengths((70, 130, 0, 90), (200, 300, 150, 170), rest_q=3, rest_k=2)


@pytest.mark.parametrize(("fixture", "kernel"), [
    ("self_long", "long"),
    ("dense_4k", "long"),
    ("uniform_s100_kv256", "long"),
    ("cross_short_kv", "short"),
    ("pma_q32", "few"),
    ("pma_q64", "few"),
    ("giant_among_empties", "few"),
])  # fmt: skip
def test_lengths_choose_the_kernel(fixture, kernel):
    lengths = load_profile(fixture).draw()
    edges = torch.zeros(lengths.batch + 1, dtype=torch.int64)
    q_offsets = None if lengths.pattern == "pma" else edges
    batch = Batch(q_offsets, edges, lengths.tokens_q, lengths.tokens_k, shared=lengths.queries or 0)
    assert backward.choose_backward(batch, 128)[0] == kernel
    assert backward.choose_backward(batch, 64)[0] == {"short": "keep"}.get(kernel, kernel)


def ran(lengths: Lengths, x) -> tuple[list[str], tuple[torch.Tensor, ...]]:
    """Kernels that ran, and what they gave."""
    seen = []

    def noting(module):
        run = module.run

        def noted(*given, **how):
            seen.append(module.__name__.rpartition("_")[2])
            run(*given, **how)

        return mock.patch.object(module, "run", noted)

    with emulating(seed=1), noting(backward_few), noting(backward_keep), noting(backward_short), noting(backward_long):
        return seen, ops.gdpa_backward(x.d_out, x.q, x.k, x.v, lengths.batch(), **HOW)


@pytest.mark.parametrize(("lengths", "kernel"), [
    (FEW, "few"),
    (FEW_AND_MORE, "few"),
    (LENGTHS["shared"], "few"),
    (SHORT, "short"),
    (SHORT_AND_MORE, "short"),
    (SHORT_AND_MORE, "keep"),
    (LONG, "long"),
], ids=["few", "few and more", "shared", "short", "short and more", "kept and more", "long"])  # fmt: skip
def test_every_row_gets_its_gradient(lengths, kernel, monkeypatch):
    """Those of samples beyond a kernel's limits, and those behind the last offsets, by the one for long sequences."""
    monkeypatch.setattr(backward_short, "LIMITS", Limits(100, 120))
    monkeypatch.setattr(backward_keep, "LIMITS", Limits(100, 120))
    kernels = [*{kernel: 1, "long": 1}]
    head_dim = 128 if kernel == "short" else 64
    x = inputs(lengths, 2, head_dim, BF16)
    seen, (dq, dk, dv) = ran(lengths, x)
    assert seen == kernels and (dq.dtype, dk.dtype, dv.dtype) == (BF16,) * 3
    _, right_dq, right_dk, right_dv = gradients(lengths, x, HOW["activation"], HOW["qk_scale"], HOW["out_scale"])
    q_lens = lengths.q_lens
    if lengths.shared:
        right_dq, q_lens = right_dq.view(len(lengths.k), lengths.shared, 2, head_dim).sum(0), [lengths.shared]
    assert_near(dq, right_dq, q_lens, "dq")
    assert_near(dk, right_dk, lengths.k, "dk")
    assert_near(dv, right_dv, lengths.k, "dv")


def test_what_the_copy_engine_cannot_read_is_copied():
    """The gradient of a sum is one number, seen at every place."""
    x = inputs(FEW, 2, 64, BF16)
    given = []
    with mock.patch.object(launch.Launch, "__call__", lambda self, grid, *arguments: given.append(arguments)):
        ops.gdpa_backward(
            torch.ones((), dtype=BF16).expand(x.q.shape), x.q, x.k.transpose(0, 1).contiguous().transpose(0, 1), x.v,
            FEW.batch(), **HOW,
        )  # fmt: skip
    for arguments in given:
        tensors = [one for one in arguments if isinstance(one, torch.Tensor) and one.dtype == BF16]
        assert all(launch.tma_fits(one) for one in tensors)
    assert any(one is x.q for one in given[0])


@pytest.mark.parametrize(("q_rows", "k_rows", "shared"), [(0, 6, 0), (6, 0, 0), (0, 0, 0), (8, 0, 8)])
def test_no_queries_or_no_keys_at_all_launch_nothing(q_rows, k_rows, shared):
    edges = torch.tensor([0, 0, 0])
    batch = Batch(None if shared else edges, edges, q_rows, k_rows, shared=shared)
    q, k = torch.full((q_rows, 2, 64), torch.nan, dtype=BF16), torch.full((k_rows, 2, 64), torch.nan, dtype=BF16)
    d_out = torch.full((shared * 2 or q_rows, 2, 64), torch.nan, dtype=BF16)
    with mock.patch.object(launch.Launch, "__call__", side_effect=AssertionError):
        for gradient, like in zip(ops.gdpa_backward(d_out, q, k, k, batch, **HOW), (q, k, k), strict=True):
            assert gradient.shape == like.shape and gradient.dtype == BF16 and (gradient == 0).all()
