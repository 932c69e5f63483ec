"""Two tiny folders of boxes, in VOC's layout and in COCO's, and what changes and checks them."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from transfer.detect.config import DetectConfig
from transfer.detect.datasets import check_sets, read_sets

THING = "<object><name>{}</name>{}<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
USUAL = "<pose>Left</pose><difficult>0</difficult>"


def annotation(*things, size=(30, 20)):
    inside = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>" if size else ""
    return f"<annotation>{inside}{''.join(things)}</annotation>"


def thing(name="hat", box=(1, 1, 10, 10), more=USUAL):
    return THING.format(name, more, *box)


@pytest.fixture
def tiny_voc(tmp_path):
    """One training and one test image, each with one object."""
    root = tmp_path / "VOC2007"
    for part in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / part).mkdir(parents=True)
    for shade, (name, split) in enumerate((("one", "trainval"), ("two", "test"))):
        Image.new("RGB", (30, 20), (60 * shade, 0, 0)).save(root / "JPEGImages" / f"{name}.jpg")
        (root / "Annotations" / f"{name}.xml").write_text(annotation(thing()))
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text(f"{name}\n")
    return root


@pytest.fixture
def tiny_coco(tmp_path):
    """Two training images and a test image; category ids with a gap."""
    root = tmp_path / "coco"
    for split in ("train2017", "val2017"):
        (root / split).mkdir(parents=True)
    (root / "annotations").mkdir()
    categories = [{"id": 3, "name": "hat"}, {"id": 7, "name": "shoe"}]
    for split, ids in (("train2017", (1, 2)), ("val2017", (9,))):
        images = [{"id": i, "file_name": f"{i}.jpg", "height": 20, "width": 30} for i in ids]
        for i in ids:
            Image.new("RGB", (30, 20), (25 * i, 0, 0)).save(root / split / f"{i}.jpg")
        boxes = [
            {"id": i, "image_id": i, "category_id": 7, "bbox": [2, 3, 8, 9], "area": 50.0, "iscrowd": 0}
            for i in ids
        ]
        for box in boxes:
            box["segmentation"] = [[2, 3, 10, 3, 10, 12, 2, 12]]
        write(root, split, {"images": images, "annotations": boxes, "categories": categories})
    return root


def path_of(root, split):
    return root / "annotations" / f"instances_{split}.json"


def write(root, split, content):
    path_of(root, split).write_text(json.dumps(content))


def change(root, split, edit):
    content = json.loads(path_of(root, split).read_text())
    edit(content)
    write(root, split, content)


def checked(folder, **settings):
    config = DetectConfig(**settings)
    return check_sets(read_sets(str(folder), None, config), config)


def wrong(folder, **settings):
    return " | ".join(f"{p.what} {p.where} {p.fix}" for p in checked(folder, **settings).problems)
