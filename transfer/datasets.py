"""Labelled data with a training and a test part whose classes agree."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.class_index import relabel
from zoo.data.decode import Picture
from zoo.data.decoding import PLAIN, Decoding
from zoo.data.folder import FileImages
from zoo.data.open import open_source
from zoo.data.source import UNLABELLED, ImageSource, open_picture
from zoo.errors import InputError

__all__ = ["Labelled", "SubsetImages", "open_labelled"]

_TEST_NAMES = ("val", "test", "validation")


@dataclass(frozen=True)
class Labelled:
    """A training part, a test part and the classes, in the training part's order."""

    name: str
    train: ImageSource
    val: ImageSource
    classes: tuple[str, ...]


class SubsetImages:
    """Some images of a source, possibly with labels of their own."""

    def __init__(
        self, source: ImageSource, chosen: Sequence[int], labels: Sequence[int] | None = None
    ) -> None:
        self.source = source
        self.name = source.name
        self.classes = source.classes
        self._chosen = np.asarray(chosen, dtype=np.int64)
        self._labels = None if labels is None else np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def open(self, index: int) -> Picture:
        return open_picture(self.source, int(self._chosen[index]))

    def read(self, index: int) -> np.ndarray:
        return self.open(index).pixels()

    def label(self, index: int) -> int:
        return (
            self.source.label(int(self._chosen[index])) if self._labels is None else int(self._labels[index])
        )

    def where(self, index: int) -> str:
        return self.source.where(int(self._chosen[index]))

    def fingerprint(self) -> dict[str, Any]:
        ids = hashlib.sha256(self._chosen.tobytes()).hexdigest()
        return {"kind": "subset", "count": len(self), "ids_sha256": ids, "of": self.source.fingerprint()}


def open_labelled(
    name: str,
    root: str | None = None,
    allow_overlap: bool = False,
    how: Decoding = PLAIN,
    class_names: tuple[str, ...] | None = None,
) -> Labelled:
    """Open a data set by name or folder.

    Args:
        name: ``builtin:photos``, a torchvision name, a folder that holds ``train`` and ``val`` (or
            ``test``), or, with ``root``, anything: the folder decides.
        root: the folder.
        allow_overlap: accept test files that are also training files.
        how: how picture files are decoded.
        class_names: the classes in the order of their numbers, if not that of the training folders.

    Raises:
        InputError: no such data, no labels, a test class that training doesn't know, or test images
            that are training images.
    """
    folder = Path(root or name).expanduser()
    if folder.is_dir():
        train, val = _open_parts(folder, how, class_names)
    else:
        if root is not None:
            raise InputError("There is no such folder.", where=root, fix="check --data")
        train, val = open_source(name, "train", how), open_source(name, "val", how)
    for part, source in (("training", train), ("test", val)):
        if not source.classes:
            raise InputError(
                f"The {part} images carry no labels.",
                where=source.name,
                fix="put each class into a folder of its own",
            )
    if train.fingerprint() == val.fingerprint() and _same_contents(train, val):
        raise InputError("The training and the test images are the same.", where=name)
    if not allow_overlap and isinstance(train, FileImages) and isinstance(val, FileImages):
        _refuse_overlap(train, val)
    return Labelled(name, train, _by_training_names(train, val), train.classes)


def _open_parts(
    folder: Path, how: Decoding, class_names: tuple[str, ...] | None
) -> tuple[ImageSource, ImageSource]:
    found = [folder / part for part in _TEST_NAMES if (folder / part).is_dir()]
    if not (folder / "train").is_dir() or not found:
        raise InputError(
            "The folder has no training and test part.",
            where=folder,
            fix="expected: train/<class>/<images> and val/<class>/<images> (or test/)",
        )
    return (
        open_source(str(folder / "train"), how=how, class_names=class_names),
        open_source(str(found[0]), how=how),
    )


def _by_training_names(train: ImageSource, val: ImageSource) -> ImageSource:
    """The test part with the training part's class numbers: folders are matched by name, not order."""
    if val.classes == train.classes:
        return val
    number = relabel(val.classes, train.classes, val.name)
    labels = [val.label(index) for index in range(len(val))]
    mapped = [UNLABELLED if label < 0 else number[label] for label in labels]
    return SubsetImages(val, range(len(val)), mapped)


def _same_contents(train: ImageSource, val: ImageSource) -> bool:
    """Are sources of equal fingerprints equal? Files may have the same names and sizes by chance."""
    if not isinstance(train, FileImages) or not isinstance(val, FileImages):
        return True
    return all(_digest(train.where(i)) == _digest(val.where(i)) for i in range(len(train)))


def _refuse_overlap(train: FileImages, val: FileImages) -> None:
    """Compare contents, but only of files that have the same size."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for index in range(len(train)):
        path = train.where(index)
        by_size[_size(path)].append(path)
    hashes: dict[int, dict[str, str]] = {}
    for index in range(len(val)):
        path = val.where(index)
        size = _size(path)
        if size not in by_size:
            continue
        if size not in hashes:
            hashes[size] = {_digest(other): other for other in by_size[size]}
        twin = hashes[size].get(_digest(path))
        if twin is not None:
            raise InputError(
                f"A test image is also a training image ({twin}).",
                where=path,
                fix="remove it from one of them, or accept such images with --allow-overlap",
            )


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return -1


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return f"unreadable {path}"
