"""COCO's twelve numbers for boxes and masks, through hotcoco, which equals pycocotools. No torch here."""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zoo.errors import InputError
from zoo.files import disk_errors, read_json, whole_file

from .annotations import BoxSet
from .scores import Detections

__all__ = [
    "NAMES",
    "CocoJudge",
    "coco_results",
    "coco_scores",
    "dataset_of",
    "encode_masks",
    "need_hotcoco",
    "read_results",
    "result_file",
    "twelve_numbers",
]

NAMES = (
    "AP",
    "AP50",
    "AP75",
    "APsmall",
    "APmedium",
    "APlarge",
    "AR1",
    "AR10",
    "AR100",
    "ARsmall",
    "ARmedium",
    "ARlarge",
)
_SMALL, _MEDIUM, _LARGE = 1, 2, 3
_ALL, _MOST = 0, 2
_TOGETHER = 64  # images that the library is told of at once


def need_hotcoco() -> Any:
    """The library.

    Raises:
        InputError: it isn't there.
    """
    try:
        import hotcoco
    except ImportError:
        raise InputError(
            "COCO's numbers and masks need the package hotcoco.", fix="pip install 'vision-model-zoo[detect]'"
        ) from None
    return hotcoco


class CocoJudge:
    """Judges detections by COCO's rules, some images at a time: of a detection how it matched is kept (37 bytes).

    Args:
        images: the whole set, whose classes and category ids these are.
        kind: ``bbox`` or ``segm``.
    """

    def __init__(self, images: BoxSet, kind: str = "bbox") -> None:
        self.kind, self.classes, self.numbers = kind, images.classes, _numbers(images)
        self._evaluator = need_hotcoco().StreamingEval(dataset_of(images.chosen([]))["categories"], kind)

    def add(self, truth: BoxSet, found: Sequence[Detections]) -> None:
        """Judge the detections of some images, each image once."""
        content = dataset_of(truth, self.kind)
        rows = _rows(truth, found, self.numbers)
        said: Any = rows
        if self.kind == "segm":
            masks = [mask for one in found for mask in (one.masks or [])]
            # Without boxes: with one a detection would be small, medium or large by it and not by its mask.
            said = [
                {
                    "image_id": int(row[0]),
                    "category_id": int(row[6]),
                    "score": float(row[5]),
                    "segmentation": mask,
                }
                for row, mask in zip(rows, masks, strict=True)
            ]
        self._evaluator.update(content["images"], content["annotations"], said)

    def scores(self) -> dict[str, Any]:
        """What was found out.

        Returns:
            The twelve ``NAMES`` in 0..1 (-1 where there is no object of that size); ``per_class``: AP of each class,
            None where there is no object of it; ``curves``: its precision at IoU 0.5 at recalls of 0, 0.01, ... 1.
        """
        return _twelve(self._evaluator.finalize(), self.classes, self.numbers)


def coco_scores(truth: BoxSet, found: Sequence[Detections], kind: str = "bbox") -> dict[str, Any]:
    """Judge the detections of all images of a set; see ``CocoJudge``."""
    judge = CocoJudge(truth, kind)
    for first in range(0, len(truth), _TOGETHER):
        rows = range(first, min(first + _TOGETHER, len(truth)))
        judge.add(truth.chosen(rows), found[first : rows.stop])
    return judge.scores()


def twelve_numbers(evaluation: Any, classes: Sequence[str], numbers: Sequence[int]) -> dict[str, Any]:
    """Run an evaluation (hotcoco's, or any other of the same shape) and reduce it."""
    evaluation.evaluate()
    return _twelve(evaluation, classes, numbers)


def _twelve(evaluation: Any, classes: Sequence[str], numbers: Sequence[int]) -> dict[str, Any]:
    evaluation.accumulate()
    precision = np.asarray(
        evaluation.eval["precision"]
    )  # thresholds, recalls, classes, areas, most detections
    recall = np.asarray(evaluation.eval["recall"])  # thresholds, classes, areas, most detections
    values = [
        _mean(precision[:, :, :, _ALL, _MOST]),
        _mean(precision[0, :, :, _ALL, _MOST]),
        _mean(precision[5, :, :, _ALL, _MOST]),
        *(_mean(precision[:, :, :, area, _MOST]) for area in (_SMALL, _MEDIUM, _LARGE)),
        *(_mean(recall[:, :, _ALL, most]) for most in (0, 1, _MOST)),
        *(_mean(recall[:, :, area, _MOST]) for area in (_SMALL, _MEDIUM, _LARGE)),
    ]
    order = sorted(range(len(numbers)), key=lambda label: numbers[label])  # the evaluation sorts by id
    per_class: dict[str, float | None] = {}
    curves: dict[str, list[float] | None] = {}
    for column, label in enumerate(order):
        value = _mean(precision[:, :, column, _ALL, _MOST])
        per_class[classes[label]] = None if value < 0 else value
        curves[classes[label]] = None if value < 0 else precision[0, :, column, _ALL, _MOST].tolist()
    return {
        **dict(zip(NAMES, values, strict=True)),
        "per_class": {name: per_class[name] for name in classes},
        "curves": {name: curves[name] for name in classes},
    }


def _mean(values: np.ndarray) -> float:
    known = values[values > -1]
    return float(np.mean(known)) if known.size else -1.0


def _numbers(images: BoxSet) -> tuple[int, ...]:
    return images.numbers or tuple(range(1, len(images.classes) + 1))


def dataset_of(truth: BoxSet, kind: str = "bbox") -> dict[str, Any]:
    """The set as a COCO annotation file has it, with masks for ``segm``."""
    numbers = _numbers(truth)
    annotations: list[dict[str, Any]] = []
    for picture in truth.pictures:
        objects = picture.objects
        for row, box in enumerate(objects.boxes.tolist()):
            one = {
                "id": len(annotations) + 1,
                "image_id": picture.number,
                "category_id": numbers[int(objects.labels[row])],
                "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
                "area": float(objects.areas[row]),
                "iscrowd": int(objects.crowd[row]),
            }
            if kind == "segm" and objects.masks is not None and objects.masks[row] is not None:
                one["segmentation"] = objects.masks[row]
            annotations.append(one)
    sizes = [picture.size or (0, 0) for picture in truth.pictures]
    return {
        "images": [
            {"id": picture.number, "height": size[0], "width": size[1]}
            for picture, size in zip(truth.pictures, sizes, strict=True)
        ],
        "annotations": annotations,
        "categories": [
            {"id": number, "name": name} for number, name in zip(numbers, truth.classes, strict=True)
        ],
    }


def _rows(truth: BoxSet, found: Sequence[Detections], numbers: Sequence[int]) -> np.ndarray:
    """image, x, y, width, height, score, category of each detection, float64."""
    of_label = np.array(numbers, dtype=np.float64)
    parts = []
    for picture, one in zip(truth.pictures, found, strict=True):
        rows = np.empty((len(one.scores), 7))
        rows[:, 0] = picture.number
        rows[:, 1:3] = one.boxes[:, :2]
        rows[:, 3:5] = one.boxes[:, 2:] - one.boxes[:, :2]
        rows[:, 5] = one.scores
        rows[:, 6] = of_label[one.labels]
        parts.append(rows)
    return np.concatenate(parts or [np.empty((0, 7))])


def coco_results(truth: BoxSet, found: Sequence[Detections]) -> Iterator[dict[str, Any]]:
    """Detections as a COCO result file has them, under the annotations' own ids, one after the other."""
    numbers = _numbers(truth)
    for picture, one in zip(truth.pictures, found, strict=True):
        rows = _rows(replace(truth, pictures=[picture]), [one], numbers)
        for row, mask in zip(rows.tolist(), one.masks or [None] * len(rows), strict=True):
            result = {"image_id": int(row[0]), "category_id": int(row[6]), "bbox": row[1:5], "score": row[5]}
            if mask is not None:
                result["segmentation"] = mask
            yield result


@contextlib.contextmanager
def result_file(path: Path) -> Iterator[Callable[[BoxSet, Sequence[Detections]], None]]:
    """A COCO result file to which the detections of some images are added by what this yields, one a line.

    It appears when it is left, whole or not at all.

    Raises:
        RunError: the disk failed.
    """
    doing, before = "Writing the detections", "["
    with contextlib.ExitStack() as stack:
        with disk_errors(doing, path):
            for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # by a process that was killed
                left.unlink(missing_ok=True)
            file = stack.enter_context(open(stack.enter_context(whole_file(path)), "w", encoding="utf-8"))

        def add(truth: BoxSet, found: Sequence[Detections]) -> None:
            nonlocal before
            with disk_errors(doing, path):
                for result in coco_results(truth, found):
                    file.write(f"{before}\n" + json.dumps(result, separators=(",", ":")))
                    before = ","

        yield add
        with disk_errors(doing, path):
            file.write("[]\n" if before == "[" else "\n]\n")
            stack.close()


def read_results(path: Path, truth: BoxSet) -> list[Detections]:
    """The detections of each image in a COCO result file, the best first.

    Raises:
        InputError: it can't be read, or is of other images or classes.
    """
    numbers = _numbers(truth)
    label_of = {number: label for label, number in enumerate(numbers)}
    of_image: dict[int, list[dict[str, Any]]] = {picture.number: [] for picture in truth.pictures}
    try:
        for one in read_json(path):
            of_image[one["image_id"]].append({**one, "label": label_of[one["category_id"]]})
        return [_of_image(of_image[picture.number]) for picture in truth.pictures]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"The detections are none of these images ({type(error).__name__}: {error}).", where=path
        ) from None


def _of_image(rows: Sequence[dict[str, Any]]) -> Detections:
    rows = sorted(rows, key=lambda row: -row["score"])
    boxes = np.array([row["bbox"] for row in rows], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    masks = [row["segmentation"] for row in rows] if rows and "segmentation" in rows[0] else None
    scores = np.array([row["score"] for row in rows], dtype=np.float64)
    return Detections(boxes, scores, np.array([row["label"] for row in rows], dtype=np.int64), masks)


def encode_masks(masks: np.ndarray) -> list[dict[str, Any]]:
    """uint8 (N, height, width) as run lengths in text, N dicts."""
    if not len(masks):
        return []
    found = need_hotcoco().mask.encode(np.ascontiguousarray(masks.transpose(1, 2, 0)))
    size = list(masks.shape[1:])  # one list for all: there may be a million masks
    return [{"size": size, "counts": _text(one["counts"])} for one in found]


def _text(counts: bytes | str) -> str:
    return counts.decode("ascii") if isinstance(counts, bytes) else counts
