"""The semi-supervised recipe: fine-tune on a given list, or on a balanced share of the labels."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.source import ImageSource
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation

from ..datasets import SubsetImages
from ..labels import labels_of, split_sha256
from ..run import Context
from .config import SemisupConfig
from .training import check_tunable, fine_tune

__all__ = ["balanced_share", "listed_images", "run"]


def run(context: Context, config: SemisupConfig) -> dict[str, Any]:
    """Top-1 and top-5 of the last and of the best epoch on the test images.

    Raises:
        InputError: nothing to fine-tune, a list that doesn't fit the images, or too few for a batch.
    """
    check_tunable(context, len(context.train))
    if config.labels:
        chosen = listed_images(context.train, Path(config.labels).expanduser())
    else:
        chosen = balanced_share(context.train, config.fraction, config.seed)
    check_tunable(context, len(chosen))
    labelled = SubsetImages(context.train, chosen)
    share = len(chosen) / len(context.train) if config.labels else config.fraction
    config = config.settled(len(chosen), share)
    return {
        "settled": config,
        **fine_tune(context, labelled, config),
        "labelled_sha256": split_sha256(labelled),
        "labelled_classes": len(np.unique(labels_of(labelled))),
    }


def listed_images(source: ImageSource, file: Path) -> list[int]:
    """Ids of the training images named in a text file (the form of SimCLR's ``1percent.txt``), sorted.

    A name may have its class's folder before it.

    Raises:
        InputError: a list that can't be read or is empty, a name that no image has, or that two have.
    """
    try:
        names = [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The list of labelled images can't be read ({error}).", where=file) from None
    if not names:
        raise InputError("The list of labelled images is empty.", where=file)
    ids: dict[str, list[int]] = defaultdict(list)
    for index in range(len(source)):
        path = Path(source.where(index))
        ids[path.name].append(index)
        ids[f"{path.parent.name}/{path.name}"].append(index)
    absent = [name for name in names if name not in ids]
    if absent:
        raise InputError(
            f"{len(absent)} of {len(names)} listed images are not in the training set; the first is {absent[0]}.",
            where=file,
            fix=f"the names are compared with those of the files in {source.name}",
        )
    doubled = [name for name in names if len(ids[name]) > 1]
    if doubled:
        raise InputError(
            f"Several training images are called {doubled[0]}.",
            where=file,
            fix="name them with their class's folder: class/name",
        )
    return sorted({ids[name][0] for name in names})


def balanced_share(source: ImageSource, fraction: float, seed: int) -> list[int]:
    """Ids of the same share of every class (at least one image each), drawn by key, sorted."""
    labels = labels_of(source)
    chosen: list[int] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = keyed_permutation(keyed_key(seed, "labelled", int(label)), len(members))
        chosen += members[order[: max(1, round(fraction * len(members)))]].tolist()
    return sorted(chosen)
