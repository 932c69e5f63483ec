"""Training with labels on the same crops: the baseline of SwAV's figure 3.

Source: SwAV figure 3 and issue 57 of its repository: the cross entropy of each crop, averaged over crops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...data.loader import Batch
from ...engine.collectives import Collectives
from ...engine.sections import mark
from ...errors import InputError
from ..losses.sinkhorn import promote
from .base import Method, Seen, encode
from .config_base import RunShape
from .supervised_config import SupervisedConfig

__all__ = ["Supervised"]


class Supervised(Method):
    """A trunk and a linear classifier.

    ``classifier.weight`` (classes, F) and ``classifier.bias`` (classes), in the order of the data's classes,
    are among the tensors that are not the trunk's.

    Args:
        trunk: (N, 3, H, W) -> pooled features (N, ``num_features``).
        config: the recipe's ``method`` section.
        shape: the run's sizes and the names of the classes.
        world: the processes that share the batch.
    """

    def __init__(self, trunk: Any, config: SupervisedConfig, shape: RunShape, world: Collectives) -> None:
        super().__init__()
        self.trunk = trunk
        self.classifier = nn.Linear(trunk.num_features, len(shape.classes))

    def step(
        self, views: list[torch.Tensor], batch: Batch, given: None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        without = batch.ids[batch.labels < 0]
        if len(without):
            raise InputError(
                f"{len(without)} of {batch.size} images of a batch carry no label; the first is number "
                f"{int(without[0])} of the data.",
                where="data.sources",
                fix="leave the unlabelled images out, or train another method",
            )
        logits = self(views)
        if self.watched:
            self.seen = Seen(logits.shape[1])
        mark("loss")
        labels = batch.labels.to(logits.device, non_blocking=True).repeat(len(logits) // batch.size)
        return F.cross_entropy(promote(logits), labels), {}

    def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
        """Logits (V * B, classes), crop-major."""
        logits: torch.Tensor = self.classifier(encode(self.trunk, views))
        return logits
