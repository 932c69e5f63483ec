"""Frozen features of whole image collections."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import nn

from ..data.source import ImageSource
from ..data.views.apply import normalize, resize_and_center

Triple = tuple[float, float, float]

__all__ = ["evaluation_images", "extract_features", "pixel_features"]


def evaluation_images(source: ImageSource, resize: int, crop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All images through the test transform: uint8 (N, 3, crop, crop) and labels int64 (N,)."""
    out = torch.empty(len(source), crop, crop, 3, dtype=torch.uint8)
    for index in range(len(source)):
        out[index] = torch.from_numpy(
            resize_and_center(Image.fromarray(source.read(index)), resize, crop).copy()
        )
    labels = np.array([source.label(index) for index in range(len(source))], dtype=np.int64)
    return out.permute(0, 3, 1, 2), torch.from_numpy(labels)


def pixel_features(images: torch.Tensor, mean: Triple, std: Triple) -> torch.Tensor:
    """Normalised pixels as features, (N, 3 * H * W): what a trunk has to beat."""
    return normalize(images, mean, std).flatten(1)


@torch.no_grad()
def extract_features(
    trunk: nn.Module,
    images: torch.Tensor,
    mean: Triple,
    std: Triple,
    batch_size: int = 256,
) -> torch.Tensor:
    """Pooled features, float32 (N, F), of uint8 images (N, 3, H, W), on the trunk's device.

    The trunk runs in eval mode, and is given back in the mode it came in.
    """
    mode = trunk.training
    like = next(trunk.parameters())
    trunk.eval()
    try:
        out = []
        for block in images.split(batch_size):
            inputs = normalize(block.to(like.device), mean, std).to(like.dtype)
            out.append(trunk(inputs).float().cpu())
        return torch.cat(out)
    finally:
        trunk.train(mode)
