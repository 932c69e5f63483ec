"""Data sets of one class an image that are known by name, each in its usual layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zoo.data.folder import FileImages

from .imagenet import IMAGENET_TREE, open_imagenet
from .inat18 import INAT18_TREE, open_inat18
from .own import find_tables, open_tables
from .places205 import PLACES205_TREE, open_places205

__all__ = ["NAMED", "NamedSet", "find_tables", "open_tables"]


@dataclass(frozen=True)
class NamedSet:
    """A published data set.

    Args:
        title: what people call it.
        open: from its folder, class names if not its own, and whether the training part is all that is wanted,
            to both parts, numbered alike.
        tree: the files it needs, for messages.
        counts: training images, test images and classes of the whole set.
    """

    title: str
    open: Callable[[Path, tuple[str, ...] | None, bool], tuple[FileImages, FileImages | None]]
    tree: str
    counts: tuple[int, int, int]

    def part_of(self, train: FileImages, val: FileImages | None) -> str:
        """What makes numbers of these images no numbers of the whole set; empty if it is the whole."""
        found = {
            "training images": (len(train), self.counts[0]),
            "classes": (len(train.classes), self.counts[2]),
        }
        if val is not None:
            found["test images"] = (len(val), self.counts[1])
        if all(there == full for there, full in found.values()):
            return ""
        fewer = any(there < full for there, full in found.values())
        shares = ", ".join(f"{there} of {full} {what}" for what, (there, full) in found.items())
        return f"{'a part of' if fewer else 'more than'} {self.title}: {shares}"


NAMED = {
    "imagenet": NamedSet("ImageNet", open_imagenet, IMAGENET_TREE, (1281167, 50000, 1000)),
    "places205": NamedSet("Places205", open_places205, PLACES205_TREE, (2448873, 20500, 205)),
    "inat18": NamedSet("iNaturalist 2018", open_inat18, INAT18_TREE, (437513, 24426, 8142)),
}
