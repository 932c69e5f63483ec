"""SimCLR with any number of crops. Sources: Chen et al. 2020; SwAV appendix A.8 for several positives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ...data.loader import Batch
from ...engine.collectives import Collectives
from ...engine.sections import mark
from ...models.heads import projection_head
from ...models.recompute import statistics_kept
from ..losses.nt_xent import WholeBatch, nt_xent, survey
from ..losses.sinkhorn import promote
from .base import Method, Seen, encode
from .config_base import RunShape
from .simclr_config import SimCLRConfig

__all__ = ["SimCLR"]


class SimCLR(Method):
    """A trunk and a projection head; the negatives are all other images of all processes.

    Args:
        trunk: (N, 3, H, W) -> pooled features (N, ``num_features``).
        config: the recipe's ``method`` section.
        shape: the run's sizes.
        world: the processes that share the batch.
    """

    def __init__(self, trunk: Any, config: SimCLRConfig, shape: RunShape, world: Collectives) -> None:
        super().__init__()
        self.config = config
        self.world = world
        self.views = shape.views
        self._outcomes = 1 + shape.views * (shape.batch_size - 1)  # a positive and all negatives
        self.trunk = trunk
        self.projection_head = projection_head(
            trunk.num_features, config.hidden, config.dim, output_norm=config.output_norm
        )

    def first_pass(self, parts: Sequence[tuple[Callable[[], list[torch.Tensor]], Batch]]) -> list[WholeBatch]:
        """The whole batch's embeddings: each part is then compared with all of them.

        Only BatchNorm sees the parts, as it would see as many processes that don't share statistics.
        """
        with statistics_kept(self):
            embeddings = [self(views()) for views, _ in parts]
        return survey(embeddings, self.views, self.config.temperature, self.world)

    def step(
        self, views: list[torch.Tensor], batch: Batch, given: WholeBatch | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        embeddings = self(views)
        if self.watched:
            self.seen = Seen(self._outcomes, embeddings)
        mark("loss")
        return nt_xent(embeddings, self.views, self.config.temperature, self.world, given), {}

    def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
        """Unit-length embeddings (V * B, D), crop-major."""
        projected = self.projection_head(encode(self.trunk, views))
        # Similarities are divided by the temperature and exponentiated: half precision would show.
        with torch.autocast(projected.device.type, enabled=False):
            return F.normalize(promote(projected), dim=1, p=2)
