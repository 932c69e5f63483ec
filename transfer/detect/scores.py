"""Average precision of boxes by Pascal VOC's rules. No torch here.

Inclusive pixels; a detection takes the best-overlapping object of its class and must overlap it by more than the
threshold; difficult objects are neither right nor wrong; a second detection of one object is wrong. Source:
detectron2 ``evaluation/pascal_voc_evaluation.py``, which judges what it prints: scores with three decimals,
coordinates with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.errors import RunError

from .annotations import Objects

__all__ = [
    "THRESHOLDS",
    "Detections",
    "VocJudge",
    "VocScores",
    "average_precision",
    "image_precision",
    "voc_scores",
]

THRESHOLDS = np.linspace(0.5, 0.95, 10)
_LEVELS = np.arange(0.0, 1.1, 0.1)
_RECALLS = np.arange(101) / 100
_FROM_ONE = np.array([1.0, 1.0, 0.0, 0.0])


@dataclass
class Detections:
    """What a detector says of one image: boxes (N, 4), edges from 0; scores; labels; masks as run lengths."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: list[Any] | None = None

    def __post_init__(self) -> None:
        """Raises ``RunError`` for what can't be ranked or drawn."""
        if not (np.isfinite(self.scores).all() and np.isfinite(self.boxes).all()):
            raise RunError(
                "The scores or boxes of detections are no numbers.",
                fix="the detector's weights are damaged, or too large for its precision: try --precision float32, "
                "or train it again with a lower --lr",
            )


@dataclass(frozen=True)
class VocScores:
    """AP in 0..1 of each class at each of ``THRESHOLDS``, (classes, 10), by eleven points and by area.

    ``objects`` counts the objects of each class that are not difficult, ``detections`` its detections.
    ``curves`` are the highest precisions at recalls of 0, 0.01, ... 1 and more, at the first threshold,
    (classes, 101).
    """

    eleven: np.ndarray
    area: np.ndarray
    objects: np.ndarray
    detections: np.ndarray
    curves: np.ndarray

    def summary(self, kind: str, every_class: bool = False) -> dict[str, float]:
        """``AP`` (mean over the thresholds), ``AP50`` and ``AP75``, means over the classes.

        Args:
            kind: ``11-point`` or ``area``.
            every_class: also the classes that no image has an object of, as detectron2 does (by area such a
                class is NaN once it is detected, and so is the mean).
        """
        table = self.eleven if kind == "11-point" else self.area
        if not every_class:
            table = table[self.objects > 0]
        if not len(table):
            return {"AP": 0.0, "AP50": 0.0, "AP75": 0.0}
        means = table.mean(axis=0)
        return {"AP": float(means.mean()), "AP50": float(means[0]), "AP75": float(means[5])}


def average_precision(recall: np.ndarray, precision: np.ndarray, kind: str) -> float:
    """Area under the precision envelope, or VOC 2007's mean over eleven recall levels."""
    if kind == "11-point":
        return float(np.mean([precision[recall >= level].max(initial=0.0) for level in _LEVELS]))
    recall = np.concatenate(([0.0], recall, [1.0]))
    envelope = np.maximum.accumulate(np.concatenate(([0.0], precision, [0.0]))[::-1])[::-1]
    steps = np.flatnonzero(recall[1:] != recall[:-1])
    return float(np.sum((recall[steps + 1] - recall[steps]) * envelope[steps + 1]))


class VocJudge:
    """Judges the detections of one image after the other; of a detection 24 bytes are kept.

    Args:
        classes: how many there are.
        rounding: judge the numbers as detectron2 prints them.
    """

    def __init__(self, classes: int, rounding: bool = True) -> None:
        self.classes, self.rounding = classes, rounding
        self._labels: list[np.ndarray] = []
        self._hard: list[np.ndarray] = []
        self._found: list[tuple[np.ndarray, ...]] = []  # label, score, object, overlap
        self._objects = 0

    def add(self, truth: Objects, found: Detections) -> None:
        """Judge one image."""
        scores, best, overlap = _matched(truth, found, self.rounding)
        best = np.where(best >= 0, best + self._objects, -1).astype(np.int32)
        self._found.append((found.labels.astype(np.int32), scores, best, overlap))
        self._labels.append(truth.labels.astype(np.int64))
        self._hard.append(truth.difficult.astype(bool))
        self._objects += len(truth)

    def scores(self) -> VocScores:
        """What was found out."""
        labels, hard = _joined(self._labels, np.int64), _joined(self._hard, bool)
        kinds = (np.int32, np.float64, np.int32, np.float64)
        columns = zip(*self._found, strict=True) if self._found else [()] * len(kinds)
        names, scores, best, overlap = (_joined(*column) for column in zip(columns, kinds, strict=True))
        eleven, area, curves = (
            np.zeros((self.classes, 10)),
            np.zeros((self.classes, 10)),
            np.zeros((self.classes, len(_RECALLS))),
        )
        objects_of, detections_of = (np.zeros(self.classes, dtype=np.int64) for _ in range(2))
        for label in range(self.classes):
            mine = np.flatnonzero(names == label)
            objects_of[label] = int(((labels == label) & ~hard).sum())
            detections_of[label] = len(mine)
            if not len(mine):
                continue
            mine = mine[np.argsort(-scores[mine], kind="stable")]
            for column, threshold in enumerate(THRESHOLDS):
                recall, precision = _curve(
                    best[mine], overlap[mine] > threshold, hard, int(objects_of[label])
                )
                eleven[label, column] = average_precision(recall, precision, "11-point")
                area[label, column] = average_precision(recall, precision, "area")
                if column == 0:
                    curves[label] = [precision[recall >= level].max(initial=0.0) for level in _RECALLS]
        return VocScores(eleven, area, objects_of, detections_of, curves)


def voc_scores(
    truth: Sequence[Objects], found: Sequence[Detections], classes: int, rounding: bool = True
) -> VocScores:
    """Judge the detections of all images; see ``VocJudge``."""
    judge = VocJudge(classes, rounding)
    for objects, detections in zip(truth, found, strict=True):
        judge.add(objects, detections)
    return judge.scores()


def image_precision(truth: Objects, found: Detections) -> float:
    """AP50 by area of a single image, all classes ranked together; NaN if it has no object that counts."""
    hard = truth.difficult | truth.crowd
    if hard.all():
        return float("nan")
    scores, best, overlap = _matched(truth, found, rounding=False)
    order = np.argsort(-scores, kind="stable")
    curve = _curve(best[order], overlap[order] > THRESHOLDS[0], hard, int((~hard).sum()))
    return average_precision(*curve, "area")


def _matched(truth: Objects, found: Detections, rounding: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each detection its score, the object of its class that it overlaps most (-1: none), and how much."""
    scores = np.asarray(found.scores, dtype=np.float64)
    if rounding:
        scores = np.array([float(f"{score:.3f}") for score in scores.tolist()], dtype=np.float64)
    best, overlap = np.full(len(scores), -1, dtype=np.int64), np.zeros(len(scores))
    if len(scores) and len(truth):
        iou = _overlaps(_printed(found.boxes, rounding), truth.boxes + _FROM_ONE)
        iou[found.labels[:, None] != truth.labels[None, :]] = -1.0
        index = iou.argmax(axis=1)
        overlap = iou[np.arange(len(iou)), index]
        best = np.where(overlap >= 0, index, -1)
    return scores, best, overlap


def _curve(
    best: np.ndarray, over: np.ndarray, hard: np.ndarray, positives: int
) -> tuple[np.ndarray, np.ndarray]:
    hit = over & (best >= 0)
    ignored = hit.copy()
    ignored[hit] = hard[best[hit]]
    candidates = np.flatnonzero(hit & ~ignored)
    right = np.zeros(len(best))
    right[candidates[np.unique(best[candidates], return_index=True)[1]]] = 1.0
    wrong = 1.0 - right
    wrong[ignored] = 0.0
    hits, misses = np.cumsum(right), np.cumsum(wrong)
    with np.errstate(divide="ignore", invalid="ignore"):
        recall = hits / positives if positives else np.full(len(hits), np.nan)
    return recall, hits / np.maximum(hits + misses, np.finfo(np.float64).eps)


def _printed(boxes: np.ndarray, rounding: bool) -> np.ndarray:
    """Boxes in inclusive pixels from 1, perhaps with the one decimal that is printed of a float32."""
    if not rounding:
        return np.asarray(boxes, dtype=np.float64) + _FROM_ONE
    shifted = np.asarray(boxes, dtype=np.float32) + _FROM_ONE.astype(np.float32)
    return np.array([float(f"{value:.1f}") for value in shifted.ravel().tolist()]).reshape(-1, 4)


def _overlaps(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    inside = np.prod(np.maximum(high - low + 1.0, 0.0), axis=2)
    area = np.prod(boxes[:, 2:] - boxes[:, :2] + 1.0, axis=1)
    areas = np.prod(others[:, 2:] - others[:, :2] + 1.0, axis=1)
    return np.asarray(inside / (area[:, None] + areas[None, :] - inside))


def _joined(parts: Sequence[np.ndarray], kind: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=kind) for part in parts] or [np.zeros(0, dtype=kind)])
