"""Boxes as detectron2 computes with them: coding, matching, sampling. Boxes are (N, 4) edges x1, y1, x2, y2 in pixels.

Source: detectron2 ``modeling/{box_regression,matcher,sampling}.py``, ``structures/boxes.py``.
"""

from __future__ import annotations

import math

import torch
from torchvision.ops import box_iou

__all__ = ["RPN_WEIGHTS", "clip_boxes", "decode", "encode", "has_area", "match", "sample_labels"]

RPN_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
_MOST_GROWTH = math.log(1000.0 / 16)


def encode(
    boxes: torch.Tensor, targets: torch.Tensor, weights: tuple[float, float, float, float]
) -> torch.Tensor:
    """The offsets (N, 4) that lead from each box to its target."""
    size = boxes[:, 2:] - boxes[:, :2]
    wanted = targets[:, 2:] - targets[:, :2]
    move = ((targets[:, :2] + 0.5 * wanted) - (boxes[:, :2] + 0.5 * size)) / size
    return torch.cat((move, torch.log(wanted / size)), dim=1) * boxes.new_tensor(weights)


def decode(
    deltas: torch.Tensor, boxes: torch.Tensor, weights: tuple[float, float, float, float]
) -> torch.Tensor:
    """Move boxes (N, 4) by offsets (N, K * 4); float32 whatever comes in, as detectron2 does."""
    boxes, deltas = boxes.float(), deltas.float().unflatten(1, (-1, 4))
    size = (boxes[:, 2:] - boxes[:, :2]).unsqueeze(1)
    center = boxes[:, :2].unsqueeze(1) + 0.5 * size
    deltas = deltas / deltas.new_tensor(weights)
    center = deltas[..., :2] * size + center
    half = 0.5 * torch.exp(deltas[..., 2:].clamp(max=_MOST_GROWTH)) * size
    return torch.cat((center - half, center + half), dim=2).flatten(1)


def clip_boxes(boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Cut boxes (..., 4) at the edges of an image of (height, width)."""
    height, width = size
    return torch.stack(
        (
            boxes[..., 0].clamp(0, width),
            boxes[..., 1].clamp(0, height),
            boxes[..., 2].clamp(0, width),
            boxes[..., 3].clamp(0, height),
        ),
        dim=-1,
    )


def has_area(boxes: torch.Tensor) -> torch.Tensor:
    """Which boxes have two sides above 0."""
    return (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])


def match(
    truth: torch.Tensor, boxes: torch.Tensor, low: float, high: float, keep_best: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The true box that each box overlaps most, and whether that counts.

    Args:
        truth: (M, 4), M may be 0.
        boxes: (N, 4).
        low: below this IoU a box is background.
        high: from this IoU on it is an object; between the two it is neither.
        keep_best: the boxes that overlap a true box most are objects, however little that is.

    Returns:
        Index into ``truth`` and label (1 object, 0 background, -1 neither), int64 (N,).
    """
    if len(truth) == 0:
        zeros = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
        return zeros, zeros.clone()
    overlaps = box_iou(truth, boxes)
    best, index = overlaps.max(dim=0)
    labels = torch.full_like(index, -1)
    labels[best < low] = 0
    labels[best >= high] = 1
    if keep_best:
        labels[(overlaps == overlaps.max(dim=1, keepdim=True).values).any(dim=0)] = 1
    return index, labels


def sample_labels(
    positive: torch.Tensor,
    negative: torch.Tensor,
    count: int,
    fraction: float,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``count`` of the candidates, at most ``fraction`` of them positive; negatives fill up.

    Args:
        positive: indices of the positive candidates.
        negative: those of the negative ones.
        count: how many to draw.
        fraction: share of positives at most.
        generator: a CPU generator; torch's own by default.

    Returns:
        The drawn indices of both.
    """
    most = min(len(positive), int(count * fraction))
    rest = min(len(negative), count - most)
    drawn = []
    for candidates, number in ((positive, most), (negative, rest)):
        order = torch.randperm(len(candidates), generator=generator)[:number]
        drawn.append(candidates[order.to(candidates.device)])
    return drawn[0], drawn[1]
