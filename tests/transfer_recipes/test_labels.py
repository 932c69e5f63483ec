"""What spoils a result is said by name before any work."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import transfer.run
from transfer.labels import check_labels, split_sha256
from transfer.run import open_context
from weights.published import assert_clear, class_folders
from zoo.data.folder import open_folder
from zoo.errors import InputError, RunError


class Numbers:
    """A source of labels alone."""

    def __init__(self, labels, name="numbers"):
        self.name, self.classes, self.labels = name, ("a", "b", "c"), labels

    def __len__(self):
        return len(self.labels)

    def label(self, index):
        return self.labels[index]

    def where(self, index):
        return f"{self.name}/{index}.png"


@pytest.fixture
def work_is_not_started(monkeypatch):
    def work(*_):
        raise AssertionError("a model was opened before the data were found bad")

    monkeypatch.setattr(transfer.run, "open_model", work)


def judged(*parts):
    return transfer.run.transfer("knn", model="random:resnet18", dataset=str(parts[0]), out=parts[1])


def test_an_empty_class_folder_is_named(tmp_path, work_is_not_started):
    class_folders(tmp_path / "d" / "train", {"a": 1, "b": 200}, 2)
    class_folders(tmp_path / "d" / "val", {"a": 1, "b": 200}, 2, seed=1)
    (tmp_path / "d" / "train" / "c").mkdir()
    (tmp_path / "d" / "train" / ".ipynb_checkpoints").mkdir()
    with pytest.raises(InputError, match="without pictures: c") as caught:
        judged(tmp_path / "d", tmp_path / "out")
    assert caught.value.where.endswith("train")
    (tmp_path / "d" / "train" / "c").rmdir()
    (tmp_path / "d" / "val" / "c").mkdir()  # a test part may lack a class
    assert open_folder(tmp_path / "d" / "val").classes == ("a", "b")


def test_a_validation_class_unknown_to_training(tmp_path, work_is_not_started):
    class_folders(tmp_path / "d" / "train", {"a": 1, "b": 200}, 2)
    class_folders(tmp_path / "d" / "val", {"a": 1, "d": 200}, 2, seed=1)
    with pytest.raises(InputError, match="know: d"):
        judged(tmp_path / "d", tmp_path / "out")


def test_a_class_index_with_a_class_that_only_the_test_has(tmp_path, work_is_not_started):
    class_folders(tmp_path / "d" / "train", {"a": 1}, 2)
    class_folders(tmp_path / "d" / "val", {"a": 1, "b": 200}, 2, seed=1)
    (tmp_path / "names.txt").write_text("a\nb\n")
    with pytest.raises(InputError, match="without a training image: b"):
        transfer.run.transfer(
            "knn",
            model="random:resnet18",
            dataset=str(tmp_path / "d"),
            class_index=str(tmp_path / "names.txt"),
            out=tmp_path / "out",
        )


def test_labels_outside_the_classes_are_counted_and_the_first_is_named():
    good = Numbers([0, 1, 2, 2])
    with pytest.raises(
        InputError, match=r"2 of 4 images .* outside 0 to 2; the first has the label 3"
    ) as caught:
        check_labels(Numbers([0, 3, 1, 7], "train"), good, good.classes)
    assert caught.value.where == "train/1.png"
    with pytest.raises(InputError, match="the first has no label"):
        check_labels(good, Numbers([0, -1], "val"), good.classes)
    check_labels(good, good, good.classes)


def test_classes_of_one_image_or_none_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING, logger="zoo"):
        logging.getLogger("zoo").propagate = True
        check_labels(Numbers([0, 0, 1]), Numbers([0, 1]), ("a", "b", "c"))
    assert "without a training image: c" in caplog.text and "a single training image: b" in caplog.text


def test_training_and_test_are_the_same(command, small, tmp_path):
    import shutil

    class_folders(tmp_path / "d" / "train", {"a": 1, "b": 200}, 2)
    shutil.copytree(tmp_path / "d" / "train", tmp_path / "d" / "val")
    assert_clear(command("transfer", "linear", "--model", small, "--dataset", tmp_path / "d"), "are the same")


def test_a_model_without_a_preprocessing(monkeypatch, greys):
    class Bare(torch.nn.Linear):
        zoo_info = {"arch": "mine"}  # noqa: RUF012

    monkeypatch.setattr(transfer.run, "load", lambda *_, **__: Bare(2, 2))
    with pytest.raises(InputError, match="isn't known how images are prepared") as caught:
        open_context("me/bare", str(greys))
    assert caught.value.where == "me/bare"


@pytest.mark.parametrize("recipe", ["knn", "linear"])
def test_features_that_are_no_numbers(small, greys, tmp_path, recipe):
    context = open_context(small, str(greys))
    with torch.no_grad():
        context.trunk.bn1.weight[0] = float("nan")
    with pytest.raises(RunError, match="no finite numbers"):
        transfer.run.judge(recipe, context, transfer.run.RECIPES.config(recipe)(), tmp_path / "out")
    assert not (tmp_path / "out" / "result.json").exists()


def test_a_split_is_known_by_its_images_and_labels_not_by_its_place(tmp_path):
    for name in ("one", "two"):
        class_folders(tmp_path / name, {"a": 1, "b": 200}, 2)
    one, two = (open_folder(tmp_path / name) for name in ("one", "two"))
    assert split_sha256(one) == split_sha256(two)
    other = Numbers([0, 1, 2])
    assert split_sha256(other) != split_sha256(Numbers([0, 1, 1]))
    (tmp_path / "two" / "a" / "000.png").rename(tmp_path / "two" / "a" / "009.png")
    assert split_sha256(open_folder(tmp_path / "two")) != split_sha256(one)


def test_leave_one_out_needs_no_test_part(command, small, tmp_path):
    import json

    folder = class_folders(tmp_path / "alone", {"a": 40, "b": 200}, 4)
    words = ("transfer", "knn", "--model", small, "--dataset", folder, "--k", "1,20", "--json", "-q")
    code, out, err = command(*words, "--leave-one-out")
    assert code == 0, err
    result = json.loads(out)
    assert result["metrics"]["top1_k1"] == 1.0 and result["details"]["neighbours"] == 7
    assert result["protocol"]["leave_one_out"] is True and result["data"]["train"]["count"] == 8
    assert_clear(command(*words), "no training and test part")
    assert np.isclose(result["metrics"]["top5"], 1.0)
