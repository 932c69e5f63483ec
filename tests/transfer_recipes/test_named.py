"""Sets of one class an image in the layouts of the published ones, tables of one's own, and what is wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tracemalloc

import numpy as np
import pytest

from transfer.datasets import open_labelled
from transfer.labels import labels_of
from transfer.named import NAMED
from transfer.named.labels import Listed
from weights.published import assert_clear
from zoo.errors import InputError

from .layouts import GREYS, WNIDS, imagenet, inat18, places205, tables


def level(source, index):
    """Which of the three greys an image is."""
    return int(np.abs(np.array(GREYS) - source.read(index).mean()).argmin())


def check(data, order):
    """Every image of both parts has the label of its grey; ``order`` are the labels of the greys."""
    for part, count in ((data.train, 9), (data.val, 6)):
        assert len(part) == count
        assert labels_of(part).tolist() == [order[level(part, index)] for index in range(count)]
        assert sorted(set(labels_of(part).tolist())) == [0, 1, 2]


BUILD = {"imagenet": imagenet, "places205": places205, "inat18": inat18}


# --- the layouts ---


@pytest.mark.parametrize("test", ["folders", "solution", "pairs", "devkit"])
def test_imagenet(tmp_path, test, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("zoo"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="zoo"):
        data = open_labelled("ImageNet", str(imagenet(tmp_path, test)))
    assert data.classes == tuple(sorted(WNIDS))
    check(data, [0, 2, 1])
    assert data.part_of in caplog.text and data.part_of == (
        "a part of ImageNet: 9 of 1281167 training images, 3 of 1000 classes, 6 of 50000 test images"
    )


def test_imagenet_by_a_list_of_synsets_in_the_devkits_order(tmp_path):
    data = imagenet(tmp_path, "devkit") / "ILSVRC2012_devkit_t12" / "data"
    (data / "map_clsloc.txt").unlink()
    (data / "meta.mat").write_bytes(b"never read")
    with pytest.raises(InputError, match=r"meta\.mat is not read") as caught:
        open_labelled("imagenet", str(tmp_path))
    assert str(data / "synsets.txt") in caught.value.where and "map_clsloc" in caught.value.fix
    (data / "synsets.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS))
    check(open_labelled("imagenet", str(tmp_path)), [0, 2, 1])
    (data / "synsets.txt").write_text("".join(f"{wnid}\n" for wnid in sorted(WNIDS)))
    with pytest.raises(
        InputError, match="alphabetical order"
    ):  # every label would be wrong, without an error
        open_labelled("imagenet", str(tmp_path))


@pytest.mark.parametrize("inside", ["", "images256", "data/vision/torralba/deeplearning/images256"])
def test_places205(tmp_path, inside):
    data = open_labelled("places205", str(places205(tmp_path, inside)))
    assert data.classes == ("0", "17", "204")
    check(data, [0, 1, 2])
    assert "a part of Places205: 9 of 2448873" in data.part_of


def test_inat18(tmp_path):
    data = open_labelled("inat18", str(inat18(tmp_path)))
    assert data.classes == ("Zebra finch", "Moss", "Apple tree")  # by their ids, without the one of no image
    check(data, [0, 2, 1])
    assert "3 of 8142 classes" in data.part_of


@pytest.mark.parametrize("endings", [("csv", "csv"), ("jsonl", "csv"), ("jsonl", "jsonl")])
def test_tables(tmp_path, endings):
    tables(tmp_path, endings)
    for name, root in ((str(tmp_path), None), ("anything", str(tmp_path))):
        data = open_labelled(name, root)
        assert data.classes == ("a little, grey", "bright", "dark") and data.part_of == ""
        check(data, [2, 0, 1])
    before = data.train.fingerprint()
    (tmp_path / "wrong").mkdir()  # no class: the table says what is one
    text = (tmp_path / f"train.{endings[0]}").read_text()
    (tmp_path / f"train.{endings[0]}").write_text(text.replace("dark", "bright", 1))
    assert open_labelled(str(tmp_path)).train.fingerprint() != before


def test_labels_that_are_numbers(tmp_path):
    tables(tmp_path, ("csv", "jsonl"))
    numbers = {"dark": 2, "a little, grey": 10, "bright": 3}
    text = (tmp_path / "train.csv").read_text()
    for name, number in numbers.items():
        text = text.replace(f'"{name}"', str(number))
    (tmp_path / "train.csv").write_text(text)
    rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    lines = (json.dumps({**row, "label": numbers[row["label"]]}) + "\n" for row in rows)
    (tmp_path / "val.jsonl").write_text("".join(lines))
    data = open_labelled(str(tmp_path))
    assert data.classes == ("2", "3", "10")
    check(data, [0, 2, 1])
    names = tuple(f"class {number}" for number in range(11))
    data = open_labelled(str(tmp_path), class_names=names)
    assert data.classes == names and sorted(set(labels_of(data.val).tolist())) == [2, 3, 10]
    with pytest.raises(InputError, match="labels go up to 10, and there are 5 classes"):
        open_labelled(str(tmp_path), class_names=names[:5])


def test_class_folders_win_over_tables_of_something_else(tmp_path):
    imagenet(tmp_path)
    (tmp_path / "train.csv").write_text("id,score\n1,2\n")
    (tmp_path / "val.csv").write_text("id,score\n1,2\n")
    assert len(open_labelled(str(tmp_path)).train) == 9


@pytest.mark.parametrize("name", NAMED)
def test_the_training_part_alone(tmp_path, name):
    BUILD[name](tmp_path)
    for file in (tmp_path / "val2018.json", tmp_path / "trainvalsplit_places205" / "val_places205.csv"):
        file.unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "val", ignore_errors=True)
    data = open_labelled(name, str(tmp_path), train_only=True)
    assert len(data.train) == 9 and data.val is data.train and "test images" not in data.part_of
    with pytest.raises(InputError, match="val"):
        open_labelled(name, str(tmp_path))


def test_the_whole_set_is_no_part(tmp_path):
    data = open_labelled("imagenet", str(imagenet(tmp_path)))
    for counts, words in (
        ((9, 6, 3), ""),
        ((9, 7, 3), "a part of X: 9 of 9"),
        ((8, 6, 3), "more than X: 9 of 8"),
    ):
        known = dataclasses.replace(NAMED["imagenet"], title="X", counts=counts)
        found = known.part_of(data.train, data.val)
        assert found.startswith(words) and bool(found) == bool(words)


def test_a_list_of_many_is_small_in_memory():
    listed, count = Listed(), 20_000
    tracemalloc.start()
    for number in range(count):
        listed.append(f"n{number % 1000:08d}/n{number % 1000:08d}_{number}.JPEG", str(number % 1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < count * 100  # 30 bytes of path, 12 of numbers; twice that while the block grows


# --- through the command line ---


@pytest.mark.parametrize("name", [*NAMED, "tables"])
def test_knn(command, small, tmp_path, name):
    if name == "tables":
        words = ("--data", tables(tmp_path / "d"))
    else:
        words = ("--dataset", name, "--data", BUILD[name](tmp_path / "d"))
    words = (*words, "--k", 3, "--out", tmp_path / "out")
    code, out, err = command("transfer", "knn", "--model", small, *words)
    assert code == 0, err
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["metrics"]["top1"] == 1.0 and result["data"]["classes"] == 3
    if name == "tables":
        assert "flatters" not in result["details"] and "not for comparison" not in out
    else:
        title = NAMED[name].title
        assert result["dataset"] == name and result["details"]["flatters"].startswith(
            f"a part of {title}: 9 of"
        )
        assert f"not for comparison: a part of {title}" in out and f"a part of {title}" in err


def test_bad_input_through_the_command_line(command, small, tmp_path):
    words = ("transfer", "knn", "--model", small, "--dataset")
    assert_clear(command(*words, "imagenet"), "Where ImageNet lies isn't said", "train/<wnid>")
    assert_clear(command(*words, "imagnet"), "no such data set", "imagenet", "--data")
    (tmp_path / "empty").mkdir()
    for name, known in NAMED.items():
        said = (known.title, str(tmp_path / "empty"), "expected: " + known.tree.split()[0])
        assert_clear(command(*words, name, "--data", tmp_path / "empty"), *said)


# --- what is wrong is said by name ---


def replaced(file, *pairs):
    text = file.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)


def refused(name, root, words):
    with pytest.raises(InputError, match=words) as caught:
        open_labelled(name, str(root))
    return caught.value


def test_what_is_missing_of_imagenet(tmp_path):
    imagenet(tmp_path, "pairs")
    (tmp_path / "val.txt").unlink()
    error = refused("imagenet", tmp_path, "no list of their classes is there")
    assert str(tmp_path / "LOC_val_solution.csv") in error.where and "devkit_t12" in error.where
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "ILSVRC2012_img_val.tar").touch()
    error = refused("imagenet", tmp_path, "folders train and val aren't there")
    assert str(tmp_path / "ILSVRC" / "Data" / "CLS-LOC" / "val") in error.where
    assert "unpack ILSVRC2012_img_val.tar" in error.fix and "train/<wnid>/*.JPEG" in error.fix


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("ILSVRC2012_val_00000001 n01440764\n", r"5 of 6 test images have no class .*00000002\.JPEG first"),
        ("x.JPEG n01440764\ny.JPEG 7\n", "Line 2 is not an image and a wnid"),
        ("x.JPEG n01440764\nx.JPEG n02119789\n", "gives x a second class"),
        ("", "empty"),
        (b"\xff\xfe\x00", "can't be read"),
    ],
)
def test_a_bad_list_of_imagenets_test_images(tmp_path, content, words):
    file = imagenet(tmp_path, "pairs") / "val.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused("imagenet", tmp_path, words).where == str(file)


def test_listed_test_images_that_are_not_there(tmp_path):
    imagenet(tmp_path, "devkit")
    for number in (2, 5):
        (tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.JPEG").unlink()
    error = refused("imagenet", tmp_path, "2 of 6 listed images don't exist .ILSVRC2012_val_00000002 first")
    assert error.where.endswith("ground_truth.txt") and "val.csv" in error.fix


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("ILSVRC2012_validation_ground_truth.txt", "1\n4\n", "Line 2 is not a class from 1 to 3: '4'"),
        ("ILSVRC2012_validation_ground_truth.txt", "9" * 5000, "Line 1 is not a class"),
        ("map_clsloc.txt", "n02119789 0\nn01440764 1\n", "numbered from 1 to 2"),
        ("map_clsloc.txt", "n02119789 1\nn01440764 1\n", "numbered from 1 to 2"),
        ("map_clsloc.txt", "fox 1\n", "'fox'"),
    ],
)
def test_a_bad_devkit(tmp_path, file, content, words):
    path = imagenet(tmp_path, "devkit") / "ILSVRC2012_devkit_t12" / "data" / file
    path.write_text(content)
    assert refused("imagenet", tmp_path, words).where == str(path)


def test_class_folders_that_are_none_of_imagenet(tmp_path):
    imagenet(tmp_path)
    (tmp_path / "train" / WNIDS[0]).rename(tmp_path / "train" / "fish")
    assert f"--dataset {tmp_path}" in refused("imagenet", tmp_path, "found: fish").fix
    (tmp_path / "train" / "fish").rename(tmp_path / "train" / WNIDS[0])
    (tmp_path / "val" / WNIDS[0]).rename(tmp_path / "val" / "n09999999")
    refused("imagenet", tmp_path, "doesn't know: n09999999")
    (tmp_path / "val" / "n09999999").rename(tmp_path / "val" / WNIDS[0])
    (tmp_path / "train" / "n09999999").mkdir()
    refused("imagenet", tmp_path, "without pictures: n09999999")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x.jpg 205", "Line 10 is not a path and a number from 0 to 204"),
        ("x.jpg -1", "Line 10"),
        ("x.jpg", "Line 10"),
        ("x.jpg " + "9" * 5000, "Line 10"),
        ("gone.jpg 3\ntoo.jpg 3", r"2 of 11 listed images don't exist \(gone\.jpg first"),
    ],
)
def test_a_bad_list_of_places(tmp_path, line, words):
    file = places205(tmp_path) / "trainvalsplit_places205" / "train_places205.csv"
    file.write_text(file.read_text() + line + "\n")
    error = refused("places205", tmp_path, words)
    assert error.where == str(file)
    if "gone" in line:
        assert str(tmp_path / "images256") in error.fix and "expected: trainvalsplit_places205" in error.fix


def test_a_class_of_places_that_training_does_not_know(tmp_path):
    file = places205(tmp_path) / "trainvalsplit_places205" / "val_places205.csv"
    replaced(file, (" 17\n", " 18\n"))
    assert refused("places205", tmp_path, "doesn't know: 18").where == str(file)
    file.write_text("\n")
    refused("places205", tmp_path, "empty")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"image_id": 1000', '"image_id": 7', "An annotation is of image 7, which isn't there"),
        ('"category_id": 8', '"category_id": 77', "of category 77"),
        ('"image_id": 1000', '"image_id": 1001', "Image 1001 has several classes: Apple tree, Zebra finch"),
        ('"id": 1001', '"id": 1000', "Two images have the id 1000"),
        ('"file_name": "train_val2018', '"file": "train_val2018', r"images\[0\] has no id and file_name"),
        ('"file_name": "train_val2018', '"file_name": "\\ud800', "path is no text"),
        (
            "val4.jpg",
            "val44.jpg",
            r"1 of 6 listed images don't exist \(train_val2018/Kind/17/val44\.jpg first",
        ),
        ('"annotations"', '"notes"', "There are no annotations"),
        ('"info"', "info", "can't be read"),
        ('"name": "Moss"', '"name": "Mosses"', "doesn't know: Mosses"),
    ],
)
def test_a_bad_file_of_inat(tmp_path, old, new, words):
    replaced(inat18(tmp_path) / "val2018.json", (old, new))
    refused("inat18", tmp_path, words)


def test_images_of_inat_without_a_class_are_counted(tmp_path):
    file = inat18(tmp_path) / "val2018.json"
    content = json.loads(file.read_text())
    content["annotations"] = content["annotations"][:4]
    file.write_text(json.dumps(content))
    assert "test list" in refused("inat18", tmp_path, r"2 of 6 images have no annotation \(.*val0").fix


def test_categories_that_share_a_name_are_told_apart(tmp_path):
    inat18(tmp_path)
    for part in ("train", "val"):
        replaced(tmp_path / f"{part}2018.json", ('"name": "Moss"', '"name": "Apple tree"'))
    data = open_labelled("inat18", str(tmp_path))
    assert data.classes == ("4 Zebra finch", "8 Apple tree", "17 Apple tree")
    check(data, [0, 2, 1])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("val.csv", "path,label\npictures/val0.png,blue\n", "doesn't know: blue"),
        (
            "val.csv",
            "path,label\npictures/a.png,dark\nb.png,dark\n",
            r"2 of 2 listed .*pictures/a\.png first",
        ),
        (
            "val.csv",
            "path,class\npictures/val0.png,dark\n",
            "columns path and label aren't there; found: class, path",
        ),
        ("val.csv", "path,label\npictures/val0.png,\n", "isn't a path and a label"),
        ("val.csv", "path,label\npictures/val0.png,dark,bright\n", "isn't a path and a label"),
        ("val.csv", "path,label\npictures/val0.png,-1\n", "The label -1 is below 0"),
        ("val.csv", "path,label\n", "empty"),
        ("val.jsonl", '{"path": "pictures/val0.png", "label": 1.5}\n', "isn't a path and a label"),
        ("val.jsonl", '["pictures/val0.png"]\n', "columns path and label aren't there; found: none"),
        ("val.jsonl", '{"path": "p", "label": "dark"}\n{"path"\n', "Line 2 is no JSON"),
        ("test.csv", None, "no table of the test images"),
    ],
)
def test_a_bad_table(tmp_path, name, content, words):
    tables(tmp_path)
    (tmp_path / "val.csv").unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert str(tmp_path / name) in refused(str(tmp_path), tmp_path, words).where


def test_tables_that_share_an_image(tmp_path):
    tables(tmp_path)
    replaced(tmp_path / "val.csv", ("pictures/val0.png", "pictures/train0.png"))
    refused("own", tmp_path, "also a training image")
    assert len(open_labelled("own", str(tmp_path), allow_overlap=True).val) == 6


def test_images_of_one_size_and_one_end_are_compared_whole(tmp_path):
    tables(tmp_path)
    for part, first in (("train", b"a"), ("val", b"b")):
        (tmp_path / "pictures" / f"{part}0.png").write_bytes(first + bytes(9000))
    open_labelled("own", str(tmp_path))
    (tmp_path / "pictures" / "val0.png").write_bytes(b"a" + bytes(9000))
    refused("own", tmp_path, r"also a training image .*train0\.png")
