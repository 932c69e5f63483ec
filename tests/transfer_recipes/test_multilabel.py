"""Images with several classes each: every layout of VOC, tables of one's own, and what is wrong with them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from tiny import pixels
from transfer.multilabel import open_multilabel, refuse_multilabel
from transfer.voc import VOC_CLASSES
from weights.published import class_folders
from zoo.errors import InputError

THING = (
    "<object><name>{}</name><difficult>{}</difficult><bndbox><xmin>1</xmin><ymin>1</ymin>"
    "<xmax>9</xmax><ymax>9</ymax></bndbox></object>"
)


@pytest.fixture(scope="module")
def voc(shared):
    return shared / "data" / "voc_like"


def tiny_voc(folder, trainval, test, classes=("hat", "tie")):
    """A year folder with class files: of each image a value for each class."""
    main = folder / "VOC2007" / "ImageSets" / "Main"
    main.mkdir(parents=True)
    (folder / "VOC2007" / "JPEGImages").mkdir()
    for seed, (split, images) in enumerate((("trainval", trainval), ("test", test))):
        for number, name in enumerate(images):
            Image.fromarray(pixels(100 * seed + number)).save(
                folder / "VOC2007" / "JPEGImages" / f"{name}.jpg"
            )
        (main / f"{split}.txt").write_text("".join(f"{name}\n" for name in images))
        for c, label in enumerate(classes):
            lines = "".join(f"{name} {values[c]:2}\n" for name, values in images.items())
            (main / f"{label}_{split}.txt").write_text(lines)
    return folder / "VOC2007"


@pytest.fixture
def tiny(tmp_path):
    return tiny_voc(tmp_path, {"a": (1, -1), "b": (-1, 1), "c": (0, -1)}, {"d": (1, -1), "e": (-1, 0)})


def annotate(root, **things):
    (root / "Annotations").mkdir(exist_ok=True)
    for name, objects in things.items():
        inside = "".join(THING.format(label, hard) for label, hard in objects)
        (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{inside}</annotation>")


# --- VOC ---


def test_the_subset_from_each_level(voc):
    year = voc / "VOCdevkit" / "VOC2007"
    opened = [open_multilabel("voc07", str(folder)) for folder in (voc, voc / "VOCdevkit", year)]
    first = opened[0]
    assert (len(first.train), len(first.val), first.classes) == (200, 100, VOC_CLASSES)
    assert first.train.labels.shape == (200, 20) and first.train.labels.dtype == np.int8
    assert {-1, 0, 1} == set(np.unique(first.train.labels))
    assert (first.train.labels[:, VOC_CLASSES.index("person")] == 1).sum() == 69
    assert (first.train.labels == 1).sum(0).min() >= 12 and (first.val.labels == 1).sum(0).min() >= 6
    prints = [(data.train.fingerprint(), data.val.fingerprint()) for data in opened]
    assert prints[0] == prints[1] == prints[2]
    mine = prints[0][0]
    assert mine["split"] == "trainval" and mine["labels_from"] == "class files" and not mine["complete"]
    assert first.train.where(0).endswith("JPEGImages/000025.jpg") and first.train.read(0).ndim == 3


def test_labels_of_the_annotations_are_those_of_the_class_files(voc, tmp_path):
    root = tmp_path / "VOC2007"
    shutil.copytree(voc / "VOCdevkit" / "VOC2007" / "Annotations", root / "Annotations")
    shutil.copytree(voc / "VOCdevkit" / "VOC2007" / "ImageSets", root / "ImageSets")
    (root / "JPEGImages").symlink_to(voc / "VOCdevkit" / "VOC2007" / "JPEGImages")
    want = open_multilabel(str(tmp_path))
    for file in (root / "ImageSets" / "Main").glob("*_t*.txt"):
        if not file.name.startswith(("cow_", "dog_")):
            file.unlink()
    some = open_multilabel(str(tmp_path))
    assert some.train.fingerprint()["labels_from"] == "class files and annotations"
    for file in (root / "ImageSets" / "Main").glob("*_*.txt"):
        file.unlink()
    none = open_multilabel(str(tmp_path))
    assert none.train.fingerprint()["labels_from"] == "annotations"
    for got in (some, none):
        assert got.classes == want.classes
        assert np.array_equal(got.train.labels, want.train.labels)
        assert np.array_equal(got.val.labels, want.val.labels)


def test_classes_of_ones_own(tiny):
    data = open_multilabel(str(tiny))
    assert data.classes == ("hat", "tie")
    assert data.train.labels.tolist() == [[1, -1], [-1, 1], [0, -1]]
    assert data.val.labels.tolist() == [[1, -1], [-1, 0]]
    assert "complete" not in data.train.fingerprint()
    before = data.train.fingerprint()
    file = tiny / "ImageSets" / "Main" / "tie_trainval.txt"
    file.write_text(file.read_text().replace("a -1", "a  1"))
    assert open_multilabel(str(tiny)).train.fingerprint() != before


def test_difficult_objects_alone_are_zero(tiny):
    for file in (tiny / "ImageSets" / "Main").glob("*_*.txt"):
        file.unlink()
    annotate(
        tiny, a=[("hat", 1), ("hat", 0)], b=[("hat", 1)], c=[("tie", 0)], d=[], e=[("tie", 1), ("tie", 1)]
    )
    data = open_multilabel(str(tiny))
    assert data.train.labels.tolist() == [[1, -1], [0, -1], [-1, 1]]
    assert data.val.labels.tolist() == [[-1, -1], [-1, 0]]
    annotate(tiny, e=[("tip", 0)])
    with pytest.raises(InputError, match="not known: tip") as caught:
        open_multilabel(str(tiny))
    assert caught.value.where.endswith("e.xml") and "hat, tie" in caught.value.fix


def test_neither_class_files_nor_annotations(tiny):
    (tiny / "ImageSets" / "Main" / "tie_test.txt").unlink()
    annotate(tiny, d=[])
    with pytest.raises(InputError, match=r"1 of 2 annotations are missing \(e\.xml first") as caught:
        open_multilabel(str(tiny))
    assert "VOC2007/{JPEGImages" in caught.value.fix


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("hat_trainval", "a 1 2\nb 1\nc -1\n", "Line 1 is not an image and 1, 0 or -1: 'a 1 2'"),
        ("hat_trainval", "a 1\nb\nc -1\n", "Line 2"),
        ("hat_trainval", "a 1\nb 2\nc -1\n", "Line 2"),
        ("hat_trainval", "a 1\nb 0\nc 0\n", "1 and 0 alone"),
        ("hat_trainval", "a 1\nc -1\n", r"1 of 3 images of the set have no label here \(b first"),
        ("hut_test", "d 1\ne -1\n", "training doesn't know: hut"),
        ("trainval", "", "empty"),
        ("trainval", "a 1\nb 1\n", "two columns"),
        ("trainval", "a\nx\ny\n", r"2 of 3 listed images are missing \(x\.jpg first"),
    ],
)
def test_a_bad_list_is_named(tiny, file, content, words):
    (tiny / "ImageSets" / "Main" / f"{file}.txt").write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        open_multilabel(str(tiny))
    assert caught.value.where.endswith(f"{file}.txt")


def test_what_is_missing_is_said_with_the_expected_tree(tiny, tmp_path):
    with pytest.raises(InputError, match=r"nope\.txt.*nada\.txt") as caught:
        open_multilabel(str(tiny), train_split="nope", test_split="nada")
    assert "VOC2007/{JPEGImages" in caught.value.fix
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="No VOC folder") as caught:
        open_multilabel("voc07", str(tmp_path / "other"))
    assert str(tmp_path / "other" / "VOCdevkit" / "VOC2007") in caught.value.where
    for name, words in (
        ("voc07", "isn't said"),
        ("voc70", "no such multi-label"),
        ("builtin:photos", "one class"),
    ):
        with pytest.raises(InputError, match=words):
            open_multilabel(name)


def test_training_images_in_the_test_set_are_refused(tiny):
    shutil.copy(tiny / "JPEGImages" / "a.jpg", tiny / "JPEGImages" / "e.jpg")
    with pytest.raises(InputError, match="also a training image"):
        open_multilabel(str(tiny))
    assert len(open_multilabel(str(tiny), allow_overlap=True).val) == 2
    with pytest.raises(InputError, match="also a training image"):
        open_multilabel(str(tiny), train_split="test")


def test_the_builtin_set(monkeypatch):
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 12, "test": 4})
    data = open_multilabel("builtin:photos-voc")
    assert (len(data.train), len(data.val), len(data.classes)) == (12, 4, 6)
    assert data.train.fingerprint()["labels_from"] == "annotations"


# --- tables ---


def table(folder, name, rows):
    for number, (path, _) in enumerate(rows):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(len(name) * 50 + number)).save(folder / path)
    file = folder / name
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps({"path": p, "labels": v.split(";")}) + "\n" for p, v in rows))
    else:
        file.write_text("path,labels\n" + "".join(f"{p},{v}\n" for p, v in rows))
    return file


TRAIN = [("x/1.png", "red hat;tie"), ("x/2.png", ""), ("x/3.png", "tie")]
TEST = [("y/1.png", "red hat"), ("y/2.png", "tie; red hat")]


@pytest.mark.parametrize(("train", "test"), [("train.csv", "test.csv"), ("train.jsonl", "val.csv")])
def test_tables(tmp_path, train, test):
    table(tmp_path, train, TRAIN)
    table(tmp_path, test, TEST)
    data = open_multilabel(str(tmp_path))
    assert data.classes == ("red hat", "tie")
    assert data.train.labels.tolist() == [[1, 1], [-1, -1], [-1, 1]]
    assert data.val.labels.tolist() == [[1, -1], [1, 1]]
    assert data.train.read(1).shape == (20, 20, 3)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("test.csv", "path,labels\ny/1.png,scarf\n", "know: scarf"),
        (
            "test.csv",
            "path,labels\ny/1.png,tie\ny/8.png,tie\ny/9.png,\n",
            r"2 of 3 listed images .*y/8\.png first",
        ),
        ("test.csv", "path,tags\ny/1.png,tie\n", "columns path and labels aren't there; found: path, tags"),
        ("test.csv", "path,label\ny/1.png,tie\n", "one class each"),
        ("test.csv", "path,labels\n", "empty"),
        ("test.csv", "path,labels\ny/1.png,tie,red hat\n", "isn't a path and class names"),
        ("val.jsonl", '{"path": "y/1.png", "labels": [1]}\n', "isn't a path and class names"),
        ("val.jsonl", '{"path": "y/1.png", "labels": []}\n{"path"\n', "Line 2 is no JSON"),
        ("train.csv", "path,labels\nx/1.png,\n", "No image has a class"),
    ],
)
def test_a_bad_table_is_named(tmp_path, name, content, words):
    table(tmp_path, "train.csv", TRAIN)
    table(tmp_path, "test.csv", TEST)
    if name.endswith(".jsonl"):
        (tmp_path / "test.csv").unlink()
    if name == "train.csv":
        (tmp_path / "test.csv").write_text("path,labels\ny/1.png,\n")
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        open_multilabel(str(tmp_path))
    assert str(tmp_path) in caught.value.where


# --- the wrong kind of recipe ---


def test_sets_of_one_class_an_image_are_refused(tmp_path):
    class_folders(tmp_path / "train", {"a": 1, "b": 2}, 2)
    class_folders(tmp_path / "val", {"a": 1, "b": 2}, 2, seed=1)
    refuse_multilabel(str(tmp_path))
    refuse_multilabel("cifar10")
    with pytest.raises(InputError, match="one class each") as caught:
        open_multilabel(str(tmp_path))
    assert "knn or linear" in caught.value.fix


def test_sets_of_several_classes_an_image_are_recognised(tiny, tmp_path):
    for folder in (tiny, tmp_path):
        with pytest.raises(InputError, match="VOC's layout"):
            refuse_multilabel(str(folder))
    table(tmp_path / "tables", "train.csv", TRAIN)
    with pytest.raises(InputError, match="column labels"):
        refuse_multilabel(str(tmp_path / "tables"))
