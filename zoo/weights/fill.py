"""A network built around tensors that exist already, and the transform that belongs to them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from ..models.factory import TRUNKS
from ..tensors import seeded
from .formats.base import Network

__all__ = ["STANDARD_PREPROCESSING", "Build", "copy_into", "fill_trunk", "preprocessing"]

Build = Callable[..., Any]
_FIRST = ("conv1.weight", "layer_list.0.conv.weight")  # the layer that sees the images
_FILLS = {torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_}
STANDARD_PREPROCESSING: dict[str, Any] = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "resize": 256,
    "crop": 224,
    "interpolation": "bilinear",
}


class _NoInitialisation(TorchFunctionMode):
    """Skips what constructors fill tensors with; on the meta device that costs most of the building."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS:
            return args[0]
        return func(*args, **(kwargs or {}))


def fill_trunk(
    build: Build,
    network: Network,
    tensors: Mapping[str, torch.Tensor],
    where: object,
    how: Mapping[str, Any] = STANDARD_PREPROCESSING,
) -> Any:
    """Build a network without initialising it and put tensors in; every key must match.

    Args:
        build: ``zoo.models.factory.create_trunk``, perhaps with a user's arguments in it.
        network: which network.
        tensors: its state dict.
        where: what they were read from, for messages.
        how: its preprocessing, which tells a network of timm's or of the user's own how many channels and
            pixels it takes.

    Raises:
        InputError: the tensors don't fit the network.
    """
    model = _built(build, network, tensors) if network.arch in TRUNKS else _built_foreign(build, network, how)
    try:
        model.load_state_dict(dict(tensors), strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:400]
        raise InputError(f"The weights don't fit the network ({reason}).", where=where) from None
    return model


def _built(build: Build, network: Network, tensors: Mapping[str, torch.Tensor]) -> Any:
    importlib.import_module("torchvision.models")  # whatever tensors its import makes must be real ones
    # No memory and no random numbers for values that are replaced anyway.
    with torch.device("meta"), _NoInitialisation():
        first = next((tensors[name] for name in _FIRST if name in tensors), None)
        channels = 3 if first is None else int(first.shape[1])
        return build(
            network.arch,
            stem=network.stem,
            base_planes=network.base_planes,
            options=network.options,
            channels=channels,
        )


def _built_foreign(build: Build, network: Network, how: Mapping[str, Any]) -> Any:
    # For real: its constructor may compute tensors that no file holds. What is drawn is replaced.
    with torch.device("cpu"), seeded(0):
        return build(
            network.arch,
            stem=network.stem,
            base_planes=network.base_planes,
            options=network.options,
            channels=len(how["mean"]),
            size=int(how["crop"]),
        )


def copy_into(trunk: Any, tensors: Mapping[str, torch.Tensor], where: object) -> None:
    """Give a trunk that exists the values of another one of the same network.

    Raises:
        InputError: it is another network; the first tensor that differs is named.
    """
    wanted = trunk.state_dict()
    fix = "use weights of the same network (recipe keys trunk.arch, trunk.stem, trunk.base_planes, trunk.options)"
    for key in (*wanted, *tensors):
        if key not in tensors or key not in wanted:
            here, there = ("the weights", "the trunk") if key in tensors else ("the trunk", "the weights")
            raise InputError(f"{key} is in {here} but not in {there}.", where=where, fix=fix)
    for key, value in tensors.items():
        if value.shape != wanted[key].shape:
            raise InputError(
                f"{key} has shape {tuple(value.shape)} in the weights, the trunk wants "
                f"{tuple(wanted[key].shape)}.",
                where=where,
                fix=fix,
            )
    trunk.load_state_dict(dict(tensors))


def preprocessing(how: Mapping[str, Any]) -> Callable[[], Any]:
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
