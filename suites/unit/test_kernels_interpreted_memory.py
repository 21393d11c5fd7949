"""How the kernels of impl="triton" address memory and share out work, run by Triton's interpreter on the CPU."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Calls unpack tuples of tensors; their lengths are not in the types.

import math
from itertools import chain

import pytest
import torch
import triton
import triton.language as tl
from attention_laws import offsets, rows, run
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import DIM, HEADS, MASKS, attention, batch, blocks, gdpa, quiet

import gem
from gem import reference
from gem.kernels import config, tuning
from gem.kernels.attention_dkv import attention_dkv
from gem.kernels.attention_dq import attention_dq
from gem.kernels.config import Config
from gem.kernels.device import dealt
from gem.kernels.ops import attention_forward
from gem.kernels.schedule import Batch

pytestmark = quiet

# -- tiles and the order of work ---------------------------------------------------------------------------------------


def forward_and_backward(
    of: Config | None, activation: str = "softmax", left: int = -1, right: int = -1, shared: int = 0
):
    """[out, dq, dk, dv] of kernels that are all launched with one configuration."""
    (q, k, v), qo, ko = batch(q_lens=[0, 5, 70, 33], k_lens=[3, 40, 70, 0])
    q = q[:shared] if shared else q
    d_out = rows(shared * 4 or q.shape[0], HEADS, DIM, torch.float32, 9)
    jagged = Batch(None if shared else qo, ko, q.shape[0], k.shape[0], left, right, shared)
    how = {"activation": activation, "qk_scale": 0.2, "config": of}
    out, lse = attention_forward(q, k, v, jagged, **how)
    out_and_lse = (out, lse) if activation == "softmax" else (None, None)
    dq, delta = attention_dq(d_out, q, k, v, *out_and_lse, jagged, **how)
    return [out, dq, *attention_dkv(d_out, q, k, v, out_and_lse[1], delta, jagged, **how)]


CALLS = {
    "softmax": {},
    "softmax_window": {"left": 9, "right": 4},
    "gdpa_causal": {"activation": "silu", "right": 0},
    "gdpa_shared": {"activation": "gelu_taylor", "shared": 20},
}


@pytest.mark.parametrize("call", CALLS)
def test_a_persistent_grid_gives_the_same_bits(call):
    once = forward_and_backward(Config(32, 32, 4, 1), **CALLS[call])
    for programs in (1, 2):
        turns = forward_and_backward(Config(32, 32, 4, 1, persistent=programs), **CALLS[call])
        assert all(torch.equal(a, b) for a, b in zip(once, turns, strict=True))


def every_tile() -> list[tuple[int, int]]:
    """(queries, keys) of every tile that a launch may get, tuned or not."""
    defaults = [c for sizes in config._DEFAULT.values() for kinds in sizes.values() for c in kinds.values()]
    listed = chain(
        *(tiles for sizes in tuning._TILES.values() for tiles in sizes.values()), *tuning._SHORT.values(),
        *tuning._SQUEEZED.values(),
    )  # fmt: skip
    fp32 = [(m // 2, n // 2) for m, n, *_ in chain(*(t for sizes in tuning._TILES.values() for t in sizes.values()))]
    fp32 += [(16, 16), (16, 32), (32, 32)]
    return sorted({(c.block_m, c.block_n) for c in defaults} | {(m, n) for m, n, *_ in listed} | set(fp32))


@pytest.fixture(scope="module")
def small_tiles():
    return {call: forward_and_backward(Config(16, 16, 4, 1), **how) for call, how in CALLS.items()}


@pytest.mark.parametrize("tile", every_tile(), ids=lambda tile: f"{tile[0]}x{tile[1]}")
def test_every_tile_computes_the_same(tile, small_tiles):
    for call, how in CALLS.items():
        for x, other in zip(forward_and_backward(Config(*tile, 4, 1), **how), small_tiles[call], strict=True):
            torch.testing.assert_close(x, other, atol=3e-6 * max(1.0, float(other.abs().max())), rtol=0)


@triton.jit
def _deal(owners, times, count, PERSISTENT: tl.constexpr):
    turns = tl.cdiv(count, tl.num_programs(0)) if PERSISTENT else 1
    for turn in range(turns):
        item = dealt(turn, count, PERSISTENT)
        if item < count:
            tl.store(owners + item, tl.program_id(0))
            tl.store(times + item, tl.load(times + item) + 1)


def loads(costs: torch.Tensor, programs: int) -> torch.Tensor:
    """Sum of the costs that each program of a persistent grid gets; each item is taken once."""
    owners, times = torch.full((len(costs),), -1, dtype=torch.int32), torch.zeros(len(costs), dtype=torch.int32)
    _deal[(programs,)](owners, times, len(costs), PERSISTENT=True)
    assert (times == 1).all()
    return torch.zeros(programs, dtype=torch.int64).index_add_(0, owners.long(), costs)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 7))
def test_a_persistent_grid_deals_all_work_once_and_no_worse_than_straight(costs, programs):
    costs = torch.tensor(sorted(costs, reverse=True))
    straight = torch.zeros(programs, dtype=torch.int64).index_add_(0, torch.arange(len(costs)) % programs, costs)
    dealt = loads(costs, programs)
    assert dealt.max() <= straight.max() and dealt.max() - dealt.min() <= costs[0]


@pytest.mark.parametrize("programs", [2, 5])
def test_a_persistent_grid_deals_evenly(programs):
    """Of costs that fall in even steps everyone gets the same; straight, the first would get a step more every turn."""
    assert loads(torch.arange(6 * programs, 0, -1), programs).unique().numel() == 1


def test_an_ordinary_grid_takes_the_list_in_order():
    owners, times = torch.full((5,), -1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    _deal[(5,)](owners, times, 5, PERSISTENT=False)
    assert owners.tolist() == list(range(5)) and (times == 1).all()


# -- strides -----------------------------------------------------------------------------------------------------------


def loosely(x: torch.Tensor, how: str) -> torch.Tensor:
    """The values of x [T, H, D] at other places in memory; what lies between is NaN."""
    total, heads, dim = x.shape
    shape, view = {
        "heads_first": ((heads, total, dim), lambda y: y.transpose(0, 1)),
        "odd_rows": ((total, heads * dim + 3), lambda y: y[:, 3:].unflatten(1, (heads, dim))),
        "odd_start": ((total * heads * dim + 1,), lambda y: y[1:].view(total, heads, dim)),
        "every_other": ((total, heads, dim, 2), lambda y: y[..., 0]),
        "columns_first": ((dim, total, heads), lambda y: y.permute(1, 2, 0)),
    }[how]
    placed = view(torch.full(shape, torch.nan, dtype=x.dtype))
    assert placed.shape == x.shape
    return placed.copy_(x)


@pytest.mark.parametrize("layout", ["heads_first", "odd_rows", "odd_start", "every_other", "columns_first"])
def test_strides_change_no_bit(layout):
    (q, k, v), qo, ko = batch(q_lens=[5, 0, 40], k_lens=[40, 3, 33])
    d_out = rows(q.shape[0], HEADS, DIM, torch.float32, 9)
    calls = [
        lambda *x: attention(*x, qo, ko, causal=True),
        lambda *x: gdpa(*x, qo, ko, activation="silu", qk_scale=0.2),
        lambda _, k, v: blocks(k, k, v, ko, block=16),
    ]
    for call in calls:
        results = []
        # Twice: the second call finds what the first one prepared.
        for place in (lambda x: x.clone(), lambda x: loosely(x, layout), lambda x: loosely(x, layout)):
            leaves = [place(x).requires_grad_() for x in (q, k, v)]
            out = call(*leaves)
            grad = place(d_out if out.shape == d_out.shape else rows(out.shape[0], HEADS, DIM, torch.float32, 9))
            results.append([out, *torch.autograd.grad(out, leaves, grad, allow_unused=True)])
        for first, *others in zip(*results, strict=True):
            assert all(first is x or torch.equal(first, x) for x in others)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, HEADS, DIM), (None, 1, DIM), (None, HEADS, 1)], ids=str)
def test_a_gradient_and_values_that_were_expanded(shape):
    """out.sum() sends back one number at stride 0, a mean over heads one row; v may be one row for all keys."""
    (q, k, v), qo, ko = batch(q_lens=[5, 0, 40], k_lens=[40, 3, 33])
    one = rows(shape[0] or q.shape[0], *shape[1:], torch.float32, 9)
    d_out = one.expand(q.shape[0], HEADS, DIM)
    shared_v = v[:1].expand(v.shape)
    for value in (v, shared_v):
        results = []
        for gradient, x in ((d_out, value), (d_out.clone(), value.clone())):
            leaves = [y.detach().requires_grad_() for y in (q, k, x)]
            out = attention(*leaves, qo, ko)
            results.append([out, *torch.autograd.grad(out, leaves, gradient)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def far_apart(x: torch.Tensor, row: int, head: int) -> torch.Tensor:
    """x [T, H, D] at these strides of rows and heads. What lies between is never touched: it costs addresses alone."""
    reach = (x.shape[0] - 1) * row + (x.shape[1] - 1) * head + x.shape[2]
    assert reach > 2**31
    try:
        memory = torch.empty(reach, dtype=x.dtype)
    except RuntimeError as error:  # an address space that is limited
        pytest.skip(f"no room for {reach * x.element_size()} bytes of addresses: {str(error).splitlines()[0]}")
    return memory.as_strided(x.shape, (row, head, 1)).copy_(x)


# (Rows, strides of rows and heads): a product of 32 bits would wrap for row 31 of a tile and for its first row 32, for
# head 2, and for the first row of the second sample, whose rows lie close enough for offsets of 32 bits in a tile.
FAR = {"rows": (40, 70_000_000, DIM), "heads": (40, DIM, 2**30 + 8), "many_rows": (530, 2**22 - 8, DIM)}


@pytest.mark.parametrize("far", ["q", "k", "v", "d_out"])
@pytest.mark.parametrize("strides", FAR)
def test_offsets_that_32_bits_do_not_hold(strides, far):
    count, *apart = FAR[strides]
    q, k, v, d_out = (rows(count, 3, DIM, torch.float16, seed) for seed in range(4))
    names = {"q": q, "k": k, "v": v, "d_out": d_out}
    # Few rows on the other side of the long sample: it costs the interpreter next to nothing.
    long, short = offsets([count - 4, 1, 3]), offsets([1, 30, 9])
    qo, ko = (long, short) if far in ("q", "d_out") else (short, long)

    def results():
        leaves = [names[name].detach().requires_grad_() for name in "qkv"]
        out = attention(*leaves, qo, ko, causal=False)
        return [out, *torch.autograd.grad(out, leaves, names["d_out"])]

    near = results()
    names[far] = far_apart(names[far], *apart)
    assert all(torch.equal(a, b) for a, b in zip(near, results(), strict=True))


# -- from the public ops -----------------------------------------------------------------------------------------------


def three_ops(q, k, v, qo, ko, table):
    a = attention(q, k, v, qo, ko, causal=True, bias=gem.PositionBias(table, torch.arange(2, table.shape[0] + 1)))
    b = gdpa(q, k, v, qo, ko, window=(5, 5), qk_scale=0.2)
    c = gdpa(q[:3], k, v, None, ko, broadcast_q=True, qk_scale=0.2)
    d = blocks(a, b, a + 1, qo, block=8)
    return a, b, c, d


def test_compiled_whole_they_give_the_same_bits():
    (q, k, v), qo, ko = batch(q_lens=[5, 0, 33], k_lens=[20, 3, 9])
    table = torch.randn(4, HEADS, generator=torch.Generator().manual_seed(4))

    def gradients(fn):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, table)]
        outputs = fn(*leaves[:3], qo, ko, leaves[3])
        return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves)]

    torch._dynamo.reset()
    compiled = torch.compile(three_ops, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(three_ops), gradients(compiled), strict=True))


def test_without_gradients_the_forward_is_the_same():
    tensors, qo, ko = batch(q_lens=[5, 33], k_lens=[20, 9])
    with_graph = attention(*[x.requires_grad_() for x in tensors], qo, ko)
    with torch.no_grad():
        assert torch.equal(attention(*tensors, qo, ko), with_graph)
    with torch.inference_mode():
        assert torch.equal(attention(*tensors, qo, ko), with_graph)


def test_auto_takes_no_interpreter():
    tensors, qo, ko = batch()
    choice = gem.explain(gem.jagged_attention, *tensors, qo, ko)
    assert choice.impl == "torch"
    assert choice.others["triton"] == "on a CPU the Triton kernels are interpreted, slowly: they run when named"
    assert gem.explain(gem.gdpa, *tensors, qo, ko, impl="triton").impl == "triton"


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [
        (16, torch.float64, "the Triton kernels take float32, float16 and bfloat16, not float64"),
        (512, torch.float32, "the Triton kernels take head_dim up to 256, not 512"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_all_three(dim, dtype, reason):
    (q, k, v), qo, ko = batch(dim, dtype, q_lens=[3], k_lens=[3])
    for call in (lambda: attention(q, k, v, qo, ko), lambda: gdpa(q, k, v, qo, ko), lambda: blocks(q, k, v, qo)):
        with pytest.raises(ValueError) as caught:
            call()
        assert f"impl='triton' cannot run it: {reason}; can run it: reference, torch" in str(caught.value)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_queries_without_keys_are_0_and_send_nothing_back(mask):
    (q, k, v), qo, ko = batch(q_lens=[40, 5], k_lens=[0, 2])
    out, dq, dk, dv = run(lambda *x: attention(*x, qo, ko, **MASKS[mask]), (q, k, v))
    blind = 40 if mask == "full" else 43
    assert (out[:blind] == 0).all() and (dq[:blind] == 0).all()
    assert out[blind:45].abs().min() > 0 and dk[:2].abs().max() > 0 and dv[:2].abs().max() > 0
    right = reference.jagged_attention(q, k, v, qo, ko, **MASKS[mask])
    torch.testing.assert_close(out.double(), right, atol=2e-6, rtol=0)


def test_the_log_sum_exp_that_the_backward_reads():
    """In base 2; +inf for queries that see nothing, so that exp2(score - lse) is 0."""
    (q, k, v), qo, ko = batch(q_lens=[40, 5], k_lens=[0, 33])
    for right in (-1, 0):
        _, lse = attention_forward(q, k, v, Batch(qo, ko, q.shape[0], k.shape[0], right=right), qk_scale=0.3)
        assert (lse[:, :40] == torch.inf).all()
        scores = 0.3 * torch.einsum("qhd,khd->hqk", q[40:45].double(), k[:33].double())
        hidden = torch.arange(33)[None] > torch.arange(5)[:, None] + 28 + (0 if right == 0 else 99)
        exact = scores.masked_fill(hidden, -torch.inf).logsumexp(-1) / math.log(2)
        torch.testing.assert_close(lse[:, 40:45].double(), exact, atol=5e-6, rtol=0)


@pytest.mark.parametrize("shape", [(0, 0), (0, 7), (7, 0), (7, 7)])
def test_a_batch_of_no_samples_gives_zeros(shape):
    none = torch.zeros(1, dtype=torch.int64)
    q, (k, v) = torch.ones(shape[0], HEADS, DIM), torch.ones(2, shape[1], HEADS, DIM)
    for call in (
        lambda *x: attention(*x, none, none, bias=gem.PositionBias.clipped(torch.ones(3, 1))),
        lambda *x: gdpa(*x, none, none),
        lambda _, k, v: blocks(k, k, v, none),
        lambda q, k, v: gdpa(q, k, v, None, none, broadcast_q=True),
    ):
        assert all((x == 0).all() for x in run(call, (q, k, v)))
