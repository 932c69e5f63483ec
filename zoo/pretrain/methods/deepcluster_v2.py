"""DeepCluster-v2: predict the cluster that an image had in the last epoch.

Sources: SwAV section 5.1 and ``main_deepclusterv2.py``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...data.loader import Batch
from ...engine.collectives import Collectives
from ...engine.sections import mark
from ...keyed import keyed_key, keyed_permutation
from ...models.heads import Prototypes, projection_head
from ...models.recompute import statistics_kept
from ..losses.deepcluster import UNSEEN, assignment_loss, rows_of_all, spherical_kmeans
from ..losses.sinkhorn import promote
from .base import Method, Seen, encode
from .config_base import RunShape
from .deepcluster_v2_config import BankConfig, DeepClusterV2Config

__all__ = ["BankMethod", "DeepClusterV2"]

log = logging.getLogger("zoo")


class BankMethod(Method):
    """A trunk, a projection head and heads of prototypes, whose targets come from the epoch before.

    Each process remembers the embeddings of the images that it visits, a row for each, in the order of
    visits; ``crops_for_assign`` has a bank each. When an epoch begins, ``assign`` makes targets of the rows,
    and each process gets those of all images, since it will visit others than before. The rows are then
    overwritten step by step. Before the first epoch one pass over its images fills the banks: as in the
    reference with BatchNorm in training mode, but running statistics stay as they are.

    An image that was not visited in the last epoch (the short last batch is dropped) has no target.

    A row stands for the same image on any number of processes, so that losses don't depend on it.

    Args:
        trunk: (N, 3, H, W) -> pooled features (N, ``num_features``).
        config: the recipe's ``method`` section.
        shape: the run's sizes.
        world: the processes that share the batch.
    """

    bank: torch.Tensor | None
    """(crops, N, D) float32 at least, N being this process's images an epoch; none before the first epoch."""

    index: torch.Tensor
    """(N,) int64: which image each row is of."""

    def __init__(self, trunk: Any, config: BankConfig, shape: RunShape, world: Collectives) -> None:
        super().__init__()
        self.config = config
        self.world = world
        self.trunk = trunk
        self.projection_head = projection_head(trunk.num_features, config.hidden, config.dim)
        self.prototypes = nn.ModuleDict(
            {
                f"prototypes{head}": Prototypes(config.dim, count)
                for head, count in enumerate(config.prototypes)
            }
        )
        self.bank = None
        self.index = torch.empty(0, dtype=torch.int64)
        self._shape = shape
        self._share = shape.batch_size // world.world_size
        self._rows = shape.steps_per_epoch * self._share
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # by the parts of this step
        # The rows that this epoch's targets were made of: images, and what ``assign`` returned for them.
        self._sources: tuple[torch.Tensor, torch.Tensor] | None = None
        # The same of all processes by image, and which images there are.
        self._table = self._known = torch.empty(0)

    def heads(self) -> list[Prototypes]:
        """The prototypes of each head."""
        return list(self.prototypes.values())  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.heads()[0].weight.device

    # What a method with a bank has of its own

    def assign(self, epoch: int) -> torch.Tensor:
        """This process's rows -> what their images' targets are made of, (N, ...)."""
        raise NotImplementedError

    def targets(self, found: torch.Tensor, known: torch.Tensor) -> list[torch.Tensor]:
        """The targets of each head, see ``assignment_loss``, for some images.

        Args:
            found: (B, ...) what ``assign`` returned for them; anything where there is none.
            known: (B,) bool, whether there is any.
        """
        raise NotImplementedError

    # The engine's calls

    def on_epoch_start(
        self, epoch: int, batches: Callable[[], Iterator[tuple[list[torch.Tensor], Batch]]]
    ) -> None:
        if self.bank is None:
            self.index, self.bank = self._filled(batches)
        with torch.autocast(self.device.type, enabled=False):
            self._set_targets(self.index.clone(), self.assign(epoch))

    def rehearse(self) -> None:
        self.bank = self.heads()[0].weight.new_zeros(
            len(self.config.crops_for_assign), self._rows, self.config.dim
        )
        self.index = torch.zeros(self._rows, dtype=torch.int64, device=self.device)
        self._set_targets(self.index.clone(), self._assigned())

    def _assigned(self) -> torch.Tensor:
        """Something of the shape of what ``assign`` returns; by default labels."""
        return torch.zeros(self._rows, len(self.prototypes), dtype=torch.int64, device=self.device)

    def before_step(self, step: int, epoch: int) -> None:
        self._seen.clear()

    def first_pass(
        self, parts: Sequence[tuple[Callable[[], list[torch.Tensor]], Batch]]
    ) -> list[torch.Tensor]:
        """The number of images with a target: that of the whole batch, a share for each part."""
        ids = torch.cat([part.ids for _, part in parts])
        return [self._counted(ids) / len(parts)] * len(parts)

    def step(
        self, views: list[torch.Tensor], batch: Batch, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        embeddings, scores = self(views)
        ids = batch.ids.to(self.device, non_blocking=True)
        self._seen.append((ids, self._remembered(embeddings, batch.size)))
        mark("loss")
        with torch.no_grad():
            targets = self.targets(self._table[ids], self._known[ids])
        if self.watched:
            counts = self.config.prototypes
            codes = targets[0] if targets[0].is_floating_point() else None
            self.seen = Seen(math.prod(counts) ** (1 / len(counts)), embeddings, scores[0], codes)
        counted = self._counted(ids) if given is None else given
        return assignment_loss(scores, targets, self.config.temperature, counted), {}

    def forward(self, views: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Unit-length embeddings (V * B, D), and scores (V * B, K) against each head's prototypes."""
        embeddings = self._embeddings(views)
        with torch.autocast(embeddings.device.type, enabled=False):
            return embeddings, [prototypes(embeddings) for prototypes in self.heads()]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        assert self.bank is not None
        first = step % self._shape.steps_per_epoch * self._share
        for ids, embeddings in self._seen:
            rows = slice(first, first + len(ids))
            self.index[rows], self.bank[:, rows] = ids, embeddings
            first += len(ids)
        self._seen.clear()

    # The bank

    def _embeddings(self, views: list[torch.Tensor]) -> torch.Tensor:
        projected = self.projection_head(encode(self.trunk, views))
        with torch.autocast(projected.device.type, enabled=False):
            return F.normalize(promote(projected), dim=1, p=2)

    def _remembered(self, embeddings: torch.Tensor, size: int) -> torch.Tensor:
        """(V * B, D) -> those of the assigning crops, (crops, B, D)."""
        return embeddings.detach().unflatten(0, (-1, size))[list(self.config.crops_for_assign)]

    def _filled(
        self, batches: Callable[[], Iterator[tuple[list[torch.Tensor], Batch]]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            self.config.check_room(self._shape, free, str(self.device))
        log.info("filling the memory bank: a pass over the images without training")
        weight = self.heads()[0].weight
        bank = weight.new_zeros(len(self.config.crops_for_assign), self._rows, self.config.dim)
        index = torch.full((self._rows,), -1, device=self.device)
        first = 0
        with statistics_kept(self):
            for views, batch in batches():
                rows = slice(first, first + batch.size)
                index[rows] = batch.ids.to(self.device)
                bank[:, rows] = self._remembered(self._embeddings(views), batch.size)
                first += batch.size
        return index, bank

    @torch.no_grad()
    def _set_targets(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Give each process the targets of all processes' rows, by image."""
        self._sources = ids, rows
        everyone, found = self.world.gather(ids), self.world.gather(rows)
        # Of an image with several rows (it stood in for unreadable ones) the last counts, on any device.
        last = torch.full((self._shape.samples,), -1, device=ids.device)
        last.scatter_reduce_(0, everyone, torch.arange(len(everyone), device=ids.device), "amax")
        self._known = last >= 0
        self._table = found[last.clamp_(min=0)]

    def _counted(self, ids: torch.Tensor) -> torch.Tensor:
        """Images with a target in the whole batch, a process's equal share of them; never zero."""
        known = self.world.sum_(self._known[ids.to(self.device)].sum())
        return known.clamp_(min=1).to(self.heads()[0].weight.dtype) / self.world.world_size

    # State

    def local_state(self) -> dict[str, Any]:
        """The banks and their images, and what this epoch's targets were made of; empty before the first."""
        if self.bank is None or self._sources is None:
            return {}
        ids, rows = self._sources
        return {"bank": self.bank, "index": self.index, "source_index": ids, "sources": rows}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Take a state back; all processes must call it, since they tell one another their targets."""
        if state:
            moved = {key: value.to(self.device) for key, value in state.items()}
            self.bank, self.index = moved["bank"], moved["index"]
            self._set_targets(moved["source_index"], moved["sources"])

    def share_out(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The same rows, each to the process that has its image's place in the batch now."""
        if not any(states):
            return {}
        return {
            key: self._dealt([state[key] for state in states], int(key == "bank"), rank, world_size)
            for key in ("bank", "index", "source_index", "sources")
        }

    def _dealt(self, tensors: list[torch.Tensor], dim: int, rank: int, world_size: int) -> torch.Tensor:
        # Along ``dim``: steps, processes, images.
        steps = self._shape.steps_per_epoch
        whole = torch.stack([tensor.unflatten(dim, (steps, -1)) for tensor in tensors], dim + 1)
        shares = whole.flatten(dim + 1, dim + 2).unflatten(dim + 1, (world_size, -1))
        return shares.select(dim + 1, rank).flatten(dim, dim + 1)


class DeepClusterV2(BankMethod):
    """Targets are clusters of the last epoch's embeddings (spherical k-means), prototypes their centroids.

    Head h clusters the bank of the assigning crop h, in turn. All crops predict the cluster, also the one
    that it came from.

    Centroids start from rows of all processes that a key draws; the reference draws from those of its first
    process, which depends on how many there are.
    """

    config: DeepClusterV2Config

    def __init__(self, trunk: Any, config: DeepClusterV2Config, shape: RunShape, world: Collectives) -> None:
        super().__init__(trunk, config, shape, world)
        self.prototypes.requires_grad_(False)

    def param_groups(self, exclude_one_dimensional: bool) -> list[dict[str, Any]]:
        """All parameters but the prototypes, which no optimizer moves."""
        from ...optim.groups import split_one_dimensional

        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        if exclude_one_dimensional:
            return split_one_dimensional(named)
        return [{"params": [p for _, p in named]}]

    def first_rows(self, epoch: int, head: int) -> torch.Tensor:
        """The rows that centroids start from, (K,), see ``rows_of_all``."""
        batch, count = self._shape.batch_size, self.config.prototypes[head]
        key = keyed_key(0, "deepcluster centroids", epoch, head)
        visits = keyed_permutation(key, self._shape.steps_per_epoch * batch)[:count]
        step, place = visits // batch, visits % batch
        rows = place // self._share * self._rows + step * self._share + place % self._share
        return torch.from_numpy(rows).to(self.device)

    def assign(self, epoch: int) -> torch.Tensor:
        """Clusters of this process's rows, (N, heads) int64; moves the prototypes to their centroids."""
        assert self.bank is not None
        labels = []
        for head, prototypes in enumerate(self.heads()):
            rows = self.bank[head % len(self.bank)]
            start = rows_of_all(rows, self.first_rows(epoch, head), self.world)
            centroids, assigned = spherical_kmeans(rows, start, self.config.kmeans_iterations, self.world)
            prototypes.weight.copy_(centroids)
            labels.append(assigned)
        return torch.stack(labels, dim=1)

    def targets(self, found: torch.Tensor, known: torch.Tensor) -> list[torch.Tensor]:
        return list(found.masked_fill(~known[:, None], UNSEEN).unbind(dim=1))
