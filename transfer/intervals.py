"""How sure an accuracy is: intervals by bootstrap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.keyed import keyed_key, keyed_uniforms

__all__ = ["LEVEL", "RESAMPLES", "accuracies", "bootstrap_rows", "intervals"]

RESAMPLES = 1000
LEVEL = 0.95


def accuracies(hits: Mapping[str, Any]) -> dict[str, float]:
    """The share of images that each metric counts as right, 0..1, of bool (N,) each."""
    return {name: float(np.asarray(right, dtype=np.float64).mean()) for name, right in hits.items()}


def bootstrap_rows(count: int, seed: int, number: int) -> np.ndarray:
    """The rows of one resample: ``count`` of ``count``, drawn with replacement by key; int64."""
    return (keyed_uniforms(keyed_key(seed, "bootstrap", number), count) * count).astype(np.int64)


def intervals(hits: Mapping[str, Any], seed: int) -> dict[str, list[float]]:
    """95 % intervals of accuracies by the percentile bootstrap over the test images.

    They say how much hangs on which images were tested, not on the training's draws: that is what seeds show.

    Args:
        hits: of each metric, whether each image is right, bool (N,).
        seed: of the draws; all metrics see the same ones.

    Returns:
        Of each metric, its 2.5 and 97.5 % quantiles over 1,000 resamples.
    """
    if not hits:
        return {}
    table = np.stack([np.asarray(right, dtype=np.float32) for right in hits.values()])
    means = np.stack(
        [table[:, bootstrap_rows(table.shape[1], seed, n)].mean(axis=1) for n in range(RESAMPLES)]
    )
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means.astype(np.float64), (tail, 1 - tail), axis=0)
    return {name: [float(low[n]), float(high[n])] for n, name in enumerate(hits)}
