"""Images in folders, nested or flat, and text files that list paths."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .decode import IMAGE_SUFFIXES, decode_image
from .source import UNLABELLED

__all__ = ["FileImages", "open_folder", "open_list"]


class FileImages:
    """Picture files on disk, in sorted order.

    The paths live in one block of bytes with offsets, so that ten million of them cost no Python
    objects and forked workers share the memory.

    Args:
        name: what the user called the collection.
        root: the folder that the relative paths start from.
        paths: paths relative to ``root``, already in their final order.
        labels: one class index a path, or None.
        classes: the class names.
        notes: remarks for the user (what was left out).
    """

    def __init__(
        self,
        name: str,
        root: Path,
        paths: list[bytes],
        labels: list[int] | None = None,
        classes: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.classes = classes
        self.notes = notes
        self._root = os.fsencode(root)
        self._blob = b"".join(paths)
        self._ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        self._labels = None if labels is None else np.asarray(labels, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._ends)

    def _relative(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self._ends[index - 1]) if index else 0
        return self._blob[start : int(self._ends[index])]

    def where(self, index: int) -> str:
        return os.fsdecode(os.path.join(self._root, self._relative(index)))

    def read(self, index: int) -> np.ndarray:
        return decode_image(self.where(index))

    def label(self, index: int) -> int:
        return UNLABELLED if self._labels is None else int(self._labels[index])

    def fingerprint(self) -> dict[str, Any]:
        """Names and sizes of all files; the contents are not read."""
        digest = hashlib.sha256()
        total = 0
        for index in range(len(self)):
            try:
                size = os.stat(os.path.join(self._root, self._relative(index))).st_size
            except OSError:
                size = -1
            total += max(size, 0)
            digest.update(self._relative(index) + b"\0%d\n" % size)
        return {"kind": "files", "count": len(self), "bytes": total, "sha256": digest.hexdigest()}


def open_folder(folder: Path, name: str | None = None) -> FileImages:
    """All pictures below a folder, sorted by relative path; the label is the first folder on the way.

    Hidden files and folders are skipped (and noted). Symbolic links are followed and labelled by
    where the link stands; a link back to a folder that it lies in ends there.

    Raises:
        InputError: no such folder, or no pictures in it.
    """
    if not folder.is_dir():
        raise InputError("There is no such folder.", where=folder, fix="check the path given to --data")
    hidden: list[str] = []
    found = sorted(_walk(os.fsencode(folder), hidden))
    if not found:
        raise InputError(
            "No pictures were found in this folder or below it.",
            where=folder,
            fix="pass the folder that holds images ending in " + " ".join(sorted(IMAGE_SUFFIXES)),
        )
    firsts = [path.split(b"/", 1)[0] if b"/" in path else None for path in found]
    names = sorted({first for first in firsts if first is not None})
    labelled = len(names) > 0 and None not in firsts
    index_of = {first: index for index, first in enumerate(names)}
    notes: tuple[str, ...] = ()
    if hidden:
        shown = ", ".join(sorted(hidden)[:3]) + (", ..." if len(hidden) > 3 else "")
        notes = (f"skipped {len(hidden)} hidden entr{'y' if len(hidden) == 1 else 'ies'} ({shown})",)
    return FileImages(
        name or str(folder),
        folder,
        found,
        labels=[index_of[first] for first in firsts if first is not None] if labelled else None,
        classes=tuple(os.fsdecode(n) for n in names) if labelled else (),
        notes=notes,
    )


def _walk(root: bytes, hidden: list[str]) -> Iterator[bytes]:
    """Relative paths of picture files below root, in no order, with '/' between the parts."""
    # Each entry: a folder's relative path, and the real folders (device, inode) on the way to it.
    try:
        top = os.stat(root)
    except OSError as error:
        raise _unlistable(root, error) from error
    pending: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset([(top.st_dev, top.st_ino)]))]
    while pending:
        relative, ancestors = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(root, relative)))
        except OSError as error:
            raise _unlistable(os.path.join(root, relative), error) from error
        for entry in entries:
            path = relative + b"/" + entry.name if relative else entry.name
            if entry.name.startswith(b"."):
                hidden.append(os.fsdecode(path))
                continue
            try:
                info = entry.stat()  # follows links
            except OSError:  # a broken link, or one that points at itself: reading it will name it
                info = None
            if info is not None and stat.S_ISDIR(info.st_mode):
                identity = (info.st_dev, info.st_ino)
                if identity not in ancestors:
                    pending.append((path, ancestors | {identity}))
            elif info is not None and not stat.S_ISREG(info.st_mode):
                continue  # opening a pipe or a socket would wait for ever
            elif os.fsdecode(os.path.splitext(entry.name)[1]).lower() in IMAGE_SUFFIXES:
                yield path


def _unlistable(folder: bytes, error: OSError) -> InputError:
    return InputError(f"The folder can't be listed ({error.strerror}).", where=os.fsdecode(folder))


def open_list(file: Path, name: str | None = None) -> FileImages:
    """The pictures named in a text file, one path a line, in the file's order.

    Relative paths start from the folder of the text file; blank lines are skipped; lines are UTF-8.

    Raises:
        InputError: an empty list, a file that isn't text, or a path that doesn't exist (the first few
            are named, with their line numbers).
    """
    try:
        raw = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise InputError(f"The list of images can't be read ({error.strerror}).", where=file) from None
    if b"\0" in raw:
        raise InputError(
            "This file is not a text file with one image path a line.",
            where=file,
            fix="pass a folder of images, or a text file of paths",
        )
    lines = [(number, line.strip()) for number, line in enumerate(raw.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError("The list of images is empty.", where=file)
    root = file.parent
    absent = [
        (number, line) for number, line in lines if not os.path.isfile(os.path.join(os.fsencode(root), line))
    ]
    if absent:
        shown = "; ".join(f"line {number}: {os.fsdecode(line)}" for number, line in absent[:3])
        raise InputError(
            f"{len(absent)} of {len(lines)} listed images don't exist ({shown}{'; ...' if len(absent) > 3 else ''}).",
            where=file,
            fix=f"paths are taken relative to {root}",
        )
    return FileImages(name or str(file), root, [line for _, line in lines])
