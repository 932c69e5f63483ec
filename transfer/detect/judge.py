"""Detections on all images of a set, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.engine.collectives import Collectives
from zoo.engine.precision import Precision
from zoo.errors import RunError
from zoo.probe.folded import folded

from .annotations import BoxSet
from .batches import view_for_test
from .coco_scores import NAMES, CocoJudge, encode_masks
from .models.images import Found
from .models.kinds import AnyDetector
from .scores import Detections, VocJudge, VocScores
from .training import Normalisation, Plan, make_images

__all__ = ["AnyJudge", "Part", "detect_all", "detect_one", "for_detection", "judge_for", "shared_out"]

_TOGETHER = 16


Part = tuple[BoxSet, list[Detections]]
"""Some images of a set with what was detected on them."""


def detect_all(
    detector: AnyDetector, images: BoxSet, plan: Plan, precision: Precision, world: Collectives
) -> Iterator[Part]:
    """The detections on every image, some images at a time; see ``shared_out``."""
    network = for_detection(detector, precision)

    def detect(row: int) -> Detections:
        sides = plan.protocol.test_size, plan.protocol.most
        view, size = view_for_test(images, row, *sides, detector.view_size)
        return detect_one(network, view, size, plan.colours, precision)

    return shared_out(images, detect, world)


def shared_out(images: BoxSet, detect: Callable[[int], Detections], world: Collectives) -> Iterator[Part]:
    """``detect`` of the row of each image, in their order: the processes share the work, and each gets all of it.

    No more than ``_TOGETHER`` images of each process are in memory at once: with masks they are large.
    """
    together = _TOGETHER * world.world_size
    for first in range(0, len(images), together):
        rows = range(first, min(first + together, len(images)))
        mine = [detect(row) for row in rows[world.rank :: world.world_size]]
        if world.world_size > 1:
            everyone = world.gather_values([_plain(one) for one in mine])
            turns = (divmod(place, world.world_size) for place in range(len(rows)))
            mine = [_from_plain(everyone[rank][turn]) for turn, rank in turns]
        yield images.chosen(rows), mine


def for_detection(detector: AnyDetector, precision: Precision) -> Any:
    """A copy for nothing but detecting: norms inside convolutions, filters in the type that is computed in.

    Raises:
        RunError: its weights are no numbers; it would seem to find nothing.
    """
    broken = [
        name
        for name, values in detector.state_dict().items()
        if values.is_floating_point() and not values.isfinite().all()
    ]
    if broken:
        raise RunError(
            f"{len(broken)} tensors of the detector hold values that are no numbers ({broken[0]}).",
            fix="train it again, with a lower --lr or --precision float32",
        )
    network = folded(detector)
    for part in ("trunk", "pyramid", "rpn"):  # others may compute in float32 whatever the precision is
        for module in getattr(network, part, nn.Module()).modules():
            if isinstance(module, nn.Conv2d):
                module.to(precision.compute_dtype)
    return network.to(memory_format=precision.memory_format)


@torch.inference_mode()
def detect_one(
    detector: AnyDetector,
    view: torch.Tensor,
    size: tuple[int, int],
    colours: Normalisation,
    precision: Precision,
) -> Detections:
    """The detections on one image, in pixels of its own (height, width)."""
    images = make_images(detector, [view], colours, precision)
    with precision.autocast():
        found: Found = detector.detect(images, [size])[0]
    masks = None if found.masks is None else encode_masks(found.masks.cpu().numpy())
    boxes, scores = found.boxes.double().cpu().numpy(), found.scores.double().cpu().numpy()
    return Detections(boxes, scores, found.labels.cpu().numpy(), masks)


def judge_for(images: BoxSet, ap: str, rounding: bool, masks: bool = False) -> AnyJudge:
    """The judge of a set: by COCO's rules for COCO's, by VOC's for others.

    Args:
        images: all of them.
        ap: VOC's, ``11-point`` or ``area``.
        rounding: VOC's, whether numbers are judged as detectron2 prints them.
        masks: judge COCO's masks, too, if there are any.
    """
    return (
        _ByCoco(images, masks and images.has_masks) if images.kind == "coco" else _ByVoc(images, ap, rounding)
    )


class _ByVoc:
    """VOC's rules."""

    def __init__(self, images: BoxSet, ap: str, rounding: bool) -> None:
        self.classes, self.ap, self.rounding = images.classes, ap, rounding
        self._judge = VocJudge(len(images.classes), rounding)

    def add(self, images: BoxSet, found: Sequence[Detections]) -> None:
        """Judge the detections of some images, each image once and in the set's order."""
        for picture, one in zip(images.pictures, found, strict=True):
            self._judge.add(picture.objects, one)

    def result(self) -> dict[str, Any]:
        """``metrics`` (0..1), ``ap`` (how they are computed), ``per_class``, and other ways to compute them.

        ``curves`` are the precisions of each class at recalls of 0, 0.01, ... 1, at an IoU of 0.5; None for a class
        without objects.
        """
        scores = self._judge.scores()
        known = [(name, count > 0) for name, count in zip(self.classes, scores.objects.tolist(), strict=True)]
        return {
            "metrics": scores.summary(self.ap),
            "ap": f"{self.ap}, " + ("rounded as detectron2 prints" if self.rounding else "not rounded"),
            "other": {kind: scores.summary(kind) for kind in ("11-point", "area")},
            "per_class": _table(scores, self.classes, self.ap),
            "curves": {
                name: _rounded(curve.tolist()) if there else None
                for (name, there), curve in zip(known, scores.curves, strict=True)
            },
            "classes_without_test_objects": [name for name, there in known if not there],
        }


class _ByCoco:
    """COCO's rules, for boxes and perhaps masks."""

    def __init__(self, images: BoxSet, masks: bool) -> None:
        self._boxes = CocoJudge(images, "bbox")
        self._masks = CocoJudge(images, "segm") if masks else None

    def add(self, images: BoxSet, found: Sequence[Detections]) -> None:
        """Judge the detections of some images, each image once."""
        self._boxes.add(images, found)
        if self._masks:
            self._masks.add(images, found)

    def result(self) -> dict[str, Any]:
        """As of VOC: ``metrics``, ``ap``, ``per_class``, ``curves``."""
        boxes = self._boxes.scores()
        metrics = {name: boxes[name] for name in NAMES}
        per_class = [{"class": name, "AP": value} for name, value in boxes["per_class"].items()]
        if self._masks:
            masks = self._masks.scores()
            metrics |= {f"mask_{name}": masks[name] for name in NAMES}
            for row in per_class:
                row["mask_AP"] = masks["per_class"][row["class"]]
        curves = {name: None if curve is None else _rounded(curve) for name, curve in boxes["curves"].items()}
        return {"metrics": metrics, "ap": "coco", "per_class": per_class, "curves": curves}


AnyJudge = _ByVoc | _ByCoco


def _rounded(curve: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in curve]


def _table(scores: VocScores, classes: tuple[str, ...], ap: str) -> list[dict[str, Any]]:
    table = scores.eleven if ap == "11-point" else scores.area
    rows = []
    for label, name in enumerate(classes):
        known = scores.objects[label] > 0
        values = {"AP": table[label].mean(), "AP50": table[label, 0], "AP75": table[label, 5]}
        rows.append(
            {
                "class": name,
                **{key: float(value) if known else None for key, value in values.items()},
                "objects": int(scores.objects[label]),
                "detections": int(scores.detections[label]),
            }
        )
    return rows


def _plain(one: Detections) -> list[Any]:
    return [one.boxes.tolist(), one.scores.tolist(), one.labels.tolist(), one.masks]


def _from_plain(values: list[Any]) -> Detections:
    boxes, scores, labels, masks = values
    return Detections(
        np.array(boxes, dtype=np.float64).reshape(-1, 4),
        np.array(scores, dtype=np.float64),
        np.array(labels, dtype=np.int64),
        masks,
    )
