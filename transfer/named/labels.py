"""What the lists of all layouts share: where they lie, and which number a class gets."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zoo.data.class_index import relabel
from zoo.data.folder import PackedPaths
from zoo.errors import InputError

from ..tables import ListedImages, packed_path, refuse_absent

__all__ = ["Listed", "find_lists", "is_number"]


def is_number(text: str) -> bool:
    """Is this a number that counts classes or images?"""
    return text.isdecimal() and len(text) < 10


class Listed:
    """Paths and class names as a list gives them, packed while it is read."""

    def __init__(self) -> None:
        self.paths = PackedPaths()
        self._labels = array("i")
        self._names: dict[str, int] = {}

    def append(self, path: str, label: str) -> None:
        self.paths.append(packed_path(path))
        self._labels.append(self._names.setdefault(label, len(self._names)))

    def images(self, file: Path, root: Path, wanted: tuple[str, ...] | None, fix: str = "") -> ListedImages:
        """The images, all of them there, with class numbers.

        Args:
            file: the list.
            root: where relative paths start.
            wanted: the class names in the order of their numbers; by default those of the list, in the order
                of their names (of numbers, if all are). Labels that are numbers count into names that aren't.
            fix: what to say of images that aren't there.

        Raises:
            InputError: images that aren't there, or classes that ``wanted`` doesn't know.
        """
        refuse_absent(self.paths, root, file, fix)
        found = list(self._names)
        numeric = all(map(is_number, found))
        if wanted is None:
            wanted = tuple(sorted(found, key=int) if numeric else sorted(found))
        if numeric and not any(map(is_number, wanted)):
            number = [int(name) for name in found]
            if max(number) >= len(wanted):
                raise InputError(
                    f"The labels go up to {max(number)}, and there are {len(wanted)} classes.",
                    where=file,
                    fix="pass the class index that the labels were made with",
                )
        else:
            number = relabel(found, wanted, file)
        labels = np.array(number, dtype=np.int32)[np.asarray(self._labels)]
        return ListedImages(str(file), root, self.paths, labels, wanted)


def find_lists(title: str, folders: Sequence[Path], names: Sequence[str], tree: str) -> list[Path]:
    """Where each of these lists lies: in the first folder that has it.

    Raises:
        InputError: some are nowhere; all the paths that were tried are named, and the expected tree.
    """
    tried = {name: [folder / name for folder in folders] for name in names}
    found = {name: next((path for path in paths if path.is_file()), None) for name, paths in tried.items()}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise InputError(
            f"{title} lacks {' and '.join(missing)}.",
            where=", ".join(str(path) for name in missing for path in tried[name]),
            fix=f"expected: {tree}",
        )
    return [path for path in found.values() if path is not None]
