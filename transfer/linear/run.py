"""The linear recipe: SGD on frozen features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from zoo.data.loader import EpochOrder, view_batches
from zoo.data.views.maker import PlannedViews
from zoo.data.views.presets import crop_and_flip
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation, keyed_seed
from zoo.probe.features import eval_mode, trunk_features

from ..run import Context
from .config import LinearConfig

__all__ = ["run"]

# (epoch) -> batches of features (N, D) and labels (N,)
Batches = Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def run(context: Context, config: LinearConfig) -> dict[str, Any]:
    """Top-1 and top-5 of the last epoch on the test images, and how the choice was made."""
    pairs = list(itertools.product(config.lr, config.weight_decay))
    if config.protocol == "exact" and len(pairs) > 1:
        raise InputError(
            "The exact protocol trains one classifier: it needs one learning rate and one weight decay.",
            where="lr",
            fix="e.g. --lr 0.3 --weight-decay 1e-6 (SwAV's)",
        )
    queries, labels = context.features("val")
    if config.protocol == "exact":
        center, spread = torch.zeros(queries.shape[1]), torch.ones(queries.shape[1])
        batches, steps = _augmented(context, config)
    else:
        bank, bank_labels = context.features("train")
        center, spread = bank.mean(0), bank.std(0).clamp_min(1e-6)
        bank = (bank - center) / spread
        if len(pairs) > 1:
            pairs = [_choose(bank, bank_labels, context.classes, pairs, config)]
        batches, steps = _cached(bank, bank_labels, config)
    heads, loss = _train(batches, steps, queries.shape[1], context.classes, pairs, config)
    logits = heads((queries - center) / spread)[0]
    diverged = not math.isfinite(loss[0]) or loss[0] > 2 * math.log(context.classes)
    ranked = logits.topk(min(5, context.classes), dim=1).indices == labels[:, None]
    metrics = {
        "top1": float(ranked[:, 0].double().mean()),
        "top5": float(ranked.any(dim=1).double().mean()),
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
    batches, steps = _cached(bank[inside], labels[inside], config)
    heads, _ = _train(batches, steps, bank.shape[1], classes, pairs, config)
    hits = (heads(bank[outside]).argmax(dim=2) == labels[outside]).double().mean(dim=1)
    return pairs[int(hits.nan_to_num(-1.0).argmax())]


def _cached(bank: torch.Tensor, labels: torch.Tensor, config: LinearConfig) -> tuple[Batches, int]:
    size = min(config.batch_size, len(bank))

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.from_numpy(keyed_permutation(keyed_key(config.seed, "linear", epoch), len(bank)))
        for rows in order[: len(bank) // size * size].split(size):
            yield bank[rows], labels[rows]

    return batches, len(bank) // size


def _augmented(context: Context, config: LinearConfig) -> tuple[Batches, int]:
    """SwAV A.3: RandomResizedCrop and flip, through the frozen trunk."""
    how = context.preprocessing
    maker = PlannedViews(crop_and_flip(int(how["crop"])))
    order = EpochOrder(len(context.train), min(config.batch_size, len(context.train)), config.seed)

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = epoch * order.batches
        views = view_batches(
            context.train,
            maker,
            order,
            first_step=first,
            last_step=first + order.batches,
            workers=context.workers,
        )
        for batch in views:
            with eval_mode(context.trunk):
                yield trunk_features(context.trunk, batch.views[0], how), batch.labels

    return batches, order.batches


def _train(
    batches: Batches,
    steps: int,
    features: int,
    classes: int,
    pairs: list[tuple[float, float]],
    config: LinearConfig,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[float]]:
    """One classifier for each (lr, weight decay), all at once.

    Weights N(0, 0.01), bias 0, as in A.3.

    Returns:
        (N, D) -> logits (H, N, classes), and each classifier's loss over the last epoch.
    """
    generator = torch.Generator().manual_seed(keyed_seed(config.seed, "classifier"))
    heads = len(pairs)
    # One matrix for all classifiers: a single product a step, whatever their number.
    weight = torch.randn(features, 1, classes, generator=generator).mul_(0.01).repeat(1, heads, 1).flatten(1)
    bias = torch.zeros(heads * classes)
    rates = torch.tensor([lr for lr, _ in pairs]).repeat_interleave(classes)
    decays = torch.tensor([decay for _, decay in pairs]).repeat_interleave(classes)
    momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]

    def logits_of(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight + bias).view(len(x), heads, classes).transpose(0, 1)

    losses = torch.zeros(heads)
    for epoch in range(config.epochs):
        cosine = 0.5 * (1.0 + math.cos(math.pi * epoch / config.epochs))
        losses = torch.zeros(heads)
        for x, y in batches(epoch):
            log_p = F.log_softmax(logits_of(x), dim=2)
            rows = torch.arange(len(y))
            losses -= log_p[:, rows, y].mean(dim=1) / steps
            slope = log_p.exp()
            slope[:, rows, y] -= 1.0
            slope = slope.transpose(0, 1).reshape(len(y), heads * classes) / len(y)
            for value, gradient, momentum in zip(
                (weight, bias), (x.T @ slope, slope.sum(dim=0)), momenta, strict=True
            ):
                momentum.mul_(0.9).add_(gradient + decays * value)
                value.sub_(rates * cosine * momentum)
    return logits_of, losses.tolist()
