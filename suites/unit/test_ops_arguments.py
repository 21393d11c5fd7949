"""Bad arguments of the public ops: a ValueError that names the argument, what it was and what is accepted."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Calls unpack tuples of tensors; their lengths are not in the types.

import logging

import pytest
import torch
from attention_laws import offsets, rows

import gem

QO, KO = offsets([3, 0, 5]), offsets([4, 2, 1])


def tensors(**changes):
    found = {"q": rows(8, 2, 16, torch.float32, 0), "k": rows(7, 2, 16, torch.float32, 1)}
    found["v"] = rows(7, 2, 16, torch.float32, 2)
    found.update(changes)
    return found


BOTH = {"q_offsets": QO, "k_offsets": KO}
TENSORS = tensors()

ATTENTION_ERRORS = {
    "q not 3-D": ({"q": TENSORS["q"][0]}, BOTH, r"q must be \[total, heads, head_dim\], got shape \(2, 16\)"),
    "q not a tensor": ({"q": [1.0]}, BOTH, "q must be a tensor, got list"),
    "integer values": ({"q": TENSORS["q"].long()}, BOTH, "q is torch.int64; accepted are torch.float64"),
    "sparse": ({"q": TENSORS["q"].to_sparse()}, BOTH, "q has layout torch.sparse_coo; accepted: torch.strided"),
    "mixed dtypes": ({"q": TENSORS["q"].double()}, BOTH, "one dtype, got torch.float64, torch.float32"),
    "k and v differ": ({"v": TENSORS["v"][:5]}, BOTH, r"one shape, got \(7, 2, 16\) and \(5, 2, 16\)"),
    "heads differ": ({"q": TENSORS["q"][:, :1]}, BOTH, r"heads and head_dim, got \(1, 16\) and \(2, 16\)"),
    "no heads": ({n: x[:, :0] for n, x in TENSORS.items()}, BOTH, "at least 1"),
    "other device": ({"q": TENSORS["q"].to("meta")}, BOTH, "one device, got meta, cpu"),
    "no offsets": ({}, {}, "q_offsets is missing"),
    "float offsets": ({}, {"q_offsets": QO.float(), "k_offsets": KO}, "q_offsets is torch.float32; accepted"),
    "2-D offsets": (
        {},
        {"q_offsets": QO[None], "k_offsets": KO},
        r"q_offsets must be \[batch \+ 1\], got shape \(1, 4\)",
    ),
    "offsets list": ({}, {"q_offsets": QO, "k_offsets": [0, 1]}, "k_offsets must be an int32 or int64 tensor"),
    "batches differ": ({}, {"q_offsets": QO, "k_offsets": KO[:3]}, "one batch, got 3 and 2 samples"),
    "offsets start": ({}, {"q_offsets": QO + 1, "k_offsets": KO}, r"q_offsets\[0\] must be 0, got 1"),
    "decreasing": (
        {},
        {"q_offsets": torch.tensor([0, 5, 3, 8]), "k_offsets": KO},
        r"q_offsets\[1\] = 5 > q_offsets\[2\] = 3",
    ),
    "garbage offsets": (
        {},
        {"q_offsets": QO, "k_offsets": KO * 1_000_003},
        r"k_offsets has 7000021 \(last: 7000021\), .* only 7 rows",
    ),
    "past the end": (
        {},
        {"q_offsets": offsets([3, 0, 6]), "k_offsets": KO},
        r"q_offsets has 9 \(last: 9\), .* only 8 rows",
    ),
    "long sample": ({}, {**BOTH, "max_q_len": 4}, "sample 2 has 5 rows in q_offsets, more than max_q_len = 4"),
    "long history": ({}, {**BOTH, "max_k_len": 3}, "sample 0 has 4 rows in k_offsets, more than max_k_len = 3"),
    "max length": ({}, {**BOTH, "max_q_len": -2}, "max_q_len must be a whole number >= 0 or None, got -2"),
    "causal": ({}, {**BOTH, "causal": "yes"}, "causal must be True or False, got 'yes'"),
    "huge window": ({}, {**BOTH, "window": (2**63 - 1, -1)}, "window sides must be whole numbers"),
    "no number": ({}, {**BOTH, "window": ("a", 0)}, "window sides must be whole numbers"),
    "float length": ({}, {**BOTH, "max_q_len": 10.0}, "max_q_len must be a whole number"),
    "wrapping offsets": (
        {},
        {"q_offsets": torch.tensor([0, 2**63 - 1, -(2**63), 8]), "k_offsets": KO},
        "there are only 8 rows",
    ),
    "check": ({}, {**BOTH, "check": None}, "check must be True or False, got None"),
    "window size": ({}, {**BOTH, "window": (1,)}, r"window must be \(left, right\)"),
    "window side": ({}, {**BOTH, "window": (-2, 0)}, r"window sides must be whole numbers >= 0 and < 2\*\*31, or -1"),
    "impl": ({}, {**BOTH, "impl": "cuda"}, "impl='cuda'; accepted are 'auto', 'reference', 'torch', 'triton', 'gluon'"),
}


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("case", ATTENTION_ERRORS)
def test_both_attentions_refuse(op, case):
    changes, arguments, message = ATTENTION_ERRORS[case]
    with pytest.raises(ValueError, match=f"^{op}: .*{message}"):
        getattr(gem, op)(**tensors(**changes), **arguments)


TABLE = torch.zeros(5, 2)
ONLY_ERRORS = {
    "scale": ("jagged_attention", {**BOTH, "scale": float("nan")}, "scale must be a finite number, got nan"),
    "bias dims": ("jagged_attention", {**BOTH, "bias": torch.zeros(1, 1, 1, 1, 1)}, "broadcastable to"),
    "bias type": (
        "jagged_attention",
        {**BOTH, "bias": 3.0},
        "bias must be a tensor, PositionBias or TimeBias, got float",
    ),
    "bias int": ("jagged_attention", {**BOTH, "bias": torch.zeros(1, 1).long()}, "must be a floating tensor"),
    "bias batch": (
        "jagged_attention",
        {**BOTH, "bias": torch.zeros(2, 1, 5, 4)},
        "bias has 2 for batch; accepted are 1 and 3",
    ),
    "bias heads": (
        "jagged_attention",
        {**BOTH, "bias": torch.zeros(3, 5, 4)},
        "bias has 3 for heads; accepted are 1 and 2",
    ),
    "bias short": (
        "jagged_attention",
        {**BOTH, "bias": torch.zeros(4, 4)},
        "sample 2 has 5 rows in q_offsets, more than max_q_len = 4",
    ),
    "bias max": (
        "jagged_attention",
        {**BOTH, "bias": torch.zeros(4, 4), "max_q_len": 5},
        "bias has 4 for max_q_len; accepted are 1 and 5",
    ),
    "table heads": (
        "jagged_attention",
        {**BOTH, "bias": gem.PositionBias.clipped(torch.zeros(5, 3))},
        "bias table has 3 heads; accepted are 1 and 2",
    ),
    "times": (
        "jagged_attention",
        {**BOTH, "bias": gem.TimeBias.log2(TABLE, torch.zeros(8).long(), torch.zeros(6).long())},
        "k_times must hold one time a row, 7; got 6",
    ),
    "no such kernel": (
        "jagged_attention",
        {**BOTH, "impl": "gluon"},
        "impl='gluon' cannot run it: the Gluon kernels are for NVIDIA GPUs .* can run it: reference, torch",
    ),
    "no Hopper": (
        "gdpa",
        {**BOTH, "impl": "gluon"},
        r"impl='gluon' cannot run it: .* \(Hopper\), not for cpu; can run it: reference, torch",
    ),
    "activation": ("gdpa", {**BOTH, "activation": "swish"}, "activation='swish'; accepted are gelu, gelu_tanh"),
    "qk_scale": ("gdpa", {**BOTH, "qk_scale": "1"}, "qk_scale must be a finite number, got '1'"),
    "out_scale": ("gdpa", {**BOTH, "out_scale": float("inf")}, "out_scale must be a finite number, got inf"),
    "both offsets": ("gdpa", {**BOTH, "broadcast_q": True}, "pass q_offsets=None beside k_offsets"),
    "shared queries": (
        "gdpa",
        {"k_offsets": KO, "broadcast_q": True, "max_q_len": 4},
        "8 shared queries, more than max_q_len = 4",
    ),
}


@pytest.mark.parametrize("case", ONLY_ERRORS)
def test_one_attention_refuses(case):
    op, arguments, message = ONLY_ERRORS[case]
    with pytest.raises(ValueError, match=f"^{op}: .*{message}"):
        getattr(gem, op)(**tensors(), **arguments)


ROPE = (torch.zeros(5, 8), torch.zeros(5, 8))
BLOCK_ERRORS = {
    "offsets": ({}, "offsets is missing"),
    "block": ({"offsets": QO, "block": 0}, "block must be a whole number >= 1, got 0"),
    "block type": ({"offsets": QO, "block": "64"}, "block must be a whole number >= 1, got '64'"),
    "rope dtype": ({"offsets": QO, "rope": (torch.zeros(5, 8).long(),) * 2}, "cos must be a floating tensor"),
    "huge block": ({"offsets": QO, "block": 2**63 - 1}, "block must be a whole number >= 1"),
    "rope type": ({"offsets": QO, "rope": torch.zeros(5, 8)}, r"rope must be \(cos, sin\), got Tensor"),
    "rope width": ({"offsets": QO, "rope": (torch.zeros(5, 16),) * 2}, r"cos must be \[max_len, 8\], got \(5, 16\)"),
    "rope rows": (
        {"offsets": QO, "rope": (ROPE[0][:4], ROPE[1][:4])},
        "sample 2 has 5 rows in offsets, more than the rows of rope = 4",
    ),
    "rope pair": ({"offsets": QO, "rope": (ROPE[0], ROPE[1][:3])}, r"cos and sin differ: \(5, 8\) and \(3, 8\)"),
    "rope grad": ({"offsets": QO, "rope": (torch.zeros(5, 8, requires_grad=True), ROPE[1])}, "gets no gradient"),
    "max_len": ({"offsets": QO, "max_len": 4}, "sample 2 has 5 rows in offsets, more than max_len = 4"),
    "decreasing": ({"offsets": torch.tensor([0, 5, 3, 8])}, r"offsets must not decrease"),
}


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("case", BLOCK_ERRORS)
def test_block_attention_refuses(case, impl):
    arguments, message = BLOCK_ERRORS[case]
    q = rows(8, 2, 16, torch.float32, 0)
    with pytest.raises(ValueError, match=f"^block_attention: .*{message}"):
        gem.block_attention(q, q, q, **arguments, impl=impl)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gem.PositionBias(torch.zeros(5, 2), torch.arange(5)), "5 buckets need 4 boundaries, got 5"),
        (lambda: gem.PositionBias(torch.zeros(5), torch.arange(4)), r"table must be \[buckets, heads or 1\]"),
        (lambda: gem.PositionBias(torch.zeros(5, 2), torch.zeros(4)), "boundaries must be a 1-D int32 or int64"),
        (lambda: gem.PositionBias(torch.zeros(4, 2), torch.tensor([3, -2, 1])), "boundaries must ascend"),
        (lambda: gem.PositionBias(torch.zeros(4, 2).long(), torch.arange(3)), "table must be floating"),
        (lambda: gem.PositionBias.clipped(torch.zeros(4, 2)), "odd number of rows"),
        (lambda: gem.TimeBias.log2(torch.zeros(65, 2), QO, QO), "1 to 64 rows"),
        (lambda: gem.TimeBias.log2(TABLE, QO.float(), QO), "q_times must be a 1-D int32 or int64"),
    ],
)
def test_bias_tables_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_explain_says_what_runs_and_why_not_the_others(caplog):
    q, k, v = tensors().values()
    choice = gem.explain(gem.gdpa, q, k, v, QO, KO, activation="silu")
    assert choice.impl == "torch"
    assert set(choice.others) == {"reference", "gluon", "triton"}
    assert "impl='torch'" in str(choice) and "not gluon: " in str(choice)
    assert gem.explain("gdpa", q, k, v, QO, KO, impl="reference").why == "named by the caller"
    with pytest.raises(ValueError, match="activation='x'"):
        gem.explain("gdpa", q, k, v, QO, KO, activation="x")
    with pytest.raises(ValueError, match="accepted are jagged_attention, gdpa, block_attention"):
        gem.explain("attention", q, k, v, QO, KO)
    with caplog.at_level(logging.DEBUG, logger="gem"):
        gem.gdpa(q, k, v, QO, KO)
    assert "impl='torch'" in caplog.text


def test_reference_runs_when_named_and_differentiates():
    q, k, v = (x.requires_grad_() for x in tensors().values())
    out = gem.jagged_attention(q, k, v, QO, KO, causal=True, impl="reference")
    other = gem.jagged_attention(q, k, v, QO, KO, causal=True, impl="torch")
    torch.testing.assert_close(out, other, atol=2e-6, rtol=0)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, other)), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
