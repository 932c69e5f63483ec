"""Images with any number of classes each: VOC folders, and tables of one's own."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.decode import Picture
from zoo.data.decoding import PLAIN, Decoding
from zoo.data.folder import FileImages, PackedPaths
from zoo.data.source import UNLABELLED
from zoo.errors import InputError, did_you_mean

from .datasets import Labelled, refuse_overlap
from .detect.photos import photos_voc
from .tables import TESTS, columns_of, find_table, packed_path, refuse_absent, table_rows
from .voc import VOC_CLASSES, VOC_COUNTS, VOC_TREE, year_folders
from .voc_labels import find_sets, set_pictures, voc_labels

__all__ = ["MultilabelImages", "open_multilabel", "refuse_multilabel"]

log = logging.getLogger("zoo")

_VOC07 = ("voc07", "voc2007")
_TABLES = "train.csv and test.csv (or .jsonl) with path and labels (a;b)"


class MultilabelImages:
    """Picture files with a label for each class.

    Args:
        files: the pictures.
        labels: int8 (N, C): 1 the class is there, 0 as difficult objects only, -1 it isn't.
        classes: the C class names.
        about: what else tells this set from others (JSON).
        full: images of the set that this is meant to be; 0 if it is nobody else's.
    """

    def __init__(
        self,
        files: FileImages,
        labels: np.ndarray,
        classes: tuple[str, ...],
        about: dict[str, Any],
        full: int = 0,
    ) -> None:
        self.files = files
        self.name = files.name
        self.classes = classes
        self.labels = labels
        self.full = full
        self._about = about

    @property
    def source(self) -> FileImages:
        """What the images are read from: whether it was touched, ``files_stamp`` asks it."""
        return self.files

    def __len__(self) -> int:
        return len(self.files)

    def open(self, index: int) -> Picture:
        return self.files.open(index)

    def read(self, index: int) -> np.ndarray:
        return self.files.read(index)

    def label(self, index: int) -> int:
        return UNLABELLED  # there is no single one

    def where(self, index: int) -> str:
        return self.files.where(index)

    def fingerprint(self) -> dict[str, Any]:
        labels = hashlib.sha256(np.ascontiguousarray(self.labels).tobytes()).hexdigest()
        found = {"kind": "multilabel", "count": len(self), **self._about, "labels_sha256": labels}
        if self.full:
            found["complete"] = len(self) == self.full
        return {**found, "files": self.files.fingerprint()}


def refuse_multilabel(name: str) -> None:
    """Stop a recipe that wants one class an image.

    Raises:
        InputError: the folder holds images with several classes each.
    """
    folder = Path(name).expanduser()
    table = find_table(folder, ("train",))
    if any((candidate / "ImageSets" / "Main").is_dir() for candidate in year_folders(folder)):
        why = "VOC's layout"
    elif table and "labels" in columns_of(table):
        why = f"{table.name} has a column labels"
    else:
        return
    raise InputError(
        f"These images can have several classes each ({why}); this recipe is for one.",
        where=folder,
        fix="judge by svm or lowshot",
    )


def open_multilabel(
    name: str,
    root: str | None = None,
    allow_overlap: bool = False,
    how: Decoding = PLAIN,
    train_split: str = "trainval",
    test_split: str = "test",
) -> Labelled:
    """Open a VOC folder, or a folder of tables.

    Args:
        name: a folder, ``builtin:photos-voc``, or, with ``root``, anything: the folder decides. A VOC folder
            is the year's folder or what holds it; a table has the columns ``path`` (relative to its folder)
            and ``labels`` (``a;b``; in JSONL a list).
        root: the folder.
        allow_overlap: accept test files that are also training files.
        how: how picture files are decoded.
        train_split: VOC's image set to train on.
        test_split: VOC's image set to score on.

    Returns:
        Both parts as ``MultilabelImages``.

    Raises:
        InputError: no such data, one class an image, missing files (named and counted), labels that can't
            be read, a test class that training doesn't know, or test images that are training images.
    """
    folder = _folder(name, root)
    tables = find_table(folder, ("train",)), find_table(folder, TESTS)
    if tables[0] and tables[1]:
        train, val = _open_tables(tables[0], tables[1])
    else:
        train, val = _open_voc(folder, train_split, test_split)
    train.files.decoding = val.files.decoding = how
    part_of = _part_of_voc07(train, val)
    if part_of:
        log.warning("%s: %s", folder, part_of)
    if not train.classes:
        raise InputError("No image has a class.", where=folder)
    if not allow_overlap:
        refuse_overlap(train.files, val.files)
    return Labelled(name, train, val, train.classes, part_of, "accepted" if allow_overlap else "none")


def _part_of_voc07(*parts: MultilabelImages) -> str:
    """What makes numbers of a part of VOC 2007 no numbers of VOC 2007; empty if it is the whole."""
    if all(len(part) == part.full for part in parts if part.full):
        return ""
    shares = " and ".join(f"{len(part)} of {part.full or len(part)}" for part in parts)
    return f"a part of VOC 2007: {shares} images"


def _folder(name: str, root: str | None) -> Path:
    if root is None and name == "builtin:photos-voc":
        return photos_voc()
    folder = Path(root or name).expanduser()
    if folder.is_dir():
        return folder
    if root is None and name.lower() in _VOC07:
        raise InputError("Where VOC 2007 lies isn't said.", where=name, fix=f"--data FOLDER; {VOC_TREE}")
    if root is None and name.startswith("builtin:"):
        raise InputError(
            "These images have one class each; this recipe is for images with several.",
            where=name,
            fix="use builtin:photos-voc, or judge by knn or linear",
        )
    raise InputError(
        "There is no such multi-label data set or folder.",
        where=root or name,
        fix=did_you_mean(name, [*_VOC07, "builtin:photos-voc"]) + f"pass a folder: {VOC_TREE}; or {_TABLES}",
    )


# --- VOC ---


def _open_voc(folder: Path, train_split: str, test_split: str) -> tuple[MultilabelImages, MultilabelImages]:
    parts = {path.name for path in folder.iterdir() if path.is_dir()}
    if "train" in parts and parts & set(TESTS):
        raise InputError(
            "These images have one class each (train/<class>, val/<class>); this recipe is for several.",
            where=folder,
            fix=f"judge by knn or linear; several classes: {VOC_TREE}; or {_TABLES}",
        )
    root = find_sets(folder, (train_split, test_split))
    train = _voc_part(root, train_split, None)
    return train, _voc_part(root, test_split, train.classes)


def _voc_part(root: Path, split: str, classes: Sequence[str] | None) -> MultilabelImages:
    ids, pictures = set_pictures(root, split)
    known, labels, source = voc_labels(root, split, ids, classes)
    paths = PackedPaths(os.fsencode(f"JPEGImages/{file}") for file in pictures)
    files = FileImages(f"{root.name} {split}", root, paths)
    is_voc07 = root.name == "VOC2007" and known == VOC_CLASSES
    full = VOC_COUNTS.get(("2007", split), 0) if is_voc07 else 0
    return MultilabelImages(files, labels, known, {"split": split, "labels_from": source}, full)


# --- tables ---


def _open_tables(train: Path, val: Path) -> tuple[MultilabelImages, MultilabelImages]:
    rows = [_read_table(file) for file in (train, val)]
    classes = tuple(sorted({label for _, labels in rows[0] for label in labels}))
    number = {name: index for index, name in enumerate(classes)}
    parts = []
    for file, table in zip((train, val), rows, strict=True):
        labels = np.full((len(table), len(classes)), -1, dtype=np.int8)
        for row, (path, found) in enumerate(table):
            for label in found:
                if label not in number:
                    raise InputError(
                        f"A class that training doesn't know: {label} ({path}).",
                        where=file,
                        fix=did_you_mean(label, classes) + f"known: {', '.join(classes)}",
                    )
                labels[row, number[label]] = 1
        paths = PackedPaths(packed_path(path) for path, _ in table)
        refuse_absent(paths, file.parent, file)
        files = FileImages(str(file), file.parent, paths)
        parts.append(MultilabelImages(files, labels, classes, {"split": file.stem, "labels_from": file.name}))
    return parts[0], parts[1]


def _read_table(file: Path) -> list[tuple[str, list[str]]]:
    """(path, class names) of each row."""
    columns = columns_of(file)
    if not {"path", "labels"} <= columns:
        one = "label" in columns and "labels" not in columns
        raise InputError(
            "These images have one class each (column label); this recipe is for several."
            if one
            else f"The columns path and labels aren't there; found: {', '.join(sorted(columns)) or 'none'}.",
            where=file,
            fix="judge by knn or linear" if one else f"expected: {_TABLES}",
        )
    return [_row(row, where) for row, where in table_rows(file)]


def _row(row: Any, where: str) -> tuple[str, list[str]]:
    path, labels = (row.get("path"), row.get("labels")) if isinstance(row, dict) else (None, None)
    if isinstance(labels, str):
        labels = labels.split(";")
    named = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not path or not isinstance(path, str) or not isinstance(labels, list) or not named or None in row:
        raise InputError("The row isn't a path and class names.", where=where, fix=f"expected: {_TABLES}")
    return path, [label.strip() for label in labels if label.strip()]
