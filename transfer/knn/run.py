"""The kNN recipe."""

from __future__ import annotations

from typing import Any

from zoo.probe.knn import knn_accuracy

from ..run import Context
from .config import KnnConfig

__all__ = ["run"]


def run(context: Context, config: KnnConfig) -> dict[str, Any]:
    """Top-1 accuracy of the test images by their nearest training images, for each k."""
    bank, bank_labels = context.features("train")
    queries, labels = context.features("val")
    scores = {
        f"top1_k{k}": knn_accuracy(queries, labels, bank, bank_labels, k=k, temperature=config.temperature)
        for k in config.k
    }
    return {"metrics": {"top1": scores[f"top1_k{config.k[0]}"], **(scores if len(config.k) > 1 else {})}}
