"""RoIAlign as matrix products, for CPUs, and what it allows.

A cell of RoIAlign is the mean of bilinear samples on a grid, so its weight for a position of the map is one number
along y times one along x: a region is ``Y F X'`` with small matrices Y and X. torchvision's kernel gathers the same
sum sample by sample on one thread, and its gradient scatters it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["align_by_products"]

_CHUNK = 2**24  # numbers between the two products: 64 MB


def align_by_products(
    features: torch.Tensor, boxes: Sequence[torch.Tensor], side: int, stride: int, every: int = 1
) -> torch.Tensor:
    """Aligned RoIAlign with as many samples as fit, as torchvision's with ``sampling_ratio`` 0.

    Args:
        features: (N, C, H, W), float32 or float64.
        boxes: of each image, (R, 4) in pixels.
        side: cells of a region along each axis.
        stride: pixels between two positions of the map.
        every: only each so many cells along each axis.

    Returns:
        (regions of all images, C, S, S) in channels-last memory, S = side / every, rounded up.
    """
    height, width = features.shape[2:]
    parts = []
    # Autocast would round the weights, and that moves the boxes.
    with torch.autocast(features.device.type, enabled=False):
        for image, mine in zip(features.permute(0, 2, 3, 1), boxes, strict=True):
            edges = mine.to(features.dtype) / stride - 0.5
            rows = _weights(edges[:, 1], edges[:, 3], side, height)[:, ::every]
            columns = _weights(edges[:, 0], edges[:, 2], side, width)[:, ::every]
            size = max(1, _CHUNK // (rows.shape[1] * width * features.shape[1]))
            for first in range(0, max(1, len(mine)), size):
                parts.append(_regions(image, rows[first : first + size], columns[first : first + size]))
    return torch.cat(parts).permute(0, 3, 1, 2)


def _weights(low: torch.Tensor, high: torch.Tensor, side: int, length: int) -> torch.Tensor:
    """How much each position of an axis counts in each cell of each region: (R, side, length).

    Args:
        low: the regions' lower edges in positions, (R,).
        high: their upper edges.
        side: cells of a region.
        length: positions of the axis.
    """
    cell = (high - low) / side
    samples = torch.ceil(cell)  # of a cell
    share = 1.0 / samples.clamp(min=1.0)
    number = torch.arange(_most(samples), device=low.device)
    cells = torch.arange(side, device=low.device)
    offset = (number + 0.5) * (cell * share)[:, None]
    at = (low[:, None] + cells * cell[:, None])[:, :, None] + offset[:, None]
    # Beyond the map a sample counts 0, up to a position beyond it as much as the edge.
    counts = (number < samples[:, None])[:, None] & (at >= -1.0) & (at <= length)
    place = at.clamp(0.0, length - 1.0)
    near = (1.0 - (place[..., None] - torch.arange(length, device=low.device)).abs()).clamp(min=0.0)
    return (near * (counts * share[:, None, None])[..., None]).sum(dim=2)


def _most(samples: torch.Tensor) -> int:
    return max(1, int(samples.max())) if len(samples) else 1


def _regions(image: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(H, W, C), (R, S, H), (R, S, W) -> (R, S, S, C)."""
    height, width, channels = image.shape
    bands = rows.flatten(0, 1) @ image.reshape(height, width * channels)
    return columns[:, None] @ bands.view(len(rows), rows.shape[1], width, channels)
