"""iNaturalist 2018: JSON files of images, annotations and categories."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zoo.data.folder import FileImages
from zoo.errors import InputError

from .labels import Listed, find_lists

__all__ = ["INAT18_TREE", "open_inat18"]

INAT18_TREE = "train2018.json, val2018.json and train_val2018/<kind>/<number>/*.jpg"

_KINDS = ("images", "annotations", "categories")


def open_inat18(
    root: Path, class_names: tuple[str, ...] | None, train_only: bool
) -> tuple[FileImages, FileImages | None]:
    """Open iNaturalist 2018: the classes are the categories of the training images, in the order of their ids.

    Raises:
        InputError: missing files or images, JSON that isn't of this form, or images without one class each.
    """
    names = [f"{part}2018.json" for part in ("train", "val")[: 1 if train_only else 2]]
    files = find_lists("iNaturalist 2018", [root, root / "annotations"], names, INAT18_TREE)
    fix = f"paths are taken relative to {root}; expected: {INAT18_TREE}"
    listed, order = _read(files[0])
    train = listed.images(files[0], root, class_names or order, fix)
    return train, None if train_only else _read(files[1])[0].images(files[1], root, train.classes, fix)


def _read(file: Path) -> tuple[Listed, tuple[str, ...]]:
    """The images, and the categories that they have in the order of their ids."""
    images, annotations, names = _content(file)
    category_of: dict[Any, Any] = dict.fromkeys(number for number, _ in images)
    if len(category_of) < len(images):
        twice = next(number for number, count in Counter(n for n, _ in images).items() if count > 1)
        raise InputError(f"Two images have the id {twice}.", where=file)
    for image, category in annotations:
        if image not in category_of or category not in names:
            lost = f"image {image}" if image not in category_of else f"category {category}"
            raise InputError(f"An annotation is of {lost}, which isn't there.", where=file)
        if category_of[image] not in (None, category):
            raise InputError(
                f"Image {image} has several classes: {names[category_of[image]]}, {names[category]}.",
                where=file,
            )
        category_of[image] = category
    without = [path for number, path in images if category_of[number] is None]
    if without:
        raise InputError(
            f"{len(without)} of {len(images)} images have no annotation ({without[0]} first).",
            where=file,
            fix="the lists of the training and the validation images have them; the test list has no classes",
        )
    listed = Listed()
    for number, path in images:
        listed.append(path, names[category_of[number]])
    return listed, tuple(names[category] for category in sorted(set(category_of.values())))


def _content(file: Path) -> tuple[list[Any], list[Any], dict[Any, str]]:
    """(id, path) of the images, (image, category) of the annotations, and the name of each category."""
    try:
        with open(file, encoding="utf-8-sig") as lines:
            content = json.load(lines, object_hook=_lean)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"The JSON file can't be read ({error}).", where=file) from None
    parts = [content.get(kind) if isinstance(content, dict) else None for kind in _KINDS]
    for kind, part in zip(_KINDS, parts, strict=True):
        if not isinstance(part, list) or not part:
            raise InputError(
                f"There are no {kind}.", where=file, fix="expected: an object of " + ", ".join(_KINDS)
            )
        _refuse_odd(file, kind, part)
    images, annotations, categories = (part or [] for part in parts)
    return images, annotations, _class_names(dict(categories))


def _lean(values: dict[str, Any]) -> Any:
    """Pairs for what there is a million of: the rest of an entry is dropped while the file is read."""
    if "file_name" in values:
        return values.get("id"), values["file_name"]
    if "image_id" in values:
        return values["image_id"], values.get("category_id")
    if "name" in values and "id" in values:
        return values["id"], values["name"]
    return values


def _refuse_odd(file: Path, kind: str, entries: Iterable[Any]) -> None:
    second = int if kind == "annotations" else str
    for place, entry in enumerate(entries):
        right = isinstance(entry, tuple) and isinstance(entry[0], int) and isinstance(entry[1], second)
        if not right or entry[1] == "":
            keys = {"images": "id and file_name", "annotations": "image_id and category_id"}
            raise InputError(f"{kind}[{place}] has no {keys.get(kind, 'id and name')}.", where=file)


def _class_names(categories: dict[Any, str]) -> dict[Any, str]:
    """The name of each category; where two share one, all have their number with it."""
    if len(set(categories.values())) == len(categories):
        return categories
    return {number: f"{number} {name}" for number, name in categories.items()}
