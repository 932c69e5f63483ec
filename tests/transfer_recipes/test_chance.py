"""Where there is nothing to learn nothing is learnt, and a frozen trunk that changes is found out."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from tiny import image_folder, save_image
from transfer import RECIPES
from transfer.multilabel import open_multilabel
from transfer.run import judge, open_context, transfer
from transfer.svm.protocol import train_classes
from weights.published import class_folders
from zoo.errors import RunError
from zoo.probe.average_precision import area_average_precision
from zoo.probe.svm import unit_length


def test_shuffled_labels_of_voc_are_learnt_by_nobody(shared):
    """The true pixels with other images' labels: the mean average precision of random scores."""
    data = open_multilabel(str(shared / "data" / "voc_like"))
    features = []
    for part in (data.train, data.val):
        small = [part.read(index)[::24, ::24][:10, :10].reshape(-1) for index in range(len(part))]
        rows = np.zeros((len(part), 300), dtype=np.float32)
        for row, pixels in zip(rows, small, strict=True):
            row[: len(pixels)] = pixels / 255
        features.append(unit_length(torch.from_numpy(rows)))
    generator = torch.Generator().manual_seed(0)
    labels = torch.from_numpy(data.train.labels.T.copy())[
        :, torch.randperm(len(data.train), generator=generator)
    ]
    asked = torch.from_numpy(data.val.labels.T.copy())
    trained = train_classes(features[0], labels == 1, (0.1, 1.0))
    got = float(area_average_precision(trained.scores(features[1]), asked == 1, asked != 0).mean())
    draws = torch.randn(100, *asked.shape, generator=generator)
    chance = area_average_precision(draws, asked == 1, asked != 0).mean(1)
    assert abs(got - float(chance.mean())) < 4 * float(chance.std())
    assert float(chance.std()) < 0.03  # so that this says something


@pytest.mark.parametrize("recipe", ["semisup", "finetune"])
def test_fine_tuning_on_pictures_without_a_rule_is_chance(small, tmp_path, recipe):
    image_folder(tmp_path / "train", 96, 4, 16)
    for index in range(96):  # other pictures: none is in both parts
        save_image(tmp_path / "val" / f"class{index % 4}" / f"{index:03d}.png", 1000 + index, 16)
    settings = {"epochs": 3, "drop_at": [], "lr_head": 0.02}
    settings |= {"fraction": 0.5} if recipe == "semisup" else {}
    result = transfer(recipe, model=small, dataset=str(tmp_path), settings=settings)
    # 96 guesses among four: 0.25 with a deviation of 0.044.
    assert 0.10 < result["metrics"]["top1"] < 0.40
    assert result["details"]["diverged"] is False


@pytest.mark.parametrize("recipe", ["svm", "lowshot"])
def test_the_svms_leave_the_trunk_as_it_was(small, shared, recipe):
    voc = str(shared / "data" / "voc_like")
    few = {"costs": [1.0]} | ({"k": [1], "samples": 1} if recipe == "lowshot" else {})
    result = transfer(recipe, model=small, dataset=voc, settings=few)
    trunk = result["details"]["trunk_sha256"]
    assert trunk["before"] == trunk["after"] == result["weights_sha256"]


def test_a_trunk_that_changes_itself_is_found_out(small, greys, tmp_path):
    """Eval mode doesn't keep everybody still."""
    context = open_context(small, str(greys))

    def drift(trunk, *_):
        trunk.bn1.running_mean.add_(1e-4)

    context.trunk.register_forward_hook(drift)
    with pytest.raises(RunError, match="frozen trunk is not what it was"):
        judge("knn", context, RECIPES.config("knn")(k=[1]), tmp_path / "out")
    assert not (tmp_path / "out" / "result.json").exists()


def test_the_suite_over_three_seeds_on_real_pictures(command, small, shared, tmp_path):
    """kNN, linear, and semi-supervised with 10 % and 1 % of the labels."""
    source = shared / "data" / "cifar_like" / "cifar10"
    for part, count in (("train", 100), ("val", 12)):
        for folder in sorted((source / part).iterdir())[:3]:
            (tmp_path / "d" / part / folder.name).mkdir(parents=True)
            for file in sorted(folder.iterdir())[:count]:
                shutil.copy(file, tmp_path / "d" / part / folder.name)
    words = ("transfer", "all", "--model", small, "--data", tmp_path / "d", "--seeds", "0,1,2")
    code, out, err = command(*words, "--set", "epochs=1", "--out", tmp_path / "out", "--json", "-q")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["skipped"] == answer["failed"] == []
    groups = {group["protocol"]: group["rows"] for group in answer["groups"]}
    assert set(groups) == {"knn", "linear (cached)", "semisup (10 %, small)", "semisup (1 %, small)"}
    for protocol, (row,) in groups.items():
        top1 = row["metrics"]["top1"]
        assert 0.1 < top1["mean"] < 0.9
        if protocol == "knn":  # it draws nothing
            assert row["seeds"] == [0] and top1["deviation"] is None
        else:
            assert row["seeds"] == [0, 1, 2] and top1["deviation"] >= 0
    results = [json.loads((tmp_path / "out" / n / "result.json").read_text()) for n in answer["results"]]
    labelled = {
        r["protocol"]["fraction"]: r["details"]["labelled_images"]
        for r in results
        if r["recipe"] == "semisup"
    }
    assert labelled == {0.1: 30, 0.01: 3}


def test_shards_are_judged_like_the_folders_that_they_were_made_of(command, small, tmp_path):
    folder = tmp_path / "d"
    class_folders(folder / "train", {"a": 40, "b": 120, "c": 210}, 6)
    class_folders(folder / "val", {"a": 40, "c": 210}, 3, seed=1)
    for part in ("train", "val"):
        code, _, err = command("data", "shard", folder / part, "-o", tmp_path / "s" / part)
        assert code == 0, err
    answers = []
    for place in (folder, tmp_path / "s"):
        code, out, err = command(
            "transfer", "knn", "--model", small, "--data", place, "--k", 3, "--json", "-q"
        )
        assert code == 0, err
        answers.append(json.loads(out))
    plain, packed = answers
    assert packed["metrics"] == plain["metrics"] and packed["data"]["class_names"] == ["a", "b", "c"]
    assert packed["data"]["train"]["kind"] == "shards"
    assert (plain["data"]["overlap"], packed["data"]["overlap"]) == ("none", "not compared")
