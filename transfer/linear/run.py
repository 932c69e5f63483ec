"""The linear recipe: SGD on frozen features."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from zoo.data.views.presets import crop_and_flip
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation
from zoo.probe.linear import shuffled, train_linear

from ..run import Context
from .amdim import run_evaluators
from .common import accuracies, augmented
from .config import LinearConfig

__all__ = ["run"]


def run(context: Context, config: LinearConfig) -> dict[str, Any]:
    """Top-1 and top-5 of the last epoch on the test images, and how the choice was made."""
    pairs = list(itertools.product(config.lr, config.weight_decay))
    if config.protocol != "cached" and len(pairs) > 1:
        raise InputError(
            f"The {config.protocol} protocol chooses nothing: it needs one learning rate and one weight decay.",
            where="lr",
            fix="e.g. --lr 0.3 --weight-decay 1e-6 (SwAV's)"
            if config.protocol == "exact"
            else "leave both out for AMDIM's, or give one of each",
        )
    if config.protocol.startswith("amdim"):
        return run_evaluators(context, config)
    queries, labels = context.features("val")
    if config.protocol == "exact":
        center, spread = torch.zeros(queries.shape[1]), torch.ones(queries.shape[1])
        # SwAV A.3: RandomResizedCrop and flip.
        batches, steps = augmented(context, config, crop_and_flip(int(context.preprocessing["crop"])))
    else:
        bank, bank_labels = context.features("train")
        center, spread = bank.mean(0), bank.std(0).clamp_min(1e-6)
        bank = (bank - center) / spread
        if len(pairs) > 1:
            pairs = [_choose(bank, bank_labels, context.classes, pairs, config)]
        batches, steps = shuffled(bank, bank_labels, config.batch_size, config.seed)
    heads, loss = train_linear(
        batches, steps, queries.shape[1], context.classes, pairs, config.epochs, config.seed
    )
    logits = heads((queries - center) / spread)[0]
    diverged = not math.isfinite(loss[0]) or loss[0] > 2 * math.log(context.classes)
    metrics = {
        **accuracies(logits, labels),
        "train_loss": loss[0] if math.isfinite(loss[0]) else None,
    }
    return {
        "metrics": metrics,
        "chosen": {"lr": pairs[0][0], "weight_decay": pairs[0][1]},
        "diverged": diverged,
    }


def _choose(
    bank: torch.Tensor,
    labels: torch.Tensor,
    classes: int,
    pairs: list[tuple[float, float]],
    config: LinearConfig,
) -> tuple[float, float]:
    """The pair that does best on a held-out part of the training set; the test set is not touched."""
    order = torch.from_numpy(keyed_permutation(keyed_key(config.seed, "held-out"), len(bank)))
    held = max(1, round(config.held_out * len(bank)))
    inside, outside = order[held:], order[:held]
    batches, steps = shuffled(bank[inside], labels[inside], config.batch_size, config.seed)
    heads, _ = train_linear(batches, steps, bank.shape[1], classes, pairs, config.epochs, config.seed)
    hits = (heads(bank[outside]).argmax(dim=2) == labels[outside]).double().mean(dim=1)
    return pairs[int(hits.nan_to_num(-1.0).argmax())]
