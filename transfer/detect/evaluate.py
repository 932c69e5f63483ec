"""Average precision of boxes, by Pascal VOC's rules.

+1 pixel areas; a detection takes the best-overlapping object of its class; difficult objects are
neither right nor wrong; a second detection of one object is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .data import VocBoxes

__all__ = ["Detections", "average_precision", "mean_average_precision", "voc_ap"]


@dataclass(frozen=True)
class Detections:
    """What a detector says of one image: boxes (N, 4) in VOC's 1-based pixels, scores, labels from 0."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray


def voc_ap(recall: np.ndarray, precision: np.ndarray, eleven_points: bool) -> float:
    """Area under the precision envelope, or VOC 2007's mean over eleven recall levels."""
    if eleven_points:
        levels = np.arange(0.0, 1.1, 0.1)
        return float(np.mean([precision[recall >= level].max(initial=0.0) for level in levels]))
    recall = np.concatenate(([0.0], recall, [1.0]))
    envelope = np.maximum.accumulate(np.concatenate(([0.0], precision, [0.0]))[::-1])[::-1]
    steps = np.flatnonzero(recall[1:] != recall[:-1])
    return float(np.sum((recall[steps + 1] - recall[steps]) * envelope[steps + 1]))


def average_precision(
    truth: Sequence[VocBoxes],
    found: Sequence[Detections],
    label: int,
    threshold: float,
    eleven_points: bool = False,
) -> float:
    """AP of one class at one IoU threshold, 0..1; NaN if the class has no object that counts."""
    wanted = [boxes.boxes[boxes.labels == label] for boxes in truth]
    hard = [boxes.difficult[boxes.labels == label] for boxes in truth]
    positives = int(sum((~h).sum() for h in hard))
    if positives == 0:
        return float("nan")
    rows = [
        (score, image, box)
        for image, detections in enumerate(found)
        for score, box, its in zip(detections.scores, detections.boxes, detections.labels, strict=True)
        if its == label
    ]
    rows.sort(key=lambda row: -row[0])
    taken = [np.zeros(len(boxes), dtype=bool) for boxes in wanted]
    right, wrong = np.zeros(len(rows)), np.zeros(len(rows))
    for row, (_, image, box) in enumerate(rows):
        overlaps = _iou(box, wanted[image])
        best = int(overlaps.argmax()) if len(overlaps) else -1
        if best >= 0 and overlaps[best] > threshold:
            if hard[image][best]:
                continue
            if not taken[image][best]:
                taken[image][best] = True
                right[row] = 1.0
                continue
        wrong[row] = 1.0
    hits, misses = np.cumsum(right), np.cumsum(wrong)
    precision = hits / np.maximum(hits + misses, np.finfo(np.float64).eps)
    return voc_ap(hits / positives, precision, eleven_points)


def mean_average_precision(
    truth: Sequence[VocBoxes], found: Sequence[Detections], classes: int, eleven_points: bool = False
) -> dict[str, float]:
    """``AP50`` and ``AP`` (mean over IoU 0.50, 0.55 .. 0.95), over the classes that occur; 0..1."""
    thresholds = np.linspace(0.5, 0.95, 10)
    table = np.array(
        [
            [average_precision(truth, found, label, float(t), eleven_points) for t in thresholds]
            for label in range(classes)
        ]
    )
    present = ~np.isnan(table[:, 0])
    if not present.any():
        return {"AP50": 0.0, "AP": 0.0}
    return {"AP50": float(table[present, 0].mean()), "AP": float(table[present].mean())}


def _iou(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    if len(others) == 0:
        return np.zeros(0)
    low = np.maximum(box[:2], others[:, :2])
    high = np.minimum(box[2:], others[:, 2:])
    inside = np.prod(np.maximum(high - low + 1.0, 0.0), axis=1)
    area = np.prod(box[2:] - box[:2] + 1.0)
    areas = np.prod(others[:, 2:] - others[:, :2] + 1.0, axis=1)
    return np.asarray(inside / (area + areas - inside))
