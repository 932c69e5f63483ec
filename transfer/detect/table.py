"""Boxes in a plain table: a CSV file with one box a line, or JSON lines with one image each. No torch here."""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.errors import InputError, did_you_mean

from .annotations import BoxSet, Objects, Picture, Problem, four_numbers, some_of

__all__ = ["find_table", "read_table"]

_ENDINGS = (".csv", ".jsonl")
_COLUMNS = ("image", "xmin", "ymin", "xmax", "ymax", "label")
_ALSO = {"filename": "image", "file": "image", "path": "image", "class": "label", "x1": "xmin", "y1": "ymin"}
_ALSO |= {"x2": "xmax", "y2": "ymax", "name": "label", "file_name": "image", "category": "label"}
_CSV_LINE = (
    "write " + ",".join(_COLUMNS) + " in pixels; an image without objects alone, its other cells empty"
)
_JSON_LINE = 'write {"image": ..., "boxes": [[xmin, ymin, xmax, ymax], ...], "labels": [...]}'
_Row = tuple[str, list[float] | None, str | None]


def find_table(folder: Path, split: str) -> Path | None:
    """The table of a split in a folder, if there is one."""
    return next((f for f in (folder / f"{split}{end}" for end in _ENDINGS) if f.is_file()), None)


def read_table(file: Path, split: str, classes: Sequence[str] | None, problems: list[Problem]) -> BoxSet:
    """Read a table; boxes are edges counted from 0, image names are relative to its folder.

    CSV: ``image,xmin,ymin,xmax,ymax,label`` with a header, parted by commas, semicolons or tabs; a line with
    an image alone is an image without objects. JSON lines: ``{"image": ..., "boxes": [[xmin, ymin, xmax, ymax], ...], "labels": [...]}``.

    Args:
        file: the table.
        split: for people.
        classes: the known classes; by default those that are found.
        problems: what is wrong is added to it, all of it at once.

    Raises:
        InputError: it is no such table at all.
    """
    boxes: dict[str, list[list[float]]] = {}
    labels: dict[str, list[str]] = {}
    rows = _json_rows(file, problems) if file.suffix == ".jsonl" else _csv_rows(file, problems)
    for image, box, label in rows:
        boxes.setdefault(image, [])
        labels.setdefault(image, [])
        if box is not None and label is not None:
            boxes[image].append(box)
            labels[image].append(label)
    found = sorted({label for group in labels.values() for label in group})
    chosen = tuple(classes if classes is not None else found)
    for label in found:
        if chosen and label not in chosen:  # without any, what is wrong is the training set
            image = next(name for name, group in labels.items() if label in group)
            fix = did_you_mean(label, chosen) + f"known: {', '.join(chosen)}"
            problems.append(
                Problem(f"{image} has a class that training doesn't know: {label}.", str(file), fix)
            )
    missing = [name for name in boxes if not os.path.isfile(file.parent / name)]
    if missing:
        what = f"{len(missing)} of {len(boxes)} images are missing: {some_of(missing)}."
        fix = f"names are relative to {file.parent}: put the images there, or correct the table"
        problems.append(Problem(what, str(file), fix, files=tuple(missing)))
    if not boxes and not problems:
        problems.append(Problem("The table has no image.", str(file), "give it a line for each box"))
    gone = set(missing)
    pictures = []
    for number, name in enumerate(name for name in boxes if name not in gone):
        known = [i for i, label in enumerate(labels[name]) if label in chosen]
        mine = np.array([boxes[name][i] for i in known], dtype=np.float64).reshape(-1, 4)
        none = np.zeros(len(known), dtype=bool)
        objects = Objects(
            mine,
            np.array([chosen.index(labels[name][i]) for i in known], dtype=np.int64),
            none,
            none.copy(),
            np.prod(mine[:, 2:] - mine[:, :2], axis=1),
        )
        pictures.append(Picture(name, file.parent / name, None, objects, number, file))
    return BoxSet("table", split, chosen, pictures)


def _csv_rows(file: Path, problems: list[Problem]) -> Iterator[_Row]:
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            first = lines.readline()
            reader = csv.reader(itertools.chain([first], lines), delimiter=max(",;\t", key=first.count))
            header = [name.strip().lower() for name in next(reader, [])]
            columns = [_ALSO.get(name, name) for name in header]
            absent = [name for name in _COLUMNS if name not in columns]
            if absent:
                raise InputError(
                    f"The table lacks the column(s) {', '.join(absent)}.",
                    where=file,
                    fix="begin it with " + ",".join(_COLUMNS),
                )
            place = {name: columns.index(name) for name in _COLUMNS}
            for line in reader:
                if not any(cell.strip() for cell in line):
                    continue
                cells = [line[place[name]].strip() if place[name] < len(line) else "" for name in _COLUMNS]
                try:
                    if not cells[0]:
                        raise ValueError("it names no image")
                    if any(cell.strip() for cell in line[len(header) :]):
                        raise ValueError("it has more cells than the header")
                    box = four_numbers(cells[1:5]) if any(cells[1:]) else None
                    if box and not cells[5]:
                        raise ValueError("its box has no label")
                except ValueError as error:
                    problems.append(_unusable(file, reader.line_num, error, _CSV_LINE))
                    continue
                yield cells[0], box, cells[5]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _no_text(file, error) from None


def _unusable(file: Path, number: int, error: Exception, fix: str) -> Problem:
    return Problem(f"A line can't be used ({error}).", f"{file}, line {number}", fix)


def _no_text(file: Path, error: Exception) -> InputError:
    return InputError(
        f"The table can't be read ({error}).",
        where=file,
        fix="save it as UTF-8 text, a line for each box or image",
    )


def _json_rows(file: Path, problems: list[Problem]) -> Iterator[_Row]:
    try:
        lines = file.read_text("utf-8-sig").split("\n")  # some others that end lines may stand in a JSON text
    except (OSError, UnicodeDecodeError) as error:
        raise _no_text(file, error) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
            image = row["image"]
            boxes, labels = ([], []) if row.keys() == {"image"} else (row["boxes"], row["labels"])
            if not isinstance(image, str) or not isinstance(boxes, list) or not isinstance(labels, list):
                raise ValueError("image is no text, or boxes or labels are no list")
            found = [four_numbers(box) for box in boxes]
            if len(found) != len(labels):
                raise ValueError("boxes and labels don't fit together")
            if not all(_is_label(label) for label in labels):
                raise ValueError("a label is neither text nor a whole number")
        except KeyError as error:
            problems.append(_unusable(file, number, ValueError(f"it has no {error}"), _JSON_LINE))
            continue
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            problems.append(_unusable(file, number, error, _JSON_LINE))
            continue
        yield image, None, None
        for box, label in zip(found, labels, strict=True):
            yield image, box, str(label)


def _is_label(value: object) -> bool:
    return (isinstance(value, str) and bool(value.strip())) or type(value) is int
