"""AdamW for the dense part: what decays, state by name that goes on where it was; the learning rate's schedule."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from gem.errors import RequestError
from gem.train.optimizers import DenseState, dense_optimizer, schedule


def test_adamw_decays_matrices_only():
    linear = nn.Linear(4, 3)
    model = nn.ModuleDict({"linear": linear, "norm": nn.LayerNorm(3)})
    model.register_parameter("pair_bias", Parameter(torch.ones(2, 2)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = dense_optimizer(model.named_parameters(), lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert decayed == {"linear.weight"}
    torch.testing.assert_close(linear.weight.detach(), before["linear.weight"] * (1 - 0.1 * 0.5))


def test_adamw_state_goes_on_where_it_was():
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            optimizer.zero_grad()
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
            optimizer.step()

    first = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    a = dense_optimizer(first.named_parameters(), lr=0.1)
    fresh = DenseState(a).state_dict()  # made before the first step: changes nothing
    assert fresh.keys() == dict(first.named_parameters()).keys()
    untouched = copy.deepcopy(first)
    plain = dense_optimizer(untouched.named_parameters(), lr=0.1)
    steps(first, a, range(3))
    steps(untouched, plain, range(3))
    second = copy.deepcopy(first)
    b = dense_optimizer(second.named_parameters(), lr=0.1)
    DenseState(b).load_state_dict(copy.deepcopy(DenseState(a).state_dict()))
    steps(first, a, range(3, 6))
    steps(second, b, range(3, 6))
    steps(untouched, plain, range(3, 6))
    for x, y, z in zip(first.parameters(), second.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)
    with pytest.raises(RequestError, match="on one side only"):
        DenseState(b).load_state_dict({"other": {}})


def test_schedule_by_hand():
    assert [schedule(i, 3) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = [schedule(i, 2, 6, "cosine", 0.1) for i in range(9)]
    assert cosine[2] == 1.0 and cosine[4] == pytest.approx(0.55) and cosine[6:] == pytest.approx([0.1] * 3)
    assert all(a > b for a, b in itertools.pairwise(cosine[2:7]))
    assert schedule(0, 0) == 1.0
