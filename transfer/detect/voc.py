"""Pascal VOC's layout on disk: annotations, image sets, images. No torch here."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zoo.errors import InputError, did_you_mean

from .annotations import BoxSet, Objects, Picture, Problem

__all__ = ["VOC_CLASSES", "Annotation", "Thing", "find_voc", "is_voc", "read_annotation", "read_voc"]

VOC_CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
# (year, split) -> images of the published set
_COUNTS = {("2007", "trainval"): 5011, ("2007", "test"): 4952, ("2012", "trainval"): 11540}
_ENDINGS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")


@dataclass(frozen=True)
class Thing:
    """An object: its class, its edges counted from 0, and whether it is difficult."""

    name: str
    box: tuple[float, float, float, float]
    difficult: bool


@dataclass(frozen=True)
class Annotation:
    """An annotation file: objects, (height, width) if it says so, and which elements were left out."""

    objects: list[Thing]
    size: tuple[int, int] | None
    lacks: frozenset[str]


def read_annotation(file: Path) -> Annotation:
    """Read one file; VOC counts pixels from 1 and includes the last one.

    Raises:
        InputError: it can't be read, or an object has no name or no box.
    """
    try:
        root = ElementTree.parse(file).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise InputError(f"The annotation can't be read ({error}).", where=file) from None
    objects, lacks = [], set()
    for item in root.findall("object"):
        box = item.find("bndbox")
        name = item.findtext("name", "").strip()
        values = None if box is None else [box.findtext(key) for key in ("xmin", "ymin", "xmax", "ymax")]
        if values is None or None in values or not name:
            raise InputError("An object in the annotation has no name or no box.", where=file)
        try:
            xmin, ymin, xmax, ymax = (float(value) for value in values if value is not None)
        except ValueError as error:
            raise InputError(f"A box in the annotation is not four numbers ({error}).", where=file) from None
        lacks |= {part for part in ("pose", "difficult") if item.find(part) is None}
        hard = item.findtext("difficult", "0").strip() == "1"
        objects.append(Thing(name, (xmin - 1.0, ymin - 1.0, xmax, ymax), hard))
    try:
        height, width = (int(float(root.findtext(f"size/{side}", "0"))) for side in ("height", "width"))
    except ValueError:
        height = width = 0
    return Annotation(objects, (height, width) if height > 0 and width > 0 else None, frozenset(lacks))


def find_voc(folder: Path, year: str = "2007") -> Path:
    """The year's folder below what the user named: itself, ``VOC2007`` or ``VOCdevkit/VOC2007``.

    Raises:
        InputError: none of these is a VOC folder; all that was tried is listed.
    """
    named = f"VOC{year}"
    tried = [folder / named, folder / "VOCdevkit" / named]
    if folder.name == named or not folder.name.startswith("VOC2"):
        tried.insert(0, folder)
    else:  # another year's folder: its neighbour
        tried.append(folder.parent / named)
    for candidate in tried:
        if (candidate / "Annotations").is_dir() and (candidate / "ImageSets" / "Main").is_dir():
            return candidate
    raise InputError(
        "No VOC folder (Annotations, ImageSets/Main, JPEGImages) is there.",
        where=", ".join(str(path) for path in tried),
        fix=f"pass the folder that holds {named}",
    )


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
    for split in splits:
        names += _read_split(root, split, year, problems)
        expected += _COUNTS.get((year, split), 0)
    present = {path.name for path in _listed(root / "JPEGImages")}
    annotated = {path.name for path in _listed(root / "Annotations")}
    found: list[tuple[str, str, Annotation]] = []
    missing: list[str] = []
    lacks: Counter[str] = Counter()
    for name in names:
        file = next((name + ending for ending in _ENDINGS if name + ending in present), None)
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
                f"{len(missing)} files that the list names are missing: {_some(missing)}.",
                str(root),
                _advice(year, splits),
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
    is_2007 = (year or root.name.removeprefix("VOC")) == "2007"
    ap = "11-point" if is_2007 and chosen == VOC_CLASSES else "area"
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
        else:
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


def _read_split(root: Path, split: str, year: str, problems: list[Problem]) -> list[str]:
    file = root / "ImageSets" / "Main" / f"{split}.txt"
    try:
        lines = [line.split() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except OSError:
        problems.append(Problem("An image list is missing.", str(file), _advice(year, [split])))
        return []
    except UnicodeDecodeError:
        problems.append(Problem("An image list is no text.", str(file), None))
        return []
    if lines and all(len(line) >= 2 for line in lines):
        fix = "pass a split such as trainval or test"
        problems.append(
            Problem(
                "This list has two columns: it is a classification list, not an image set.", str(file), fix
            )
        )
        return []
    if not lines:
        problems.append(Problem("The list is empty.", str(file), None))
    return [line[0] for line in lines]


def _advice(year: str, splits: Sequence[str]) -> str | None:
    if "test" in splits and year == "2012":
        return "VOC2012 has no public test labels: use the test set of 2007"
    if "test" in splits:
        return "extract the 2007 test archive into the same VOCdevkit"
    return "extract VOC's archives completely, all into the same VOCdevkit"


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _some(names: Sequence[str], count: int = 20) -> str:
    more = f" ... and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
