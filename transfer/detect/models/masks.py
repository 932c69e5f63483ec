"""The mask head of Mask R-CNN: targets from polygons or bitmaps, its loss, and masks at the image's size.

Source: detectron2 ``modeling/roi_heads/mask_head.py``, ``layers/mask_ops.py``, ``structures/masks.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import roi_align

from ..rle import polygons_to_bitmap

__all__ = ["MaskHead", "mask_loss", "mask_targets", "paste_masks"]

_CONVOLUTIONS = 4


class MaskHead(nn.Module):
    """Four convolutions, one that doubles the size, and a mask of each class: (R, C, S, S) -> (R, K, 2S, 2S)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1) for _ in range(_CONVOLUTIONS)
        )
        self.deconv = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.predictor = nn.Conv2d(channels, classes, 1)
        for layer in (*self.convolutions, self.deconv):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.predictor.weight, std=0.001)
        nn.init.zeros_(self.predictor.bias)  # type: ignore[arg-type]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions:
            features = F.relu(layer(features))
        logits: torch.Tensor = self.predictor(F.relu(self.deconv(features)))
        return logits if logits.dtype == torch.float64 else logits.float()


def mask_targets(masks: Sequence[Any], boxes: torch.Tensor, side: int) -> torch.Tensor:
    """The part of each mask that lies in its box, on a grid of ``side``: bool (R, side, side).

    Args:
        masks: of each box: polygons (lists of x, y, ...), or a bitmap (height, width).
        boxes: (R, 4).
        side: cells of the grid.
    """
    found = torch.zeros(len(masks), side, side, dtype=torch.bool)
    for row, (mask, box) in enumerate(zip(masks, boxes.cpu().float().numpy(), strict=True)):
        if isinstance(mask, list):
            found[row] = torch.from_numpy(_cropped(mask, box, side))
        else:
            bitmap = torch.as_tensor(np.asarray(mask), dtype=torch.float32)[None, None]
            region = torch.from_numpy(np.concatenate(([0.0], box))).float()[None]
            found[row] = roi_align(bitmap, region, side, 1.0, 0, aligned=True)[0, 0] >= 0.5
    return found.to(boxes.device)


def _cropped(polygons: list[Any], box: np.ndarray, side: int) -> np.ndarray:
    # The box is float32, as detectron2's: at a pixel's edge its last digits decide.
    scale = np.float32(side) / np.maximum(box[2:] - box[:2], np.float32(0.1))
    moved = [
        ((np.asarray(polygon, dtype=np.float64).reshape(-1, 2) - box[:2]) * scale).ravel()
        for polygon in polygons
    ]
    return polygons_to_bitmap(moved, side, side)


def mask_loss(
    logits: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, share: float
) -> torch.Tensor:
    """Binary cross-entropy on the masks of the true classes, by ``share`` regions.

    Args:
        logits: (R, K, S, S) of the regions that are objects.
        labels: int64 (R,).
        targets: bool (R, S, S).
        share: what the sum over regions of their means is divided by.
    """
    if len(logits) == 0:
        return logits.sum() * 0.0  # every parameter has a gradient in every process
    mine = logits[torch.arange(len(labels), device=labels.device), labels]
    total = F.binary_cross_entropy_with_logits(mine, targets.to(mine.dtype), reduction="sum")
    return total / (max(share, 1.0) * mine.shape[1] * mine.shape[2])


def paste_masks(masks: torch.Tensor, boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Masks (N, S, S) in 0..1 at the places of their boxes: uint8 (N, height, width), 1 from a half on.

    Sampled at the centres of the image's pixels, box by box and only around it.
    """
    height, width = size
    found = torch.zeros(len(masks), height, width, dtype=torch.uint8, device=masks.device)
    for row, (mask, box) in enumerate(zip(masks, boxes.tolist(), strict=True)):
        left, top = max(int(box[0]) - 1, 0), max(int(box[1]) - 1, 0)
        right, bottom = min(int(box[2]) + 2, width), min(int(box[3]) + 2, height)
        if right <= left or bottom <= top or box[2] <= box[0] or box[3] <= box[1]:
            continue
        x = (torch.arange(left, right).to(masks) + 0.5 - box[0]) / (box[2] - box[0]) * 2 - 1
        y = (torch.arange(top, bottom).to(masks) + 0.5 - box[1]) / (box[3] - box[1]) * 2 - 1
        grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        pasted = F.grid_sample(mask[None, None], grid[None], align_corners=False)[0, 0]
        found[row, top:bottom, left:right] = pasted >= 0.5
    return found
