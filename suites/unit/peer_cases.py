"""Small cases that peers are tried on, and the verdict on one of them, for the tests of the peers."""

from typing import Any

import numpy as np
import torch

from gem.data.lengths import Lengths
from gem.harness.check import Verdict, compare, make_answer, masked_d_out
from gem.harness.params import BlockAttentionParams, GdpaParams, JaggedAttentionParams
from gem.harness.peers import Contestant
from gem.harness.subjects import Inputs

SMALL: dict[str, Any] = {"heads": 2, "head_dim": 16}


def lengths(q, k=None, **given) -> Lengths:
    """Self attention on lengths ``q``, or cross attention with ``k`` keys."""
    q = np.array(q, dtype=np.int64)
    return Lengths("test", q, q if k is None else np.array(k), "self" if k is None else "cross", **given)


SELF = lengths([5, 0, 70, 33], tail_q=3, tail_k=3)
CROSS = lengths([5, 0, 70, 33, 6], [0, 3, 20, 50, 6], tail_q=1, tail_k=2)
PMA = Lengths("pma", np.array([4, 4, 4]), np.array([6, 0, 31]), "pma", 4)
CASES = {
    "self": ("jagged_attention", JaggedAttentionParams(**SMALL, scale=0.1), SELF),
    "strided": ("jagged_attention", JaggedAttentionParams(**SMALL, layout="strided"), SELF),
    "causal": ("jagged_attention", JaggedAttentionParams(**SMALL, causal=True), SELF),
    "cross": ("jagged_attention", JaggedAttentionParams(**SMALL), CROSS),
    "cross_causal": ("jagged_attention", JaggedAttentionParams(**SMALL, causal=True), CROSS),
    # Queries that see no key in the sample whose keys are the longest: there is no padding to look at.
    "blind": ("jagged_attention", JaggedAttentionParams(**SMALL, causal=True), lengths([9, 4], [5, 3])),
    "cross_window": ("jagged_attention", JaggedAttentionParams(**SMALL, window=(16, 4)), CROSS),
    "dense_bias": ("jagged_attention", JaggedAttentionParams(**SMALL, bias="dense", causal=True), CROSS),
    "position_bias": ("jagged_attention", JaggedAttentionParams(**SMALL, bias="position"), SELF),
    "pma": ("jagged_attention", JaggedAttentionParams(**SMALL), PMA),
    "gdpa": ("gdpa", GdpaParams(**SMALL, activation="silu", qk_scale=0.25, out_scale=0.5), SELF),
    "gdpa_window": ("gdpa", GdpaParams(**SMALL, window=(16, 4)), CROSS),
    "gdpa_pma": ("gdpa", GdpaParams(**SMALL), PMA),
    "block": ("block_attention", BlockAttentionParams(**SMALL, block=32), SELF),
    "block_no_rope": ("block_attention", BlockAttentionParams(**SMALL, block=8, rope=False, scale=0.3), SELF),
    "empty": ("jagged_attention", JaggedAttentionParams(**SMALL), lengths([0, 0])),
}


def verdict_of(contestant: Contestant, inputs: Inputs, directions=("forward", "backward")) -> Verdict:
    """Its output and gradients against the oracle of what it computes; also that its output is odd in ``negated``."""
    everyone = list(range(inputs.lengths.batch))
    answer = make_answer(inputs, contestant.computes, everyone, list(directions))
    with torch.set_grad_enabled("backward" in directions):
        out = contestant.forward()
    found = {"out": contestant.rows("out", out.detach())}
    if "backward" in directions:
        d_out = contestant.gradient_in(masked_d_out(inputs, everyone))
        grads = torch.autograd.grad(out, list(contestant.leaves.values()), d_out)
        pairs = zip(contestant.leaves, grads, strict=True)
        found |= {name: contestant.rows(name, grad) for name, grad in pairs}
    assert set(found) == set(answer.tensors)
    verdict = compare(found, answer, inputs)
    with torch.no_grad():  # what the timed calls rely on
        contestant.negated.neg_()
        torch.testing.assert_close(contestant.rows("out", contestant.forward()), -found["out"], equal_nan=True)
    return verdict
