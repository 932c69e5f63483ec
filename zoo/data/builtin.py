"""Collections that need no download: ``builtin:photos``, patches of scikit-image's photographs.

scikit-image ships some photographs inside its wheel. Each one is a class here, and the
samples are patches of it, cut at two scales. The validation patches come from one end of the
photograph, the train patches from the rest, with a gap that belongs to neither.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import InputError, did_you_mean
from .source import ImageSource

__all__ = ["BUILTIN_NAMES", "PATCH", "SPLITS", "PhotoPatches", "open_builtin"]

PATCH = 48
"""Height and width of a patch in pixels."""
SPLITS = ("train", "val")

# Photographs only: no drawings, logos, test charts or pages of text; no photograph that is too
# small to be split, and one of the two views of the motorcycle.
_FILES = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "cell.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
# The photograph is shrunk (never enlarged) until its longer side has this many pixels.
_SIDES = (512, 256)
# Patches of one photograph at each of these sides.
_COUNTS = {"train": (160, 80), "val": (32, 16)}
_VAL_PERCENT = 28
_GAP_PERCENT = 4
# A gap of at least one 16-pixel JPEG block: its pixels are compressed together.
_GAP_MIN = 16
# Steps of the two-dimensional golden-ratio sequence (1/p, 1/p^2 with p^3 = p + 1) as fractions
# of 2^32: any number of its points covers a rectangle evenly, and integers give the same
# positions on every machine.
_STEPS = (3242174889, 2447445414)
_RESAMPLE = Image.Resampling.BICUBIC


def _spread(i: int, axis: int, room: int) -> int:
    """Point ``i`` of the even sequence along ``axis``, as an integer in [0, ``room``]."""
    fraction = (2**31 + i * _STEPS[axis]) % 2**32
    return fraction * (room + 1) >> 32


def _data_folder() -> Path:
    """scikit-image's folder of images, found without importing it."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            "builtin:photos needs the photographs of scikit-image, which is not installed.",
            where="builtin:photos",
            fix="pip install scikit-image",
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"


class PhotoPatches:
    """48 x 48 patches of photographs; the class is the photograph.

    Consecutive samples come from different photographs, so every prefix is balanced. The two
    splits share no pixel: a photograph is cut into its two regions before anything is resized.

    Args:
        split: ``train`` (240 patches a class) or ``val`` (48 a class).
        folder: where the photographs lie; scikit-image's data folder when not given.

    Raises:
        InputError: unknown split, no scikit-image, or a photograph missing from it.
    """

    def __init__(self, split: str, folder: Path | None = None) -> None:
        if split not in SPLITS:
            raise InputError(
                f"builtin:photos has no split {split!r}.",
                where="builtin:photos",
                fix=f"use one of: {', '.join(SPLITS)}",
            )
        self.name = "builtin:photos"
        self.split = split
        self.classes: tuple[str, ...] = tuple(Path(file).stem for file in _FILES)
        self._folder = _data_folder() if folder is None else Path(folder)
        self._regions: dict[int, list[np.ndarray]] = {}
        for file in _FILES:
            if not (self._folder / file).is_file():
                raise InputError(
                    f"This scikit-image comes without the photograph {file}.",
                    where=self._folder / file,
                    fix="pip install --upgrade scikit-image",
                )

    def __getstate__(self) -> dict[str, Any]:
        # Pixels stay behind: each data worker decodes the photographs once for itself.
        return {**self.__dict__, "_regions": {}}

    def __len__(self) -> int:
        return len(_FILES) * sum(_COUNTS[self.split])

    def read(self, index: int) -> np.ndarray:
        """The patch as uint8, 48 x 48 x 3, RGB; a copy. Raises ``InputError`` for a bad file."""
        photo, level, top, left = self._place(index)
        return self._levels(photo)[level][top : top + PATCH, left : left + PATCH].copy()

    def label(self, index: int) -> int:
        """The photograph's index in ``classes``."""
        return self._check(index) % len(_FILES)

    def where(self, index: int) -> str:
        photo, level, top, left = self._place(index)
        place = f"{self.split} region at {_SIDES[level]} px, row {top}, column {left}"
        return f"{self._folder / _FILES[photo]} ({place})"

    def fingerprint(self) -> dict[str, Any]:
        """Changes with the bytes of the photographs and with how patches are laid out."""
        layout = {
            "files": list(_FILES),
            "patch": PATCH,
            "sides": list(_SIDES),
            "counts": list(_COUNTS[self.split]),
            "val_percent": _VAL_PERCENT,
            "gap": [_GAP_PERCENT, _GAP_MIN],
            "steps": list(_STEPS),
            "resample": _RESAMPLE.name,
        }
        digest = hashlib.sha256(json.dumps(layout, sort_keys=True).encode())
        for file in _FILES:
            digest.update(hashlib.sha256((self._folder / file).read_bytes()).digest())
        return {
            "name": self.name,
            "split": self.split,
            "count": len(self),
            "sha256": digest.hexdigest(),
        }

    def _check(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} ({self.split}) has no sample {index}")
        return int(index)

    def _place(self, index: int) -> tuple[int, int, int, int]:
        """(photograph, level, top, left) of a sample; top and left are pixels of that level."""
        number, photo = divmod(self._check(index), len(_FILES))
        level = 0
        while number >= _COUNTS[self.split][level]:
            number -= _COUNTS[self.split][level]
            level += 1
        height, width = self._levels(photo)[level].shape[:2]
        return photo, level, _spread(number, 0, height - PATCH), _spread(number, 1, width - PATCH)

    def _levels(self, photo: int) -> list[np.ndarray]:
        """This split's region of a photograph, uint8 H x W x 3, once for each of ``_SIDES``."""
        if photo not in self._regions:
            path = self._folder / _FILES[photo]
            try:
                with Image.open(path) as file:
                    image = file.convert("RGB")
            except OSError as error:
                raise InputError(
                    f"A photograph of scikit-image can't be decoded: {error}",
                    where=path,
                    fix="pip install --force-reinstall scikit-image",
                ) from error
            region = image.crop(split_box(image.width, image.height, self.split))
            levels = []
            for side in _SIDES:
                scale = min(1.0, side / max(image.size))
                size = (round(region.width * scale), round(region.height * scale))
                # Resizing the cut region keeps the filter from reaching over the cut.
                levels.append(np.asarray(region.resize(size, _RESAMPLE)))
            self._regions[photo] = levels
        return self._regions[photo]


def split_box(width: int, height: int, split: str) -> tuple[int, int, int, int]:
    """The region of a split in pixels of the photograph: (left, top, right, bottom).

    The cut runs across the longer side (the width of a square): train before it, val after it.
    """
    long = max(width, height)
    val_start = long - long * _VAL_PERCENT // 100
    gap = max(_GAP_MIN, long * _GAP_PERCENT // 100)
    low, high = (0, val_start - gap) if split == "train" else (val_start, long)
    return (low, 0, high, height) if width >= height else (0, low, width, high)


_SOURCES = {"builtin:photos": PhotoPatches}
BUILTIN_NAMES = tuple(_SOURCES)


def open_builtin(name: str, split: str) -> ImageSource:
    """Open a built-in collection.

    Args:
        name: one of ``BUILTIN_NAMES``.
        split: ``train`` or ``val``.

    Raises:
        InputError: unknown name (with the nearest one that exists) or split.
    """
    if name not in _SOURCES:
        raise InputError(
            f"There is no built-in collection {name!r}.",
            where=name,
            fix=did_you_mean(name, BUILTIN_NAMES, likeness=0.4) + f"Known: {', '.join(BUILTIN_NAMES)}",
        )
    return _SOURCES[name](split)
