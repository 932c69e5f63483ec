"""Images with boxes, whatever they were annotated in. No torch here.

Boxes are float64 (N, 4) edges x1, y1, x2, y2 in pixels counted from 0: a VOC box of the pixels 1 to 10 is 0 to 10.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.decoding import PLAIN, Decoding
from zoo.errors import InputError

__all__ = [
    "NAMED",
    "BoxSet",
    "Objects",
    "Picture",
    "Problem",
    "four_numbers",
    "read_image",
    "some_of",
    "what_helps",
]

NAMED = 20
"""So many names are said in a message."""


@dataclass
class Objects:
    """What is in one image.

    Args:
        boxes: float64 (N, 4).
        labels: int64 (N,), indices into the set's classes.
        difficult: VOC's flag, bool (N,): trained on, neither right nor wrong in a test.
        crowd: COCO's flag, bool (N,): not trained on, absorbs detections in a test.
        areas: float64 (N,), COCO's areas of the masks; those of the boxes elsewhere.
        masks: of each object COCO's segmentation, or None where there are none.
    """

    boxes: np.ndarray
    labels: np.ndarray
    difficult: np.ndarray
    crowd: np.ndarray
    areas: np.ndarray
    masks: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def chosen(self, rows: np.ndarray) -> Objects:
        """Some of them, by index or by a mask of bool."""
        index = np.flatnonzero(rows) if rows.dtype == bool else rows
        masks = None if self.masks is None else [self.masks[i] for i in index]
        boxes, labels, areas = self.boxes[index], self.labels[index], self.areas[index]
        return Objects(boxes, labels, self.difficult[index], self.crowd[index], areas, masks)


@dataclass
class Picture:
    """An image: its ``name`` for people, its file, what the annotations say of its size, and its objects."""

    name: str
    path: Path
    size: tuple[int, int] | None
    """(height, width), if the annotations give it."""
    objects: Objects
    number: int = 0
    """COCO's image id; otherwise its place in the list."""
    where: Path | None = None
    """The file of its annotations."""


@dataclass
class BoxSet:
    """One set of images.

    Args:
        kind: ``voc``, ``coco`` or ``table``.
        name: of the split, for people.
        classes: their names, in the order of the labels.
        pictures: in the order of the list.
        numbers: the category id of each class (COCO), saved and exported back.
        notes: what was dropped or assumed, counted.
        ap: how AP is computed by default: ``11-point`` (VOC 2007), ``area`` or ``coco``.
    """

    kind: str
    name: str
    classes: tuple[str, ...]
    pictures: list[Picture]
    numbers: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    ap: str = "area"
    expected: int | None = None
    """How many images the published set has."""
    decoding: Decoding = PLAIN
    """How the files become pixels."""

    def __len__(self) -> int:
        return len(self.pictures)

    def chosen(self, rows: Sequence[int]) -> BoxSet:
        """The same set with some of its pictures."""
        return replace(self, pictures=[self.pictures[row] for row in rows], notes=list(self.notes))

    def read(self, row: int) -> np.ndarray:
        """The pixels of an image, upright: uint8 (H, W, 3).

        Raises:
            InputError: it can't be read, or its size is not (any more) the one that its boxes were checked with.
        """
        picture = self.pictures[row]
        pixels = read_image(picture.path, self.decoding)
        height, width = pixels.shape[:2]
        if picture.size is not None and picture.size != (height, width):
            raise InputError(
                f"The image is {width} x {height} pixels, and its boxes are of {picture.size[1]} x {picture.size[0]}.",
                where=picture.path,
                fix="it was changed while it was used: start again",
            )
        return pixels

    @property
    def has_masks(self) -> bool:
        return any(picture.objects.masks is not None for picture in self.pictures)

    def fingerprint(self) -> dict[str, Any]:
        """Names, objects and file sizes of the images."""
        digest = hashlib.sha256()
        for picture in self.pictures:
            objects = picture.objects
            size = picture.path.stat().st_size if picture.path.is_file() else -1
            digest.update(f"{picture.name} {size} {len(objects)}\n".encode())
            for values in (objects.boxes, objects.labels, objects.difficult, objects.crowd):
                digest.update(np.ascontiguousarray(values).tobytes())
        return {"kind": self.kind, "split": self.name, "count": len(self), "sha256": digest.hexdigest()}


@dataclass(frozen=True)
class Problem:
    """Something wrong with the data: what, where, what helps. ``fatal`` ones forbid training."""

    what: str
    where: str
    fix: str | None = None
    fatal: bool = True
    files: tuple[str, ...] = ()
    """All files that are missing, of which ``what`` names the first."""

    def to_json(self) -> Mapping[str, Any]:
        files = {"files": list(self.files)} if self.files else {}
        return {"what": self.what, "where": self.where, "fix": self.fix, "fatal": self.fatal, **files}


def read_image(path: Path, how: Decoding) -> np.ndarray:
    """The pixels of a file, upright: uint8 (H, W, 3).

    Raises:
        InputError: it can't be read.
    """
    from zoo.data.decode import decode_image

    try:
        return decode_image(path, how=how)
    except InputError as error:
        raise InputError(error.what, where=error.where, fix=what_helps(error)) from error


def what_helps(error: InputError) -> str:
    """Against an image that can't be read; none is passed over here."""
    helps = "raise the limit (--max-pixels)" if "--max-pixels" in (error.fix or "") else "repair it"
    return f"{helps}, or take it out"


def four_numbers(values: Any) -> list[float]:
    """A box as it is written: four finite numbers.

    Raises:
        ValueError: it is anything else.
    """
    try:
        found = [float(value) for value in values] if isinstance(values, list) else []
    except (TypeError, ValueError, OverflowError):
        found = []
    if len(found) != 4 or not all(map(math.isfinite, found)):
        raise ValueError("its box is not four numbers")
    return found


def some_of(names: Sequence[str], count: int = NAMED) -> str:
    """The first of many names, and how many more there are."""
    more = f" ... and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
