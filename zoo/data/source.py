"""What every collection of images looks like to the rest of the zoo."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from .decode import ArrayPicture, Picture

__all__ = ["UNLABELLED", "ImageSource", "open_picture"]

UNLABELLED = -1


@runtime_checkable
class ImageSource(Protocol):
    """An indexed, immutable collection of images; the index is the sample's id.

    Implementations are picklable (they travel to data workers) and hold no open files.
    """

    name: str
    """What the user called it, e.g. ``builtin:photos`` or a folder."""
    classes: tuple[str, ...]
    """Names of the labels in order; empty when the images carry none."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> np.ndarray:
        """The image as uint8, H x W x 3, RGB. Raises ``InputError`` that names the file."""
        ...

    def label(self, index: int) -> int:
        """The class index, or ``UNLABELLED``."""
        ...

    def where(self, index: int) -> str:
        """Where the image comes from, for messages: a path or a name inside an archive."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """JSON that changes when the collection changes (count, names, sizes; not every byte)."""
        ...


def open_picture(source: ImageSource, index: int) -> Picture:
    """An image of a source, not yet decoded if the source can do that (it then has ``open(index)``).

    Raises:
        InputError: names the file and what is wrong with it.
    """
    opener = getattr(source, "open", None)
    return opener(index) if opener is not None else ArrayPicture(source.read(index))
