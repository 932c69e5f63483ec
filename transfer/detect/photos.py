"""``builtin:photos-voc``: a small VOC folder, made on disk by pasting patches onto other photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from zoo.data.builtin import PhotoPatches
from zoo.files import disk_errors, whole_folder
from zoo.homes import cache_home
from zoo.keyed import keyed_key, keyed_permutation, keyed_uniforms

__all__ = ["photos_voc", "write_photos_voc"]

_VERSION = 2
_COUNTS = {"trainval": 48, "test": 24}
_HEIGHT, _WIDTH = 192, 256
_OBJECTS = ("coffee", "chelsea", "astronaut", "coins", "rocket", "ihc")


def photos_voc() -> Path:
    """The folder in the cache, made at first use."""
    folder = cache_home() / "datasets" / f"photos-voc-{_VERSION}"
    if not folder.is_dir():
        with disk_errors("Making builtin:photos-voc", folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                with whole_folder(folder) as temporary:
                    write_photos_voc(temporary)
            except OSError:
                if not folder.is_dir():  # another process may have been faster
                    raise
    return folder


def write_photos_voc(folder: Path) -> None:
    """Images of 256 x 192 with one to three pasted patches; the class is the patch's photograph.

    Training images are made of the training regions of the photographs and test images of the others, so
    that no pixel is in both.
    """
    root = folder / "VOC2007"
    for part in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / part).mkdir(parents=True)
    for split, count in _COUNTS.items():
        patches = PhotoPatches("train" if split == "trainval" else "val")
        ids = [f"{split}{index:03d}" for index in range(count)]
        for index, name in enumerate(ids):
            pixels, boxes = _compose(patches, split, index)
            Image.fromarray(pixels).save(root / "JPEGImages" / f"{name}.jpg", quality=95)
            (root / "Annotations" / f"{name}.xml").write_text(_annotation(name, boxes), encoding="utf-8")
        listing = "".join(f"{name}\n" for name in ids)
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text(listing, encoding="utf-8")


def _compose(
    patches: PhotoPatches, split: str, index: int
) -> tuple[np.ndarray, list[tuple[str, tuple[int, int, int, int]]]]:
    u = iter(keyed_uniforms(keyed_key(0, f"photos-voc {split}", index), 64).tolist())
    by_class = {
        name: [i for i in range(len(patches)) if patches.label(i) == k]
        for k, name in enumerate(patches.classes)
    }
    grounds = [name for name in patches.classes if name not in _OBJECTS]
    ground = by_class[grounds[int(next(u) * len(grounds))]]
    canvas = np.asarray(
        Image.fromarray(patches.read(ground[int(next(u) * len(ground))])).resize((_WIDTH, _HEIGHT))
    ).copy()
    boxes = []
    cells = keyed_permutation(keyed_key(0, f"photos-voc cells {split}", index), 6)  # 3 x 2 cells: no overlap
    for cell in cells[: 1 + int(next(u) * 3)]:
        name = _OBJECTS[int(next(u) * len(_OBJECTS))]
        members = by_class[name]
        side = 48 + int(next(u) * 33)
        patch = Image.fromarray(patches.read(members[int(next(u) * len(members))])).resize((side, side))
        left = int(cell % 3) * 85 + int(next(u) * (85 - side + 1))
        top = int(cell // 3) * 96 + int(next(u) * (96 - side + 1))
        canvas[top : top + side, left : left + side] = np.asarray(patch)
        boxes.append((name, (left + 1, top + 1, left + side, top + side)))
    return canvas, boxes


def _annotation(name: str, boxes: list[tuple[str, tuple[int, int, int, int]]]) -> str:
    objects = "".join(
        f"<object><name>{label}</name><pose>Unspecified</pose><difficult>0</difficult><bndbox>"
        f"<xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        for label, (x1, y1, x2, y2) in boxes
    )
    size = f"<size><width>{_WIDTH}</width><height>{_HEIGHT}</height><depth>3</depth></size>"
    return f"<annotation><filename>{name}.jpg</filename>{size}{objects}</annotation>\n"
