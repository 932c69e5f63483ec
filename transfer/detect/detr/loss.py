"""DETR's set loss, of all layers of the decoder at once. Source: DETR ``models/detr.py`` (``SetCriterion``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .matching import Matched, Wanted, match, match_costs, overlaps

__all__ = ["WEIGHTS", "SetLoss", "set_loss"]

NO_OBJECT = 0.1
"""The weight of queries that should say that there is nothing."""
WEIGHTS = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}


@dataclass(frozen=True)
class SetLoss:
    """The terms of each layer (L,), not yet weighted, and figures that carry no gradient.

    Args:
        terms: by the names of ``WEIGHTS``; the last layer is the detector's, the others are auxiliary.
        cardinality_error: (L,), by how many objects the layer is off, on average over the images.
        class_error: percent of the last layer's pairs with another class.
        matched_iou: mean IoU of the last layer's pairs.
        no_object_share: share of the last layer's queries that say that there is nothing.
        matched: the pairs.
    """

    terms: dict[str, torch.Tensor]
    cardinality_error: torch.Tensor
    class_error: torch.Tensor
    matched_iou: torch.Tensor
    no_object_share: torch.Tensor
    matched: Matched


def set_loss(logits: torch.Tensor, boxes: torch.Tensor, wanted: Wanted, share: float) -> SetLoss:
    """Match, then score.

    Args:
        logits: (L, N, Q, C + 1), float32 or float64; the last class says that there is nothing.
        boxes: (L, N, Q, 4): center, width and height in shares of the image.
        wanted: what is in the images.
        share: the boxes that box terms are divided by: those of the batch, at least 1 (the mean over processes).
    """
    layers, _, _, classes = logits.shape
    log_chances = logits.log_softmax(3)
    pairs = match(match_costs(log_chances.detach(), boxes.detach(), wanted), wanted.counts)
    answers = torch.full(logits.shape[:3], classes - 1, device=logits.device)
    labels = wanted.labels[pairs.image, pairs.target]
    answers[pairs.layer, pairs.image, pairs.query] = labels
    weights = torch.where(answers == classes - 1, NO_OBJECT, 1.0).to(logits.dtype)
    surprise = -log_chances.gather(3, answers[..., None])[..., 0]
    found, meant = boxes[pairs.layer, pairs.image, pairs.query], wanted.boxes[pairs.image, pairs.target]
    iou, giou = overlaps(found, meant)

    count = len(iou) // layers  # as many pairs in every layer

    def of_layers(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(layers, count).sum(1) / share

    terms = {
        "loss_ce": (surprise * weights).sum((1, 2)) / weights.sum((1, 2)),
        "loss_bbox": of_layers((found - meant).abs().sum(1)),
        "loss_giou": of_layers(1 - giou),
    }
    said = logits.detach().argmax(3)
    last = slice(len(iou) - count, None)
    right = said[-1, pairs.image[last], pairs.query[last]] == labels[last]
    objects = said.new_tensor(wanted.counts)
    return SetLoss(
        terms,
        ((said != classes - 1).sum(2) - objects).abs().to(logits.dtype).mean(1),
        100 - 100 * right.sum().to(logits.dtype) / max(1, count),
        iou.detach()[last].sum() / max(1, count),
        (said[-1] == classes - 1).to(logits.dtype).mean(),
        pairs,
    )
