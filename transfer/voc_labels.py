"""The image sets of a VOC folder, and which classes are in its images.

1: the class is there, 0: as difficult objects only, -1: it isn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zoo.errors import InputError, did_you_mean

from .voc import (
    VOC_CLASSES,
    VOC_TREE,
    find_year,
    image_set,
    list_text,
    picture_names,
    read_annotation,
    set_file,
)

__all__ = ["find_sets", "set_pictures", "voc_labels"]


def find_sets(folder: Path, splits: Sequence[str]) -> Path:
    """The year folder that holds these image sets; labels need no annotations where there are class files.

    Raises:
        InputError: no such folder (all that was tried is listed), or lists that are missing (all are named).
    """
    root = find_year(folder, ("ImageSets/Main", "JPEGImages"))
    missing = [str(path) for path in (set_file(root, split) for split in splits) if not path.is_file()]
    if missing:
        raise InputError(
            "An image list is missing: " + ", ".join(missing) + ".",
            where=root,
            fix=f"extract VOC's trainval and test archives into the same VOCdevkit; expected: {VOC_TREE}",
        )
    return root


def set_pictures(root: Path, split: str) -> tuple[list[str], list[str]]:
    """The images of a set, by name, and the file of each in ``JPEGImages``.

    Raises:
        InputError: see ``image_set``; or images that aren't there (counted).
    """
    names = image_set(root, split)
    found = picture_names(root, names)
    absent = [name for name, file in zip(names, found, strict=True) if file is None]
    if absent:
        raise InputError(
            f"{len(absent)} of {len(names)} listed images are missing ({absent[0]}.jpg first).",
            where=set_file(root, split),
            fix=f"expected: {VOC_TREE}",
        )
    return names, [file for file in found if file is not None]


def voc_labels(
    root: Path, split: str, ids: Sequence[str], classes: Sequence[str] | None = None
) -> tuple[tuple[str, ...], np.ndarray, str]:
    """Labels of an image set, by the class files ``ImageSets/Main/<class>_<split>.txt``.

    Where a class has no file, its labels are those of the objects in the annotations.

    Args:
        root: the year folder.
        split: the image set.
        ids: its images.
        classes: the class names; by default VOC's twenty, or for other sets what is found.

    Returns:
        The class names, int8 (N, C), and ``class files``, ``annotations``, or both joined by ``and``.

    Raises:
        InputError: names the file and what is wrong with it; an unknown class; or neither a class file nor
            the annotations are there.
    """
    files = {
        path.name.removesuffix(f"_{split}.txt"): path
        for path in sorted((root / "ImageSets" / "Main").glob(f"*_{split}.txt"))
    }
    known = classes or _known(files)
    found: dict[str, np.ndarray] = {}
    if known:
        _refuse_unknown(sorted(set(files) - set(known)), known, files)
        found = {name: _read_class(files[name], ids) for name in known if name in files}
    source = "class files"
    if not known or len(found) < len(known):
        source = f"{source} and annotations" if found else "annotations"
        known, derived = _from_annotations(root, split, ids, known)
        found = {**derived, **found}
    labels = np.stack([found[name] for name in known], axis=1) if known else np.empty((len(ids), 0), np.int8)
    return tuple(known), labels, source


def _known(names: Sequence[str] | dict[str, Path]) -> list[str]:
    """VOC's classes if one of them is there (other lists may lie beside their files), or what is there."""
    return list(VOC_CLASSES) if set(names) & set(VOC_CLASSES) else sorted(names)


def _refuse_unknown(names: Sequence[str], known: Sequence[str], files: dict[str, Path]) -> None:
    if names and tuple(known) != VOC_CLASSES:
        raise InputError(
            f"A class that training doesn't know: {names[0]}.",
            where=files[names[0]],
            fix=did_you_mean(names[0], known) + f"known: {', '.join(known)}",
        )


def _read_class(file: Path, ids: Sequence[str]) -> np.ndarray:
    """int8 (N,) of a class file: two columns, an image and 1, 0 or -1."""
    labels: dict[str, int] = {}
    for number, line in enumerate(list_text(file).splitlines(), 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or words[1] not in ("1", "0", "-1", "+1"):
            raise InputError(
                f"Line {number} is not an image and 1, 0 or -1: {line.strip()[:60]!r}.",
                where=file,
                fix="1: the class is there, 0: as difficult objects only, -1: it isn't",
            )
        labels[words[0]] = int(words[1])
    absent = [name for name in ids if name not in labels]
    if absent:
        raise InputError(
            f"{len(absent)} of {len(ids)} images of the set have no label here ({absent[0]} first).",
            where=file,
        )
    out = np.array([labels[name] for name in ids], dtype=np.int8)
    if (out == 0).any() and not (out == -1).any():
        raise InputError(
            "No image is without this class: the labels are 1 and 0 alone.",
            where=file,
            fix="an absent class is -1; 0 says that all of its objects are difficult",
        )
    return out


def _from_annotations(
    root: Path, split: str, ids: Sequence[str], classes: Sequence[str]
) -> tuple[list[str], dict[str, np.ndarray]]:
    """The class names, and int8 (N,) for each of them; they are found in the annotations if not given."""
    files = [root / "Annotations" / f"{name}.xml" for name in ids]
    absent = [file for file in files if not file.is_file()]
    if absent:
        raise InputError(
            f"A class has no file *_{split}.txt, and {len(absent)} of {len(files)} annotations are missing "
            f"({absent[0].name} first).",
            where=root,
            fix=f"expected: {VOC_TREE}",
        )
    objects = [read_annotation(file).objects for file in files]
    known = list(classes) or _known(sorted({thing.name for image in objects for thing in image}))
    labels = {name: np.full(len(ids), -1, dtype=np.int8) for name in known}
    for index, image in enumerate(objects):
        for thing in image:
            if thing.name not in labels:
                raise InputError(
                    f"An object has a class that is not known: {thing.name}.",
                    where=files[index],
                    fix=did_you_mean(thing.name, known) + f"known: {', '.join(known)}",
                )
            labels[thing.name][index] = max(labels[thing.name][index], 0 if thing.difficult else 1)
    return known, labels
