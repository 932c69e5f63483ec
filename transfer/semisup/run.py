"""The semi-supervised recipe: fine-tune on a balanced share of the labels."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from zoo.data.loader import EpochOrder, view_batches
from zoo.data.source import ImageSource
from zoo.data.views.apply import normalize
from zoo.data.views.maker import PlannedViews
from zoo.data.views.presets import crop_and_flip
from zoo.errors import InputError
from zoo.keyed import keyed_key, keyed_permutation, keyed_seed
from zoo.models.foreign import put_classifier
from zoo.probe.features import source_features
from zoo.tensors import seeded

from ..datasets import SubsetImages
from ..run import Context
from .config import SemisupConfig

__all__ = ["balanced_share", "listed_images", "run"]


def run(context: Context, config: SemisupConfig) -> dict[str, Any]:
    """Top-1 of the last epoch on the test images."""
    if not any(True for _ in context.trunk.parameters()):
        raise InputError(
            "Raw pixels have nothing to fine-tune.",
            where="--model",
            fix="judge them by knn or linear, or pass another model",
        )
    if config.labels:
        chosen = listed_images(context.train, Path(config.labels).expanduser())
    else:
        chosen = balanced_share(context.train, config.fraction, config.seed)
    labelled = SubsetImages(context.train, chosen)
    how = context.preprocessing
    network = context.trunk
    with seeded(keyed_seed(config.seed, "classifier")):
        head = nn.Linear(network.num_features, context.classes)
        nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    device = next(network.parameters()).device
    put_classifier(network, head.to(device))
    trunk_parameters = [p for name, p in network.named_parameters() if not name.startswith("fc.")]
    optimizer = torch.optim.SGD(
        [{"params": trunk_parameters, "lr": config.lr}, {"params": head.parameters(), "lr": config.lr_head}],
        momentum=0.9,
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(config.decay_epochs), config.decay)
    maker = PlannedViews(crop_and_flip(int(how["crop"])))
    order = EpochOrder(len(labelled), min(config.batch_size, len(labelled)), config.seed)
    batches = view_batches(
        labelled, maker, order, first_step=0, last_step=order.batches * config.epochs, workers=context.workers
    )
    network.train()
    total = 0.0
    for step, batch in enumerate(batches):
        images = normalize(batch.views[0].to(device), tuple(how["mean"]), tuple(how["std"]))
        loss = F.cross_entropy(network(images), batch.labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total = float(loss.detach())
        if (step + 1) % order.batches == 0:
            schedule.step()
    logits, labels = source_features(network, context.val, how, 64, finite=False)
    return {
        "metrics": {
            "top1": float((logits.argmax(dim=1) == labels).double().mean()),
            "train_loss": total if math.isfinite(total) else None,
        },
        "labelled_images": len(labelled),
        "head": "the pretraining head was dropped, as expected; the classifier is new",
        "diverged": not math.isfinite(total),
    }


def listed_images(source: ImageSource, file: Path) -> list[int]:
    """Ids of the training images named in a text file (the form of SimCLR's ``1percent.txt``), sorted.

    A name may have its class's folder before it.

    Raises:
        InputError: a list that can't be read or is empty, a name that no image has, or that two have.
    """
    try:
        names = [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The list of labelled images can't be read ({error}).", where=file) from None
    if not names:
        raise InputError("The list of labelled images is empty.", where=file)
    ids: dict[str, list[int]] = defaultdict(list)
    for index in range(len(source)):
        path = Path(source.where(index))
        ids[path.name].append(index)
        ids[f"{path.parent.name}/{path.name}"].append(index)
    absent = [name for name in names if name not in ids]
    if absent:
        raise InputError(
            f"{len(absent)} of {len(names)} listed images are not in the training set; the first is {absent[0]}.",
            where=file,
            fix=f"the names are compared with those of the files in {source.name}",
        )
    doubled = [name for name in names if len(ids[name]) > 1]
    if doubled:
        raise InputError(
            f"Several training images are called {doubled[0]}.",
            where=file,
            fix="name them with their class's folder: class/name",
        )
    return sorted({ids[name][0] for name in names})


def balanced_share(source: ImageSource, fraction: float, seed: int) -> list[int]:
    """Ids of the same share of every class (at least one image each), drawn by key, sorted."""
    labels = np.array([source.label(index) for index in range(len(source))])
    chosen: list[int] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = keyed_permutation(keyed_key(seed, "labelled", int(label)), len(members))
        chosen += members[order[: max(1, round(fraction * len(members)))]].tolist()
    return sorted(chosen)
