"""From what the user typed after ``--data`` to an image source."""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, did_you_mean
from .builtin import open_builtin
from .decode import Picture
from .decoding import PLAIN, Decoding
from .folder import FileImages, open_folder, open_list
from .hub_dataset import open_hub_dataset
from .named import NAMED_SETS, open_named
from .parquet import open_parquet
from .shards.pattern import is_address, is_pattern, shards_in
from .shards.source import open_shards
from .source import ImageSource, open_picture

__all__ = ["ConcatImages", "absolute_source", "image_name", "open_parts", "open_source", "open_sources"]

_TEST_PARTS = ("val", "test", "validation")


def open_source(
    spec: str,
    split: str = "train",
    how: Decoding = PLAIN,
    class_names: tuple[str, ...] | None = None,
    skip_bad: bool = False,
) -> ImageSource:
    """Open a folder, a text file of paths, tar shards, parquet files, ``builtin:NAME`` or a torchvision name.

    Args:
        spec: what the user typed; a path that exists wins over a name.
        split: ``train`` or ``val``, for sources that have parts.
        how: how picture files are decoded (collections without files of their own are RGB).
        class_names: the classes of a folder in the order of their numbers (``read_class_index``), if not
            its own folders in alphabetical order; of shards and tables, if not their own.
        skip_bad: go on without shards that are missing or damaged, as far as they are.

    Raises:
        InputError: nothing by that name, with the nearest name.
    """
    path = Path(spec).expanduser()
    is_folder = os.path.isdir(path)  # (Path's own question raises where a name is too long for the disk.)
    if spec.startswith("builtin:"):
        return open_builtin(spec, split)
    if spec.startswith("hf-dataset:"):
        return open_hub_dataset(spec, split, how, class_names)
    if spec.startswith("parquet:") or spec.endswith(".parquet"):
        return open_parquet(spec, how, class_names)
    if is_folder and (shards := shards_in(path)):
        return open_shards(spec, how, class_names, skip_bad=skip_bad, paths=shards)
    if is_pattern(spec):
        return open_shards(spec, how, class_names, skip_bad=skip_bad)
    if is_folder:
        return _decoded(open_folder(path, spec, class_names), how)
    if os.path.isfile(path):
        return _decoded(open_list(path, spec), how)
    if spec in NAMED_SETS:
        return open_named(spec, split)
    raise InputError(
        "The data is neither a folder, nor a text file of paths, nor tar shards, nor a known name.",
        where=spec,
        fix=did_you_mean(spec, [*NAMED_SETS, "builtin:photos"])
        + "check the path; known names: builtin:photos, "
        + ", ".join(NAMED_SETS),
    )


def open_parts(
    name: str, how: Decoding = PLAIN, class_names: tuple[str, ...] | None = None, where: object = None
) -> tuple[ImageSource, ImageSource]:
    """Open the training and the test part of a set.

    Args:
        name: a folder with ``train`` and ``val`` (or ``test``), or what ``open_source`` knows both parts of.
        how, class_names: see ``open_source``.
        where: what to name in an error; by default the folder.

    Raises:
        InputError: a folder without these parts, or nothing by that name.
    """
    folder = Path(name).expanduser()
    if not os.path.isdir(folder):
        return open_source(name, "train", how, class_names), open_source(name, "val", how, class_names)
    found = [folder / part for part in _TEST_PARTS if (folder / part).is_dir()]
    if not (folder / "train").is_dir() or not found:
        raise InputError(
            "The folder has no training and test part.",
            where=where or folder,
            fix="expected: train/<class>/<images> and val/<class>/<images> (or test/)",
        )
    train, val = (
        open_source(str(part), how=how, class_names=class_names) for part in (folder / "train", found[0])
    )
    return train, val


def _decoded(files: FileImages, how: Decoding) -> FileImages:
    files.decoding = how
    return files


def image_name(source: ImageSource, index: int) -> str:
    """What lists call an image: its file's path; without a file of its own its number, ``NAME[index]``."""
    return source.where(index) if isinstance(source, FileImages) else f"{source.name}[{index}]"


def absolute_source(spec: str) -> str:
    """The same source named in a way that doesn't depend on the working folder."""
    prefix = "parquet:" if spec.startswith("parquet:") else ""
    path = Path(spec.removeprefix(prefix)).expanduser()
    local = is_pattern(spec) and not is_address(spec)
    return (
        f"{prefix}{path.absolute()}"
        if prefix or local or spec.endswith(".parquet") or os.path.exists(path)
        else spec
    )


def open_sources(
    specs: Sequence[str],
    split: str = "train",
    how: Decoding = PLAIN,
    class_names: tuple[str, ...] | None = None,
    skip_bad: bool = False,
) -> ImageSource:
    """Open one or several sources as one collection, in the order given; see ``open_source``."""
    if not specs:
        raise InputError("No data was named.", fix="pass --data FOLDER, or --data builtin:photos")
    sources = [open_source(spec, split, how, class_names, skip_bad) for spec in specs]
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

    @property
    def stretches(self) -> np.ndarray | None:
        """What is read together, if all sources know that (``zoo.data.shards.order``)."""
        parts = [part for source in self.sources if (part := getattr(source, "stretches", None)) is not None]
        return np.concatenate(parts) if len(parts) == len(self.sources) else None

    @property
    def window(self) -> int | None:
        """The smallest of the sources' windows."""
        windows = (getattr(source, "window", None) for source in self.sources)
        return min((window for window in windows if window is not None), default=None)

    def soon(self, samples: Sequence[int]) -> None:
        """Some of the samples that will be wanted next."""
        found: dict[int, list[int]] = {}
        for sample in samples:
            which = bisect.bisect_right(self._ends, sample)
            found.setdefault(which, []).append(sample - (self._ends[which - 1] if which else 0))
        for which, inner in found.items():
            if (soon := getattr(self.sources[which], "soon", None)) is not None:
                soon(inner)

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
