"""builtin:photos: disjoint splits, balanced classes, and the same patches everywhere."""

from __future__ import annotations

import importlib.util
import pickle
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.data import builtin
from zoo.data.builtin import PATCH, SPLITS, PhotoPatches, open_builtin
from zoo.data.source import ImageSource
from zoo.errors import InputError


@pytest.fixture(scope="module")
def splits() -> dict[str, PhotoPatches]:
    return {split: PhotoPatches(split) for split in SPLITS}


def _copy_photos(source: PhotoPatches, to: Path) -> list[Path]:
    """Writable copies of the photographs, so that a test may paint on them."""
    to.mkdir()
    paths = {Path(source.where(index).split(" (")[0]) for index in range(len(source.classes))}
    return [Path(shutil.copy(path, to / path.name)) for path in sorted(paths)]


def _all(source: PhotoPatches) -> np.ndarray:
    return np.stack([source.read(index) for index in range(len(source))])


def test_is_an_image_source_of_patches(splits):
    for source in splits.values():
        assert isinstance(source, ImageSource)
        image = source.read(len(source) - 1)
        assert image.shape == (PATCH, PATCH, 3) and image.dtype == np.uint8


@pytest.mark.parametrize(("split", "count"), [("train", 240), ("val", 48)])
def test_classes_are_balanced_in_any_prefix(splits, split, count):
    source = splits[split]
    labels = [source.label(index) for index in range(len(source))]
    assert Counter(labels) == dict.fromkeys(range(len(source.classes)), count)
    assert sorted(labels[: len(source.classes)]) == list(range(len(source.classes)))


@pytest.mark.parametrize(("painted", "watched"), [("train", "val"), ("val", "train")])
def test_no_pixel_of_one_split_reaches_the_other(splits, tmp_path, painted, watched):
    # Invert everything the other split can't own, gap included: not one byte may move.
    paths = _copy_photos(splits["train"], tmp_path / "photos")
    for path in paths:
        with Image.open(path) as file:
            pixels = np.array(file.convert("RGB"))
        left, top, right, bottom = builtin.split_box(pixels.shape[1], pixels.shape[0], watched)
        kept = pixels[top:bottom, left:right].copy()
        pixels = 255 - pixels
        pixels[top:bottom, left:right] = kept
        Image.fromarray(pixels).save(path, format="PNG")  # lossless under any file name
    folder = tmp_path / "photos"
    assert np.array_equal(_all(PhotoPatches(watched, folder)), _all(splits[watched]))
    changed = _all(PhotoPatches(painted, folder)) != _all(splits[painted])
    assert changed.any(axis=(1, 2, 3)).all()


def test_regions_leave_a_gap():
    for width, height in [(512, 512), (384, 303), (550, 660), (1411, 1411)]:
        marks = np.zeros((height, width), dtype=int)
        for split in SPLITS:
            left, top, right, bottom = builtin.split_box(width, height, split)
            marks[top:bottom, left:right] += 1
        assert marks.max() == 1
        lanes = marks.min(axis=0 if width >= height else 1)
        assert (lanes == 0).sum() >= 16 and 0.25 < (lanes[::-1].argmin() / len(lanes)) < 0.30


def test_patches_are_distinct_places_that_cover_the_region(splits):
    for source in splits.values():
        places = [source.where(index) for index in range(len(source))]
        assert len(set(places)) == len(places)
    positions = np.array([splits["train"]._place(index) for index in range(0, 160 * 15, 15)])
    height, width = splits["train"]._levels(0)[0].shape[:2]
    for column, room in ((2, height - PATCH), (3, width - PATCH)):
        steps = np.diff(np.sort(positions[:, column]), prepend=0, append=room)
        assert steps.max() <= PATCH // 2


def test_same_patches_in_another_instance_and_order(splits):
    other = PhotoPatches("val")
    for index in reversed(range(0, len(other), 7)):
        assert np.array_equal(other.read(index), splits["val"].read(index))


def test_a_read_is_a_copy(splits):
    before = splits["val"].read(3)
    splits["val"].read(3)[:] = 0
    assert np.array_equal(before, splits["val"].read(3))


def test_pickle_leaves_the_pixels_behind(splits):
    source = splits["val"]
    expected = source.read(5)
    data = pickle.dumps(source)
    assert len(data) < 4096
    assert source._regions  # pickling does not empty the original
    assert np.array_equal(pickle.loads(data).read(5), expected)


def test_fingerprint_follows_bytes_and_layout(splits, tmp_path, monkeypatch):
    print_ = splits["train"].fingerprint()
    assert print_ == PhotoPatches("train").fingerprint()
    assert print_ != splits["val"].fingerprint()
    paths = _copy_photos(splits["train"], tmp_path / "photos")
    copy = PhotoPatches("train", tmp_path / "photos")
    assert copy.fingerprint() == print_  # a matter of content, not of place
    with paths[0].open("ab") as file:
        file.write(b"\0")
    assert copy.fingerprint()["sha256"] != print_["sha256"]
    monkeypatch.setattr(builtin, "_GAP_MIN", 17)
    assert PhotoPatches("train").fingerprint()["sha256"] != print_["sha256"]


def test_errors_say_what_to_do(splits, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="did you mean builtin:photos"):
        open_builtin("builtin:photo", "train")
    with pytest.raises(InputError, match="train, val"):
        open_builtin("builtin:photos", "test")
    with pytest.raises(IndexError):
        splits["val"].read(len(splits["val"]))
    folder = tmp_path / "photos"
    paths = _copy_photos(splits["train"], folder)
    paths[0].write_bytes(b"not an image")
    with pytest.raises(InputError, match=paths[0].name):
        PhotoPatches("train", folder).read(0)
    paths[1].unlink()
    with pytest.raises(InputError, match=paths[1].name):
        PhotoPatches("train", folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install scikit-image"):
        open_builtin("builtin:photos", "train")
