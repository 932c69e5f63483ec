"""LARS, parameter groups and the schedule, by hand-made numbers."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from zoo.optim.groups import split_one_dimensional
from zoo.optim.lars import LARS
from zoo.optim.schedule import WarmupCosine, WarmupSteps


def parameter(*values, grad=None):
    p = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    p.grad = None if grad is None else torch.tensor(grad, dtype=torch.float64)
    return p


def test_two_steps_of_lars_by_hand():
    p = parameter(3.0, 4.0, grad=[0.6, 0.8])  # |p| = 5, |g| = 1
    lars = LARS([p], lr=2.0, momentum=0.9, weight_decay=0.1, trust=0.01, eps=0.0)
    lars.step()
    rate = 0.01 * 5 / (1 + 0.1 * 5)
    first = [rate * (0.6 + 0.3), rate * (0.8 + 0.4)]
    assert p.tolist() == pytest.approx([3 - 2 * first[0], 4 - 2 * first[1]], rel=1e-12)
    before = p.detach().clone()
    p.grad = torch.tensor([0.0, 2.0], dtype=torch.float64)
    lars.param_groups[0]["lr"] = 1.0  # the rate multiplies the buffer, it isn't inside it
    lars.step()
    norm = before.norm().item()
    rate = 0.01 * norm / (2 + 0.1 * norm)
    expected = [
        x - (0.9 * m + rate * (g + 0.1 * x))
        for x, m, g in zip(before.tolist(), first, (0.0, 2.0), strict=True)
    ]
    assert p.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_zero_parameter_takes_the_raw_gradient_without_decay():
    p = parameter(0.0, 0.0, grad=[0.5, -1.0])
    LARS([p], lr=0.1, weight_decay=0.5).step()
    assert p.tolist() == pytest.approx([-0.05, 0.1], rel=1e-12)


def test_a_zero_gradient_decays_nothing():
    p = parameter(1.0, 2.0, grad=[0.0, 0.0])
    LARS([p], lr=0.1, weight_decay=0.5).step()
    assert p.tolist() == [1.0, 2.0]


def test_without_a_gradient_neither_weight_nor_momentum_moves():
    p, other = parameter(1.0, 2.0, grad=[1.0, 1.0]), parameter(1.0, grad=[1.0])
    lars = LARS([p, other], lr=0.1, momentum=0.9)
    lars.step()
    value, buffer = p.detach().clone(), lars.state[p]["momentum_buffer"].clone()
    p.grad = None
    lars.step()
    assert torch.equal(p, value)
    assert torch.equal(lars.state[p]["momentum_buffer"], buffer)
    assert other.item() < 0.9999


def test_an_unadapted_group_is_plain_sgd():
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(5, dtype=torch.float64))
    theirs = nn.Parameter(ours.detach().clone())
    lars = LARS([{"params": [ours], "adapt": False}], lr=0.3, momentum=0.8, weight_decay=0.01)
    sgd = torch.optim.SGD([theirs], lr=0.3, momentum=0.8, weight_decay=0.01)
    for _ in range(4):
        grad = torch.randn(5, dtype=torch.float64)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        lars.step()
        sgd.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_lars_keeps_its_buffers_through_a_state_dict():
    def fresh():
        torch.manual_seed(1)
        p = nn.Parameter(torch.randn(4))
        return p, LARS([p], lr=0.1, weight_decay=1e-3)

    def move(p, lars, seeds):
        for seed in seeds:
            p.grad = torch.randn(4, generator=torch.Generator().manual_seed(seed))
            lars.step()

    p, lars = fresh()
    move(p, lars, [1, 2])
    q, again = fresh()
    with torch.no_grad():
        q.copy_(p)
    again.load_state_dict(copy.deepcopy(lars.state_dict()))  # torch would share the buffers
    move(p, lars, [3, 4])
    move(q, again, [3, 4])
    assert torch.equal(p, q)


def test_one_dimensional_parameters_are_split_off():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    main, small = split_one_dimensional(model.named_parameters())
    assert [tuple(p.shape) for p in main["params"]] == [(4, 3), (2, 4)]
    assert [tuple(p.shape) for p in small["params"]] == [(4,), (4,), (4,)]
    assert small["weight_decay"] == 0.0
    assert small["adapt"] is False
    assert len(split_one_dimensional([("w", nn.Parameter(torch.ones(2, 2)))])) == 1


def test_warmup_and_cosine():
    schedule = WarmupCosine(base=1.0, final=0.1, start=0.2, warmup_steps=5, total_steps=25)
    rates = [schedule.at(step) for step in range(25)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4] == rates[5] == 1.0
    assert rates[15] == pytest.approx(0.55)  # half-way down
    assert rates[24] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 19 / 20)))
    assert rates[24] > 0.1
    assert all(a > b for a, b in itertools.pairwise(rates[5:]))


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_degenerate_warmups(warmup):
    schedule = WarmupCosine(base=1.0, final=0.0, start=0.25, warmup_steps=warmup, total_steps=10)
    rates = [schedule.at(step) for step in range(10)]
    assert all(math.isfinite(rate) and 0 < rate <= 1 for rate in rates)
    assert rates[0] == (1.0 if warmup == 0 else 0.25)
    assert rates[-1] == 1.0 if warmup == 10 else rates[-1] < 0.1


def test_a_warm_up_leads_to_the_rate_that_is_due_at_its_end():
    """The rates of detectron2's scheduler (through fvcore's) for these drops, one of them within the warm-up."""
    schedule = WarmupSteps(
        base=0.02, start=0.00002, warmup_steps=11, drops=(5, 20), factor=0.1, meets_drops=True
    )
    rates = [schedule.at(step) for step in range(22)]
    assert rates[:11] == pytest.approx([0.00002 + step * 0.000198 for step in range(11)])
    assert rates[10:20] == pytest.approx([0.002] * 10)
    assert rates[20:] == pytest.approx([0.0002] * 2)


def test_parameters_of_a_group_do_not_disturb_one_another():
    """One that is zero, one without a slope and ordinary ones together are what each is alone."""
    values = [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [-2.0, 0.5]]
    grads = [[0.6, 0.8], [0.5, -1.0], [0.0, 0.0], [0.0, 0.0], [1e-3, 7.0]]
    together = [parameter(*value, grad=grad) for value, grad in zip(values, grads, strict=True)]
    alone = [parameter(*value, grad=grad) for value, grad in zip(values, grads, strict=True)]
    settings = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.1, "trust": 0.01}
    optimizers = [LARS(together, **settings), *(LARS([p], **settings) for p in alone)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    assert [p.tolist() for p in together] == [p.tolist() for p in alone]
    assert together[2].tolist() == values[2]
    assert together[3].tolist() == values[3]


def test_all_parameters_at_once_are_what_they_are_one_by_one():
    """At once is what devices other than the CPU get."""
    torch.manual_seed(3)
    start = [torch.randn(shape) for shape in ((4, 3), (5,), (2, 3, 3, 3))]
    one_by_one, at_once = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
    lars = LARS(one_by_one, lr=0.3, weight_decay=0.1)
    other = LARS(at_once, lr=0.3, weight_decay=0.1)
    for _ in range(2):
        for p, q in zip(one_by_one, at_once, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        lars.step()
        group = other.param_groups[0]
        with torch.no_grad():
            other._update(group, at_once, other._rates(group, at_once))
    assert all(map(torch.equal, one_by_one, at_once))
    assert not torch.equal(one_by_one[0], start[0])
