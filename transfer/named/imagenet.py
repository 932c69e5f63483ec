"""ImageNet (ILSVRC 2012): class folders, and test images in class folders or flat beside a list."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from zoo.data.decode import IMAGE_SUFFIXES
from zoo.data.folder import FileImages, open_folder
from zoo.errors import InputError

from .labels import Listed, is_number

__all__ = ["IMAGENET_TREE", "open_imagenet"]

IMAGENET_TREE = (
    "train/<wnid>/*.JPEG and val/<wnid>/*.JPEG; or val/*.JPEG with LOC_val_solution.csv, val.csv or val.txt "
    "(file, wnid), or with ILSVRC2012_devkit_t12/data/{ILSVRC2012_validation_ground_truth.txt and "
    "map_clsloc.txt (lines: wnid number) or synsets.txt (the wnid of class n in line n)}"
)
_LISTS = ("LOC_val_solution.csv", "val.csv", "val.txt")
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_INDICES = ("map_clsloc.txt", "synsets.txt")
_WNID = re.compile(r"n\d{8}")


def open_imagenet(
    root: Path, class_names: tuple[str, ...] | None, train_only: bool
) -> tuple[FileImages, FileImages | None]:
    """Open ImageNet; the classes are the training folders in the order of their names.

    Raises:
        InputError: missing folders or lists (what was tried is named), class folders that aren't called by
            WordNet ids, flat test images without a class, or listed ones that aren't there.
    """
    base = _base(root, ("train",) if train_only else ("train", "val"))
    flat = not train_only and not _has_folders(base / "val")
    truth = _truth(root, base) if flat else None  # before the long walk through the training images
    train = open_folder(base / "train", class_names=class_names)
    odd = [name for name in train.classes if not _WNID.fullmatch(name)]
    if odd or not train.classes:
        raise InputError(
            "ImageNet's training images lie in folders called n01440764 and the like; "
            + (f"found: {odd[0]}." if odd else "these lie in no folders."),
            where=base / "train",
            fix=f"of other classes, name the folder itself: --dataset {root}; expected: {IMAGENET_TREE}",
        )
    if train_only:
        return train, None
    if truth is None:
        return train, open_folder(base / "val", class_names=train.classes)
    return train, _flat(base / "val", *truth, train.classes)


def _base(root: Path, parts: Sequence[str]) -> Path:
    """The folder that holds train and val: what the user named, or where the archive of LOC has it."""
    tried = [root, root / "ILSVRC" / "Data" / "CLS-LOC", root / "Data" / "CLS-LOC"]
    for base in tried:
        if all((base / part).is_dir() for part in parts):
            return base
    packed = sorted(path.name for path in root.glob("ILSVRC2012_img_*.tar"))
    raise InputError(
        f"ImageNet's folders {' and '.join(parts)} aren't there.",
        where=", ".join(str(base / part) for base in tried for part in parts),
        fix=(f"unpack {', '.join(packed)}; " if packed else "") + f"expected: {IMAGENET_TREE}",
    )


def _has_folders(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in entries)


def _flat(folder: Path, file: Path, wnids: dict[str, str], classes: tuple[str, ...]) -> FileImages:
    """Test images without class folders: every picture is listed, and every listed one is there."""
    pictures = open_folder(folder)
    names = [os.path.basename(pictures.where(index)) for index in range(len(pictures))]
    unknown = [name for name in names if _stem(name) not in wnids]
    if unknown:
        raise InputError(
            f"{len(unknown)} of {len(names)} test images have no class in the list ({unknown[0]} first).",
            where=file,
        )
    there = {_stem(name) for name in names}
    absent = [name for name in wnids if name not in there]
    if absent:
        raise InputError(
            f"{len(absent)} of {len(wnids)} listed images don't exist ({absent[0]} first).",
            where=file,
            fix=f"they are looked for in {folder}; to judge by a part, list that part in val.csv (file, wnid)",
        )
    listed = Listed()
    for name in names:
        listed.append(name, wnids[_stem(name)])
    return listed.images(file, folder, classes)


def _stem(name: str) -> str:
    """An image's name: lists give it with its ending or without."""
    stem, ending = os.path.splitext(os.path.basename(name))
    return stem if ending.lower() in IMAGE_SUFFIXES else os.path.basename(name)


# --- lists of the test images ---


def _truth(root: Path, base: Path) -> tuple[Path, dict[str, str]]:
    """The list that was found, and the wnid of each test image."""
    top = [base.parents[2]] if base.parts[-3:] == ("ILSVRC", "Data", "CLS-LOC") else []
    devkits = [root / "ILSVRC2012_devkit_t12" / "data", root / "devkit" / "data", root / "data"]
    places = list(dict.fromkeys([root, base, *top, base / "val"]))
    lists = [place / name for place in places for name in _LISTS]
    found = next((path for path in lists if path.is_file()), None)
    if found is not None:
        return found, _pairs(found)
    truths = [place / _TRUTH for place in [*devkits, *places]]
    truth = next((path for path in truths if path.is_file()), None)
    if truth is None:
        raise InputError(
            "The test images lie in no class folders, and no list of their classes is there.",
            where=", ".join(map(str, [*lists, *truths])),
            fix=f"expected: {IMAGENET_TREE}",
        )
    indices = [place / name for place in dict.fromkeys([truth.parent, root, base]) for name in _INDICES]
    index = next((path for path in indices if path.is_file()), None)
    if index is None:
        raise InputError(
            f"Which class has which number in {_TRUTH} isn't said (meta.mat is not read).",
            where=", ".join(map(str, indices)),
            fix=f"put map_clsloc.txt (of a later devkit) beside it; expected: {IMAGENET_TREE}",
        )
    return truth, _numbered(truth, _read_index(index))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that aren't blank."""
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"The list can't be read ({error}).", where=file) from None
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError("The list is empty.", where=file)
    yield from lines


def _pairs(file: Path) -> dict[str, str]:
    """The wnid of each listed image; a heading is skipped, and so are boxes after the wnid."""
    found: dict[str, str] = {}
    for number, line in _lines(file):
        words = [word.strip('"') for word in re.split(r"[,\s]+", line)]
        if number == 1 and not any(character.isdigit() for character in line):
            continue
        if len(words) < 2 or not _WNID.fullmatch(words[1]):
            raise InputError(
                f"Line {number} is not an image and a wnid: {line[:60]!r}.",
                where=file,
                fix="e.g. ILSVRC2012_val_00000001.JPEG,n01751748",
            )
        image = _stem(words[0])
        if found.setdefault(image, words[1]) != words[1]:
            raise InputError(f"Line {number} gives {image} a second class.", where=file)
    return found


def _read_index(file: Path) -> dict[int, str]:
    """The wnid of each number of the devkit, from 1 on.

    The devkit's order is its own. Most lists of synsets are alphabetical, and would give every image a wrong
    class without any error.
    """
    rows = [line.split() for _, line in _lines(file)]
    numbers = all(len(row) > 1 and is_number(row[1]) for row in rows)
    found = {int(row[1]) if numbers else place: row[0] for place, row in enumerate(rows, 1)}
    odd = next((name for name in found.values() if not _WNID.fullmatch(name)), None)
    if (
        odd is not None
        or sorted(found) != list(range(1, len(rows) + 1))
        or len(set(found.values())) < len(rows)
    ):
        raise InputError(
            f"This is no index of wnids numbered from 1 to {len(rows)}, each once"
            + (f": {odd!r}." if odd is not None else "."),
            where=file,
            fix="lines: wnid number; or the wnid of class n in line n",
        )
    order = [found[number] for number in sorted(found)]
    if len(order) > 1 and order == sorted(order):
        raise InputError(
            "This index is in alphabetical order, which is not the order of the devkit's numbers.",
            where=file,
            fix="take map_clsloc.txt of a later devkit (its class 1 is n02119789), or LOC_val_solution.csv",
        )
    return found


def _numbered(file: Path, wnids: dict[int, str]) -> dict[str, str]:
    """The wnid of each image of the devkit's list: line n is of image n."""
    found = {}
    for number, line in _lines(file):
        wnid = wnids.get(int(line)) if is_number(line) else None
        if wnid is None:
            raise InputError(
                f"Line {number} is not a class from 1 to {len(wnids)}: {line[:60]!r}.", where=file
            )
        found[f"ILSVRC2012_val_{number:08d}"] = wnid
    return found
