"""Boxes that can be read, but hardly mean what they are read as. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .annotations import BoxSet, Problem

__all__ = ["check_meaning"]

_SLACK = 1.0  # pixels
_FEW = 10  # boxes: of fewer, some bad ones say nothing about the rest


def check_meaning(images: BoxSet, sizes: Sequence[tuple[int, int] | None], problems: list[Problem]) -> None:
    """Find sets whose boxes are given in another way than their kind of file gives them.

    Args:
        images: a set as it was read, before any box is cut or dropped.
        sizes: (height, width) of its images, None where that isn't known.
        problems: what is wrong is added to it.
    """
    known = [
        (picture, size)
        for picture, size in zip(images.pictures, sizes, strict=True)
        if size and picture.objects
    ]
    if not known:
        return
    boxes = np.concatenate([picture.objects.boxes for picture, _ in known])
    sides = np.repeat(
        np.array([size[::-1] for _, size in known], dtype=np.float64),
        [len(picture.objects) for picture, _ in known],
        axis=0,
    )
    said = _said(images.kind, boxes, sides)
    if said:
        what, fix = said
        place = known[0][0].where or known[0][0].path
        problems.append(Problem(f"{what} (set {images.name}).", str(place), fix))


def _said(kind: str, boxes: np.ndarray, sides: np.ndarray) -> tuple[str, str] | None:
    count, most = len(boxes), len(boxes) / 2
    if boxes.max() <= 1.0 and sides.min() > 2:
        return (
            f"All {count} boxes lie within the first pixel of their image",
            "they look like shares of its sides: write them in pixels",
        )
    beyond = (boxes[:, 2:] > sides + _SLACK).any(axis=1)
    sizes = boxes[:, 2:] - boxes[:, :2]
    if kind == "coco" and beyond.sum() > most and _inside(boxes[:, :2], sizes, sides)[beyond].all():
        return (
            f"{int(beyond.sum())} of {count} boxes reach beyond their image as x, y, width and height, and none as edges",
            "bbox is x, y, width and height: it seems to hold xmin, ymin, xmax, ymax",
        )
    clipped = np.clip(boxes, 0.0, np.tile(sides, 2))
    flat = (clipped[:, 2:] - clipped[:, :2] <= 0).any(axis=1)
    if flat.sum() > most:
        fix = "check in what order the numbers of a box are written"
        if kind != "coco" and _inside(boxes[:, :2], boxes[:, :2] + boxes[:, 2:], sides).all():
            fix = "boxes are xmin, ymin, xmax, ymax: these look like x, y, width and height"
        elif count < _FEW and not flat.all():
            return None
        return f"{int(flat.sum())} of {count} boxes are empty or outside of their image", fix
    return None


def _inside(low: np.ndarray, high: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Which boxes with these corners have an area, and lie in their image."""
    return np.asarray(
        (high > low).all(axis=1) & (low >= -_SLACK).all(axis=1) & (high <= sides + _SLACK).all(axis=1)
    )
