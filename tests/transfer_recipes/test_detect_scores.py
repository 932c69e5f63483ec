"""Average precision of boxes and masks: the reference's numbers, the definition, and pycocotools."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest

from golden.detection_cases import load_detection
from transfer.detect.annotations import BoxSet, Objects, Picture
from transfer.detect.coco_scores import (
    NAMES,
    CocoJudge,
    coco_results,
    coco_scores,
    encode_masks,
    twelve_numbers,
)
from transfer.detect.rle import bitmap_of, polygons_to_bitmap
from transfer.detect.scores import Detections, average_precision, voc_scores

FAMILIES = {"11_point (year 2007)": "11-point", "area (year 2012)": "area"}
VOC = [
    "voc_ap_main",
    "voc_ap_missing_class",
    "voc_ap_class_without_ground_truth",
    "voc_ap_coordinate_rounding_strict_iou",
    "voc_ap_score_rounding_tie",
]


def objects_of(boxes, labels, difficult=None, crowd=None, areas=None, masks=None):
    boxes = np.array(boxes, dtype=float).reshape(-1, 4)
    none = [False] * len(labels)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) if areas is None else np.array(areas, dtype=float)
    flags = (np.array(none if flag is None else flag, dtype=bool) for flag in (difficult, crowd))
    return Objects(boxes, np.array(labels, dtype=np.int64), *flags, areas, masks)


def said(rows, labels=None, masks=None):
    """Detections of rows x1, y1, x2, y2, score."""
    rows = np.array(rows, dtype=float).reshape(-1, 5)
    labels = np.zeros(len(rows), dtype=np.int64) if labels is None else np.array(labels, dtype=np.int64)
    return Detections(rows[:, :4], rows[:, 4], labels, masks)


def opened(case):
    classes = case.args["classes"]
    truth, found = [], []
    for image in case.args["images"]:
        things = image["objects"]
        boxes = [[o["xmin"] - 1, o["ymin"] - 1, o["xmax"], o["ymax"]] for o in things]
        labels = [classes.index(o["name"]) for o in things]
        truth.append(objects_of(boxes, labels, [bool(o["difficult"]) for o in things]))
        mine = [d for d in case.args["detections"] if d["image_id"] == image["id"]]
        found.append(said([[*d["box"], d["score"]] for d in mine], [classes.index(d["class"]) for d in mine]))
    return classes, truth, found


@pytest.mark.parametrize("name", VOC)
def test_voc_numbers_are_the_references(shared, name):
    case = load_detection(shared, name)
    classes, truth, found = opened(case)
    scores = voc_scores(truth, found, len(classes))
    for family, values in case.args["expected"].items():
        got = scores.summary(FAMILIES[family], every_class=True)
        for metric, want in values.items():
            same = (
                math.isnan(got[metric])
                if want is None
                else math.isclose(100 * got[metric], want, abs_tol=1e-6)
            )
            assert same, (family, metric, got[metric], want)
    for family, table in case.args["expected_per_class"].items():
        mine = scores.eleven if family.startswith("11") else scores.area
        for key, want in table.items():
            label, level = key.split("@")
            got = mine[classes.index(label), (int(level) - 50) // 5]
            assert math.isnan(got) if want is None else math.isclose(100 * got, want, abs_tol=1e-6), key
    plain = voc_scores(truth, found, len(classes), rounding=False)
    for family, values in case.args.get("sensitivity", {}).items():
        kind = "11-point" if family.startswith("11") else "area"
        for metric, want in values["without_rounding"].items():
            got = plain.summary(kind, every_class=True)[metric]
            if want is None or math.isnan(want):
                assert math.isnan(got)
            else:
                assert math.isclose(100 * got, want, abs_tol=1e-6), (family, metric)


def test_voc_by_hand():
    truth = [objects_of([[0, 0, 10, 10]], [0])]

    def ap(found, truth=truth, threshold=0):
        return voc_scores(truth, found, 1, rounding=False).area[0, threshold]

    assert ap([said([[0, 0, 10, 10, 0.9]])]) == 1.0
    assert ap([said([])]) == 0.0
    # A second detection of the same object is wrong; it comes after, so the area stays.
    assert ap([said([[0, 0, 10, 10, 0.9], [0, 0, 10, 10, 0.8]])]) == 1.0
    assert ap([said([[49, 49, 60, 60, 0.9], [0, 0, 10, 10, 0.8]])]) == 0.5
    # Half of the object, by inclusive pixels, is exactly 0.5: not more than the threshold.
    assert ap([said([[0, 0, 10, 5, 0.9]])]) == 0.0
    assert ap([said([[0, 0, 10, 6, 0.9]])]) == 1.0
    hard = [objects_of([[0, 0, 10, 10]], [0], [True]), objects_of([[0, 0, 10, 10]], [0])]
    assert ap([said([[0, 0, 10, 10, 0.9]]), said([[0, 0, 10, 10, 0.8]])], hard) == 1.0


def test_no_predictions_give_0():
    truth = [objects_of([[0, 0, 10, 10]], [1])]
    for kind in ("11-point", "area"):
        assert voc_scores(truth, [said([])], 3).summary(kind) == {"AP": 0.0, "AP50": 0.0, "AP75": 0.0}
        assert voc_scores([], [], 2).summary(kind)["AP50"] == 0.0
    pictures = [Picture("a", None, (20, 20), truth[0], 7)]
    images = BoxSet("coco", "val", ("a", "b"), pictures, (3, 9))
    scores = coco_scores(images, [said([])])
    assert scores["AP"] == scores["AR100"] == 0.0 and scores["per_class"] == {"a": None, "b": 0.0}


def test_classes_without_objects_are_left_out_of_the_mean():
    truth = [objects_of([[0, 0, 10, 10]], [0])]
    found = [said([[0, 0, 10, 10, 0.9], [0, 0, 10, 10, 0.9]], [0, 1])]
    assert voc_scores(truth, found, 2).summary("area")["AP50"] == 1.0


def test_eleven_points_by_hand():
    recall, precision = np.array([0.5, 0.5, 1.0]), np.array([1.0, 0.5, 2 / 3])
    assert math.isclose(average_precision(recall, precision, "11-point"), (6 * 1.0 + 5 * 2 / 3) / 11)
    assert math.isclose(average_precision(recall, precision, "area"), 0.5 * 1.0 + 0.5 * 2 / 3)
    nothing = np.array([])
    assert (
        average_precision(nothing, nothing, "area") == average_precision(nothing, nothing, "11-point") == 0.0
    )


def brute_force(truth, found, threshold):
    """The definition, pixel by pixel."""

    def cells(box):
        return {(x, y) for x in range(int(box[0]), int(box[2])) for y in range(int(box[1]), int(box[3]))}

    ranked = sorted((-score, i, k) for i, d in enumerate(found) for k, score in enumerate(d.scores))
    total = sum(int((~t.difficult).sum()) for t in truth)
    used, marks = set(), []
    for _, image, index in ranked:
        mine = cells(found[image].boxes[index])
        best, best_iou = None, -1.0
        for number, box in enumerate(truth[image].boxes):
            other = cells(box)
            iou = len(mine & other) / len(mine | other)
            if iou > best_iou:
                best, best_iou = number, iou
        if best is not None and best_iou > threshold:
            if truth[image].difficult[best]:
                continue
            marks.append((image, best) not in used)
            used.add((image, best))
        else:
            marks.append(False)
    points = [(sum(marks[: n + 1]) / total, sum(marks[: n + 1]) / (n + 1)) for n in range(len(marks))]
    area, before = 0.0, 0.0
    for recall in sorted({recall for recall, _ in points if recall > 0}):
        area += (recall - before) * max(p for r, p in points if r >= recall)
        before = recall
    return area


def test_ap_is_what_its_definition_says():
    rng = np.random.default_rng(0)
    values = set()
    for _ in range(30):
        truth, found = [], []
        for _ in range(3):
            n, m = rng.integers(1, 4), rng.integers(0, 6)
            corner = rng.integers(0, 7, (n, 2))
            boxes = np.concatenate((corner, corner + rng.integers(1, 7, (n, 2))), 1)
            truth.append(objects_of(boxes, [0] * n, rng.random(n) < 0.2))
            moved = boxes[rng.integers(0, n, m)] + rng.integers(-1, 2, (m, 4))
            moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
            found.append(said(np.concatenate((moved, rng.permutation(100)[:m, None] / 100.0), 1)))
        if all(t.difficult.all() for t in truth):
            continue
        scores = voc_scores(truth, found, 1, rounding=False)
        for column in (0, 5):
            want = brute_force(truth, found, 0.5 + 0.05 * column)
            assert math.isclose(scores.area[0, column], want, abs_tol=1e-12)
            values.add(round(want, 6))
    assert len(values) > 8


# --- COCO ---


def coco_case(shared):
    content = json.loads((shared / "golden" / "det_coco_inputs.json").read_text("utf-8"))
    truth, detections = content["ground_truth"], content["detections"]
    numbers = [category["id"] for category in truth["categories"]]
    pictures = []
    for image in truth["images"]:
        mine = [one for one in truth["annotations"] if one["image_id"] == image["id"]]
        boxes = np.array([one["bbox"] for one in mine], dtype=float).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        objects = objects_of(
            boxes,
            [numbers.index(one["category_id"]) for one in mine],
            None,
            [bool(one["iscrowd"]) for one in mine],
            [one["area"] for one in mine],
            [one["segmentation"] for one in mine],
        )
        pictures.append(
            Picture(str(image["id"]), None, (image["height"], image["width"]), objects, image["id"])
        )
    found = []
    for picture in pictures:
        mine = [one for one in detections if one["image_id"] == picture.number]
        boxes = np.array([one["bbox"] for one in mine], dtype=float).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        rows = np.concatenate((boxes, np.array([[one["score"]] for one in mine]).reshape(-1, 1)), 1)
        labels = [numbers.index(one["category_id"]) for one in mine]
        found.append(said(rows, labels, [one["segmentation"] for one in mine]))
    names = tuple(category["name"] for category in truth["categories"])
    return BoxSet("coco", "val", names, pictures, tuple(numbers)), found, truth


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_coco_numbers_are_the_references_and_pycocotools(shared, kind, capsys):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    case = load_detection(shared, "coco_ap")
    images, found, truth = coco_case(shared)
    got = coco_scores(images, found, kind)
    assert capsys.readouterr().out == ""  # the library would print a table
    judge = CocoJudge(images, kind)  # image by image, the last one first
    for row in reversed(range(len(images))):
        judge.add(images.chosen([row]), [found[row]])
    assert judge.scores() == got
    for name in NAMES:
        assert math.isclose(got[name], case.args["expected"][kind][name], abs_tol=1e-9), name
    for number, want in case.args["AP_per_category"][kind].items():
        name = images.classes[images.numbers.index(int(number))]
        assert math.isclose(got["per_class"][name], want, abs_tol=1e-9)
    theirs = COCO()
    theirs.dataset = copy.deepcopy(truth)
    theirs.createIndex()
    results = list(coco_results(images, found))
    for one in results:
        del one["bbox" if kind == "segm" else "segmentation"]
    peer = twelve_numbers(COCOeval(theirs, theirs.loadRes(results), kind), images.classes, images.numbers)
    assert peer == got


def test_polygons_cover_pycocotools_pixels():
    from pycocotools import mask

    rng = np.random.default_rng(0)
    for _ in range(200):
        height, width = rng.integers(5, 60, 2)
        shapes = [(rng.uniform(-6, 66, 2 * rng.integers(3, 9))).tolist() for _ in range(rng.integers(1, 3))]
        want = mask.decode(mask.merge(mask.frPyObjects(shapes, int(height), int(width))))
        assert np.array_equal(polygons_to_bitmap(shapes, height, width), want.astype(bool))


def test_run_lengths_are_read_and_written():
    rng = np.random.default_rng(0)
    bitmaps = (rng.random((3, 7, 5)) < 0.4).astype(np.uint8)
    for bitmap, text in zip(bitmaps, encode_masks(bitmaps), strict=True):
        assert isinstance(json.dumps(text), str)
        assert np.array_equal(bitmap_of(text, 7, 5), bitmap.astype(bool))
        flat = bitmap.T.ravel()
        edges = np.flatnonzero(np.diff(np.concatenate(([0], flat, [2]))))
        counts = np.diff(np.concatenate(([0], edges))).tolist()
        assert np.array_equal(bitmap_of({"size": [7, 5], "counts": counts}, 7, 5), bitmap.astype(bool))
    with pytest.raises(ValueError, match="7 x 5"):
        bitmap_of({"size": [7, 5], "counts": [35]}, 5, 7)
