"""What the kernels of impl="triton" compute, run by Triton's interpreter on the CPU, against the float64 oracle."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Calls unpack tuples of tensors; their lengths are not in the types.

from itertools import product

import pytest
import torch
from attention_laws import assert_agrees, rows, run
from interpreted import DIM, HEADS, K_LENS, MASKS, attention, batch, blocks, gdpa, quiet

import gem
from gem import reference
from gem.ops import ACTIVATIONS

pytestmark = quiet


@pytest.mark.parametrize("mask", MASKS)
def test_softmax_attention(mask):
    tensors, qo, ko = batch()
    assert_agrees(attention, reference.jagged_attention, tensors, q_offsets=qo, k_offsets=ko, **MASKS[mask])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_gdpa(activation, mask):
    tensors, qo, ko = batch()
    how = {"activation": activation, "qk_scale": 0.1, "out_scale": -2.0, **MASKS[mask]}
    assert_agrees(gdpa, reference.gdpa, tensors, q_offsets=qo, k_offsets=ko, **how)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_gdpa_with_shared_queries(mask):
    (q, k, v), _, ko = batch()
    how = {"broadcast_q": True, "activation": "silu", "qk_scale": 0.3, **MASKS[mask]}
    assert_agrees(gdpa, reference.gdpa, (q[:35], k, v), q_offsets=None, k_offsets=ko, **how)


@pytest.mark.parametrize(
    ("dim", "dtype"), [(24, torch.float32), (80, torch.float16), (256, torch.float32), (1, torch.float16)]
)
def test_head_dims_and_types(dim, dtype):
    tensors, qo, ko = batch(dim, dtype)
    assert_agrees(attention, reference.jagged_attention, tensors, q_offsets=qo, k_offsets=ko, causal=True)
    how = {"activation": "gelu_taylor", "qk_scale": 0.3 * dim**-0.5}
    assert_agrees(gdpa, reference.gdpa, tensors, q_offsets=qo, k_offsets=ko, **how)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1.0])
def test_scales(scale):
    tensors, qo, ko = batch()
    assert_agrees(attention, reference.jagged_attention, tensors, q_offsets=qo, k_offsets=ko, scale=scale)
    assert_agrees(gdpa, reference.gdpa, tensors, q_offsets=qo, k_offsets=ko, qk_scale=0.1 * scale)


@pytest.mark.parametrize(
    ("size", "rope", "dim"), [(1, True, 16), (7, True, 24), (32, False, 16), (64, True, 16), (300, True, 256)]
)
def test_block_attention(size, rope, dim):
    """A block of 300 is longer than every sample and, with 256 columns, fits no tile: the general kernels take it."""
    lens = [2, 0, 3] if size == 1 else K_LENS
    tensors, _, ko = batch(dim, q_lens=lens, k_lens=lens)
    angle = torch.rand(100, dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    how = {"offsets": ko, "block": size, "rope": (angle.cos(), angle.sin()) if rope else None}
    assert_agrees(blocks, reference.block_attention, tensors, **how)


# -- masking by subtraction --------------------------------------------------------------------------------------------

# Keys of a tile behind the end score 0; the samples have one real key in a tile, all but one, a full tile and one more.
FEW_KEYS = [1, 31, 32, 33, 40, 65]


def scores_around(levels: list[float]):
    """q, k, v whose scores (scale 1) in query i of a sample lie around levels[i % len(levels)], within a few units."""
    (q, k, v), qo, ko = batch(q_lens=[2 * len(levels)] * len(FEW_KEYS), k_lens=FEW_KEYS)
    q, k = 0.3 * q, 0.3 * k
    k[..., 0] = 20.0
    q[..., 0] = torch.tensor(levels).repeat(q.shape[0])[: q.shape[0], None] / 20
    return (q, k, v), qo, ko


@pytest.mark.parametrize(
    "levels",
    [[-600.0], [-600.0, 600.0, 0.0], [-8.0, -6.0, -4.0], [-3.0, -2.0, -1.0], [-12.0, 3.0], [-90.0, -120.0], [30.0]],
    ids=lambda levels: "_".join(f"{level:g}" for level in levels),
)
def test_scores_far_from_those_of_the_padding(levels):
    tensors, qo, ko = scores_around(levels)
    got = run(lambda *x: attention(*x, qo, ko, scale=1.0), tensors)
    right = run(lambda *x: reference.jagged_attention(*x, qo, ko, scale=1.0), tensors)
    # A weight is as good as the score in its exponent: a few roundings of the largest, which is level and noise.
    good_to = 4 * 2**-24 * (12 + max(map(abs, levels)))
    for name, x, exact in zip(("out", "dq", "dk", "dv"), got, right, strict=True):
        # Gradients of q and k are sums of terms 20 and 30 times that large, which cancel.
        size = max(1.0 if name in ("out", "dv") else 30.0, float(exact.abs().max()))
        error = float((x - exact).abs().max())
        assert error <= good_to * size, f"{name}: {error:.2e} of values up to {size:.2e}"


def test_a_row_whose_maximum_is_so_far_below_0_that_nothing_of_it_is_left():
    """exp(-20000) is 0 in every format: only the masks of the second walk find the row's own maximum."""
    tensors, qo, ko = scores_around([-20000.0])
    out = attention(*tensors, qo, ko, scale=1.0)
    right = reference.jagged_attention(*tensors, qo, ko, scale=1.0)
    torch.testing.assert_close(out.double(), right, atol=5e-3, rtol=0)  # scores of 20000 are good to 1e-3


@pytest.mark.parametrize("scale", [1e4, 1e8])
def test_no_weight_is_above_1_however_large_the_scores(scale):
    """Scores of 1e9 have an ulp of 64: the backward's are not quite those that the forward summed."""
    tensors, qo, ko = batch(q_lens=[33, 5], k_lens=[40, 20])
    leaves = [x.requires_grad_() for x in tensors]
    out = attention(*leaves, qo, ko, scale=scale)
    _, _, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert out.isfinite().all() and (dv[:40] <= 33).all() and (dv[40:] <= 5).all()


def test_weights_that_float16_does_not_hold_times_a_small_scale():
    """65,504 is its largest number: relu(300)**2 / 1000 fits into it, relu(300)**2 does not."""
    tensors, qo, ko = batch(dtype=torch.float16)
    how = {"activation": "relu_squared", "qk_scale": 60.0, "out_scale": 1e-5, "q_offsets": qo, "k_offsets": ko}
    got = run(lambda *x: gdpa(*x, **how), tensors)
    right = run(lambda *x: reference.gdpa(*x, **how), tensors)
    for x, exact in zip(got, right, strict=True):
        assert exact.isfinite().all()
        torch.testing.assert_close(x.double(), exact.double(), rtol=0, atol=4e-3 * float(exact.abs().max()))


# -- what one sample holds stays in it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "bad"), [("q", torch.nan), ("k", torch.nan), ("k", torch.inf), ("v", torch.nan), ("d_out", torch.nan)]
)
@pytest.mark.parametrize("op", ["softmax", "causal", "gdpa", "block"])
def test_a_poisoned_sample_reaches_no_other(op, where, bad):
    lens = [33, 5, 40, 0, 30]
    (q, k, v), qo, _ = batch(q_lens=lens, k_lens=lens)
    d_out = rows(q.shape[0], HEADS, DIM, torch.float32, 9)
    calls = {
        "softmax": lambda *x: attention(*x, qo, qo),
        "causal": lambda *x: attention(*x, qo, qo, causal=True),
        "gdpa": lambda *x: gdpa(*x, qo, qo, activation="silu", qk_scale=0.2),
        "block": lambda *x: blocks(*x, qo, block=16),
    }

    def results():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = calls[op](*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    clean = results()
    start, end = int(qo[2]), int(qo[3])
    {"q": q, "k": k, "v": v, "d_out": d_out}[where][start:end] = bad
    for x, right in zip(results(), clean, strict=True):
        assert torch.equal(x[:start], right[:start]) and torch.equal(x[end:], right[end:])


@pytest.mark.parametrize("op", ["softmax", "gdpa", "block"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_shows_in_its_own_sample(op, where):
    tensors, qo, _ = batch(q_lens=[20, 40, 9], k_lens=[20, 40, 9])
    calls = {
        "softmax": lambda: attention(*tensors, qo, qo),
        "gdpa": lambda: gdpa(*tensors, qo, qo, activation="gelu", qk_scale=0.2),
        "block": lambda: blocks(*tensors, qo, block=64),
    }
    tensors["qkv".index(where)][25, :, 3] = torch.nan
    out = calls[op]()
    hit = out.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    assert hit == ([25] if where == "q" else list(range(20, 60)))


def test_rows_behind_the_last_offset_are_never_read():
    (q, k, v), qo, ko = batch(q_lens=[5, 33], k_lens=[40, 5])
    calls = [
        lambda *x: attention(*x, qo, ko),
        lambda *x: attention(*x, qo, ko, causal=True, bias=gem.PositionBias.clipped(torch.ones(5, HEADS))),
        lambda *x: gdpa(*x, qo, ko, qk_scale=0.1),
        lambda _, k, v: blocks(k, k, v, ko, block=16),
    ]
    clean = [run(call, (q, k, v)) for call in calls]
    for x, end in ((q, qo[-1]), (k, ko[-1]), (v, ko[-1])):
        x[end:] = torch.nan
    for call, right in zip(calls, clean, strict=True):
        for name, a, b in zip(("out", "dq", "dk", "dv"), run(call, (q, k, v)), right, strict=True):
            assert torch.equal(a, b), name
        assert all((x[end:] == 0).all() for x, end in zip(right[1:], (qo[-1], ko[-1], ko[-1]), strict=True))


@pytest.mark.parametrize("bias", ["none", "dense", "position"])
def test_two_runs_give_the_same_bits(bias):
    (q, k, v), qo, ko = batch(q_lens=[3, 40], k_lens=[35, 20])
    learnt = torch.randn(9, HEADS) if bias == "position" else torch.randn(HEADS, 1, 35)

    def op(q, k, v, x):
        given = {"none": None, "dense": x, "position": gem.PositionBias.clipped(x) if bias == "position" else None}
        return attention(q, k, v, qo, ko, bias=given[bias])

    first, second = run(op, (q, k, v, learnt)), run(op, (q, k, v, learnt))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- biases ------------------------------------------------------------------------------------------------------------


def assert_agrees_with_bias(make, learnt, **how):
    tensors, qo, ko = batch(q_lens=[3, 40, 0, 33], k_lens=[35, 20, 4, 33])

    def op(q, k, v, x):
        return attention(q, k, v, qo, ko, bias=make(x, q, k), **how)

    def oracle(q, k, v, x, compute_dtype=torch.float64):
        bias = make(x, q, k)
        return reference.jagged_attention(q, k, v, qo, ko, bias=bias, compute_dtype=compute_dtype, **how)

    assert_agrees(op, oracle, (*tensors, learnt))


def values(*shape: int):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("broadcast", list(product([False, True], repeat=4)), ids=lambda b: "".join("n1"[x] for x in b))
def test_dense_bias_and_its_gradient(broadcast):
    shape = [1 if one else n for one, n in zip(broadcast, (4, HEADS, 40, 35), strict=True)]
    assert_agrees_with_bias(lambda x, q, k: x, values(*shape), causal=broadcast[0])


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("mask", ["full", "window"])
@pytest.mark.parametrize("kind", ["position", "time"])
def test_bias_tables_and_their_gradients(kind, mask, heads):
    def make(table, q, k):
        if kind == "position":
            return gem.PositionBias.clipped(table)
        times = (torch.randint(0, 60, (x.shape[0],), generator=torch.Generator().manual_seed(6)) for x in (q, k))
        return gem.TimeBias.log2(table, *times)

    assert_agrees_with_bias(make, values({"position": 21, "time": 6}[kind], heads), **MASKS[mask])


def test_a_table_of_one_bucket_changes_nothing_and_learns_nothing():
    """What is added to every score cancels: the gradient is a sum of hundreds of terms that is 0."""
    tensors, qo, ko = batch(q_lens=[3, 40], k_lens=[35, 20])
    table = torch.full((1, HEADS), 2.0)
    nothing = torch.empty(0, dtype=torch.int64)
    with_bias = run(lambda *x: attention(*x[:3], qo, ko, bias=gem.PositionBias(x[3], nothing)), (*tensors, table))
    without = run(lambda *x: attention(*x, qo, ko), tensors)
    for a, b in zip(with_bias, (*without, torch.zeros(1, HEADS)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_a_bias_of_minus_infinity_hides_keys():
    tensors, qo, ko = batch(q_lens=[3, 40], k_lens=[35, 20])
    dense = torch.zeros(2, 1, 40, 35)
    dense[1, :, :, 7:] = -torch.inf
    dense[0, :, 1] = -torch.inf  # this query sees nothing
    out = attention(*tensors, qo, ko, bias=dense)
    right = reference.jagged_attention(*tensors, qo, ko, bias=dense)
    torch.testing.assert_close(out.double(), right, atol=5e-6, rtol=0)


def test_padding_keys_overflow_nothing_in_fp16():
    """All scores far below 0: a key behind the end would have weight 1, times a delta of 360,000, past fp16."""
    q, k, v = (torch.full((1, 1, 16), value, dtype=torch.float16) for value in (-3.0, 3.0, 150.0))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    edges = torch.tensor([0, 1])
    out = attention(*leaves, edges, edges)
    for grad in torch.autograd.grad(out, leaves, torch.full_like(out, 150.0)):
        assert grad.isfinite().all()
