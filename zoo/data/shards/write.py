"""A folder of pictures as tar shards: the files' bytes as they are, each shard whole or not at all."""

from __future__ import annotations

import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from ...files import disk_errors, whole_file, write_json
from ...keyed import keyed_key, keyed_permutation
from ..decode import IMAGE_SUFFIXES
from ..folder import FileImages
from ..source import UNLABELLED, ImageSource
from .index import INDEX, Entry, ShardIndex
from .opening import alone
from .tar import BLOCK, Damaged, Refused, members

__all__ = ["SUMMARY", "Written", "write_shards"]

log = logging.getLogger("zoo")

SUMMARY = "index.json"
_SCHEMA = 1
_SHARD = re.compile(r"\d{6,}\.tar")
_LEFT = re.compile(r"\.\d{6,}\.tar\.[0-9a-f]{32}\.tmp")  # by a process that was killed
_END = 2 * BLOCK
_LONGEST_STEM = 64  # a name fits into a plain header with it


@dataclass(frozen=True)
class Written:
    """What was made: ``kept`` shards were there from before."""

    images: int
    shards: int
    kept: int
    bytes: int
    classes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        counts = {"images": self.images, "shards": self.shards, "kept": self.kept, "bytes": self.bytes}
        return {"schema": _SCHEMA, **counts, "classes": list(self.classes)}


@dataclass(frozen=True)
class _Planned:
    """An image that goes into a shard: its number in the folder, name in the shard, size, and label."""

    number: int
    name: str
    size: int
    label: int
    changed: int

    def parts(self) -> Iterator[tuple[str, int]]:
        """(name, size) of its members."""
        yield self.name, self.size
        if self.label != UNLABELLED:
            yield self.name.partition(".")[0] + ".cls", len(str(self.label))

    @property
    def bytes(self) -> int:
        """In the archive."""
        return sum(BLOCK + -(-size // BLOCK) * BLOCK for _, size in self.parts())


def write_shards(
    source: ImageSource,
    out: Path,
    *,
    size: int = 256_000_000,
    count: int | None = None,
    shuffle: bool = True,
    progress: Callable[[int], None] = lambda done: None,
) -> Written:
    """Write ``000000.tar``, ``000001.tar``, ... and their index; go on where an interrupted call stopped.

    A sample is ``NUMBER-NAME.jpg`` (its number in the sorted folder; the name with plain characters) and, where
    the folder has classes, ``NUMBER-NAME.cls`` with the number of its class. The same folder gives the same
    bytes each time.

    Args:
        source: picture files.
        out: the folder for the shards; what an earlier call finished there is kept.
        size: of a shard, in bytes, at most (unless a single image is larger).
        count: images of a shard, instead.
        shuffle: put the images into a keyed random order: in the order of a folder a shard would hold few
            classes.
        progress: called with the number of images that are done.

    Raises:
        InputError: a source without files, a file that can't be read, or shards of other images in ``out``.
        RunError: the disk failed.
    """
    if not isinstance(source, FileImages):
        raise InputError(
            "Only picture files can be put into shards.",
            where=source.name,
            fix="pass a folder, or a list of paths",
        )
    with disk_errors("Making the folder for shards", out):
        out.mkdir(parents=True, exist_ok=True)
    with alone(out / ".lock"), disk_errors("Writing shards", out):
        try:
            for left in out.iterdir():
                if _LEFT.fullmatch(left.name):
                    left.unlink()
            return _write(source, out, _plans(source, size, count, shuffle), progress)
        finally:
            (out / ".lock").unlink(missing_ok=True)


def _write(
    source: FileImages, out: Path, plans: Iterator[list[_Planned]], progress: Callable[[int], None]
) -> Written:
    entries: list[Entry] = []
    done = kept = 0
    for planned in plans:
        path = out / f"{len(entries):06d}.tar"
        if path.exists() and _is_whole(path, planned, out):
            kept += 1
        else:
            with whole_file(path) as temporary:
                _write_shard(source, temporary, planned)
        entries.append(_entry(path, planned))
        done += len(planned)
        progress(done)
    names = {entry.name for entry in entries}
    surplus = sorted(
        path.name for path in out.iterdir() if _SHARD.fullmatch(path.name) and path.name not in names
    )
    if surplus:
        raise _others(out, surplus[0])
    index = ShardIndex.of(entries, source.classes if source.classes else None)
    shards = [{"name": e.name, "images": len(e.starts), "bytes": e.size} for e in entries]
    summary = {"schema": _SCHEMA, "images": done, "classes": list(source.classes), "shards": shards}
    write_json(out / SUMMARY, summary)
    index.save(out / INDEX)
    return Written(done, len(entries), kept, sum(entry.size for entry in entries), source.classes)


def _plans(source: FileImages, size: int, count: int | None, shuffle: bool) -> Iterator[list[_Planned]]:
    """What goes into each shard; the files' sizes are asked for as it goes."""
    number = len(source)
    order = keyed_permutation(keyed_key(0, "into shards"), number) if shuffle else np.arange(number)
    shard: list[_Planned] = []
    total = _END
    for index in order:
        planned = _plan(source, int(index))
        full = len(shard) == count if count is not None else total + planned.bytes > size
        if shard and full:
            yield shard
            shard, total = [], _END
        shard.append(planned)
        total += planned.bytes
    yield shard


def _plan(source: FileImages, index: int) -> _Planned:
    path = source.where(index)
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    stem, ending = os.path.splitext(os.path.relpath(path, source.root))
    if ending.lower() not in IMAGE_SUFFIXES:
        raise InputError(
            "The file's name has no picture's ending, by which shards tell images.",
            where=path,
            fix="give it one of " + " ".join(sorted(IMAGE_SUFFIXES)),
        )
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", stem)[-_LONGEST_STEM:]
    name = f"{index:09d}-{plain}{ending.lower()}"
    return _Planned(index, name, status.st_size, source.label(index), status.st_mtime_ns)


def _write_shard(source: FileImages, path: Path, planned: list[_Planned]) -> None:
    with open(path, "wb") as file:
        for image in planned:
            content = _content(source.where(image.number), image.size)
            for (name, size), data in zip(image.parts(), (content, str(image.label).encode()), strict=False):
                file.write(_header(name, size) + data + bytes(-size % BLOCK))
        file.write(bytes(_END))


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)  # whose time and owner are 0
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT if size >= 8**11 else tarfile.USTAR_FORMAT)


def _content(path: str, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(content) != size:
        raise InputError("The file changed while it was put into a shard.", where=path, fix="call it again")
    return content


def _unreadable(path: str, error: OSError) -> InputError:
    return InputError(
        f"The image file can't be read ({error.strerror}).",
        where=path,
        fix="check its permissions and the disk, or take it out of the folder",
    )


def _is_whole(path: Path, planned: list[_Planned], out: Path) -> bool:
    """Whether a shard is what would be written; a damaged one, or one older than its files, isn't.

    Raises:
        InputError: it is whole, and holds other images.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(handle)
        there = members(lambda offset, length: os.pread(handle, length, offset), status.st_size)
        found = [(member.name, member.size) for member in there]
    except (Damaged, Refused) as error:
        log.warning("%s is damaged and is written again: %s", path, error)
        return False
    finally:
        os.close(handle)
    if [name for name, _ in found] != [name for image in planned for name, _ in image.parts()]:
        raise _others(out, path.name)
    same = found == [part for image in planned for part in image.parts()]
    return same and status.st_mtime_ns >= max(image.changed for image in planned)


def _others(out: Path, shard: str) -> InputError:
    return InputError(
        f"The folder holds shards of other images, or of another size ({shard}).",
        where=out,
        fix="choose another -o, or remove them",
    )


def _entry(path: Path, planned: list[_Planned]) -> Entry:
    sizes = np.array([image.bytes for image in planned], np.int64)
    labels = np.array([image.label for image in planned], np.int32)
    starts = ((np.cumsum(sizes) - sizes) // BLOCK).astype(np.uint32)
    return Entry(path.name, path.stat().st_size, 0, starts, labels, int((labels == UNLABELLED).sum()))
