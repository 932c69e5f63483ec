"""Batches of views, in keyed order, from data workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ..errors import InputError, ZooError
from ..heap import keep_freed_memory
from ..keyed import keyed_key, keyed_permutation, keyed_uniforms
from .resources import (
    batch_memory,
    check_shared_memory,
    end_workers,
    explained_worker_failures,
    raise_handle_limit,
    settle_worker,
    watch_workers,
)
from .room import Room, Slot, Wanted, arrived
from .source import ImageSource, open_picture
from .views.device import ColorTable, color_table
from .views.maker import ViewMaker
from .views.params import ViewParams

__all__ = ["BadFile", "Batch", "BatchOrder", "EpochOrder", "view_batches"]

_SUBSTITUTES = 20
_PREFETCH = 2  # batches that each worker is ahead


@dataclass(frozen=True)
class BadFile:
    """An image that could not be read and was left out."""

    sample: int
    where: str
    problem: str


@dataclass
class Batch:
    """The views of B images.

    ``views`` has one uint8 tensor for each run of views of one size, (count * B, C, size, size) in
    channels-last memory, crop-major: rows [v * B, (v + 1) * B) are view v of all images. ``ids`` and
    ``labels`` are int64 (B,), labels -1 where there are none.
    """

    views: list[torch.Tensor]
    ids: torch.Tensor
    labels: torch.Tensor
    epoch: int
    bad: list[BadFile] = field(default_factory=list)
    colors: list[ColorTable] | None = None
    """Colour parameters of ``views``, row by row, where colours are left to the device."""
    slot: Slot | None = field(default=None, repr=False)
    """Where a worker put the views; then it sends their places."""

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        if slot := state.pop("slot"):
            # Not the numbers': who collects labels shall not hold the views' memory.
            numbers = state.pop("ids").numpy(), state.pop("labels").numpy()
            state["sent"] = slot.sent(state.pop("views")), *numbers
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if sent := state.pop("sent", None):
            places, *numbers = sent
            state["views"] = arrived(*places)
            state["ids"], state["labels"] = map(torch.from_numpy, numbers)
        vars(self).update(state, slot=None)

    @property
    def size(self) -> int:
        return len(self.ids)

    def split(self, parts: int) -> list[Batch]:
        """Equal parts of the images, each with all its views.

        Raises:
            ValueError: the batch can't be divided into so many parts.
        """
        if self.size % parts:
            raise ValueError(f"{self.size} images can't be divided into {parts} equal parts")
        size = self.size // parts
        return [self._rows(slice(first, first + size)) for first in range(0, self.size, size)]

    def _rows(self, rows: slice) -> Batch:
        groups = [view.unflatten(0, (-1, self.size))[:, rows] for view in self.views]
        colors = self.colors and [table.rows_of(rows, self.size) for table in self.colors]
        return Batch(
            [
                group.flatten(0, 1).contiguous(memory_format=torch.channels_last)
                if group.shape[2] > 1
                else group.flatten(0, 1)
                for group in groups
            ],
            self.ids[rows],
            self.labels[rows],
            self.epoch,
            colors=colors,
        )

    def pin_memory(self) -> Batch:
        self.views = [view.pin_memory() for view in self.views]
        return self


class BatchOrder(Protocol):
    """Which samples make up which batch, as a function of nothing but the seed and the step."""

    @property
    def batch_size(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def batches(self) -> int: ...
    def rows(self, epoch: int, first: int, last: int) -> Iterator[np.ndarray]: ...


@dataclass(frozen=True)
class EpochOrder:
    """Which samples make up which batch: a keyed shuffle of each epoch, the last short batch dropped.

    The batches are the same for any number of processes; each takes its equal share of each of them.
    ``batch_size`` counts the images of all processes and is a multiple of ``world_size``.
    """

    samples: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    @property
    def batches(self) -> int:
        """Batches an epoch."""
        return self.samples // self.batch_size

    def epoch(self, epoch: int) -> np.ndarray:
        """This process's sample ids of one epoch, (batches, batch_size / world_size)."""
        order = keyed_permutation(keyed_key(self.seed, "order", epoch), self.samples)
        whole = order[: self.batches * self.batch_size].reshape(self.batches, self.world_size, -1)
        return whole[:, self.rank]

    def rows(self, epoch: int, first: int, last: int) -> Iterator[np.ndarray]:
        """This process's sample ids of the epoch's batches ``first`` to ``last`` (exclusive)."""
        return iter(self.epoch(epoch)[first:last])


class _BatchSampler(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, sample) from a step on: one endless worker pool serves all epochs."""

    def __init__(self, order: BatchOrder, first_step: int, last_step: int) -> None:
        self.order = order
        self.first_step = first_step
        self.last_step = last_step

    def __len__(self) -> int:
        return max(0, self.last_step - self.first_step)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.first_step
        while step < self.last_step:
            epoch, position = divmod(step, self.order.batches)
            last = min(self.order.batches, position + self.last_step - step)
            for row in self.order.rows(epoch, position, last):
                yield [(epoch, int(sample)) for sample in row]
                step += 1


class _ViewDataset(Dataset[Any]):
    """Reads images and makes their views, a whole batch at a time."""

    def __init__(
        self, source: ImageSource, maker: ViewMaker, seed: int, skip_bad: bool, room: Room | None = None
    ) -> None:
        self.source = source
        self.maker = maker
        self.seed = seed
        self.skip_bad = skip_bad
        self.room = room

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Batch | ZooError:
        try:
            return self._batch(keys)
        except ZooError as error:
            # Raised again in the training process; torch would bury it in a worker's traceback.
            return error

    def _batch(self, keys: Sequence[tuple[int, int]]) -> Batch:
        bad: list[BadFile] = []
        ids: list[int] = []
        params: list[Sequence[ViewParams]] = []
        slot: Slot | None = None
        memory: list[torch.Tensor] = []
        places: list[np.ndarray] = []  # of each view, all images'
        for row, (epoch, wanted) in enumerate(keys):
            sample, views, drawn = self._sample(epoch, wanted, bad)
            ids.append(sample)
            params.append(drawn)
            if not memory:
                slot, memory = self._memory(len(keys), views)
                places = [place for group in memory for place in group.numpy()]
            # Now, while the views are in the processor's cache.
            for place, view in zip(places, views, strict=True):
                if view.shape != place.shape[1:] or view.dtype != place.dtype:
                    raise InputError(
                        f"The views are {view.dtype} of shape {view.shape} where those of other images are "
                        f"{place.dtype} of shape {place.shape[1:]}.",
                        where=self.source.where(sample),
                        fix="make all images' views alike: one number of channels, one type",
                    )
                place[row] = view
        shape = 2, len(ids)
        numbers = torch.empty(shape, dtype=torch.int64) if slot else batch_memory(shape, np.dtype(np.int64))
        numbers.numpy()[:] = ids, [self.source.label(sample) for sample in ids]
        return Batch(
            views=[group.flatten(0, 1).permute(0, 3, 1, 2) for group in memory],  # channels-last
            ids=numbers[0],
            labels=numbers[1],
            epoch=keys[0][0],
            bad=bad,
            colors=self._colors(params) if all(params) else None,
            slot=slot,
        )

    def _memory(self, images: int, views: Sequence[np.ndarray]) -> tuple[Slot | None, list[torch.Tensor]]:
        """Crop-major room for each group (all images' first view, then all images' second view, ...): in a slot, if
        there is a free one that is large enough.
        """
        wanted: list[Wanted] = []
        first = 0
        for _, count in self.maker.groups:
            wanted.append(((count, images, *views[first].shape), views[first].dtype))
            first += count
        worker = get_worker_info()
        slot = self.room.take(worker.id, wanted) if self.room and worker else None
        return slot, slot.tensors if slot else [batch_memory(*one) for one in wanted]

    def _colors(self, params: Sequence[Sequence[ViewParams]]) -> list[ColorTable]:
        by_view = list(zip(*params, strict=True))
        tables, first = [], 0
        for _, count in self.maker.groups:
            tables.append(color_table([row for rows in by_view[first : first + count] for row in rows]))
            first += count
        return tables

    def _sample(
        self, epoch: int, wanted: int, bad: list[BadFile]
    ) -> tuple[int, Sequence[np.ndarray], Sequence[ViewParams]]:
        sample = wanted
        for attempt in range(_SUBSTITUTES):
            try:
                picture = open_picture(self.source, sample)
                return sample, *self.maker.make(picture, keyed_key(self.seed, "views", epoch, sample))
            except InputError as error:
                if not self.skip_bad:
                    raise
                bad.append(BadFile(sample, error.where or self.source.where(sample), error.what))
            draw = keyed_uniforms(keyed_key(self.seed, "substitute", epoch, wanted, attempt), 1)[0]
            sample = int(draw * len(self.source))
        raise InputError(
            f"{_SUBSTITUTES} images in a row could not be read.",
            where=bad[-1].where,
            fix="check the data (zoo data check): most of it seems to be damaged or gone",
        )


def _identity(batch: Any) -> Any:
    return batch


def _mind_the_next(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    # Signals reach the whole process group; whether to stop is the training process's decision.
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # The first SIGTERM may be the group's; a second one is torch's own, for a worker that is in the way.
    signal.signal(signal.SIGTERM, _mind_the_next)
    cv2.setNumThreads(0)
    keep_freed_memory()
    settle_worker()


def _start_method() -> str | None:
    """Forked workers share the memory of a large source; elsewhere than on Linux forking isn't safe."""
    return "fork" if sys.platform == "linux" else None


def _room(images: int, maker: ViewMaker, workers: int) -> Room | None:
    """Memory for the batches on their way. Workers that aren't forked take some for each batch anew.

    Raises:
        RunError: there isn't enough.
    """
    size = images * maker.image_bytes
    if _start_method() == "fork":
        return Room(workers, _PREFETCH, size, pieces=len(maker.groups))
    check_shared_memory(size, workers, _PREFETCH)
    return None


def view_batches(
    source: ImageSource,
    maker: ViewMaker,
    order: BatchOrder,
    *,
    first_step: int,
    last_step: int,
    workers: int,
    skip_bad: bool = False,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """The batches of steps ``first_step`` to ``last_step`` (exclusive), the same for any ``workers``.

    Args:
        source: the images.
        maker: how their views are made.
        order: which samples go into which batch.
        first_step: the first step wanted, counted from the start of training.
        last_step: where to stop.
        workers: data processes; 0 works in this one.
        skip_bad: replace an unreadable image by another one (drawn by key) and report it in
            ``Batch.bad``, instead of raising.
        pin_memory: hand out page-locked memory for a faster copy to a GPU.

    Raises:
        InputError: an unreadable image, by name (unless ``skip_bad``).
        RunError: no shared memory or file handles for the workers, or one of them was killed.
    """
    room = None
    if workers:
        raise_handle_limit(workers)
        room = _room(order.batch_size // order.world_size, maker, workers)
    loader: DataLoader[Batch | ZooError] = DataLoader(
        _ViewDataset(source, maker, order.seed, skip_bad, room),
        batch_sampler=_BatchSampler(order, first_step, last_step),
        collate_fn=_identity,
        num_workers=workers,
        worker_init_fn=_start_worker,
        pin_memory=pin_memory,
        prefetch_factor=_PREFETCH if workers else None,
        multiprocessing_context=multiprocessing.get_context(_start_method()) if workers else None,
        generator=torch.Generator(),  # its seeds are not used; the global generator stays as it is
    )
    explained = explained_worker_failures if workers else contextlib.nullcontext
    with explained():
        batches = iter(loader)
    if workers:
        watch_workers(batches)
    try:
        while True:
            with explained():
                batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, ZooError):
                raise batch
            yield batch
    finally:
        end_workers(batches)
