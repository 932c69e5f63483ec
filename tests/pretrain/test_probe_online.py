"""The online probe: features are judged while they are trained, and nothing of the training notices."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from tiny import StopAfter, assert_same_state, go_on, half_jpeg, image_folder, lines, save_image, trace, train
from zoo.errors import InputError
from zoo.pretrain.online_probe import open_probe
from zoo.pretrain.publish import read_run
from zoo.pretrain.resolve import resolve
from zoo.probe.features import source_features
from zoo.probe.knn import knn_accuracy
from zoo.probe.linear import linear_accuracy


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Two classes, 12 images to learn from and 6 to judge by; the validation part lacks nothing."""
    folder = tmp_path_factory.mktemp("labelled")
    image_folder(folder / "train", 12)
    for number in range(6):
        save_image(folder / "val" / f"class{number % 2}" / f"v{number}.png", 100 + number)
    return folder


def test_the_linear_classifier_finds_what_is_linear():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 8, generator=generator)
    labels = (features[:, 0] > 0).long() + 2 * (features[:, 1] > 0).long()
    state = torch.get_rng_state()
    found = linear_accuracy(features[100:], labels[100:], features[:100], labels[:100])
    assert found > 0.85
    assert found == linear_accuracy(features[100:], labels[100:], features[:100], labels[:100])
    assert torch.equal(torch.get_rng_state(), state)
    nothing = labels[torch.randperm(200, generator=generator)]
    assert linear_accuracy(features[100:], nothing[100:], features[:100], nothing[:100]) < 0.45
    scaled = 1000 * features + 5
    assert linear_accuracy(scaled[100:], labels[100:], scaled[:100], labels[:100]) > 0.85
    one = torch.ones(4, 3)  # a feature that never changes, fewer images than a batch
    assert linear_accuracy(one, torch.zeros(4).long(), one, torch.zeros(4).long()) == 1


def test_the_run_is_the_same_with_it_and_the_figures_are_those_of_the_features(
    images, labelled, finished, tmp_path
):
    run = train(images, tmp_path / "run", probe__data=str(labelled))
    assert trace(run.path) == trace(finished.path)
    assert_same_state(run.path, finished.path)
    found = lines(run.path)
    judged = [line["step"] for line in found if "probe/knn" in line]
    assert judged == [2, 5] == [line["step"] for line in found if "probe/linear" in line]
    recipe = resolve(run.path / "recipe.yaml").recipe
    assert recipe.probe.data == (str(labelled),)
    probe = open_probe(recipe)
    how = {
        "mean": recipe.views.mean,
        "std": recipe.views.std,
        **{key: getattr(recipe.evaluation, key) for key in ("resize", "crop", "interpolation")},
    }
    assert run.method.trunk.training
    bank, queries = (source_features(run.method.trunk, part, how) for part in (probe.train, probe.val))
    assert found[5]["probe/knn"] == knn_accuracy(*queries, *bank)
    assert found[5]["probe/linear"] == linear_accuracy(*queries, *bank, seed=recipe.seed)


def test_it_is_taken_up_with_the_run(images, labelled, tmp_path):
    sources = [str(labelled / "train"), str(labelled / "val")]
    settings = {"probe__data": sources, "probe__every_epochs": 2, "probe__knn": False, "epochs": 3}
    whole = train(images, tmp_path / "whole", **settings)
    found = [line for line in lines(whole.path) if any(key.startswith("probe/") for key in line)]
    assert [line["step"] for line in found] == [5, 8]  # every second epoch, and the end
    assert all("probe/linear" in line and "probe/knn" not in line for line in found)
    half = train(images, tmp_path / "half", **settings, callbacks=(StopAfter(4),))
    go_on(half.path)
    again = [line.get("probe/linear") for line in lines(half.path)]
    assert again == [line.get("probe/linear") for line in lines(whole.path)]
    changed = go_on(whole.path, epochs=4, probe__data=[])  # it changes nothing of the training
    assert changed.step == 12


def test_classes_are_matched_by_name(labelled, tmp_path):
    save_image(tmp_path / "class1" / "x.png", 50)
    recipe = resolve("swav_tiny", {"probe.data": [str(labelled / "train"), str(tmp_path)]}).recipe
    assert open_probe(recipe).numbers == [1]
    assert open_probe(resolve("swav_tiny").recipe) is None
    photos = open_probe(resolve("swav_tiny", {"probe.data": "builtin:photos"}).recipe)
    assert photos.numbers == list(range(len(photos.train.classes)))
    assert len(photos.train) != len(photos.val)


def test_what_can_not_be_judged_by_is_refused_before_the_run(images, labelled, tmp_path):
    image_folder(tmp_path / "flat", 3, classes=0)
    image_folder(tmp_path / "other" / "val", 4, classes=4)
    (tmp_path / "other" / "train").symlink_to(labelled / "train")
    for data, what in (
        ([str(tmp_path / "flat"), str(labelled / "val")], "carry no labels"),
        ([str(labelled / "val"), str(labelled / "val")], "are the same"),
        (str(tmp_path / "flat"), "no training and test part"),
        (str(tmp_path / "other"), "class2"),
        ("nothing-of-this-name", "neither a folder"),
    ):
        with pytest.raises(InputError, match=what):
            train(images, tmp_path / "run", probe__data=data)
        assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="at most 2"):
        resolve("swav_tiny", {"probe.data": ["a", "b", "c"]})


def test_a_damaged_image_switches_it_off_and_the_run_goes_on(images, tmp_path, finished, caplog):
    image_folder(tmp_path / "probe" / "train", 4)
    image_folder(tmp_path / "probe" / "val", 6)
    half_jpeg(tmp_path / "probe" / "val" / "class0" / "bad.jpg")
    with caplog.at_level(logging.WARNING, logger="zoo"):
        run = train(images, tmp_path / "run", probe__data=str(tmp_path / "probe"))
    assert caplog.text.count("The online probe failed") == 1
    assert_same_state(run.path, finished.path)
    assert not any("probe/knn" in line for line in lines(run.path))


def test_its_place_on_this_machine_is_not_published(images, labelled, tmp_path):
    run = train(images, tmp_path / "run", epochs=1, probe__data=str(labelled))
    description, _, _ = read_run(run.path)
    assert description.recipe["probe"]["data"] == [labelled.name]
    assert str(labelled.parent) not in json.dumps(description.recipe)
