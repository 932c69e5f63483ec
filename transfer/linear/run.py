"""The linear recipe: SGD on frozen features, a grid of heads at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from zoo.data.views.presets import crop_and_flip
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation
from zoo.probe.features import source_features
from zoo.probe.linear import FINAL, Head, LinearHeads, diverged, shuffled, train_heads

from ..datasets import SubsetImages
from ..run import Context
from .amdim import run_evaluators
from .common import Curve, augmented, described
from .config import LinearConfig

__all__ = ["held_out_rows", "run"]


def run(context: Context, config: LinearConfig) -> dict[str, Any]:
    """Top-1 and top-5 of the last and of the best epoch on the test images, and how the head was chosen.

    Raises:
        InputError: a stage that the network doesn't have, several values where a protocol chooses nothing, or
            too few images to hold some out.
    """
    config = config.settled(len(context.train))
    heads = [
        Head(lr, decay, stage, norm)
        for stage, norm, lr, decay in itertools.product(
            config.stages, config.norms, config.lr, config.weight_decay
        )
    ]
    if config.protocol.startswith("amdim"):
        if len(heads) > 1:
            raise InputError(
                f"The {config.protocol} protocol chooses nothing: it needs one learning rate and one weight decay.",
                where="lr",
                fix="leave both out for AMDIM's, or give one of each",
            )
        return {"settled": config, **run_evaluators(context, config)}
    widths = _widths(context, config)
    found = (_cached if config.protocol == "cached" else _streamed)(context, config, heads, widths)
    how = context.preprocessing
    return {
        "settled": config,
        "optimizer": {"kind": "SGD", "momentum": 0.9, "schedule": "steps" if config.drop_at else "cosine"},
        "test_view": {name: how.get(name) for name in ("resize", "crop", "interpolation", "mean", "std")},
        **found,
    }


def _widths(context: Context, config: LinearConfig) -> dict[str, int]:
    """Of each stage, how many features; unknown ones are refused before any work."""
    network = context.staged(config.stages)
    if network is not context.trunk:
        return dict(network.widths)
    known = getattr(network, "num_features", None)  # raw pixels don't know
    return {FINAL: known or context.features("val")[0].shape[1]}


def _cached(
    context: Context, config: LinearConfig, heads: list[Head], widths: Mapping[str, int]
) -> dict[str, Any]:
    """Choose on features that are kept, then train the chosen head on all of them."""
    plain, labels = context.features("train", config.stages)
    views = [context.features("train", config.stages, v, config.seed)[0] for v in range(config.views)]
    bank = torch.stack([plain, *views]) if views else plain

    def trained(mine: list[Head], rows: torch.Tensor | None, curve: bool) -> tuple[LinearHeads, Any, Any]:
        batches, _ = shuffled(bank, labels, config.batch_size, config.seed, rows)
        classifiers = LinearHeads(widths, context.classes, mine, config.seed)
        classifiers.standardize(plain)
        after = Curve(classifiers, *context.features("val", config.stages)) if curve else None
        losses = train_heads(classifiers, batches, config.factors(), after, config.limit)
        return classifiers, losses, after

    choice: dict[str, Any] = {}
    if len(heads) > 1:
        held, rest = (torch.from_numpy(rows) for rows in held_out_rows(labels, config.held_out, config.seed))
        classifiers, losses, _ = trained(heads, rest, curve=False)
        number, choice = _best(classifiers, plain[held], labels[held], losses, context.classes)
        heads = [heads[number]]
        choice["trained_again_on_all"] = True
    classifiers, losses, curve = trained(heads, None, curve=True)
    plan = described(crop_and_flip(int(context.preprocessing["crop"]))) if config.views else None
    kept = {"train_view": plan, "kept_views": {"center": 1, "random": config.views}}
    return {**_judged(config, curve, heads, 0, losses, context.classes), **choice, **kept}


def _streamed(
    context: Context, config: LinearConfig, heads: list[Head], widths: Mapping[str, int]
) -> dict[str, Any]:
    """Train all heads on fresh views; of several the one that is best on held-out images is judged."""
    source, network = context.train, context.staged(config.stages)
    held = None
    if len(heads) > 1:
        labels = torch.tensor([source.label(index) for index in range(len(source))])
        apart, rest = held_out_rows(labels, config.held_out, config.seed)
        held, source = SubsetImages(source, apart.tolist()), SubsetImages(source, rest.tolist())
    plan = crop_and_flip(int(context.preprocessing["crop"]))
    batches, _ = augmented(context, source, plan, config.batch_size, config.seed, network)
    classifiers = LinearHeads(widths, context.classes, heads, config.seed)
    curve = Curve(classifiers, *context.features("val", config.stages))
    losses = train_heads(classifiers, batches, config.factors(), curve, config.limit)
    number, choice = 0, dict[str, Any]()
    if held is not None:
        asked = source_features(network, held, context.preprocessing)
        number, choice = _best(classifiers, *asked, losses, context.classes)
        choice["trained_again_on_all"] = False
    view = {"train_view": described(plan), "trained_on": len(source)}
    return {**_judged(config, curve, heads, number, losses, context.classes), **choice, **view}


def _judged(
    config: LinearConfig, curve: Curve, heads: list[Head], number: int, losses: torch.Tensor, classes: int
) -> dict[str, Any]:
    found = curve.judged(number)
    last = float(losses[-1, number])
    found["metrics"]["train_loss"] = last if math.isfinite(last) else None
    return {
        **found,
        "chosen": asdict(heads[number]),
        "rates": [heads[number].lr * factor for factor in config.factors()[: len(losses)]],
        "diverged": bool(diverged(losses, classes)[number]),
    }


def _best(
    classifiers: LinearHeads, x: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, classes: int
) -> tuple[int, dict[str, Any]]:
    """The head that does best on held-out images, a diverged one only if all are; and how all of them did."""
    hits = (classifiers.ranks(x, labels) < 1).double().mean(dim=1)
    wild = diverged(losses, classes)
    number = int((hits - 2.0 * wild).argmax())
    grid = [
        {**asdict(head), "top1": float(hit), "diverged": bool(bad)}
        for head, hit, bad in zip(classifiers.heads, hits, wild, strict=True)
    ]
    return number, {"held_out": len(labels), "held_out_top1": float(hits[number]), "grid": grid}


def held_out_rows(labels: torch.Tensor, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which training images are held out to choose by, and the rest: int64, by key.

    Every class keeps an image in the rest. The test images take no part.

    Raises:
        InputError: no class has two images.
    """
    order = keyed_permutation(keyed_key(seed, "held-out"), len(labels))
    _, lasts = np.unique(labels.numpy()[order][::-1], return_index=True)
    stays = np.zeros(len(order), dtype=bool)
    stays[len(order) - 1 - lasts] = True  # the last of each class
    if stays.all():
        raise InputError(
            "No image can be held out: every class has a single one.",
            where="held_out",
            fix="give one learning rate, weight decay, stage and norm: then nothing is chosen",
        )
    taken = np.flatnonzero(~stays)[: max(1, round(share * len(order)))]
    stays[:] = True
    stays[taken] = False
    return order[taken], order[stays]
