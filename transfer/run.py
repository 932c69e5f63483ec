"""Run one transfer recipe: model and data in, ``result.json`` out."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from zoo.data.source import ImageSource
from zoo.errors import InputError, RunError
from zoo.loading import load
from zoo.pretrain.environment import describe_environment
from zoo.probe.features import source_features
from zoo.weights.bundle import weights_digest
from zoo.weights.reference import parse_reference

from . import config_class, recipe_function
from .config import TransferConfig
from .datasets import open_labelled
from .results import new_result_path, write_result

__all__ = ["Context", "open_model", "transfer"]

log = logging.getLogger("zoo")


@dataclass
class Context:
    """What a recipe works on: a trunk of its own, and the data."""

    trunk: Any
    preprocessing: dict[str, Any]
    train: ImageSource
    val: ImageSource
    classes: int
    workers: int
    batch_size: int
    _cache: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def features(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Frozen features and labels of ``train`` or ``val`` by the test transform, computed once."""
        if part not in self._cache:
            source = self.train if part == "train" else self.val
            self._cache[part] = source_features(self.trunk, source, self.preprocessing, self.batch_size)
        return self._cache[part]


class RawPixels(nn.Flatten):
    """No network at all: an image's normalised pixels are its features."""


def open_model(reference: str) -> tuple[Any, dict[str, Any], str]:
    """A model, what is known of it, and the SHA-256 of its weights.

    Besides what ``zoo.load`` accepts: ``pixels:SIDE``, raw pixels of the image at that size.
    """
    kind, _, side = reference.partition(":")
    if kind == "pixels":
        if not side.isdigit() or int(side) < 1:
            raise InputError("Raw pixels need a side in pixels.", where=reference, fix="e.g. pixels:48")
        how = {
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "resize": int(side),
            "crop": int(side),
            "interpolation": "bilinear",
        }
        return RawPixels(), {"reference": reference, "preprocessing": how}, f"pixels-{side}"
    model = load(reference)
    digest = model.zoo_info.get("weights_sha256") or weights_digest(model.state_dict())
    return model, model.zoo_info, digest


def transfer(
    recipe: str,
    *,
    model: str,
    dataset: str = "builtin:photos",
    data: str | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    workers: int = 0,
    resize: int | None = None,
    crop: int | None = None,
) -> dict[str, Any]:
    """Judge a model by one recipe.

    Args:
        recipe: a name in ``transfer.RECIPES``.
        model: a reference (``zoo.load``), or ``pixels:SIDE``.
        dataset: a data set's name, or a folder.
        data: the folder that holds the data set.
        settings: values of the recipe's config.
        out: folder of ``result.json``; a fresh one below ``results`` by default.
        workers: data processes.
        resize: shorter side of test images in pixels, if not the model's own.
        crop: side of their central crop, if not the model's own.

    Returns:
        The content of ``result.json`` with its ``path``.

    Raises:
        InputError: an unknown recipe, setting, model or data set.
        RunError: training diverged; the result is written and says so.
    """
    config = _settings(recipe, settings or {})
    began = time.monotonic()
    if recipe == "detect":
        found = recipe_function(recipe)(model, dataset, data, config, workers)
        what = found.pop("model")
        evidence = found.pop("data")
    else:
        labelled = open_labelled(dataset, data, config.allow_overlap)
        trunk, info, digest = open_model(model)
        context = Context(
            trunk=trunk,
            preprocessing=_sized(info["preprocessing"], resize, crop),
            train=labelled.train,
            val=labelled.val,
            classes=len(labelled.classes),
            workers=workers,
            batch_size=64,
        )
        found = recipe_function(recipe)(context, config)
        what = {**info, "preprocessing": context.preprocessing, "weights_sha256": digest}
        evidence = {
            "classes": len(labelled.classes),
            "class_names": list(labelled.classes),  # the test part's labels were mapped to these
            "train": labelled.train.fingerprint(),
            "val": labelled.val.fingerprint(),
        }
    environment = describe_environment()
    result = {
        "recipe": recipe,
        "model": str(parse_reference(model)) if not model.startswith("pixels:") else model,
        "weights_sha256": what["weights_sha256"],
        "dataset": Path(dataset).name if "/" in dataset else dataset,
        "metrics": found.pop("metrics"),
        "protocol": config.model_dump(mode="json"),
        "preprocessing": what["preprocessing"],
        "seeds": [config.seed],
        "data": evidence,
        "details": found,
        "versions": {"zoo": environment["zoo"], **environment["packages"]},
        "machine": {key: environment[key] for key in ("processor", "processors", "threads")},
        "seconds": round(time.monotonic() - began, 2),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = write_result(Path(out) if out is not None else new_result_path(recipe, dataset), result)
    if found.get("diverged"):
        raise RunError(
            "The training diverged; the result is written and marked as diverged.",
            where=path,
            fix="lower the lr",
        )
    return {**result, "path": str(path)}


def _sized(how: Mapping[str, Any], resize: int | None, crop: int | None) -> dict[str, Any]:
    sized = {**how, "resize": resize or how["resize"], "crop": crop or how["crop"]}
    if sized["crop"] > sized["resize"]:
        raise InputError(
            f"The crop ({sized['crop']}) is larger than the resized image ({sized['resize']}).",
            where="--crop",
        )
    return sized


def _settings(recipe: str, settings: Mapping[str, Any]) -> TransferConfig:
    kind = config_class(recipe)
    try:
        return kind.model_validate(dict(settings))  # type: ignore[no-any-return]
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        known = ", ".join(kind.model_fields)
        raise InputError(
            f"A setting doesn't fit: {problem['msg']}.",
            where=f"{recipe}: {key}",
            fix=f"known settings: {known}",
        ) from None
