"""From what the user typed after ``--data`` to an image source."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, did_you_mean
from .builtin import open_builtin
from .decode import Picture
from .decoding import PLAIN, Decoding
from .folder import FileImages, open_folder, open_list
from .named import NAMED_SETS, open_named
from .source import ImageSource, open_picture

__all__ = ["ConcatImages", "open_source", "open_sources"]


def open_source(
    spec: str, split: str = "train", how: Decoding = PLAIN, class_names: tuple[str, ...] | None = None
) -> ImageSource:
    """Open a folder, a text file of paths, ``builtin:NAME`` or a torchvision name.

    Args:
        spec: what the user typed; a path that exists wins over a name.
        split: ``train`` or ``val``, for sources that have parts.
        how: how picture files are decoded (collections without files of their own are RGB).
        class_names: the classes of a folder in the order of their numbers (``read_class_index``), if not
            its own folders in alphabetical order.

    Raises:
        InputError: nothing by that name, with the nearest name.
    """
    path = Path(spec).expanduser()
    if spec.startswith("builtin:"):
        return open_builtin(spec, split)
    if path.is_dir():
        return _decoded(open_folder(path, spec, class_names), how)
    if path.is_file():
        return _decoded(open_list(path, spec), how)
    if spec in NAMED_SETS:
        return open_named(spec, split)
    raise InputError(
        "The data is neither a folder, nor a text file of paths, nor a known name.",
        where=spec,
        fix=did_you_mean(spec, [*NAMED_SETS, "builtin:photos"])
        + "Known names: builtin:photos, "
        + ", ".join(NAMED_SETS),
    )


def _decoded(files: FileImages, how: Decoding) -> FileImages:
    files.decoding = how
    return files


def open_sources(
    specs: Sequence[str],
    split: str = "train",
    how: Decoding = PLAIN,
    class_names: tuple[str, ...] | None = None,
) -> ImageSource:
    """Open one or several sources as one collection, in the order given; see ``open_source``."""
    if not specs:
        raise InputError("No data was named.", fix="pass --data FOLDER, or --data builtin:photos")
    sources = [open_source(spec, split, how, class_names) for spec in specs]
    return sources[0] if len(sources) == 1 else ConcatImages(sources)


class ConcatImages:
    """Several sources one after the other; labels are kept only when all agree on the classes."""

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        self.name = " + ".join(source.name for source in sources)
        self.sources = tuple(sources)
        self.notes = tuple(note for source in sources for note in getattr(source, "notes", ()))
        agreed = len({source.classes for source in sources}) == 1
        self.classes = sources[0].classes if agreed else ()
        self._ends = np.cumsum([len(source) for source in sources]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _locate(self, index: int) -> tuple[ImageSource, int]:
        which = bisect.bisect_right(self._ends, index)
        return self.sources[which], index - (self._ends[which - 1] if which else 0)

    def open(self, index: int) -> Picture:
        return open_picture(*self._locate(index))

    def read(self, index: int) -> np.ndarray:
        source, inner = self._locate(index)
        return source.read(inner)

    def label(self, index: int) -> int:
        source, inner = self._locate(index)
        return source.label(inner) if self.classes else -1

    def where(self, index: int) -> str:
        source, inner = self._locate(index)
        return source.where(inner)

    def fingerprint(self) -> dict[str, Any]:
        parts = [source.fingerprint() for source in self.sources]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return {"kind": "concat", "count": len(self), "sha256": digest, "parts": parts}
