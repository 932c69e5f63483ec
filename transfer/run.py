"""Run one transfer recipe: model and data in, ``result.json`` out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from zoo.data.class_index import read_class_index
from zoo.data.decoding import MAX_PIXELS, Decoding
from zoo.data.source import ImageSource
from zoo.engine.precision import choose_device
from zoo.errors import InputError, RunError
from zoo.files import disk_errors, sha256_of
from zoo.loading import load
from zoo.pretrain.environment import describe_environment
from zoo.probe.features import source_features
from zoo.weights.bundle import weights_digest
from zoo.weights.fill import STANDARD_PREPROCESSING
from zoo.weights.reference import parse_reference

from . import RECIPES
from .config import TransferConfig
from .datasets import Labelled, open_labelled
from .results import new_result_path, write_result

__all__ = ["Context", "judge", "open_context", "open_model", "transfer"]

log = logging.getLogger("zoo")


@dataclass
class Context:
    """What the recipes work on: a frozen trunk, and the data. Features are computed once for all of them."""

    model: str
    info: dict[str, Any]
    weights_sha256: str
    trunk: Any
    preprocessing: dict[str, Any]
    labelled: Labelled
    workers: int = 0
    _features: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def train(self) -> ImageSource:
        return self.labelled.train

    @property
    def val(self) -> ImageSource:
        return self.labelled.val

    @property
    def classes(self) -> int:
        return len(self.labelled.classes)

    def features(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Frozen features and labels of ``train`` or ``val`` by the test transform."""
        if part not in self._features:
            source = self.train if part == "train" else self.val
            self._features[part] = source_features(self.trunk, source, self.preprocessing)
        return self._features[part]


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
        how = {**STANDARD_PREPROCESSING, "resize": int(side), "crop": int(side)}
        return RawPixels(), {"reference": reference, "preprocessing": how}, f"pixels-{side}"
    model = load(reference, progress=log.isEnabledFor(logging.INFO))
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
    device: str = "auto",
    max_pixels: int = MAX_PIXELS,
    class_index: str | None = None,
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
        device: where to compute: auto, cpu, cuda, ...
        max_pixels: larger pictures are refused.
        class_index: a file that numbers the classes (``zoo.data.class_index``).

    Returns:
        The content of ``result.json`` with its ``path``.

    Raises:
        InputError: an unknown recipe, setting, model or data set.
        RunError: training diverged; the result is written and says so.
    """
    config = _settings(recipe, settings or {})
    was_there = out is not None and Path(out).exists()
    out = Path(out) if out is not None else new_result_path(recipe, dataset)
    with disk_errors("Making the result's folder", out):  # before the work, not after it
        out.mkdir(parents=True, exist_ok=True)
    try:
        if recipe == "detect":
            _refuse_options(workers=workers, resize=resize, crop=crop, class_index=class_index)
            began = time.monotonic()
            found = RECIPES.code(recipe)(model, dataset, data, config, device)
            what, evidence = found.pop("model"), found.pop("data")
            return _conclude(recipe, model, what, dataset, evidence, config, found, began, out)
        context = open_context(
            model,
            dataset,
            data,
            workers=workers,
            resize=resize,
            crop=crop,
            device=device,
            allow_overlap=config.allow_overlap,
            max_pixels=max_pixels,
            class_index=class_index,
        )
        return judge(recipe, context, config, out)
    except BaseException:
        if not was_there:
            with contextlib.suppress(OSError):  # it holds a result all the same
                out.rmdir()
        raise


def _refuse_options(**options: int | str | None) -> None:
    for name, given in options.items():
        if given:
            raise InputError(
                f"Detection has no {name}: images are resized by min_size and max_size, classes are those of "
                "the annotations.",
                where="--" + name.replace("_", "-"),
            )


def open_context(
    model: str,
    dataset: str,
    data: str | None = None,
    *,
    workers: int = 0,
    resize: int | None = None,
    crop: int | None = None,
    device: str = "auto",
    allow_overlap: bool = False,
    max_pixels: int = MAX_PIXELS,
    class_index: str | None = None,
) -> Context:
    """Open a model and a labelled data set for several recipes; arguments as of ``transfer``."""
    names = None if class_index is None else read_class_index(Path(class_index))
    labelled = open_labelled(dataset, data, allow_overlap, Decoding(max_pixels=max_pixels), names)
    trunk, info, digest = open_model(model)
    trunk.to(choose_device(device))
    how = _sized(info["preprocessing"], resize, crop)
    if len(how["mean"]) != 3:  # what the model was trained on
        decoding = Decoding(channels=len(how["mean"]), max_pixels=max_pixels)
        labelled = open_labelled(dataset, data, allow_overlap, decoding, names)
    return Context(model, info, digest, trunk, how, labelled, workers)


def judge(recipe: str, context: Context, config: TransferConfig, out: Path) -> dict[str, Any]:
    """Run one recipe on an open context and write its result; a recipe that trains the trunk comes last."""
    began = time.monotonic()
    found = RECIPES.code(recipe)(context, config)
    what = {"preprocessing": context.preprocessing, "weights_sha256": context.weights_sha256}
    evidence = {
        "classes": context.classes,
        "class_names": list(context.labelled.classes),  # the test part's labels were mapped to these
        "train": context.train.fingerprint(),
        "val": context.val.fingerprint(),
    }
    return _conclude(recipe, context.model, what, context.labelled.name, evidence, config, found, began, out)


def _conclude(
    recipe: str,
    model: str,
    what: Mapping[str, Any],
    dataset: str,
    evidence: Mapping[str, Any],
    config: TransferConfig,
    found: dict[str, Any],
    began: float,
    out: Path,
) -> dict[str, Any]:
    """Gather a result with its evidence and write it; then stop if it says that training diverged."""
    environment = describe_environment()
    result = {
        "recipe": recipe,
        "model": model if model.startswith("pixels:") else str(parse_reference(model)),
        "weights_sha256": what["weights_sha256"],
        "dataset": Path(dataset).name if "/" in dataset else dataset,
        "metrics": found.pop("metrics"),
        "protocol": _public(config),
        "preprocessing": what["preprocessing"],
        "seeds": [config.seed],
        "data": evidence,
        "details": found,
        "versions": {"zoo": environment["zoo"], **environment["packages"]},
        "machine": {key: environment[key] for key in ("processor", "processors", "threads")},
        "seconds": round(time.monotonic() - began, 2),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = write_result(out, result)
    if found.get("diverged"):
        raise RunError(
            "The training diverged; the result is written and marked as diverged.",
            where=path,
            fix="lower the lr",
        )
    return {**result, "path": str(path)}


def _public(config: TransferConfig) -> dict[str, Any]:
    """The settings, a file by its name and content: results are published, this machine's paths are not."""
    values = config.model_dump(mode="json")
    for name in config.files:
        if values[name]:
            path = Path(values[name]).expanduser()
            values[name] = {"name": path.name, "sha256": sha256_of(path)}
    return values


def _sized(how: Mapping[str, Any], resize: int | None, crop: int | None) -> dict[str, Any]:
    sized = {**how, "resize": resize or how["resize"], "crop": crop or how["crop"]}
    if sized["crop"] > sized["resize"]:
        raise InputError(
            f"The crop ({sized['crop']}) is larger than the resized image ({sized['resize']}).",
            where="--crop",
        )
    return sized


def _settings(recipe: str, settings: Mapping[str, Any]) -> TransferConfig:
    kind = RECIPES.config(recipe)
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
