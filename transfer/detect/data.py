"""Pascal VOC's layout on disk: annotations, image sets, images."""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.decode import decode_image
from zoo.errors import InputError, did_you_mean
from zoo.files import sha256_of

__all__ = ["VOC_CLASSES", "VocBoxes", "VocImages", "find_voc", "open_voc"]

VOC_CLASSES = [
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
]


@dataclass(frozen=True)
class VocBoxes:
    """The objects of one image: boxes float64 (N, 4) as xmin, ymin, xmax, ymax in VOC's 1-based pixels."""

    boxes: np.ndarray
    labels: np.ndarray
    difficult: np.ndarray


class VocImages:
    """One image set of a VOC folder.

    Args:
        root: the folder that holds ``Annotations``, ``ImageSets`` and ``JPEGImages``.
        split: a file in ``ImageSets/Main``.
        classes: the class names; by default the twenty of VOC, or for other sets what is found.
        limit: only the first so many images (0: all).
    """

    def __init__(self, root: Path, split: str, classes: Sequence[str] | None = None, limit: int = 0) -> None:
        self.root = root
        self.split = split
        self.ids = _read_split(root, split)
        if limit and classes is not None:
            self.ids = self.ids[:limit]
        self._raw = [_read_annotation(root / "Annotations" / f"{name}.xml") for name in self.ids]
        # The classes are those of the whole set, however few of its images are used.
        found = sorted({label for objects in self._raw for label, _, _ in objects})
        if limit:
            self.ids, self._raw = self.ids[:limit], self._raw[:limit]
        known = list(VOC_CLASSES) if set(found) <= set(VOC_CLASSES) else found
        self.classes = tuple(classes if classes is not None else known)
        for name, objects in zip(self.ids, self._raw, strict=True):
            for label, _, _ in objects:
                if label not in self.classes:
                    raise InputError(
                        f"An object has a class that training doesn't know: {label}.",
                        where=root / "Annotations" / f"{name}.xml",
                        fix=did_you_mean(label, self.classes) + f"known: {', '.join(self.classes)}",
                    )

    def __len__(self) -> int:
        return len(self.ids)

    def image(self, index: int) -> np.ndarray:
        """uint8 H x W x 3."""
        return decode_image(self.image_path(index))

    def image_path(self, index: int) -> Path:
        return self.root / "JPEGImages" / f"{self.ids[index]}.jpg"

    def boxes(self, index: int) -> VocBoxes:
        objects = self._raw[index]
        return VocBoxes(
            np.array([box for _, box, _ in objects], dtype=np.float64).reshape(-1, 4),
            np.array([self.classes.index(label) for label, _, _ in objects], dtype=np.int64),
            np.array([hard for _, _, hard in objects], dtype=bool),
        )

    def fingerprint(self) -> dict[str, Any]:
        """Names, annotations and image sizes of the images that are used."""
        digest = hashlib.sha256()
        for index, name in enumerate(self.ids):
            annotation = sha256_of(self.root / "Annotations" / f"{name}.xml")
            digest.update(f"{name} {annotation} {self.image_path(index).stat().st_size}\n".encode())
        return {"kind": "voc", "split": self.split, "count": len(self), "sha256": digest.hexdigest()}


def find_voc(folder: Path) -> Path:
    """The year folder below what the user named: itself, ``VOC2007`` or ``VOCdevkit/VOC2007``.

    Raises:
        InputError: none of these is a VOC folder; all that was tried is listed.
    """
    tried = [folder, folder / "VOC2007", folder / "VOCdevkit" / "VOC2007"]
    for candidate in tried:
        if (candidate / "Annotations").is_dir() and (candidate / "ImageSets" / "Main").is_dir():
            return candidate
    raise InputError(
        "No VOC folder (Annotations, ImageSets/Main, JPEGImages) is there.",
        where=", ".join(str(path) for path in tried),
        fix="pass the folder that holds VOC2007",
    )


def open_voc(
    folder: Path, train_split: str, test_split: str, limit: int = 0, allow_overlap: bool = False
) -> tuple[VocImages, VocImages]:
    """The training and the test set of a VOC folder.

    Raises:
        InputError: no VOC folder, missing lists (both are named at once), or an image in both.
    """
    root = find_voc(folder)
    lists = [root / "ImageSets" / "Main" / f"{split}.txt" for split in (train_split, test_split)]
    missing = [str(path) for path in lists if not path.is_file()]
    if missing:
        raise InputError(
            "An image list is missing: " + ", ".join(missing) + ".",
            where=root,
            fix="extract VOC's trainval and test archives into the same VOCdevkit",
        )
    train = VocImages(root, train_split, limit=limit)
    test = VocImages(root, test_split, train.classes, limit)
    shared = sorted(set(train.ids) & set(test.ids))
    if shared and not allow_overlap:
        raise InputError(
            f"{len(shared)} images are in the training and in the test set ({shared[0]} first).",
            where=f"{lists[0]} and {lists[1]}",
            fix="use another split, or accept it with --allow-overlap",
        )
    return train, test


def _read_split(root: Path, split: str) -> list[str]:
    file = root / "ImageSets" / "Main" / f"{split}.txt"
    lines = [line.split() for line in file.read_text("utf-8").splitlines() if line.strip()]
    if lines and all(len(line) == 2 for line in lines):
        raise InputError(
            "This list has two columns: it is a classification list, not an image set.",
            where=file,
            fix="pass a split such as trainval or test",
        )
    names = [line[0] for line in lines]
    absent = [name for name in names if not (root / "JPEGImages" / f"{name}.jpg").is_file()]
    if absent or not names:
        what = (
            f"{len(absent)} of {len(names)} listed images are missing ({absent[0]}.jpg first)"
            if absent
            else "The list is empty"
        )
        raise InputError(f"{what}.", where=file)
    return names


def _read_annotation(file: Path) -> list[tuple[str, tuple[float, float, float, float], bool]]:
    try:
        tree = ElementTree.parse(file)
    except (OSError, ElementTree.ParseError) as error:
        raise InputError(f"The annotation can't be read ({error}).", where=file) from None
    objects = []
    for item in tree.getroot().findall("object"):
        box = item.find("bndbox")
        name = item.findtext("name", "").strip()
        values = None if box is None else [box.findtext(k) for k in ("xmin", "ymin", "xmax", "ymax")]
        if values is None or None in values or not name:
            raise InputError("An object in the annotation has no name or no box.", where=file)
        try:
            xmin, ymin, xmax, ymax = (float(v) for v in values if v is not None)
        except ValueError as error:
            raise InputError(f"A box in the annotation is not four numbers ({error}).", where=file) from None
        if not (xmin <= xmax and ymin <= ymax):
            raise InputError(
                f"A box in the annotation is upside down: xmin {xmin:g}, ymin {ymin:g}, xmax {xmax:g}, "
                f"ymax {ymax:g}.",
                where=file,
            )
        objects.append((name, (xmin, ymin, xmax, ymax), item.findtext("difficult", "0").strip() == "1"))
    return objects
