"""Fine-tuning a whole network with a new classifier: what semi-supervised learning and ``finetune`` share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo.data.loader import EpochOrder, view_batches
from zoo.data.source import ImageSource
from zoo.data.views.apply import normalize
from zoo.data.views.maker import PlannedViews
from zoo.data.views.presets import crop_and_flip
from zoo.errors import InputError
from zoo.keyed import keyed_seed
from zoo.models.foreign import put_classifier
from zoo.probe.features import source_features
from zoo.probe.scores import true_ranks
from zoo.tensors import seeded

from ..intervals import accuracies
from ..linear.common import described
from ..run import Context
from .config import TuningConfig

__all__ = ["check_tunable", "fine_tune"]

_CHEAPER = 4


def check_tunable(context: Context, labelled: int) -> None:
    """Refuse what can't be fine-tuned, before any work.

    Raises:
        InputError: no parameters, or fewer than two labelled images.
    """
    if not any(True for _ in context.trunk.parameters()):
        raise InputError(
            "Raw pixels have nothing to fine-tune.",
            where="--model",
            fix="judge them by knn or linear, or pass another model",
        )
    if labelled < 2:
        raise InputError(
            "BatchNorm needs batches of two images, and a single one is labelled.",
            where=context.train.name,
            fix="label more images, or judge frozen features (knn)",
        )


def fine_tune(context: Context, labelled: ImageSource, config: TuningConfig) -> dict[str, Any]:
    """Train the context's trunk and a new classifier on labelled images; test after each epoch.

    Args:
        context: the trunk, which is changed, and the test images.
        labelled: what to train on.
        config: a settled one.

    Returns:
        Hits of the last epoch, accuracies of the last and the best one, and how it was trained.
    """
    network, how = context.trunk, context.preprocessing
    with seeded(keyed_seed(config.seed, "classifier")):
        head = nn.Linear(network.num_features, context.classes)
        nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    device = next(network.parameters()).device
    put_classifier(network, head.to(device))
    trunk = [p for name, p in network.named_parameters() if not name.startswith("fc.")]
    groups = [{"params": trunk, "lr": config.lr}, {"params": head.parameters(), "lr": config.lr_head}]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=config.weight_decay)
    plan = crop_and_flip(int(how["crop"]))
    order = EpochOrder(len(labelled), min(config.batch_size, len(labelled)), config.seed)
    steps = order.batches * config.epochs
    steps = min(steps, config.limit) if config.limit else steps
    batches = view_batches(
        labelled, PlannedViews(plan), order, first_step=0, last_step=steps, workers=context.workers
    )
    tests = _Tests(context)
    rates: list[list[float]] = []
    losses = torch.zeros(steps)
    factors = config.factors()
    network.train()
    for step, batch in enumerate(batches):
        epoch, place = divmod(step, order.batches)
        if place == 0:
            for group, base in zip(optimizer.param_groups, (config.lr, config.lr_head), strict=True):
                group["lr"] = base * factors[epoch]
            rates.append([group["lr"] for group in optimizer.param_groups])
        images = normalize(batch.views[0].to(device), tuple(how["mean"]), tuple(how["std"]))
        loss = F.cross_entropy(network(images), batch.labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        if place == order.batches - 1 or step == steps - 1:
            tests.after_epoch(epoch, order.batches * order.batch_size, network, last=step == steps - 1)
    last = float(losses[(len(rates) - 1) * order.batches :].mean())
    found = tests.judged()
    found["metrics"]["train_loss"] = last if math.isfinite(last) else None
    return {
        **found,
        "labelled_images": len(labelled),
        "head": "the pretraining head was dropped, as expected; the classifier is new",
        "rates": rates,
        "optimizer": {
            "kind": "SGD",
            "momentum": 0.9,
            "groups": [len(g["params"]) for g in optimizer.param_groups],
        },
        "train_view": described(plan),
        "test_view": {name: how.get(name) for name in ("resize", "crop", "interpolation", "mean", "std")},
        "diverged": not last <= 2 * math.log(max(2, context.classes)),
    }


class _Tests:
    """The test after each epoch, or after every few where epochs are so short that testing would take longest.

    A pass over the test images is cheaper than training on as many, by about four (there is nothing to
    differentiate): one is due when a quarter as many were trained on. In the paper's protocols that is each epoch.
    The network is given back in train mode.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since = 0
        self._epochs: list[int] = []
        self._ranks: list[torch.Tensor] = []

    def after_epoch(self, epoch: int, images: int, network: nn.Module, last: bool) -> None:
        self._since += images
        if not last and _CHEAPER * self._since < len(self._context.val):
            return
        self._since = 0
        how = self._context.preprocessing
        logits, labels = source_features(network, self._context.val, how, 64, finite=False)
        self._epochs.append(epoch + 1)
        self._ranks.append(true_ranks(logits, labels))

    def judged(self) -> dict[str, Any]:
        every = [accuracies({"top1": ranks < 1, "top5": ranks < 5}) for ranks in self._ranks]
        best = max(range(len(every)), key=lambda number: every[number]["top1"])
        return {
            "hits": {"top1": self._ranks[-1] < 1, "top5": self._ranks[-1] < 5},
            "metrics": {**every[-1], **{f"best_{name}": value for name, value in every[best].items()}},
            "last_epoch": self._epochs[-1],
            "best_epoch": self._epochs[best],
            "tested_epochs": self._epochs,
            "reported": "top1 and top5 are the last epoch's; the best epoch is the best on the test images",
        }
