"""Features of the SVM recipes: the model's own, or VISSL's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import functional as pillow_ops

from zoo.data.source import ImageSource
from zoo.errors import InputError
from zoo.models.resnet import stage_features
from zoo.probe.svm import unit_length

from ..run import Context

__all__ = ["svm_features"]


def svm_features(context: Context, part: str, kind: str) -> torch.Tensor:
    """Features of unit length, float64 (N, D), of ``train`` or ``val``.

    Args:
        context: the trunk and the data.
        part: which images.
        kind: ``pooled``: the central crop, the trunk's features (SwAV A.5). ``vissl``: the image squashed to a
            square of the crop's side, the last maps averaged over windows one smaller than they are, which
            leaves 2 x 2 (of a ResNet-50 at 224 pixels 8192 numbers).

    Raises:
        InputError: ``vissl`` of a network without maps of at least 2 x 2.
    """
    if kind == "pooled":
        return unit_length(context.features(part)[0])
    if not getattr(context.trunk, "feature_info", None):
        raise InputError(
            "VISSL's features are pooled maps of a stage, and this network shows none.",
            where=context.model,
            fix="leave --features out, or pass a ResNet",
        )
    source = context.train if part == "train" else context.val
    how = context.preprocessing
    squashed = _Squashed(source, how)
    trunk = _FourCorners(context.trunk, context.model)
    how = {**how, "resize": how["crop"]}
    return unit_length(context.features_of(("vissl", part), trunk, squashed, how)[0])


class _FourCorners(nn.Module):
    """The last stage's maps averaged over the four windows that are one smaller than they are."""

    def __init__(self, trunk: Any, name: str) -> None:
        super().__init__()
        self.trunk = trunk
        self._stage = trunk.feature_info[-1][0]
        self._name = name

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = stage_features(self.trunk, images)[self._stage]
        height, width = maps.shape[2:]
        if min(height, width) < 2:
            raise InputError(
                f"The last maps are {height} x {width}; VISSL's features need 2 x 2.",
                where=self._name,
                fix="pass a larger --crop, or leave --features out",
            )
        return F.avg_pool2d(maps, (height - 1, width - 1), stride=1).flatten(1)


class _Squashed:
    """Images squashed to a square of the crop's side: first the shorter side to ``resize``, as VISSL does."""

    def __init__(self, source: ImageSource, how: Mapping[str, Any]) -> None:
        self.name = source.name
        self.classes = source.classes
        self.source = source
        self._resize, self._crop = int(how["resize"]), int(how["crop"])
        self._mode = pillow_ops.InterpolationMode(str(how.get("interpolation", "bilinear")))

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> np.ndarray:
        image = torch.from_numpy(np.array(self.source.read(index))).permute(2, 0, 1)
        for size in ([self._resize], [self._crop, self._crop]):
            image = pillow_ops.resize(image, size, interpolation=self._mode, antialias=True)
        return np.ascontiguousarray(image.permute(1, 2, 0).numpy())

    def label(self, index: int) -> int:
        return self.source.label(index)

    def where(self, index: int) -> str:
        return self.source.where(index)

    def fingerprint(self) -> dict[str, Any]:
        size = {"resize": self._resize, "side": self._crop}
        return {"kind": "squashed", **size, "of": self.source.fingerprint()}
