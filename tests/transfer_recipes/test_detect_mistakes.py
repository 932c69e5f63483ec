"""Mistakes in data of boxes that cost hours when they are found late, and what is odd but must work."""

from __future__ import annotations

import json
import math
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from transfer.detect.annotations import BoxSet, Objects, Picture
from transfer.detect.batches import Stream
from transfer.detect.coco_scores import coco_scores
from transfer.detect.config import DetectConfig
from transfer.detect.datasets import open_sets, read_sets
from transfer.detect.detr.views import detr_size
from transfer.detect.models.detectors import DetectorSettings, build_detector
from transfer.detect.models.images import Images, Target
from transfer.detect.models.rpn import RpnSettings
from transfer.detect.scores import Detections
from transfer.detect.views import output_size
from weights.published import assert_clear
from zoo.errors import InputError
from zoo.models.factory import create_trunk

from .tiny_boxes import annotation, change, checked, thing, tiny_coco, tiny_voc, wrong

__all__ = ["tiny_coco", "tiny_voc"]  # fixtures

ONE_STEP = (
    "--steps",
    1,
    "--min-size",
    64,
    "--max-size",
    96,
    "--precise-batches",
    1,
    "--precision",
    "float32",
)


# --- names and folders ---


def test_a_misspelt_name_is_not_taken_for_the_folders_own(command, tiny_voc, tmp_path):
    words = ("transfer", "detect", "--model", tmp_path / "no-model", "--data", tiny_voc)
    assert_clear(command(*words, "--dataset", "voc7"), "where: voc7", "did you mean voc07")
    assert_clear(
        command("data", "check", "voc7", "--task", "detect", "--data", tiny_voc), "did you mean voc07"
    )
    with pytest.raises(InputError) as caught:
        read_sets("voc07", str(tmp_path / "gone"), DetectConfig())
    assert caught.value.where == str(tmp_path / "gone")


def test_what_would_be_passed_over_is_refused(command, tiny_coco, tmp_path):
    words = (
        "transfer",
        "detect",
        "--model",
        tmp_path / "no-model",
        "--dataset",
        "coco2017",
        "--data",
        tiny_coco,
    )
    assert_clear(
        command(*words, "--test-split", "val"), "coco2017 has its published split", "--test-split val"
    )
    assert_clear(command(*words, "--method", "swaw"), "detect: method", "'swav' or 'moco'")
    assert_clear(command(*words, "--tracker", "tensorbord"), "tensorbord", "tensorboard")
    assert_clear(command(*words, "--crop", 100), "Detection has no crop")
    for asked in (("--ap", "area"), ("--no-rounding",)):
        assert_clear(
            command(*words, *asked), "val2017 is scored by COCO's rules", f"where: {' '.join(asked)}"
        )


def test_half_a_data_set_is_told_from_none(tiny_coco, tmp_path):
    (tiny_coco / "annotations" / "instances_val2017.json").rename(tiny_coco / "annotations" / "dev.json")
    with pytest.raises(InputError, match=r"Only a training set is there \(train2017\)") as caught:
        read_sets(str(tiny_coco), None, DetectConfig())
    assert "--test-split" in caught.value.fix
    (tiny_coco / "dev").mkdir()
    assert len(read_sets(str(tiny_coco), None, DetectConfig(test_split="dev")).test.classes) == 2
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "test.csv").write_text("image,xmin,ymin,xmax,ymax,label\n")
    with pytest.raises(InputError, match=r"Only a test set is there \(test\)"):
        read_sets(str(tmp_path / "tables"), None, DetectConfig())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "annotations_trainval2017.zip").touch()
    with pytest.raises(InputError, match="No boxes are there") as caught:
        read_sets(str(tmp_path / "other"), None, DetectConfig())
    for words in ("annotations_trainval2017.zip", "the folder that holds VOC2007", "train.csv"):
        assert words in caught.value.fix


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("VOC2012", "VOC2012 has no public test labels: use the test set of 2007"),
        ("VOC2007", "extract the 2007 test archive into the same VOCdevkit"),
        ("mine", "put there what is missing"),
    ],
)
def test_a_missing_list_is_answered_by_the_year(tiny_voc, name, advice):
    root = tiny_voc.rename(tiny_voc.parent / name)
    (root / "ImageSets" / "Main" / "test.txt").unlink()
    (root / "ImageSets" / "Main" / "val.txt").write_text("two\n")
    (root / "ImageSets" / "Main" / "hat_val.txt").write_text("two 1\n")
    said = wrong(root)
    assert f"{advice}; or choose from trainval, val with --train-split and --test-split" in said
    assert len(checked(root, test_split="val").test) == 1


def test_the_check_takes_other_splits(command, tiny_voc):
    (tiny_voc / "ImageSets" / "Main" / "test.txt").rename(tiny_voc / "ImageSets" / "Main" / "val.txt")
    words = ("data", "check", tiny_voc, "--task", "detect")
    code, out, _ = command(*words)
    assert code == 1 and "test.txt" in out and "choose from trainval, val" in out
    assert command(*words, "--test-split", "val")[0] == 0
    assert_clear(command("data", "check", tiny_voc, "--test-split", "val"), "go with --task detect")


def test_every_missing_file_is_listed(command, tiny_voc):
    names = [f"{number:06d}" for number in range(30)]
    (tiny_voc / "ImageSets" / "Main" / "trainval.txt").write_text("".join(f"{name}\n" for name in names))
    with pytest.raises(InputError) as caught:
        open_sets(str(tiny_voc), None, DetectConfig())
    assert "60 files that the list names are missing" in str(caught.value) and "and 40 more" in str(
        caught.value
    )
    words = ("data", "check", tiny_voc, "--task", "detect")
    wanted = [file for name in names for file in (f"JPEGImages/{name}.jpg", f"Annotations/{name}.xml")]
    code, out, _ = command(*words)
    assert code == 1 and all(file in out for file in wanted)
    (problem,) = json.loads(command(*words, "--json")[1])["problems"]
    assert problem["files"] == wanted


# --- COCO ---


def test_images_need_numbers_of_their_own(tiny_coco):
    def spoil(content):
        more = ({"id": 1, "file_name": "2.jpg"}, {"id": "7", "file_name": "2.jpg"}, {"id": 8})
        content["images"] += [*more, {"id": -1, "file_name": "1.jpg"}]

    change(tiny_coco, "train2017", spoil)
    said = wrong(tiny_coco)
    assert "1 images have the id of another (id 1: 2.jpg)" in said
    assert "3 images have no file_name, or an id that is no whole number" in said
    assert "entry 3: id '7', entry 4: id 8, entry 5: id -1" in said and "number the images" in said
    change(tiny_coco, "train2017", lambda content: content.update(images=["1.jpg"]))
    with pytest.raises(InputError, match="no COCO file of instances"):
        read_sets(str(tiny_coco), None, DetectConfig())


def test_masks_of_another_size_are_found_before_training(tiny_coco):
    def turn(content):
        content["annotations"][0]["segmentation"] = {"size": [30, 20], "counts": [600]}

    change(tiny_coco, "train2017", turn)
    said = wrong(tiny_coco)
    assert "1 masks are of another size than their image (image 1, annotation 1)" in said


def test_polygons_that_enclose_nothing_are_left_out_and_counted(tiny_coco):
    def spoil(content):
        content["annotations"][0]["segmentation"] = [[1, 2, 3, 4], [2, 3, 10, 3, 10]]
        content["annotations"][1]["segmentation"].append([1, 2])

    change(tiny_coco, "train2017", spoil)
    sets = open_sets(str(tiny_coco), None, DetectConfig())
    assert any("2 masks have polygons that are no three corners" in note for note in sets.train.notes)
    masks = [picture.objects.masks for picture in sets.train.pictures]
    assert masks == [None, [[[2, 3, 10, 3, 10, 12, 2, 12]]]]
    (batch,) = Stream(sets.train, 0, (20,), 40, masks=True).batches(0, 1, 2)
    for boxes, found in zip(batch.boxes, batch.masks, strict=True):  # without a mask, the box
        corners = np.reshape(found[0][0], (-1, 2))
        assert np.allclose([*corners.min(0), *corners.max(0)], boxes[0])


def test_crowds_are_counted_and_not_trained_on(tiny_coco):
    def crowd(content):
        one = {**content["annotations"][0], "id": 60, "iscrowd": 1}
        content["annotations"].append(one)

    for split in ("train2017", "val2017"):
        change(tiny_coco, split, crowd)
    sets = checked(tiny_coco)
    assert "1 crowds of train2017 are not trained on: 1.jpg" in sets.train.notes
    assert [len(picture.objects) for picture in sets.train.pictures] == [1, 1]
    assert sets.test.pictures[0].objects.crowd.tolist() == [False, True]


def test_without_the_library_no_training_begins(command, tiny_coco, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hotcoco", None)
    words = ("transfer", "detect", "--model", tmp_path / "no-model", "--dataset", tiny_coco)
    code, out, err = command(*words)
    assert (
        (code, out) == (2, "") and "pip install 'vision-model-zoo[detect]'" in err and "no-model" not in err
    )


def test_no_masks_at_all_give_0():
    box = np.array([[0.0, 0.0, 10.0, 10.0]])
    no = np.zeros(1, dtype=bool)
    objects = Objects(box, np.zeros(1, dtype=np.int64), no, no, np.array([100.0]), [[[0, 0, 9, 0, 9, 9]]])
    images = BoxSet("coco", "val", ("a",), [Picture("a", None, (20, 20), objects, 7)], (3,))
    none = Detections(box[:0], np.zeros(0), np.zeros(0, dtype=np.int64), [])
    assert coco_scores(images, [none], "segm")["AP"] == 0.0


# --- tables ---


def test_lines_of_a_table_that_say_too_little(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    header = "image,xmin,ymin,xmax,ymax,label\n"
    (tmp_path / "test.csv").write_text(header + "a.png,0,0,5,5,hat\n")
    (tmp_path / "train.csv").write_text(
        header + "a.png,0,0,5,5,\n,1,1,5,5,hat\na.png,,,,,hat\na.png,0,0,5,5,hat\n"
    )
    sets = read_sets(str(tmp_path), None, DetectConfig())
    found = [(problem.what, problem.where.rsplit(", ")[-1]) for problem in sets.problems]
    assert [where for _, where in found] == ["line 2", "line 3", "line 4"] and sets.train.classes == ("hat",)
    assert "no label" in found[0][0] and "no image" in found[1][0]
    assert all("xmin,ymin,xmax,ymax" in problem.fix for problem in sets.problems)
    for name, content in (("train.csv", "é".encode("latin-1")), ("train.jsonl", b"\xff\xfe{")):
        (tmp_path / "train.csv").unlink(missing_ok=True)
        (tmp_path / name).write_bytes(header.encode() + content)
        with pytest.raises(InputError, match="can't be read") as caught:
            read_sets(str(tmp_path), None, DetectConfig())
        assert "UTF-8" in caught.value.fix


# --- odd images ---


def test_the_thinnest_image_has_a_view():
    assert output_size(1, 1000, 240, 480) == (1, 480) and output_size(3000, 1, 240, 480) == (480, 1)
    assert output_size(1, 1, 240, 480) == (240, 240)
    assert detr_size(1, 3000, 240, 480) == (1, 480) and detr_size(5000, 2, 240, 480) == (480, 1)
    assert detr_size(1, 1, 240, 480) == (240, 240)


def test_one_class_one_pixel_and_a_turned_image(command, small, tmp_path):
    """From the table to the scores."""
    Image.new("RGB", (1, 1), (200, 0, 0)).save(tmp_path / "dot.png")
    Image.new("RGB", (300, 1), (0, 200, 0)).save(tmp_path / "line.png")
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[30:38, 4:16] = 255  # of the file as it lies; upright it is 40 wide, 60 high
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    header = "image,xmin,ymin,xmax,ymax,label\n"
    boxes = ("dot.png,0,0,1,1,it\n", "line.png,0.5,0.25,20.5,0.75,it\n", "turned.png,2,4,10,16,it\n")
    (tmp_path / "train.csv").write_text(header + "".join(boxes))
    Image.new("RGB", (1, 2), (9, 9, 9)).save(tmp_path / "test.png")
    (tmp_path / "test.csv").write_text(header + "test.png,0,0,1,2,it\n")
    sets = open_sets(str(tmp_path), None, DetectConfig())
    assert [picture.size for picture in sets.train.pictures] == [(1, 1), (1, 300), (60, 40)]
    assert not sets.train.notes
    for batch in Stream(sets.train, 0, (40,), 60).batches(0, 2, 3):
        view, (box,) = batch.pictures[batch.ids.tolist().index(2)], batch.boxes[batch.ids.tolist().index(2)]
        x1, y1, x2, y2 = box.int().tolist()
        assert view[:, y1:y2, x1:x2].min() == 255 and view.sum() == 255 * 3 * (x2 - x1) * (y2 - y1)
    words = ("transfer", "detect", "--model", small, "--data", tmp_path, "--batch-size", 3, *ONE_STEP)
    code, out, err = command(*words, "--tracker", "tensorboard", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["data"]["class_names"] == ["it"] and answer["data"]["train"]["count"] == 3
    assert 0 <= answer["metrics"]["AP50"] <= 1 and math.isfinite(answer["metrics"]["train_loss"])
    assert list((tmp_path / "out" / "run-0" / "tensorboard").glob("events*"))


@pytest.mark.parametrize("head", ["c4", "fpn", "mask-fpn"])
def test_a_batch_without_any_object_is_trained_on(head):
    torch.manual_seed(0)
    settings = DetectorSettings(head, 1, RpnSettings((200, 200), (30, 30), 32), fpn_norm=head != "c4")
    detector = build_detector(create_trunk("resnet18", base_planes=8), settings).train()
    none = Target(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), [], torch.Generator().manual_seed(0))
    losses = detector.losses(Images(torch.randn(2, 3, 64, 96), [(64, 96), (64, 80)]), [none, none])
    sum(losses.values()).backward()
    assert all(math.isfinite(float(loss.detach())) for loss in losses.values())
    assert losses["loss_cls"] > 0 and losses["loss_rpn_cls"] > 0
    assert all(
        float(losses[name].detach()) == 0 for name in losses if name not in ("loss_cls", "loss_rpn_cls")
    )


# --- folders that hold something already ---


def test_scores_of_other_images_or_rules_are_not_taken(command, small, tiny_voc, tmp_path):
    words = (
        "transfer",
        "detect",
        "--model",
        small,
        "--dataset",
        tiny_voc,
        *ONE_STEP,
        "--out",
        tmp_path / "out",
    )
    code, _, err = command(*words, "--batch-size", 1, "--ap", "area")
    assert code == 0, err
    assert command(*words, "--batch-size", 1, "--ap", "area")[0] == 0
    again = command(*words, "--batch-size", 1, "--ap", "11-point")
    assert_clear(again, "scored otherwise (it differs in ap)", "another --out")
    (tiny_voc / "Annotations" / "two.xml").write_text(annotation(thing(box=(2, 2, 9, 9))))
    assert_clear(command(*words, "--batch-size", 1, "--ap", "area"), "it differs in test")
    (tmp_path / "knn").mkdir()
    (tmp_path / "knn" / "result.json").write_text('{"recipe": "knn"}')
    assert_clear(command(*words[:-1], tmp_path / "knn"), "result of another task (recipe knn, now detect)")
    assert json.loads((tmp_path / "knn" / "result.json").read_text()) == {"recipe": "knn"}

    # Pictures: each has a place of its own, and none is drawn over.
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name in ("a.png", "a.jpg", "b.png"):
        Image.new("RGB", (40, 30), (90, 0, 0)).save(pictures / name)
    call = ("predict", tmp_path / "out", pictures, "-o")
    before = (pictures / "b.png").read_bytes()
    assert_clear(
        command(*call, pictures), "would replace the picture itself", "b.png", "another folder with -o"
    )
    assert (pictures / "b.png").read_bytes() == before
    (pictures / "round.jpg").symlink_to("round.jpg")
    os.mkfifo(pictures / "pipe.jpg")
    for _ in range(2):  # what was drawn below is not taken for a picture the next time
        code, out, err = command(*call, pictures / "drawn", "--json")
        assert code == 0, err
        assert [image["image"] for image in json.loads(out)["images"]] == ["a.jpg", "a.png", "b.png"]
        names = sorted(path.name for path in (pictures / "drawn").iterdir())
        assert names == ["a.jpg.png", "a.png.png", "b.png", "predictions.json"]
    too_large = "has 40 x 30 pixels, more than the limit of 1000"
    assert_clear(command(*call, tmp_path / "few", "--max-pixels", 1000), too_large, "--max-pixels")
