"""impl="torch" against the oracle on random jagged batches: lengths, heads, head sizes, dtypes, strides, masks."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Calls unpack tuples of tensors; their lengths are not in the types.

import pytest
import torch
from attention_laws import assert_agrees, offsets, rows, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gem
from gem import reference
from gem.ops import ACTIVATIONS

PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

length = st.one_of(st.sampled_from([0, 0, 1, 2]), st.integers(0, 40), st.integers(100, 220))
batches = st.lists(st.tuples(length, length), min_size=0, max_size=6)
side = st.one_of(st.just(-1), st.integers(0, 3), st.integers(4, 90))
dtypes = st.sampled_from([torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
head_dims = st.sampled_from([16, 24, 32, 64, 80, 128, 256])
layouts = st.sampled_from(["packed", "strided", "heads_first"])


@st.composite
def jagged_batch(draw, same_lengths: bool = False):
    lens = draw(batches)
    q_lens = [a for a, _ in lens]
    k_lens = q_lens if same_lengths else [b for _, b in lens]
    heads, dim, dtype = draw(st.sampled_from([1, 2, 3])), draw(head_dims), draw(dtypes)
    seed, tail = draw(st.integers(0, 1000)), draw(st.integers(0, 3))
    kinds = draw(st.tuples(layouts, layouts, layouts))
    q = rows(sum(q_lens) + tail, heads, dim, dtype, seed, kinds[0])
    k = rows(sum(k_lens) + tail, heads, dim, dtype, seed + 1, kinds[1])
    v = rows(sum(k_lens) + tail, heads, dim, dtype, seed + 2, kinds[2])
    offset_type = draw(st.sampled_from([torch.int32, torch.int64]))
    return (q, k, v), offsets(q_lens, offset_type), offsets(k_lens, offset_type)


@PROPERTY
@given(jagged_batch(), st.booleans(), st.tuples(side, side), st.sampled_from([None, 0.05, 1.0]))
def test_jagged_attention(batch, causal, window, scale):
    tensors, qo, ko = batch
    how = {"q_offsets": qo, "k_offsets": ko, "causal": causal, "window": window, "scale": scale}
    assert_agrees(gem.jagged_attention, reference.jagged_attention, tensors, **how)


@PROPERTY
@given(jagged_batch(), st.booleans(), st.tuples(side, side), st.sampled_from(ACTIVATIONS), st.sampled_from([1.0, -0.3]))
def test_gdpa(batch, causal, window, activation, out_scale):
    tensors, qo, ko = batch
    scale = 0.5 * tensors[0].shape[2] ** -0.5
    how = {"q_offsets": qo, "k_offsets": ko, "causal": causal, "window": window, "activation": activation}
    assert_agrees(gem.gdpa, reference.gdpa, tensors, qk_scale=scale, out_scale=out_scale, **how)


@PROPERTY
@given(jagged_batch(), st.integers(1, 40), st.booleans(), st.sampled_from(ACTIVATIONS))
def test_gdpa_with_shared_queries(batch, queries, causal, activation):
    (_, k, v), _, ko = batch
    q = rows(queries, k.shape[1], k.shape[2], k.dtype, 99)
    how = {"q_offsets": None, "k_offsets": ko, "broadcast_q": True, "activation": activation, "causal": causal}
    assert_agrees(gem.gdpa, reference.gdpa, (q, k, v), qk_scale=0.5 * q.shape[2] ** -0.5, **how)


@PROPERTY
@given(jagged_batch(same_lengths=True), st.sampled_from([1, 7, 32, 64, 128, 1000]), st.booleans())
def test_block_attention(batch, block, with_rope):
    tensors, qo, _ = batch
    angle = torch.rand(220, tensors[0].shape[2] // 2, generator=torch.Generator().manual_seed(3)) * 6
    how = {"offsets": qo, "block": block, "rope": (angle.cos(), angle.sin()) if with_rope else None}
    assert_agrees(gem.block_attention, reference.block_attention, tensors, **how)


@PROPERTY
@given(jagged_batch(), st.booleans(), st.sampled_from(["full", "per_sample", "per_head", "position", "time", "shared"]))
def test_biases_and_their_gradients(batch, causal, kind):
    (q, k, v), qo, ko = batch
    count, heads = len(qo) - 1, q.shape[1]
    shapes = {
        "full": (count, heads, 220, 220),
        "per_sample": (count, 1, 1, 220),
        "per_head": (heads, 220, 220),
        "position": (21, heads),
        "time": (6, heads),
        "shared": (6, 1),
    }
    g = torch.Generator().manual_seed(5)
    learnt = torch.randn(shapes[kind], generator=g, dtype=torch.float64).to(q.dtype)
    q_times = torch.randint(0, 50, (q.shape[0],), generator=g)
    k_times = torch.randint(0, 50, (k.shape[0],), generator=g)

    def bias(x):
        if kind == "position":
            return gem.PositionBias.clipped(x)
        return gem.TimeBias.log2(x, q_times, k_times) if kind in ("time", "shared") else x

    def op(a, b, c, x):
        return gem.jagged_attention(a, b, c, qo, ko, causal=causal, bias=bias(x))

    def oracle(a, b, c, x, compute_dtype=torch.float64):
        return reference.jagged_attention(a, b, c, qo, ko, causal=causal, bias=bias(x), compute_dtype=compute_dtype)

    assert_agrees(op, oracle, (q, k, v, learnt))


@PROPERTY
@given(jagged_batch(), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(batch, random):
    """Samples are independent: shuffling them shuffles the result and changes nothing else."""
    tensors, qo, ko = batch
    order = list(range(len(qo) - 1))
    random.shuffle(order)

    def shuffled(x, o):
        return torch.cat([x[:0], *(x[o[b] : o[b + 1]] for b in order)])

    q_lens, k_lens = qo.diff().tolist(), ko.diff().tolist()
    q2, k2, v2 = shuffled(tensors[0], qo), shuffled(tensors[1], ko), shuffled(tensors[2], ko)
    new_qo, new_ko = offsets([q_lens[b] for b in order]), offsets([k_lens[b] for b in order])
    whole = gem.jagged_attention(*tensors, qo, ko)
    again = gem.jagged_attention(q2, k2, v2, new_qo, new_ko)
    torch.testing.assert_close(again, shuffled(whole, qo), atol=2e-2 if again.dtype.itemsize < 4 else 1e-5, rtol=0)


@PROPERTY
@given(jagged_batch(), st.booleans())
def test_two_runs_are_bitwise_equal_and_tails_are_zero(batch, causal):
    tensors, qo, ko = batch
    table = torch.randn(9, tensors[0].shape[1], dtype=tensors[0].dtype)

    def op(q, k, v, t):
        return gem.jagged_attention(q, k, v, qo, ko, causal=causal, bias=gem.PositionBias.clipped(t))

    first, second = run(op, (*tensors, table)), run(op, (*tensors, table))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    q_end, k_end = int(qo[-1]), int(ko[-1])
    for x, end in zip(first, (q_end, q_end, k_end, k_end), strict=False):
        assert (x[end:] == 0).all()


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 3e38])
def test_rows_behind_the_last_offset_are_never_read(garbage):
    (q, k, v), qo, ko = [rows(20, 2, 16, torch.float32, s) for s in range(3)], offsets([5, 0, 9]), offsets([4, 7, 6])
    clean = run(lambda *x: gem.jagged_attention(*x, qo, ko, causal=True), (q, k, v))
    for x, end in ((q, 14), (k, 17), (v, 17)):
        x[end:] = garbage
    dirty = run(lambda *x: gem.jagged_attention(*x, qo, ko, causal=True), (q, k, v))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
