"""AMDIM's evaluators on a frozen trunk: a linear and an MLP classifier, trained beside each other.

Source: AMDIM's released code (``task_classifiers.py``; ``test_model`` and ``weight_init`` in ``utils.py``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zoo.data.views.params import CropSpec, ViewPlan
from zoo.data.views.presets import find_preset
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation, keyed_seed
from zoo.models.heads import feature_classifier
from zoo.pretrain.losses.amdim import classifier_cost
from zoo.probe.features import eval_mode, source_features
from zoo.probe.scores import true_ranks
from zoo.tensors import kept_buffers, seeded

from ..datasets import SubsetImages
from ..intervals import accuracies
from ..run import Context
from .common import augmented
from .config import LinearConfig

__all__ = ["amdim_view", "norms_learning", "run_evaluators"]

_HIDDEN, _DROPOUT = 1024, 0.2  # of the MLP
_BETAS = (0.8, 0.999)
_REFRESHED = 50  # batches of test images that the norms see before a test
_FLATTERS = (
    "the authors' protocol: the trunk's BatchNorm uses each batch's statistics in training, and test images "
    f"(up to {_REFRESHED} batches) make those that the test uses; the clean protocol is amdim"
)


def run_evaluators(context: Context, config: LinearConfig) -> dict[str, Any]:
    """Top-1 and top-5 of both classifiers after the last epoch; the trunk is left as it was, buffers included.

    All test images are judged, where the reference leaves the last short batch out.

    Raises:
        InputError: too few images for a batch, or no BatchNorm to be in train mode.
    """
    learning = config.protocol == "amdim-train-bn"
    if min(config.batch_size, len(context.train)) < 2:
        raise InputError(
            "The MLP's BatchNorm needs batches of two images or more.",
            where="batch_size",
            fix="--batch-size 2 or more, and as many training images",
        )
    if learning and not _norms(context.trunk):
        raise InputError(
            "This trunk has no BatchNorm that could be in train mode.",
            where="--protocol amdim-train-bn",
            fix="--protocol amdim, the clean protocol, is for any trunk",
        )
    mode = norms_learning if learning else eval_mode
    plan = amdim_view(int(context.preprocessing["crop"]), len(context.preprocessing["mean"]))
    batches, steps = augmented(context, context.train, plan, config.batch_size, config.seed, mode=mode)
    # Dropout draws from this seed, too.
    with kept_buffers(context.trunk), seeded(keyed_seed(config.seed, "classifier")):
        features = context.trunk.num_features if learning else context.features("val")[0].shape[1]
        classifiers = _classifiers(features, context.classes)
        optimizer = torch.optim.Adam(
            classifiers.parameters(), config.lr[0], betas=_BETAS, weight_decay=config.weight_decay[0]
        )
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(config.drop_at), config.drop)
        losses = torch.zeros(len(classifiers))
        for epoch in range(config.epochs):
            losses.zero_()
            for x, labels in batches(epoch):
                costs = torch.stack([classifier_cost(each(x), labels) for each in classifiers.values()])
                optimizer.zero_grad()
                costs.sum().backward()
                optimizer.step()
                losses += costs.detach() / steps
            schedule.step()
        if learning:
            _refresh(context, config, classifiers)
            queries, labels = source_features(context.trunk, context.val, context.preprocessing)
        else:
            queries, labels = context.features("val")
    classifiers.eval()
    metrics: dict[str, float | None] = {}
    hits: dict[str, torch.Tensor] = {}
    for name, loss in zip(classifiers, losses.tolist(), strict=True):
        start = "" if name == "linear" else f"{name}_"
        with torch.no_grad():
            ranks = true_ranks(classifiers[name](queries), labels)
        mine = {f"{start}top{n}": ranks < n for n in (1, 5)}
        hits |= mine
        metrics |= accuracies(mine)
        metrics[f"{start}train_loss"] = loss if math.isfinite(loss) else None
    return {
        "hits": hits,
        "metrics": metrics,
        "trunk": "BatchNorm in train mode, all else in eval mode" if learning else "eval mode",
        "flatters": _FLATTERS if learning else None,
        "diverged": not bool((losses <= 2 * math.log(context.classes)).all()),
    }


def amdim_view(size: int, channels: int = 3) -> ViewPlan:
    """One view of a training image by AMDIM's distortions for about that size; of other channels no colours.

    Args:
        size: of the view, in pixels.
        channels: of the images.
    """
    nearest = min((128, 64, 32), key=lambda known: abs(known - size))
    plan = find_preset(f"amdim-{nearest}").plan
    first = plan.crops[0]
    plan = replace(plan, crops=(CropSpec(size, first.min_scale, first.max_scale),))
    if channels == 3:
        return plan
    return replace(plan, gray_p=0.0, jitter=(*plan.jitter[:2], 0.0, 0.0))


@contextlib.contextmanager
def norms_learning(trunk: nn.Module) -> Iterator[None]:
    """BatchNorm in train mode, all else in eval mode, without gradients; modes are put back."""
    before = [(module, module.training) for module in trunk.modules()]
    trunk.eval()
    for norm in _norms(trunk):
        norm.train()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in before:
            module.training = mode


def _norms(trunk: nn.Module) -> list[_BatchNorm]:
    return [module for module in trunk.modules() if isinstance(module, _BatchNorm)]


def _classifiers(features: int, classes: int) -> nn.ModuleDict:
    """Fresh ones; what the reference draws the scale of the MLP's norm from is its own."""
    mlp = feature_classifier(features, classes, _HIDDEN, _DROPOUT)
    for norm in _norms(mlp):
        nn.init.uniform_(norm.weight)
    return nn.ModuleDict({"linear": feature_classifier(features, classes), "mlp": mlp})


def _refresh(context: Context, config: LinearConfig, classifiers: nn.ModuleDict) -> None:
    """Before a test the reference shows test images to all norms, the MLP's included."""
    size = min(config.batch_size, len(context.val))
    order = keyed_permutation(keyed_key(config.seed, "refresh"), len(context.val))
    shown = SubsetImages(context.val, order[: min(_REFRESHED, len(order) // size) * size].tolist())
    seen, _ = source_features(context.trunk, shown, context.preprocessing, size, mode=norms_learning)
    if size > 1:
        with torch.no_grad():
            for rows in seen.split(size):
                classifiers["mlp"](rows)
