"""Residual networks in torchvision's own class and key names, at every width the zoo needs.

Source: torchvision ``models/resnet.py`` for the structure, SwAV ``src/resnet50.py`` for the widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from ..errors import InputError, did_you_mean

__all__ = ["drop_classifier", "resnet", "stage_features"]

STEMS = ("imagenet", "small", "medium")
_STAGES = ("layer1", "layer2", "layer3", "layer4")


def drop_classifier(trunk: ResNet, in_features: int) -> None:
    """Put a plain ``nn.Identity`` where the classifier stands, so that the output is pooled features.

    It carries ``in_features``, so ``model.fc = nn.Linear(model.fc.in_features, 10)`` works as on the
    supervised network. ``num_features`` is the same number, by timm's name. ``feature_info`` lists the
    stages of ``stage_features``: (name, channels, reduction), where a map has the image's side divided by
    ``reduction``, rounded up.
    """
    trunk.fc = nn.Identity()
    trunk.fc.in_features = in_features
    trunk.num_features = in_features
    trunk.feature_info = _feature_info(trunk)


def _feature_info(trunk: ResNet) -> list[tuple[str, int, int]]:
    channels = trunk.conv1.out_channels
    reduction = trunk.conv1.stride[0] * (2 if isinstance(trunk.maxpool, nn.MaxPool2d) else 1)
    found = [("stem", channels, reduction)]
    for name in _STAGES:
        shortcut = getattr(trunk, name)[0].downsample
        if shortcut is not None:  # as wide and as strided as the stage
            channels = shortcut[0].out_channels
            reduction *= shortcut[0].stride[0]
        found.append((name, channels, reduction))
    return found


def resnet(
    block: type[BasicBlock | Bottleneck],
    layers: list[int],
    *,
    base_planes: int = 64,
    width_per_group: int = 64,
    groups: int = 1,
    stem: str = "imagenet",
    channels: int = 3,
    norm_layer: Callable[..., nn.Module] | None = None,
    replace_stride_with_dilation: list[bool] | None = None,
) -> ResNet:
    """A torchvision ``ResNet`` whose stem may be narrower, wider or made for small images.

    With the defaults it is the torchvision network. Its ``forward`` gives pooled features, (N,
    ``num_features``), through the ``nn.Identity`` that ``fc`` starts as.

    Args:
        block: torchvision's ``BasicBlock`` or ``Bottleneck``.
        layers: blocks in each of the four stages.
        base_planes: channels of the stem; stage i has ``base_planes * 2**i`` (times the block's
            expansion). 64 in the standard network, 128 in the "w2" one.
        width_per_group: a bottleneck's inner width is ``int(planes * width_per_group / 64) * groups``.
        groups: groups of the bottleneck's 3x3 convolution (ResNeXt).
        stem: ``imagenet`` (7x7, stride 2, max pooling), ``small`` (3x3, stride 1, no pooling: for
            images of about 32 pixels) or ``medium`` (3x3, stride 1, max pooling: about 64 pixels).
        channels: of the images.
        norm_layer: the normalisation; BatchNorm2d by default.
        replace_stride_with_dilation: as in torchvision, for the last three stages.

    Raises:
        InputError: no such stem, or too narrow a network.
    """
    if base_planes < 1 or (block is Bottleneck and base_planes * width_per_group < 64):
        raise InputError(
            f"A network of {base_planes} channels is too narrow: a convolution would have none.",
            where="base_planes",
            fix="take a larger number",
        )
    # torchvision's constructor knows one stem; only the constructor differs, so the class stays its own
    # (which any program with torchvision can unpickle).
    trunk: Any = ResNet.__new__(ResNet)
    nn.Module.__init__(trunk)
    trunk._norm_layer = norm_layer or nn.BatchNorm2d
    trunk.inplanes = base_planes
    trunk.dilation = 1
    trunk.groups = groups
    trunk.base_width = width_per_group
    if stem == "imagenet":
        trunk.conv1 = nn.Conv2d(channels, base_planes, kernel_size=7, stride=2, padding=3, bias=False)
    elif stem in ("small", "medium"):
        trunk.conv1 = nn.Conv2d(channels, base_planes, kernel_size=3, stride=1, padding=1, bias=False)
    else:
        raise InputError(
            f"There is no stem {stem!r}.",
            where="stem",
            fix=did_you_mean(stem, STEMS) + "known: " + ", ".join(STEMS),
        )
    trunk.bn1 = trunk._norm_layer(base_planes)
    trunk.relu = nn.ReLU(inplace=True)
    trunk.maxpool = nn.Identity() if stem == "small" else nn.MaxPool2d(3, stride=2, padding=1)
    dilate = replace_stride_with_dilation or [False, False, False]
    trunk.layer1 = trunk._make_layer(block, base_planes, layers[0])
    trunk.layer2 = trunk._make_layer(block, base_planes * 2, layers[1], stride=2, dilate=dilate[0])
    trunk.layer3 = trunk._make_layer(block, base_planes * 4, layers[2], stride=2, dilate=dilate[1])
    trunk.layer4 = trunk._make_layer(block, base_planes * 8, layers[3], stride=2, dilate=dilate[2])
    trunk.avgpool = nn.AdaptiveAvgPool2d((1, 1))
    drop_classifier(trunk, base_planes * 8 * block.expansion)
    for module in trunk.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return trunk  # type: ignore[no-any-return]


def stage_features(trunk: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The maps after the stem and each stage, by the names of the trunk's ``feature_info``, (N, C, H, W).

    Args:
        trunk: what ``zoo.models.factory.create_trunk`` makes.
        images: (N, C, H, W), normalised.
    """
    own = getattr(trunk, "stage_features", None)  # torchvision's class has none
    if own is not None:
        return own(images)  # type: ignore[no-any-return]
    x = trunk.maxpool(trunk.relu(trunk.bn1(trunk.conv1(images))))
    maps = {"stem": x}
    for name in _STAGES:
        x = getattr(trunk, name)(x)
        maps[name] = x
    return maps
