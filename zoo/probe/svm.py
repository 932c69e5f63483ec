"""Linear support vector machines by LIBLINEAR's objective, many at once: classes, folds and costs.

Of each machine, 0.5 |w|^2 + sum_i c_i max(0, 1 - y_i w.x_i)^2 is least, where c_i is the cost times the
weight of the image's side and x_i ends with a 1 (the bias is regularised, as LIBLINEAR's through
scikit-learn with ``intercept_scaling=1``). It is solved in the primal by Newton's method: the gradient is
exact (float64), and so is the bound on how far the objective is from its least value, |gradient|^2 / 2 (the
objective is 1-strongly convex). Costs rise, and each starts from the weights of the last one.

Sources: Fan et al. 2008 (LIBLINEAR); Chapelle 2007 (Newton's method in the primal).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import InputError
from .newton_steps import NewtonSteps

__all__ = ["Svms", "fit_svms", "newton_steps", "unit_length"]

_MOST_STEPS = 100  # it takes about 5
_MOST_LENGTHS = 30


@dataclass(frozen=True)
class Svms:
    """Machines for K costs and P problems."""

    weight: torch.Tensor
    """(K, P, D) float64."""
    bias: torch.Tensor
    """(K, P) float64."""
    objective: torch.Tensor
    """(K, P) float64, at these weights."""
    gap: torch.Tensor
    """(K, P) float64: the objective is at most this share of itself above the least."""

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        """(N, D) -> (K, P, N) float64."""
        return self.weight @ features.double().T + self.bias[..., None]


def unit_length(features: torch.Tensor) -> torch.Tensor:
    """Features (N, D) divided by their length plus 1e-5, float64 (VISSL's VOC07 benchmark)."""
    features = features.double()
    return features / (features.norm(dim=1, keepdim=True) + 1e-5)


def newton_steps(features: torch.Tensor) -> NewtonSteps:
    """What several calls of ``fit_svms`` on the same features (N, D) can share.

    Raises:
        InputError: features that are no finite numbers.
    """
    features = features.double()
    if not features.isfinite().all():
        bad = int((~features.isfinite().all(1)).nonzero()[0, 0])
        raise InputError(
            f"The features of image {bad} are no finite numbers.",
            where="features",
            fix="look at the weights (zoo doctor MODEL) or at the image",
        )
    return NewtonSteps(torch.cat([features, torch.ones_like(features[:, :1])], dim=1))


@torch.no_grad()
def fit_svms(
    features: torch.Tensor,
    signs: torch.Tensor,
    costs: Sequence[float] | torch.Tensor,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
    tolerance: float = 1e-8,
    steps: NewtonSteps | None = None,
) -> Svms:
    """Train machines on subsets of the same features.

    Args:
        features: (N, D), finite.
        signs: (P, N): 1 positive, -1 negative, 0 not in this problem (another fold, another sample).
        costs: K costs for every problem; or, (P,), one for each problem, and K is 1.
        positive_weight: of the costs of positives.
        negative_weight: of the costs of negatives.
        tolerance: the gap to reach.
        steps: what was worked out for these features, of ``newton_steps``; it can be used again.

    Returns:
        The machines; costs in the order given. ``gap`` says where the tolerance was not reached.
    """
    steps = steps or newton_steps(features)
    x = steps.x
    y = signs.to(x)
    sides = positive_weight * (y > 0) + negative_weight * (y < 0)
    each = torch.as_tensor(costs, dtype=torch.float64, device=x.device)
    # A row of costs for each round, rising.
    rounds = each[None] if isinstance(costs, torch.Tensor) else each.sort().values[:, None].expand(-1, len(y))
    w, f = x.new_zeros(len(y), x.shape[1]), x.new_zeros(y.shape)
    found = []
    for cost in rounds:
        objective, gap = _minimise(x, y, cost[:, None] * sides, w, f, steps, tolerance)
        found.append((w.clone(), objective, gap))
    weights, objectives, gaps = (torch.stack(part) for part in zip(*found, strict=True))
    if not isinstance(costs, torch.Tensor):
        order = each.argsort(stable=True).argsort()
        weights, objectives, gaps = weights[order], objectives[order], gaps[order]
    return Svms(weights[..., :-1], weights[..., -1], objectives, gaps)


def _minimise(
    x: torch.Tensor,
    y: torch.Tensor,
    c: torch.Tensor,
    w: torch.Tensor,
    f: torch.Tensor,
    steps: NewtonSteps,
    tolerance: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Newton's method for all problems at once; ``w`` (P, D) and scores ``f`` = w x^T (P, N) are changed in place.

    Returns:
        (P,) objective and gap.
    """
    objectives, gaps = x.new_empty(len(y)), x.new_empty(len(y))
    open_ = torch.arange(len(y), device=x.device)  # the problems that aren't solved yet
    for _ in range(_MOST_STEPS):
        w_, f_, y_, c_ = w[open_], f[open_], y[open_], c[open_]
        slack = (1.0 - y_ * f_).clamp_min(0.0)
        gradient = w_ - (2.0 * c_ * slack * y_) @ x
        objective = _objective(w_, slack, c_)
        gap = 0.5 * gradient.square().sum(1) / objective.clamp_min(torch.finfo(x.dtype).tiny)
        objectives[open_], gaps[open_] = objective, gap
        left = gap > tolerance
        if not left.any():
            break
        open_ = open_[left]
        w_, f_, y_, c_, slack, gradient = (part[left] for part in (w_, f_, y_, c_, slack, gradient))
        # The Hessian is 1 + X^T diag(curvature) X.
        direction = steps.direction(gradient, 2.0 * c_ * (slack > 0))
        along = direction @ x.T
        length = _line_search(w_, f_, y_, c_, direction, along)[:, None]
        w[open_], f[open_] = w_ + length * direction, f_ + length * along
    return objectives, gaps


def _objective(w: torch.Tensor, slack: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return 0.5 * w.square().sum(1) + (c * slack.square()).sum(1)


def _line_search(
    w: torch.Tensor,
    f: torch.Tensor,
    y: torch.Tensor,
    c: torch.Tensor,
    direction: torch.Tensor,
    along: torch.Tensor,
) -> torch.Tensor:
    """How far along a descent direction the objective is least, (P,): it is a parabola piece by piece.

    The root of its slope is found by Newton's method between bounds, which halves them where it would leave them.
    """
    own, curve = (w * direction).sum(1), direction.square().sum(1)
    low, high = torch.zeros_like(own), torch.full_like(own, torch.inf)
    length = torch.ones_like(own)
    for _ in range(_MOST_LENGTHS):
        slack = (1.0 - y * (f + length[:, None] * along)).clamp_min(0.0)
        pull = 2.0 * c * along
        slope = own + length * curve - (pull * y * slack).sum(1)
        bend = curve + (pull * along * (slack > 0)).sum(1)
        low, high = torch.where(slope < 0, length, low), torch.where(slope > 0, length, high)
        step = -slope / bend
        if (step.abs() <= 1e-3 * length).all():
            break
        outside = (length + step <= low) | (length + step >= high)
        length = torch.where(
            outside, torch.where(high.isinf(), 2 * length, 0.5 * (low + high)), length + step
        )
    return length
