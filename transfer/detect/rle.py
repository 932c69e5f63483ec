"""Masks as COCO has them: polygons and run lengths, column by column. No torch here.

Source: the COCO API's ``maskApi.c``, whose grid of a fifth of a pixel decides which pixels a polygon covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["bitmap_of", "polygons_to_bitmap", "run_lengths"]

_FINE = 5.0
_LONGEST = 8  # signs of a run length


def polygons_to_bitmap(polygons: Sequence[Any], height: int, width: int) -> np.ndarray:
    """The pixels that one polygon or another covers, bool (height, width); a polygon is x, y, x, y, ..."""
    found = np.zeros((height, width), dtype=bool)
    for polygon in polygons:
        found |= _fill(np.asarray(polygon, dtype=np.float64).reshape(-1, 2), height, width)
    return found


def _fill(corners: np.ndarray, height: int, width: int) -> np.ndarray:
    x, y = _outline(np.trunc(_FINE * corners + 0.5).astype(np.int64))
    # A pixel column's centre is crossed between two steps to the side; inside is what an odd number of
    # crossings lies above.
    moved = np.flatnonzero(x[1:] != x[:-1])
    column = (np.minimum(x[moved + 1], x[moved]) + 0.5) / _FINE - 0.5
    row = (np.minimum(y[moved + 1], y[moved]) + 0.5) / _FINE - 0.5
    kept = (np.floor(column) == column) & (column >= 0) & (column <= width - 1)
    start = column[kept] * height + np.ceil(np.clip(row[kept], 0, height))
    crossings = np.bincount(start.astype(np.int64), minlength=height * width + 1)[: height * width]
    return (np.cumsum(crossings) % 2 == 1).reshape(width, height).T


def _outline(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All points of a closed outline on the fine grid, edge by edge with both ends."""
    start, end = corners, np.roll(corners, -1, axis=0)
    lengths = np.abs(end - start)
    steps = lengths.max(axis=1)
    edge = np.repeat(np.arange(len(start)), steps + 1)
    t = np.arange(len(edge)) - np.repeat(np.cumsum(steps + 1) - (steps + 1), steps + 1)
    flat = lengths[:, 0] >= lengths[:, 1]
    # Each edge is drawn from its lower end along its longer side, whichever way it is walked.
    along = np.where(flat, 0, 1)
    rows = np.arange(len(start))
    backwards = start[rows, along] > end[rows, along]
    first = np.where(backwards[:, None], end, start)
    last = np.where(backwards[:, None], start, end)
    across = 1 - along
    rise = last[rows, across] - first[rows, across]
    slope = np.divide(rise, steps, out=np.zeros(len(start)), where=steps > 0)
    t = np.where(backwards[edge], steps[edge] - t, t)
    main = first[rows, along][edge] + t
    other = np.trunc(first[rows, across][edge] + slope[edge] * t + 0.5).astype(np.int64)
    return np.where(flat[edge], main, other), np.where(flat[edge], other, main)


def run_lengths(text: Any) -> np.ndarray:
    """The run lengths that a text packs, int64: five bits a sign, from the third on as differences from two before.

    Raises:
        ValueError: it is no such text.
    """
    try:
        signs = np.frombuffer(text.encode("ascii"), dtype=np.uint8).astype(np.int64) - 48
    except (AttributeError, UnicodeEncodeError):
        raise ValueError("run lengths are no text") from None
    more = signs & 0x20 > 0
    if not len(signs) or signs.min() < 0 or signs.max() > 63 or more[-1]:
        raise ValueError("run lengths are cut off or hold other signs")
    starts = np.flatnonzero(np.concatenate(([True], ~more[:-1])))
    sizes = np.diff(np.concatenate((starts, [len(signs)])))
    if sizes.max() > _LONGEST:
        raise ValueError("a run length is too large")
    place = np.arange(len(signs)) - np.repeat(starts, sizes)
    values = np.add.reduceat((signs & 0x1F) << (5 * place), starts)
    negative = signs[starts + sizes - 1] & 0x10 > 0
    values = np.where(negative, values - (1 << (5 * sizes)), values)
    for first in (1, 2):
        values[first::2] = np.cumsum(values[first::2])
    return values


def bitmap_of(segmentation: Any, height: int, width: int) -> np.ndarray:
    """The pixels of any COCO segmentation: polygons, or run lengths as a list or as text.

    Raises:
        ValueError: run lengths of another size.
        ImportError: text needs the extra ``detect``.
    """
    if isinstance(segmentation, list):
        return polygons_to_bitmap(segmentation, height, width)
    counts, size = segmentation["counts"], segmentation["size"]
    if list(size) != [height, width]:
        raise ValueError(f"run lengths of {size[0]} x {size[1]} in an image of {height} x {width}")
    if not isinstance(counts, list):
        from hotcoco import mask

        return np.asarray(mask.decode(segmentation)).astype(bool)
    values = np.arange(len(counts)) % 2 == 1
    flat = np.repeat(values, counts)
    if len(flat) != height * width:
        raise ValueError(f"run lengths of {len(flat)} pixels in an image of {height * width}")
    return flat.reshape(width, height).T
