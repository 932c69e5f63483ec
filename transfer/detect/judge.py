"""Detections on all images of a set, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.engine.collectives import Collectives
from zoo.engine.precision import Precision
from zoo.probe.folded import folded

from .annotations import BoxSet
from .batches import view_for_test
from .coco_scores import NAMES, coco_scores, encode_masks
from .models.images import Found
from .models.kinds import AnyDetector
from .scores import Detections, VocScores, voc_scores
from .training import Normalisation, Plan, make_images

__all__ = ["detect_all", "detect_one", "for_detection", "judged", "shared_out"]


def detect_all(
    detector: AnyDetector, images: BoxSet, plan: Plan, precision: Precision, world: Collectives
) -> list[Detections]:
    """The detections on every image; the processes share the work, and each gets all of them."""
    network = for_detection(detector, precision)

    def detect(row: int) -> Detections:
        sides = plan.protocol.test_size, plan.protocol.most
        view, size = view_for_test(images, row, *sides, detector.view_size)
        return detect_one(network, view, size, plan.colours, precision)

    return shared_out(len(images), detect, world)


def shared_out(count: int, detect: Callable[[int], Detections], world: Collectives) -> list[Detections]:
    """``detect`` of each of ``count`` images: the processes share the work, and each gets all of them."""
    mine = [detect(row) for row in range(world.rank, count, world.world_size)]
    if world.world_size == 1:
        return mine
    everyone = world.gather_values([_plain(one) for one in mine])
    return [_from_plain(everyone[row % world.world_size][row // world.world_size]) for row in range(count)]


def for_detection(detector: AnyDetector, precision: Precision) -> Any:
    """A copy for nothing but detecting: norms inside convolutions, filters in the type that is computed in."""
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


def judged(
    images: BoxSet, found: list[Detections], ap: str, rounding: bool, masks: bool = False
) -> dict[str, Any]:
    """``metrics`` (0..1), ``ap`` (how they are computed), ``per_class``, and other ways to compute them.

    ``curves`` are the precisions of each class at recalls of 0, 0.01, ... 1, at an IoU of 0.5; None for a class
    without objects.
    """
    if images.kind == "coco":
        return _by_coco(images, found, masks)
    scores = voc_scores([p.objects for p in images.pictures], found, len(images.classes), rounding)
    absent = [name for name, count in zip(images.classes, scores.objects, strict=True) if not count]
    return {
        "metrics": scores.summary(ap),
        "ap": f"{ap}, " + ("rounded as detectron2 prints" if rounding else "not rounded"),
        "other": {kind: scores.summary(kind) for kind in ("11-point", "area")},
        "per_class": _table(scores, images.classes, ap),
        "curves": {
            name: [round(value, 4) for value in curve.tolist()] if count else None
            for name, curve, count in zip(images.classes, scores.curves, scores.objects, strict=True)
        },
        "classes_without_test_objects": absent,
    }


def _by_coco(images: BoxSet, found: list[Detections], with_masks: bool) -> dict[str, Any]:
    boxes = coco_scores(images, found, "bbox")
    metrics = {name: boxes[name] for name in NAMES}
    per_class = [{"class": name, "AP": value} for name, value in boxes["per_class"].items()]
    if with_masks and images.has_masks:
        masks = coco_scores(images, found, "segm")
        metrics |= {f"mask_{name}": masks[name] for name in NAMES}
        for row in per_class:
            row["mask_AP"] = masks["per_class"][row["class"]]
    curves = {
        name: None if curve is None else [round(value, 4) for value in curve]
        for name, curve in boxes["curves"].items()
    }
    return {"metrics": metrics, "ap": "coco", "per_class": per_class, "curves": curves}


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
