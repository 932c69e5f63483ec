"""What the protocols of the linear recipe share: batches of augmented features, and the test after each epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from zoo.data.loader import EpochOrder, view_batches
from zoo.data.source import ImageSource
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import ViewPlan
from zoo.probe.features import eval_mode, trunk_features
from zoo.probe.linear import Batches, LinearHeads

from ..intervals import accuracies
from ..run import Context

__all__ = ["Curve", "augmented", "described"]


def augmented(
    context: Context,
    source: ImageSource,
    plan: ViewPlan,
    batch_size: int,
    seed: int,
    trunk: Any = None,
    mode: Callable[[nn.Module], AbstractContextManager[None]] = eval_mode,
) -> tuple[Batches, int]:
    """Features of one fresh view of each image, and batches an epoch.

    Args:
        context: the preprocessing, and how many data workers.
        source: the images.
        plan: of a single view.
        batch_size: images a step; of fewer images all.
        seed: of order and views.
        trunk: what makes the features, if not the context's trunk.
        mode: what the trunk is in meanwhile; it is given back as it came.
    """
    network = context.trunk if trunk is None else trunk
    order = EpochOrder(len(source), min(batch_size, len(source)), seed)

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = epoch * order.batches
        views = view_batches(
            source,
            PlannedViews(plan),
            order,
            first_step=first,
            last_step=first + order.batches,
            workers=context.workers,
        )
        for batch in views:
            with mode(network):
                features = trunk_features(network, batch.views[0], context.preprocessing)
            yield features, batch.labels  # whoever trains on them needs gradients

    return batches, order.batches


class Curve:
    """The test after each epoch: top-1 and top-5 of every head, and where the last epoch ranks each image.

    Args:
        heads: who is tested.
        queries: features of the test images, (N, D).
        labels: (N,).
    """

    def __init__(self, heads: LinearHeads, queries: torch.Tensor, labels: torch.Tensor) -> None:
        self._heads, self._queries, self._labels = heads, queries, labels
        self.ranks = torch.empty(0)
        self._accuracies: list[torch.Tensor] = []

    def __call__(self, epoch: int) -> None:
        self.ranks = self._heads.ranks(self._queries, self._labels)
        self._accuracies.append(torch.stack([(self.ranks < n).double().mean(dim=1) for n in (1, 5)]))

    def judged(self, head: int) -> dict[str, Any]:
        """Hits of the last epoch, accuracies of the best one, and which that was, of one head."""
        top1, top5 = torch.stack(self._accuracies)[:, :, head].T
        best = int(top1.argmax())
        hits = {"top1": self.ranks[head] < 1, "top5": self.ranks[head] < 5}
        at_best = {"best_top1": float(top1[best]), "best_top5": float(top5[best])}
        return {
            "hits": hits,
            "metrics": {**accuracies(hits), **at_best},
            "last_epoch": len(top1),
            "best_epoch": best + 1,
            "reported": "top1 and top5 are the last epoch's; the best epoch is the best on the test images",
        }


def described(plan: ViewPlan) -> dict[str, Any]:
    """A plan of a single view, as JSON: what of it does anything."""
    said = {"crop": plan.crops[0].size, "scale": [plan.crops[0].min_scale, plan.crops[0].max_scale]}
    every = dataclasses.asdict(plan)
    kept = ("ratio", "interpolation", "flip_p", "jitter_p", "gray_p", "blur_p")
    return {**said, **{name: list(v) if isinstance(v := every[name], tuple) else v for name in kept}}
