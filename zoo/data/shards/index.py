"""Where each sample of a folder's shards begins: one file of plain arrays that is mapped, not read.

``index.safetensors`` lies beside the shards. A sample takes 8 bytes in it (4 without labels): the position
of its header in blocks of 512 bytes, and its label. Names and sizes stand in the shard's own headers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from ...files import disk_errors, whole_file
from ..source import UNLABELLED

__all__ = ["INDEX", "Entry", "ShardIndex", "read_header"]

INDEX = "index.safetensors"
_SCHEMA = 1
_LARGEST_HEADER = 100_000_000  # safetensors' own limit
# Of each shard; `starts` and `labels` are of each sample.
_COLUMNS = {"sizes": "I64", "changed": "I64", "counts": "I64", "unlabelled": "I64", "digests": "U64"}
_TYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
}


@dataclass(frozen=True)
class Entry:
    """One shard of an index.

    Args:
        name: the shard's file.
        size: in bytes.
        changed: its time stamp in nanoseconds, or 0: then the size alone says whether it is still the same.
        starts: uint32, where each sample begins, in blocks.
        labels: int32 of each sample, or None.
        unlabelled: samples without a label.
        damage: what is wrong with it.
        digest: of starts and labels; made if not given.
    """

    name: str
    size: int
    changed: int
    starts: np.ndarray
    labels: np.ndarray | None
    unlabelled: int
    damage: str = ""
    digest: int | None = None

    def content(self) -> int:
        """64 bits that change with the samples' places and labels."""
        if self.digest is not None:
            return self.digest
        digest = hashlib.blake2b(np.ascontiguousarray(self.starts, "<u4").data, digest_size=8)
        if self.labels is not None and self.unlabelled < len(self.labels):
            digest.update(np.ascontiguousarray(self.labels, "<i4").data)
        return int.from_bytes(digest.digest(), "little")


class ShardIndex:
    """The samples of some shards, in the order of the shards.

    Args:
        names: of the shards.
        columns: an array for each of ``_COLUMNS``, a value a shard.
        starts: uint32, of all samples.
        labels: int32, of all samples, or None if no sample has one.
        classes: names of the labels; their numbers where names aren't known.
        named: whether they are names.
        damage: what is wrong with shards, by name.
        path: the file that the arrays are mapped from, so that a copy for another process maps it as well.
    """

    def __init__(
        self,
        names: Sequence[str],
        columns: dict[str, np.ndarray],
        starts: np.ndarray,
        labels: np.ndarray | None,
        classes: tuple[str, ...] = (),
        named: bool = False,
        damage: dict[str, str] | None = None,
        path: Path | None = None,
    ) -> None:
        self.names = tuple(names)
        self.columns = columns
        self.starts = starts
        self.labels = labels
        self.classes = classes
        self.named = named
        self.damage = damage or {}
        self.path = path
        self.ends: np.ndarray = np.cumsum(columns["counts"])

    def __len__(self) -> int:
        return len(self.starts)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:
            return ShardIndex.load, (self.path,)
        return ShardIndex, (
            self.names,
            self.columns,
            self.starts,
            self.labels,
            self.classes,
            self.named,
            self.damage,
        )

    @classmethod
    def of(cls, entries: Iterable[Entry], classes: tuple[str, ...] | None = None) -> ShardIndex:
        """An index of these shards, in this order; the labels have these names, or their numbers are the names."""
        entries = list(entries)
        columns: dict[str, list[int]] = {
            "sizes": [entry.size for entry in entries],
            "changed": [entry.changed for entry in entries],
            "counts": [len(entry.starts) for entry in entries],
            "unlabelled": [entry.unlabelled for entry in entries],
            "digests": [entry.content() for entry in entries],
        }
        arrays = {key: np.array(columns[key], _TYPES[kind]) for key, kind in _COLUMNS.items()}
        labelled = any(entry.unlabelled < len(entry.starts) for entry in entries)
        labels = [
            np.full(len(entry.starts), UNLABELLED, "<i4") if entry.labels is None else entry.labels
            for entry in entries
            if labelled
        ]
        numbers = np.concatenate(labels) if labelled else None
        count = 0 if numbers is None else int(numbers.max()) + 1
        names = tuple(map(str, range(count))) if classes is None else classes
        if count > len(names):
            raise InputError(
                f"The shards have a label {count - 1}, and their index names {len(names)} classes.",
                where=", ".join(entry.name for entry in entries[:3]),
                fix=f"remove {INDEX} if the shards were changed on purpose: then labels are numbers",
            )
        return cls(
            [entry.name for entry in entries],
            arrays,
            np.concatenate([np.empty(0, "<u4"), *(entry.starts for entry in entries)]),
            numbers,
            names,
            classes is not None,
            {entry.name: entry.damage for entry in entries if entry.damage},
        )

    def entry(self, shard: int) -> Entry:
        """One shard; the arrays are views."""
        last = int(self.ends[shard])
        samples = slice(last - int(self.columns["counts"][shard]), last)
        return Entry(
            self.names[shard],
            int(self.columns["sizes"][shard]),
            int(self.columns["changed"][shard]),
            self.starts[samples],
            None if self.labels is None else self.labels[samples],
            int(self.columns["unlabelled"][shard]),
            self.damage.get(self.names[shard], ""),
            int(self.columns["digests"][shard]),
        )

    def select(self, names: Sequence[str]) -> ShardIndex:
        """Some of the shards in another order; the whole index itself if that is what is asked for."""
        if tuple(names) == self.names:
            return self
        place = {name: shard for shard, name in enumerate(self.names)}
        chosen = ShardIndex.of([self.entry(place[name]) for name in names], self.classes)
        chosen.named = self.named
        return chosen

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            RunError: the disk failed.
        """
        arrays = {**self.columns, "starts": self.starts}
        if self.labels is not None:
            arrays["labels"] = self.labels
        kinds = {**_COLUMNS, "starts": "U32", "labels": "I32"}
        about = {"schema": _SCHEMA, "shards": self.names, "classes": self.classes, "named": self.named}
        about["damage"] = self.damage
        # Equal headers must mean equal content: another machine compares only those.
        content = b"".join(self.columns[key].tobytes() for key in _COLUMNS)
        about["content"] = hashlib.sha256(content).hexdigest()
        header: dict[str, Any] = {"__metadata__": {"zoo": json.dumps(about)}}
        end = 0
        for name, array in arrays.items():
            first, end = end, end + array.nbytes
            header[name] = {"dtype": kinds[name], "shape": [len(array)], "data_offsets": [first, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        doing = "Writing the index of shards"
        with disk_errors(doing, path), whole_file(path) as temporary, open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for array in arrays.values():
                array.tofile(file)

    @classmethod
    def load(cls, path: Path) -> ShardIndex:
        """Map an index.

        Raises:
            InputError: there is none, or it is not one.
        """
        try:
            with open(path, "rb") as file:
                first = file.read(8)
                text = file.read(min(_header_length(first), _LARGEST_HEADER))
            about, layout = read_header(first + text)
            data = np.memmap(path, np.uint8, "r", offset=8 + len(text)) if layout else np.empty(0, np.uint8)
            arrays = {name: _column(data, *place) for name, place in layout.items()}
            names, columns = tuple(map(str, about["shards"])), {key: arrays[key] for key in _COLUMNS}
            labels = arrays.get("labels")
            counts = columns["counts"]
            fits = all(len(column) == len(names) for column in columns.values())
            if not fits or counts.min(initial=0) < 0 or counts.sum() != len(arrays["starts"]):
                raise ValueError("its arrays don't fit together")
            if labels is not None and len(labels) != len(arrays["starts"]):
                raise ValueError("it has labels for other samples")
            damage = {str(name): str(what) for name, what in about["damage"].items()}
            classes = tuple(map(str, about["classes"]))
            return cls(names, columns, arrays["starts"], labels, classes, bool(about["named"]), damage, path)
        except OSError as error:
            raise InputError(f"The index of shards can't be read ({error.strerror}).", where=path) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"The index of shards is not one ({error}).", where=path) from None


def _header_length(first: bytes) -> int:
    if len(first) < 8:
        raise ValueError("it is too short")
    return int(struct.unpack("<Q", first[:8])[0])


def read_header(start: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, int, int, int]]]:
    """From the beginning of an index's file: what it says of itself; kind, length, first and last byte of arrays.

    Raises:
        ValueError, KeyError, TypeError: it is no index.
    """
    length = _header_length(start)
    if length > len(start) - 8:
        raise ValueError("it is cut off")
    header = json.loads(start[8 : 8 + length])
    about = json.loads(header.pop("__metadata__")["zoo"])
    if about["schema"] != _SCHEMA:
        raise ValueError(f"its schema is {about['schema']!r}, and this version reads {_SCHEMA}")
    layout = {}
    for name, array in header.items():
        (length,), (first, last) = array["shape"], array["data_offsets"]
        layout[name] = (str(array["dtype"]), int(length), int(first), int(last))
    return about, layout


def _column(data: np.ndarray, kind: str, length: int, first: int, last: int) -> np.ndarray:
    dtype = _TYPES[kind]
    if not 0 <= first <= last <= len(data) or last - first != length * dtype.itemsize:
        raise ValueError("it is cut off")
    return np.asarray(data[first:last]).view(dtype)
