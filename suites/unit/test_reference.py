"""The oracle itself against sources that share no code with it: loops over scalars, SDPA, complex numbers."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Calls unpack tuples of tensors; their lengths are not in the types.

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gem import reference
from gem.bias import PositionBias, TimeBias

Q_LENS, K_LENS = (3, 0, 7, 4), (5, 4, 2, 0)
MASKS = [
    {},
    {"causal": True},
    {"window": (2, -1)},
    {"window": (-1, 1)},
    {"window": (1, 2)},
    {"causal": True, "window": (1, 5)},
]


def offsets(lens) -> torch.Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(lens)]))


def inputs(seed: int = 0, heads: int = 2, dim: int = 4):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(Q_LENS) + 2, heads, dim, generator=g, dtype=torch.float64)
    k = torch.randn(sum(K_LENS) + 1, heads, dim, generator=g, dtype=torch.float64)
    v = torch.randn(k.shape, generator=g, dtype=torch.float64)
    return q, k, v, offsets(Q_LENS), offsets(K_LENS)


def sees(i: int, j: int, q_len: int, k_len: int, causal: bool = False, window=(-1, -1)) -> bool:
    """FlashAttention's rule, spelt out: query i stands at key i + k_len - q_len."""
    at = i + k_len - q_len
    if causal and j > at:
        return False
    if window[0] >= 0 and j < at - window[0]:
        return False
    return not (window[1] >= 0 and j > at + window[1])


def by_loops(q, k, v, weigh, mask, normalise: bool) -> torch.Tensor:
    """Every pair as Python floats."""
    out = torch.zeros_like(q)
    q0 = k0 = 0
    for b, (lq, lk) in enumerate(zip(Q_LENS, K_LENS, strict=True)):
        for h in range(q.shape[1]):
            for i in range(lq):
                pairs = []
                for j in range(lk):
                    if sees(i, j, lq, lk, **mask):
                        s = sum(float(x) * float(y) for x, y in zip(q[q0 + i, h], k[k0 + j, h], strict=True))
                        pairs.append((weigh(s, b, h, i, j), v[k0 + j, h]))
                total = sum(w for w, _ in pairs) if normalise else 1.0
                for w, row in pairs:
                    out[q0 + i, h] += w / total * row
        q0, k0 = q0 + lq, k0 + lk
    return out


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_softmax_attention_is_the_sum_over_pairs(mask):
    q, k, v, qo, ko = inputs()
    expected = by_loops(q, k, v, lambda s, *_: math.exp(0.5 * s), mask, normalise=True)
    torch.testing.assert_close(reference.jagged_attention(q, k, v, qo, ko, scale=0.5, **mask), expected)


ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "relu_squared": lambda x: max(x, 0.0) ** 2,
    "identity": lambda x: x,
    # x Phi(x) with Phi's own series 1/2 + phi(0) (x - x^3/6 + x^5/40): the 6th-order Taylor polynomial.
    "gelu_taylor": lambda x: x * (0.5 + (x - x**3 / 6 + x**5 / 40) / math.sqrt(2 * math.pi)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mask", [MASKS[0], MASKS[-1]], ids=str)
def test_gdpa_is_the_sum_over_pairs(activation, mask):
    q, k, v, qo, ko = inputs()
    act = ACTIVATIONS[activation]
    expected = -2.0 * by_loops(q, k, v, lambda s, *_: act(0.3 * s), mask, normalise=False)
    got = reference.gdpa(q, k, v, qo, ko, activation=activation, qk_scale=0.3, out_scale=-2.0, **mask)
    torch.testing.assert_close(got, expected)


def test_taylor_is_close_to_gelu_where_qk_norm_keeps_scores():
    """The remainder of the alternating series at |x| <= 1 is below its next term, x^8 / (336 sqrt(2 pi))."""
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    taylor, exact = (ACTIVATIONS["gelu_taylor"], ACTIVATIONS["gelu"])
    worst = max(abs(taylor(float(t)) - exact(float(t))) for t in x)
    assert 0 < worst <= 1 / (336 * math.sqrt(2 * math.pi))


def test_matches_sdpa_on_equal_lengths():
    q, k, v = (torch.randn(12, 2, 8, dtype=torch.float64) for _ in range(3))
    got = reference.jagged_attention(q, k, v, torch.tensor([0, 6, 12]), causal=True)
    heads_first = (x.view(2, 6, 2, 8).transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2).reshape(12, 2, 8)
    torch.testing.assert_close(got, expected)


def test_biases_are_added_to_the_scores():
    q, k, v, qo, ko = inputs()
    dense = torch.randn(4, 2, 7, 5, dtype=torch.float64)
    expected = by_loops(q, k, v, lambda s, b, h, i, j: math.exp(0.5 * s + float(dense[b, h, i, j])), {}, True)
    torch.testing.assert_close(reference.jagged_attention(q, k, v, qo, ko, scale=0.5, bias=dense), expected)

    table = torch.randn(5, 2, dtype=torch.float64)

    def by_distance(s, b, h, i, j):
        distance = min(2, max(-2, i + K_LENS[b] - Q_LENS[b] - j))
        return math.exp(0.5 * s + float(table[distance + 2, h]))

    got = reference.jagged_attention(q, k, v, qo, ko, scale=0.5, bias=PositionBias.clipped(table))
    torch.testing.assert_close(got, by_loops(q, k, v, by_distance, {}, True))

    q_times, k_times = torch.randint(0, 40, (q.shape[0],)), torch.randint(0, 40, (k.shape[0],))

    def by_time(s, b, h, i, j):
        dt = int(q_times[int(qo[b]) + i] - k_times[int(ko[b]) + j])
        bucket = 0 if dt < 1 else min(4, int(math.log2(dt)) + 1)  # below 1, 2, 4, 8, and the rest
        return math.exp(0.5 * s + float(table[bucket, h]))

    got = reference.jagged_attention(q, k, v, qo, ko, scale=0.5, bias=TimeBias.log2(table, q_times, k_times))
    torch.testing.assert_close(got, by_loops(q, k, v, by_time, {}, True))


def test_rotation_is_complex_multiplication_and_keeps_relative_positions():
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    angle = torch.rand(9, 4, dtype=torch.float64) * 6
    got = reference.rotate(x, angle.cos(), angle.sin())
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)[:5, None]
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1))
    # With angle = position * frequency, q_i . k_j depends on i - j alone.
    frequency = torch.rand(4, dtype=torch.float64)
    angle = torch.arange(9)[:, None] * frequency
    q = reference.rotate(x[:1].expand(9, 2, 8), angle.cos(), angle.sin())
    k = reference.rotate(x[1:2].expand(9, 2, 8), angle.cos(), angle.sin())
    scores = torch.einsum("ihd,jhd->hij", q, k)
    torch.testing.assert_close(scores[:, 1:, 1:], scores[:, :-1, :-1])


def test_blocks_attend_inside_themselves_only():
    """A block is a sample of its own once q and k are rotated by their position in the sample."""
    q, k, v = (torch.randn(15, 2, 8, dtype=torch.float64) for _ in range(3))
    angle = torch.rand(10, 4, dtype=torch.float64)
    rope = (angle.cos(), angle.sin())
    got = reference.block_attention(q, k, v, torch.tensor([0, 10, 15]), block=4, rope=rope)
    rq, rk = (torch.cat([reference.rotate(x[:10], *rope), reference.rotate(x[10:], *rope)]) for x in (q, k))
    cuts = torch.tensor([0, 4, 8, 10, 14, 15])
    torch.testing.assert_close(got, reference.jagged_attention(rq, rk, v, cuts))


def test_shared_queries_are_repeated_for_every_sample():
    q, k, v, _, ko = inputs()
    got = reference.gdpa(q[:3], k, v, None, ko, broadcast_q=True, activation="silu")
    repeated = reference.gdpa(q[:3].repeat(4, 1, 1), k, v, torch.arange(5) * 3, ko, activation="silu")
    assert got.shape == (12, 2, 4)
    torch.testing.assert_close(got, repeated)


def test_a_query_without_keys_gives_zero_and_zero_gradient():
    q, k, v, qo, ko = (x.requires_grad_() if x.is_floating_point() else x for x in inputs())
    bias = torch.zeros(4, 1, 7, 5, dtype=torch.float64)
    bias[0, :, 1] = -torch.inf  # hides a whole row
    out = reference.jagged_attention(q, k, v, qo, ko, causal=True, bias=bias)
    assert (out[1] == 0).all() and (out[10:] == 0).all()  # the hidden row; sample 3 has no keys; then the tail
    assert (out[3:8] == 0).all()  # 7 queries on 2 keys: the first five stand before the first key
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][1] == 0).all() and (grads[1][-1] == 0).all()


def test_samples_restricts_the_work_and_nothing_else():
    q, k, v, qo, ko = inputs()
    whole = reference.jagged_attention(q, k, v, qo, ko)
    part = reference.jagged_attention(q, k, v, qo, ko, samples=[2])
    torch.testing.assert_close(part[3:10], whole[3:10])
    assert (part[:3] == 0).all() and (part[10:] == 0).all()
