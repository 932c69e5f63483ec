"""Several recipes, seeds and models on one data set: ``zoo transfer all``."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torchvision.models.resnet import ResNet

from zoo.data.decoding import MAX_PIXELS
from zoo.engine.precision import choose_device
from zoo.errors import InputError, RunError, did_you_mean
from zoo.files import disk_errors, write_json
from zoo.keyed import keyed_seed
from zoo.models.factory import create_trunk, is_resnet
from zoo.tensors import seeded
from zoo.weights.bundle import weights_digest

from . import RECIPES
from .compare import groups_of
from .config import TransferConfig
from .labels import labels_of
from .multilabel import refuse_multilabel
from .results import new_result_path
from .run import Context, judge, open_context, open_model, settings_of, sized

__all__ = ["SINGLE", "Part", "run_suite", "twin"]

log = logging.getLogger("zoo")

_SEVERAL_CLASSES = ("builtin:photos-voc", "voc07", "voc2007")


@dataclass(frozen=True, eq=False)
class Part:
    """One recipe of the suite; what draws nothing runs for the first seed alone."""

    label: str
    recipe: str
    settings: Mapping[str, Any]
    draws: bool = True


# Parts of one model share its features, whichever come first; what trains the trunk has a copy of it.
SINGLE = (
    Part("knn", "knn", {}, draws=False),
    Part("linear", "linear", {"protocol": "cached"}),
    Part("semisup-10", "semisup", {"fraction": 0.1}),
    Part("semisup-1", "semisup", {"fraction": 0.01}),
)
SEVERAL = (Part("svm", "svm", {}, draws=False), Part("lowshot", "lowshot", {}))


def run_suite(
    models: Sequence[str],
    dataset: str,
    data: str | None = None,
    *,
    seeds: Sequence[int] = (0,),
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    workers: int = 0,
    resize: int | None = None,
    crop: int | None = None,
    device: str = "auto",
    max_pixels: int = MAX_PIXELS,
    class_index: str | None = None,
    cache_features: bool = False,
) -> dict[str, Any]:
    """Judge models by every recipe that the data allow.

    Images of one class each: kNN, linear on kept features, semi-supervised with 10 % and 1 % of the labels.
    Images of several classes each: SVMs on all and on few of them. Features are computed once for each model.

    Args:
        models: references; ``random:`` is the first one's network with random weights, ``supervised:`` its
            architecture's supervised weights.
        dataset: a data set's name, or a folder.
        data: the folder that holds the data set.
        seeds: of every draw; a mean and a deviation are taken over them.
        settings: values for all recipes that have them, e.g. ``epochs``.
        out: folder of the results and of ``suite.json``; a fresh one below ``results`` by default.
        workers, resize, crop, device, max_pixels, class_index, cache_features: see ``transfer.run.transfer``.

    Returns:
        The content of ``suite.json`` with its ``path``: ``groups`` (see ``transfer.compare.groups_of``), the
        ``results``' folders, what was ``skipped`` and what ``failed``, both with the reason.

    Raises:
        InputError: an unknown model or data set, or seeds given twice.
    """
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise InputError("Seeds are whole numbers from 0 on, each once.", where="--seeds", fix="e.g. 0,1,2")
    several = _several_classes(data or dataset)
    parts = SEVERAL if several else SINGLE
    planned = {part: [_config(part, seed, settings or {}) for seed in seeds] for part in parts}
    _refuse_unknown(settings or {}, parts)
    how: dict[str, Any] = {"workers": workers, "resize": resize, "crop": crop, "device": device}
    how |= {"max_pixels": max_pixels, "class_index": class_index, "cache_features": cache_features}
    how |= {"allow_overlap": bool((settings or {}).get("allow_overlap", False))}
    if several:
        how["image_sets"] = RECIPES.config("svm")().image_sets
    first = open_context(models[0], dataset, data, **how)
    contexts = [first, *(_beside(first, name, resize, crop, device) for name in models[1:])]
    folder = Path(out) if out is not None else new_result_path("all", dataset)
    found, skipped, failed = [], list[str](), list[str]()
    for number, context in enumerate(contexts):
        for part, configs in planned.items():
            why = _why_not(part, context)
            if why:
                skipped.append(f"{part.label} of {context.model}: {why}")
                log.info("skipped: %s", skipped[-1])
                continue
            for config in configs if part.draws else configs[:1]:
                seed, mine = config.seed, context
                if not config.frozen_trunk:
                    mine = dataclasses.replace(context, trunk=copy.deepcopy(context.trunk))
                place = folder / f"{number}-{part.label}-{seed}"
                log.info("%s of %s, seed %d", part.label, context.model, seed)
                try:
                    found.append(judge(part.recipe, mine, config, place))
                except RunError as error:
                    failed.append(f"{part.label} of {context.model}, seed {seed}: {error.what}")
                    log.warning("%s", failed[-1])
    summary: dict[str, Any] = {
        "schema": 1,
        "dataset": first.labelled.name,
        "models": [context.model for context in contexts],
        "seeds": list(seeds),
        "groups": groups_of(found),
        "results": [Path(result["path"]).parent.name for result in found],
        "skipped": skipped,
        "failed": failed,
    }
    with disk_errors("Writing the suite's summary", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "suite.json", {**summary, "dataset": Path(summary["dataset"]).name})
    return {**summary, "path": str(folder / "suite.json")}


def _several_classes(name: str) -> bool:
    if name in _SEVERAL_CLASSES:
        return True
    try:
        refuse_multilabel(name)
    except InputError:
        return True
    return False


def _config(part: Part, seed: int, settings: Mapping[str, Any]) -> TransferConfig:
    known = RECIPES.config(part.recipe).model_fields
    mine = {name: value for name, value in settings.items() if name in known}
    return settings_of(part.recipe, {**mine, **part.settings, "seed": seed})


def _refuse_unknown(settings: Mapping[str, Any], parts: Sequence[Part]) -> None:
    known = {name for part in parts for name in RECIPES.config(part.recipe).model_fields}
    for name in settings:
        if name not in known:
            raise InputError(
                "None of the recipes has this setting.",
                where=name,
                fix=did_you_mean(name, known) + "known: " + ", ".join(sorted(known)),
            )


def _why_not(part: Part, context: Context) -> str:
    """Why a part can't be run, or nothing."""
    if part.recipe == "semisup":
        if not any(True for _ in context.trunk.parameters()):
            return "there is nothing to fine-tune"
        largest = int(np.bincount(labels_of(context.train)).max())
        if part.settings["fraction"] * largest < 1:
            return f"that share of the largest class ({largest} images) is less than an image"
    return ""


def _beside(first: Context, name: str, resize: int | None, crop: int | None, device: str) -> Context:
    """Another model on the same images."""
    if name == "random:":
        return twin(first)
    if name == "supervised:":
        name = f"supervised:{first.info.get('arch', '')}"
    trunk, info, digest = open_model(name)
    how = sized(info["preprocessing"], resize, crop)
    if len(how["mean"]) != len(first.preprocessing["mean"]):
        raise InputError(
            "The models are for images of different channels.", where=name, fix="judge them apart"
        )
    trunk.to(choose_device(device))
    return Context(name, info, digest, trunk, how, first.labelled, first.workers, first.cache)


def twin(context: Context, seed: int = 0) -> Context:
    """The same network with random weights, as a pretraining run of that seed starts, on the same images.

    Raises:
        InputError: not one of the zoo's ResNets.
    """
    trunk, arch = context.trunk, str(context.info.get("arch", ""))
    if not isinstance(trunk, ResNet) or not is_resnet(arch):
        raise InputError(
            f"What {arch or context.model} looks like with random weights isn't known.",
            where="random:",
            fix="name a network: random:resnet50",
        )
    with seeded(keyed_seed(seed, "init")):
        fresh = create_trunk(arch)
    shapes = {key: value.shape for key, value in trunk.state_dict().items()}
    name = arch
    if {key: value.shape for key, value in fresh.state_dict().items()} != shapes:
        small = trunk.conv1.kernel_size == (3, 3)
        stem = "imagenet" if not small else "small" if isinstance(trunk.maxpool, nn.Identity) else "medium"
        planes, channels = trunk.conv1.out_channels, trunk.conv1.in_channels
        with seeded(keyed_seed(seed, "init")):
            fresh = create_trunk(arch, stem=stem, base_planes=planes, channels=channels)
        name = f"{arch}+{stem}+{planes}"
    fresh.to(next(trunk.parameters()).device)
    info: dict[str, Any] = {
        "reference": f"random:{name}@{seed}",
        "arch": arch,
        "preprocessing": context.preprocessing,
    }
    return dataclasses.replace(
        context,
        model=info["reference"],
        info=info,
        weights_sha256=weights_digest(fresh.state_dict()),
        trunk=fresh,
        _features={},
    )
