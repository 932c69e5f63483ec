"""Labelled data with a training and a test part whose classes agree."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.class_index import relabel
from zoo.data.decode import Picture
from zoo.data.decoding import PLAIN, Decoding
from zoo.data.folder import FileImages
from zoo.data.open import open_parts, open_source
from zoo.data.source import UNLABELLED, ImageSource, open_picture
from zoo.data.views.maker import PlannedViews
from zoo.errors import InputError, did_you_mean
from zoo.keyed import keyed_key

from .labels import check_labels, labels_of
from .named import NAMED, find_tables, open_tables

__all__ = ["Labelled", "SubsetImages", "ViewOfImages", "open_labelled", "refuse_overlap"]

log = logging.getLogger("zoo")

_TAIL = 4096  # bytes that tell nearly all pictures of one size apart


@dataclass(frozen=True)
class Labelled:
    """A training part, a test part and the classes, in the training part's order.

    ``part_of`` says which published set these images are a part of, if they aren't the whole. ``overlap`` says whether
    test images are training images: ``none`` is, such were ``accepted``, or they were ``not compared``: these are no files.
    """

    name: str
    train: ImageSource
    val: ImageSource
    classes: tuple[str, ...]
    part_of: str = ""
    overlap: str = ""


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


class ViewOfImages:
    """One view of each image of a source, the one that training sees in an epoch.

    Args:
        source: the images.
        maker: of a single view.
        seed: of the draws.
        epoch: which view.
    """

    def __init__(self, source: ImageSource, maker: PlannedViews, seed: int, epoch: int) -> None:
        self.source = source
        self.name = source.name
        self.classes = source.classes
        self._maker, self._seed, self._epoch = maker, seed, epoch

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> np.ndarray:
        key = keyed_key(self._seed, "views", self._epoch, index)
        return np.asarray(self._maker.make(open_picture(self.source, index), key)[0][0])

    def label(self, index: int) -> int:
        return self.source.label(index)

    def where(self, index: int) -> str:
        return self.source.where(index)

    def fingerprint(self) -> dict[str, Any]:
        draw = {"seed": self._seed, "epoch": self._epoch}
        return {"kind": "view", "count": len(self), **draw, "of": self.source.fingerprint()}


def open_labelled(
    name: str,
    root: str | None = None,
    allow_overlap: bool = False,
    how: Decoding = PLAIN,
    class_names: tuple[str, ...] | None = None,
    train_only: bool = False,
) -> Labelled:
    """Open a data set by name or folder.

    Args:
        name: ``builtin:photos``, a torchvision name, a folder that holds ``train`` and ``val`` (or
            ``test``) or tables of the same names (``path,label``); with ``root`` also a name in ``NAMED``,
            or anything: the folder decides.
        root: the folder.
        allow_overlap: accept test files that are also training files.
        how: how picture files are decoded.
        class_names: the classes in the order of their numbers, if not that of the training folders.
        train_only: no test part is needed; what is there of one is not opened, and ``val`` is ``train``.

    Raises:
        InputError: no such data, missing files (the paths tried and the expected tree are named, listed images
            that aren't there are counted), labels that can't be (``check_labels``), a test class that training doesn't
            know, or test images that are training images.
    """
    if root is not None and not os.path.isdir(Path(root).expanduser()):
        raise InputError("There is no such folder.", where=root, fix="check --data")
    listed = _open_files(name, root, how, class_names, train_only)
    if listed is not None:
        return _checked(listed, allow_overlap, train_only)
    if train_only:
        inner = Path(root or name).expanduser() / "train"
        source = open_source(str(inner) if os.path.isdir(inner) else root or name, "train", how, class_names)
        _require_labels("training", source)
        return _checked(Labelled(name, source, source, source.classes), allow_overlap, train_only)
    train, val = open_parts(root or name, how, class_names)
    for part, source in (("training", train), ("test", val)):
        _require_labels(part, source)
    return _checked(Labelled(name, train, val, train.classes), allow_overlap, train_only)


def _open_files(
    name: str, root: str | None, how: Decoding, class_names: tuple[str, ...] | None, train_only: bool
) -> Labelled | None:
    """A set of a known layout, or a folder of tables; None if it is neither."""
    folder = Path(root or name).expanduser()
    known = NAMED.get(name.lower())
    if known is not None and root is None and not os.path.exists(folder):
        raise InputError(
            f"Where {known.title} lies isn't said.", where=name, fix=f"--data FOLDER; expected: {known.tree}"
        )
    if (
        not os.path.exists(folder)
        and name.isidentifier()
        and (meant := did_you_mean(name.lower(), NAMED, likeness=0.75))
    ):
        raise InputError(
            "There is no such data set or folder.", where=name, fix=f"{meant}then with --data FOLDER"
        )
    if not os.path.isdir(folder):
        return None
    part_of = ""
    if known is not None and root is not None:
        train, val = known.open(folder, class_names, train_only)
        part_of = known.part_of(train, val)
        if part_of:
            log.warning("%s: %s", folder, part_of)
    elif (tables := find_tables(folder, train_only)) is not None:
        train, val = open_tables(*tables, class_names)
    else:
        return None
    val = train if val is None else val
    train.decoding = val.decoding = how
    return Labelled(name, train, val, train.classes, part_of)


def _checked(opened: Labelled, allow_overlap: bool, train_only: bool) -> Labelled:
    """The same with test labels by the training part's classes, if it can be learnt from and judged by."""
    train, val = opened.train, opened.val
    if train_only:
        check_labels(train, None, opened.classes)
        return opened
    if train.fingerprint() == val.fingerprint() and _same_contents(train, val):
        raise InputError("The training and the test images are the same.", where=opened.name)
    mapped = _by_training_names(train, val)
    check_labels(train, mapped, opened.classes)
    overlap = "accepted" if allow_overlap else "not compared"
    if not allow_overlap and isinstance(train, FileImages) and isinstance(val, FileImages):
        refuse_overlap(train, val)
        overlap = "none"
    return replace(opened, val=mapped, overlap=overlap)


def _require_labels(part: str, source: ImageSource) -> None:
    if not source.classes:
        raise InputError(
            f"The {part} images carry no labels.",
            where=source.name,
            fix="put each class into a folder of its own",
        )


def _by_training_names(train: ImageSource, val: ImageSource) -> ImageSource:
    """The test part with the training part's class numbers: folders are matched by name, not order."""
    if val.classes == train.classes:
        return val
    number = relabel(val.classes, train.classes, val.name)
    mapped = [number[label] if 0 <= label < len(number) else UNLABELLED for label in labels_of(val).tolist()]
    return SubsetImages(val, range(len(val)), mapped)


def _same_contents(train: ImageSource, val: ImageSource) -> bool:
    """Are sources of equal fingerprints equal? Files may have the same names and sizes by chance."""
    if not isinstance(train, FileImages) or not isinstance(val, FileImages):
        return True
    return all(_digest(train.where(i)) == _digest(val.where(i)) for i in range(len(train)))


def refuse_overlap(train: FileImages, val: FileImages) -> None:
    """Compare contents, but only of files that have the same size, and the same end.

    Numbers are held, not paths, and of most files none but the last bytes are read: there can be millions.

    Raises:
        InputError: a test file that is a training file too.
    """
    sizes, asked = _sizes(train), _sizes(val)
    ends: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for index in np.flatnonzero(np.isin(asked, sizes)).tolist():
        ends[asked[index], _end(val.where(index))].append(index)
    for index in np.flatnonzero(np.isin(sizes, asked)).tolist():
        path = train.where(index)
        for other in map(val.where, ends.get((sizes[index], _end(path)), ())):
            if _digest(path) == _digest(other):
                raise InputError(
                    f"A test image is also a training image ({path}).",
                    where=other,
                    fix="remove it from one of them, or accept such images with --allow-overlap",
                )


def _sizes(files: FileImages) -> np.ndarray:
    """int64 (N,); -1 of what can't be read."""
    return np.fromiter((_size(files.where(index)) for index in range(len(files))), np.int64, len(files))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _end(path: str) -> bytes:
    """A hash of a file's last bytes."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return hashlib.blake2b(file.read(), digest_size=16).digest()
    except OSError:
        return os.fsencode(path)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return f"unreadable {path}"
