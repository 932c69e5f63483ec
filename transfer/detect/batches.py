"""What the detector trains on: batches of views in keyed order, the same for any number of workers and processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from zoo.data.resources import end_workers, explained_worker_failures, settle_worker, watch_workers
from zoo.errors import ZooError
from zoo.keyed import keyed_key, keyed_permutation, keyed_seed

from .annotations import BoxSet
from .models.images import Target
from .rle import bitmap_of
from .views import draw_view, flip_boxes, flip_mask, output_size, resize, scale_mask

__all__ = ["DetectionBatch", "Stream", "to_tensor", "view_for_test"]

_MEMORY = (
    "take fewer images a step (--batch-size; the rate follows), a smaller --min-size, --schedule small, or "
    "--precision bfloat16"
)


@dataclass
class DetectionBatch:
    """Images uint8 (3, h, w) of any sizes, their objects, and where they come from.

    ``ids`` are the samples' places in the set, ``keys`` the seeds of what is drawn in their steps.
    """

    pictures: list[torch.Tensor]
    boxes: list[torch.Tensor]
    labels: list[torch.Tensor]
    masks: list[list[Any] | None]
    ids: torch.Tensor
    keys: list[int]
    memory_advice: str = _MEMORY

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def views(self) -> list[torch.Tensor]:
        """The images as batches of one each, for whoever counts pixels."""
        return [picture.unsqueeze(0) for picture in self.pictures]

    def targets(self, device: torch.device) -> list[Target]:
        """The objects, on a device; each image's samples are drawn from a generator of its own."""
        return [
            Target(boxes.to(device), labels.to(device), masks, torch.Generator().manual_seed(key))
            for boxes, labels, masks, key in zip(self.boxes, self.labels, self.masks, self.keys, strict=True)
        ]


@dataclass(frozen=True)
class Stream(Dataset[Any]):
    """The endless stream of training views: pass after pass over the set, each in an order of its own.

    Args:
        images: the set.
        seed: of the order, the views and the samples.
        sizes: shorter sides to draw from.
        most: longest side.
        masks: whether objects come with their masks.
    """

    images: BoxSet
    seed: int
    sizes: tuple[int, ...]
    most: int
    masks: bool = False

    def __len__(self) -> int:
        return sys.maxsize

    def place(self, position: int) -> tuple[int, int]:
        """The pass and the sample at a position of the stream."""
        epoch, row = divmod(position, len(self.images))
        return epoch, int(_order(self.seed, epoch, len(self.images))[row])

    def __getitem__(self, position: int) -> Any:
        try:
            return self._view(*self.place(position))
        except ZooError as error:  # it travels as a value: torch would rebuild it from its text
            return error

    def _view(self, epoch: int, sample: int) -> tuple[Any, ...]:
        picture = self.images.pictures[sample]
        pixels = self.images.read(sample)
        old = pixels.shape[0], pixels.shape[1]
        short, flip = draw_view(self.seed, epoch, sample, self.sizes)
        new = output_size(*old, short, self.most)
        boxes = picture.objects.boxes * np.array([new[1] / old[1], new[0] / old[0]] * 2)
        masks = None
        if self.masks:
            objects = picture.objects
            masks = [
                scale_mask(_as_mask(mask, box, old), old, new)
                for mask, box in zip(objects.masks or [None] * len(objects), objects.boxes, strict=True)
            ]
        pixels = resize(pixels, new)
        if flip:
            pixels, boxes = pixels[:, ::-1], flip_boxes(boxes, new[1])
            masks = None if masks is None else [flip_mask(mask, new[1]) for mask in masks]
        labels = torch.from_numpy(picture.objects.labels)
        key = keyed_seed(self.seed, "detect samples", epoch, sample)
        return to_tensor(pixels), torch.from_numpy(boxes).float(), labels, masks, sample, key

    def batches(
        self, first: int, last: int, batch: int, workers: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[DetectionBatch]:
        """This process's share of the batches of steps ``first`` to ``last`` (exclusive).

        Raises:
            InputError: an image can't be read, by name.
        """
        loader: DataLoader[Any] = DataLoader(
            self,
            batch_sampler=_Rows(range(first, last), batch, batch // world_size, rank),
            collate_fn=_together,
            num_workers=workers,
            worker_init_fn=_start_worker,
            prefetch_factor=2 if workers else None,
            multiprocessing_context=multiprocessing.get_context("fork" if sys.platform == "linux" else None)
            if workers
            else None,
            generator=torch.Generator(),  # the global generator stays as it is
        )
        with explained_worker_failures():
            found = iter(loader)
        if workers:
            watch_workers(found)
        try:
            while True:
                with explained_worker_failures():
                    one = next(found, None)
                if one is None:
                    return
                if isinstance(one, ZooError):
                    raise one
                yield one
        finally:
            end_workers(found)


@dataclass(frozen=True)
class _Rows:
    """The positions of each step's share, made when they are asked for."""

    steps: range
    batch: int
    share: int
    rank: int

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            first = step * self.batch + self.rank * self.share
            yield list(range(first, first + self.share))


_kept: dict[tuple[int, int, int], np.ndarray] = {}


def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """A pass's order; the last one is kept, since a stream asks for it at every sample."""
    key = (seed, epoch, count)
    if key not in _kept:
        if len(_kept) > 1:
            _kept.clear()
        _kept[key] = keyed_permutation(keyed_key(seed, "detect order", epoch), count)
    return _kept[key]


def _as_mask(mask: Any, box: np.ndarray, size: tuple[int, ...]) -> Any:
    """Polygons as they are, run lengths as a bitmap; an object without a mask fills its box."""
    if mask is None:
        x1, y1, x2, y2 = box.tolist()
        return [[x1, y1, x2, y1, x2, y2, x1, y2]]
    return mask if isinstance(mask, list) else bitmap_of(mask, size[0], size[1])


def to_tensor(pixels: np.ndarray) -> torch.Tensor:
    """uint8 (H, W, 3) -> (3, H, W), a copy."""
    return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))


def _together(parts: Sequence[Any]) -> Any:
    for part in parts:
        if isinstance(part, ZooError):
            return part
    views, boxes, labels, masks, samples, keys = zip(*parts, strict=True)
    return DetectionBatch(
        list(views), list(boxes), list(labels), list(masks), torch.tensor(samples), list(keys)
    )


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    # Ctrl-C reaches the whole process group; whether to stop is the training process's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle_worker()


def view_for_test(
    images: BoxSet,
    row: int,
    short: int,
    most: int,
    size: Callable[[int, int, int, int], tuple[int, int]] = output_size,
) -> tuple[torch.Tensor, tuple[int, int]]:
    """An image as the test sees it, uint8 (3, h, w), and its own (height, width).

    ``size`` tells that of the view from the image's and from the sides asked for.
    """
    pixels = images.read(row)
    old = pixels.shape[0], pixels.shape[1]
    return to_tensor(resize(pixels, size(*old, short, most))), old
