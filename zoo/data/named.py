"""Data sets that torchvision knows by name."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..homes import cache_home
from .source import UNLABELLED

__all__ = ["NAMED_SETS", "TorchvisionImages", "data_home", "open_named"]

# name -> (torchvision class, arguments of the training part, arguments of the validation part)
NAMED_SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "stl10": ("STL10", {"split": "train+unlabeled"}, {"split": "test"}),
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "food101": ("Food101", {"split": "train"}, {"split": "test"}),
    "flowers102": ("Flowers102", {"split": "train"}, {"split": "test"}),
    "oxford_pets": ("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}),
}


def data_home() -> Path:
    """Where data sets are downloaded to: ``$ZOO_DATA``, else a folder in the user's cache."""
    if os.environ.get("ZOO_DATA"):
        return Path(os.environ["ZOO_DATA"]).expanduser()
    return cache_home() / "datasets"


class TorchvisionImages:
    """A torchvision data set seen as an image source."""

    def __init__(self, name: str, dataset: Any, split: str = "train") -> None:
        self.name = name
        self.split = split
        self._dataset = dataset
        names = getattr(dataset, "classes", None)
        labels = self._labels()
        if not names and labels is not None:  # some sets have numbers only
            names = range(int(max(labels)) + 1)
        self.classes = tuple(str(name) for name in names or ())

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> np.ndarray:
        try:
            image, _ = self._dataset[index]
            return np.array(image.convert("RGB"), dtype=np.uint8)
        except OSError as error:
            raise InputError(f"The picture can't be read ({error}).", where=self.where(index)) from error

    def _labels(self) -> Any:
        found = (getattr(self._dataset, name, None) for name in ("targets", "labels", "_labels"))
        return next((values for values in found if values is not None), None)

    def label(self, index: int) -> int:
        labels = self._labels()
        return UNLABELLED if labels is None else int(labels[index])

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "torchvision", "name": self.name, "split": self.split, "count": len(self)}


def open_named(name: str, split: str, home: Path | None = None) -> TorchvisionImages:
    """Open a torchvision data set, downloading it if it isn't there and the machine is online.

    torchvision checks the archives' published checksums before it reads them.

    Args:
        name: a key of ``NAMED_SETS``.
        split: ``train`` or ``val``.
        home: the folder that holds data sets; ``data_home()`` by default.

    Raises:
        InputError: the set is neither there nor to be had.
    """
    import torchvision.datasets as datasets

    kind, train, val = NAMED_SETS[name]
    folder = home or data_home()
    arguments = train if split == "train" else val
    try:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                dataset = getattr(datasets, kind)(str(folder), download=False, **arguments)
            except RuntimeError:
                folder.mkdir(parents=True, exist_ok=True)
                dataset = getattr(datasets, kind)(str(folder), download=True, **arguments)
    except ImportError as error:
        raise InputError(f"torchvision needs a package to read {name}: {error}.", where=name) from error
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"The data set {name} is not on this machine and could not be downloaded ({error}).",
            where=folder,
            fix=f"put torchvision's files of {kind} there, set ZOO_DATA to the folder that has them, "
            "or pass a folder of images",
        ) from error
    return TorchvisionImages(name, dataset, split)
