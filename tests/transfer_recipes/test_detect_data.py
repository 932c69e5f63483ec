"""Boxes and images on disk: every layout that people have, and every mistake that they make."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from transfer.detect.batches import Stream
from transfer.detect.checks import image_size
from transfer.detect.coco_scores import coco_results
from transfer.detect.config import DetectConfig
from transfer.detect.datasets import check_sets, open_sets, read_sets
from transfer.detect.photos import photos_voc, write_photos_voc
from transfer.detect.scores import Detections
from transfer.detect.voc import find_voc, read_voc
from transfer.voc import VOC_CLASSES
from weights.published import assert_clear
from zoo.errors import InputError, RunError

from .tiny_boxes import annotation, change, checked, thing, tiny_coco, tiny_voc, wrong

__all__ = ["tiny_coco", "tiny_voc"]  # fixtures

CONFIG = DetectConfig()


# --- VOC ---


def test_a_real_voc_folder_is_read_from_each_level(shared):
    voc = shared / "data" / "voc_like"
    year = voc / "VOCdevkit" / "VOC2007"
    assert find_voc(voc) == find_voc(voc / "VOCdevkit") == find_voc(year) == year
    sets = open_sets(str(voc), None, CONFIG)
    assert (len(sets.train), len(sets.test)) == (200, 100)
    assert sets.train.classes == sets.test.classes == VOC_CLASSES and sets.test.ap == "11-point"
    objects = [picture.objects for part in (sets.train, sets.test) for picture in part.pictures]
    assert sum(len(one) for one in objects) == 1065
    assert sum(int(one.difficult.sum()) for one in objects) == 213
    first = sets.train.fingerprint()
    assert (first["kind"], first["split"], first["count"]) == ("voc", "trainval", 200)
    assert first == read_sets(str(year), None, CONFIG).train.fingerprint()
    few = open_sets(str(voc), None, DetectConfig(limit=3))
    assert (len(few.train), len(few.test)) == (3, 3) and few.train.classes == VOC_CLASSES


def test_published_names_know_their_folder_and_counts(shared, monkeypatch):
    voc = shared / "data" / "voc_like"
    sets = read_sets("voc07", str(voc), CONFIG)
    assert (len(sets.train), len(sets.test)) == (200, 100) and not sets.problems
    sets = check_sets(sets, CONFIG)
    assert any("5011 images, this one 200" in note for note in sets.train.notes)
    with pytest.raises(InputError, match="not known"):
        read_sets("voc07", None, CONFIG)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(voc))
    assert len(read_sets("voc07", None, CONFIG).test) == 100
    with pytest.raises(InputError, match="No VOC folder") as caught:
        read_sets("voc07+12", None, CONFIG)
    assert "VOC2012" in caught.value.where


@pytest.mark.parametrize("name", ["VOC2012", "VOC2008", "mine"])
def test_any_year_and_any_name_is_taken(tiny_voc, name):
    other = tiny_voc.rename(tiny_voc.parent / name)
    assert len(read_sets(str(other), None, CONFIG).train) == 1
    if name == "VOC2012":
        assert len(read_sets(str(other.parent), None, CONFIG).train) == 1
        with pytest.raises(InputError, match="No VOC folder") as caught:
            read_sets("voc07", str(other), CONFIG)
        assert str(other.parent / "VOC2007") in caught.value.where


def test_the_wrong_level_lists_what_was_tried(shared):
    below = shared / "data" / "voc_like" / "VOCdevkit" / "VOC2007" / "JPEGImages"
    with pytest.raises(InputError, match="No VOC folder") as caught:
        find_voc(below)
    assert str(below / "VOCdevkit" / "VOC2007") in caught.value.where
    assert "the folder that holds VOC2007" in caught.value.fix


def test_a_classification_list_is_recognised(shared):
    voc = shared / "data" / "voc_like"
    sets = read_sets(str(voc), None, DetectConfig(train_split="cow_trainval"))
    assert "two columns" in sets.problems[0].what and "cow_trainval.txt" in sets.problems[0].where


def test_all_that_is_missing_is_said_at_once(tiny_voc):
    (tiny_voc / "JPEGImages" / "one.jpg").unlink()
    (tiny_voc / "Annotations" / "one.xml").unlink()
    (tiny_voc / "ImageSets" / "Main" / "test.txt").unlink()
    with pytest.raises(InputError) as caught:
        open_sets(str(tiny_voc.parent), None, CONFIG)
    said = str(caught.value)
    for name in ("JPEGImages/one.jpg", "Annotations/one.xml", "test.txt", "2007 test archive"):
        assert name in said


def test_2012_has_no_test_set(tiny_voc):
    problems = []
    read_voc(tiny_voc, ["missing"], None, problems, "2012")
    read_voc(tiny_voc, ["test"], None, problems, "2012")
    (tiny_voc / "Annotations" / "two.xml").unlink()
    read_voc(tiny_voc, ["test"], None, problems, "2012")
    assert "missing.txt" in problems[0].where and "Annotations/two.xml" in problems[-1].what
    assert "use the test set of 2007" in problems[-1].fix


def test_a_list_of_one_line_is_a_list(tiny_voc):
    sets = open_sets(str(tiny_voc), None, CONFIG)
    assert [picture.name for picture in sets.train.pictures] == ["one"] and sets.train.classes == ("hat",)
    assert sets.train.pictures[0].objects.boxes.tolist() == [[0.0, 0.0, 10.0, 10.0]]


def test_an_unknown_class_is_named_with_the_known_ones(tiny_voc):
    (tiny_voc / "Annotations" / "two.xml").write_text(annotation(thing("hut")))
    said = wrong(tiny_voc)
    assert "hut" in said and "two.xml" in said and "did you mean hat" in said


def test_missing_elements_are_one_warning(tiny_voc):
    (tiny_voc / "Annotations" / "one.xml").write_text(annotation(thing(more="")))
    sets = checked(tiny_voc)
    assert [note for note in sets.train.notes if "<difficult> in 1" in note and "<pose> in 1" in note]
    assert not sets.problems and not sets.train.pictures[0].objects.difficult.any()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<annotation>", "can't be read"),
        (annotation("<object><name>hat</name></object>"), "no name or no box"),
        (annotation(thing(box=("x", 1, 2, 3))), "not four numbers"),
        (annotation(thing("", (1, 1, 2, 3))), "no name or no box"),
        (annotation(thing(), size=(31, 20)), "30 x 20 pixels, its annotations say 31 x 20"),
    ],
)
def test_a_bad_annotation_is_named(tiny_voc, content, words):
    (tiny_voc / "Annotations" / "two.xml").write_text(content)
    said = wrong(tiny_voc)
    assert words in said and "two.xml" in said


def test_boxes_beyond_the_image_are_cut_or_dropped_and_counted(tiny_voc):
    boxes = ((1, 1, 40, 10), (9, 9, 3, 12), (50, 1, 60, 10), (2, 2, 5, 5))
    (tiny_voc / "Annotations" / "one.xml").write_text(annotation(*(thing(box=box) for box in boxes)))
    sets = checked(tiny_voc)
    assert sets.train.pictures[0].objects.boxes.tolist() == [[0, 0, 30, 10], [1, 1, 5, 5]]
    notes = " ".join(sets.train.notes)
    assert re.search(r"2 boxes .* dropped: one", notes) and re.search(r"1 boxes .* cut", notes)
    assert not sets.problems


def test_images_without_objects_are_kept_on_request_and_counted(tiny_voc):
    (tiny_voc / "ImageSets" / "Main" / "trainval.txt").write_text("one\nthree\n")
    Image.new("RGB", (30, 20), (9, 9, 9)).save(tiny_voc / "JPEGImages" / "three.jpg")
    (tiny_voc / "Annotations" / "three.xml").write_text(annotation())
    sets = checked(tiny_voc)
    assert len(sets.train) == 1 and "1 images" in " ".join(sets.train.notes)
    assert len(checked(tiny_voc, keep_empty=True).train) == 2
    for name in ("one", "two"):
        (tiny_voc / "Annotations" / f"{name}.xml").write_text(annotation())
    assert "None of the 2 images has an object" in wrong(tiny_voc)


def test_an_image_in_both_sets_is_refused_by_its_content(tiny_voc):
    shutil.copy(tiny_voc / "JPEGImages" / "one.jpg", tiny_voc / "JPEGImages" / "two.jpg")
    assert "1 images are in the training and in the test set (two)" in wrong(tiny_voc)
    assert not checked(tiny_voc, allow_overlap=True).problems


def test_an_image_on_its_side_must_be_upright(tiny_voc):
    picture = Image.new("RGB", (20, 30))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tiny_voc / "JPEGImages" / "two.jpg", exif=exif)
    assert image_size(tiny_voc / "JPEGImages" / "two.jpg") == ((20, 30), True)
    assert not checked(tiny_voc).problems  # the annotations say 30 x 20, as it is to be shown
    (tiny_voc / "Annotations" / "two.xml").write_text(annotation(thing(), size=(20, 30)))
    assert "EXIF" in wrong(tiny_voc)


def test_a_picture_that_is_none_is_named(tiny_voc):
    (tiny_voc / "JPEGImages" / "two.jpg").write_bytes(b"no picture")
    assert "two.jpg" in wrong(tiny_voc)


# --- COCO ---


def test_a_real_coco_folder_is_read(shared):
    coco = shared / "data" / "coco_like"
    sets = check_sets(read_sets("coco2017", str(coco), CONFIG), CONFIG)
    assert not sets.problems and (len(sets.train), len(sets.test)) == (80, 79)
    assert len(sets.train.classes) == 80 and sets.train.numbers[-1] == 90
    assert sum(len(picture.objects) for picture in sets.train.pictures) == 739 - 8  # without the crowds
    assert sum(int(picture.objects.crowd.sum()) for picture in sets.test.pictures) == 5
    assert any("118287 images, this one 80" in note for note in sets.train.notes)
    assert any("category ids 1 to 90" in note for note in sets.train.notes)
    assert sets.train.has_masks and sets.test.ap == "coco"


def test_coco_is_found_one_level_above_and_by_its_content(tiny_coco):
    for folder in (tiny_coco, tiny_coco.parent):
        assert len(read_sets("coco2017", str(folder), CONFIG).train) == 2
        sets = open_sets(str(folder), None, CONFIG)
        assert sets.train.kind == "coco" and sets.train.numbers == (3, 7)
        assert sets.train.pictures[0].objects.labels.tolist() == [1]
        assert sets.train.pictures[0].objects.boxes.tolist() == [[2, 3, 10, 12]]


def test_categories_are_matched_by_name(tiny_coco):
    def renumber(content):
        content["categories"] = [{"id": 0, "name": "shoe"}, {"id": 1, "name": "hat"}]
        content["annotations"][0]["category_id"] = 0

    change(tiny_coco, "val2017", renumber)
    sets = open_sets(str(tiny_coco), None, CONFIG)
    assert sets.test.pictures[0].objects.labels.tolist() == [1] and sets.test.numbers == (3, 7)
    assert any("matched by name" in note for note in sets.test.notes)
    change(tiny_coco, "val2017", lambda content: content["categories"].append({"id": 5, "name": "shoes"}))
    assert "shoes" in wrong(tiny_coco) and "did you mean shoe" in wrong(tiny_coco)


def test_numbers_from_0_with_gaps_become_labels_and_come_back(tiny_coco):
    def renumber(content):
        content["categories"] = [{"id": 4, "name": "shoe"}, {"id": 0, "name": "hat"}]
        for one in content["annotations"]:
            one["category_id"] = 4

    for split in ("train2017", "val2017"):
        change(tiny_coco, split, renumber)
    sets = open_sets(str(tiny_coco), None, CONFIG)
    assert sets.train.classes == ("hat", "shoe") and sets.train.numbers == sets.test.numbers == (0, 4)
    assert any("category ids 0 to 4 became labels 0 to 1" in note for note in sets.train.notes)
    boxes = np.array([[1.0, 2.0, 4.0, 6.0]] * 2)
    said = Detections(boxes, np.array([0.9, 0.8]), np.array([1, 0]))
    rows = list(coco_results(sets.test, [said]))
    assert [(row["image_id"], row["category_id"], row["bbox"]) for row in rows] == [
        (9, 4, [1.0, 2.0, 3.0, 4.0]),
        (9, 0, [1.0, 2.0, 3.0, 4.0]),
    ]


def test_coco_mistakes_are_all_named(tiny_coco):
    def spoil(content):
        content["annotations"].append({"id": 50, "image_id": 77, "category_id": 3, "bbox": [0, 0, 1, 1]})
        content["annotations"].append({"id": 51, "image_id": 2, "category_id": 4, "bbox": [0, 0, 1, 1]})
        content["annotations"].append({"id": 52, "image_id": 2, "category_id": 3, "bbox": [0, 0, 1]})

    change(tiny_coco, "train2017", spoil)
    (tiny_coco / "train2017" / "1.jpg").unlink()
    with pytest.raises(InputError) as caught:
        open_sets(str(tiny_coco), None, CONFIG)
    said = str(caught.value)
    for words in (
        "image_id 77",
        "image 2: category 4",
        "annotation 52",
        "1 of 2 images are missing (1 files",
    ):
        assert words in said


def test_packed_images_and_other_years_are_recognised(tiny_coco):
    shutil.rmtree(tiny_coco / "val2017")
    (tiny_coco / "val2017.zip").touch()
    assert "unpack val2017.zip" in wrong(tiny_coco)

    def other_year(content):
        content["images"][0]["file_name"] = "COCO_train2014_000000000001.jpg"

    change(tiny_coco, "train2017", other_year)
    assert "COCO_train2014_000000000001.jpg" in wrong(tiny_coco) and "2014" in wrong(tiny_coco)


def test_a_file_of_captions_is_no_file_of_instances(tiny_coco):
    change(tiny_coco, "train2017", lambda content: content.pop("categories"))
    with pytest.raises(InputError, match="no COCO file of instances"):
        open_sets(str(tiny_coco), None, CONFIG)


# --- tables ---


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_of_boxes(tmp_path, kind):
    for shade, name in enumerate(("a", "b", "c")):
        Image.new("RGB", (30, 20), (60 * shade, 0, 0)).save(tmp_path / f"{name}.png")
    rows = {
        "train": [("a.png", [[1, 2, 9, 12]], ["hat"]), ("b.png", [], [])],
        "test": [("c.png", [[0, 0, 5, 5]], ["hat"])],
    }
    for split, images in rows.items():
        if kind == "csv":
            lines = ["filename,xmin,ymin,xmax,ymax,class"]
            for name, boxes, labels in images:
                lines += [
                    f"{name},{','.join(map(str, box))},{label}"
                    for box, label in zip(boxes, labels, strict=True)
                ]
                lines += [] if boxes else [f"{name},,,,,"]
        else:
            lines = [json.dumps({"image": n, "boxes": b, "labels": labels}) for n, b, labels in images]
        (tmp_path / f"{split}.{kind}").write_text("\n".join(lines) + "\n")
    sets = open_sets(str(tmp_path), None, CONFIG)
    assert sets.train.classes == ("hat",) and sets.train.kind == "table"
    assert [picture.name for picture in sets.train.pictures] == ["a.png"]
    assert sets.train.pictures[0].objects.boxes.tolist() == [[1, 2, 9, 12]]
    file = tmp_path / f"test.{kind}"
    bad = (
        "c.png,x,0,5,5,hat\nnone.png,0,0,5,5,hut"
        if kind == "csv"
        else '{"image": "none.png", "boxes": [[1]]}\n{'
    )
    file.write_text(file.read_text() + bad + "\n")
    said = wrong(tmp_path)
    assert "line 3" in said and (kind != "csv" or ("none.png" in said and "hut" in said))
    if kind == "csv":
        file.write_text("image,xmin\n")
        with pytest.raises(InputError, match="lacks the column"):
            read_sets(str(tmp_path), None, CONFIG)


# --- the training views ---


def test_the_stream_depends_on_the_seed_alone_and_shows_every_image_once_a_pass(tiny_coco):
    sets = open_sets(str(tiny_coco), None, CONFIG)
    stream = Stream(sets.train, 0, (20, 24), 40, masks=True)
    whole = list(stream.batches(0, 6, 2))
    assert [sorted(batch.ids.tolist()) for batch in whole] == [[0, 1]] * 6
    later = list(stream.batches(4, 6, 2))
    assert all(a.keys == b.keys for a, b in zip(whole[4:], later, strict=True))
    shares = [list(stream.batches(0, 6, 2, rank=rank, world_size=2)) for rank in (0, 1)]
    for step, batch in enumerate(whole):
        assert batch.keys == [key for share in shares for key in share[step].keys]
    assert {picture.shape[1] for batch in whole for picture in batch.pictures} == {20, 24}
    assert next(Stream(sets.train, 1, (20, 24), 40).batches(0, 1, 2)).keys != whole[0].keys


def test_a_view_moves_boxes_and_masks_with_the_pixels(tiny_coco):
    pixels = np.zeros((20, 30, 3), dtype=np.uint8)
    pixels[3:12, 2:10] = 255
    for name in ("1", "2"):
        Image.fromarray(pixels).save(tiny_coco / "train2017" / f"{name}.jpg", quality=100, subsampling=0)
    stream = Stream(read_sets("coco2017", str(tiny_coco), CONFIG).train, 0, (40,), 60, masks=True)
    flips = set()
    for batch in stream.batches(0, 4, 2):
        for picture, boxes, masks in zip(batch.pictures, batch.boxes, batch.masks, strict=True):
            x1, y1, x2, y2 = (round(float(value)) for value in boxes[0])
            flips.add(x1)
            assert picture.shape == (3, 40, 60) and picture[:, y1 + 2 : y2 - 2, x1 + 2 : x2 - 2].min() > 200
            outside = picture.clone()
            outside[:, y1 - 1 : y2 + 1, x1 - 1 : x2 + 1] = 0
            assert outside.max() < 60
            corners = np.reshape(masks[0][0], (-1, 2))
            assert np.allclose([corners.min(0), corners.max(0)], [[x1, y1], [x2, y2]])
    assert flips == {4, 40}


# --- builtin:photos-voc ---


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 12, "test": 4})


def test_the_builtin_folder_is_the_same_every_time(few, tmp_path):
    for name in ("a", "b"):
        write_photos_voc(tmp_path / name)
    contents = [
        {
            str(f.relative_to(tmp_path / name)): f.read_bytes()
            for f in (tmp_path / name).rglob("*")
            if f.is_file()
        }
        for name in ("a", "b")
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 2 * 16 + 2
    folder = photos_voc()
    stamp = folder.stat().st_mtime_ns
    assert photos_voc().stat().st_mtime_ns == stamp
    sets = open_sets("builtin:photos-voc", None, CONFIG)
    assert (len(sets.train), len(sets.test)) == (12, 4) and not sets.train.notes
    for part in (sets.train, sets.test):
        for picture in part.pictures:
            boxes = picture.objects.boxes
            assert picture.size == (192, 256) and 1 <= len(boxes) <= 3
            sides = boxes[:, 2:] - boxes[:, :2]
            assert (sides[:, 0] == sides[:, 1]).all() and (sides >= 48).all() and (sides <= 80).all()


def test_a_builtin_folder_that_was_cut_short_leaves_nothing(few, monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transfer.detect.photos._annotation", fail)
        with pytest.raises(RunError, match="builtin:photos-voc"):
            photos_voc()
    assert list((tmp_path / "cache" / "datasets").iterdir()) == []


# --- on the command line ---


def test_the_check_lists_everything(command, tiny_coco):
    code, out, _ = command("data", "check", tiny_coco, "--task", "detect")
    assert code == 0 and "can be trained" in out and "hat, shoe" in out
    answer = json.loads(
        command("data", "check", "coco2017", "--task", "detect", "--data", tiny_coco, "--json")[1]
    )
    assert answer["training"]["images"] == 2 and answer["test"]["objects"] == 1 and answer["problems"] == []
    (tiny_coco / "train2017" / "1.jpg").unlink()
    change(tiny_coco, "val2017", lambda content: content["annotations"][0].update(category_id=99))
    code, out, _ = command("data", "check", tiny_coco, "--task", "detect")
    assert code == 1 and "1.jpg" in out and "category 99" in out and "can't be trained" in out
    answer = command("data", "check", "voc7", "--task", "detect")
    assert_clear(answer, "voc7", "voc07")
    assert_clear(command("data", "check", tiny_coco, "--task", "detec"), "did you mean detect")
