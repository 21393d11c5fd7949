"""impl="gluon": which calls it refuses and why, when auto takes it, and what its launcher does around the kernels."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_laws import offsets
from torch._subclasses.fake_tensor import FakeTensorMode

import gem
from gem import with_gluon
from gem.data.lengths import load_profile
from gem.dispatch import Call, choose, refusal
from gem.harness.bench import Bench
from gem.harness.params import JaggedAttentionParams

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels in Gluon are neither there without triton nor interpreted", allow_module_level=True)

from gem.kernels import launch
from gem.kernels.hopper import ops, parts
from gem.kernels.hopper.choose import choose as choose_variant
from gem.kernels.schedule import Batch

BF16, FP16 = torch.bfloat16, torch.float16
CALL = Call("gdpa", "cuda", BF16, heads=4, head_dim=128)


@pytest.fixture
def hopper(monkeypatch) -> None:
    """As if a Hopper GPU were there."""
    monkeypatch.setattr(with_gluon, "_look", lambda device, interpret: None)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changed", "reason"), [
    ({"dtype": torch.float32}, "bfloat16 and float16, not float32"),
    ({"dtype": torch.float64}, "bfloat16 and float16, not float64"),
    ({"head_dim": 96}, "head_dim 64 and 128, not 96"),
    ({"head_dim": 256}, "head_dim 64 and 128, not 256"),
    ({"masked": True}, "no causal or window mask"),
    ({"readable": False}, "the heads of a row must lie side by side"),
    ({"op": "jagged_attention", "biased": True}, "the Gluon kernels add no bias"),
    ({"op": "block_attention"}, "gem has no gluon kernel for block_attention"),
])  # fmt: skip
def test_what_the_kernels_cannot_do_is_refused_with_its_reason(hopper, changed, reason):
    call = CALL._replace(**changed)
    assert reason in str(refusal(call, "gluon"))
    assert choose(call).impl != "gluon" and reason in choose(call).others["gluon"]
    with pytest.raises(ValueError, match=f"impl='gluon' cannot run it: .*{reason}"):
        choose(call, "gluon")


@pytest.mark.parametrize(("bias", "reason"), [("none", None), ("time", "the Gluon kernels add no bias")])
def test_a_declared_bias_is_told_to_who_refuses_it(hopper, bias, reason):
    """Else such a case would end in an error where it has to be skipped with its reason."""
    params = JaggedAttentionParams(dtype="bfloat16", bias=bias)
    case = SimpleNamespace(subject="jagged_attention", params=params, impls=["gluon"])
    bench: Any = SimpleNamespace(case=case, session=SimpleNamespace(device="cuda"))
    found = Bench._implementations(bench)
    assert found == [("gluon", reason)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_auto_prefers_it(hopper, dtype, head_dim):
    call = CALL._replace(dtype=dtype, head_dim=head_dim)
    assert choose(call, "gluon").impl == "gluon"
    assert choose(call).impl == "gluon" and choose(call).why == "auto: preferred"


@pytest.mark.parametrize(("device", "capability", "interpret", "reason"), [
    ("cpu", None, "0", r"compute capability 9.0 \(Hopper\), not for cpu"),
    ("cuda", (8, 0), "0", r"9.0 \(Hopper\), this GPU has 8.0"),
    ("cuda", (10, 0), "0", r"9.0 \(Hopper\), this GPU has 10.0"),
    ("cuda", (9, 0), "1", "Gluon has no interpreter"),
    ("cuda", (9, 0), "0", None),
])  # fmt: skip
def test_where_it_runs(monkeypatch, device, capability, interpret, reason):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = with_gluon._look.__wrapped__(device, interpret)
    assert found is None if reason is None else re.search(reason, str(found))


@pytest.mark.parametrize(
    ("version", "fits"),
    [("3.5.1", False), ("2.9.0", False), ("3.6.0", True), ("3.7.1+git1", True), ("3.9.0", False), ("3.10.0", False)],
)
def test_another_triton_is_refused(version, fits):
    reason = with_gluon._unfit(version)
    assert (reason is None) is fits
    assert fits or f"written for triton 3.6 and 3.7, this is {version}" in str(reason)


def test_a_triton_whose_gluon_lacks_something_is_refused(monkeypatch):
    from triton.experimental.gluon.language.nvidia import hopper

    monkeypatch.delattr(hopper, "warpgroup_mma")
    assert "triton 3.7.0 is not the one that the kernels are written in: no warpgroup_mma" in str(
        with_gluon._unfit("3.7.0")
    )
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia.hopper", None)
    assert "triton 3.7.0 is not the one" in str(with_gluon._unfit("3.7.0"))


def test_without_triton_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in str(with_gluon._look.__wrapped__("cuda", "0"))


# -- from a call's arguments -------------------------------------------------------------------------------------------


def rows(count: int, heads: int = 2, head_dim: int = 64, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(count, heads, head_dim).to(dtype)


def fused(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 2, 64).to(BF16)[:, 1]


def heads_first(count: int) -> torch.Tensor:
    return rows(2, count).transpose(0, 1)


@pytest.mark.parametrize(("x", "readable"), [
    (rows(9), True),
    (rows(0), True),
    (fused(9), True),
    (rows(9, heads=1).transpose(0, 1).contiguous().transpose(0, 1), True),
    (heads_first(9), False),
    (torch.randn(9, 2, 128).to(BF16)[:, :, ::2], False),
    (rows(1).expand(9, 2, 64), False),
    (torch.randn(9 * 132).to(BF16).as_strided((9, 2, 64), (132, 64, 1)), False),
], ids=["packed", "no rows", "fused", "one head", "heads first", "every second", "one row", "264 bytes"])  # fmt: skip
def test_strides_that_the_copy_engine_reads(x, readable):
    assert with_gluon.readable(x) is readable
    assert with_gluon.readable(rows(9), rows(9), x) is readable
    if x.shape[0]:
        assert launch.tma_fits(x) is readable


@pytest.mark.parametrize(("arguments", "impl"), [
    ({"impl": "gluon"}, "gluon"),
    ({}, "gluon"),
    ({"causal": True}, "torch"),
    ({"window": (5, -1)}, "torch"),
    ({"window": (-1, 5)}, "torch"),
], ids=str)  # fmt: skip
def test_a_call_on_tensors_of_a_gpu(hopper, monkeypatch, arguments, impl):
    """Shapes alone: nothing runs, and nothing reads an address."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        q, k = (torch.empty(n, 2, 64, dtype=BF16, device="cuda") for n in (10, 30))
        o = torch.empty(4, dtype=torch.int64, device="cuda")
        choice = gem.explain(gem.gdpa, q, k, k, o, o, **arguments)
        assert choice.impl == impl
        if arguments.keys() & {"causal", "window"}:
            assert "no causal or window mask" in choice.others["gluon"]
        out = gem.gdpa(q, k, k, o, o, **arguments)
        assert out.shape == q.shape and out.device.type == "cuda" and out.dtype == BF16
        shared = gem.gdpa(q, k, k, k_offsets=o, broadcast_q=True, **arguments)
        assert shared.shape == (30, 2, 64)


def test_a_compiled_call_runs_it_too(monkeypatch):
    """The kernel's place is taken by impl="torch"; other lengths compile nothing anew."""
    asked = []

    def forward(q, k, v, batch, **how) -> torch.Tensor:
        asked.append(q.shape[0])
        return gem.gdpa(q, k, v, batch.q_offsets, batch.k_offsets, impl="torch", **how)

    monkeypatch.setattr(with_gluon, "_no_device", lambda device: None)
    monkeypatch.setattr(ops, "gdpa_forward", forward)
    compiled = torch.compile(gem.gdpa, fullgraph=True, backend="eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lens in ([30, 7], [2, 80]):
            q = rows(sum(lens))
            out = compiled(q, q, q, offsets(lens), activation="silu", impl="gluon")
            assert torch.equal(out, gem.gdpa(q, q, q, offsets(lens), activation="silu", impl="torch"))
    assert asked == [37, 82]


# -- which kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fixture", "kernel", "lanes"), [
    ("self_long", "long", 1),
    ("dense_4k", "long", 1),
    ("uniform_s100_kv256", "long", 1),
    ("cross_short_kv", "short", 1),
    ("pma_q32", "long", 2),
    ("pma_q64", "long", 2),
    ("giant_among_empties", "long", 2),
])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_choose_the_kernel(fixture, kernel, lanes, head_dim):
    lengths = load_profile(fixture).draw()
    edges = torch.zeros(lengths.batch + 1, dtype=torch.int64)
    q_offsets = None if lengths.pattern == "pma" else edges
    batch = Batch(q_offsets, edges, lengths.tokens_q, lengths.tokens_k, shared=lengths.queries or 0)
    variant = choose_variant(batch, head_dim)
    assert (variant.kernel, variant.lanes) == (kernel, lanes)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("programs", [1, 3, 132])
@pytest.mark.parametrize("zigzag", [True, False])
def test_each_job_is_dealt_once_and_shares_differ_little(monkeypatch, programs, lanes, zigzag):
    """Jobs whose work falls evenly, as the list has them: no lane gets more than one job's fall beyond the others.

    Dealt straight, the first lane gets the longest of each round.
    """
    turns, shares = 6, []
    for program in range(programs):
        monkeypatch.setattr(parts.gl, "program_id", lambda axis, program=program: program)
        for lane in range(lanes):
            shares.append([parts.dealt.fn(turn, lane, programs, lanes, zigzag) for turn in range(turns)])
    assert sorted(job for share in shares for job in share) == list(range(turns * programs * lanes))
    assert all(share == sorted(share) for share in shares)  # a job that is not there ends a lane's work
    if zigzag:
        assert len({sum(share) for share in shares}) == 1
    else:
        assert [sum(share) for share in shares] == [sum(shares[0]) + turns * lane for lane in range(programs * lanes)]


@pytest.fixture
def launched(monkeypatch) -> Iterator[list[tuple[Any, ...]]]:
    """The launches that would have been: (Launch, grid, arguments)."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, grid, *given: found.append((self, grid, *given)))
    launch.PLANS.clear()
    yield found
    launch.PLANS.clear()


def forward(q, k, v, q_offsets, k_offsets, shared: int = 0, **how) -> torch.Tensor:
    batch = Batch(q_offsets, k_offsets, q.shape[0], k.shape[0], shared=shared)
    return ops.gdpa_forward(q, k, v, batch, activation="silu", qk_scale=0.5, **how)


def test_calls_of_one_kind_share_a_launch_and_other_kinds_do_not(launched):
    q, k = rows(300), rows(50)
    for _ in range(2):
        forward(q.clone(), k.clone(), k, offsets([100, 200]), offsets([20, 30]))
    forward(q, rows(400), rows(400), offsets([100, 200]), offsets([150, 250]))  # long keys
    forward(q.half(), k.half(), k.half(), offsets([100, 200]), offsets([20, 30]))
    first, again, longer, half = (x[0] for x in launched)
    assert first is again and len({id(x) for x in (first, longer, half)}) == 3
    assert [x.kernel.__name__ for x in (first, longer, half)] == ["_gdpa_short", "_gdpa_long", "_gdpa_short"]


def test_the_arguments_of_a_launch(launched, monkeypatch):
    """3 samples of 300, 0 and 1700 queries and 10 rows behind them, short keys: tiles of 1024 queries."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 7)
    q, k = rows(2010), rows(60)
    out = forward(q, k, k, offsets([300, 0, 1700]), offsets([10, 20, 30]), out_scale=3.0)
    (_, grid, q_given, k_given, _, out_given, tiles, _, jobs, heads, programs, shared, scale, out_scale) = launched[0]
    assert q_given is q and k_given is k and out_given is out and out.shape == q.shape
    assert jobs == 2 * len(tiles) and (heads, shared, scale, out_scale) == (2, 0, 0.5, 3.0)
    assert grid == (programs,) == (7,)
    there = tiles[tiles[:, 0] >= 0]
    # Sample, first row, queries, keys; sample 3 is what lies behind the last offset and sees nothing.
    assert sorted(there[:, [0, 1, 3, 5]].tolist()) == [
        [0, 0, 300, 10],
        [2, 0, 1700, 30],
        [2, 1024, 1700, 30],
        [3, 0, 10, 0],
    ]
    assert (tiles[len(there) :, 0] == -1).all()


def test_no_more_programs_than_jobs(launched, monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    k = rows(60)
    out = forward(rows(32), k, k, None, offsets([10, 20, 30]), shared=32)
    *_, jobs, heads, programs, shared, _, _ = launched[0]
    # Three tiles, one more for the rest of a tile, and one for rows behind the last offset, of which there are none.
    assert (jobs, heads, programs, shared) == (2 * 5, 2, 2 * 5, 32) and out.shape == (96, 2, 64)


@pytest.mark.parametrize(
    "other", [heads_first(60), rows(61).flatten()[1 : 1 + 60 * 128].view(60, 2, 64)], ids=["strides", "address"]
)
def test_what_the_copy_engine_cannot_read_is_copied(launched, other):
    forward(rows(200), other, other, offsets([200]), offsets([60]))
    _, _, _, k_given, v_given, *_ = launched[0]
    assert launch.tma_fits(k_given, v_given) and torch.equal(k_given, other) and torch.equal(v_given, other)


@pytest.mark.parametrize(("q_lens", "k_lens", "shared"), [
    ([], [], 0),
    ([0, 0], [5, 6], 0),
    ([], [], 8),
])  # fmt: skip
def test_no_queries_launch_nothing(launched, q_lens, k_lens, shared):
    q, k = rows(shared or sum(q_lens)), rows(sum(k_lens))
    out = forward(q, k, k, None if shared else offsets(q_lens), offsets(k_lens), shared)
    assert out.shape == (0, 2, 64) and launched == []


@pytest.mark.parametrize("shared", [0, 8])
def test_no_keys_at_all_give_zeros_without_a_launch(launched, shared):
    q, k = rows(8), rows(0)
    q[3] = float("nan")
    out = forward(q, k, k, None if shared else offsets([5, 3]), offsets([0, 0]), shared)
    assert out.shape == (16 if shared else 8, 2, 64) and (out == 0).all() and launched == []


def test_more_rows_than_a_descriptor_has_are_refused(launched):
    q = torch.empty((2**30 + 1, 1, 64), dtype=BF16, device="meta")
    k = torch.empty((60, 1, 64), dtype=BF16, device="meta")
    with pytest.raises(ValueError, match=r"up to 2\*\*30 rows, got 1073741825"):
        forward(
            q, k, k, torch.empty(2, dtype=torch.int64, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
        )
