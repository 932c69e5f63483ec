"""Tiny data sets in the layouts of the published ones: three classes that anybody can tell apart, VOC's twenty."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from transfer.voc import VOC_CLASSES

WNIDS = ("n01440764", "n02119789", "n02100735")  # as the devkit may number them: not in alphabetical order
GREYS = (40, 120, 210)


def picture(file: Path, level: int, seed: int, side: int = 32) -> str:
    """Noise around a grey level."""
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-20, 21, (side, side, 3))
    Image.fromarray(np.clip(level + noise, 0, 255).astype(np.uint8)).save(file)
    return file.name


def imagenet(root: Path, test: str = "folders", train: int = 3, val: int = 2, side: int = 32) -> Path:
    """``test``: how the test images are labelled: ``folders``, ``solution``, ``pairs`` or ``devkit``."""
    base = root / "ILSVRC" / "Data" / "CLS-LOC" if test == "solution" else root
    for c, wnid in enumerate(WNIDS):
        for number in range(train):
            picture(base / "train" / wnid / f"{wnid}_{number}.JPEG", GREYS[c], 10 * c + number, side)
    truth = []
    for number in range(1, 3 * val + 1):  # the classes in turn
        c = (number - 1) % 3
        name = f"ILSVRC2012_val_{number:08d}"
        truth.append((name, c))
        inside = f"{WNIDS[c]}/" if test == "folders" else ""
        picture(base / "val" / f"{inside}{name}.JPEG", GREYS[c], 100 + number, side)
    if test == "solution":
        lines = "".join(f"{name},{WNIDS[c]} 1 2 30 31 {WNIDS[c]} 5 5 9 9\n" for name, c in reversed(truth))
        (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + lines)
    elif test == "pairs":
        (root / "val.txt").write_text("".join(f"val/{name}.JPEG {WNIDS[c]}\n" for name, c in truth))
    elif test == "devkit":
        data = root / "ILSVRC2012_devkit_t12" / "data"
        data.mkdir(parents=True)
        (data / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{c + 1}\n" for _, c in truth))
        (data / "map_clsloc.txt").write_text("".join(f"{w} {c} a_name\n" for c, w in enumerate(WNIDS, 1)))
    return root


def places205(root: Path, inside: str = "images256", train: int = 3, val: int = 2, side: int = 32) -> Path:
    lists = root / "trainvalsplit_places205"
    lists.mkdir(parents=True)
    for part, count in (("train", train), ("val", val)):
        lines = []
        for number in range(3 * count):
            label, c = ((0, 17, 204)[number % 3], number % 3)
            path = f"a/place {label}/{part}_{number}.jpg"
            picture(root / inside / path, GREYS[c], number + 50 * (part == "val"), side)
            lines.append(f"{path} {label}\n")
        (lists / f"{part}_places205.csv").write_text("".join(lines))
    return root


def inat18(root: Path, train: int = 3, val: int = 2, side: int = 32) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    names = {4: "Zebra finch", 17: "Apple tree", 8: "Moss", 99: "Nobody"}
    for part, count in (("train", train), ("val", val)):
        images, annotations = [], []
        for number in range(3 * count):
            c, first = number % 3, 1000 * (part == "val")
            path = f"train_val2018/Kind/{(4, 17, 8)[c]}/{part}{number}.jpg"
            picture(root / path, GREYS[c], number + first, side)
            size = {"width": side, "height": side, "license": 1, "rights_holder": "somebody"}
            images.append({"id": first + number, "file_name": path, **size})
            annotations.append({"id": number, "image_id": first + number, "category_id": (4, 17, 8)[c]})
        categories = [{"id": k, "name": name, "supercategory": "Kind"} for k, name in names.items()]
        content = {"info": {"year": 2018}, "images": images, "annotations": annotations[::-1]}
        (root / f"{part}2018.json").write_text(json.dumps({**content, "categories": categories}))
    return root


def voc07(root: Path, train: int = 16, test: int = 8, side: int = 40, files: int = 10) -> Path:
    """Class c is in every fourth image, in turn; in the first image of each set it is there as a difficult object.

    ``files``: how many classes have class files; the labels of the others are in the annotations alone.
    """
    year = root / "VOCdevkit" / "VOC2007"
    main = year / "ImageSets" / "Main"
    for folder in (main, year / "Annotations"):
        folder.mkdir(parents=True)
    for split, count in (("trainval", train), ("test", test)):
        names = [f"{number + 1000 * (split == 'test'):06d}" for number in range(count)]
        (main / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
        labels = np.full((count, len(VOC_CLASSES)), -1)
        for number, name in enumerate(names):
            picture(year / "JPEGImages" / f"{name}.jpg", 20 + 10 * number, int(name), side)
            labels[number, number % 4 :: 4] = 1
            labels[number, labels[number] == 1] = 0 if number == 0 else 1
            things = "".join(
                f"<object><name>{label}</name><difficult>{int(value == 0)}</difficult><bndbox><xmin>1</xmin>"
                "<ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>"
                for label, value in zip(VOC_CLASSES, labels[number], strict=True)
                if value >= 0
            )
            (year / "Annotations" / f"{name}.xml").write_text(f"<annotation>{things}</annotation>")
        for c, label in enumerate(VOC_CLASSES[:files]):
            lines = (f"{name} {labels[number, c]:2d}\n" for number, name in enumerate(names))
            (main / f"{label}_{split}.txt").write_text("".join(lines))
    return root


def tables(root: Path, endings: tuple[str, str] = ("csv", "csv"), train: int = 3, val: int = 2) -> Path:
    for part, ending, count in zip(("train", "val"), endings, (train, val), strict=True):
        rows = []
        for number in range(3 * count):
            path, c = f"pictures/{part}{number}.png", number % 3
            picture(root / path, GREYS[c], number + 50 * (part == "val"))
            rows.append((path, ("dark", "a little, grey", "bright")[c]))
        if ending == "csv":
            text = "path,label\n" + "".join(f'{path},"{label}"\n' for path, label in rows)
        else:
            text = "".join(json.dumps({"path": path, "label": label}) + "\n" for path, label in rows)
        (root / f"{part}.{ending}").write_text(text)
    return root
