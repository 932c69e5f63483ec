"""Which of COCO's masks can be used: found out before a training, not in the midst of it. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .annotations import Problem, some_of
from .rle import run_lengths

__all__ = ["check_masks", "size_of"]

_SAMPLES = 5
_FAR = 1e5
"""Corners farther away are of no image, and covering pixels up to there would take the memory."""


def size_of(picture: Mapping[str, Any]) -> tuple[int, int] | None:
    """(height, width) that an entry of ``images`` states, if it does."""
    try:
        return int(picture["height"]), int(picture["width"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def check_masks(
    pictures: Sequence[dict[str, Any]],
    of_image: dict[Any, list[dict[str, Any]]],
    file: Path,
    notes: list[str],
    problems: list[Problem],
) -> None:
    """Take out polygons that enclose nothing; find run lengths that are no mask, or of another image's size.

    Args:
        pictures: the file's ``images``.
        of_image: of each image's id its annotations.
        file: the annotations.
        notes: what was taken out is added to it.
        problems: what is wrong is added to it.
    """
    open_ones: list[str] = []
    other_sizes: list[str] = []
    broken: list[str] = []
    for picture in pictures:
        size = size_of(picture)
        for one in of_image[picture["id"]]:
            mask, name = one.get("segmentation"), f"image {picture['id']}, annotation {one.get('id')}"
            if isinstance(mask, dict) and "counts" in mask:
                stated = _stated_size(mask)
                if stated is None or (size is not None and stated != size):
                    other_sizes.append(name)
                    one["segmentation"] = None
                elif not _covers(mask["counts"], stated):
                    broken.append(name)
                    one["segmentation"] = None
            elif mask:
                sound = [polygon for polygon in mask if _encloses(polygon)] if isinstance(mask, list) else []
                if not isinstance(mask, list) or len(sound) < len(mask):
                    one["segmentation"] = sound
                    open_ones.append(str(one.get("id")))
    if open_ones:
        notes.append(
            f"{len(open_ones)} masks have polygons that are no three corners, which are left out "
            f"(annotation {some_of(open_ones, _SAMPLES)}); without any other the box is the mask"
        )
    for found, what in (
        (other_sizes, "masks are of another size than their image"),
        (broken, "masks have run lengths that don't make up their image"),
    ):
        if found:
            fix = "their run lengths are of another version of the image: make them anew"
            problems.append(Problem(f"{len(found)} {what} ({some_of(found, _SAMPLES)}).", str(file), fix))


def _stated_size(mask: Mapping[str, Any]) -> tuple[int, int] | None:
    size = mask.get("size")
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        return size[0], size[1]
    return None


def _covers(counts: Any, size: tuple[int, int]) -> bool:
    """Whether run lengths, as a list or as text, are those of an image of this (height, width)."""
    pixels = size[0] * size[1]
    if isinstance(counts, list):
        return all(type(count) is int and count >= 0 for count in counts) and sum(counts) == pixels
    try:
        lengths = run_lengths(counts)
    except ValueError:
        return False
    return bool((lengths >= 0).all() and (lengths <= pixels).all() and lengths.sum() == pixels)


def _encloses(polygon: Any) -> bool:
    """Whether this is x, y of three corners or more."""
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        return False
    try:  # COCO has a million of them: nothing is made of each
        return min(polygon) >= -_FAR and max(polygon) <= _FAR and math.isfinite(sum(polygon))
    except TypeError:
        return False
