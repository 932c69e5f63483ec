"""``zoo.neighbours``: the images of a collection that are most like a given one."""

from __future__ import annotations

import filecmp
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from .data.decoding import MAX_PIXELS, Decoding
from .data.folder import FileImages, PackedPaths
from .data.open import image_name, open_source
from .data.source import ImageSource
from .engine.precision import choose_device
from .errors import InputError
from .files import disk_errors
from .loading import load
from .probe.features import source_features

__all__ = ["Neighbours", "neighbours"]

log = logging.getLogger("zoo")

_BLOCK = 1024


@dataclass(frozen=True)
class Neighbours:
    """The images nearest to a query.

    Args:
        query: the picture, as it was named.
        images: the nearest first; their files, or their numbers in a collection without files.
        ids: (k,) int64, their places in the collection.
        scores: (k,) float32, cosines of pooled features.
        left_out: the query itself, and exact copies of its file, where they are in the collection.
    """

    query: str
    images: tuple[str, ...]
    ids: torch.Tensor
    scores: torch.Tensor
    left_out: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """image and score (six decimals) of each neighbour."""
        scores = [round(score, 6) for score in self.scores.tolist()]
        return [{"image": image, "score": s} for image, s in zip(self.images, scores, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"query": self.query, "left_out": list(self.left_out), "neighbours": self.rows()}


def neighbours(
    model: Any,
    images: str | ImageSource,
    query: str | Path | Sequence[str | Path],
    *,
    k: int = 10,
    batch_size: int = 64,
    device: str = "auto",
    max_pixels: int = MAX_PIXELS,
    progress: bool = True,
) -> list[Neighbours]:
    """The ``k`` images nearest to each query, by the cosine of pooled features (test transform, eval mode).

    Of equally near images the first in the collection comes first.

    Args:
        model: a reference (see ``zoo.load``), or what ``zoo.load`` returned.
        images: a source, or what ``--data`` accepts.
        query: one or several pictures: any file, a path relative to the folder ``images``, or the number of an
            image in a collection without files.
        k: neighbours of each; all there are, if they are fewer.
        batch_size: images at once; another number can change the last digits of a score.
        device: where to compute; a network that was passed stays where it is.
        max_pixels: larger pictures are refused (of a source that was passed, among the queries alone).
        progress: say on standard error what is downloaded and what matched.

    Returns:
        The neighbours of each query, in the queries' order.

    Raises:
        InputError: an unknown model, or a picture that isn't there or can't be read.
    """
    queries = [query] if isinstance(query, str | os.PathLike) else list(query)
    if not queries:
        raise InputError("No picture was named to search for.", fix="pass --query FILE")
    if k < 1:
        raise InputError("At least one neighbour is searched for.", where=f"k: {k}")
    network = load(model, progress=progress).to(choose_device(device)) if isinstance(model, str) else model
    how = network.zoo_info["preprocessing"]
    decoding = Decoding(channels=len(how["mean"]), max_pixels=max_pixels)
    source = open_source(images, how=decoding) if isinstance(images, str) else images
    wanted = [_find(os.fspath(one), source) for one in queries]

    def features(of: ImageSource) -> torch.Tensor:
        return source_features(network, of, how, batch_size)[0]

    files = _files([one for one in wanted if isinstance(one, str)], decoding)
    outside = iter(
        features(files) if files is not None else ()
    )  # first: an unreadable query is known at once
    bank = features(source)
    found = []
    for name, one in zip(queries, wanted, strict=True):
        vector = next(outside) if isinstance(one, str) else bank[one]
        itself = _copies(one, source) if isinstance(one, str) else [one]
        found.append(_ranked(os.fspath(name), vector, bank, source, itself, k))
    most = len(source) - min(len(one.left_out) for one in found)
    if k > most:
        log.warning("there are only %d images to choose from, not %d: all are listed", most, k)
    return found


def _find(query: str, source: ImageSource) -> str | int:
    """The file that a query means, or its number in a collection without files."""
    path = os.path.expanduser(query)
    if os.path.isfile(path):
        return path
    if isinstance(source, FileImages):
        inside = os.path.join(source.root, query)
        if os.path.isfile(inside):
            return inside
        raise InputError(
            "There is no such picture, neither here nor in the folder of the images.",
            where=query,
            fix=f"pass a picture's path, or its path relative to {source.root}",
        )
    number = query.removeprefix(f"{source.name}[").removesuffix("]")
    if number.isdecimal() and int(number) < len(source):
        return int(number)
    raise InputError(
        f"This is neither a picture's path nor the number of an image of {source.name}.",
        where=query,
        fix=f"pass the path of a picture, or a number from 0 to {len(source) - 1}",
    )


def _files(paths: list[str], decoding: Decoding) -> FileImages | None:
    if not paths:
        return None
    files = FileImages("the queries", Path(), PackedPaths(os.fsencode(os.path.abspath(p)) for p in paths))
    files.decoding = decoding
    return files


def _copies(file: str, source: ImageSource) -> list[int]:
    """Which images of a collection are this file, or hold the same bytes."""
    if not isinstance(source, FileImages):
        return []

    def same(other: str) -> bool:
        mine, found = os.stat(file), os.stat(other)
        if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
            return True
        return found.st_size == mine.st_size and filecmp.cmp(file, other, shallow=False)

    with disk_errors("Looking for copies of the query", Path(file)):
        return [index for index in range(len(source)) if same(source.where(index))]


def _ranked(
    query: str, vector: torch.Tensor, bank: torch.Tensor, source: ImageSource, itself: Iterable[int], k: int
) -> Neighbours:
    left_out = list(itself)
    kept = torch.ones(len(bank), dtype=torch.bool)
    kept[left_out] = False
    ids = kept.nonzero().squeeze(1)
    scores = _cosines(vector, bank)[ids]
    nearest = scores.argsort(descending=True, stable=True)[:k]
    return Neighbours(
        query=query,
        images=tuple(image_name(source, index) for index in ids[nearest].tolist()),
        ids=ids[nearest],
        scores=scores[nearest],
        left_out=tuple(image_name(source, index) for index in left_out),
    )


def _cosines(vector: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
    """(F,) and (N, F) -> (N,) float32: a sum of its own for each row, so that equal rows score alike."""
    query = F.normalize(vector.double(), dim=0)
    blocks = (F.normalize(block.double(), dim=1) for block in bank.split(_BLOCK))
    return torch.cat([(block * query).sum(dim=1) for block in blocks]).float()
