"""Annotations of odd content: one clear message each, or the right boxes; never other boxes than were meant."""

from __future__ import annotations

import codecs
import json

import numpy as np
import pytest
import torch
from PIL import Image

from transfer.detect.checks import image_size
from transfer.detect.config import DetectConfig
from transfer.detect.datasets import open_sets, read_sets
from transfer.detect.judge import for_detection
from transfer.detect.models.detectors import DetectorSettings, build_detector
from transfer.detect.models.rpn import RpnSettings
from transfer.detect.rle import run_lengths
from transfer.detect.scored import read_scored, write_scored
from transfer.detect.scores import Detections
from weights.published import assert_clear
from zoo.data.decoding import Decoding
from zoo.engine.precision import choose_precision
from zoo.errors import InputError, RunError
from zoo.models.factory import create_trunk

from .tiny_boxes import annotation, change, path_of, thing, tiny_coco, tiny_voc, wrong

__all__ = ["tiny_coco", "tiny_voc"]  # fixtures

CONFIG = DetectConfig()
HUGE = 10**400


def spoilt(root, split="train2017", **changes):
    """What is said when the first annotation holds this."""
    change(root, split, lambda content: content["annotations"][0].update(changes))
    return wrong(root)


# --- COCO ---


@pytest.mark.parametrize(
    "box", ["1234", [1, float("nan"), 2, 3], [0, 0, float("inf"), 1], [0, 0, HUGE, 1], {}]
)
def test_a_box_is_four_numbers(tiny_coco, box):
    assert "A box is not four numbers (annotation 1)" in spoilt(tiny_coco, bbox=box)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("category_id", "7", "image 1: category '7'"),
        ("category_id", [7], "image 1: category [7]"),
        ("image_id", "1", "image_id '1'"),
        ("image_id", [1], "image_id [1]"),
        ("iscrowd", "0", "iscrowd is neither 0 nor 1"),
        ("area", "50", "An area is no number"),
        ("area", float("nan"), "An area is no number"),
        ("area", HUGE, "An area is no number"),
    ],
)
def test_values_of_another_kind_are_named(tiny_coco, key, value, words):
    assert words in spoilt(tiny_coco, **{key: value})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"id": "8", "name": "boot"},
            "id that is no whole number from 0 on, or no name (id '8', name 'boot')",
        ),
        ({"id": -8, "name": "boot"}, "(id -8, name 'boot')"),
        ({"id": 8, "name": None}, "(id 8, name None)"),
        ({"id": 7, "name": "boot"}, "Two categories have one id: 7"),
        ({"id": 8, "name": "shoe"}, "Two categories have one name: shoe"),
    ],
)
def test_categories_have_a_number_and_a_name_of_their_own(tiny_coco, more, words):
    change(tiny_coco, "train2017", lambda content: content["categories"].append(more))
    assert words in wrong(tiny_coco)


@pytest.mark.parametrize("content", [None, {}, ["x"]])
def test_annotations_are_a_list_of_objects(tiny_coco, content):
    change(tiny_coco, "train2017", lambda whole: whole.update(annotations=content))
    with pytest.raises(InputError, match="no COCO file of instances"):
        read_sets(str(tiny_coco), None, CONFIG)


def test_ids_that_scoring_would_round_are_refused(tiny_coco):
    def large(content):
        content["images"][0]["id"] = content["annotations"][0]["image_id"] = 2**60 + 1

    change(tiny_coco, "train2017", large)
    assert f"no whole number from 0 to 2**53 (entry 0: id {2**60 + 1})" in wrong(tiny_coco)


@pytest.mark.parametrize("counts", [[5, 5], [700, -100], "zzzz", "\u4e00", None, ["a"]])
@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_run_lengths_make_up_their_image(tiny_coco, counts, split):
    said = spoilt(tiny_coco, split, segmentation={"size": [20, 30], "counts": counts}, iscrowd=1)
    number = 1 if split == "train2017" else 9
    assert f"run lengths that don't make up their image (image {number}, annotation {number})" in said


@pytest.mark.parametrize("size", [5, "ab", None, [30, 20]])
def test_masks_whose_image_states_no_size(tiny_coco, size):
    change(tiny_coco, "train2017", lambda content: [one.pop("height") for one in content["images"]])
    said = spoilt(tiny_coco, segmentation={"size": size, "counts": [600]})
    assert ("1 of its masks are of 20 x 30" if size == [30, 20] else "masks are of another size") in said


@pytest.mark.parametrize(
    "mask", ["abc", 5, [["a"] * 6], [[float("nan"), 1, 2, 3, 4, 5]], [[0, 0, 1e7, 0, 0, 5]]]
)
def test_polygons_that_are_none_are_left_out_and_counted(tiny_coco, mask):
    change(tiny_coco, "train2017", lambda content: content["annotations"][0].update(segmentation=mask))
    sets = open_sets(str(tiny_coco), None, CONFIG)
    assert any("1 masks have polygons that are no three corners" in note for note in sets.train.notes)
    assert sets.train.pictures[0].objects.masks is None


def test_run_lengths_in_text_are_the_librarys():
    from hotcoco import mask

    rng = np.random.default_rng(0)
    for share in (0.02, 0.5, 0.98):
        height, width = map(int, rng.integers(1, 300, 2))
        pixels = rng.random((height, width)) < share
        text = mask.encode(np.asfortranarray(pixels.astype(np.uint8)))["counts"]
        lengths = run_lengths(text if isinstance(text, str) else text.decode())
        flat = np.repeat(np.arange(len(lengths)) % 2, lengths)
        assert np.array_equal(flat.reshape(width, height).T, pixels)


@pytest.mark.parametrize("name", ["1.jpg", "./1.jpg"])
def test_an_image_that_is_listed_twice_is_named(tiny_coco, name):
    change(tiny_coco, "train2017", lambda content: content["images"][1].update(file_name=name))
    assert "1 images of train2017 are listed more than once" in wrong(tiny_coco)


def test_files_in_other_folders_are_missing(tiny_coco):
    for name, words in (("sub/1.jpg", "leave its folders out"), ("x" * 5000, "1 of 2 images are missing")):
        change(tiny_coco, "train2017", lambda content, name=name: content["images"][0].update(file_name=name))
        assert words in wrong(tiny_coco)


def test_a_byte_order_mark_is_no_mistake(tiny_coco):
    file = path_of(tiny_coco, "train2017")
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert len(open_sets(str(tiny_coco), None, CONFIG).train) == 2


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_a_set_without_images_or_objects_is_refused(tiny_coco, split):
    change(tiny_coco, split, lambda content: content.update(annotations=[]))
    assert "images has an object" in wrong(tiny_coco)
    change(tiny_coco, split, lambda content: content.update(images=[]))
    assert f"The set has no image. {split}" in wrong(tiny_coco)


# --- what boxes hardly mean ---


def test_edges_where_sizes_belong_are_found(tiny_coco):
    change(tiny_coco, "train2017", lambda c: [one.update(bbox=[15, 10, 28, 19]) for one in c["annotations"]])
    assert "it seems to hold xmin, ymin, xmax, ymax" in wrong(tiny_coco)


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ("15,10,8,6", "these look like x, y, width and height"),
        ("25,2,19,12", "in what order"),
        ("0.1,0.2,0.5,0.4", "shares of its sides"),
    ],
)
def test_other_numbers_where_edges_belong_are_found(tmp_path, box, words):
    assert words in wrong(table(tmp_path, f"a.png,{box},hat\n"))


# --- tables ---

HEADER = "image,xmin,ymin,xmax,ymax,label\n"


def table(folder, lines, kind="csv"):
    for shade, name in enumerate(("a", "b", "c")):
        Image.new("RGB", (30, 20), (60 * shade, 0, 0)).save(folder / f"{name}.png")
    (folder / "test.csv").write_text(f"{HEADER}c.png,0,0,5,5,hat\n")
    content = HEADER + lines if kind == "csv" and isinstance(lines, str) else lines
    (folder / f"train.{kind}").write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("sign", [";", "\t"])
def test_a_table_of_other_signs_with_blank_lines(tmp_path, sign):
    lines = f"{HEADER}\n,,,,,\n  \na.png,1,2,9,12,hat,\n".replace(",", sign).encode()
    sets = open_sets(str(table(tmp_path, lines)), None, CONFIG)
    assert [picture.objects.boxes.tolist() for picture in sets.train.pictures] == [[[1, 2, 9, 12]]]


@pytest.mark.parametrize(
    "line", ["a.png,nan,2,9,12,hat", "a.png,1,2,inf,12,hat", "a.png,1,,9,12,hat", "a,b.png,1,2,9,12,hat"]
)
def test_a_line_that_cannot_be_a_box_is_named(tmp_path, line):
    said = wrong(table(tmp_path, f"b.png,1,2,9,12,hat\n{line}\n"))
    assert "line 3" in said and ("not four numbers" in said or "more cells" in said)


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": [None]},
        {"labels": [{}]},
        {"labels": "h"},
        {"boxes": ["1234"]},
        {"boxes": [[1, float("nan"), 9, 12]]},
        {"boxes": None},
        {"image": None},
    ],
)
def test_a_json_line_that_cannot_be_an_image_is_named(tmp_path, changes):
    good = {"image": "a.png", "boxes": [[1, 2, 9, 12]], "labels": ["hat"]}
    lines = [json.dumps(good), json.dumps({**good, "image": "b.png", **changes})]
    assert "train.jsonl, line 2" in wrong(table(tmp_path, "\n".join(lines), "jsonl"))
    lines[1] = '{"image": "b.png", "bboxes": [[1, 2, 9, 12]], "labels": ["hat"]}'
    assert "it has no 'boxes'" in wrong(table(tmp_path, "\n".join(lines), "jsonl"))


def test_json_lines_with_a_mark_and_odd_separators(tmp_path):
    row = {"image": "a.png", "boxes": [[1, 2, 9, 12]], "labels": ["hat"], "note": "x\u2028y"}
    lines = codecs.BOM_UTF8 + json.dumps(row, ensure_ascii=False).encode() + b'\r\n{"image": "b.png"}\r\n'
    sets = open_sets(str(table(tmp_path, lines, "jsonl")), None, DetectConfig(keep_empty=True))
    assert [len(picture.objects) for picture in sets.train.pictures] == [1, 0]


# --- VOC ---


@pytest.mark.parametrize(
    "coded",
    [
        lambda text: text.replace("<annotation>", '<annotation xmlns="http://host/voc">').encode(),
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: text.encode("utf-16"),
    ],
    ids=["namespace", "mark", "utf-16"],
)
def test_an_annotation_is_read_however_it_is_coded(tiny_voc, coded):
    (tiny_voc / "Annotations" / "one.xml").write_bytes(coded(annotation(thing())))
    sets = open_sets(str(tiny_voc), None, CONFIG)
    assert sets.train.pictures[0].objects.boxes.tolist() == [[0, 0, 10, 10]]


LAUGHS = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 12))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<html><body/></html>", "it begins with <html>"),
        ('<?xml version="1.0" encoding="klingon"?><annotation/>', "unknown encoding: klingon"),
        ('<?xml version="1.0" encoding="utf-7"?><annotation/>', "can't be read (multi-byte"),
        (f'<!DOCTYPE a [<!ENTITY l0 "ha">{LAUGHS}]><annotation>&l11;</annotation>', "can't be read (limit"),
        (
            '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]><annotation>&x;</annotation>',
            "undefined entity",
        ),
        (annotation(thing(box=(1, 1, "nan", 5))), "not four numbers"),
        (annotation(thing(box=(1, 1, "inf", 5))), "not four numbers"),
    ],
)
def test_what_is_no_annotation_is_named(tiny_voc, content, words):
    (tiny_voc / "Annotations" / "two.xml").write_text(content)
    assert words in wrong(tiny_voc) and "two.xml" in wrong(tiny_voc)


def test_a_size_that_is_none_is_not_taken(tiny_voc):
    (tiny_voc / "Annotations" / "one.xml").write_text(annotation(thing(), size=("inf", 20)))
    assert not wrong(tiny_voc)


def test_lists_with_a_mark_spaces_and_repetitions(tiny_voc):
    listing = tiny_voc / "ImageSets" / "Main" / "trainval.txt"
    listing.write_bytes(codecs.BOM_UTF8 + b"one\r\n")
    assert not wrong(tiny_voc)
    for folder, ending in (("JPEGImages", "jpg"), ("Annotations", "xml")):
        (tiny_voc / folder / f"one.{ending}").rename(tiny_voc / folder / f"my one.{ending}")
    listing.write_text("my one\n")
    assert [picture.name for picture in open_sets(str(tiny_voc), None, CONFIG).train.pictures] == ["my one"]
    listing.write_text("my one\nmy one\n")
    assert "1 images of trainval are listed more than once" in wrong(tiny_voc)


def test_a_name_that_is_too_long_is_none(tmp_path):
    for dataset, data in (("x" * 300, None), ("voc07", "x" * 300)):
        with pytest.raises(InputError, match="There is no such"):
            read_sets(dataset, data, CONFIG)


# --- images ---


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_the_size_is_that_of_the_decoded_image(tmp_path, kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg", kind, exif=exif)
    assert image_size(tmp_path / "a.jpg")[0] == (30, 20)


def test_what_is_not_decoded_is_not_measured(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 30 20\n%%EndComments\n")
    with pytest.raises(InputError, match="a PostScript document"):
        image_size(tmp_path / "a.jpg")
    block = Image.Exif()
    block[0x0112] = 6
    Image.new("RGB", (30, 20)).save(tmp_path / "b.jpg", exif=block.tobytes()[:10] + b"\xff" * 6)
    assert image_size(tmp_path / "b.jpg") == ((20, 30), False)


def test_an_image_that_is_exchanged_meanwhile_is_named(tiny_voc):
    sets = open_sets(str(tiny_voc), None, CONFIG)
    assert sets.train.read(0).shape == (20, 30, 3)
    Image.new("RGB", (40, 20)).save(tiny_voc / "JPEGImages" / "one.jpg")
    with pytest.raises(InputError, match="40 x 20 pixels, and its boxes are of 30 x 20"):
        sets.train.read(0)


def test_the_limit_of_pixels(command, tiny_voc, tmp_path):
    words = ("data", "check", tiny_voc, "--task", "detect")
    assert command(*words, "--max-pixels", 600)[0] == 0
    code, out, _ = command(*words, "--max-pixels", 599)
    assert (
        code == 1
        and "30 x 20 pixels, more than the limit of 599" in out
        and "raise the limit (--max-pixels)" in out
    )
    train = ("transfer", "detect", "--model", tmp_path / "no-model", "--dataset", tiny_voc, "--max-pixels")
    code, _, err = command(*train, 599)
    assert code == 2 and "2 things are wrong" in err and "fix:   raise the limit (--max-pixels)" in err
    assert_clear(command(*train, 600), "no-model")  # the data are in order
    assert_clear(command(*words, "--max-bytes", 5), "--max-bytes goes with --task images")
    how = Decoding(max_pixels=599)
    scored = read_sets(str(tiny_voc), None, CONFIG, how).test
    with pytest.raises(InputError, match="limit of 599"):
        scored.read(0)
    write_scored(tmp_path, scored, str(tiny_voc), None, CONFIG)
    (tmp_path / "detections.json").write_text("[]")
    assert read_scored(tmp_path)[0].decoding == how


# --- detections ---


def test_a_detector_whose_weights_are_no_numbers_is_refused():
    settings = DetectorSettings("c4", 1, RpnSettings((10, 10), (10, 10), 8))
    detector = build_detector(create_trunk("resnet18", base_planes=8), settings).eval()
    precision = choose_precision("float32", torch.device("cpu"))
    for_detection(detector, precision)
    with torch.no_grad():
        detector.trunk.conv1.weight[0] = float("nan")
    with pytest.raises(RunError, match=r"1 tensors .* no numbers \(trunk.conv1.weight\)"):
        for_detection(detector, precision)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_and_boxes_that_are_no_numbers_are_an_error(value):
    box = np.array([[0.0, 0.0, 1.0, 1.0]])
    for boxes, scores in ((box, np.array([value])), (np.full((1, 4), value), np.array([0.5]))):
        with pytest.raises(RunError, match="no numbers") as caught:
            Detections(boxes, scores, np.zeros(1, dtype=np.int64))
        assert "--precision float32" in caught.value.fix
