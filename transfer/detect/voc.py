"""Boxes of a folder in Pascal VOC's layout (``transfer.voc``). No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zoo.errors import InputError, did_you_mean

from ..voc import VOC_CLASSES, VOC_COUNTS, Annotation, find_year, image_set, picture_names, read_annotation
from .annotations import BoxSet, Objects, Picture, Problem, some_of

__all__ = ["find_voc", "is_voc", "read_voc"]


def find_voc(folder: Path, year: str = "2007") -> Path:
    """The year's folder below what the user named, with annotations (see ``find_year``)."""
    return find_year(folder, ("Annotations", "ImageSets/Main"), year)


def is_voc(folder: Path) -> bool:
    """Whether a folder has VOC's layout, on any level that people name."""
    below = [home / f"VOC{year}" for home in (folder, folder / "VOCdevkit") for year in ("2007", "2012")]
    return any((path / "Annotations").is_dir() for path in (folder, *below))


def read_voc(
    root: Path, splits: Sequence[str], classes: Sequence[str] | None, problems: list[Problem], year: str = ""
) -> BoxSet:
    """One or more splits of a year's folder as one set.

    Args:
        root: the folder that holds ``Annotations``, ``ImageSets`` and ``JPEGImages``.
        splits: files in ``ImageSets/Main``.
        classes: the class names; by default the twenty of VOC, or for other sets what is found.
        problems: what is wrong is added to it, all of it at once.
        year: of the published set, whose number of images is known.
    """
    names, expected = [], 0
    taken = year or root.name.removeprefix("VOC")
    choice = "" if year else _others(root)
    for split in splits:
        names += _read_split(root, split, _advice(taken, [split]), choice, problems)
        expected += VOC_COUNTS.get((year, split), 0)
    annotated = {path.name for path in (root / "Annotations").glob("*.xml")}
    found: list[tuple[str, str, Annotation]] = []
    missing: list[str] = []
    lacks: Counter[str] = Counter()
    for name, file in zip(names, picture_names(root, names), strict=True):
        if file is None:
            missing.append(f"JPEGImages/{name}.jpg")
        if f"{name}.xml" not in annotated:
            missing.append(f"Annotations/{name}.xml")
            continue
        try:
            annotation = read_annotation(root / "Annotations" / f"{name}.xml")
        except InputError as error:
            problems.append(Problem(error.what, str(error.where), error.fix))
            continue
        lacks.update(annotation.lacks)
        if file is not None:
            found.append((name, file, annotation))
    if missing:
        problems.append(
            Problem(
                f"{len(missing)} files that the list names are missing: {some_of(missing)}.",
                str(root),
                _advice(taken, splits),
                files=tuple(missing),
            )
        )
    labels = sorted({thing.name for _, _, annotation in found for thing in annotation.objects})
    known = list(VOC_CLASSES) if year or (labels and set(labels) <= set(VOC_CLASSES)) else labels
    chosen = tuple(classes if classes is not None else known)
    pictures = [
        _picture(root, number, name, file, annotation, chosen, problems)
        for number, (name, file, annotation) in enumerate(found)
    ]
    notes = []
    if lacks:
        parts = " and ".join(f"<{part}> in {count}" for part, count in sorted(lacks.items()))
        notes.append(f"of {len(found)} annotations some lack elements ({parts}): their defaults are taken")
    ap = "11-point" if taken == "2007" and chosen == VOC_CLASSES else "area"
    return BoxSet("voc", "+".join(splits), chosen, pictures, notes=notes, ap=ap, expected=expected or None)


def _picture(
    root: Path,
    number: int,
    name: str,
    file: str,
    annotation: Annotation,
    classes: tuple[str, ...],
    problems: list[Problem],
) -> Picture:
    where = root / "Annotations" / f"{name}.xml"
    things = []
    for thing in annotation.objects:
        if thing.name in classes:
            things.append(thing)
        elif classes:  # without any, what is wrong is the training set
            problems.append(
                Problem(
                    f"An object has a class that is not among the known ones: {thing.name}.",
                    str(where),
                    did_you_mean(thing.name, classes) + f"known: {', '.join(classes)}",
                )
            )
    boxes = np.array([thing.box for thing in things], dtype=np.float64).reshape(-1, 4)
    objects = Objects(
        boxes,
        np.array([classes.index(thing.name) for thing in things], dtype=np.int64),
        np.array([thing.difficult for thing in things], dtype=bool),
        np.zeros(len(things), dtype=bool),
        np.prod(boxes[:, 2:] - boxes[:, :2], axis=1),
    )
    return Picture(name, root / "JPEGImages" / file, annotation.size, objects, number, where)


def _read_split(root: Path, split: str, advice: str, choice: str, problems: list[Problem]) -> list[str]:
    try:
        return image_set(root, split)
    except InputError as error:
        fix = "; ".join(filter(None, (error.fix or advice, choice)))
        problems.append(Problem(error.what, str(error.where), fix))
        return []


def _advice(year: str, splits: Sequence[str]) -> str:
    if "test" in splits and year == "2012":
        return "VOC2012 has no public test labels: use the test set of 2007"
    if "test" in splits and year == "2007":
        return "extract the 2007 test archive into the same VOCdevkit"
    if year in ("2007", "2012"):
        return "extract VOC's archives completely, all into the same VOCdevkit"
    return "put there what is missing"


def _others(root: Path) -> str:
    """Which image sets there are to choose from, without the classification lists beside them."""
    files = (root / "ImageSets" / "Main").glob("*.txt")
    names = sorted(file.stem for file in files if "_" not in file.stem)
    return f"or choose from {', '.join(names)} with --train-split and --test-split" if names else ""
