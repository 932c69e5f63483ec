"""Trunks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, did_you_mean

__all__ = ["TIMM", "TRUNKS", "create_trunk", "is_resnet"]

# name -> (block, blocks in each stage, arguments); AMDIM's layers follow from its options
TRUNKS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "resnet18": ("basic", [2, 2, 2, 2], {}),
    "resnet34": ("basic", [3, 4, 6, 3], {}),
    "resnet50": ("bottleneck", [3, 4, 6, 3], {}),
    "resnet50w2": ("bottleneck", [3, 4, 6, 3], {"base_planes": 128}),
    "resnet50w4": ("bottleneck", [3, 4, 6, 3], {"base_planes": 256}),
    "resnet50w5": ("bottleneck", [3, 4, 6, 3], {"base_planes": 320}),
    "resnet101": ("bottleneck", [3, 4, 23, 3], {}),
    "resnet152": ("bottleneck", [3, 8, 36, 3], {}),
    "resnext101_32x8d": ("bottleneck", [3, 4, 23, 3], {"groups": 32, "width_per_group": 8}),
    "resnext101_32x16d": ("bottleneck", [3, 4, 23, 3], {"groups": 32, "width_per_group": 16}),
    "resnext101_32x32d": ("bottleneck", [3, 4, 23, 3], {"groups": 32, "width_per_group": 32}),
    "resnext101_32x48d": ("bottleneck", [3, 4, 23, 3], {"groups": 32, "width_per_group": 48}),
    "amdim": ("amdim", [], {}),
}

TIMM = "timm:"
"""What the names of timm's networks begin with."""

_NO_RESNET = "leave it out (in a recipe: trunk.stem=imagenet, trunk.base_planes=null)"


def is_resnet(arch: str) -> bool:
    """Whether a trunk is of torchvision's ``ResNet`` class: its tensors have torchvision's names."""
    return arch in TRUNKS and bool(TRUNKS[arch][1])


def create_trunk(
    arch: str,
    *,
    stem: str = "imagenet",
    base_planes: int | None = None,
    options: Mapping[str, Any] | None = None,
    channels: int = 3,
    size: int | None = None,
    norm_layer: Callable[..., Any] | None = None,
    replace_stride_with_dilation: list[bool] | None = None,
) -> Any:
    """A freshly initialised trunk (draws from torch's global generator).

    A ResNet or ResNeXt is torchvision's ``ResNet``, with an ``nn.Identity`` for the classifier; ``amdim``
    is an ``AMDIMEncoder``. These have ``feature_info``: (name, channels, reduction) of each stage of
    ``zoo.models.resnet.stage_features``. Any network of timm's and a user's own function make trunks, too
    (``zoo.models.foreign.foreign_trunk``). All of them map images to pooled features, (N, ``num_features``).

    Args:
        arch: a key of ``TRUNKS``, ``timm:NAME`` or ``MODULE:FUNCTION``.
        stem: see ``zoo.models.resnet.resnet``.
        base_planes: channels of the stem, if not the architecture's own: a narrow or wide variant.
        options: of ``amdim`` (see ``AMDIMEncoder``), timm's network or the function; the others have none.
        channels: of the images.
        size: side of the images that a network of timm's or a function's is tried with; the others are not.
        norm_layer: the normalisation; BatchNorm2d by default.
        replace_stride_with_dilation: as in torchvision, for the last three stages.

    Raises:
        InputError: no such architecture, with the nearest name, or something that it doesn't take.
    """
    given = {
        "stem": stem != "imagenet",
        "base_planes": base_planes is not None,
        "norm_layer": norm_layer is not None,
        "replace_stride_with_dilation": any(replace_stride_with_dilation or []),
    }
    if ":" in arch:
        from .foreign import foreign_trunk

        _refuse(arch, given, _NO_RESNET)
        return foreign_trunk(arch, options or {}, channels, size)
    if arch not in TRUNKS:
        raise InputError(
            "There is no trunk of this name.",
            where=arch,
            fix=did_you_mean(arch, TRUNKS)
            + "Known: "
            + ", ".join(TRUNKS)
            + "; timm:NAME is any network of timm's, MODULE:FUNCTION your own",
        )
    kind, layers, arguments = TRUNKS[arch]
    if kind == "amdim":
        from .amdim import OPTIONS, amdim_encoder

        _refuse(arch, given, f"{_NO_RESNET}; its options are {', '.join(OPTIONS)}")
        return amdim_encoder(options or {}, channels)
    _refuse(arch, {f"options.{name}": True for name in options or {}}, "leave it out; a ResNet has none")

    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    from .resnet import drop_classifier, resnet

    block = BasicBlock if kind == "basic" else Bottleneck
    if base_planes is not None:
        arguments = {**arguments, "base_planes": base_planes}
    shared: dict[str, Any] = {
        "norm_layer": norm_layer,
        "replace_stride_with_dilation": replace_stride_with_dilation,
    }
    if stem == "imagenet" and channels == 3 and "base_planes" not in arguments:
        trunk = ResNet(block, layers, **arguments, **shared)
        drop_classifier(trunk, 512 * block.expansion)
        return trunk
    return resnet(block, layers, stem=stem, channels=channels, **shared, **arguments)


def _refuse(arch: str, given: Mapping[str, bool], fix: str) -> None:
    for name, is_given in given.items():
        if is_given:
            raise InputError(f"{arch} doesn't take this.", where=name, fix=fix)
