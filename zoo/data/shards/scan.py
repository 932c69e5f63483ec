"""A shard's samples, found by reading its headers once."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...errors import InputError
from ..decode import IMAGE_SUFFIXES
from ..source import UNLABELLED
from .tar import BLOCK, Damaged, Member, ReadAt, Refused, members, next_header

__all__ = ["LARGEST_LABEL", "Scan", "key_and_ending", "scan_shard", "shown"]

LARGEST_LABEL = 1_000_000
"""Numbers above it are no class numbers."""
_LONGEST_LABEL = 32  # bytes of a .cls
_PICTURES = frozenset(suffix[1:] for suffix in IMAGE_SUFFIXES)
_COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))


@dataclass(frozen=True)
class Scan:
    """What a shard holds.

    Args:
        starts: where each sample's image has its first header, in blocks of 512 bytes, uint32.
        labels: int32, ``UNLABELLED`` where there is none.
        damage: what is wrong with the shard, and where; empty if nothing is.
        others: members that are neither images nor labels, by their endings.
        size: of the shard, in bytes.
        changed: its time stamp in nanoseconds.
    """

    starts: np.ndarray
    labels: np.ndarray
    damage: str
    others: Counter[str]
    size: int = 0
    changed: int = 0

    @property
    def unlabelled(self) -> int:
        return int((self.labels == UNLABELLED).sum())


def key_and_ending(name: str) -> tuple[str, str]:
    """WebDataset's rule: a key goes to the first dot of the last part; ``a/b.seg.png`` -> ``a/b``, ``seg.png``."""
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()


def shown(shard: str, offset: int, name: str = "") -> str:
    """How messages name a place in a shard."""
    return f"{shard}: {name}{' ' if name else ''}(at byte {offset})"


def scan_shard(path: str | Path, shard: str | None = None) -> Scan:
    """Read all headers of a shard on this machine.

    An image is a member ``KEY.ENDING`` whose ending is a picture's; ``KEY.cls`` holds the number of its class.
    After damage the scan goes on at the next header that can be read.

    Args:
        path: the shard.
        shard: what to call it.

    Raises:
        InputError: it can't be read, is compressed, holds links or names that lead outside, an image without
            a key, or two with one key.
    """
    shard = str(path) if shard is None else shard
    try:
        # A pipe under a shard's name would otherwise wait for ever for someone to write into it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise _unreadable(shard, error) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                "This is a folder, a pipe, a socket or a device, not a shard.",
                where=shard,
                fix="take it out, or name the shards so that the pattern leaves it out",
            )
        scanner = _Scanner(shard, lambda offset, length: os.pread(handle, length, offset))
        return replace(scanner.run(status.st_size), size=status.st_size, changed=status.st_mtime_ns)
    except OSError as error:
        raise _unreadable(shard, error) from None
    except Refused as error:
        raise InputError(
            f"The shard holds what may not be in one: {error.what}.",
            where=shown(shard, error.offset, error.name),
            fix="make the shard again from plain files with relative names (zoo data shard)",
        ) from None
    finally:
        os.close(handle)


def _unreadable(shard: str, error: OSError) -> InputError:
    return InputError(
        f"The shard can't be read ({error.strerror}).",
        where=shard,
        fix="check that it is there, its permissions and the disk; or leave damaged ones out: --on-error skip",
    )


class _Scanner:
    def __init__(self, shard: str, read: ReadAt) -> None:
        self._shard = shard
        self._read = read
        self._images: dict[str, int] = {}  # key -> where it starts, in the order of the shard
        self._labels: dict[str, tuple[int, int]] = {}  # key -> (where, number)
        self._others: Counter[str] = Counter()

    def run(self, size: int) -> Scan:
        start = self._read(0, 8)
        compressed = next((kind for magic, kind in _COMPRESSED if start.startswith(magic)), None)
        if compressed:
            raise InputError(
                f"The shard is compressed ({compressed}): images in it can't be read by their position.",
                where=self._shard,
                fix="unpack it to a plain .tar; images are compressed already",
            )
        if size > BLOCK << 32:  # positions are kept as 32-bit numbers of blocks
            raise InputError("The shard has more than 2 TiB.", where=self._shard, fix="make smaller shards")
        damage: list[Damaged] = []
        offset: int | None = 0
        while offset is not None:
            try:
                for member in members(self._read, size, offset):
                    self._take(member)
                offset = None
            except Damaged as error:
                damage.append(error)
                offset = next_header(self._read, error.offset + BLOCK, size)
        labels = [self._labels.get(key, (0, UNLABELLED))[1] for key in self._images]
        return Scan(
            (np.fromiter(self._images.values(), np.int64, len(self._images)) // BLOCK).astype(np.uint32),
            np.array(labels, dtype=np.int32),
            self._said(damage),
            self._others,
        )

    def _take(self, member: Member) -> None:
        key, ending = key_and_ending(member.name)
        base = member.name.rpartition("/")[2]
        if not member.is_file or (base.startswith(".") and ending not in _PICTURES):
            return
        if ending in _PICTURES:
            if not key or key.endswith("/"):
                raise self._wrong("An image in the shard has no key: its name begins with the dot.", member)
            if key in self._images:
                raise self._twice(key, self._images[key], member)
            self._images[key] = member.start
        elif ending == "cls":
            if key in self._labels:
                raise self._twice(key, self._labels[key][0], member)
            self._labels[key] = (member.start, self._number(member))
        else:
            self._others[f".{ending}" if ending else "none"] += 1

    def _number(self, member: Member) -> int:
        content = self._read(member.data, min(member.size, _LONGEST_LABEL)).strip()
        number = int(content) if content.isdigit() else UNLABELLED
        return number if number <= LARGEST_LABEL and member.size <= _LONGEST_LABEL else UNLABELLED

    @staticmethod
    def _said(damage: list[Damaged]) -> str:
        if not damage:
            return ""
        first = damage[0]
        more = f", and damage at {len(damage) - 1} more places" if len(damage) > 1 else ""
        return f"{first.what} ({f'{first.name}, ' if first.name else ''}at byte {first.offset}){more}"

    def _wrong(self, what: str, member: Member) -> InputError:
        return InputError(
            what,
            where=shown(self._shard, member.start, member.name),
            fix="WebDataset's names are KEY.jpg and KEY.cls, each KEY once; zoo data shard makes such shards",
        )

    def _twice(self, key: str, first: int, member: Member) -> InputError:
        return self._wrong(
            f"Two samples of the shard have one key, {key}: at byte {first} and at byte {member.start}.",
            member,
        )
