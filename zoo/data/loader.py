"""Batches of views, in keyed order, from data workers."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import InputError, ZooError
from ..keyed import keyed_key, keyed_permutation, keyed_uniforms
from .source import ImageSource
from .views.apply import apply_view
from .views.params import DRAWS_PER_VIEW, ViewPlan, draw_view

__all__ = ["BadFile", "Batch", "EpochOrder", "view_batches"]

_SUBSTITUTES = 20


@dataclass(frozen=True)
class BadFile:
    """An image that could not be read and was left out."""

    sample: int
    where: str
    problem: str


@dataclass
class Batch:
    """The views of B images.

    ``views`` has one uint8 tensor for each run of views of one size, (count * B, 3, size, size) in
    channels-last memory, crop-major: rows [v * B, (v + 1) * B) are view v of all images. ``ids`` and
    ``labels`` are int64 (B,), labels -1 where there are none.
    """

    views: list[torch.Tensor]
    ids: torch.Tensor
    labels: torch.Tensor
    epoch: int
    bad: list[BadFile] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.ids)

    def pin_memory(self) -> Batch:
        self.views = [view.pin_memory() for view in self.views]
        return self


@dataclass(frozen=True)
class EpochOrder:
    """Which samples make up which batch: a keyed shuffle of each epoch, the last short batch dropped."""

    samples: int
    batch_size: int
    seed: int

    @property
    def batches(self) -> int:
        """Batches an epoch."""
        return self.samples // self.batch_size

    def epoch(self, epoch: int) -> np.ndarray:
        """Sample ids of one epoch, (batches, batch_size)."""
        order = keyed_permutation(keyed_key(self.seed, "order", epoch), self.samples)
        return order[: self.batches * self.batch_size].reshape(self.batches, self.batch_size)


class _BatchSampler(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, sample) from a step on: one endless worker pool serves all epochs."""

    def __init__(self, order: EpochOrder, first_step: int, last_step: int) -> None:
        self.order = order
        self.first_step = first_step
        self.last_step = last_step

    def __len__(self) -> int:
        return max(0, self.last_step - self.first_step)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.first_step
        while step < self.last_step:
            epoch, position = divmod(step, self.order.batches)
            for row in self.order.epoch(epoch)[position : position + self.last_step - step]:
                yield [(epoch, int(sample)) for sample in row]
                step += 1


class _ViewDataset(Dataset[Any]):
    """Reads images and makes their views, a whole batch at a time."""

    def __init__(self, source: ImageSource, plan: ViewPlan, seed: int, skip_bad: bool) -> None:
        self.source = source
        self.plan = plan
        self.seed = seed
        self.skip_bad = skip_bad
        self._groups = plan.groups
        # (which run of equal sizes, place inside it) of each view
        self._slots = [(g, inner) for g, (_, n) in enumerate(self._groups) for inner in range(n)]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Batch | ZooError:
        try:
            return self._batch(keys)
        except ZooError as error:
            # Raised again in the training process; torch would bury it in a worker's traceback.
            return error

    def _batch(self, keys: Sequence[tuple[int, int]]) -> Batch:
        count = len(keys)
        views = [np.empty((n, count, size, size, 3), dtype=np.uint8) for size, n in self._groups]
        ids = np.empty(count, dtype=np.int64)
        labels = np.empty(count, dtype=np.int64)
        bad: list[BadFile] = []
        for row, (epoch, wanted) in enumerate(keys):
            sample, pixels = self._read(epoch, wanted, bad)
            ids[row], labels[row] = sample, self.source.label(sample)
            for (group, inner), view in zip(self._slots, self._views(pixels, epoch, sample), strict=True):
                views[group][inner, row] = view
        tensors = [
            torch.from_numpy(v.reshape(-1, *v.shape[2:])).permute(0, 3, 1, 2)  # channels-last memory
            for v in views
        ]
        return Batch(tensors, torch.from_numpy(ids), torch.from_numpy(labels), keys[0][0], bad)

    def _views(self, pixels: np.ndarray, epoch: int, sample: int) -> Iterator[np.ndarray]:
        image = Image.fromarray(pixels)
        key = keyed_key(self.seed, "views", epoch, sample)
        crops = self.plan.crops
        draws = keyed_uniforms(key, len(crops) * DRAWS_PER_VIEW).reshape(len(crops), -1).tolist()
        for crop, u in zip(crops, draws, strict=True):
            yield apply_view(image, draw_view(self.plan, crop, image.height, image.width, u))

    def _read(self, epoch: int, wanted: int, bad: list[BadFile]) -> tuple[int, np.ndarray]:
        sample = wanted
        for attempt in range(_SUBSTITUTES):
            try:
                return sample, self.source.read(sample)
            except InputError as error:
                if not self.skip_bad:
                    raise
                bad.append(BadFile(sample, error.where or self.source.where(sample), error.what))
            draw = keyed_uniforms(keyed_key(self.seed, "substitute", epoch, wanted, attempt), 1)[0]
            sample = int(draw * len(self.source))
        raise InputError(
            f"{_SUBSTITUTES} images in a row could not be read.",
            where=bad[-1].where,
            fix="check the data: most of it seems to be damaged or gone",
        )


def _identity(batch: Any) -> Any:
    return batch


def _mind_the_next(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    # Signals reach the whole process group; whether to stop is the training process's decision.
    # A worker whose parent died ends by itself (torch's watchdog).
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # The first SIGTERM may be the group's; a second one is torch's own, for a worker that is in the way.
    signal.signal(signal.SIGTERM, _mind_the_next)


def view_batches(
    source: ImageSource,
    plan: ViewPlan,
    order: EpochOrder,
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
        plan: how their views are made.
        order: which samples go into which batch.
        first_step: the first step wanted, counted from the start of training.
        last_step: where to stop.
        workers: data processes; 0 works in this one.
        skip_bad: replace an unreadable image by another one (drawn by key) and report it in
            ``Batch.bad``, instead of raising.
        pin_memory: hand out page-locked memory for a faster copy to a GPU.

    Raises:
        InputError: an unreadable image, by name (unless ``skip_bad``).
    """
    loader: DataLoader[Batch | ZooError] = DataLoader(
        _ViewDataset(source, plan, order.seed, skip_bad),
        batch_sampler=_BatchSampler(order, first_step, last_step),
        collate_fn=_identity,
        num_workers=workers,
        worker_init_fn=_start_worker,
        pin_memory=pin_memory,
        prefetch_factor=2 if workers else None,
        multiprocessing_context=multiprocessing.get_context() if workers else None,
        generator=torch.Generator(),  # its seeds are not used; the global generator stays as it is
    )
    for batch in loader:
        if isinstance(batch, ZooError):
            raise batch
        yield batch
