"""Regions of interest: pooling, sampling, the box predictor with its losses, and the final detections.

Source: detectron2 ``modeling/poolers.py``, ``modeling/roi_heads/{roi_heads,fast_rcnn}.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import batched_nms, box_iou, roi_align

from .boxes import clip_boxes, decode, encode, has_area, match, sample_labels
from .images import Found, Target
from .products import align_by_products
from .rpn import Proposals

__all__ = [
    "ROI_WEIGHTS",
    "BoxPredictor",
    "RoiSettings",
    "Sampled",
    "detect",
    "levels_of",
    "pool",
    "pool_levels",
    "proposal_recall",
    "rescale",
    "sample_regions",
    "select_detections",
]

ROI_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
_IOU = 0.5
_CANONICAL_SIZE, _CANONICAL_LEVEL = 224, 4


@dataclass(frozen=True)
class RoiSettings:
    """``sampled`` regions of an image in training, ``positive`` of them at most; what counts as a detection."""

    sampled: int = 512
    positive: float = 0.25
    score: float = 0.05
    nms: float = 0.5
    detections: int = 100


@dataclass
class Sampled:
    """The regions of one image that are trained on: boxes (R, 4), labels (C is background), their objects."""

    boxes: torch.Tensor
    labels: torch.Tensor
    objects: torch.Tensor
    """Which object of the image each region was matched to."""


@torch.no_grad()
def sample_regions(
    proposals: Sequence[Proposals], targets: Sequence[Target], classes: int, settings: RoiSettings
) -> list[Sampled]:
    """Label the proposals and the true boxes themselves, and draw from them."""
    found = []
    for proposed, target in zip(proposals, targets, strict=True):
        boxes = torch.cat((proposed.boxes, target.boxes.to(proposed.boxes.dtype)))
        objects, is_object = match(target.boxes.to(boxes.dtype), boxes, _IOU, _IOU, keep_best=False)
        labels = torch.full_like(objects, classes)
        if len(target.labels):
            labels = torch.where(is_object == 1, target.labels[objects], labels)
        positive, negative = (torch.nonzero(is_object == value).flatten() for value in (1, 0))
        chosen = torch.cat(
            sample_labels(positive, negative, settings.sampled, settings.positive, target.generator)
        )
        found.append(Sampled(boxes[chosen], labels[chosen], objects[chosen]))
    return found


@torch.no_grad()
def proposal_recall(proposals: Sequence[Proposals], targets: Sequence[Target]) -> float:
    """The share of the true boxes that some proposal overlaps by half; 1 where there is none."""
    found = [
        (box_iou(target.boxes.to(one.boxes.dtype), one.boxes) >= _IOU).any(dim=1)
        for one, target in zip(proposals, targets, strict=True)
        if len(target.boxes)
    ]
    return float(torch.cat(found).double().mean()) if found else 1.0


def pool(
    features: torch.Tensor, boxes: Sequence[torch.Tensor], side: int, stride: int, every: int = 1
) -> torch.Tensor:
    """Aligned RoIAlign with as many samples as fit: (regions of all images, C, side, side).

    ``every``: only each so many positions along each axis.
    """
    # Half precision would move the boxes.
    full = features if features.dtype == torch.float64 else features.float()
    if full.device.type == "cpu":
        return align_by_products(full, boxes, side, stride, every)
    found = roi_align(full, [b.to(full.dtype) for b in boxes], side, 1.0 / stride, 0, aligned=True)
    return found[..., ::every, ::every]


def levels_of(boxes: torch.Tensor, lowest: int, highest: int) -> torch.Tensor:
    """The pyramid level of each box: level 4 for 224 x 224 pixels, one less for half the side."""
    side = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    level = torch.floor(_CANONICAL_LEVEL + torch.log2(side / _CANONICAL_SIZE + 1e-8))
    return level.clamp(lowest, highest).to(torch.int64)


def pool_levels(
    maps: Sequence[torch.Tensor], boxes: Sequence[torch.Tensor], side: int, strides: Sequence[int]
) -> torch.Tensor:
    """Pool each region from the map of its level; the first map is level 2."""
    every = torch.cat(list(boxes))
    image = torch.cat([torch.full((len(b), 1), i, device=b.device) for i, b in enumerate(boxes)])
    level = levels_of(every, 2, 1 + len(maps)) - 2
    whole = maps[0].dtype if maps[0].dtype == torch.float64 else torch.float32
    result = maps[0].new_zeros((len(every), maps[0].shape[1], side, side), dtype=whole)
    regions = torch.cat((image.to(whole), every.to(whole)), dim=1)
    for number, (features, stride) in enumerate(zip(maps, strides, strict=True)):
        here = torch.nonzero(level == number).flatten()
        pooled = roi_align(features.to(whole), regions[here], side, 1.0 / stride, 0, aligned=True)
        result = result.index_put((here,), pooled)
    return result


class BoxPredictor(nn.Module):
    """Class scores (the background last) and a box of each class from the features of regions.

    Args:
        features: numbers of a region.
        classes: without the background.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.cls_score = nn.Linear(features, classes + 1)
        self.bbox_pred = nn.Linear(features, classes * 4)
        for layer, spread in ((self.cls_score, 0.01), (self.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=spread)
            nn.init.zeros_(layer.bias)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(R, F) -> logits (R, C + 1) and offsets (R, C * 4), float32 at least."""
        scores, deltas = self.cls_score(features), self.bbox_pred(features)
        if scores.dtype != torch.float64:
            scores, deltas = scores.float(), deltas.float()
        return scores, deltas

    def losses(
        self,
        scores: torch.Tensor,
        deltas: torch.Tensor,
        regions: Sequence[Sampled],
        targets: Sequence[Target],
        share: float,
    ) -> dict[str, torch.Tensor]:
        """``loss_cls`` and ``loss_box_reg``, both divided by ``share``: the regions, background included."""
        labels = torch.cat([region.labels for region in regions])
        boxes = torch.cat([region.boxes for region in regions])
        divisor = max(share, 1.0)
        wanted = torch.cat(
            [
                target.boxes.to(boxes.dtype)[region.objects]
                if len(target.boxes)
                else torch.zeros_like(region.boxes)
                for region, target in zip(regions, targets, strict=True)
            ]
        )
        objects = torch.nonzero(labels < self.classes).flatten()
        mine = deltas.unflatten(1, (-1, 4))[objects, labels[objects]]
        moves = encode(boxes[objects], wanted[objects], ROI_WEIGHTS).to(mine.dtype)
        return {
            "loss_cls": F.cross_entropy(scores, labels, reduction="sum") / divisor,
            "loss_box_reg": (mine - moves).abs().sum() / divisor,
        }


def select_detections(
    boxes: torch.Tensor, scores: torch.Tensor, size: tuple[int, int], settings: RoiSettings
) -> Found:
    """The detections of one image.

    Args:
        boxes: (R, C * 4), a box of each class.
        scores: probabilities (R, C + 1), the background last.
        size: (height, width) of the image, which boxes are cut at.
        settings: thresholds.
    """
    finite = torch.isfinite(boxes).all(dim=1) & torch.isfinite(scores).all(dim=1)
    rows = torch.nonzero(finite).flatten()
    by_class = clip_boxes(boxes[rows].unflatten(1, (-1, 4)), size)
    probabilities = scores[rows, :-1]
    row, label = torch.nonzero(probabilities > settings.score, as_tuple=True)
    mine, its = by_class[row, label], probabilities[row, label]
    kept = batched_nms(mine.float(), its.float(), label, settings.nms)[: settings.detections]
    return Found(mine[kept], its[kept], label[kept], rows[row[kept]])


def detect(
    predictor: BoxPredictor,
    features: torch.Tensor,
    proposals: Sequence[torch.Tensor],
    sizes: Sequence[tuple[int, int]],
    settings: RoiSettings,
) -> list[Found]:
    """The detections of all images from the features of their proposals."""
    counts = [len(boxes) for boxes in proposals]
    scores, deltas = predictor(features)
    moved = decode(deltas, torch.cat(list(proposals)), ROI_WEIGHTS)
    return [
        select_detections(boxes, probabilities, size, settings)
        for boxes, probabilities, size in zip(
            moved.split(counts), scores.softmax(dim=1).split(counts), sizes, strict=True
        )
    ]


def rescale(found: Found, size: tuple[int, int], wanted: tuple[int, int]) -> Found:
    """Bring detections from an image of one (height, width) to another; what has no area there is dropped."""
    factor = found.boxes.new_tensor([wanted[1] / size[1], wanted[0] / size[0]] * 2)
    boxes = clip_boxes(found.boxes * factor, wanted)
    kept = has_area(boxes)
    masks = None if found.masks is None else found.masks[kept]
    return Found(boxes[kept], found.scores[kept], found.labels[kept], found.rows[kept], masks)
