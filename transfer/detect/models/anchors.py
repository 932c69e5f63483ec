"""Anchors by detectron2's rules: not rounded, size-major and ratio-minor, centred at the corners of the cells.

Source: detectron2 ``modeling/anchor_generator.py`` (offset 0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["cell_anchors", "grid_anchors"]

_RATIOS = (0.5, 1.0, 2.0)


def cell_anchors(sizes: Sequence[float]) -> torch.Tensor:
    """The anchors of one position around 0: (sizes x 3 ratios, 4), float32; a ratio is height by width."""
    rows = []
    for size in sizes:
        for ratio in _RATIOS:
            width = math.sqrt(size**2 / ratio)
            height = ratio * width
            rows.append([-width / 2, -height / 2, width / 2, height / 2])
    return torch.tensor(rows, device="cpu")


def grid_anchors(cell: torch.Tensor, size: tuple[int, int], stride: int) -> torch.Tensor:
    """All anchors of a map of (height, width): row by row, (height x width x A, 4)."""
    y, x = (torch.arange(n, device=cell.device, dtype=cell.dtype) * stride for n in size)
    y, x = torch.meshgrid(y, x, indexing="ij")
    shifts = torch.stack((x, y, x, y), dim=-1).view(-1, 1, 4)
    return (shifts + cell).view(-1, 4)
