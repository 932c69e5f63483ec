"""The SVM recipe: LIBLINEAR's machines on frozen features of images with several classes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from zoo.errors import InputError
from zoo.probe.average_precision import area_average_precision

from ..intervals import LEVEL, RESAMPLES, bootstrap_rows
from ..multilabel import MultilabelImages
from ..run import Context
from .config import SvmConfig
from .features import svm_features
from .protocol import train_classes

__all__ = ["METRIC", "labels_of", "present", "run"]

_BLOCK = 2**21  # scores at once

METRIC = "area under the envelope of the precision-recall curve"


def run(context: Context, config: SvmConfig) -> dict[str, Any]:
    """Mean average precision of the test images, and of each class with its chosen cost.

    Raises:
        InputError: a class with fewer training images than folds.
    """
    train, test = labels_of(context, "train"), labels_of(context, "val")
    positive = train == 1  # difficult ones are negatives in training
    _check_folds(context, positive, config.folds)
    trained = train_classes(
        svm_features(context, "train", config.features),
        positive,
        config.costs,
        config.folds,
        config.positive_weight,
        config.negative_weight,
    )
    scores = trained.scores(svm_features(context, "val", config.features))
    asked = scores, test == 1, test != 0
    area, eleven = (area_average_precision(*asked, points) for points in (False, True))
    rows = [
        {
            "class": name,
            "average_precision": present(area[k]),
            "cost": float(trained.costs[k]),
            "crossval": float(trained.crossval[k].max()),
            "train_images": int(positive[k].sum()),
            "test_images": int((test[k] == 1).sum()),
            "difficult_left_out": int((test[k] == 0).sum()),
        }
        for k, name in enumerate(context.labelled.classes)
    ]
    return {
        "metrics": {"mAP": present(area.nanmean()), "mAP_11_points": present(eleven.nanmean())},
        "intervals": {"mAP": _interval(*asked, config.seed)},
        "average_precision": METRIC,
        "per_class": rows,
        "not_scored": [row["class"] for row in rows if row["average_precision"] is None],
        # The objectives are at most this share of themselves above LIBLINEAR's least.
        "largest_gap": trained.gap,
    }


def labels_of(context: Context, part: str) -> torch.Tensor:
    """int8 (C, N): 1 the class is there, 0 as difficult objects only, -1 it isn't."""
    source = cast(MultilabelImages, context.train if part == "train" else context.val)
    return torch.from_numpy(source.labels).T.contiguous()


def present(value: torch.Tensor) -> float | None:
    """A number, or None where there is none (a class without test images)."""
    return None if value.isnan() else float(value)


def _interval(
    scores: torch.Tensor, positive: torch.Tensor, counted: torch.Tensor, seed: int
) -> list[float] | None:
    """Of the mean average precision, over the test images (``transfer.intervals``); a class may miss a resample."""
    count = scores.shape[1]
    means = []
    block = max(1, _BLOCK // scores.numel())
    for first in range(0, RESAMPLES, block):
        draws = range(first, min(first + block, RESAMPLES))
        times = np.stack(
            [np.bincount(bootstrap_rows(count, seed, n), minlength=count).astype(np.float64) for n in draws]
        )
        often = torch.from_numpy(times)[:, None] * counted
        means.append(area_average_precision(scores, positive, often).nanmean(1))
    found = torch.cat(means)
    if found.isnan().all():
        return None
    tail = (1 - LEVEL) / 2
    return [float(torch.nanquantile(found, share)) for share in (tail, 1 - tail)]


def _check_folds(context: Context, positive: torch.Tensor, folds: int) -> None:
    counts = torch.minimum(positive.sum(1), (~positive).sum(1)).tolist()
    short = [name for name, count in zip(context.labelled.classes, counts, strict=True) if count < folds]
    if short:
        k = context.labelled.classes.index(short[0])
        with_it = int(positive[k].sum())
        raise InputError(
            f"{len(short)} classes have too few training images for {folds} folds: {short[0]} is in {with_it} of "
            f"{positive.shape[1]}" + (f"; also {', '.join(short[1:6])}" if short[1:] else "") + ".",
            where=context.train.name,
            fix="every fold needs an image with the class and one without: add images, or pass a smaller --folds",
        )
