"""The SVM and low-shot recipes: the protocol, real images, chance, and what is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.model_selection import StratifiedKFold

from tiny import pixels
from transfer import RECIPES
from transfer.lowshot.config import LowshotConfig
from transfer.lowshot.run import draw
from transfer.multilabel import open_multilabel
from transfer.results import results_of
from transfer.run import open_context, transfer
from transfer.svm.config import SvmConfig
from transfer.svm.features import svm_features
from transfer.svm.protocol import stratified_folds, train_classes
from transfer.voc import VOC_CLASSES
from weights.published import assert_clear
from zoo.errors import InputError
from zoo.probe.average_precision import area_average_precision
from zoo.probe.svm import unit_length

FEW = {"costs": [0.1, 1.0]}


@pytest.fixture(scope="module")
def voc(shared):
    return shared / "data" / "voc_like"


@pytest.fixture(scope="module")
def spots(tmp_path_factory):
    """A VOC folder in its true layout: a red and a blue spot, each in some of the images."""
    root = tmp_path_factory.mktemp("data") / "VOCdevkit" / "VOC2007"
    main = root / "ImageSets" / "Main"
    main.mkdir(parents=True)
    (root / "JPEGImages").mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("trainval", 40), ("test", 30)):
        there = rng.random((count, 2)) < 0.4
        for index in range(count):
            picture = pixels(int(rng.integers(10**6)), 48) // 4 + 80
            picture[8:20, 8:20] = (255, 0, 0) if there[index, 0] else picture[8:20, 8:20]
            picture[28:40, 28:40] = (0, 0, 255) if there[index, 1] else picture[28:40, 28:40]
            Image.fromarray(picture).save(root / "JPEGImages" / f"{split}{index:03d}.jpg", quality=95)
        names = [f"{split}{index:03d}" for index in range(count)]
        (main / f"{split}.txt").write_text("\n".join(names) + "\n")
        for c, name in enumerate(("red", "blue")):
            lines = (f"{image} {1 if there[i, c] else -1}\n" for i, image in enumerate(names))
            (main / f"{name}_{split}.txt").write_text("".join(lines))
    return root.parent


# --- the protocol ---


@pytest.mark.parametrize(("count", "share", "folds"), [(50, 0.2, 3), (31, 0.5, 4), (9, 0.4, 3)])
def test_the_folds_are_scikit_learns(count, share, folds):
    for seed in range(5):
        positive = np.random.default_rng(seed).random(count) < share
        if min(positive.sum(), (~positive).sum()) < folds:
            continue
        got = stratified_folds(torch.from_numpy(positive), folds)
        for fold, (_, held) in enumerate(StratifiedKFold(folds).split(positive, positive)):
            assert torch.equal((got == fold).nonzero()[:, 0], torch.from_numpy(held))


def test_the_smallest_of_equally_good_costs_wins():
    features = unit_length(torch.cat([torch.eye(2).repeat(6, 1)]))
    positive = torch.tensor([[True, False] * 6, [False, True] * 6])
    trained = train_classes(features, positive, (10.0, 0.1, 1.0))
    assert trained.crossval.tolist() == [[1.0] * 3] * 2  # in rising order
    assert trained.costs.tolist() == [0.1, 0.1] and trained.gap < 1e-6


def test_blocks_of_classes_change_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    features = unit_length(torch.randn(60, 8, generator=generator))
    positive = torch.rand(5, 60, generator=generator) < 0.4
    whole = train_classes(features, positive, (0.1, 10.0))
    monkeypatch.setattr("transfer.svm.protocol._BLOCK", 60 * 3 * 2 * 2)
    blocks = train_classes(features, positive, (0.1, 10.0))
    assert len(blocks.machines) == 3 and torch.equal(whole.costs, blocks.costs)
    torch.testing.assert_close(whole.scores(features), blocks.scores(features), atol=1e-3, rtol=1e-3)


def test_the_protocols_values_are_voc07s(spots):
    """facts/protocols.md, VOC07 SVM."""
    config = SvmConfig()
    assert config.costs == (0.01, 0.1, 1, 2, 5, 10, 15, 20, 50, 100, 1000) and config.folds == 3
    assert (config.positive_weight, config.negative_weight, config.features) == (2, 1, "pooled")
    assert config.image_sets == ("trainval", "test")
    how = open_context("random:resnet18@0", str(spots), image_sets=config.image_sets).preprocessing
    assert (how["resize"], how["crop"]) == (256, 224)
    few = LowshotConfig()
    assert (few.k, few.samples, few.negatives) == ((1, 2, 4, 8, 16, 32, 64, 96), 5, 19)
    assert few.costs == config.costs


def test_random_features_have_the_average_precision_of_chance(voc):
    data = open_multilabel(str(voc))
    generator = torch.Generator().manual_seed(0)
    train, test = (
        unit_length(torch.randn(len(part), 64, generator=generator)) for part in (data.train, data.val)
    )
    labels, asked = (torch.from_numpy(part.labels.T.copy()) for part in (data.train, data.val))
    trained = train_classes(train, labels == 1, (0.1, 1.0, 10.0))
    got = area_average_precision(trained.scores(test), asked == 1, asked != 0).mean()
    draws = torch.randn(100, *asked.shape, generator=generator)
    chance = area_average_precision(draws, asked == 1, asked != 0).mean(1)
    assert abs(float(got - chance.mean())) < 4 * float(chance.std())
    assert float(chance.std()) < 0.03  # so that this says something


# --- the recipe on real and made images ---


def test_a_voc_folder_in_its_true_layout(spots, small):
    result = transfer("svm", model="pixels:12", dataset="spots", data=str(spots), settings={})
    assert result["metrics"]["mAP"] == 1.0 and result["metrics"]["mAP_11_points"] == 1.0
    rows = result["details"]["per_class"]
    assert [row["class"] for row in rows] == ["blue", "red"]
    for row in rows:
        assert row["average_precision"] == 1.0 and row["cost"] in SvmConfig().costs
        assert 3 <= row["train_images"] < 40 and 0 < row["test_images"] < 30
    assert result["details"]["largest_gap"] < 1e-6 and result["details"]["not_scored"] == []
    assert result["protocol"]["costs"] == list(SvmConfig().costs) and result["protocol"]["folds"] == 3
    assert result["data"]["train"]["count"] == 40 and result["data"]["val"]["split"] == "test"
    again = transfer("svm", model="pixels:12", dataset="spots", data=str(spots), settings={})
    assert again["metrics"] == result["metrics"] and again["details"]["per_class"] == rows
    learnt = transfer("svm", model=small, dataset=str(spots), settings=FEW)["metrics"]["mAP"]
    assert 0.3 < learnt <= 1


@pytest.mark.parametrize("model", ["pixels:8", "random:resnet18@0", None])
def test_real_images_on_the_command_line(command, voc, small, model):
    """Raw pixels, a random network and a published one; the tenth of VOC is no VOC 2007, and says so."""
    words = ["transfer", "svm", "--model", model or small, "--dataset", "voc07", "--data", voc]
    sizes = [] if model == "pixels:8" else ["--resize", 40, "--crop", 32]
    code, out, err = command(*words, *sizes, "--costs", "0.1,10", "--json", "--quiet")
    assert code == 0, err
    answer = json.loads(out)
    assert 0.08 < answer["metrics"]["mAP"] < 0.4
    low, high = answer["intervals"]["mAP"]
    assert low < high < low + 0.2 and low < answer["metrics"]["mAP"] + 0.05
    rows = {row["class"]: row for row in answer["details"]["per_class"]}
    assert list(rows) == list(VOC_CLASSES)
    assert (
        rows["person"]["train_images"] == 69 and sum(row["difficult_left_out"] for row in rows.values()) > 0
    )
    assert "200 of 5011" in answer["details"]["flatters"] and answer["data"]["train"]["complete"] is False
    assert answer["preprocessing"]["crop"] == (8 if model == "pixels:8" else 32)
    assert results_of(answer["weights_sha256"]) == []


def test_the_table_of_classes_is_printed(command, spots):
    code, out, _ = command("transfer", "svm", "--model", "pixels:4", "--data", spots, "--costs", "1")
    assert code == 0 and "mAP" in out and "blue" in out and "red" in out


def test_a_table_of_ones_own(command, tmp_path):
    for split, count in (("train", 12), ("test", 6)):
        rows = ["path,labels"]
        for index in range(count):
            level = 200 if index % 2 else 40
            noise = np.random.default_rng(index + count).integers(0, 30, (16, 16, 3))
            Image.fromarray((level + noise).astype(np.uint8)).save(tmp_path / f"{split}{index}.png")
            rows.append(
                f"{split}{index}.png,{'bright' if index % 2 else 'dark;any' if index % 4 else 'dark'}"
            )
        (tmp_path / f"{split}.csv").write_text("\n".join(rows) + "\n")
    code, out, err = command("transfer", "svm", "--model", "pixels:8", "--data", tmp_path, "--json")
    assert code == 0, err
    answer = json.loads(out)
    found = {row["class"]: row["average_precision"] for row in answer["details"]["per_class"]}
    assert found["bright"] == found["dark"] == 1.0 and "flatters" not in answer["details"]


def test_a_class_without_test_images_is_left_out(spots, tmp_path):
    shutil.copytree(spots / "VOC2007", tmp_path / "VOC2007")
    file = tmp_path / "VOC2007" / "ImageSets" / "Main" / "red_test.txt"
    file.write_text(file.read_text().replace(" 1\n", " -1\n"))
    result = transfer("svm", model="pixels:4", dataset=str(tmp_path), settings=FEW)
    assert result["details"]["not_scored"] == ["red"] and result["metrics"]["mAP"] == 1.0


def test_vissls_features(spots, small):
    context = open_context(small, str(spots), crop=64, resize=70, image_sets=("trainval", "test"))
    before = {name: value.clone() for name, value in context.trunk.state_dict().items()}
    features = svm_features(context, "train", "vissl")
    assert features.shape == (40, 4 * 64)  # 2 x 2 of 64 channels
    assert features.norm(dim=1).numpy() == pytest.approx(np.ones(40), abs=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in context.trunk.state_dict().items())
    pooled = svm_features(context, "train", "pooled")
    assert pooled.shape == (40, 64)
    with pytest.raises(InputError, match=r"1 x 1; VISSL's features need 2 x 2"):
        transfer("svm", model=small, dataset=str(spots), settings={**FEW, "features": "vissl"})
    with pytest.raises(InputError, match="shows none"):
        transfer("svm", model="pixels:8", dataset=str(spots), settings={**FEW, "features": "vissl"})


# --- low-shot ---


def test_what_is_drawn():
    labels = torch.tensor([1] * 10 + [0] * 5 + [-1] * 60)
    rows = {k: draw(labels, k, 3, key=7) for k in (1, 2, 8)}
    for k, chosen in rows.items():
        taken = labels[chosen]
        assert int((taken == 1).sum()) == k and int((taken == -1).sum()) == 3 * k and not (taken == 0).any()
        assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set(rows[1].tolist()) < set(rows[2].tolist()) < set(rows[8].tolist())
    assert not torch.equal(draw(labels, 2, 3, key=8), rows[2])
    assert int((labels[draw(labels, 10, 19, key=7)] == -1).sum()) == 60  # all that there are


def test_few_images(spots):
    settings = {**FEW, "k": [1, 8, 64], "samples": 3}
    result = transfer("lowshot", model="pixels:4", dataset=str(spots), settings=settings)
    details = result["details"]
    assert [row["k"] for row in details["per_k"]] == [1, 8] and details["k_left_out"] == [64]
    assert "left out" in details["cost_chosen"]
    for row in details["per_k"]:
        assert row["cost"] in FEW["costs"] and len(row["samples"]) == 3
        assert row["mAP"] == pytest.approx(np.mean(row["samples"]))
        assert row["deviation"] == pytest.approx(np.std(row["samples"], ddof=1))
        assert list(row["average_precision"]) == ["blue", "red"]
    assert result["metrics"]["mAP_k8"] > 0.9
    assert result["metrics"]["mAP_k8"] > result["metrics"]["mAP_k1"]
    again = transfer("lowshot", model="pixels:4", dataset=str(spots), settings=settings)
    assert again["metrics"] == result["metrics"]
    other = transfer("lowshot", model="pixels:4", dataset=str(spots), settings={**settings, "seed": 1})
    assert other["metrics"] != result["metrics"]


def test_the_cost_is_not_chosen_by_test_images(spots, tmp_path):
    """Whatever the test labels are, the same costs are chosen."""
    shutil.copytree(spots / "VOC2007", tmp_path / "VOC2007")
    for name in ("red", "blue"):
        file = tmp_path / "VOC2007" / "ImageSets" / "Main" / f"{name}_test.txt"
        turned = [line.split() for line in file.read_text().splitlines()]
        file.write_text("".join(f"{image} {-int(label)}\n" for image, label in turned))
    settings = {"k": [2, 4], "samples": 2}
    chosen = []
    for data in (spots, tmp_path):
        result = transfer("lowshot", model="pixels:6", dataset=str(data), settings=settings)
        chosen.append([row["cost"] for row in result["details"]["per_k"]])
    assert chosen[0] == chosen[1]


def test_few_real_images(command, voc):
    words = (
        "transfer",
        "lowshot",
        "--model",
        "pixels:8",
        "--data",
        voc,
        "--samples",
        "2",
        "--json",
        "--quiet",
    )
    code, out, err = command(*words, "--k", "1,4,64", "--costs", "1")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["details"]["k_left_out"] == [64] and 0.05 < answer["metrics"]["mAP_k4"] < 0.5
    assert answer["metrics"]["mAP_k4_deviation"] >= 0


# --- what is refused, before the long work ---


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--costs", "0"), "svm: costs"),
        (("--costs", "x"), "svm: costs"),
        (("--folds", "1"), "svm: folds"),
        (("--features", "resnet"), "svm: features"),
        (("--train-split", "nope"), "nope.txt"),
        (("--train-split", "red_trainval"), "two columns"),
        (("--folds", "25"), "for 25 folds: blue is in"),
    ],
)
def test_bad_settings(command, spots, monkeypatch, words, named):
    monkeypatch.setattr("transfer.run.source_features", None)
    assert_clear(command("transfer", "svm", "--model", "pixels:4", "--data", spots, *words), named)


@pytest.mark.parametrize(
    "words", [("--k", "0,1"), ("--costs", "1,-1"), ("--samples", "0"), ("--negatives", "0")]
)
def test_bad_low_shot_settings(command, spots, words):
    answer = command("transfer", "lowshot", "--model", "pixels:4", "--data", spots, *words)
    assert_clear(answer, f"lowshot: {words[0][2:]}")


def test_the_wrong_kind_of_set(command, greys, spots, tmp_path):
    (tmp_path / "names.txt").write_text("red\nblue\n")
    for recipe in ("svm", "lowshot"):
        answer = command("transfer", recipe, "--model", "pixels:4", "--data", greys)
        assert_clear(answer, "one class each", "knn or linear")
    for recipe in ("knn", "linear", "semisup"):
        assert_clear(
            command("transfer", recipe, "--model", "pixels:4", "--data", spots), "several classes", "svm"
        )
    index = ("--class-index", tmp_path / "names.txt")
    assert_clear(command("transfer", "svm", "--model", "pixels:4", "--data", spots, *index), "--class-index")


def test_no_positives_for_a_fold_or_a_shot(command, spots, tmp_path):
    shutil.copytree(spots / "VOC2007", tmp_path / "VOC2007")
    file = tmp_path / "VOC2007" / "ImageSets" / "Main" / "red_trainval.txt"
    lines = file.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.endswith(" 1"))
    kept = [line if i <= first else line.split()[0] + " -1" for i, line in enumerate(lines)]
    file.write_text("\n".join(kept) + "\n")
    answer = command("transfer", "svm", "--model", "pixels:4", "--data", tmp_path)
    assert_clear(answer, "red is in 1 of 40", "--folds")
    answer = command("transfer", "lowshot", "--model", "pixels:4", "--data", tmp_path, "--k", "2")
    assert_clear(answer, "Class red has 1 training images", "--k")


def test_features_that_are_no_numbers(spots, small, monkeypatch):
    context = open_context(small, str(spots), image_sets=("trainval", "test"))
    next(context.trunk.parameters()).data[:] = torch.nan
    with pytest.raises(Exception, match="no finite numbers"):
        RECIPES.code("svm")(context, SvmConfig())
