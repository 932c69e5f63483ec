"""A batch of images and of what is in them, as the detectors take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zoo.engine.collectives import Collectives

__all__ = ["Found", "Images", "Target", "mean_counts", "pad_images"]


@dataclass(frozen=True)
class Images:
    """Normalised images, padded with 0 at the bottom and right to one size.

    ``pixels`` is (N, 3, H, W); ``sizes`` are the (height, width) of the images before they were padded.
    """

    pixels: torch.Tensor
    sizes: list[tuple[int, int]]


@dataclass
class Target:
    """The objects of one image: boxes (N, 4), labels int64 (N,), for masks either polygons or a bitmap of each.

    ``generator`` draws the samples of this image; torch's own by default.
    """

    boxes: torch.Tensor
    labels: torch.Tensor
    masks: Sequence[Any] | None = None
    generator: torch.Generator | None = field(default=None, repr=False)


@dataclass
class Found:
    """What a detector says of one image: boxes (N, 4), scores and labels (N,), the best first.

    ``masks`` are uint8 (N, height, width), where the detector has masks. ``rows`` is the proposal that each
    detection came from.
    """

    boxes: torch.Tensor
    scores: torch.Tensor
    labels: torch.Tensor
    rows: torch.Tensor
    masks: torch.Tensor | None = None


def mean_counts(counts: Sequence[float], world: Collectives | None, device: torch.device) -> list[float]:
    """What was counted in a batch, on average over the processes whose batches make one; exchanged on ``device``."""
    if world is None or world.world_size == 1:
        return list(counts)
    total = world.sum_(torch.tensor(counts, dtype=torch.float64, device=device))
    return [value / world.world_size for value in total.tolist()]


def pad_images(
    images: Sequence[torch.Tensor], mean: torch.Tensor, std: torch.Tensor, divisor: int = 1
) -> Images:
    """Normalise (3, h, w) images in 0..255 and pad them to the largest height and width.

    Args:
        images: any number type; moved to the device of ``mean``.
        mean: of the channels, in 0..255.
        std: of the channels.
        divisor: height and width become multiples of it.
    """
    sizes = [(int(image.shape[1]), int(image.shape[2])) for image in images]
    height, width = (-(-max(side) // divisor) * divisor for side in zip(*sizes, strict=True))
    pixels = mean.new_zeros(len(images), 3, height, width)
    for row, image in zip(pixels, images, strict=True):
        values = image.to(mean.device, mean.dtype)
        row[:, : image.shape[1], : image.shape[2]] = (values - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    return Images(pixels, sizes)
