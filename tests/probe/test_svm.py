"""The SVM solver: LIBLINEAR's machines, whichever way a Newton step is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.svm import LinearSVC

from zoo.errors import InputError
from zoo.probe import newton_steps as newton_steps_module
from zoo.probe.svm import fit_svms, newton_steps, unit_length

COSTS = (0.01, 1.0, 50.0)


def some(count=150, width=12, problems=3, seed=0):
    """Features of unit length, and problems that can't be solved without mistakes."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, width, generator=generator) + 0.5
    plane = torch.randn(problems, width, generator=generator)
    noise = torch.randn(problems, count, generator=generator)
    return unit_length(features), torch.where(plane @ features.T + 2 * noise > 1, 1, -1)


def objective(features, signs, weight, bias, cost, positive, negative):
    slack = (1 - signs * (features @ weight + bias)).clamp_min(0)
    sides = torch.where(signs > 0, positive, negative) * (signs != 0)
    return 0.5 * (weight.square().sum() + bias.square()) + cost * (sides * slack.square()).sum()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 1.0), (0.5, 3.0)])
def test_they_are_liblinears(weights):
    features, signs = some()
    machines = fit_svms(features, signs, COSTS, *weights, tolerance=1e-12)
    for k, cost in enumerate(COSTS):
        for p, row in enumerate(signs):
            sides = {1: weights[0], -1: weights[1]}
            theirs = LinearSVC(
                C=cost, class_weight=sides, dual=True, tol=1e-10, max_iter=10**6, random_state=0
            )
            theirs.fit(features.numpy(), row.numpy())
            np.testing.assert_allclose(machines.weight[k, p], theirs.coef_[0], atol=2e-5, rtol=1e-4)
            assert float(machines.bias[k, p]) == pytest.approx(theirs.intercept_[0], abs=2e-5)
            least = objective(
                features,
                row,
                torch.from_numpy(theirs.coef_[0]),
                torch.from_numpy(theirs.intercept_)[0],
                cost,
                *weights,
            )
            assert float(machines.objective[k, p]) == pytest.approx(float(least), rel=1e-8)
            scores = theirs.decision_function(features.numpy())
            np.testing.assert_allclose(machines.scores(features)[k, p], scores, atol=1e-4)


@pytest.mark.parametrize("cost", [1e-3, 10.0, 1e6])
@pytest.mark.parametrize(("count", "width"), [(150, 12), (30, 60)])
def test_the_gap_is_true(cost, count, width):
    """By automatic differentiation: the objective is 1-strongly convex, so half of |gradient|^2 bounds it."""
    features, signs = some(count, width, 1)
    machines = fit_svms(features, signs, (cost,), 2.0, 1.0)
    weight = machines.weight[0, 0].clone().requires_grad_()
    bias = machines.bias[0, 0].clone().requires_grad_()
    value = objective(features, signs[0], weight, bias, cost, 2.0, 1.0)
    value.backward()
    bound = 0.5 * (weight.grad.square().sum() + bias.grad.square()) / value.detach()
    assert float(machines.gap[0, 0]) == pytest.approx(float(bound), rel=1e-3, abs=1e-12)
    assert float(bound) < 1e-6
    assert float(machines.objective[0, 0]) == pytest.approx(float(value.detach()))


@pytest.mark.parametrize(("count", "width"), [(300, 40), (200, 260)])
@pytest.mark.parametrize("way", ["direct", "conjugate", "learnt", "without_products"])
def test_each_way_to_step_gives_the_same_machines(monkeypatch, count, width, way):
    features, signs = some(count, width)
    few = {"direct": 10**6, "conjugate": 0, "learnt": 20, "without_products": 10**6}[way]
    monkeypatch.setattr(newton_steps_module, "_FEW", few)
    monkeypatch.setattr(newton_steps_module, "_SMALL", 0)
    if way == "without_products":
        monkeypatch.setattr(newton_steps_module, "_GRAM_ROWS", 10)
    if way == "conjugate":
        patient = torch.full((), 10.0**6, dtype=torch.float64)
        monkeypatch.setattr(
            newton_steps_module.NewtonSteps, "_patience", lambda self, curved: patient.expand(len(curved))
        )
        monkeypatch.setattr(newton_steps_module.NewtonSteps, "_direct", None)
    machines = fit_svms(features, signs, COSTS, 2.0, 1.0, tolerance=1e-10)
    assert float(machines.gap.max()) < 1e-10
    for k, cost in enumerate(COSTS):
        theirs = LinearSVC(C=cost, class_weight={1: 2, -1: 1}, tol=1e-9, max_iter=10**6, random_state=0)
        theirs.fit(features.numpy(), signs[1].numpy())
        np.testing.assert_allclose(machines.weight[k, 1], theirs.coef_[0], atol=1e-3, rtol=1e-3)


def test_rows_that_are_not_in_a_problem_change_nothing():
    features, signs = some()
    signs[0, ::3] = 0
    whole = fit_svms(features, signs, COSTS, 2.0, 1.0, tolerance=1e-12)
    inside = signs[0] != 0
    alone = fit_svms(features[inside], signs[:1, inside], COSTS, 2.0, 1.0, tolerance=1e-12)
    torch.testing.assert_close(whole.weight[:, 0], alone.weight[:, 0], atol=1e-5, rtol=1e-5)


def test_costs_keep_their_order_and_may_differ_by_problem():
    features, signs = some()
    rising = fit_svms(features, signs, (0.1, 1.0, 10.0), tolerance=1e-12)
    mixed = fit_svms(features, signs, (10.0, 0.1, 1.0), tolerance=1e-12)
    torch.testing.assert_close(mixed.weight, rising.weight[[2, 0, 1]])
    each = fit_svms(features, signs, torch.tensor([10.0, 0.1, 1.0]), tolerance=1e-12)
    assert each.weight.shape == (1, 3, 12)
    for p, k in enumerate((2, 0, 1)):
        torch.testing.assert_close(each.weight[0, p], rising.weight[k, p], atol=1e-5, rtol=1e-5)


def test_steps_can_be_shared():
    features, signs = some(250, 20)
    steps = newton_steps(features)
    first = fit_svms(features, signs, COSTS, steps=steps)
    again = fit_svms(features, signs, COSTS, steps=steps)
    torch.testing.assert_close(first.objective, again.objective, rtol=1e-6, atol=0)


@pytest.mark.parametrize("what", ["equal", "zero", "one side"])
def test_odd_data_have_machines_too(what):
    features, signs = some(40, 5)
    if what == "equal":
        features[:] = features[0]
    elif what == "zero":
        features[:] = 0
    else:
        signs[:] = 1
    machines = fit_svms(features, signs, COSTS, 2.0, 1.0)
    assert machines.weight.isfinite().all() and float(machines.gap.max()) < 1e-6


def test_unit_length():
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    got = unit_length(rows)
    assert got.dtype == torch.float64
    assert got[0].tolist() == pytest.approx([3 / 5.00001, 4 / 5.00001], rel=1e-12) and got[1].tolist() == [
        0,
        0,
    ]


def test_features_that_are_no_numbers_are_named():
    features, signs = some(10, 3)
    features[7, 1] = torch.nan
    with pytest.raises(InputError, match="image 7"):
        fit_svms(features, signs, COSTS)
