"""What DETR sees of an image in training: a flip, half the time a crop, one of several sizes.

Source: DETR ``datasets/transforms.py`` and ``datasets/coco.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.keyed import keyed_key, keyed_uniforms

from ..views import flip_boxes, resize

if TYPE_CHECKING:
    import torch

__all__ = ["Crops", "View", "crop_boxes", "detr_size", "draw_detr_view", "in_shares", "make_view"]


@dataclass(frozen=True)
class Crops:
    """Shorter sides that an image is resized to before it is cropped, and the least and most of a crop's sides."""

    shorts: tuple[int, ...]
    least: int
    most: int


@dataclass(frozen=True)
class View:
    """What was drawn: the last shorter side, the flip, and what is needed for a crop.

    ``before`` is the shorter side before the crop, 0 without one; ``crop`` its height, width, top and left as
    shares of what is possible.
    """

    short: int
    flip: bool
    before: int = 0
    crop: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


def detr_size(height: int, width: int, short: int, most: int | None) -> tuple[int, int]:
    """The (height, width) with the shorter side ``short``, less where the longer would exceed ``most``.

    The longer side is truncated, and may exceed ``most`` by a little, since the shorter one is rounded. What would be
    thinner than a pixel, where the reference fails, has one.
    """
    least, longest = min(height, width), max(height, width)
    if most is not None and longest / least * short > most:
        short = round(most * least / longest)
        if short < 1:
            return (most, 1) if width < height else (1, most)
    if short == least:
        return height, width
    return (int(short * height / width), short) if width < height else (short, int(short * width / height))


def draw_detr_view(seed: int, epoch: int, sample: int, sizes: Sequence[int], crops: Crops | None) -> View:
    """The view of a sample in an epoch."""
    u = keyed_uniforms(keyed_key(seed, "detr view", epoch, sample), 8)
    short, flip = sizes[int(u[0] * len(sizes))], bool(u[1] < 0.5)
    if crops is None or u[2] >= 0.5:
        return View(short, flip)
    before = crops.shorts[int(u[3] * len(crops.shorts))]
    return View(short, flip, before, (float(u[4]), float(u[5]), float(u[6]), float(u[7])))


def make_view(
    pixels: np.ndarray, boxes: np.ndarray, view: View, most: int, crops: Crops | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Apply a view.

    Args:
        pixels: uint8 (H, W, 3).
        boxes: (N, 4).
        view: what was drawn.
        most: the longest side.
        crops: what it was drawn from.

    Returns:
        The pixels, the boxes that are left, and the rows that they had.
    """
    rows = np.arange(len(boxes))
    if view.flip:
        pixels, boxes = pixels[:, ::-1], flip_boxes(boxes, pixels.shape[1])
    if view.before and crops is not None:
        pixels, boxes = _resized(pixels, boxes, view.before, None)
        top, left, height, width = _region(pixels.shape, view.crop, crops)
        pixels = pixels[top : top + height, left : left + width]
        boxes, rows = crop_boxes(boxes, top, left, height, width)
    pixels, boxes = _resized(pixels, boxes, view.short, most)
    return pixels, boxes, rows


def _resized(
    pixels: np.ndarray, boxes: np.ndarray, short: int, most: int | None
) -> tuple[np.ndarray, np.ndarray]:
    old = pixels.shape[0], pixels.shape[1]
    new = detr_size(*old, short, most)
    return resize(np.ascontiguousarray(pixels), new), boxes * np.array([new[1] / old[1], new[0] / old[0]] * 2)


def _region(
    shape: Sequence[int], drawn: tuple[float, float, float, float], crops: Crops
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop; an image below the least side is taken whole in that direction."""
    sides, places = [], []
    for size, side, place in zip(shape[:2], drawn[:2], drawn[2:], strict=True):
        least, most = min(crops.least, size), min(crops.most, size)
        sides.append(least + int(side * (most - least + 1)))
        places.append(int(place * (size - sides[-1] + 1)))
    return places[0], places[1], sides[0], sides[1]


def crop_boxes(
    boxes: np.ndarray, top: int, left: int, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """The boxes (N, 4) as far as they are inside, in the crop's pixels, and the rows of those that are left."""
    moved = (boxes - [left, top, left, top]).clip(0, [width, height, width, height])
    rows = np.flatnonzero((moved[:, 2:] > moved[:, :2]).all(axis=1))
    return moved[rows], rows


def in_shares(boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Boxes (N, 4) in pixels as center, width and height in shares of an image of (height, width)."""
    import torch

    x1, y1, x2, y2 = boxes.unbind(1)
    height, width = size
    values: Any = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
    return torch.stack(values, dim=1)
