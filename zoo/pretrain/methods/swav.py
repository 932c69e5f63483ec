"""SwAV: swapped prediction of Sinkhorn codes. Source: the paper and ``main_swav.py``."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...data.loader import Batch
from ...engine.collectives import Collectives
from ...engine.sections import mark
from ...models.heads import Prototypes, projection_head
from ...models.recompute import statistics_kept
from ..losses.sinkhorn import harden, promote, sinkhorn
from ..losses.swav import swapped_prediction_loss
from .base import Method, Seen, encode
from .config_base import RunShape
from .swav_config import SwAVConfig

__all__ = ["SwAV"]


class SwAV(Method):
    """A trunk, a projection head, prototypes and, if wanted, a queue of past embeddings.

    With several sets of prototypes (``prototypes.prototypes0`` and so on, as in the reference's network) each
    has its own codes from the same embeddings and the same queue, and the loss is the mean over the sets.
    Their scores and codes stand side by side, K being the number of all prototypes.

    With a momentum encoder the codes and the queue come from a running average of trunk and head, which sees
    the assigning crops only; the prototypes are shared. SwAV's section 4.3 names this combination and leaves
    it to the future; the average is MoCo's (He et al. 2020, eq. 2).

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
        self.projection_head = projection_head(
            trunk.num_features, config.hidden, config.dim, norm=config.head_norm
        )
        sets = [Prototypes(config.dim, count) for count in config.counts]
        self.prototypes = (
            sets[0]
            if isinstance(config.prototypes, int)
            else nn.ModuleDict({f"prototypes{number}": one for number, one in enumerate(sets)})
        )
        self.momentum_encoder: Any = None
        # Where in the rows that codes come from each assigning crop stands.
        self._blocks = list(config.crops_for_assign)
        if config.momentum_encoder is not None:
            self.momentum_encoder = copy.deepcopy(trunk)  # the trunk's names, with the head among them
            self.momentum_encoder.projection_head = copy.deepcopy(self.projection_head)
            self.momentum_encoder.requires_grad_(False)
            self._blocks = [sorted(self._blocks).index(crop) for crop in self._blocks]
        # Newest first; one row block for each assigning crop. It belongs to this process.
        rows = config.rounded_queue(shape) // world.world_size
        self.register_buffer(
            "queue", torch.zeros(len(config.crops_for_assign), rows, config.dim), persistent=False
        )
        self._batch_size = shape.batch_size  # over all processes
        self._queue_rows_filled = 0
        self._queue_on = False
        self._queue_used = False

    def prototype_sets(self) -> list[Prototypes]:
        """The sets of prototypes, usually one."""
        several = self.prototypes
        return [several] if isinstance(several, Prototypes) else list(several.values())  # type: ignore[arg-type]

    def on_trunk_replaced(self) -> None:
        if self.momentum_encoder is not None:
            head = self.projection_head.state_dict(prefix="projection_head.")
            self.momentum_encoder.load_state_dict({**self.trunk.state_dict(), **head})

    def before_step(self, step: int, epoch: int) -> None:
        for prototypes in self.prototype_sets():
            prototypes.normalize()
        self._queue_on = self.queue.shape[1] > 0 and epoch >= self.config.queue_start_epoch

    def first_pass(
        self, parts: Sequence[tuple[Callable[[], list[torch.Tensor]], Batch]]
    ) -> list[list[torch.Tensor]]:
        """The codes of the whole batch, dealt out to its parts: as if it were trained at once.

        Only BatchNorm sees the parts, as it would see as many processes that don't share statistics.
        """
        found = []
        # A momentum encoder computes here only, so here its statistics move.
        alone = self.momentum_encoder is not None
        with contextlib.nullcontext() if alone else statistics_kept(self):
            for views, part in parts:
                # Only the assigning crops' rows matter, but BatchNorm in the head sees all of them.
                pair = self._averaged(views(), part.size) if alone else self(views())
                found.append(tuple(tensor.unflatten(0, (-1, part.size)) for tensor in pair))
        embeddings, scores = (torch.cat(tensors, dim=1).flatten(0, 1) for tensors in zip(*found, strict=True))
        sizes = [part.size for _, part in parts]
        codes = self.codes(embeddings, scores, sum(sizes))
        return [list(shares) for shares in zip(*(q.split(sizes) for q in codes), strict=True)]

    def step(
        self, views: list[torch.Tensor], batch: Batch, given: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        embeddings, scores = self(views)
        source = embeddings.detach(), scores.detach()
        if given is None and self.momentum_encoder is not None:
            source = self._averaged(views, batch.size)
        mark("loss")
        codes = given or self.codes(*source, batch.size)
        if self.watched:
            self.seen = self._seen(embeddings, scores, codes)
        return self._loss(scores, codes), {}

    def _seen(self, embeddings: torch.Tensor, scores: torch.Tensor, codes: list[torch.Tensor]) -> Seen:
        """Of several sets of prototypes the first one's scores and codes."""
        counts = self.config.counts
        age = None
        if self.queue.shape[1]:
            steps = self.queue.shape[1] * self.world.world_size / self._batch_size
            age = steps if self._queue_used else 0.0
        return Seen(
            outcomes=math.prod(counts) ** (1 / len(counts)),
            embeddings=embeddings,
            scores=scores[:, : counts[0]],
            codes=codes[0][:, : counts[0]],
            queue_age=age,
        )

    def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit-length embeddings (V * B, D) and scores against the prototypes (V * B, K), crop-major."""
        return self._scored(self.projection_head(encode(self.trunk, views)))

    def _scored(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Scores are divided by epsilon and exponentiated: half precision would show.
        with torch.autocast(projected.device.type, enabled=False):
            embeddings = F.normalize(promote(projected), dim=1, p=2)
            return embeddings, self._scores(embeddings)

    def _scores(self, embeddings: torch.Tensor) -> torch.Tensor:
        scores = [prototypes(embeddings) for prototypes in self.prototype_sets()]
        return scores[0] if len(scores) == 1 else torch.cat(scores, dim=1)

    @torch.no_grad()
    def _averaged(self, views: list[torch.Tensor], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as ``forward`` by the momentum encoder, of the assigning crops only."""
        wanted, first = [], 0
        for group in views:
            crops = group.split(batch)
            mine = [
                crop for number, crop in enumerate(crops, first) if number in self.config.crops_for_assign
            ]
            first += len(crops)
            if mine:
                wanted.append(group if len(mine) == len(crops) else torch.cat(mine))
        return self._scored(self.momentum_encoder.projection_head(encode(self.momentum_encoder, wanted)))

    def _loss(self, scores: torch.Tensor, codes: list[torch.Tensor]) -> torch.Tensor:
        config = self.config
        loss = partial(
            swapped_prediction_loss, assign=config.crops_for_assign, temperature=config.temperature
        )
        if len(config.counts) == 1:
            return loss(scores, codes)
        of_sets = zip(*(q.split(config.counts, dim=1) for q in codes), strict=True)
        return torch.stack(list(map(loss, scores.split(config.counts, dim=1), of_sets))).mean()

    @torch.no_grad()
    def codes(self, embeddings: torch.Tensor, scores: torch.Tensor, batch: int) -> list[torch.Tensor]:
        """Each assigning crop's codes, (B, K); fills the queue on the way."""
        out = []
        use_queue = self._queue_on and self._queue_rows_filled >= self.queue.shape[1]
        self._queue_used = use_queue
        for index, block in enumerate(self._blocks):
            rows = slice(block * batch, (block + 1) * batch)
            assigned = scores[rows]
            if use_queue:
                with torch.autocast(assigned.device.type, enabled=False):
                    past = self._scores(self.queue[index])
                assigned = torch.cat((past, assigned))
            if self._queue_on:
                self.queue[index] = torch.cat((embeddings[rows], self.queue[index, :-batch]))
            of_sets = [
                sinkhorn(part, self.config.epsilon, self.config.sinkhorn_iterations, self.world)[-batch:]
                for part in assigned.split(self.config.counts, dim=1)
            ]
            if self.config.codes == "hard":
                of_sets = [harden(q) for q in of_sets]
            out.append(of_sets[0] if len(of_sets) == 1 else torch.cat(of_sets, dim=1))
        if self._queue_on:
            self._queue_rows_filled = min(self._queue_rows_filled + batch, self.queue.shape[1])
        return out

    def before_update(self, step: int) -> None:
        if step < self.config.freeze_prototypes_steps or not self.config.learn_prototypes:
            for prototypes in self.prototype_sets():
                prototypes.weight.grad = None  # no gradient: no momentum and no decay either

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self.config.momentum_encoder is not None:
            mine: list[torch.Tensor] = list(self.momentum_encoder.parameters())
            new: list[torch.Tensor] = [*self.trunk.parameters(), *self.projection_head.parameters()]
            torch._foreach_lerp_(mine, new, 1 - self.config.momentum_encoder)

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
