"""Trunks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, did_you_mean

__all__ = ["TRUNKS", "create_trunk"]

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


def create_trunk(
    arch: str,
    *,
    stem: str = "imagenet",
    base_planes: int | None = None,
    options: Mapping[str, Any] | None = None,
    channels: int = 3,
    norm_layer: Callable[..., Any] | None = None,
    replace_stride_with_dilation: list[bool] | None = None,
) -> Any:
    """A freshly initialised trunk (draws from torch's global generator).

    A ResNet or ResNeXt is torchvision's ``ResNet``, with an ``nn.Identity`` for the classifier; ``amdim``
    is an ``AMDIMEncoder``. All of them map images to pooled features, (N, ``num_features``), and have
    ``feature_info``: (name, channels, reduction) of each stage of ``zoo.models.resnet.stage_features``.

    Args:
        arch: a key of ``TRUNKS``.
        stem: see ``zoo.models.resnet.resnet``.
        base_planes: channels of the stem, if not the architecture's own: a narrow or wide variant.
        options: of ``amdim``, see ``AMDIMEncoder``; the others have none.
        channels: of the images.
        norm_layer: the normalisation; BatchNorm2d by default.
        replace_stride_with_dilation: as in torchvision, for the last three stages.

    Raises:
        InputError: no such architecture, with the nearest name, or something that it doesn't take.
    """
    if arch not in TRUNKS:
        raise InputError(
            "There is no trunk of this name.",
            where=arch,
            fix=did_you_mean(arch, TRUNKS) + "Known: " + ", ".join(TRUNKS),
        )
    kind, layers, arguments = TRUNKS[arch]
    if kind == "amdim":
        from .amdim import OPTIONS, amdim_encoder

        given = {
            "stem": stem != "imagenet",
            "base_planes": base_planes is not None,
            "norm_layer": norm_layer is not None,
            "replace_stride_with_dilation": any(replace_stride_with_dilation or []),
        }
        _refuse(arch, given, "leave it out; its options are " + ", ".join(OPTIONS))
        return amdim_encoder(options or {}, channels)
    _refuse(arch, {f"options.{name}": True for name in options or {}}, "leave it out; only amdim has options")

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
