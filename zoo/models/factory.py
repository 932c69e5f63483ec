"""Trunks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InputError, did_you_mean

__all__ = ["TRUNKS", "create_trunk"]

# name -> (block, blocks in each stage, arguments)
TRUNKS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "resnet18": ("basic", [2, 2, 2, 2], {}),
    "resnet34": ("basic", [3, 4, 6, 3], {}),
    "resnet50": ("bottleneck", [3, 4, 6, 3], {}),
    "resnet50w2": ("bottleneck", [3, 4, 6, 3], {"base_planes": 128}),
    "resnet50w4": ("bottleneck", [3, 4, 6, 3], {"base_planes": 256}),
    "resnet50w5": ("bottleneck", [3, 4, 6, 3], {"base_planes": 320}),
    "resnet101": ("bottleneck", [3, 4, 23, 3], {}),
    "resnet152": ("bottleneck", [3, 8, 36, 3], {}),
}


def create_trunk(
    arch: str,
    *,
    stem: str = "imagenet",
    base_planes: int | None = None,
    channels: int = 3,
    norm_layer: Callable[..., Any] | None = None,
    replace_stride_with_dilation: list[bool] | None = None,
) -> Any:
    """A freshly initialised trunk (draws from torch's global generator).

    What comes back is torchvision's ``ResNet``, with an ``nn.Identity`` for the classifier.

    Args:
        arch: a key of ``TRUNKS``.
        stem: see ``zoo.models.resnet.resnet``.
        base_planes: channels of the stem, if not the architecture's own: a narrow or wide variant.
        channels: of the images.
        norm_layer: the normalisation; BatchNorm2d by default.
        replace_stride_with_dilation: as in torchvision, for the last three stages.

    Raises:
        InputError: no such architecture, with the nearest name.
    """
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    from .resnet import drop_classifier, resnet

    if arch not in TRUNKS:
        raise InputError(
            "There is no trunk of this name.",
            where=arch,
            fix=did_you_mean(arch, TRUNKS) + "Known: " + ", ".join(TRUNKS),
        )
    kind, layers, arguments = TRUNKS[arch]
    if base_planes is not None:
        arguments = {**arguments, "base_planes": base_planes}
    block = BasicBlock if kind == "basic" else Bottleneck
    if channels != 3:
        arguments = {**arguments, "channels": channels}
    shared: dict[str, Any] = {
        "norm_layer": norm_layer,
        "replace_stride_with_dilation": replace_stride_with_dilation,
    }
    if stem == "imagenet" and not arguments:
        trunk = ResNet(block, layers, **shared)
        drop_classifier(trunk, 512 * block.expansion)
        return trunk
    return resnet(block, layers, stem=stem, **shared, **arguments)
