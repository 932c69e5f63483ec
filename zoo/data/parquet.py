"""Images in parquet files: encoded pictures in a column, read by row groups. pyarrow is imported when needed."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .class_index import renumber
from .decode import Picture, open_image
from .decoding import PLAIN, Decoding
from .identify import SKIP
from .shards.pattern import local_shards
from .shards.scan import LARGEST_LABEL
from .source import UNLABELLED

__all__ = ["ParquetImages", "open_parquet", "use_labels"]

_WINDOW = 4  # row groups that are shuffled together, and held by each process that reads
_IMAGE, _LABELS = "image", ("label", "labels", "cls")


class ParquetImages:
    """The rows of parquet files, numbered in the order of the files.

    Args:
        name: what the user called them.
        paths: the files.
        column: the images' column: binary, or a struct with ``bytes``, as Hugging Face writes it.
        groups: rows of each row group of each file.
        labels: int64 of each row, or None.
        classes: names of the labels.
        notes: remarks for the user.
    """

    decoding: Decoding = PLAIN
    """How the images become pixels."""
    window = _WINDOW
    """Row groups that are shuffled together (``zoo.data.shards.order``)."""

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        column: str,
        groups: Sequence[Sequence[int]],
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.classes = classes
        self.notes = notes
        self._paths = tuple(paths)
        self._column = column
        self._labels = labels
        self._places = [(file, group) for file, inner in enumerate(groups) for group in range(len(inner))]
        self.stretches: np.ndarray = np.array([rows for inner in groups for rows in inner], np.int64)
        """Rows of each row group: what is read together."""
        self._ends = np.cumsum(self.stretches)
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._files: dict[int, Any] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict(), "_files": {}}

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files."""
        return self._paths

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has no row {index}")
        group = int(np.searchsorted(self._ends, index, "right"))
        return group, index - int(self._ends[group] - self.stretches[group])

    def _rows(self, group: int) -> Any:
        """The images of a row group, as pyarrow holds them."""
        import pyarrow.parquet as parquet

        if self._process != os.getpid():  # pyarrow's files don't survive a fork
            self._process, self._files, self._held = os.getpid(), {}, OrderedDict()
        if group in self._held:
            self._held.move_to_end(group)
            return self._held[group]
        number, inner = self._places[group]
        if number not in self._files:
            if len(self._files) > _WINDOW:
                self._files.clear()
            self._files[number] = parquet.ParquetFile(self._paths[number])
        # Its threads would be gone in a forked process.
        table = self._files[number].read_row_group(inner, columns=[self._column], use_threads=False)
        self._held[group] = table.column(0)
        if len(self._held) > _WINDOW + 1:
            self._held.popitem(last=False)
        return self._held[group]

    def open(self, index: int) -> Picture:
        """The picture with its size read, not yet decoded."""
        import pyarrow

        group, row = self._locate(index)
        try:
            value = self._rows(group)[row].as_py()
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(
                f"The parquet file can't be read ({' '.join(str(error).split())[:200]}).",
                where=self.where(index),
                fix=f"copy it again, or {SKIP}",
            ) from None
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None:
            raise InputError(
                "The row holds no picture (at most the name of one).", where=self.where(index), fix=SKIP
            )
        return open_image(bytes(content), name=self.where(index), how=self.decoding)

    def read(self, index: int) -> np.ndarray:
        return self.open(index).pixels()

    def label(self, index: int) -> int:
        return UNLABELLED if self._labels is None else int(self._labels[index])

    def where(self, index: int) -> str:
        group, row = self._locate(index)
        number, inner = self._places[group]
        return f"{self._paths[number]}: row {row} of row group {inner}"

    def fingerprint(self) -> dict[str, Any]:
        """Names and sizes of the files, rows and labels; the images are not read."""
        sizes = [os.path.getsize(path) if os.path.exists(path) else -1 for path in self._paths]
        files = [[os.path.basename(path), size] for path, size in zip(self._paths, sizes, strict=True)]
        known = [files, self.stretches.tolist(), self._column]
        digest = hashlib.sha256(json.dumps(known).encode())
        if self._labels is not None:
            digest.update(self._labels.tobytes())
        return {"kind": "parquet", "count": len(self), "bytes": sum(sizes), "sha256": digest.hexdigest()}


def open_parquet(
    spec: str, how: Decoding = PLAIN, class_names: tuple[str, ...] | None = None
) -> ParquetImages:
    """Open parquet files on this machine; their footers are read.

    Args:
        spec: ``parquet:`` and a file, a folder or a pattern; or what ends in ``.parquet``.
        how: how images are decoded.
        class_names: all classes in the order of their numbers, if not the files' own.

    Raises:
        InputError: no pyarrow, no such file, one that is damaged, or none with images.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError(
            "Parquet files are read with pyarrow, which is not installed.",
            where=spec,
            fix="pip install pyarrow",
        ) from None
    paths = _paths(spec)
    groups, labels, notes = [], [], []
    column, label, classes = "", "", None
    for path in paths:
        try:
            file = parquet.ParquetFile(path)
            found = _columns(file.schema_arrow, path)
            if path == paths[0]:
                column, label, classes = found
            elif found != (column, label, classes):
                raise InputError("The parquet file has other columns than the first one.", where=path)
            meta = file.metadata
            groups.append([meta.row_group(group).num_rows for group in range(meta.num_row_groups)])
            if label:
                labels.append(file.read(columns=[label], use_threads=False).column(0))
        except (OSError, pyarrow.ArrowException) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"The parquet file can't be read ({reason}).", where=path) from None
    known = labels and not any(part.null_count for part in labels)
    numbers = np.concatenate([part.to_numpy().astype(np.int64) for part in labels]) if known else None
    if labels and not known:
        notes.append(f"some rows have no {label}: labels are not used")
    numbers, names = use_labels(numbers, classes, class_names, spec)
    if not sum(map(sum, groups)):
        raise InputError("There are no rows in the parquet files.", where=spec)
    images = ParquetImages(spec, list(map(str, paths)), column, groups, numbers, names, tuple(notes))
    images.decoding = how
    return images


def _paths(spec: str) -> list[Path]:
    place = Path(spec.removeprefix("parquet:")).expanduser()
    if place.is_dir():
        paths = sorted(path for path in place.rglob("*.parquet") if not path.name.startswith("."))
        if not paths:
            raise InputError("There are no parquet files in this folder.", where=place)
        return paths
    there, missing = local_shards(str(place))
    if missing:
        raise InputError("A parquet file is not there.", where=missing[0], fix="put it back, or name others")
    return [Path(path) for path in there]


def _columns(schema: Any, path: Path) -> tuple[str, str, tuple[str, ...] | None]:
    """The images' column, the labels' one (or nothing), and the classes where they are named."""
    from pyarrow import types

    def is_bytes(kind: Any) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind)

    found = {}
    for field in schema:
        if is_bytes(field.type):
            found[field.name] = field.name
        elif types.is_struct(field.type):
            inner = {part.name: part.type for part in field.type}
            if "bytes" in inner and is_bytes(inner["bytes"]):
                found[field.name] = f"{field.name}.bytes"
    if len(found) != 1 and _IMAGE not in found:
        raise InputError(
            f"The parquet file has {len(found) or 'no'} columns that could hold images"
            f"{': ' + ', '.join(found) if found else ''}.",
            where=path,
            fix=f"images are encoded files in a binary column, or in a struct with bytes; call it {_IMAGE}",
        )
    column = found.get(_IMAGE) or next(iter(found.values()))
    features = _features(schema.metadata or {})
    for name in (*features, *_LABELS):
        position = schema.get_field_index(name)
        if position >= 0 and types.is_integer(schema.field(position).type):
            return column, name, features.get(name)
    return column, "", None


def _features(metadata: dict[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """The columns that Hugging Face's own notes call class labels, with the names of the classes."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            str(name): tuple(map(str, kind["names"]))
            for name, kind in features.items()
            if isinstance(kind, dict) and kind.get("_type") == "ClassLabel" and kind.get("names")
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def use_labels(
    numbers: np.ndarray | None,
    classes: tuple[str, ...] | None,
    wanted: tuple[str, ...] | None,
    where: str,
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Labels and classes as they are to be used; none where a number is no class number."""
    if numbers is None or not len(numbers) or numbers.min() < 0 or numbers.max() > LARGEST_LABEL:
        return None, ()
    highest = int(numbers.max())
    names = classes if classes is not None else tuple(map(str, range(highest + 1)))
    if highest >= len(names):
        return None, ()
    if wanted is None:
        return numbers, names
    new = renumber(names, classes is not None, wanted, where)
    return (numbers if new is None else np.array(new)[numbers]), wanted
