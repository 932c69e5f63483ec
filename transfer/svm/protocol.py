"""VOC07's classification protocol: a cost for each class by cross validation, then a machine on all images.

Source: VISSL's SVM benchmark (scikit-learn's ``LinearSVC``, ``StratifiedKFold`` and
``average_precision_score``); SwAV's appendix A.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zoo.probe.average_precision import step_average_precision
from zoo.probe.newton_steps import NewtonSteps
from zoo.probe.svm import Svms, fit_svms, newton_steps

__all__ = ["Trained", "stratified_folds", "train_classes"]

_FOLDS_GAP = 1e-7  # enough to rank images by
_BLOCK = 2**24  # scores at once, over images, classes, folds and costs


@dataclass(frozen=True)
class Trained:
    """A machine for each of C classes, and how its cost was chosen."""

    machines: tuple[Svms, ...]
    """For blocks of classes; K is 1."""
    costs: torch.Tensor
    """(C,), the chosen ones."""
    crossval: torch.Tensor
    """(C, K) mean average precision over the folds, for each cost in rising order."""

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        """(N, D) -> (C, N)."""
        return torch.cat([machines.scores(features)[0] for machines in self.machines])

    @property
    def gap(self) -> float:
        """Of the worst machine: the objective is at most this share of itself above the least."""
        return max(float(machines.gap.max()) for machines in self.machines)


def stratified_folds(positive: torch.Tensor, folds: int) -> torch.Tensor:
    """The fold that each image is held out in, (N,) int64: each side is dealt out in order, without shuffling.

    The folds are those of scikit-learn's ``StratifiedKFold``: their sizes differ by one at most, and so do
    the numbers of positives.

    Args:
        positive: (N,) bool.
        folds: how many.
    """
    first = positive[:1]
    sides = [positive == first, positive != first]  # the first image's side is dealt out first
    dealt = torch.cat([torch.full((int(side.sum()),), k) for k, side in enumerate(sides)])
    out = torch.empty(len(positive), dtype=torch.int64)
    for k, side in enumerate(sides):
        share = torch.tensor([int((dealt[fold::folds] == k).sum()) for fold in range(folds)])
        out[side] = torch.arange(folds).repeat_interleave(share)
    return out


def train_classes(
    features: torch.Tensor,
    positive: torch.Tensor,
    costs: Sequence[float],
    folds: int = 3,
    positive_weight: float = 2.0,
    negative_weight: float = 1.0,
) -> Trained:
    """Choose each class's cost by the mean average precision of held-out folds, then train on all images.

    Among costs that do equally well the smallest wins.

    Args:
        features: (N, D), of unit length.
        positive: (C, N) bool, each class with at least ``folds`` images on either side.
        costs: to choose from.
        folds: of the cross validation.
        positive_weight: of the costs of a class's images.
        negative_weight: of the others'.
    """
    rising = sorted(costs)
    steps = newton_steps(features)
    machines, tables, chosen = [], [], []
    for some in positive.split(max(1, _BLOCK // (len(features) * folds * len(rising)))):
        signs = torch.where(some, 1, -1)
        table = _crossval(features, some, signs, rising, folds, (positive_weight, negative_weight), steps)
        best = (
            (table >= table.max(1, keepdim=True).values).int().cumsum(1).eq(0).sum(1)
        )  # the first of the best
        cost = torch.tensor(rising, dtype=torch.float64)[best]
        machines.append(fit_svms(features, signs, cost, positive_weight, negative_weight, steps=steps))
        tables.append(table)
        chosen.append(cost)
    return Trained(tuple(machines), torch.cat(chosen), torch.cat(tables))


def _crossval(
    features: torch.Tensor,
    positive: torch.Tensor,
    signs: torch.Tensor,
    costs: Sequence[float],
    folds: int,
    weights: tuple[float, float],
    steps: NewtonSteps,
) -> torch.Tensor:
    """(C, K) mean average precision."""
    held = torch.stack([stratified_folds(row, folds) for row in positive])
    out = held[:, None] == torch.arange(folds)[:, None]  # (C, folds, N)
    problems = signs[:, None].expand_as(out).masked_fill(out, 0)
    machines = fit_svms(features, problems.flatten(0, 1), costs, *weights, tolerance=_FOLDS_GAP, steps=steps)
    scores = machines.scores(features).view(len(costs), *out.shape)
    precision = step_average_precision(scores, positive[:, None], out)
    return precision.mean(2).T
