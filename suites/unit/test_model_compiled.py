"""The model with its parts compiled: what it computes eagerly, from one compilation for all lengths."""

import shutil

import pytest
import torch
from model_data import random_samples, small_schema

from gem.model import GemModel, ModelConfig

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile has no C++ compiler here"
)
SIZES = ModelConfig(dim=32, heads=1, layers=2, experts=1, expert_hidden=32, feed_forward=1.0, head_hidden=16)


def gradients(model: GemModel, seed: int, count: int, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Of all parameters, and the loss; samples of unlike lengths, some empty, some of many blocks."""
    lengths = [(37 * i + 11 * seed) % 300 + 60 for i in range(count)]
    lengths[1] = 0
    samples = random_samples(lengths, [(5 * i + seed) % 9 for i in range(count)], seed=seed)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model.losses(samples).mean()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


def test_compiled_parts_compute_what_eager_ones_do_and_are_compiled_once():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GemModel(small_schema(), SIZES)
    batches = [(1, 33), (2, 40), (3, 57)]
    eager = [gradients(model, *batch) for batch in batches]
    model.compile_parts()
    compiled = [gradients(model, *batches[0])]
    with torch.compiler.set_stance("fail_on_recompile"):  # other lengths, other numbers of samples
        compiled += [gradients(model, *batch) for batch in batches[1:]]
    for found, wanted in zip(compiled, eager, strict=True):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            torch.testing.assert_close(found[name], x, rtol=1e-3, atol=2e-5, msg=name)


def test_autocast_does_not_compile_again_for_other_lengths_or_layers():
    """Interactions give fp32 on a GPU, whatever they are given; here they are made to."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GemModel(small_schema(), SIZES)
    model.interactions[0].register_forward_hook(lambda module, given, out: out.float())
    marked: list[set[int]] = []
    for layer in model.tower:
        layer.register_forward_pre_hook(lambda module, given: marked.append(given[2]._dynamo_weak_dynamic_indices))
    model.compile_parts()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    gradients(model, 1, 33, autocast=True)
    # One for the events of each sequence, one for all layers of the tower.
    assert stats["unique_graphs"] - before == len(model.events) + 1
    with torch.compiler.set_stance("fail_on_recompile"):
        gradients(model, 2, 40, autocast=True)
    assert marked == [{0}] * 4  # not in this compilation, but in the next the number of samples would be fixed
