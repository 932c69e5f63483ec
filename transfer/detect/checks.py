"""Is this data what a detector can be trained on? Everything that is wrong is found before a model is built."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from zoo.data.decoding import PLAIN, Decoding
from zoo.errors import InputError
from zoo.files import sha256_of

from .annotations import BoxSet, Picture, Problem, some_of, what_helps

__all__ = ["Size", "check_boxes", "check_overlap", "check_twice", "image_size", "measure", "require_none"]

Size = tuple[int, int]
"""(height, width) of an image."""

_SHOWN = 10
_SWAPS_SIDES = (5, 6, 7, 8)
_ORIENTATION = 0x0112


def image_size(path: Path, how: Decoding = PLAIN) -> tuple[Size, bool]:
    """(height, width) of the upright image, from the file's header, and whether it lies on its side.

    Raises:
        InputError: it is no picture, or a larger one than is allowed.
    """
    from PIL import Image

    from zoo.data.decode import open_image

    stored = None
    try:
        with Image.open(path) as image:
            stored = width, height = image.size
            # Of these the header is enough; a set has a hundred thousand.
            if image.format in ("JPEG", "MPO") and width * height <= how.max_pixels:
                turned = image.getexif().get(_ORIENTATION) in _SWAPS_SIDES
                return ((width, height) if turned else (height, width)), turned
    except Exception:  # whatever a parser stumbles over: what decodes the file says what it is
        pass
    picture = open_image(path, how=how)
    size = picture.height, picture.width
    return size, stored is not None and size != stored[::-1]


def measure(images: BoxSet, problems: list[Problem]) -> list[Size | None]:
    """Look into every image: its size, None if it can't be read or isn't what its annotations say.

    Args:
        images: a set.
        problems: what is wrong is added to it.
    """
    return [_size_of(picture, images.decoding, problems) for picture in images.pictures]


def check_boxes(
    images: BoxSet,
    sizes: Sequence[Size | None],
    problems: list[Problem],
    *,
    training: bool,
    keep_empty: bool = False,
) -> BoxSet:
    """Compare boxes with images, drop what can't be used, and say what was done in the set's notes.

    Args:
        images: a set; its pictures' boxes are cut at the images' edges.
        sizes: of its images (``measure``).
        problems: what forbids training is added to it.
        training: crowds and images without an object are left out, too.
        keep_empty: keep the images without an object.
    """
    kept: list[Picture] = []
    cut, dropped, crowds, empty = [], [], [], []
    fixed = images.expected is not None and not training  # a published test set is judged as it is
    for picture, size in zip(images.pictures, sizes, strict=True):
        if size is None:
            continue
        objects = picture.objects
        inside = _inside(objects.boxes, size)
        moved = np.abs(inside - objects.boxes).max(axis=1, initial=0.0) > 1.0
        flat = ~np.isfinite(inside).all(axis=1) | (inside[:, 2:] - inside[:, :2] <= 0).any(axis=1)
        cut += [picture.name] * int((moved & ~flat).sum())
        dropped += [picture.name] * int(flat.sum())
        if not fixed:
            objects.boxes = inside
            objects = objects.chosen(~flat)
        if training:
            crowds += [picture.name] * int(objects.crowd.sum())
            objects = objects.chosen(~objects.crowd)
            if not len(objects):
                empty.append(picture.name)
                if not keep_empty:
                    continue
        picture.objects, picture.size = objects, (size[0], size[1])
        kept.append(picture)
    what = images.notes
    where = f"of {images.name}"
    _note(what, cut, f"boxes {where} reach beyond their image and are cut at its edge")
    _note(what, dropped, f"boxes {where} are empty or outside" + (" and dropped" if not fixed else ""))
    _note(what, crowds, f"crowds {where} are not trained on")
    verb = "are kept as such" if keep_empty else "are left out (--keep-empty keeps them)"
    _note(what, empty, f"images {where} without an object to train on {verb}")
    if images.expected is not None and images.expected != len(images):
        what.append(f"the published {images.name} has {images.expected} images, this one {len(images)}")
    if not any(len(picture.objects) for picture in kept) and not problems:
        if not images.pictures:
            fix = "check that the annotations list them"
            problems.append(Problem("The set has no image.", images.name, fix))
            return images
        problems.append(
            Problem(
                f"None of the {len(images)} images has an object.",
                str(images.pictures[0].where or images.pictures[0].path),
                "check that annotations and images belong together",
            )
        )
    images.pictures = kept
    return images


def check_twice(images: BoxSet, problems: list[Problem]) -> None:
    """Find the images that a set lists more than once: each of them would have some of the objects only."""
    names = Counter(os.path.normpath(picture.path) for picture in images.pictures)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        problems.append(
            Problem(
                f"{len(twice)} images of {images.name} are listed more than once ({some_of(twice, _SHOWN)}).",
                str(images.pictures[0].where or images.name),
                "list each image once, with all of its objects",
            )
        )


def check_overlap(train: BoxSet, test: BoxSet, problems: list[Problem]) -> None:
    """Find the images that are in both sets, by content."""
    sizes: dict[int, list[Picture]] = defaultdict(list)
    for picture in train.pictures:
        sizes[picture.path.stat().st_size].append(picture)
    hashes: dict[Path, str] = {}

    def digest(path: Path) -> str:
        if path not in hashes:
            hashes[path] = sha256_of(path)
        return hashes[path]

    both = [
        picture.name
        for picture in test.pictures
        if (alike := sizes.get(picture.path.stat().st_size))
        and any(other.path == picture.path or digest(other.path) == digest(picture.path) for other in alike)
    ]
    if both:
        problems.append(
            Problem(
                f"{len(both)} images are in the training and in the test set ({', '.join(both[:_SHOWN])}).",
                f"{train.name} and {test.name}",
                "take them out of one, use another split, or accept it with --allow-overlap",
            )
        )


def require_none(problems: Iterable[Problem]) -> None:
    """Raise one error that lists everything that forbids training.

    Raises:
        InputError: there is something.
    """
    fatal = list(dict.fromkeys(problem for problem in problems if problem.fatal))
    if not fatal:
        return
    if len(fatal) == 1:
        raise InputError(fatal[0].what, where=fatal[0].where, fix=fatal[0].fix)
    shown = [f"{problem.what} ({problem.where})" for problem in fatal[:_SHOWN]]
    more = f"\n  ... and {len(fatal) - _SHOWN} more" if len(fatal) > _SHOWN else ""
    fixes = list(dict.fromkeys(problem.fix for problem in fatal if problem.fix))
    raise InputError(
        f"{len(fatal)} things are wrong with the data:\n  " + "\n  ".join(shown) + more,
        where=fatal[0].where,
        fix="; ".join(fixes[:_SHOWN]) or None,
    )


def _size_of(picture: Picture, how: Decoding, problems: list[Problem]) -> Size | None:
    try:
        size, turned = image_size(picture.path, how)
    except InputError as error:
        problems.append(Problem(error.what, str(error.where), what_helps(error)))
        return None
    if picture.size is not None and picture.size != size:
        says = f"{picture.size[1]} x {picture.size[0]}"
        why = "they are of another version of this image: annotate it anew, or take it out"
        if turned and picture.size == size[::-1]:
            why = "the image is to be shown on its side (EXIF), its boxes are of the file as it lies: save it upright"
        problems.append(
            Problem(
                f"{picture.name} is {size[1]} x {size[0]} pixels, its annotations say {says}.",
                str(picture.where or picture.path),
                why,
            )
        )
        return None
    masks = [mask for mask in picture.objects.masks or [] if isinstance(mask, dict) and "size" in mask]
    if other := [mask["size"] for mask in masks if tuple(mask["size"]) != size]:
        problems.append(
            Problem(
                f"{picture.name} is {size[1]} x {size[0]} pixels, {len(other)} of its masks are of {other[0][1]} x "
                f"{other[0][0]}.",
                str(picture.where or picture.path),
                "their run lengths are of another version of the image: make them anew",
            )
        )
        return None
    return size


def _inside(boxes: np.ndarray, size: Size) -> np.ndarray:
    height, width = size
    return np.clip(boxes, 0.0, [width, height, width, height])


def _note(notes: list[str], names: list[str], text: str) -> None:
    if names:
        some = ", ".join(dict.fromkeys(names[:_SHOWN]))
        notes.append(f"{len(names)} {text}: {some}{' ...' if len(names) > _SHOWN else ''}")
