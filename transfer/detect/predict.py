"""``zoo predict``: what a trained detector finds in pictures, drawn onto them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from zoo.data.decode import IMAGE_SUFFIXES
from zoo.data.decoding import MAX_PIXELS, Decoding
from zoo.engine.precision import choose_device, choose_precision, compute_threads
from zoo.errors import InputError
from zoo.files import disk_errors, whole_file, write_json
from zoo.keyed import keyed_key, keyed_uniforms

from .annotations import read_image
from .batches import to_tensor
from .judge import detect_one, for_detection
from .rle import bitmap_of
from .saved import load_detector
from .scores import Detections
from .training import Normalisation
from .views import resize

__all__ = ["SCORE", "draw", "predict"]

SCORE = 0.5
SCHEMA = 1
_MASK = 0.45  # opacity


def predict(
    model: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    score: float = SCORE,
    device: str = "auto",
    precision: str = "auto",
    max_pixels: int = MAX_PIXELS,
) -> dict[str, Any]:
    """Draw boxes (and masks) above a score onto each picture, and write them all down.

    Args:
        model: what ``zoo transfer detect`` wrote: its folder, a run in it, or the detector's.
        images: a picture or a folder of pictures, nested or not.
        out: the folder for the drawn pictures and ``predictions.json``, which has every detection.
        score: what is drawn has at least this score.
        device: where to compute.
        precision: how.
        max_pixels: larger pictures are refused.

    Returns:
        JSON: ``schema``, ``out``, and for each image its boxes (x1, y1, x2, y2 in pixels from 0), labels and scores.

    Raises:
        InputError: no detector, no pictures, a picture that can't be read, or one that would be replaced.
        RunError: the disk failed.
    """
    saved = load_detector(Path(model).expanduser())
    source, target = Path(images).expanduser(), Path(out).expanduser()
    places = _places(source, target)
    how = choose_precision(precision, choose_device(device))
    saved.detector.to(device=how.device, dtype=how.master_dtype)
    network = for_detection(saved.detector, how)
    rows = []
    with compute_threads(how.device, 0), disk_errors("Writing the drawn pictures", target):
        for file, place in places.items():
            name = file.name if source.is_file() else file.relative_to(source).as_posix()
            pixels = read_image(file, Decoding(max_pixels=max_pixels))
            size = pixels.shape[0], pixels.shape[1]
            sides = saved.detector.view_size(*size, saved.test_size, saved.most)
            view = to_tensor(resize(pixels, sides))
            found = detect_one(network, view, size, Normalisation(saved.mean, saved.std), how)
            place.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(place) as temporary:
                draw(pixels, found, saved.classes, score).save(temporary, format="PNG")
            rows.append(_row(name, size, found, saved.classes, saved.numbers))
        answer = {"schema": SCHEMA, "classes": list(saved.classes), "images": rows}
        write_json(target / "predictions.json", answer)
    return {**answer, "out": str(target)}


def _places(source: Path, target: Path) -> dict[Path, Path]:
    """The pictures, each with a place of its own for the drawn one: a PNG of its name."""
    files = list(_pictures(source, target))
    if not files:
        raise InputError("There is no picture.", where=source, fix="pass a picture or a folder of pictures")
    names = [Path(file.name) if source.is_file() else file.relative_to(source) for file in files]
    drawn = Counter(name.with_suffix(".png") for name in names)
    places = {}
    for file, name in zip(files, names, strict=True):
        alone = drawn[name.with_suffix(".png")] == 1  # a.jpg and a.png are a.jpg.png and a.png.png
        places[file] = target / (name.with_suffix(".png") if alone else f"{name}.png")
    originals = {file.resolve() for file in files}
    if over := [place for place in places.values() if place.resolve() in originals]:
        raise InputError(
            "A drawn picture would replace the picture itself.",
            where=over[0],
            fix="pass another folder with -o",
        )
    return places


def _pictures(source: Path, target: Path) -> Iterator[Path]:
    """Without those that were drawn before, if they lie in a folder below."""
    if source.is_file():
        yield source
        return
    inside = target.resolve() if target.resolve() != source.resolve() else None
    for path in sorted(source.rglob("*")):
        # (Path.resolve refuses links that lead round in a circle.)
        if inside is not None and inside in Path(os.path.realpath(path)).parents:
            continue
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
            yield path


def _row(
    name: str, size: tuple[int, int], found: Detections, classes: tuple[str, ...], numbers: tuple[int, ...]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "image": name,
        "height": size[0],
        "width": size[1],
        "boxes": [[round(value, 2) for value in box] for box in found.boxes.tolist()],
        "labels": [classes[label] for label in found.labels.tolist()],
        "scores": [round(value, 5) for value in found.scores.tolist()],
    }
    if numbers:
        row["category_ids"] = [numbers[label] for label in found.labels.tolist()]
    if found.masks is not None:
        row["masks"] = found.masks
    return row


def draw(
    pixels: np.ndarray, found: Detections, classes: tuple[str, ...], score: float, say: bool = True
) -> Image.Image:
    """The picture with the detections from ``score`` on, the best on top.

    Args:
        pixels: uint8 (H, W, 3).
        found: detections in its pixels, the best first.
        classes: names of the labels.
        score: the least that is drawn.
        say: write the scores, too.
    """
    height, width = pixels.shape[:2]
    shown = [row for row in range(len(found.scores)) if found.scores[row] >= score][::-1]
    if found.masks is not None:
        pixels = pixels.copy()
        for row in shown:
            inside = bitmap_of(found.masks[row], height, width)
            paint = _MASK * np.array(_colour(int(found.labels[row])))
            pixels[inside] = ((1 - _MASK) * pixels[inside] + paint).astype(np.uint8)
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    pen = ImageDraw.Draw(picture)
    line = max(1, round(min(height, width) / 200))
    font = ImageFont.load_default(size=max(10, min(height, width) // 30))
    for row in shown:
        colour = _colour(int(found.labels[row]))
        x1, y1, x2, y2 = found.boxes[row].tolist()
        pen.rectangle((x1, y1, max(x1, x2 - 1), max(y1, y2 - 1)), outline=colour, width=line)
        text = classes[int(found.labels[row])] + (f" {found.scores[row]:.2f}" if say else "")
        left, top, right, bottom = pen.textbbox((x1, y1), text, font=font)
        up = min(y1, bottom - top + 2)
        pen.rectangle((left, top - up, right + 2, bottom - up + 2), fill=colour)
        pen.text((x1 + 1, y1 - up), text, fill=(255, 255, 255), font=font)
    return picture


def _colour(label: int) -> tuple[int, int, int]:
    """A colour of its own for each class, dark enough for white letters."""
    import colorsys

    hue = float(keyed_uniforms(keyed_key(0, "colour of a class", label), 1)[0])
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.9, 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)
