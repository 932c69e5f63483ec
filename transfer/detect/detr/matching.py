"""Which query answers for which object: the cheapest assignment, of all layers of a batch at once.

Boxes are center, width and height in shares of the image. Source: DETR ``models/matcher.py``, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Matched", "Wanted", "match", "match_costs", "overlaps", "wanted_of"]

_CLASS, _DISTANCE, _OVERLAP = 1.0, 5.0, 2.0


@dataclass(frozen=True)
class Wanted:
    """The objects of a batch, padded to as many as the fullest image has.

    ``labels`` int64 (N, T), ``boxes`` (N, T, 4), ``counts`` the objects of each image.
    """

    labels: torch.Tensor
    boxes: torch.Tensor
    counts: list[int]


@dataclass(frozen=True)
class Matched:
    """Pairs, int64 (M,) each, ordered by layer, image and query: ``target`` is the object of the image."""

    layer: torch.Tensor
    image: torch.Tensor
    query: torch.Tensor
    target: torch.Tensor


def wanted_of(labels: Sequence[torch.Tensor], boxes: Sequence[torch.Tensor]) -> Wanted:
    """Pad the labels (n,) and the boxes (n, 4) of each image."""
    pad = torch.nn.utils.rnn.pad_sequence
    return Wanted(
        pad(list(labels), batch_first=True),
        pad(list(boxes), batch_first=True, padding_value=1.0),
        [len(one) for one in labels],
    )


def overlaps(boxes: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """IoU and generalised IoU of boxes (..., 4) whose leading dimensions broadcast."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = (_edges(x) for x in (boxes, others))
    area = (x2 - x1) * (y2 - y1)
    both = (torch.minimum(x2, u2) - torch.maximum(x1, u1)).clamp(min=0)
    both = both * (torch.minimum(y2, v2) - torch.maximum(y1, v1)).clamp(min=0)
    union = area + (u2 - u1) * (v2 - v1) - both
    hull = (torch.maximum(x2, u2) - torch.minimum(x1, u1)) * (torch.maximum(y2, v2) - torch.minimum(y1, v1))
    iou = both / union
    return iou, iou - (hull - union) / hull


def _edges(boxes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, y, width, height = boxes.unbind(-1)
    return x - 0.5 * width, y - 0.5 * height, x + 0.5 * width, y + 0.5 * height


@torch.no_grad()
def match_costs(log_chances: torch.Tensor, boxes: torch.Tensor, wanted: Wanted) -> torch.Tensor:
    """What it costs to let each query answer for each object of its image: (L, N, Q, T).

    Args:
        log_chances: of the classes, (L, N, Q, C + 1).
        boxes: (L, N, Q, 4).
        wanted: the objects.
    """
    layers, _, queries, _ = boxes.shape
    labels = wanted.labels[None, :, None, :].expand(layers, -1, queries, -1)
    chance = log_chances.gather(3, labels).exp()
    distance = torch.cdist(boxes, wanted.boxes[None].expand(layers, -1, -1, -1), p=1)
    _, giou = overlaps(boxes[..., :, None, :], wanted.boxes[None, :, None])
    return _DISTANCE * distance - _CLASS * chance - _OVERLAP * giou


def match(costs: torch.Tensor, counts: Sequence[int]) -> Matched:
    """The cheapest pairs of each layer and image; of more objects than queries some have none.

    Args:
        costs: (L, N, Q, T).
        counts: the objects of each image; further columns are padding.
    """
    from scipy.optimize import linear_sum_assignment

    # What isn't finite has no cheapest assignment; the loss isn't finite either, and the engine says so.
    table = costs.nan_to_num(0.0, 0.0, 0.0).cpu().numpy()
    pairs = [
        (layer, image, *linear_sum_assignment(table[layer, image, :, :count]))
        for layer in range(len(table))
        for image, count in enumerate(counts)
        if count
    ]
    rows = [np.stack(np.broadcast_arrays(*pair)) for pair in pairs]
    found = np.concatenate(rows, axis=1) if rows else np.zeros((4, 0), dtype=np.int64)
    return Matched(*torch.from_numpy(found).to(costs.device).unbind())
