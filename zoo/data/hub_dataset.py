"""Data sets of the Hugging Face hub (or folders that ``datasets`` can load). It is imported when needed."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from ..addresses import forbidden, shown_urls
from ..errors import InputError
from .decode import Picture, open_image
from .decoding import PLAIN, Decoding
from .identify import SKIP
from .parquet import use_labels
from .source import UNLABELLED

__all__ = ["HubImages", "open_hub_dataset"]

_OLDEST = 4  # the first version that runs no code of the data set
_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "test")}


class HubImages:
    """One split of a data set; the library keeps it in its own cache and maps it.

    Args:
        name: what the user called it.
        rows: a ``datasets.Dataset`` whose images are not decoded.
        column: of the images.
        labels: int64 of each row, or None.
        classes: names of the labels.
        split: which part it is.
    """

    decoding: Decoding = PLAIN
    """How the images become pixels."""

    def __init__(
        self,
        name: str,
        rows: Any,
        column: str,
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        split: str,
    ) -> None:
        self.name = name
        self.classes = classes
        self._rows = rows
        self._column = column
        self._labels = labels
        self._split = split

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, index: int) -> Picture:
        """The picture with its size read, not yet decoded."""
        value = self._rows[index][self._column]
        if value.get("bytes") is not None:
            return open_image(value["bytes"], name=self.where(index), how=self.decoding)
        if not value.get("path"):
            raise InputError("The row holds no picture.", where=self.where(index), fix=SKIP)
        return open_image(value["path"], how=self.decoding)

    def read(self, index: int) -> np.ndarray:
        return self.open(index).pixels()

    def label(self, index: int) -> int:
        return UNLABELLED if self._labels is None else int(self._labels[index])

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def fingerprint(self) -> dict[str, Any]:
        """The library's own fingerprint depends on its version: this is of the rows' number and labels."""
        size = getattr(self._rows, "dataset_size", None)
        return {
            "kind": "hf-dataset",
            "name": self.name,
            "split": self._split,
            "count": len(self),
            "bytes": size,
        }


def open_hub_dataset(
    spec: str, split: str = "train", how: Decoding = PLAIN, class_names: tuple[str, ...] | None = None
) -> HubImages:
    """Open ``hf-dataset:NAME[:SPLIT]``; it is downloaded if the library hasn't got it.

    Args:
        spec: the name on the hub, or a folder that the library can load.
        split: ``train`` or ``val``, where the spec names none.
        how: how images are decoded.
        class_names: all classes in the order of their numbers, if not the set's own.

    Raises:
        InputError: no library, no such set or split, no images in it, or no network allowed.
    """
    name, _, part = spec.removeprefix("hf-dataset:").partition(":")
    library = _library(spec)
    candidates = (part,) if part else _SPLITS[split]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            there = library.get_dataset_split_names(name)
            found = next((candidate for candidate in candidates if candidate in there), None)
            rows = None if found is None else library.load_dataset(name, split=found)
    except Exception as error:  # of many kinds: the hub's, the network's, the file formats'
        reason = " ".join(shown_urls(str(error)).split())[:200]
        variable = forbidden()
        raise InputError(
            f"The data set can't be loaded ({type(error).__name__}: {reason}).",
            where=spec,
            fix=f"unset {variable}, or use a set that is in the cache"
            if variable
            else "check its name and the network",
        ) from None
    if rows is None:
        raise InputError(
            f"The data set has no part {' or '.join(candidates)}.",
            where=spec,
            fix=f"name one of its parts: hf-dataset:{name}:{there[0] if there else 'PART'} ({', '.join(there)})",
        )
    column = _image_column(rows.features, spec, library)
    label = next((key for key, kind in rows.features.items() if isinstance(kind, library.ClassLabel)), None)
    labels, classes = None, None
    if label is not None:
        values = rows.with_format("numpy", columns=[label])[:][label]
        labels, classes = np.asarray(values, np.int64), tuple(map(str, rows.features[label].names))
    labels, names = use_labels(labels, classes, class_names, spec)
    kept = rows.select_columns([column]).cast_column(column, library.Image(decode=False))
    images = HubImages(spec, kept, column, labels, names, str(found))
    images.decoding = how
    return images


def _library(spec: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise InputError(
            "Data sets of the Hugging Face hub are read with its library, which is not installed.",
            where=spec,
            fix=f"pip install 'datasets>={_OLDEST}'",
        ) from None
    if int(datasets.__version__.partition(".")[0]) < _OLDEST:
        # Older ones can run a program that comes with the data.
        raise InputError(
            f"datasets {datasets.__version__} is too old.",
            where=spec,
            fix=f"pip install 'datasets>={_OLDEST}'",
        )
    return datasets


def _image_column(features: Any, spec: str, library: Any) -> str:
    found = [str(key) for key, kind in features.items() if isinstance(kind, library.Image)]
    if len(found) == 1 or "image" in found:
        return "image" if "image" in found else found[0]
    raise InputError(
        f"The data set has {len(found) or 'no'} columns of images{': ' + ', '.join(found) if found else ''}.",
        where=spec,
        fix="one is needed; of several the one called image is taken",
    )
