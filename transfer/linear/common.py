"""What the protocols of the linear recipe share: batches of augmented features, and how logits are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from zoo.data.loader import EpochOrder, view_batches
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import ViewPlan
from zoo.probe.features import eval_mode, trunk_features
from zoo.probe.linear import Batches

from ..run import Context
from .config import LinearConfig

__all__ = ["accuracies", "augmented"]


def augmented(
    context: Context,
    config: LinearConfig,
    plan: ViewPlan,
    mode: Callable[[nn.Module], AbstractContextManager[None]] = eval_mode,
) -> tuple[Batches, int]:
    """Features of one fresh view of each training image, and batches an epoch.

    Args:
        context: the trunk and the data.
        config: batch size and seed.
        plan: of a single view.
        mode: what the trunk is in meanwhile; it is given back as it came.
    """
    order = EpochOrder(len(context.train), min(config.batch_size, len(context.train)), config.seed)

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = epoch * order.batches
        views = view_batches(
            context.train,
            PlannedViews(plan),
            order,
            first_step=first,
            last_step=first + order.batches,
            workers=context.workers,
        )
        for batch in views:
            with mode(context.trunk):
                features = trunk_features(context.trunk, batch.views[0], context.preprocessing)
            yield features, batch.labels  # whoever trains on them needs gradients

    return batches, order.batches


def accuracies(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Top-1 and top-5, 0..1, of logits (N, classes)."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return {"top1": float(ranked[:, 0].double().mean()), "top5": float(ranked.any(dim=1).double().mean())}
