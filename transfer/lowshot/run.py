"""The low-shot recipe: SVMs on a few labelled images of each class.

How the cost is chosen: VISSL's benchmark takes, for each k, the cost with the best mean average precision on
the *test* images. Here it is the best on the training images that the sample left out, in the mean over all
classes and samples, also one cost for each k. No test image takes part; but the choice of this one number sees
more labels than k of each class, as it would not in practice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation
from zoo.probe.average_precision import area_average_precision
from zoo.probe.svm import Svms, fit_svms

from ..run import Context
from ..svm.features import svm_features
from ..svm.run import METRIC, labels_of, present
from .config import LowshotConfig

__all__ = ["draw", "run"]

_CHOICE = "for each k, by the mean average precision of the training images that the samples left out"


def run(context: Context, config: LowshotConfig) -> dict[str, Any]:
    """Mean average precision of the test images for each k: mean and deviation over the samples.

    A k that some class has too few images for is left out.

    Raises:
        InputError: no k is left.
    """
    labels, asked_labels = labels_of(context, "train"), labels_of(context, "val")
    shots = _possible(context, labels, config)
    features = svm_features(context, "train", config.features)
    asked = svm_features(context, "val", config.features)
    rows = []
    for k in shots:
        held_out, tested = [], []  # of each sample: (costs, classes)
        for sample in range(config.samples):
            chosen = [
                draw(row, k, config.negatives, keyed_key(config.seed, "lowshot", sample, c))
                for c, row in enumerate(labels)
            ]
            machines = _machines(features, labels, chosen, config)
            left = labels != 0
            for c, taken in enumerate(chosen):
                left[c, taken] = False
            held_out.append(area_average_precision(machines.scores(features), labels == 1, left))
            tested.append(
                area_average_precision(machines.scores(asked), asked_labels == 1, asked_labels != 0)
            )
        # Where no positive is left out, nothing can be said: the smallest cost then.
        choice = int(np.argmax(torch.stack(held_out).nanmean((0, 2)).nan_to_num(0.0).numpy()))
        rows.append(_row(context, k, config.costs[choice], torch.stack(tested)[:, choice]))
    means = {f"mAP_k{row['k']}": row["mAP"] for row in rows}
    deviations = {f"mAP_k{row['k']}_deviation": row["deviation"] for row in rows}
    return {
        "metrics": {**means, **deviations},
        "average_precision": METRIC,
        "cost_chosen": _CHOICE,
        "per_k": rows,
        "k_left_out": [k for k in config.k if k not in shots],
    }


def draw(labels: torch.Tensor, k: int, negatives: int, key: int) -> torch.Tensor:
    """Rows of k positives and ``negatives`` x k negatives (or all, if there are fewer), sorted.

    The images of a smaller k are among those of a larger one; difficult images are never drawn.

    Args:
        labels: (N,): 1, 0 (difficult) or -1.
        k: positives.
        negatives: for each of them.
        key: of the draw.
    """
    drawn = []
    for side, (sign, count) in enumerate(((1, k), (-1, negatives * k))):
        members = (labels == sign).nonzero()[:, 0]
        drawn.append(members[torch.from_numpy(keyed_permutation(key ^ side, len(members)))[:count]])
    return torch.cat(drawn).sort().values


def _machines(
    features: torch.Tensor, labels: torch.Tensor, chosen: list[torch.Tensor], config: LowshotConfig
) -> Svms:
    """A machine of each class for each cost, each trained on its own few rows."""
    found = [
        fit_svms(
            features[rows], row[rows][None], config.costs, config.positive_weight, config.negative_weight
        )
        for row, rows in zip(labels, chosen, strict=True)
    ]
    parts = ((each.weight, each.bias, each.objective, each.gap) for each in found)
    return Svms(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))


def _row(context: Context, k: int, cost: float, precision: torch.Tensor) -> dict[str, Any]:
    """What is said of one k; ``precision`` is (samples, classes)."""
    means = precision.nanmean(1)
    names = context.labelled.classes
    return {
        "k": k,
        "cost": cost,
        "mAP": present(means.mean()),
        "deviation": float(means.std(correction=1)) if len(means) > 1 else 0.0,
        "samples": means.tolist(),
        "average_precision": {
            name: present(value) for name, value in zip(names, precision.mean(0), strict=True)
        },
    }


def _possible(context: Context, labels: torch.Tensor, config: LowshotConfig) -> list[int]:
    """The numbers of positives that every class has."""
    positives, others = (labels == 1).sum(1), (labels == -1).sum(1)
    fewest = int(positives.argmin())
    if int(positives[fewest]) < config.k[0] or not int(others.min()):
        name = context.labelled.classes[fewest if int(others.min()) else int(others.argmin())]
        raise InputError(
            f"Class {name} has {int(positives[fewest])} training images"
            + ("" if int(others.min()) else " and no image is without it")
            + f"; the smallest k is {config.k[0]}.",
            where=context.train.name,
            fix="add images, or pass a smaller --k",
        )
    return [k for k in config.k if k <= int(positives[fewest])]
