"""Pascal VOC's layout on disk, whatever is made of it: the year's folder, image sets, pictures, annotations.

No torch here.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import InputError

__all__ = [
    "VOC_CLASSES",
    "VOC_COUNTS",
    "VOC_TREE",
    "Annotation",
    "Thing",
    "find_year",
    "image_set",
    "list_text",
    "picture_names",
    "read_annotation",
    "set_file",
    "year_folders",
]

VOC_TREE = "VOC2007/{JPEGImages/*.jpg, ImageSets/Main/{trainval,test,<class>_trainval,<class>_test}.txt, Annotations/*.xml}"

VOC_COUNTS = {
    ("2007", "train"): 2501,
    ("2007", "val"): 2510,
    ("2007", "trainval"): 5011,
    ("2007", "test"): 4952,
    ("2012", "trainval"): 11540,
}
"""(year, image set) -> images of the published one."""

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
_ENDINGS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
_OBJECT = "give each object a <name> and a <bndbox> of <xmin>, <ymin>, <xmax> and <ymax>, or take it out"


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
        InputError: it can't be read, is no annotation, or an object has no name or no box.
    """
    try:
        root = ElementTree.parse(file).getroot()
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:  # the latter: of its encoding
        raise InputError(
            f"The annotation can't be read ({error}).", where=file, fix="unpack it again, or repair it"
        ) from None
    for element in root.iter():
        element.tag = str(element.tag).rpartition("}")[2]  # without the namespace
    if root.tag != "annotation":
        raise InputError(
            f"This is no VOC annotation: it begins with <{root.tag}>, not <annotation>.",
            where=file,
            fix="convert it, or take it out of the list",
        )
    objects, lacks = [], set()
    for item in root.findall("object"):
        box = item.find("bndbox")
        name = item.findtext("name", "").strip()
        values = None if box is None else [box.findtext(key) for key in ("xmin", "ymin", "xmax", "ymax")]
        if values is None or None in values or not name:
            raise InputError("An object in the annotation has no name or no box.", where=file, fix=_OBJECT)
        try:
            xmin, ymin, xmax, ymax = (float(value) for value in values if value is not None)
            if not all(map(math.isfinite, (xmin, ymin, xmax, ymax))):
                raise ValueError(f"{xmin:g}, {ymin:g}, {xmax:g}, {ymax:g}")
        except ValueError as error:
            raise InputError(
                f"A box in the annotation is not four numbers ({error}).", where=file, fix=_OBJECT
            ) from None
        lacks |= {part for part in ("pose", "difficult") if item.find(part) is None}
        hard = item.findtext("difficult", "0").strip() == "1"
        objects.append(Thing(name, (xmin - 1.0, ymin - 1.0, xmax, ymax), hard))
    try:
        height, width = (int(float(root.findtext(f"size/{side}", "0"))) for side in ("height", "width"))
    except (ValueError, OverflowError):
        height = width = 0
    return Annotation(objects, (height, width) if height > 0 and width > 0 else None, frozenset(lacks))


def year_folders(folder: Path, year: str = "") -> list[Path]:
    """Where a year's folder can be, given what the user named; without a year it can also be that, whatever it is."""
    named = f"VOC{year or 2007}"
    below = [folder / named, folder / "VOCdevkit" / named]
    if not year or folder.name == named or not folder.name.startswith("VOC2"):
        return [folder, *below]
    return [*below, folder.parent / named]  # another year's folder: its neighbour


def find_year(folder: Path, parts: Sequence[str], year: str = "") -> Path:
    """The year's folder: itself, ``VOC2007`` or ``VOCdevkit/VOC2007`` below what the user named.

    Args:
        folder: what the user named.
        parts: folders that have to be in it.
        year: see ``year_folders``.

    Raises:
        InputError: none of these is a VOC folder; all that was tried is listed.
    """
    tried = year_folders(folder, year)
    for candidate in tried:
        if all((candidate / part).is_dir() for part in parts):
            return candidate
    year = year or "2007"
    raise InputError(
        f"No VOC folder ({', '.join(parts)}) is there.",
        where=", ".join(str(path) for path in tried),
        fix=f"pass the folder that holds VOC{year}; expected: {VOC_TREE.replace('2007', year)}",
    )


def set_file(root: Path, split: str) -> Path:
    """Where a year's folder lists the images of a set."""
    return root / "ImageSets" / "Main" / f"{split}.txt"


def list_text(file: Path) -> str:
    """What a list holds.

    Raises:
        InputError: it is missing or can't be read.
    """
    try:
        return file.read_text("utf-8-sig")
    except FileNotFoundError:
        raise InputError("An image list is missing.", where=file) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The list can't be read ({error}).", where=file) from None


def image_set(root: Path, split: str) -> list[str]:
    """The images of a set, by name.

    Raises:
        InputError: no such list, one that is empty or can't be read, or a classification list.
    """
    file = set_file(root, split)
    lines = [line.strip() for line in list_text(file).splitlines() if line.strip()]
    if not lines:
        raise InputError("The list is empty.", where=file)
    if all(len(line.split()) > 1 and line.split()[-1] in ("-1", "0", "1") for line in lines):
        raise InputError(
            "This list has two columns: it is a classification list, not an image set.",
            where=file,
            fix="pass a split such as trainval or test",
        )
    return lines


def picture_names(root: Path, names: Sequence[str]) -> list[str | None]:
    """Each image's file in ``JPEGImages``, whatever its ending; None where there is none."""
    folder = root / "JPEGImages"
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return [next((name + end for end in _ENDINGS if name + end in present), None) for name in names]
