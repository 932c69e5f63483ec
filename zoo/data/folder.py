"""Images in folders, nested or flat, and text files that list paths."""

from __future__ import annotations

import hashlib
import heapq
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .class_index import relabel
from .decode import IMAGE_SUFFIXES, Picture, open_image
from .decoding import PLAIN, Decoding
from .source import UNLABELLED

__all__ = ["FileImages", "PackedPaths", "open_folder", "open_list"]

# A set of more files than this is recognised by all names, but the sizes of only this many.
_SIZES_READ = 200_000
# A folder's names are sorted this many at a time; more of them wait packed for the merge.
_RUN = 1 << 20
_PICTURES = frozenset(suffix[1:].encode() for suffix in IMAGE_SUFFIXES)
# As many different endings are counted apart: numbered files ("frame.000123") can have millions.
_ENDINGS = 1000
# First-level folders that are parts of a set, not classes.
_PARTS = frozenset(("train", "training", "val", "valid", "validation", "test", "testing"))
_LINE = 200  # letters of a line that a message shows: the file may be no list at all


class PackedPaths:
    """Many paths in one block of bytes, with the offset where each one ends.

    Ten million of them cost no Python objects, growing copies nothing, and forked workers share the
    memory. Each path takes its length and 8 bytes.
    """

    def __init__(self, paths: Iterable[bytes] = ()) -> None:
        self._blob = bytearray()
        self._ends: array[int] = array("q")
        for path in paths:
            self.append(path)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self._ends[index - 1] if index else 0
        return bytes(self._blob[start : self._ends[index]])

    def __iter__(self) -> Iterator[bytes]:
        start = 0
        for end in self._ends:
            yield bytes(self._blob[start:end])
            start = end

    def append(self, path: bytes) -> None:
        self._blob += path
        self._ends.append(len(self._blob))

    def digest(self) -> bytes:
        """SHA-256 of all paths and of where each one ends."""
        digest = hashlib.sha256(self._blob)
        digest.update(np.asarray(self._ends, dtype="<i8").data)
        return digest.digest()


class FileImages:
    """Picture files on disk, in sorted order.

    Args:
        name: what the user called the collection.
        root: the folder that the relative paths start from.
        paths: paths relative to ``root``, already in their final order.
        labels: one class index a path, kept as int32, or None.
        classes: the class names.
        notes: remarks for the user (what was left out).
    """

    decoding: Decoding = PLAIN
    """How the files become pixels."""

    def __init__(
        self,
        name: str,
        root: Path,
        paths: PackedPaths,
        labels: np.ndarray | Sequence[int] | None = None,
        classes: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.classes = classes
        self.notes = notes
        self._root = os.fsencode(root)
        self._paths = paths
        self._labels = None if labels is None else np.asarray(labels, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def root(self) -> str:
        """The folder that the relative paths start from."""
        return os.fsdecode(self._root)

    def where(self, index: int) -> str:
        return os.fsdecode(os.path.join(self._root, self._paths[index]))

    def open(self, index: int) -> Picture:
        """The picture with its size read, not yet decoded."""
        return open_image(self.where(index), how=self.decoding)

    def read(self, index: int) -> np.ndarray:
        return self.open(index).pixels()

    def label(self, index: int) -> int:
        return UNLABELLED if self._labels is None else int(self._labels[index])

    def fingerprint(self) -> dict[str, Any]:
        """Names and sizes of all files; the contents are not read.

        Of more than 200,000 files all names count, but only 200,000 sizes, of files at even distances
        (ten million questions to a network disk take hours): then ``sizes`` is ``sampled`` and ``bytes``
        is the sum of these sizes.
        """
        count = len(self)
        sampled = count > _SIZES_READ
        digest = hashlib.sha256(self._paths.digest() if sampled else b"")
        total = 0
        for step in range(min(count, _SIZES_READ)):
            path = self._paths[step * count // _SIZES_READ if sampled else step]
            try:
                size = os.stat(os.path.join(self._root, path)).st_size
            except OSError:
                size = -1
            total += max(size, 0)
            digest.update(path + b"\0%d\n" % size)
        found = {"kind": "files", "count": count, "bytes": total, "sha256": digest.hexdigest()}
        return {**found, "sizes": "sampled"} if sampled else found


def open_folder(
    folder: Path, name: str | None = None, class_names: tuple[str, ...] | None = None
) -> FileImages:
    """All pictures below a folder, sorted by relative path; the label is the first folder on the way.

    Hidden files and folders are skipped, and files whose ending is no picture's (both are noted). Symbolic
    links are followed and labelled by where the link stands; a link back to a folder that it lies in ends
    there. There are labels only if every picture lies below a first-level folder.

    Args:
        folder: where to look.
        name: what the user called it.
        class_names: all classes in the order of their numbers (see ``class_index``), with or without
            images here; by default the first-level folders that hold pictures, sorted by name.

    Raises:
        InputError: no such folder, one that can't be listed, or no pictures in it; with ``class_names``
            a picture outside the class folders, or a class that isn't among them.
    """
    if not folder.is_dir():
        raise InputError("There is no such folder.", where=folder, fix="check the path given to --data")
    left_out = _LeftOut()
    paths, runs = _pack(_walk(os.fsencode(folder), left_out))
    notes = left_out.notes()
    if not paths:
        raise InputError(
            "; ".join(("No pictures were found in this folder or below it", *notes)) + ".",
            where=folder,
            fix="pass the folder that holds images ending in " + " ".join(sorted(IMAGE_SUFFIXES)),
        )
    classes, labels = _label(runs, class_names, folder)
    if len(classes) > 1 and _PARTS.issuperset(map(str.lower, classes)):
        parts = " and ".join(classes)
        notes += (
            f"all of {parts} are taken, as images of classes of these names: pass {classes[0]} for it alone",
        )
    return FileImages(name or str(folder), folder, paths, labels, classes, notes)


def _pack(paths: Iterable[bytes]) -> tuple[PackedPaths, dict[bytes | None, int]]:
    """Pack sorted relative paths, and count those below each first-level folder (None: below none)."""
    packed = PackedPaths()
    runs: dict[bytes | None, int] = {}
    for path in paths:
        packed.append(path)
        first, slash, _ = path.partition(b"/")
        key = first if slash else None
        runs[key] = runs.get(key, 0) + 1
    return packed, runs


def _label(
    runs: dict[bytes | None, int], class_names: tuple[str, ...] | None, folder: Path
) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Class names, and an int32 label for each path: those of one first-level folder follow one another."""
    firsts = [first for first in runs if first is not None]
    if len(firsts) < len(runs):
        if class_names is None:
            return (), None
        raise InputError(
            "Pictures outside the class folders can't get a class.",
            where=folder,
            fix="put each class into a folder of its own",
        )
    order = sorted(firsts)
    classes = tuple(os.fsdecode(first) for first in order)
    wanted = classes if class_names is None else class_names
    number = dict(zip(order, relabel(classes, wanted, folder), strict=True))
    labels = np.array([number[first] for first in firsts], dtype=np.int32)
    return wanted, np.repeat(labels, list(runs.values()))


class _LeftOut:
    """What a scan leaves out: hidden entries, and files whose ending is no picture's."""

    def __init__(self) -> None:
        self._hidden = 0
        self._first_hidden: list[str] = []
        self._endings: Counter[str] = Counter()

    def hidden(self, path: bytes) -> None:
        self._hidden += 1
        self._first_hidden = sorted([*self._first_hidden, os.fsdecode(path)])[:3]

    def other(self, ending: bytes) -> None:
        key = os.fsdecode(ending).lower() or "none"
        known = key in self._endings or len(self._endings) < _ENDINGS
        self._endings[key if known else "more"] += 1

    def notes(self) -> tuple[str, ...]:
        """Remarks for the user, one for each kind."""
        notes = []
        if self._hidden:
            shown = ", ".join(self._first_hidden) + (", ..." if self._hidden > 3 else "")
            notes.append(f"skipped {self._hidden} hidden entr{'y' if self._hidden == 1 else 'ies'} ({shown})")
        if self._endings:
            count = sum(self._endings.values())
            ranked = sorted(self._endings.items(), key=lambda item: (-item[1], item[0]))
            shown = ", ".join(f"{ending} {n}" for ending, n in ranked[:5]) + (", ..." if ranked[5:] else "")
            notes.append(f"left out {count} file{'' if count == 1 else 's'} with other endings ({shown})")
        heic = [ending for ending in (".heic", ".heif") if ending in self._endings]
        if heic:
            notes.append(f"{' and '.join(heic)} pictures must be converted first, to JPEG or PNG")
        return tuple(notes)


def _walk(root: bytes, left_out: _LeftOut) -> Iterator[bytes]:
    """Relative paths of picture files below root, sorted as bytes, with '/' between the parts.

    What is held are the names of the folders on the way to the present one, not all paths.
    """
    on_the_way: set[tuple[int, int]] = set()  # (device, inode) of each folder in `levels`
    levels: list[tuple[bytes, tuple[int, int], Iterator[bytes]]] = []

    def enter(prefix: bytes) -> None:
        folder = os.path.join(root, prefix[:-1]) if prefix else root
        try:
            info = os.stat(folder)
            identity = (info.st_dev, info.st_ino)
            if identity not in on_the_way:  # else a link leads back up
                levels.append((prefix, identity, _names(folder, prefix, left_out)))
                on_the_way.add(identity)
        except OSError as error:
            raise InputError(
                f"The folder can't be listed ({error.strerror}).", where=os.fsdecode(folder)
            ) from error

    enter(b"")
    while levels:
        prefix, identity, names = levels[-1]
        for name in names:
            if name.endswith(b"/"):
                enter(prefix + name)
                break  # and come back to the rest of the names
            yield prefix + name
        else:
            levels.pop()
            on_the_way.remove(identity)


def _names(folder: bytes, prefix: bytes, left_out: _LeftOut) -> Iterator[bytes]:
    """Sorted names of a folder's pictures and folders; the latter with the '/' that their paths go on with."""
    with os.scandir(folder) as entries:
        wanted = _wanted(entries, prefix, left_out)
        runs: list[Iterable[bytes]] = []
        while run := sorted(islice(wanted, _RUN)):
            runs.append(run if len(run) < _RUN else PackedPaths(run))
    return heapq.merge(*runs)


def _wanted(entries: Iterable[os.DirEntry[bytes]], prefix: bytes, left_out: _LeftOut) -> Iterator[bytes]:
    for entry in entries:
        name = entry.name
        if name.startswith(b"."):
            left_out.hidden(prefix + name)
            continue
        kind = _kind(entry)
        if kind == "folder":
            yield name + b"/"
        elif kind == "file":
            _, dot, ending = name.rpartition(b".")
            if dot and ending.lower() in _PICTURES:
                yield name
            else:
                left_out.other(dot + ending if dot else b"")


def _kind(entry: os.DirEntry[bytes]) -> str:
    """``folder``, ``file``, or ``other``: opening a pipe or a socket would wait for ever.

    Only links (and entries of disks that don't tell) cost a question to the disk.
    """
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "folder"
        entry.stat()
    except OSError:  # a broken link, or one that points at itself: reading it will name it
        return "file"
    return "other"


def open_list(file: Path, name: str | None = None) -> FileImages:
    """The pictures named in a text file, one path a line, in the file's order.

    Relative paths start from the folder of the text file; blank lines are skipped; lines are UTF-8.

    Raises:
        InputError: an empty list, a file that isn't text, or a path that doesn't exist (the first few
            are named, with their line numbers).
    """
    root = os.fsencode(file.parent)
    paths = PackedPaths()
    absent = 0
    shown: list[str] = []
    try:
        for number, line in _lines(file):
            paths.append(line)
            if not os.path.isfile(os.path.join(root, line)):
                absent += 1
                shown += [f"line {number}: {os.fsdecode(line)[:_LINE]}"] if absent <= 3 else []
    except OSError as error:
        raise InputError(f"The list of images can't be read ({error.strerror}).", where=file) from None
    if not paths:
        raise InputError("The list of images is empty.", where=file)
    if absent:
        raise InputError(
            f"{absent} of {len(paths)} listed images don't exist ({'; '.join(shown)}{'; ...' if absent > 3 else ''}).",
            where=file,
            fix=f"paths are taken relative to {file.parent}",
        )
    return FileImages(name or str(file), file.parent, paths)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number and content of the lines that aren't blank, in whatever bytes they are."""
    with open(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, text in enumerate(lines, 1):
            line = text.encode("utf-8", "surrogateescape").strip()
            if b"\0" in line:
                raise InputError(
                    "This file is not a text file with one image path a line.",
                    where=file,
                    fix="pass a folder of images, or a text file of paths",
                )
            if line:
                yield number, line
