"""LARS against apex's LARC around SGD, and what is exempt from adaptation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from zoo.optim.groups import split_one_dimensional
from zoo.optim.lars import LARS

from .cases import case_ids, load


@pytest.mark.parametrize("name", case_ids("larc_"))
def test_parameters_and_momentum_are_the_references(shared: Path, name: str) -> None:
    case = load(shared, name)
    params = {
        key.removeprefix("step0/"): nn.Parameter(value.clone())
        for key, value in case.inputs.items()
        if key.startswith("step0/")
    }
    optimizer = LARS(
        params.values(),
        lr=0.0,
        momentum=case.args["momentum"],
        weight_decay=case.args["weight_decay"],
        trust=case.args["trust_coefficient"],
        eps=case.args["eps"],
    )
    checked: set[str] = set()
    for step, lr in enumerate(case.args["lr_per_step"], start=1):
        optimizer.param_groups[0]["lr"] = lr
        for key, param in params.items():
            param.grad = case.inputs.get(f"grad{step}/{key}")
        optimizer.step()
        got = {f"step{step}/{key}": param for key, param in params.items()}
        for key, param in params.items():
            assert (param in optimizer.state) == (param.grad is not None), key
            if param in optimizer.state:
                got[f"momentum{step}/{key}"] = optimizer.state[param]["momentum_buffer"]
        for output in got.keys() & case.outputs.keys():  # not every step's momentum is published
            case.check(output, got[output])
            checked.add(output)
    assert checked == case.outputs.keys()


def test_without_a_gradient_nothing_moves() -> None:
    """Not even by the momentum of earlier steps."""
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([param], lr=1.0, weight_decay=0.1)
    param.grad = torch.ones(2, 2)
    optimizer.step()
    value = param.detach().clone()
    momentum = optimizer.state[param]["momentum_buffer"].clone()
    assert momentum.all()
    param.grad = None
    optimizer.step()
    assert torch.equal(param, value)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], momentum)


def test_gradients_are_left_as_they_were() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = torch.full((2, 2), 3.0)
    LARS([param], lr=1.0, weight_decay=0.1).step()
    assert torch.equal(param.grad, torch.full((2, 2), 3.0))


def test_exempt_parameters_are_plain_sgd_without_decay() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1, bias=False)).double()
    start = {key: value.detach().clone() for key, value in net.named_parameters()}
    groups = split_one_dimensional(net.named_parameters())
    assert [p.ndim for p in groups[0]["params"]] == [4, 4]
    assert [p.ndim for p in groups[1]["params"]] == [1, 1, 1]

    settings = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = LARS(groups, trust=0.02, **settings)
    alone = {key: nn.Parameter(value.clone()) for key, value in start.items()}
    one_dimensional = [p for p in alone.values() if p.ndim == 1]
    adapted = [p for p in alone.values() if p.ndim > 1]
    expected = (
        torch.optim.SGD(one_dimensional, lr=0.5, momentum=0.9, weight_decay=0.0),
        LARS(adapted, trust=0.02, **settings),
    )
    for _ in range(3):
        for key, param in net.named_parameters():
            param.grad = torch.randn_like(param)
            alone[key].grad = param.grad.clone()
        for each in (optimizer, *expected):
            each.step()
    for key, param in net.named_parameters():
        torch.testing.assert_close(param, alone[key], rtol=1e-12, atol=0)
        assert not torch.equal(param, start[key])


def test_groups_of_a_kind_that_is_missing() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    assert split_one_dimensional([("weight", weight)]) == [{"params": [weight]}]
    (group,) = split_one_dimensional([("bias", bias)])
    assert group["weight_decay"] == 0.0
    assert group["adapt"] is False
