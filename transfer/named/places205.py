"""Places205: lists of paths and class numbers."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from zoo.data.folder import FileImages, PackedPaths
from zoo.errors import InputError

from .labels import Listed, find_lists, is_number

__all__ = ["PLACES205_TREE", "open_places205"]

PLACES205_TREE = (
    "trainvalsplit_places205/{train,val}_places205.csv (lines: path number) and the images they name, here, "
    "in images256 or in data/vision/torralba/deeplearning/images256"
)
_CLASSES = 205
_LOOKED_AT = 100


def open_places205(
    root: Path, class_names: tuple[str, ...] | None, train_only: bool
) -> tuple[FileImages, FileImages | None]:
    """Open Places205; classes are called by their numbers, if no class index names them.

    Raises:
        InputError: missing lists or images, or a line that isn't a path and a number from 0 to 204.
    """
    names = [f"{part}_places205.csv" for part in ("train", "val")[: 1 if train_only else 2]]
    folders = [root / "trainvalsplit_places205", root]
    files = find_lists("Places205", folders, names, PLACES205_TREE)
    listed = [_read(file) for file in files]  # what is wrong with either is said before a disk is asked
    homes = [root, root / "images256", root / "data" / "vision" / "torralba" / "deeplearning" / "images256"]
    home = max(homes, key=lambda folder: _there(folder, listed[0].paths))
    fix = f"images were looked for in {', '.join(map(str, homes))}; expected: {PLACES205_TREE}"
    train = listed[0].images(files[0], home, class_names, fix)
    return train, None if train_only else listed[1].images(files[1], home, train.classes, fix)


def _read(file: Path) -> Listed:
    listed = Listed()
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                words = line.rsplit(maxsplit=1)
                if not words:
                    continue
                if len(words) != 2 or not is_number(words[1]) or int(words[1]) >= _CLASSES:
                    raise InputError(
                        f"Line {number} is not a path and a number from 0 to {_CLASSES - 1}: {line.strip()[:60]!r}.",
                        where=file,
                    )
                listed.append(words[0].lstrip("/"), str(int(words[1])))
    except (OSError, ValueError) as error:
        raise InputError(f"The list can't be read ({error}).", where=file) from None
    if not listed.paths:
        raise InputError("The list is empty.", where=file)
    return listed


def _there(folder: Path, paths: PackedPaths) -> int:
    """How many of the first paths lead somewhere from this folder."""
    start = os.fsencode(folder)
    return sum(os.path.isfile(os.path.join(start, path)) for path in islice(paths, _LOOKED_AT))
