"""Labelled data: classes agree by name, and what is tested wasn't trained on."""

from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest
from PIL import Image

from tiny import image_folder
from transfer.datasets import SubsetImages, open_labelled
from transfer.semisup.run import balanced_share
from weights.published import class_folders
from zoo.data.folder import open_folder
from zoo.errors import InputError


def test_a_test_part_without_a_class_keeps_the_training_numbers(tmp_path):  # case 10
    class_folders(tmp_path / "train", {"a": 1, "b": 2, "c": 3}, 2)
    class_folders(tmp_path / "val", {"a": 1, "c": 3}, 2, seed=1)
    data = open_labelled(str(tmp_path))
    assert data.classes == ("a", "b", "c")
    assert [data.val.label(index) for index in range(4)] == [0, 0, 2, 2]
    assert "/c/" in data.val.where(2) and data.val.read(2).shape == (32, 32, 3)
    assert len(data.val) == 4 and data.val.fingerprint()["count"] == 4


def test_a_class_that_training_does_not_know_is_named(tmp_path):  # case 10
    class_folders(tmp_path / "train", {"a": 1, "b": 2, "c": 3}, 2)
    class_folders(tmp_path / "val", {"a": 1, "d": 3, "e": 4}, 2, seed=1)
    with pytest.raises(InputError, match=r"2 classes that training .* doesn't know: d, e") as caught:
        open_labelled(str(tmp_path))
    assert "a, b, c" in caught.value.fix


@pytest.mark.parametrize("part", ["val", "test", "validation"])
def test_the_test_part_has_several_names(tmp_path, part):
    class_folders(tmp_path / "train", {"a": 1, "b": 2}, 2)
    class_folders(tmp_path / part, {"a": 1, "b": 2}, 2, seed=1)
    assert len(open_labelled("anything", str(tmp_path)).val) == 4


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(InputError, match="no training and test part") as caught:
        open_labelled(str(tmp_path))
    assert "train/<class>" in caught.value.fix
    with pytest.raises(InputError, match="no such folder"):
        open_labelled("d", str(tmp_path / "no"))
    with pytest.raises(InputError, match="neither a folder"):
        open_labelled("cifra10")
    image_folder(tmp_path / "train", 4, 0)
    image_folder(tmp_path / "val", 4, 2, 24)
    with pytest.raises(InputError, match="training images carry no labels"):
        open_labelled(str(tmp_path))


def test_training_on_the_test_images_is_refused(tmp_path):
    class_folders(tmp_path / "train", {"a": 1, "b": 2}, 2)
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    for allow in (False, True):
        with pytest.raises(InputError, match="are the same"):
            open_labelled(str(tmp_path), allow_overlap=allow)


def test_files_of_the_same_names_and_sizes_are_not_the_same_images(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
                tmp_path / part / name / "0.bmp"
            )
    assert len(open_labelled(str(tmp_path)).val) == 2


def test_a_test_image_that_is_a_training_image_is_named(tmp_path):
    class_folders(tmp_path / "train", {"a": 1, "b": 2}, 3)
    class_folders(tmp_path / "val", {"a": 1, "b": 2}, 3, seed=1)
    shutil.copy(tmp_path / "train" / "b" / "001.png", tmp_path / "val" / "a" / "renamed.png")
    with pytest.raises(InputError, match=r"train/b/001\.png") as caught:
        open_labelled(str(tmp_path))
    assert caught.value.where.endswith("val/a/renamed.png")
    assert "--allow-overlap" in caught.value.fix
    assert len(open_labelled(str(tmp_path), allow_overlap=True).val) == 7


def test_a_tenth_is_the_same_number_of_every_class(tmp_path):  # case 58
    source = open_folder(image_folder(tmp_path, 200, 2, 4))
    chosen = balanced_share(source, 0.1, seed=0)
    labels = [source.label(index) for index in chosen]
    assert (labels.count(0), labels.count(1)) == (10, 10)
    assert chosen == sorted(set(chosen)) == balanced_share(source, 0.1, seed=0)
    assert chosen != balanced_share(source, 0.1, seed=1)
    assert len(balanced_share(source, 0.001, seed=0)) == 2
    assert balanced_share(source, 1.0, seed=0) == list(range(200))


def test_a_subset_has_a_fingerprint_of_its_own(tmp_path):
    source = open_folder(image_folder(tmp_path, 6, 2))
    first, second = SubsetImages(source, [0, 2]), SubsetImages(source, [0, 3])
    assert first.fingerprint() != second.fingerprint()
    assert hashlib.sha256(first.read(1)).digest() == hashlib.sha256(source.read(2)).digest()
