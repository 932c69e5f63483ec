"""MoCo v1 and v2: contrast with a dictionary of keys. Source: the papers and ``moco/builder.py``."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ...data.loader import Batch
from ...engine.collectives import Collectives
from ...engine.sections import mark
from ...keyed import keyed_key, keyed_permutation, keyed_uniforms
from ...models.heads import projection_head
from ...models.recompute import statistics_kept
from ...optim.groups import split_one_dimensional
from ..losses.info_nce import info_nce, info_nce_in_batch
from ..losses.sinkhorn import promote
from .base import Method, Seen
from .config_base import RunShape
from .moco_config import MoCoConfig

__all__ = ["MoCo"]


class _Parts(NamedTuple):
    """All parts' embeddings, without gradients, and which of the parts is being trained."""

    number: int
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]


class MoCo(Method):
    """A query encoder, and a dictionary of keys that its embeddings must find their own key in.

    Three dictionaries (MoCo, figure 2):

    * ``queue``: keys of past batches, encoded by a momentum encoder that follows the query encoder; the
      whole dictionary is the same in all processes.
    * ``batch``: the keys of this batch, end to end: the query encoder makes them and learns from both sides.
    * ``memory_bank``: a vector for each image, moved towards its embedding whenever it is seen; K of them
      are drawn for each step.

    Each view is compared with the keys of all other ``key_views``; the loss is the mean over these pairs, as
    SwAV's is, so small crops (multi-crop) are queries alone.

    BatchNorm sees the batch in ``shuffle_groups`` groups: queries in the order of the images, keys shuffled
    over all processes, which costs sending each process all of the batch's images of a key view, as floats
    (section 3.3). The same number of groups gives the same losses on any number of processes that divides it,
    if the batch is not trained in parts, within which keys are shuffled then; without groups the processes'
    own BatchNorm makes a difference, unless it is synchronised.

    Args:
        trunk: (N, 3, H, W) -> pooled features (N, ``num_features``).
        config: the recipe's ``method`` section.
        shape: the run's sizes.
        world: the processes that share the batch.
    """

    queue: torch.Tensor
    queue_ptr: torch.Tensor
    memory_bank: torch.Tensor

    def __init__(self, trunk: Any, config: MoCoConfig, shape: RunShape, world: Collectives) -> None:
        super().__init__()
        self.config = config
        self.world = world
        self.trunk = trunk
        self.projection_head = projection_head(
            trunk.num_features, config.hidden, config.dim, norm=config.head_norm
        )
        if config.dictionary == "queue":
            # The names of the reference's encoder_k: the trunk's, with the head among them.
            self.momentum_encoder = copy.deepcopy(trunk)
            self.momentum_encoder.projection_head = copy.deepcopy(self.projection_head)
            self.momentum_encoder.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(config.dim, config.negatives), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.int64))
        elif config.dictionary == "memory_bank":
            self.register_buffer("memory_bank", F.normalize(torch.randn(shape.samples, config.dim), dim=1))
        grouped = config.shuffle_groups > 1 and config.dictionary != "memory_bank"
        self._passes = config.shuffle_groups // (world.world_size * shape.accumulate) if grouped else 0
        self._key_views = config.key_views if config.dictionary != "memory_bank" else ()
        # A view is no query where its own key would be the only one.
        self._query_views = [view for view in range(shape.views) if self._key_views != (view,)]
        self._views_apart = shape.views_apart
        self._batch_size = shape.batch_size  # over all processes
        self._step = 0
        self._seen: list[tuple[torch.Tensor, ...]] = []  # what each part of the batch adds to the dictionary

    def param_groups(self, exclude_one_dimensional: bool) -> list[dict[str, Any]]:
        """The query encoder's parameters: the momentum encoder follows without an optimizer."""
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        if exclude_one_dimensional:
            return split_one_dimensional(named)
        return [{"params": [p for _, p in named]}]

    @torch.no_grad()
    def on_trunk_replaced(self) -> None:
        if self.config.dictionary == "queue":
            head = self.projection_head.state_dict(prefix="projection_head.")
            self.momentum_encoder.load_state_dict({**self.trunk.state_dict(), **head})

    @torch.no_grad()
    def before_step(self, step: int, epoch: int) -> None:
        self._step = step
        self._seen.clear()
        if self.config.dictionary == "queue":
            self._follow()

    def _follow(self) -> None:
        """theta_k <- m theta_k + (1 - m) theta_q (eq. 2): parameters only, norms keep their statistics."""
        followed: list[torch.Tensor] = [*self.trunk.parameters(), *self.projection_head.parameters()]
        following = list(self.momentum_encoder.parameters())
        torch._foreach_mul_(following, self.config.momentum)
        torch._foreach_add_(following, followed, alpha=1.0 - self.config.momentum)

    def first_pass(
        self, parts: Sequence[tuple[Callable[[], list[torch.Tensor]], Batch]]
    ) -> list[_Parts | None]:
        """For the end-to-end dictionary all parts' embeddings; the others know their keys without.

        The loss is then that of the whole batch; only BatchNorm sees the parts.
        """
        if self.config.dictionary != "batch":
            return [None] * len(parts)
        queries, keys = [], []
        with statistics_kept(self):
            for number, (views, part) in enumerate(parts):
                images = _by_view(views(), part.size)
                queries.append(self.queries(images))
                keys.append(self.keys(images, number))
        return [_Parts(number, queries, keys) for number in range(len(parts))]

    def step(
        self, views: list[torch.Tensor], batch: Batch, given: _Parts | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        images = _by_view(views, batch.size)
        queries = self.queries(images)
        if self.watched:
            self.seen = self._what_is_seen(queries)
        if self.config.dictionary == "memory_bank":
            return self._loss_by_bank(queries, batch), {}
        if self.config.dictionary == "batch":
            keys = self.keys(images, given.number if given else 0)
            mark("loss")
            return self._loss_in_batch(queries, keys, given), {}
        with torch.no_grad():
            keys = self.keys(images, len(self._seen))
        self._seen.append((keys,))
        mark("loss")
        return self._loss_by_queue(queries, keys), {}

    def _what_is_seen(self, queries: torch.Tensor) -> Seen:
        config, keys = self.config, len(self._key_views) * self._batch_size
        if config.dictionary == "batch":
            return Seen(self._batch_size, queries.flatten(0, 1))
        age = min(self._step, config.negatives / keys) if config.dictionary == "queue" else None
        return Seen(1 + config.negatives, queries.flatten(0, 1), queue_age=age)

    def queries(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Unit-length embeddings (V, B, D) of the views that are compared with any key.

        Views of one size go through the trunk together, if not apart, a BatchNorm group at a time.
        """
        found = []
        wanted = [images[view] for view in self._query_views]
        runs = itertools.groupby(wanted, key=lambda image: image.shape[-1])
        for run in [[image] for image in wanted] if self._views_apart else [list(run) for _, run in runs]:
            groups = zip(*(image.chunk(max(1, self._passes)) for image in run), strict=True)
            features = [self.trunk(_joined(group)).unflatten(0, (len(group), -1)) for group in groups]
            found.append(torch.cat(features, dim=1))
        whole = torch.cat(found)  # a norm in the head sees all of them
        return _unit(self.projection_head(whole.flatten(0, 1)).unflatten(0, whole.shape[:2]))

    def keys(self, images: list[torch.Tensor], part: int) -> torch.Tensor:
        """Unit-length embeddings (key views, processes * B, D) of all processes' images, in rank order."""
        return torch.stack([self._keys_of(images[view], part, view) for view in self.config.key_views])

    def _keys_of(self, images: torch.Tensor, part: int, view: int) -> torch.Tensor:
        if not self._passes:
            return self.world.gather(self._encode_key(images))
        everyone = self.world.gather(images)
        order = self.shuffled(len(everyone), part, view).to(images.device)
        mine = everyone[order.chunk(self.world.world_size)[self.world.rank]]
        if images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last):
            mine = mine.contiguous(memory_format=torch.channels_last)
        encoded = torch.cat([self._encode_key(group) for group in mine.chunk(self._passes)])
        return self.world.gather(encoded)[order.argsort()]

    def shuffled(self, count: int, part: int, view: int) -> torch.Tensor:
        """The order, (count,), in which the keys of this step are encoded; the same in all processes.

        It depends on the step alone: which images the step has is what the run's seed decides.
        """
        key = keyed_key(0, "moco shuffle", self._step, part, view)
        return torch.from_numpy(keyed_permutation(key, count))

    def _encode_key(self, images: torch.Tensor) -> torch.Tensor:
        if self.config.dictionary == "queue":
            return _unit(self.momentum_encoder.projection_head(self.momentum_encoder(images)))
        return _unit(self.projection_head(self.trunk(images)))

    def _others(self, queries: torch.Tensor, key_view: int) -> torch.Tensor:
        """(V, B, D) -> those of all views but ``key_view``."""
        return queries[[place for place, view in enumerate(self._query_views) if view != key_view]]

    def _loss_by_queue(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        losses = []
        for view, of_view in zip(self._key_views, keys, strict=True):
            others = self._others(queries, view)
            own = of_view.chunk(self.world.world_size)[self.world.rank].expand_as(others)
            losses.append(
                info_nce(others.flatten(0, 1), own.flatten(0, 1), self.queue, self.config.temperature)
            )
        return torch.stack(losses).mean()

    def _loss_in_batch(self, queries: torch.Tensor, keys: torch.Tensor, given: _Parts | None) -> torch.Tensor:
        number, all_queries, all_keys = given or _Parts(0, [queries], [keys])
        parts, size = len(all_keys), queries.shape[1]
        place = slice(number, number + 1)
        all_queries, all_keys = list(all_queries), list(all_keys)
        all_queries[place], all_keys[place] = [queries], [keys]
        # Keys: parts, processes, images.
        index = torch.arange(parts * self.world.world_size * size, device=queries.device)
        own = index.view(parts, self.world.world_size, size)[:, self.world.rank].flatten()
        whole_queries, whole_keys = torch.cat(all_queries, dim=1), torch.cat(all_keys, dim=1)
        losses = []
        for view, of_view in zip(self._key_views, whole_keys, strict=True):
            others = self._others(whole_queries, view)
            repeated = own.repeat(len(others))
            losses.append(info_nce_in_batch(others.flatten(0, 1), of_view, repeated, self.config.temperature))
        loss = torch.stack(losses).mean()
        # Each part has the whole loss, but only its own embeddings' share of the gradient, and the parts'
        # gradients are averaged.
        return loss.detach() + parts * (loss - loss.detach())

    def _loss_by_bank(self, queries: torch.Tensor, batch: Batch) -> torch.Tensor:
        ids = batch.ids.to(queries.device)
        with torch.no_grad():
            mean = F.normalize(queries.mean(dim=0), dim=1)
            self._seen.append((self.world.gather(ids), self.world.gather(mean)))
        mark("loss")
        count = len(self.memory_bank)
        draws = keyed_uniforms(keyed_key(0, "moco bank", self._step), self.config.negatives)
        drawn = torch.from_numpy((draws * count).astype("int64")).to(queries.device)
        own = self.memory_bank[ids].expand_as(queries).flatten(0, 1)
        excluded = (drawn == ids[:, None]).repeat(len(queries), 1)
        negatives = self.memory_bank[drawn].T
        return info_nce(queries.flatten(0, 1), own, negatives, self.config.temperature, excluded)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self.config.dictionary == "queue":
            keys = torch.stack([keys for (keys,) in self._seen])  # parts, views, processes * images, D
            whole = keys.unflatten(2, (self.world.world_size, -1)).permute(1, 2, 0, 3, 4)
            self.enqueue(whole.flatten(0, 3))
        elif self.config.dictionary == "memory_bank":
            self._remember(*(torch.cat(tensors) for tensors in zip(*self._seen, strict=True)))
        self._seen.clear()

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        """Put keys (N, D) in the place of the oldest ones, from ``queue_ptr`` on; it wraps at the end."""
        length = self.queue.shape[1]
        places = torch.arange(len(keys), device=keys.device)[-length:]  # a place twice would be undefined
        self.queue.index_copy_(1, (places + self.queue_ptr) % length, keys[-length:].T)
        self.queue_ptr.add_(len(keys)).remainder_(length)

    def _remember(self, ids: torch.Tensor, embeddings: torch.Tensor) -> None:
        """v <- the unit vector along m v + (1 - m) embedding; of an image seen twice the last one counts."""
        unique, places = ids.unique(return_inverse=True)
        order = torch.arange(len(ids), device=ids.device)
        last = torch.zeros_like(unique).scatter_reduce_(0, places, order, "amax")
        moved = torch.lerp(embeddings[last], self.memory_bank[unique], self.config.bank_momentum)
        self.memory_bank[unique] = F.normalize(moved, dim=1)


def _by_view(views: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Runs of views of one size, (count * B, ...), crop-major -> each view's images."""
    return [view for group in views for view in group.split(size)]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _unit(projected: torch.Tensor) -> torch.Tensor:
    """Unit-length embeddings, in float32 at least."""
    with torch.autocast(projected.device.type, enabled=False):
        return F.normalize(promote(projected), dim=-1)
