"""The check: inputs are what the declaration says, the oracle's answer is right, and nothing wrong gets through.

Kinds: helpers that pass NaN; a leak from rows behind the last offset; gradients there; only some samples checked.
"""

import math

import numpy as np
import pytest
import torch

from gem import reference
from gem.data.lengths import Lengths
from gem.harness import check
from gem.harness.check import (
    Answer,
    choose_samples,
    compare,
    make_answer,
    masked_d_out,
    missing_or_recast,
    same_bits,
)
from gem.harness.params import BlockAttentionParams, GdpaParams, JaggedAttentionParams
from gem.harness.subjects import GARBAGE, Subject, build_inputs


def lengths(q, k=None, **given):
    q = np.array(q, dtype=np.int64)
    return Lengths("test", q, q if k is None else np.array(k), "self" if k is None else "cross", **given)


SELF = lengths([5, 0, 9, 3], tail_q=2, tail_k=2)
CROSS = lengths([5, 0, 9, 3], [4, 2, 0, 7], tail_q=1, tail_k=3)
PMA = Lengths("pma", np.array([4, 4, 4]), np.array([6, 0, 3]), "pma", 4)


# ---- inputs


@pytest.mark.parametrize(
    ("layout", "strides"), [("packed", (32, 16, 1)), ("fused_qkv", (96, 16, 1)), ("strided", (64, 16, 1))]
)
def test_layouts_have_the_strides_they_stand_for(layout, strides):
    params = JaggedAttentionParams(heads=2, head_dim=16, layout=layout)
    inputs = build_inputs("jagged_attention", params, SELF, "cpu")
    assert all(x.stride() == strides and x.shape == (19, 2, 16) for x in (inputs.q, inputs.k, inputs.v))
    if layout == "fused_qkv":  # slices of one projection
        assert inputs.q.untyped_storage().data_ptr() == inputs.v.untyped_storage().data_ptr()


def test_inputs_are_normal_the_same_everywhere_and_huge_where_nobody_may_read():
    params = JaggedAttentionParams(heads=4, head_dim=64, layout="strided", offsets_dtype="int32")
    big = lengths([300, 200], tail_q=2, tail_k=2)
    first, second = (build_inputs("jagged_attention", params, big, "cpu") for _ in range(2))
    filled = first.q[:500].detach()
    assert abs(float(filled.mean())) < 0.02 and float(filled.std()) == pytest.approx(1.0, abs=0.02)
    assert all(torch.equal(getattr(first, x), getattr(second, x)) for x in ("q", "k", "v", "d_out"))
    other = build_inputs("jagged_attention", params.model_copy(update={"seed": 1}), big, "cpu")
    assert not torch.equal(first.q, other.q)
    assert all(bool((x[500:] == GARBAGE).all()) for x in (first.q, first.k, first.v, first.d_out))
    gaps = first.q.detach().as_strided((502, 4, 64), first.q.stride(), first.q.storage_offset() + 256)
    assert bool((gaps == GARBAGE).all())  # the rows between
    assert first.q_offsets.dtype == torch.int32 and first.q_offsets.tolist() == [0, 300, 500]


def test_shared_queries_are_shared_or_copied():
    shared = build_inputs("gdpa", GdpaParams(heads=2, head_dim=8), PMA, "cpu")
    assert shared.q.shape == (4, 2, 8) and shared.d_out.shape == (12, 2, 8)
    copies = build_inputs("jagged_attention", JaggedAttentionParams(heads=2, head_dim=8), PMA, "cpu")
    assert torch.equal(copies.q[0:4], copies.q[8:12]) and not torch.equal(copies.q[0:4], copies.q[1:5])


# ---- which samples


def test_all_samples_are_checked_while_they_fit():
    assert choose_samples(CROSS, heads=2, scores=2 * (20 + 0 + 0 + 21)) == [0, 1, 2, 3]


def test_a_large_batch_is_checked_on_short_long_and_random_ones():
    drawn = np.random.RandomState(0).randint(2, 400, 500)
    drawn[[7, 11, 13]] = 0, 1, 10_000
    batch = lengths(drawn)
    budget = 2_000_000
    chosen = choose_samples(batch, heads=4, scores=budget)
    assert 7 in chosen and 11 in chosen and 13 not in chosen
    assert max(batch.q[chosen]) == max(n for n in drawn if 4 * n * n <= budget // 2)
    assert (4 * batch.q[chosen] ** 2).sum() <= budget and 10 < len(chosen) <= check.MAX_SAMPLES
    assert chosen == sorted(set(chosen)) == choose_samples(batch, heads=4, scores=budget)


def test_one_sample_is_checked_even_beyond_the_budget():
    assert choose_samples(lengths([5000, 4000]), heads=4, scores=10) == [1]
    assert choose_samples(lengths([]), heads=4, scores=10) == []


# ---- the answer


def softmax_by_hand(q, k, v, scale):
    """[LQ, H, D] by loops over heads and queries, in numpy."""
    out = np.zeros_like(q)
    weights = np.zeros((q.shape[1], q.shape[0], k.shape[0]))
    for h in range(q.shape[1]):
        for i in range(q.shape[0]):
            w = np.exp(scale * (k[:, h] @ q[i, h]))
            weights[h, i] = w / w.sum()
            out[i, h] = weights[h, i] @ v[:, h]
    return out, weights


def test_answer_of_checked_samples_is_right_and_ignores_the_others():
    inputs = build_inputs("jagged_attention", JaggedAttentionParams(heads=2, head_dim=8), SELF, "cpu")
    answer = make_answer(inputs, "same", [0, 2], ["forward", "backward"])
    assert answer.scope() == "checked on 2 of 4 samples"
    expected_out, expected_dv = [], []
    for start, end in ((0, 5), (5, 14)):
        q, k, v, d_out = (x[start:end].detach().double().numpy() for x in (inputs.q, inputs.k, inputs.v, inputs.d_out))
        out, weights = softmax_by_hand(q, k, v, 8**-0.5)
        expected_out.append(out)
        expected_dv.append(np.einsum("hqk,qhd->khd", weights, d_out))
    np.testing.assert_allclose(answer.tensors["out"].numpy(), np.concatenate(expected_out), rtol=0, atol=1e-13)
    np.testing.assert_allclose(answer.tensors["v"].numpy(), np.concatenate(expected_dv), rtol=0, atol=1e-13)
    # The plain run is a float32 one: wrong by roundings, not exact and not garbage.
    assert all(1e-9 < error < 1e-5 for error in answer.plain_error.values())


@pytest.mark.parametrize("bias", ["dense", "dense_broadcast", "position", "time"])
def test_answer_on_some_samples_is_the_oracles_own_on_a_masked_gradient(bias):
    """The answer is made sample by sample; the oracle on the whole batch, told which samples, must say the same."""
    params = JaggedAttentionParams(heads=2, head_dim=8, bias=bias, dtype="float64", causal=True)
    inputs = build_inputs("jagged_attention", params, CROSS, "cpu")
    samples = [0, 1, 3]
    answer = make_answer(inputs, "same", samples, ["forward", "backward"])
    out = reference.jagged_attention(
        inputs.q, inputs.k, inputs.v, inputs.q_offsets, inputs.k_offsets, causal=True, bias=inputs.bias, samples=samples
    )
    grads = torch.autograd.grad(out, list(inputs.leaves.values()), masked_d_out(inputs, samples))
    whole = {"out": out, **dict(zip(inputs.leaves, grads, strict=True))}
    assert set(answer.tensors) == set(whole)
    for name, exact in answer.tensors.items():
        rows = check.rows_of(inputs, name, samples)
        torch.testing.assert_close(exact, whole[name] if rows is None else whole[name][rows], rtol=0, atol=1e-13)
    assert all(error == 0 for error in answer.plain_error.values())  # float64 inputs: the plain run is the oracle


def test_gradient_of_the_output_is_zero_outside_the_checked_samples():
    inputs = build_inputs("jagged_attention", JaggedAttentionParams(heads=2, head_dim=8), SELF, "cpu")
    masked = masked_d_out(inputs, [2])
    assert torch.equal(masked[5:14], inputs.d_out[5:14])
    assert not bool(masked[:5].any()) and not bool(masked[14:17].any())
    assert bool((masked[17:] == GARBAGE).all())


def test_softmax_stand_in_of_gdpa_has_an_answer_of_its_own():
    inputs = build_inputs("gdpa", GdpaParams(heads=2, head_dim=8), PMA, "cpu")
    answer = make_answer(inputs, "softmax", [0, 1, 2], ["forward", "backward"])
    q, k, v = (x.detach().double().numpy() for x in (inputs.q, inputs.k, inputs.v))
    np.testing.assert_allclose(
        answer.tensors["out"][:4].numpy(), softmax_by_hand(q, k[:6], v[:6], 8**-0.5)[0], atol=1e-12
    )
    assert answer.tensors["q"].shape == (4, 2, 8)  # summed over the samples that share them


# ---- the verdict


@pytest.fixture
def case():
    """Inputs, the answer on samples 0 and 2, and what a right contestant would give in float32."""
    inputs = build_inputs("jagged_attention", JaggedAttentionParams(heads=2, head_dim=8, bias="position"), SELF, "cpu")
    answer = make_answer(inputs, "same", [0, 2], ["forward", "backward"])
    subject = Subject(inputs, "torch")
    grads = torch.autograd.grad(subject.forward(), list(subject.leaves.values()), masked_d_out(inputs, [0, 2]))
    with torch.no_grad():
        right = {"out": subject.forward().clone(), **dict(zip(subject.leaves, grads, strict=True))}
    return inputs, answer, right


def problems(case, name, change, **how):
    inputs, answer, right = case
    wrong = {**right, name: right[name].clone()}
    change(wrong[name])
    return compare(wrong, answer, inputs, **how).problems


def test_right_is_right(case):
    inputs, answer, right = case
    verdict = compare(right, answer, inputs)
    assert verdict.right, verdict.problems
    assert 0 < verdict.error <= verdict.allowed < 1e-4 and "checked on 2 of 4 samples" in verdict.reason()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [1, 15], ids=["checked sample", "other sample"])
@pytest.mark.parametrize("name", ["out", "k"])
def test_nan_and_infinity_never_pass(case, name, value, row):
    found = problems(case, name, lambda x: x[row, 0].fill_(value))
    label = "out" if name == "out" else "dk"
    assert f"{label}: 8 of {19 * 2 * 8} values are not finite" in found


@pytest.mark.parametrize("name", ["out", "q", "k", "v", "bias"])
def test_an_error_passes_up_to_the_bound_and_not_beyond(case, name):
    inputs, answer, right = case
    allowed = check._allowed(name, answer, torch.float32)
    rows = check.rows_of(inputs, name, answer.samples)

    def off_by(error):
        x = right[name].double()  # held in float64, so that adding a tiny error is exact
        exact = answer.tensors[name]
        x = exact.clone() if rows is None else x.index_copy(0, rows, exact)
        x.view(-1)[0] += error
        return compare({name: x}, answer, inputs)

    assert off_by(0.99 * allowed).right
    wrong = off_by(1.01 * allowed)
    assert not wrong.right and "above" in wrong.reason() and wrong.error > wrong.allowed


@pytest.mark.parametrize("dtype", check.FLOOR)
def test_a_result_that_is_a_tenth_off_everywhere_is_refused(dtype):
    """Averages over a long history are small: an absolute bound alone lets a tenth of them pass in bfloat16."""
    exact = 0.02 * torch.randn(3000, 2, 16, dtype=torch.float64)
    assert not check._rms(0.9 * exact, exact) <= check._allowed_rms(exact, dtype)
    assert check._rms(exact.to(dtype), exact) <= check._allowed_rms(exact, dtype)


def test_every_gradient_must_be_handed_over_in_its_own_dtype(case):
    inputs, answer, right = case
    gradients = {name: x for name, x in right.items() if name != "out"}
    assert missing_or_recast(gradients, answer, inputs, "backward") == []
    assert missing_or_recast({"out": right["out"]}, answer, inputs, "forward") == []
    lacking = {name: x for name, x in gradients.items() if name != "bias"}
    assert "wanted ['bias', 'k', 'q', 'v']" in missing_or_recast(lacking, answer, inputs, "backward")[0]
    assert missing_or_recast({}, answer, inputs, "forward") != []
    assert missing_or_recast({"out": right["out"].double()}, answer, inputs, "forward") != []


def test_rows_behind_the_last_offset_must_be_zero(case):
    for name in ("out", "q", "k", "v"):
        assert any(
            "behind the last offset" in text for text in problems(case, name, lambda x: x[18, 0, 0].fill_(1e-30))
        )


def test_gradients_of_samples_without_output_gradient_must_be_zero(case):
    assert any("output gradient is 0" in text for text in problems(case, "k", lambda x: x[15, 0, 0].fill_(1e-30)))
    # Timed results come from the full gradient: other samples may be anything finite there, shared tensors too.
    assert problems(case, "k", lambda x: x[15, 0, 0].fill_(3.0), timed=True) == []
    assert problems(case, "bias", lambda x: x.fill_(3.0), timed=True) == []
    assert problems(case, "k", lambda x: x[1, 0, 0].fill_(3.0), timed=True) != []


def test_wrong_shape_is_a_verdict_not_a_crash(case):
    inputs, answer, right = case
    verdict = compare({"bias": right["bias"][:3]}, answer, inputs)
    assert not verdict.right and "shape" in verdict.reason()


def test_a_bad_plain_run_widens_nothing_beyond_the_absolute_bound():
    """fp16 GDPA overflows in plain PyTorch; 2 x inf must not allow everything."""
    exact = {"out": torch.tensor([100.0, -3.0], dtype=torch.float64)}
    for bad in (math.nan, math.inf, 1e6):
        allowed = check._allowed("out", Answer([0], 1, exact, {"out": bad}), torch.float16)
        assert allowed == pytest.approx(check.BOUND[torch.float16] * 100.0)
    assert check._allowed("out", Answer([0], 1, exact, {"out": 0.0}), torch.float16) == pytest.approx(0.2)
    # The rule itself: twice the plain run's error plus the floor of the dtype.
    assert check._allowed("out", Answer([0], 1, exact, {"out": 0.3}), torch.float16) == pytest.approx(0.6 + 0.2)


def test_same_bits_sees_the_last_bit_and_the_sign_of_zero():
    one = {"x": torch.tensor([1.0, math.nan, 0.0])}
    assert same_bits(one, {"x": one["x"].clone()}) == []
    assert same_bits(one, {"x": torch.nextafter(one["x"], torch.tensor(2.0))}) == ["x"]
    assert same_bits(one, {"x": torch.tensor([1.0, math.nan, -0.0])}) == ["x"]
    half = torch.randn(3, 5, dtype=torch.bfloat16).t()
    assert same_bits({"x": half}, {"x": half.contiguous()}) == []


@pytest.mark.parametrize(
    ("subject", "params", "which"),
    [
        ("jagged_attention", JaggedAttentionParams(heads=2, head_dim=16, bias="time", layout="fused_qkv"), CROSS),
        ("jagged_attention", JaggedAttentionParams(heads=2, head_dim=16, bias="dense", causal=True), CROSS),
        ("jagged_attention", JaggedAttentionParams(heads=2, head_dim=16, bias="dense_broadcast", window=(2, 1)), SELF),
        ("gdpa", GdpaParams(heads=2, head_dim=16, activation="silu", out_scale=0.5), PMA),
        ("block_attention", BlockAttentionParams(heads=2, head_dim=16, block=4), SELF),
        ("jagged_attention", JaggedAttentionParams(heads=2, head_dim=16, nested=True), lengths([5, 1, 9], [4, 2, 7])),
        ("gdpa", GdpaParams(heads=2, head_dim=16, nested=True), PMA),
        ("gdpa", GdpaParams(heads=2, head_dim=16, dtype="bfloat16"), SELF),
        ("gdpa", GdpaParams(heads=2, head_dim=16, dtype="float64", layout="strided"), CROSS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gems_own_op_is_right_with_every_kind_of_argument(subject, params, which):
    inputs = build_inputs(subject, params, which, "cpu")
    everyone = list(range(which.batch))
    answer = make_answer(inputs, "same", everyone, ["forward", "backward"])
    assert answer.scope() == ""
    contestant = Subject(inputs, "torch")
    out = contestant.forward()
    grads = torch.autograd.grad(out, list(contestant.leaves.values()), masked_d_out(inputs, everyone))
    found = {"out": out.detach(), **dict(zip(contestant.leaves, grads, strict=True))}
    verdict = compare(found, answer, inputs)
    assert verdict.right, verdict.problems
    # The output is odd in v, the gradients in d_out: what the timed calls rely on.
    with torch.no_grad():
        contestant.negated.neg_()
        torch.testing.assert_close(contestant.forward(), -out.detach(), rtol=0, atol=0)
