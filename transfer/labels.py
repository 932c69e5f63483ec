"""Labels of a training and a test part: what would spoil a result is said before any work."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from zoo.data.folder import FileImages
from zoo.data.source import UNLABELLED, ImageSource
from zoo.errors import InputError

from .tables import ListedImages

__all__ = ["check_labels", "labels_of", "split_sha256"]

log = logging.getLogger("zoo")

_SHOWN = 5


def labels_of(source: ImageSource) -> np.ndarray:
    """The labels of all images, int64."""
    return np.fromiter((source.label(index) for index in range(len(source))), np.int64, len(source))


def check_labels(train: ImageSource, val: ImageSource | None, classes: Sequence[str]) -> None:
    """Refuse labels that nothing can be learnt from or judged by; warn of classes of a single image.

    Args:
        train: the training part, its labels numbered as ``classes`` are.
        val: the test part, numbered alike; none if the training images are asked themselves.
        classes: all of them.

    Raises:
        InputError: images without a label or with one outside the classes, a class folder without pictures,
            or test images of a class that no training image has.
    """
    _refuse_empty_folders(train)
    labels = labels_of(train)
    _refuse_outside(train, labels, len(classes))
    counts = np.bincount(labels, minlength=len(classes))
    if val is not None:
        asked = labels_of(val)
        _refuse_outside(val, asked, len(classes))
        unknown = np.flatnonzero((np.bincount(asked, minlength=len(classes)) > 0) & (counts == 0))
        if len(unknown):
            raise InputError(
                f"Test images have classes without a training image: {_some(classes[c] for c in unknown.tolist())}.",
                where=val.name,
                fix="add training images of them, or leave these test images out",
            )
    if len(empty := np.flatnonzero(counts == 0)):
        log.warning("classes without a training image: %s", _some(classes[c] for c in empty.tolist()))
    if len(single := np.flatnonzero(counts == 1)):
        log.warning("classes of a single training image: %s", _some(classes[c] for c in single.tolist()))


def _refuse_outside(source: ImageSource, labels: np.ndarray, classes: int) -> None:
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if not len(bad):
        return
    first = int(labels[bad[0]])
    said = "no label" if first == UNLABELLED else f"the label {first}"
    raise InputError(
        f"{len(bad)} of {len(source)} images have a label outside 0 to {classes - 1}; the first has {said}.",
        where=source.where(int(bad[0])),
        fix="correct the labels, or pass the class index that they were made with",
    )


def _refuse_empty_folders(source: ImageSource) -> None:
    """A class folder without pictures is no class to the reader of folders; here it is a mistake."""
    if not isinstance(source, FileImages) or isinstance(source, ListedImages):
        return  # folders are no classes there
    if not source.classes or not Path(source.root).is_dir():
        return
    with os.scandir(source.root) as entries:
        folders = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    empty = [name for name in folders if name not in set(source.classes)]
    if empty:
        raise InputError(
            f"Class folders without pictures: {_some(empty)}.",
            where=source.root,
            fix="put pictures into them, or remove them",
        )


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def split_sha256(source: ImageSource) -> str:
    """Which images a part holds and what they are labelled, as one hash that no machine's paths enter.

    An image is named by the last two parts of its path, or of its place in a collection.
    """
    digest = hashlib.sha256()
    for index in range(len(source)):
        name = "/".join(Path(source.where(index)).parts[-2:])
        digest.update(f"{name}\t{source.label(index)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
