"""Mixture features: eq. 6 and 7 written out, and q shown to be the best there is."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from zoo.pretrain.losses.mixture import mixture_cost, responsibilities

KINDS = 3


def scores_of(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -3 * torch.rand(*shape, generator=generator, dtype=torch.float64)


def objective(q: list[float], scores: list[float], alpha: float) -> float:
    """What eq. 6 has for one consequent."""
    entropy = -sum(p * math.log(p) for p in q if p > 0)
    return sum(p * s for p, s in zip(q, scores, strict=True)) + alpha * entropy


@pytest.mark.parametrize(("alpha", "tau"), [(0.5, 2.0), (1.0, 1.0), (0.25, 20.0)])
def test_the_cost_and_its_gradient_are_the_equations(alpha: float, tau: float) -> None:
    scores = scores_of(0, 2, KINDS, 4).requires_grad_()
    loss = mixture_cost(scores, alpha, tau)
    total = 0.0
    gradient = torch.zeros_like(scores)
    for image, place in itertools.product(range(2), range(4)):
        column = scores[image, :, place].tolist()
        weights = [math.exp(tau * value) for value in column]
        q = [weight / sum(weights) for weight in weights]
        total += objective(q, column, alpha) / 8
        gradient[image, :, place] = -torch.tensor(q, dtype=torch.float64) / 8  # q is a constant
    assert loss.item() == pytest.approx(-total, rel=1e-13)
    loss.backward()
    torch.testing.assert_close(scores.grad, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 4.0])
def test_no_other_distribution_does_better_than_q(alpha: float) -> None:
    """tau = 1 / alpha: the whole simplex in steps of a sixtieth, its corners, and the nearest neighbours."""
    column = scores_of(3, KINDS).tolist()
    q = responsibilities(torch.tensor(column, dtype=torch.float64)[None, :, None], 1 / alpha)[
        0, :, 0
    ].tolist()
    assert sum(q) == pytest.approx(1)
    best = objective(q, column, alpha)
    grid = [(i / 60, j / 60, (60 - i - j) / 60) for i in range(61) for j in range(61 - i)]
    assert max(objective(list(other), column, alpha) for other in grid) <= best
    for up, down in itertools.permutations(range(KINDS), 2):
        other = list(q)
        moved = min(1e-4, q[down] / 2)
        other[up] += moved
        other[down] -= moved
        assert objective(other, column, alpha) < best
    # the optimum is alpha times the log-partition, and another temperature misses it
    assert best == pytest.approx(alpha * math.log(sum(math.exp(s / alpha) for s in column)), rel=1e-12)
    greedier = responsibilities(torch.tensor(column, dtype=torch.float64)[None, :, None], 3 / alpha)
    assert objective(greedier[0, :, 0].tolist(), column, alpha) < best


def test_a_large_temperature_takes_the_best_feature_and_a_small_one_all_alike() -> None:
    scores = scores_of(1, 2, KINDS, 4)
    greedy = responsibilities(scores, 1e5)
    torch.testing.assert_close(
        greedy, torch.zeros_like(greedy).scatter_(1, scores.argmax(1, keepdim=True), 1.0)
    )
    torch.testing.assert_close(responsibilities(scores, 1e-9), torch.full_like(scores, 1 / KINDS))


def test_equal_features_cost_as_one_but_for_the_entropy() -> None:
    one = scores_of(2, 2, 1, 4)
    same = mixture_cost(one.expand(-1, KINDS, -1), 0.5, 2.0)
    assert float(same) == pytest.approx(float(-one.mean()) - 0.5 * math.log(KINDS), rel=1e-12)
    torch.testing.assert_close(mixture_cost(one, 0.5, 2.0), -one.mean())
