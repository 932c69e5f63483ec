"""COCO's layout on disk: one JSON file of annotations for a folder of images. No torch here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.errors import InputError, did_you_mean
from zoo.files import read_json

from .annotations import BoxSet, Objects, Picture, Problem, four_numbers, some_of
from .coco_masks import check_masks, size_of

__all__ = ["coco_parts", "find_coco", "packed_files", "read_coco"]

_COUNTS = {"train2017": 118287, "val2017": 5000}
_SAMPLES = 5
_LARGEST = 2**53  # ids go through float64 when detections are judged


def find_coco(folder: Path, splits: Sequence[str] = ("train2017", "val2017")) -> Path:
    """The folder that holds ``annotations/instances_*.json``: what the user named, or ``coco`` in it.

    Raises:
        InputError: neither; what was tried is listed.
    """
    tried = [folder, folder / "coco"]
    for candidate in tried:
        if (candidate / "annotations").is_dir():
            return candidate
    packed = packed_files(folder)
    raise InputError(
        "No COCO folder (annotations/instances_*.json beside the folders of images) is there.",
        where=", ".join(str(path / "annotations" / f"instances_{splits[0]}.json") for path in tried),
        fix=f"unpack {', '.join(packed)} there"
        if packed
        else f"pass the folder that holds annotations, {splits[0]} and {splits[-1]}",
    )


def packed_files(folder: Path) -> list[str]:
    """Archives in a folder that nobody has unpacked, perhaps."""
    return sorted(str(path) for path in folder.glob("*.zip")) if folder.is_dir() else []


def coco_parts(folder: Path, split: str) -> tuple[Path, Path] | None:
    """The annotations and the images of a split, wherever people keep them; None if there are none."""
    for root in (folder, folder / "coco"):
        below = [root / split, root / "images" / split, root / "images"]
        for file, homes in (
            (root / "annotations" / f"instances_{split}.json", below),
            (root / "annotations" / f"{split}.json", below),
            (root / split / "_annotations.coco.json", [root / split]),
            (root / f"{split}.json", [*below, root]),
        ):
            if file.is_file():
                return file, next((home for home in homes if home.is_dir()), homes[0])
    return None


def read_coco(file: Path, images: Path, split: str, like: BoxSet | None, problems: list[Problem]) -> BoxSet:
    """Read a split.

    Args:
        file: its annotations.
        images: the folder of its images.
        split: for people.
        like: the training set, whose classes this one must have.
        problems: what is wrong is added to it, all of it at once.

    Raises:
        InputError: the file is no COCO annotation file at all.
    """
    try:
        content = read_json(file)
        pictures, categories = content["images"], content["categories"]
        annotations = content.get("annotations", [])
        if not isinstance(annotations, list) or not all(isinstance(one, dict) for one in annotations):
            raise TypeError("annotations is no list of objects")
        name_of = _named(categories, file, problems)
        pictures = _numbered(pictures, file, problems)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"This is no COCO file of instances ({type(error).__name__}: {error}).",
            where=file,
            fix="it needs images, annotations and categories; captions and keypoints are other files",
        ) from None
    notes: list[str] = []
    numbers = sorted(name_of)
    label_of = _labels(name_of, numbers, like, file, notes, problems)
    classes = like.classes if like is not None else tuple(name_of[number] for number in numbers)
    of_image: dict[Any, list[dict[str, Any]]] = {picture["id"]: [] for picture in pictures}
    _sort_in(annotations, of_image, label_of, file, problems)
    check_masks(pictures, of_image, file, notes, problems)
    present = {path.name for path in images.iterdir()} if images.is_dir() else set()
    files = [str(picture["file_name"]) for picture in pictures]
    missing = [name for name in files if name not in present and not os.path.isfile(images / name)]
    if missing:
        problems.append(_missing(missing, len(pictures), present, images))
    gone = set(missing)
    found = [
        Picture(
            name,
            images / name,
            size_of(picture),
            _objects(of_image[picture["id"]], label_of, file, problems),
            picture["id"],
            file,
        )
        for picture, name in zip(pictures, files, strict=True)
        if name not in gone
    ]
    own = like.numbers if like is not None else tuple(numbers)
    return BoxSet("coco", split, classes, found, own, notes, "coco", _COUNTS.get(split))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _named(categories: Sequence[dict[str, Any]], file: Path, problems: list[Problem]) -> dict[int, str]:
    """The name of each category that has a number and a name of its own."""
    odd = [
        one
        for one in categories
        if not _is_id(one["id"]) or not isinstance(one["name"], str) or not one["name"]
    ]
    good = [one for one in categories if one not in odd]
    if odd:
        shown = some_of([f"id {one['id']!r}, name {one['name']!r}" for one in odd], _SAMPLES)
        what = f"{len(odd)} categories have an id that is no whole number from 0 on, or no name ({shown})."
        problems.append(Problem(what, str(file), "write ids as numbers without quotes, and names as text"))
    for key in ("id", "name"):
        for value, count in Counter(one[key] for one in good).items():
            if count > 1:
                problems.append(
                    Problem(f"Two categories have one {key}: {value}.", str(file), "give each its own")
                )
    return {one["id"]: one["name"] for one in good}


def _numbered(
    pictures: Sequence[dict[str, Any]], file: Path, problems: list[Problem]
) -> list[dict[str, Any]]:
    """The images that have a file name and a number of their own."""
    good: dict[int, dict[str, Any]] = {}
    nameless, twice = [], []
    for place, picture in enumerate(pictures):
        number, name = picture.get("id"), picture.get("file_name")
        if not isinstance(number, int) or not _is_id(number) or not isinstance(name, str):
            nameless.append(f"entry {place}: id {number!r}")
        elif number in good:
            twice.append(f"id {number}: {name}")
        else:
            good[number] = picture
    for found, what in (
        (nameless, "images have no file_name, or an id that is no whole number from 0 to 2**53"),
        (twice, "images have the id of another"),
    ):
        if found:
            fix = "number the images 0, 1, 2, ... and say these numbers in the annotations' image_id"
            problems.append(Problem(f"{len(found)} {what} ({some_of(found, _SAMPLES)}).", str(file), fix))
    return list(good.values())


def _labels(
    name_of: dict[int, str],
    numbers: Sequence[int],
    like: BoxSet | None,
    file: Path,
    notes: list[str],
    problems: list[Problem],
) -> dict[int, int]:
    """Category id -> label; ids may have gaps, begin at 0, or differ from the training set's."""
    if like is None:
        if numbers and (numbers[0] != 1 or numbers[-1] != len(numbers)):
            notes.append(
                f"category ids {numbers[0]} to {numbers[-1]} became labels 0 to {len(numbers) - 1}; "
                "predictions are exported under the ids"
            )
        return {number: label for label, number in enumerate(numbers)}
    found = {}
    for number, name in name_of.items():
        if name in like.classes:
            found[number] = like.classes.index(name)
            if like.numbers and like.numbers[found[number]] != number:
                notes.append(
                    f"category {name} is {number} here and {like.numbers[found[number]]} in training: matched by name"
                )
        else:
            fix = did_you_mean(name, like.classes) + f"known: {', '.join(like.classes)}"
            problems.append(Problem(f"A category is not among those of training: {name}.", str(file), fix))
    return found


def _sort_in(
    annotations: Sequence[dict[str, Any]],
    of_image: dict[Any, list[dict[str, Any]]],
    label_of: dict[int, int],
    file: Path,
    problems: list[Problem],
) -> None:
    strangers, unknown = [], []
    for one in annotations:
        if not _listed(one.get("image_id"), of_image):
            strangers.append(repr(one.get("image_id")))
        elif not _listed(one.get("category_id"), label_of):
            unknown.append(f"image {one['image_id']}: category {one.get('category_id')!r}")
        else:
            of_image[one["image_id"]].append(one)
    if strangers:
        some = ", ".join(dict.fromkeys(strangers[:_SAMPLES]))
        problems.append(
            Problem(
                f"{len(strangers)} of {len(annotations)} annotations are of images that the file doesn't list "
                f"(image_id {some}{' ...' if len(strangers) > _SAMPLES else ''}).",
                str(file),
                "the ids of images and annotations must be of one file, and numbers",
            )
        )
    if unknown:
        some = ", ".join(unknown[:_SAMPLES])
        problems.append(
            Problem(
                f"{len(unknown)} annotations have a category that the file doesn't list ({some}).",
                str(file),
                f"known ids: {', '.join(map(str, label_of))}",
            )
        )


def _listed(value: object, known: Collection[int]) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value in known


def _missing(missing: Sequence[str], wanted: int, present: Collection[str], images: Path) -> Problem:
    packed = images.with_suffix(".zip")
    other = missing[0].startswith("COCO_") and "2014" in missing[0]
    fix = "unpack all of the images there"
    if packed.is_file():
        fix = f"unpack {packed.name} there"
    elif other:
        fix = "these are annotations of 2014, the images are others: take instances_*2017.json"
    elif Path(missing[0]).name in present:
        fix = f"file_name is relative to {images}: leave its folders out"
    return Problem(
        f"{len(missing)} of {wanted} images are missing ({len(present)} files are there): {some_of(missing)}.",
        str(images),
        fix,
        files=tuple(missing),
    )


def _objects(
    annotations: Sequence[dict[str, Any]], label_of: dict[int, int], file: Path, problems: list[Problem]
) -> Objects:
    good = []
    for one in annotations:
        wrong = _wrong_in(one)
        try:
            good.append((one, four_numbers(one.get("bbox"))))
        except ValueError:
            wrong = "A box is not four numbers", "bbox is x, y, width and height in pixels"
        if wrong:
            problems.append(Problem(f"{wrong[0]} (annotation {one.get('id')}).", str(file), wrong[1]))
    boxes = np.array([box for _, box in good], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    masks = [one.get("segmentation") or None for one, _ in good]
    areas = [one.get("area") for one, _ in good]
    of_boxes = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    return Objects(
        boxes,
        np.array([label_of[one["category_id"]] for one, _ in good], dtype=np.int64),
        np.zeros(len(good), dtype=bool),
        np.array([bool(one.get("iscrowd")) for one, _ in good], dtype=bool),
        np.array(
            [area if _is_area(area) else of_box for area, of_box in zip(areas, of_boxes, strict=True)],
            dtype=np.float64,
        ),
        masks if any(mask is not None for mask in masks) else None,
    )


def _wrong_in(one: dict[str, Any]) -> tuple[str, str] | None:
    """What is wrong with the smaller parts of an annotation, and what helps."""
    if one.get("iscrowd") not in (None, 0, 1):  # of a text like "0" nobody can tell what it says
        return "iscrowd is neither 0 nor 1", "write iscrowd as 0 or 1, without quotes"
    if one.get("area") is not None and not _is_area(one["area"]):
        return "An area is no number", "area is in pixels; without one, that of the box is taken"
    return None


def _is_area(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
