"""Detection: the VOC reader, average precision, the built-in folder, and the recipe from end to end."""

from __future__ import annotations

import hashlib
import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import FrozenBatchNorm2d

import zoo
from transfer.detect.config import DetectConfig
from transfer.detect.data import VOC_CLASSES, VocBoxes, VocImages, find_voc, open_voc
from transfer.detect.evaluate import Detections, average_precision, mean_average_precision, voc_ap
from transfer.detect.photos import photos_voc, write_photos_voc
from transfer.detect.run import _sample, build_detector
from transfer.run import transfer
from weights.published import assert_clear
from zoo.errors import InputError, RunError

# --- average precision ---


def boxes_of(objects, classes):
    return VocBoxes(
        np.array([[o["xmin"], o["ymin"], o["xmax"], o["ymax"]] for o in objects], dtype=float).reshape(-1, 4),
        np.array([classes.index(o["name"]) for o in objects], dtype=np.int64),
        np.array([bool(o["difficult"]) for o in objects], dtype=bool),
    )


def golden_cases(shared):
    index = json.loads((shared / "golden" / "index_detection.json").read_text("utf-8"))
    return [case for case in index["cases"] if case["id"].startswith("voc_ap_")]


def evaluated(case, rounded):
    """Truth and detections of a golden case; the reference adds 1 to x1, y1 and may print and read back."""
    classes = case["args"]["classes"]
    truth = [boxes_of(image["objects"], classes) for image in case["args"]["images"]]
    found = []
    for image in case["args"]["images"]:
        mine = [d for d in case["args"]["detections"] if d["image_id"] == image["id"]]
        boxes = np.array([d["box"] for d in mine], dtype=float).reshape(-1, 4)
        boxes[:, :2] += 1.0
        scores = np.array([d["score"] for d in mine], dtype=float)
        if rounded:
            boxes = np.array([[float(f"{v:.1f}") for v in box] for box in boxes]).reshape(-1, 4)
            scores = np.array([float(f"{score:.3f}") for score in scores])
        found.append(
            Detections(boxes, scores, np.array([classes.index(d["class"]) for d in mine], dtype=int))
        )
    return classes, truth, found


def test_ap_is_the_references(shared):
    cases = golden_cases(shared)
    assert len(cases) >= 5
    compared = 0
    for case in cases:
        classes, truth, found = evaluated(case, rounded=True)
        for metric, table in case["args"]["expected_per_class"].items():
            for key, value in table.items():
                name, level = key.split("@")
                label = classes.index(name)
                got = average_precision(truth, found, label, int(level) / 100, metric.startswith("11"))
                if not any((t.labels == label).any() for t in truth):
                    assert math.isnan(got)  # the reference calls it 0 by eleven points and NaN by area
                    continue
                assert math.isclose(100 * got, value, abs_tol=1e-6), (case["id"], metric, key)
                compared += 1
    assert compared >= 20


def test_mean_ap_is_the_references_without_its_printing(shared):
    for case in golden_cases(shared):
        classes, truth, found = evaluated(case, rounded=False)
        for metric, values in case["args"].get("sensitivity", {}).items():
            want = values["without_rounding"]
            if any(value is None or math.isnan(value) for value in want.values()):
                continue
            if not all(any((t.labels == c).any() for t in truth) for c in range(len(classes))):
                continue
            got = mean_average_precision(truth, found, len(classes), metric.startswith("11"))
            assert math.isclose(100 * got["AP50"], want["AP50"], abs_tol=1e-6), case["id"]
            assert math.isclose(100 * got["AP"], want["AP"], abs_tol=1e-6), case["id"]


def brute_force(truth, found, label, threshold):
    """The definition, pixel by pixel and threshold by threshold."""

    def cells(box):
        return {
            (x, y) for x in range(int(box[0]), int(box[2]) + 1) for y in range(int(box[1]), int(box[3]) + 1)
        }

    ranked = sorted(
        (
            (-score, image, index)
            for image, d in enumerate(found)
            for index, (score, its) in enumerate(zip(d.scores, d.labels, strict=True))
            if its == label
        ),
    )
    total = sum(int(((t.labels == label) & ~t.difficult).sum()) for t in truth)
    used, marks = set(), []
    for _, image, index in ranked:
        mine = cells(found[image].boxes[index])
        best, best_iou = None, -1.0
        for number in np.flatnonzero(truth[image].labels == label):
            other = cells(truth[image].boxes[number])
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
    values = []
    for _ in range(40):
        truth, found = [], []
        for _ in range(3):
            n, m = rng.integers(0, 4), rng.integers(0, 6)
            corner = rng.integers(1, 8, (n, 2))
            boxes = np.concatenate((corner, corner + rng.integers(0, 6, (n, 2))), 1).astype(float)
            truth.append(VocBoxes(boxes, rng.integers(0, 2, n), rng.random(n) < 0.2))
            near = boxes[rng.integers(0, n, m)] if n else np.tile([2.0, 2.0, 6.0, 6.0], (m, 1))
            moved = near + rng.integers(-1, 2, (m, 4))
            moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2])
            found.append(Detections(moved, rng.permutation(100)[:m] / 100.0, rng.integers(0, 2, m)))
        for label in (0, 1):
            for threshold in (0.3, 0.5, 0.75):
                got = average_precision(truth, found, label, threshold)
                if any(((t.labels == label) & ~t.difficult).any() for t in truth):
                    assert math.isclose(got, brute_force(truth, found, label, threshold), abs_tol=1e-12)
                    values.append(got)
                else:
                    assert math.isnan(got)
    assert len(set(values)) > 10


def one(box, label=0, difficult=False):
    return VocBoxes(np.array([box], dtype=float), np.array([label]), np.array([difficult]))


def say(*rows):
    return Detections(
        np.array([row[:4] for row in rows], dtype=float).reshape(-1, 4),
        np.array([row[4] for row in rows], dtype=float),
        np.zeros(len(rows), dtype=int),
    )


def test_ap_by_hand():
    truth = [one([1, 1, 10, 10])]
    assert average_precision(truth, [say((1, 1, 10, 10, 0.9))], 0, 0.5) == 1.0
    assert average_precision(truth, [say()], 0, 0.5) == 0.0
    # A second detection of the same object is wrong; it comes after, so the area stays.
    twice = [say((1, 1, 10, 10, 0.9), (1, 1, 10, 10, 0.8))]
    assert average_precision(truth, twice, 0, 0.5) == 1.0
    worse_first = [say((50, 50, 60, 60, 0.9), (1, 1, 10, 10, 0.8))]
    assert average_precision(truth, worse_first, 0, 0.5) == 0.5
    # Half of the object, by inclusive pixels, is exactly 0.5: not more than the threshold.
    half = [say((1, 1, 10, 5, 0.9))]
    assert average_precision(truth, half, 0, 0.5) == 0.0
    assert average_precision(truth, half, 0, 0.49) == 1.0
    # A difficult object counts neither way.
    hard = [one([1, 1, 10, 10], difficult=True), one([1, 1, 10, 10])]
    both = [say((1, 1, 10, 10, 0.9)), say((1, 1, 10, 10, 0.8))]
    assert average_precision(hard, both, 0, 0.5) == 1.0
    assert mean_average_precision([one([1, 1, 10, 10], label=1)], [say()], 3) == {"AP50": 0.0, "AP": 0.0}
    assert mean_average_precision([], [], 2) == {"AP50": 0.0, "AP": 0.0}


def test_eleven_points_by_hand():
    recall, precision = np.array([0.5, 0.5, 1.0]), np.array([1.0, 0.5, 2 / 3])
    assert math.isclose(voc_ap(recall, precision, True), (6 * 1.0 + 5 * 2 / 3) / 11)
    assert math.isclose(voc_ap(recall, precision, False), 0.5 * 1.0 + 0.5 * 2 / 3)
    assert voc_ap(np.array([]), np.array([]), True) == voc_ap(np.array([]), np.array([]), False) == 0.0


# --- the reader ---


@pytest.fixture
def voc(shared):
    return shared / "data" / "voc_like"


def test_a_real_voc_folder_is_read_from_each_level(voc):
    year = voc / "VOCdevkit" / "VOC2007"
    assert find_voc(voc) == find_voc(voc / "VOCdevkit") == find_voc(year) == year
    train, test = open_voc(voc, "trainval", "test")
    assert (len(train), len(test)) == (200, 100)
    assert train.classes == test.classes == tuple(VOC_CLASSES)
    count = sum(len(part.boxes(i).labels) for part in (train, test) for i in range(len(part)))
    hard = sum(int(part.boxes(i).difficult.sum()) for part in (train, test) for i in range(len(part)))
    assert (count, hard) == (1065, 213)
    for index in range(0, 100, 25):
        height, width = test.image(index).shape[:2]
        boxes = test.boxes(index).boxes
        assert (boxes[:, :2] >= 1).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
    first = train.fingerprint()
    assert (first["kind"], first["split"], first["count"]) == ("voc", "trainval", 200)
    assert first == open_voc(year, "trainval", "test")[0].fingerprint()
    assert first["sha256"] != open_voc(voc, "trainval", "test", limit=199)[0].fingerprint()["sha256"]
    assert len(open_voc(voc, "train", "val", limit=3)[0]) == 3


@pytest.mark.parametrize("below", ["VOCdevkit/VOC2007/JPEGImages", "VOCdevkit/VOC2007/ImageSets"])
def test_the_wrong_level_lists_what_was_tried(voc, below):
    with pytest.raises(InputError, match="No VOC folder") as caught:
        find_voc(voc / below)
    assert str(voc / below / "VOCdevkit" / "VOC2007") in caught.value.where


def test_a_classification_list_is_recognised(voc):
    with pytest.raises(InputError, match="two columns") as caught:
        open_voc(voc, "cow_trainval", "test")
    assert caught.value.where.endswith("cow_trainval.txt")


def test_both_missing_lists_are_named(voc):
    with pytest.raises(InputError, match=r"nope\.txt.*nada\.txt"):
        open_voc(voc, "nope", "nada")


XML = "<annotation>{}</annotation>"
OBJECT = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"


@pytest.fixture
def tiny_voc(tmp_path):
    """One training and one test image, each with one object."""
    root = tmp_path / "VOC2007"
    for part in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / part).mkdir(parents=True)
    for name, split in (("one", "trainval"), ("two", "test")):
        Image.new("RGB", (30, 20)).save(root / "JPEGImages" / f"{name}.jpg")
        (root / "Annotations" / f"{name}.xml").write_text(XML.format(OBJECT.format("hat", 1, 1, 10, 10)))
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text(f"{name}\n")
    return root


def test_other_classes_than_vocs_are_taken_from_the_training_set(tiny_voc):
    train, test = open_voc(tiny_voc.parent, "trainval", "test")
    assert train.classes == test.classes == ("hat",)
    (tiny_voc / "Annotations" / "two.xml").write_text(XML.format(OBJECT.format("hut", 1, 1, 10, 10)))
    with pytest.raises(InputError, match="know: hut") as caught:
        open_voc(tiny_voc, "trainval", "test")
    assert caught.value.where.endswith("two.xml") and "hat" in caught.value.fix


def test_a_limit_does_not_change_the_classes(few):
    whole, limited = (open_voc(photos_voc(), "trainval", "test", limit) for limit in (0, 1))
    assert limited[0].classes == whole[0].classes == limited[1].classes
    assert len(limited[0]) == len(limited[1]) == 1
    assert np.array_equal(limited[0].boxes(0).boxes, whole[0].boxes(0).boxes)


def test_a_list_of_one_line_is_a_list(tiny_voc):
    assert VocImages(tiny_voc, "test").ids == ["two"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<annotation>", "can't be read"),
        (XML.format("<object><name>hat</name></object>"), "no name or no box"),
        (XML.format(OBJECT.format("hat", "x", 1, 2, 3)), "not four numbers"),
        (XML.format(OBJECT.format("hat", "nan", 1, 2, 3)), "upside down"),
        (XML.format(OBJECT.format("hat", 9, 1, 2, 3)), "upside down"),
        (XML.format(OBJECT.format("", 1, 1, 2, 3)), "no name or no box"),
    ],
)
def test_a_bad_annotation_is_named(tiny_voc, content, words):
    (tiny_voc / "Annotations" / "one.xml").write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        open_voc(tiny_voc, "trainval", "test")
    assert caught.value.where.endswith("one.xml")


def test_a_missing_image_or_annotation_is_named(tiny_voc):
    (tiny_voc / "JPEGImages" / "two.jpg").unlink()
    with pytest.raises(InputError, match=r"1 of 1 listed images are missing \(two\.jpg"):
        open_voc(tiny_voc, "trainval", "test")
    (tiny_voc / "Annotations" / "one.xml").unlink()
    with pytest.raises(InputError) as caught:
        open_voc(tiny_voc, "trainval", "test")
    assert caught.value.where.endswith("one.xml")
    (tiny_voc / "ImageSets" / "Main" / "trainval.txt").write_text("\n")
    with pytest.raises(InputError, match="empty"):
        open_voc(tiny_voc, "trainval", "test")


def test_an_image_without_objects_has_no_boxes(tiny_voc):
    (tiny_voc / "Annotations" / "one.xml").write_text(XML.format(""))
    objects = VocImages(tiny_voc, "trainval", ["hat"]).boxes(0)
    assert objects.boxes.shape == (0, 4) and objects.labels.shape == (0,)


def test_a_flip_moves_the_boxes_with_the_pixels(tiny_voc):
    pixels = np.zeros((20, 30, 3), dtype=np.uint8)
    pixels[3:9, 4:15] = 255
    Image.fromarray(pixels).save(tiny_voc / "JPEGImages" / "one.jpg", quality=100, subsampling=0)
    (tiny_voc / "Annotations" / "one.xml").write_text(XML.format(OBJECT.format("hat", 5, 4, 15, 9)))
    train = VocImages(tiny_voc, "trainval")
    for flip in (False, True):
        image, target = _sample(train, 0, flip)
        x1, y1, x2, y2 = (int(v) for v in target["boxes"][0])
        assert target["labels"].tolist() == [1]
        assert (image[:, y1:y2, x1:x2] > 0.8).all()
        outside = image.clone()
        outside[:, y1:y2, x1:x2] = 0
        assert (outside < 0.2).all()


# --- builtin:photos-voc ---


@pytest.fixture
def few(monkeypatch):
    """Enough training images that each class is among them."""
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 12, "test": 4})


def digest(folder):
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_the_builtin_folder_is_the_same_every_time(few, tmp_path):
    for name in ("a", "b"):
        write_photos_voc(tmp_path / name)
    first = digest(tmp_path / "a")
    assert first == digest(tmp_path / "b") and len(first) == 2 * 16 + 2
    folder = photos_voc()
    assert digest(folder) == first
    stamp = folder.stat().st_mtime_ns
    assert photos_voc().stat().st_mtime_ns == stamp
    train, test = open_voc(folder, "trainval", "test")
    assert (len(train), len(test)) == (12, 4)
    for part in (train, test):
        for index in range(len(part)):
            image, boxes = part.image(index), part.boxes(index).boxes
            assert image.shape == (192, 256, 3) and 1 <= len(boxes) <= 3
            assert (boxes[:, :2] >= 1).all() and (boxes[:, 2] <= 256).all() and (boxes[:, 3] <= 192).all()
            sides = boxes[:, 2:] - boxes[:, :2] + 1
            assert (sides[:, 0] == sides[:, 1]).all() and (sides >= 48).all() and (sides <= 80).all()
            for i in range(len(boxes)):
                for j in range(i):
                    apart = (boxes[i, :2] > boxes[j, 2:]).any() or (boxes[j, :2] > boxes[i, 2:]).any()
                    assert apart, "pasted patches don't hide one another"


def test_a_builtin_folder_that_was_cut_short_leaves_nothing(few, monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transfer.detect.photos._annotation", fail)
        with pytest.raises(RunError, match="builtin:photos-voc"):
            photos_voc()
    assert list((tmp_path / "cache" / "datasets").iterdir()) == []
    assert photos_voc().is_dir()


# --- the recipe ---

STEPS = {"steps": 2, "min_size": 64, "max_size": 96, "limit": 2, "warmup_steps": 1}


def test_the_detector_trains_the_trunk_and_freezes_its_norms(small):
    trunk = zoo.load(small, norm_layer=FrozenBatchNorm2d, progress=False)
    detector = build_detector(trunk, 3, trunk.zoo_info["preprocessing"], DetectConfig(min_size=64))
    assert detector.transform.image_mean == [0.485, 0.456, 0.406]
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in detector.modules())
    assert detector.roi_heads.box_predictor.cls_score.out_features == 4
    assert all(p.requires_grad for p in detector.backbone.body.parameters())


def test_two_steps_from_end_to_end(small, few, tmp_path):
    result = transfer("detect", model=small, dataset="builtin:photos-voc", settings=STEPS, out=tmp_path / "a")
    assert 0 <= result["metrics"]["AP50"] <= 1 and 0 <= result["metrics"]["AP"] <= 1
    assert math.isfinite(result["metrics"]["train_loss"])
    assert result["data"]["train"]["count"] == 2 and result["data"]["test"]["split"] == "test"
    assert result["weights_sha256"] == zoo.load(small, progress=False).zoo_info["weights_sha256"]
    assert result["details"]["scored_on"] == "test"
    again = transfer("detect", model=small, dataset="builtin:photos-voc", settings=STEPS, out=tmp_path / "b")
    assert again["metrics"] == result["metrics"]


def test_a_voc_folder_on_the_command_line(command, small, tiny_voc):
    words = ("transfer", "detect", "--model", small, "--data", tiny_voc.parent, "--json")
    flags = [word for key, value in STEPS.items() for word in (f"--{key.replace('_', '-')}", value)]
    code, out, err = command(*words, *flags, "--test-on-train")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["details"]["scored_on"] == "trainval" and answer["data"]["classes"] == 1
    assert answer["dataset"] == tiny_voc.parent.name
    shutil.rmtree(tiny_voc / "ImageSets")
    assert_clear(command(*words, *flags), tiny_voc)
    assert_clear(command("transfer", "detect", "--model", small, "--dataset", "voc7"), "voc7", "photos-voc")


def test_a_detector_that_diverges_is_flagged(small, tiny_voc):
    with pytest.raises(RunError, match="diverged"):
        transfer(
            "detect",
            model=small,
            dataset=str(tiny_voc),
            settings={**STEPS, "steps": 8, "lr": 1e20, "warmup_steps": 0},
        )


def test_an_image_in_both_sets_is_refused(shared):
    voc = shared / "data" / "voc_like"
    with pytest.raises(InputError, match="100 images are in the training and in the test set") as caught:
        open_voc(voc, "test", "test")
    assert "--allow-overlap" in caught.value.fix
    assert len(open_voc(voc, "test", "test", allow_overlap=True)[1]) == 100
