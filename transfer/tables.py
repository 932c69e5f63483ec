"""Tables that name picture files and their classes: one class each, or several."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.folder import FileImages, PackedPaths
from zoo.errors import InputError

__all__ = ["TESTS", "ListedImages", "columns_of", "find_table", "packed_path", "refuse_absent", "table_rows"]

TESTS = ("val", "test", "validation")
"""What the test part may be called."""

_ENDINGS = (".csv", ".jsonl")


class ListedImages(FileImages):
    """Picture files whose labels a list gives, not their folders."""

    def fingerprint(self) -> dict[str, Any]:
        labels = np.ascontiguousarray(self._labels, dtype="<i4").tobytes()
        return {**super().fingerprint(), "labels_sha256": hashlib.sha256(labels).hexdigest()}


def find_table(folder: Path, parts: Sequence[str]) -> Path | None:
    """The first table of one of these names."""
    named = (folder / f"{part}{ending}" for part in parts for ending in _ENDINGS)
    return next((path for path in named if path.is_file()), None)


def columns_of(file: Path) -> set[str]:
    """The columns of a table's first row.

    Raises:
        InputError: a file that can't be read.
    """
    try:
        with open(file, encoding="utf-8-sig", errors="replace", newline="") as lines:
            line = lines.readline()
    except OSError as error:
        raise InputError(f"The table can't be read ({error.strerror}).", where=file) from None
    if file.suffix == ".csv":
        return {word.strip() for word in next(csv.reader([line]), [])}
    try:
        row = json.loads(line)
    except ValueError:
        return set()
    return set(row) if isinstance(row, dict) else set()


def table_rows(file: Path) -> Iterator[tuple[Any, str]]:
    """Each row with its place; rows are dictionaries in CSV, and whatever the line says in JSONL.

    Raises:
        InputError: a file that can't be read, a line that is no JSON, or no rows.
    """
    number = 0
    try:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            if file.suffix == ".csv":
                found: Any = csv.DictReader(lines, skipinitialspace=True)
                for row in found:
                    number = found.line_num
                    yield row, f"{file}, line {number}"
            else:
                for place, line in enumerate(lines, 1):
                    if line.strip():
                        number = place
                        yield _json(line, file, place), f"{file}, line {place}"
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"The table can't be read ({error}).", where=file) from None
    if not number:
        raise InputError("The table is empty.", where=file)


def _json(line: str, file: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"Line {number} is no JSON ({error.msg}).", where=file) from None


def packed_path(path: str) -> bytes:
    """A path as the disk has it.

    Raises:
        InputError: JSON can spell what is no text.
    """
    try:
        return os.fsencode(path)
    except UnicodeEncodeError:
        raise InputError("A path is no text.", where=repr(path)) from None


def refuse_absent(paths: PackedPaths, root: Path, file: Path, fix: str = "") -> None:
    """Stop if images that a list names aren't there.

    Args:
        paths: what it names.
        root: where relative paths start.
        file: the list.
        fix: what to do; by default where paths start is said.

    Raises:
        InputError: counts them and names the first.
    """
    start = os.fsencode(root)
    absent, first = 0, b""
    for path in paths:
        if not os.path.isfile(os.path.join(start, path)):
            first = first if absent else path
            absent += 1
    if absent:
        raise InputError(
            f"{absent} of {len(paths)} listed images don't exist ({os.fsdecode(first)} first).",
            where=file,
            fix=fix or f"paths are taken relative to {root}",
        )
