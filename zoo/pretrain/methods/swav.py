"""SwAV: swapped prediction of Sinkhorn codes. Source: the paper and ``main_swav.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ...data.loader import Batch
from ...engine.collectives import Collectives
from ...engine.sections import mark
from ...models.heads import Prototypes, projection_head
from ...models.recompute import statistics_kept
from ..losses.sinkhorn import harden, promote, sinkhorn
from ..losses.swav import swapped_prediction_loss
from .base import Method, encode
from .config_base import RunShape
from .swav_config import SwAVConfig

__all__ = ["SwAV"]


class SwAV(Method):
    """A trunk, a projection head, prototypes and, if wanted, a queue of past embeddings.

    Args:
        trunk: (N, 3, H, W) -> pooled features (N, ``num_features``).
        config: the recipe's ``method`` section.
        shape: the run's sizes; the queue is cut to a multiple of the batch.
        world: the processes that share the batch.
    """

    queue: torch.Tensor

    def __init__(self, trunk: Any, config: SwAVConfig, shape: RunShape, world: Collectives) -> None:
        super().__init__()
        self.config = config
        self.world = world
        self.trunk = trunk
        self.projection_head = projection_head(trunk.num_features, config.hidden, config.dim)
        self.prototypes = Prototypes(config.dim, config.prototypes)
        # Newest first; one row block for each assigning crop. It belongs to this process.
        rows = config.rounded_queue(shape) // world.world_size
        self.register_buffer(
            "queue", torch.zeros(len(config.crops_for_assign), rows, config.dim), persistent=False
        )
        self._batch_size = shape.batch_size  # over all processes
        self._queue_rows_filled = 0
        self._queue_on = False

    def before_step(self, step: int, epoch: int) -> None:
        self.prototypes.normalize()
        self._queue_on = self.queue.shape[1] > 0 and epoch >= self.config.queue_start_epoch

    def first_pass(
        self, parts: Sequence[tuple[Callable[[], list[torch.Tensor]], Batch]]
    ) -> list[list[torch.Tensor]]:
        """The codes of the whole batch, dealt out to its parts: as if it were trained at once.

        Only BatchNorm sees the parts, as it would see as many processes that don't share statistics.
        """
        found = []
        with statistics_kept(self):
            for views, part in parts:
                # Only the assigning crops' rows matter, but BatchNorm in the head sees all of them.
                both = (tensor.unflatten(0, (-1, part.size)) for tensor in self(views()))
                found.append(tuple(both))
        embeddings, scores = (torch.cat(tensors, dim=1).flatten(0, 1) for tensors in zip(*found, strict=True))
        sizes = [part.size for _, part in parts]
        codes = self.codes(embeddings, scores, sum(sizes))
        return [list(shares) for shares in zip(*(q.split(sizes) for q in codes), strict=True)]

    def step(
        self, views: list[torch.Tensor], batch: Batch, given: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        embeddings, scores = self(views)
        mark("loss")
        codes = given or self.codes(embeddings.detach(), scores.detach(), batch.size)
        loss = swapped_prediction_loss(scores, codes, self.config.crops_for_assign, self.config.temperature)
        return loss, {}

    def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit-length embeddings (V * B, D) and scores against the prototypes (V * B, K), crop-major."""
        projected = self.projection_head(encode(self.trunk, views))
        # Scores are divided by epsilon and exponentiated: half precision would show.
        with torch.autocast(projected.device.type, enabled=False):
            embeddings = F.normalize(promote(projected), dim=1, p=2)
            return embeddings, self.prototypes(embeddings)

    @torch.no_grad()
    def codes(self, embeddings: torch.Tensor, scores: torch.Tensor, batch: int) -> list[torch.Tensor]:
        """Each assigning crop's codes, (B, K); fills the queue on the way."""
        out = []
        use_queue = self._queue_on and self._queue_rows_filled >= self.queue.shape[1]
        for index, crop in enumerate(self.config.crops_for_assign):
            rows = slice(crop * batch, (crop + 1) * batch)
            assigned = scores[rows]
            if use_queue:
                with torch.autocast(assigned.device.type, enabled=False):
                    past = self.prototypes(self.queue[index])
                assigned = torch.cat((past, assigned))
            if self._queue_on:
                self.queue[index] = torch.cat((embeddings[rows], self.queue[index, :-batch]))
            q = sinkhorn(assigned, self.config.epsilon, self.config.sinkhorn_iterations, self.world)[-batch:]
            out.append(harden(q) if self.config.codes == "hard" else q)
        if self._queue_on:
            self._queue_rows_filled = min(self._queue_rows_filled + batch, self.queue.shape[1])
        return out

    def before_update(self, step: int) -> None:
        if step < self.config.freeze_prototypes_steps or not self.config.learn_prototypes:
            self.prototypes.weight.grad = None  # no gradient: no momentum and no decay either

    def share_out(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The same embeddings in the same order of age, dealt to another number of queues.

        Sinkhorn sees all processes' queues at once, so codes stay what they were.
        """
        before = torch.stack([state["queue"] for state in states], dim=1)  # crops, ranks, rows, D
        filled = {int(state["queue_rows_filled"]) for state in states}
        crops, ranks, rows, dim = before.shape
        batch = self._batch_size // ranks  # newest first, a batch of every process at a time
        whole = before.unflatten(2, (-1, batch)).transpose(1, 2)  # crops, batches, ranks, batch, D
        mine = whole.reshape(crops, -1, world_size, self._batch_size // world_size, dim)[:, :, rank]
        return {
            "queue": mine.reshape(crops, -1, dim) if rows else self.queue,
            "queue_rows_filled": max(filled) * ranks // world_size,
        }

    def local_state(self) -> dict[str, Any]:
        return {"queue": self.queue, "queue_rows_filled": self._queue_rows_filled}

    def load_local_state(self, state: dict[str, Any]) -> None:
        self.queue.copy_(state["queue"])
        self._queue_rows_filled = int(state["queue_rows_filled"])
