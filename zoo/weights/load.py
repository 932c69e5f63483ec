"""From a reference to a filled trunk: verified and strict."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from ..keyed import keyed_seed
from ..tensors import read_safetensors, seeded
from .bundle import Bundle, read_bundle
from .hubs.local import LocalHub
from .reference import Reference

__all__ = ["STANDARD_PREPROCESSING", "Build", "Loaded", "fill_trunk", "load_trunk", "preprocessing"]

Build = Callable[..., Any]
_FILLS = {torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_}
STANDARD_PREPROCESSING: dict[str, Any] = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "resize": 256,
    "crop": 224,
    "interpolation": "bilinear",
}


@dataclass(frozen=True)
class Loaded:
    """A trunk, what is known of it (plain JSON), and a sentence on how the loading went."""

    trunk: Any
    info: dict[str, Any]
    account: str


def load_trunk(target: Reference, build: Build, *, progress: bool, verify: bool) -> Loaded:
    """A published, random or supervised trunk.

    Args:
        target: what is wanted; a run is not read here (``zoo.loading``).
        build: ``zoo.models.factory.create_trunk``, with the user's arguments in it.
        progress: show a download's progress.
        verify: read and hash every byte even if an earlier check left a receipt.
    """
    if target.kind == "random":
        with seeded(keyed_seed(_random_seed(target), "init")):  # as a pretraining run of that seed starts
            trunk = build(target.name)
        info = {"reference": str(target), "arch": target.name, "preprocessing": STANDARD_PREPROCESSING}
        return Loaded(trunk, info, "random weights")
    if target.kind == "supervised":
        return _supervised(target, build, progress)
    return _from_bundle(_open(target), target, build, verify)


def _random_seed(target: Reference) -> int:
    revision = target.revision or "0"
    if not revision.isdecimal() or int(revision) >= 2**63:
        raise InputError(
            "What follows the @ of a random model is its seed, a whole number below 2**63.", where=str(target)
        )
    return int(revision)


class _NoInitialisation(TorchFunctionMode):
    """Skips what constructors fill tensors with; on the meta device that costs most of the building."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS:
            return args[0]
        return func(*args, **(kwargs or {}))


def fill_trunk(
    build: Build,
    arch: str,
    stem: str,
    base_planes: int | None,
    tensors: dict[str, torch.Tensor],
    where: object,
) -> Any:
    """Build a network without initialising it and put tensors in; every key must match.

    Raises:
        InputError: the tensors don't fit the network.
    """
    importlib.import_module("torchvision.models")  # whatever tensors its import makes must be real ones
    # No memory and no random numbers for values that are replaced anyway.
    with torch.device("meta"), _NoInitialisation():
        first = tensors.get("conv1.weight")
        channels = 3 if first is None else int(first.shape[1])
        model = build(arch, stem=stem, base_planes=base_planes, channels=channels)
    try:
        model.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:400]
        raise InputError(f"The weights don't fit the network ({reason}).", where=where) from None
    return model


def preprocessing(how: dict[str, Any]) -> Callable[[], Any]:
    """A factory of the test transform: PIL image or uint8 tensor -> normalised (3, crop, crop)."""
    from torchvision.transforms._presets import ImageClassification
    from torchvision.transforms.functional import InterpolationMode

    return functools.partial(
        ImageClassification,
        crop_size=int(how["crop"]),
        resize_size=int(how["resize"]),
        mean=tuple(how["mean"]),
        std=tuple(how["std"]),
        interpolation=InterpolationMode(how["interpolation"]),
    )


def _open(target: Reference) -> Bundle:
    if target.kind == "path":
        path = Path(target.name).expanduser().resolve()  # a link that the user typed is his own
        if not path.is_dir():
            raise InputError("There is no such folder.", where=path)
        return read_bundle(path)
    return LocalHub().resolve(target.name, target.revision)


def _from_bundle(bundle: Bundle, target: Reference, build: Build, verify: bool) -> Loaded:
    how = bundle.verify(full=verify)
    info = bundle.info
    tensors = read_safetensors(bundle.weights)
    for name, source in info.get("aliases", {}).get(bundle.weights.name, {}).items():
        tensors[name] = tensors[source]
    trunk = fill_trunk(build, info["arch"], info["stem"], info["base_planes"], tensors, bundle.weights)
    described = {
        "reference": str(target),
        "revision": bundle.path.name,
        "weights_sha256": bundle.weights_sha256,
        **{key: info[key] for key in ("arch", "method", "licence", "preprocessing", "lineage")},
    }
    hashed = "hashes checked" if how == "full" else "hashes checked before, files unchanged"
    count = len(tensors)
    return Loaded(trunk, described, f"{count} of {count} tensors matched, none dropped; {hashed}")


def _supervised(target: Reference, build: Build, progress: bool) -> Loaded:
    from torchvision.models import get_model_weights

    try:
        weights = get_model_weights(target.name)[target.revision or "IMAGENET1K_V1"]
    except (ValueError, KeyError) as error:
        raise InputError(f"torchvision has no such weights ({error}).", where=str(target)) from None
    try:
        state = torch.hub.load_state_dict_from_url(
            weights.url, progress=progress, map_location="cpu", check_hash=True, weights_only=True
        )
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"torchvision's weights are not on this machine and could not be downloaded ({error}).",
            where=str(target),
            fix=f"go online once, or put {Path(weights.url).name} into torch's hub folder (checkpoints)",
        ) from None
    kept = {key: value for key, value in state.items() if not key.startswith("fc.")}
    trunk = fill_trunk(build, target.name, "imagenet", None, kept, target)
    preset = weights.transforms()
    how = {
        "mean": list(preset.mean),
        "std": list(preset.std),
        "resize": preset.resize_size[0],
        "crop": preset.crop_size[0],
        "interpolation": preset.interpolation.value,
    }
    info = {
        "reference": str(target),
        "arch": target.name,
        "preprocessing": how,
        "method": "supervised",
    }
    return Loaded(trunk, info, f"{len(kept)} tensors matched; the classifier (fc) was dropped, as expected")
