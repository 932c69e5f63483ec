"""Tables of one's own: a path and a label in each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.data.folder import FileImages
from zoo.errors import InputError

from ..tables import TESTS, columns_of, find_table, table_rows
from .labels import Listed

__all__ = ["find_tables", "open_tables"]

_TREE = "train.csv and val.csv (or test, or .jsonl) with path and label"


def find_tables(folder: Path, train_only: bool) -> tuple[Path, Path | None] | None:
    """The training and the test table of a folder; None if it isn't one of tables.

    Where a folder ``train`` lies beside them, only tables of paths and labels count.

    Raises:
        InputError: there is no test table.
    """
    train, val = find_table(folder, ("train",)), find_table(folder, TESTS)
    if train is None:
        return None
    if (folder / "train").is_dir() and not ((val or train_only) and {"path", "label"} <= columns_of(train)):
        return None
    if val is None and not train_only:
        raise InputError(
            f"There is {train.name}, and no table of the test images.",
            where=", ".join(
                str(folder / f"{part}{ending}") for part in TESTS for ending in (".csv", ".jsonl")
            ),
            fix=f"expected: {_TREE}",
        )
    return train, None if train_only else val


def open_tables(
    train: Path, val: Path | None, class_names: tuple[str, ...] | None
) -> tuple[FileImages, FileImages | None]:
    """Open tables whose paths are relative to their folder.

    Raises:
        InputError: no such columns, rows that can't be read, missing images (counted, the first is named),
            a test class that training doesn't know.
    """
    images = _read(train).images(train, train.parent, class_names)
    return images, None if val is None else _read(val).images(val, val.parent, images.classes)


def _read(file: Path) -> Listed:
    columns = columns_of(file)
    if not {"path", "label"} <= columns:
        raise InputError(
            f"The columns path and label aren't there; found: {', '.join(sorted(columns)) or 'none'}.",
            where=file,
            fix=f"expected: {_TREE}",
        )
    listed = Listed()
    for row, where in table_rows(file):
        listed.append(*_row(row, where))
    return listed


def _row(row: Any, where: str) -> tuple[str, str]:
    path, label = (row.get("path"), row.get("label")) if isinstance(row, dict) else (None, None)
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    label = label.strip() if isinstance(label, str) else ""
    if not path or not isinstance(path, str) or not label or None in row:
        raise InputError("The row isn't a path and a label.", where=where, fix=f"expected: {_TREE}")
    if label[0] == "-" and label[1:].isdecimal():
        raise InputError(f"The label {label} is below 0.", where=where, fix="classes count from 0")
    return path, label
