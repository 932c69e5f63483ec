"""The kNN recipe."""

from __future__ import annotations

from typing import Any

from zoo.errors import InputError
from zoo.probe.knn import knn_ranks

from ..intervals import accuracies
from ..run import Context
from .config import KnnConfig

__all__ = ["run"]


def run(context: Context, config: KnnConfig) -> dict[str, Any]:
    """Top-1 and top-5 of the test images by their nearest training images, for each k and temperature.

    In the top five are only classes that a neighbour has. With ``leave_one_out`` the training images are asked.

    Raises:
        InputError: fewer than two images to leave one out of.
    """
    bank, bank_labels = context.features("train")
    queries, labels = (bank, bank_labels) if config.leave_one_out else context.features("val")
    if config.leave_one_out and len(bank) < 2:
        raise InputError("There are no others to ask.", where=context.train.name, fix="pass more images")
    asked = knn_ranks(
        queries,
        labels,
        bank,
        bank_labels,
        context.classes,
        config.k,
        config.temperature,
        leave_one_out=config.leave_one_out,
    )
    hits: dict[str, Any] = {}
    several = len(config.k) > 1, len(config.temperature) > 1
    for k, temperature, ranks in asked:
        which = f"_k{k}" * several[0] + f"_t{temperature:g}" * several[1]
        mine = {"top1": ranks < 1, "top5": ranks < 5}
        hits = hits or dict(mine)
        hits |= {name + which: right for name, right in mine.items()}
    return {
        "metrics": accuracies(hits),
        "hits": hits,
        "neighbours": min(max(config.k), len(bank) - int(config.leave_one_out)),
    }
