"""Which samples make up which batch, where samples lie in shards: nearly sequential, and known in advance.

An epoch puts the shards into a keyed order and lays them end to end. This sequence is cut into ``lanes`` of
equal length, and each batch takes as many samples from each lane, from front to back: so processes read
different shards. Within a lane ``window`` shards at a time are shuffled together, by key. What is held are the
order of the shards and one window a lane; any step of any epoch is found without what comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...keyed import keyed_key, keyed_permutation
from ..loader import BatchOrder, EpochOrder
from ..source import ImageSource

__all__ = ["ShardOrder", "order_of"]

_LANES = 64  # at most
_LANE = 32  # images of a batch that are worth a lane of their own
_SHARDS = 32  # that are shuffled together, over all lanes
_LONGEST = 1 << 16  # samples: a longer shard is taken for several


class ShardOrder:
    """A keyed shuffle of shards and, in windows, of their samples; the last short batch is dropped.

    The batches are the same for any number of processes; each takes its equal share of each of them.

    Args:
        stretches: samples of each shard; the samples' ids count through them.
        batch_size: images of all processes, a multiple of ``world_size``.
        seed: of the shuffle.
        rank: this process.
        world_size: all processes.
        lanes: a divisor of ``batch_size``; by default a power of two that suits it.
        window: shards of a lane that are shuffled together; by default so many that 32 are over all lanes, but
            two at least.
        soon: is told some ids of the shards of a window, and of the next one, when it is entered.
    """

    def __init__(
        self,
        stretches: np.ndarray,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        lanes: int | None = None,
        window: int | None = None,
        soon: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.counts = _cut(stretches)
        self.samples = int(self.counts.sum())
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.lanes = _lanes(batch_size) if lanes is None else lanes
        self.window = max(2, _SHARDS // self.lanes) if window is None else window
        self.soon = soon

    @property
    def batches(self) -> int:
        """Batches an epoch."""
        return self.samples // self.batch_size

    def rows(self, epoch: int, first: int, last: int) -> Iterator[np.ndarray]:
        """This process's sample ids of the epoch's batches ``first`` to ``last`` (exclusive), int64 each."""
        share, each = self.batch_size // self.world_size, self.batch_size // self.lanes
        low, high = self.rank * share, (self.rank + 1) * share
        sequence = _Sequence(self.counts, self.seed, epoch)
        mine = []
        for lane in range(low // each, -(-high // each)):
            begin, end = max(low - lane * each, 0), min(high - lane * each, each)
            mine.append((_Lane(self, sequence, lane), begin, end))
        for batch in range(first, last):
            parts = [lane.take(batch * each + begin, batch * each + end) for lane, begin, end in mine]
            yield np.concatenate(parts)


class _Sequence:
    """One epoch's order of the shards."""

    def __init__(self, counts: np.ndarray, seed: int, epoch: int) -> None:
        self.epoch = epoch
        self.order = keyed_permutation(keyed_key(seed, "shards", epoch), len(counts))
        self.ends = np.cumsum(counts[self.order])
        self.begins = self.ends - counts[self.order]
        self.first_ids = (np.cumsum(counts) - counts)[self.order]


class _Lane:
    """A part of the sequence that is read from front to back, a window at a time."""

    def __init__(self, order: ShardOrder, sequence: _Sequence, lane: int) -> None:
        self._order, self._sequence, self._lane = order, sequence, lane
        length = order.batches * (order.batch_size // order.lanes)
        self._begin, self._end = lane * length, (lane + 1) * length
        self._shard = self._shard_at(self._begin)
        self._number = -1  # of the window that is held
        self._start, self._ids = 0, np.empty(0, np.int64)

    def _shard_at(self, position: int) -> int:
        return int(np.searchsorted(self._sequence.ends, position, "right"))

    def take(self, first: int, last: int) -> np.ndarray:
        """Ids at these positions of the lane."""
        found = []
        position, last = self._begin + first, self._begin + last
        while position < last:
            number = (self._shard_at(position) - self._shard) // self._order.window
            if number != self._number:
                self._enter(number)
            ids = self._ids[position - self._start : last - self._start]
            found.append(ids)
            position += len(ids)
        return np.concatenate(found)

    def _enter(self, number: int) -> None:
        sequence, order = self._sequence, self._order
        self._number = number
        self._start, ids = self._ids_of(number)
        key = keyed_key(order.seed, "window", sequence.epoch, self._lane, number)
        self._ids = ids[keyed_permutation(key, len(ids))]
        if order.soon is not None:
            order.soon(self._some_of(number) + self._some_of(number + 1))

    def _ids_of(self, number: int) -> tuple[int, np.ndarray]:
        """Where a window begins, and its ids in their natural order."""
        sequence = self._sequence
        parts = []
        for shard in self._shards_of(number):
            begin = max(int(sequence.begins[shard]), self._begin)
            end = min(int(sequence.ends[shard]), self._end)
            first = int(sequence.first_ids[shard] - sequence.begins[shard])
            parts.append(np.arange(first + begin, first + end, dtype=np.int64))
        start = max(int(sequence.begins[self._shards_of(number)[0]]), self._begin)
        return start, np.concatenate(parts)

    def _shards_of(self, number: int) -> range:
        first = self._shard + number * self._order.window
        last = min(first + self._order.window, self._shard_at(self._end - 1) + 1)
        return range(first, last)

    def _some_of(self, number: int) -> list[int]:
        return [int(self._sequence.first_ids[shard]) for shard in self._shards_of(number)]


def _lanes(batch_size: int) -> int:
    lanes = 1
    while lanes < _LANES and 2 * lanes * _LANE <= batch_size and batch_size % (2 * lanes) == 0:
        lanes *= 2
    return lanes


def _cut(stretches: np.ndarray) -> np.ndarray:
    """The same samples in stretches that are not too long, none of them empty."""
    counts = stretches[stretches > 0].astype(np.int64)
    if counts.max(initial=0) <= _LONGEST:
        return counts
    parts = -(-counts // _LONGEST)
    cut = np.repeat(counts // parts, parts)
    # The rest goes to the first parts, one sample each.
    place = np.arange(len(cut)) - np.repeat(np.cumsum(parts) - parts, parts)
    return cut + (place < np.repeat(counts % parts, parts))


def order_of(
    source: ImageSource, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
) -> BatchOrder:
    """The order that suits a source: by its ``stretches`` (and ``window``) where it has them.

    A source that can't afford many open stretches has a ``window``; then that many are shuffled together and
    all processes read the same ones.
    """
    stretches: Any = getattr(source, "stretches", None)
    if stretches is None:
        return EpochOrder(len(source), batch_size, seed, rank, world_size)
    window = getattr(source, "window", None)
    return ShardOrder(
        stretches,
        batch_size,
        seed,
        rank,
        world_size,
        lanes=None if window is None else 1,
        window=window,
        soon=getattr(source, "soon", None),
    )
