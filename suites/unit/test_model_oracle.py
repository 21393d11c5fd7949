"""The model's logits against an independent one in numpy (model_oracle), with every parameter random."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from model_data import random_samples, small_schema
from model_oracle import Oracle
from pydantic import ValidationError

from gem.data.samples import Events, Samples
from gem.data.schema import Schema
from gem.model import GemModel, ModelConfig

# Several blocks and windows, an empty history, an empty audience, both empty; together more events than the longest.
HISTORY, AUDIENCE = [11, 0, 4, 17, 1, 0], [3, 4, 0, 1, 6, 0]
SIZES = dict(
    table_dim=5, dim=8, heads=2, head_dim=6, layers=2, block=4, window=3, pooled=3, expert_hidden=12, rank=4,
    head_hidden=7, times=12,
)  # fmt: skip
INTERACTIONS = ["mlp", "cross", "products", "attention"]
CASES = {
    "all of it": {},
    "window": {"self_attention": "window"},
    "itself alone": {"self_attention": "window", "window": 0},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
    "no keys": {"keys": None},
    "no history": {"keys": None, "history": None},
    "no pooled keys": {"pooled_keys": 0},
    "no feed forward": {"feed_forward": 0.0},
    "nothing asks": {"asking": False},
    "no times": {"times": 0},
    "one expert": {"experts": 1},
    "three experts": {"experts": 3},
    **{f"{kind} alone": {"interactions": [kind]} for kind in INTERACTIONS},
    "other order": {"interactions": INTERACTIONS[::-1]},
    "one layer, one head": {"layers": 1, "heads": 1, "head_dim": 8, "feed_forward": 1.0},
}
# What norms take in, everywhere but behind a weight that they themselves scale.
NORMED = ("tables.", "features.", "floats.2.", ".bias", ".age", ".seeds", ".base", "qkv.", ".q.", "kv.", "ask.")


def schema_of(longest: int) -> Schema:
    """The small schema with no room for a position behind the longest history's last.

    Rotated scores tell differences of positions alone: positions counted through the batch show by this only.
    """
    fields = small_schema().model_dump()
    fields["sequences"][0]["longest"] = longest
    return Schema.model_validate(fields)


def model_of(dtype: torch.dtype, sizes: dict, factor: Callable[[str], float] = lambda name: 1.0) -> GemModel:
    """Every parameter random: gates that start at 0, norms that start at 1. Times ``factor`` of its name."""
    torch.manual_seed(1)
    model = GemModel(schema_of(max(HISTORY)), ModelConfig.model_validate(SIZES | sizes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            matrix = p.dim() == 2 and name.endswith(".weight")
            p.normal_(std=1.5 * p.shape[1] ** -0.5 if matrix else 0.7).mul_(factor(name))
    return model.to(dtype)


def both(model: GemModel, samples: Samples, **options) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Oracle]:
    """Logits of the model, of the oracle, and the oracle."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        logits = model(samples.apply(lambda x: x.to(dtype) if x.is_floating_point() else x))
    oracle = Oracle(model.schema, model.config, {n: p.detach().numpy() for n, p in model.named_parameters()}, **options)
    return {task: x.numpy() for task, x in logits.items()}, oracle.logits(samples), oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_the_oracle(sizes, dtype):
    model = model_of(dtype, sizes)
    found, expected, oracle = both(model, random_samples(HISTORY, AUDIENCE))
    for task, logits in expected.items():
        assert logits.std() > 0.05, "the samples are too alike to tell anything"
        # Also in fp64 logits, rotations' tables and shares are fp32.
        tolerance = 1e-5 if dtype == torch.float32 else 1e-6
        np.testing.assert_allclose(found[task], logits, rtol=tolerance, atol=tolerance)
    left = {name for name, _ in model.named_parameters()} - oracle.read
    # Of features that the history alone has.
    assert left == (set() if model.config.history else {"tables.of_signal", "project.of_signal.weight"})


@pytest.mark.parametrize("self_attention", ["block", "window"])
def test_norms_of_small_tokens(self_attention):
    """Mean squares about as large as what the norms add to them."""
    model = model_of(
        torch.float64, {"self_attention": self_attention}, lambda name: 1e-3 if any(p in name for p in NORMED) else 1.0
    )
    samples = random_samples(HISTORY, AUDIENCE)
    found, expected, oracle = both(model, samples)
    oracle.eps = oracle.head_eps = 1e-9
    for task, other in oracle.logits(samples).items():
        assert np.abs(other - expected[task]).max() > 1e-2, "what is added does not matter"
        np.testing.assert_allclose(found[task], expected[task], rtol=1e-6, atol=1e-6)


def test_ages_at_the_edges_of_buckets():
    """Up to 2^61 seconds, in as many buckets as are accepted."""
    edges = [2**n - 1 - late for n in (0, 1, 2, 3, 10, 33, 60, 61) for late in (0, 1) if 2**n - 1 >= late]
    for times in (1, 2, 3, 12, 62):
        model = model_of(torch.float32, {"times": times})
        samples = random_samples([len(edges)], [3])
        e = samples.sequences["history"]
        latest = 2**61
        sequences = samples.sequences | {
            "history": Events(e.offsets, e.ids, latest - torch.tensor(sorted(edges, reverse=True)))
        }
        samples = Samples(samples.keys, samples.ids, samples.floats, sequences, samples.labels)
        found, expected, _ = both(model, samples)
        for task, logits in expected.items():
            np.testing.assert_allclose(found[task], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("times, accepted", [(63, "less than or equal to 62"), (-1, "greater than or equal to 0")])
def test_buckets_of_ages_have_edges_that_int64_holds(times, accepted):
    with pytest.raises(ValidationError, match=f"times\n.*{accepted}"):
        ModelConfig(times=times)
