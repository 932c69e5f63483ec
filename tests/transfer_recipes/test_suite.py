"""``zoo transfer all``, ``zoo results --compare``, intervals, and results that keep to their task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from transfer.compare import compared, groups_of, spread, table_of
from transfer.intervals import accuracies, bootstrap_rows, intervals
from transfer.run import open_context, transfer
from transfer.suite import twin
from weights.published import assert_clear, bundle_at, describe, names_no_place
from zoo.errors import InputError

FEW = ("--set", "epochs=1")


def test_the_suite_runs_what_the_data_allow(command, small, greys, tmp_path):
    words = ("transfer", "all", "--model", small, "--data", greys, "--seeds", "0,1", *FEW)
    flags = ("--out", tmp_path / "out", "--compare", "pixels:4", "random:")
    code, out, err = command(*words, *flags, "-q")
    assert code == 0, err
    header = next(line for line in out.splitlines() if line.startswith("model"))
    for column in ("knn top1", "linear (cached) top1", "semisup (10 %, small) top1"):
        assert column in header
    assert " +- " in out and "less than an image" in out and "nothing to fine-tune" in out
    summary = json.loads((tmp_path / "out" / "suite.json").read_text())
    # kNN draws nothing: once a model; linear for both seeds; raw pixels can't be fine-tuned.
    assert len(summary["results"]) == 3 * 1 + 3 * 2 + 2 * 2 and summary["failed"] == []
    assert summary["seeds"] == [0, 1] and summary["models"][1] == "pixels:4"
    names_no_place(json.dumps(summary), tmp_path, greys)
    for group in summary["groups"]:
        assert {tuple(row["seeds"]) for row in group["rows"]} == {
            (0,) if group["recipe"] == "knn" else (0, 1)
        }
    results = [
        json.loads((tmp_path / "out" / name / "result.json").read_text()) for name in summary["results"]
    ]
    assert len({result["weights_sha256"] for result in results}) == 3
    # Fine-tuning has a copy: what came after it found the trunk as it was.
    again = transfer("knn", model=small, dataset=str(greys))
    mine = next(r for r in results if r["recipe"] == "knn" and r["weights_sha256"] == again["weights_sha256"])
    assert mine["metrics"] == again["metrics"]


def test_the_suites_results_are_listed_and_compared(command, small, greys, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_RESULTS", str(tmp_path / "r"))
    code, _, err = command(
        "transfer", "all", "--model", small, "--data", greys, "--compare", "pixels:4", *FEW, "-q"
    )
    assert code == 0, err
    assert transfer("knn", model=small, dataset=str(greys), settings={"k": 3})
    listed = json.loads(command("results", "--json")[1])["results"]
    assert [r["recipe"] for r in listed].count("knn") == 3
    groups = json.loads(command("results", "--compare", "--json")[1])["groups"]
    knn = [group for group in groups if group["recipe"] == "knn"]
    assert sorted(len(group["rows"]) for group in knn) == [1, 2]  # another k is another protocol
    out = command("results", "--compare")[1]
    assert "greys, knn, in percent" in out and "pixels:4" in out


def test_several_classes_an_image_are_judged_by_svms(command, small, tmp_path):
    import csv

    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 6)):
        (tmp_path / part).mkdir()
        with open(tmp_path / f"{part}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["path", "labels"])
            for index in range(count):
                kind = index % 3
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / f"{index}.png")
                rows.writerow([f"{part}/{index}.png", ("a", "b", "a;b")[kind]])
    flags = ("--set", "costs=[1.0]", "--set", "k=[1]", "--set", "negatives=1", "--set", "samples=1")
    code, out, err = command("transfer", "all", "--model", small, "--data", tmp_path, *flags, "--json", "-q")
    assert code == 0, err
    assert {group["recipe"] for group in json.loads(out)["groups"]} == {"svm", "lowshot"}


def test_the_same_network_with_random_weights(greys, tmp_path):
    folder = tmp_path / "b"
    bundle = bundle_at(folder, describe(stem="small"))
    context = open_context(str(bundle.path), str(greys))
    random = twin(context, seed=3)
    assert random.model == "random:resnet18+small+8@3" and random.preprocessing == context.preprocessing
    shapes = [{key: value.shape for key, value in c.trunk.state_dict().items()} for c in (context, random)]
    assert shapes[0] == shapes[1]
    assert random.weights_sha256 == twin(context, seed=3).weights_sha256 != context.weights_sha256
    assert not torch.equal(context.features("val")[0], random.features("val")[0])
    usual = open_context("random:resnet18@5", str(greys), resize=16, crop=16)
    same = twin(usual, seed=5)
    assert same.model == "random:resnet18@5" and same.weights_sha256 == usual.weights_sha256
    with pytest.raises(InputError, match="random weights isn't known"):
        twin(open_context("pixels:4", str(greys)))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--seeds", "0,x"), "--seeds"),
        (("--seeds", "1,1"), "each once"),
        (("--compare", "random:resnet19"), "resnet19"),
        (("word",), "--compare"),
    ],
)
def test_what_the_suite_refuses(command, small, greys, tmp_path, words, named):
    answer = command("transfer", "all", "--model", small, "--data", greys, "--out", tmp_path / "o", *words)
    assert_clear(answer, named)
    assert not (tmp_path / "o").exists()


def test_a_failed_part_is_said_and_the_others_are_done(command, noise, tmp_path):
    words = (
        "transfer",
        "all",
        "--model",
        "pixels:1",
        "--data",
        noise,
        "--set",
        "lr=1e6",
        "--out",
        tmp_path,
    )
    code, out, err = command(*words, "-q")
    assert code == 1 and "linear of pixels:1, seed 0" in err and "knn top1" in out
    assert json.loads((tmp_path / "suite.json").read_text())["failed"]


# --- comparing ---


def result(model, seed, top1, **more):
    return {
        "recipe": "linear",
        "dataset": "d",
        "model": model,
        "weights_sha256": model,
        "seeds": [seed],
        "protocol": {"protocol": "swav", "seed": seed},
        "data": {"split_sha256": {"train": "t", "val": "v"}},
        "metrics": {"top1": top1, "train_loss": 1.0},
        "intervals": {"top1": [top1 - 0.1, top1 + 0.1]},
        "preprocessing": {"crop": 32},
        **more,
    }


def test_only_the_same_protocol_on_the_same_split_is_compared():
    found = [
        result("m", 0, 0.5),
        result("m", 1, 0.7),
        result("n", 0, 0.9),
        result("n", 0, 0.8),  # measured again: this one counts
        result("m", 2, 0.1, details={"diverged": True}),
        result("m", 0, 0.3, data={"split_sha256": {"train": "t", "val": "other"}}),
        result("m", 0, 0.4, protocol={"protocol": "swav", "seed": 0, "epochs": 3}),
    ]
    first, *others = groups_of(found)
    assert [len(group["rows"]) for group in (first, *others)] == [2, 1, 1]
    assert [(row["model"], row["seeds"]) for row in first["rows"]] == [("n", [0]), ("m", [0, 1])]
    assert [row["top1"] for row in compared(first)] == ["80.0 (70.0 - 90.0)", "60.0 +- 14.1"]
    assert table_of([first])[0] == ["model", "linear (swav) top1"]
    assert spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "deviation": 1.0}
    assert spread([]) == {"mean": None, "deviation": None}


def test_a_folder_keeps_to_one_task(command, small, greys, tmp_path):
    words = ("--model", small, "--dataset", greys, "--out", tmp_path / "out")
    assert command("transfer", "knn", *words)[0] == 0
    before = (tmp_path / "out" / "result.json").read_bytes()
    assert_clear(command("transfer", "linear", *words, *FEW), "another task", "recipe knn", "--out")
    other = ("--model", "pixels:4", *words[2:])
    assert_clear(command("transfer", "knn", *other), "another task", "weights_sha256")
    shutil.copytree(greys, tmp_path / "other")
    assert_clear(
        command("transfer", "knn", *words[:2], "--dataset", tmp_path / "other", *words[4:]), "dataset"
    )
    assert (tmp_path / "out" / "result.json").read_bytes() == before
    assert command("transfer", "knn", *words, "--k", "3")[0] == 0  # the same task again


# --- intervals ---


def test_intervals_are_those_of_the_binomial():
    rng = np.random.default_rng(0)
    hits = {"top1": rng.random(900) < 0.7, "top5": np.ones(900, dtype=bool)}
    found = intervals(hits, seed=0)
    mean = accuracies(hits)["top1"]
    spread_ = 1.96 * (mean * (1 - mean) / 900) ** 0.5
    assert found["top1"] == pytest.approx([mean - spread_, mean + spread_], abs=0.004)
    assert found["top5"] == [1.0, 1.0]
    assert intervals(hits, seed=0) == found != intervals(hits, seed=1)
    assert intervals({}, seed=0) == {}
    rows = bootstrap_rows(1000, 0, 0)
    assert rows.min() >= 0 and rows.max() < 1000 and 600 < len(set(rows.tolist())) < 665


# --- real pictures ---


def test_small_real_pictures_through_the_command_line(command, shared, tmp_path):
    """A twentieth of the shared CIFAR pictures; shuffled labels are learnt by nobody."""
    rng = np.random.default_rng(0)
    for kind in ("true", "mixed"):
        for part, count in (("train", 20), ("val", 8)):
            source = shared / "data" / "cifar_like" / "cifar10" / part
            files = [f for c in sorted(source.iterdir()) for f in sorted(c.iterdir())[:count]]
            classes = [file.parent.name for file in files]
            if kind == "mixed":
                classes = rng.permutation(classes).tolist()
            for number, (file, name) in enumerate(zip(files, classes, strict=True)):
                place = tmp_path / kind / part / name / f"{number}{file.suffix}"
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
    for recipe, flags in (("knn", ("--k", "5")), ("linear", ("--epochs", 20, "--norm", "standard,batch"))):
        found = {}
        for kind in ("true", "mixed"):
            words = ("transfer", recipe, "--model", "pixels:8", "--data", Path(tmp_path) / kind, *flags)
            code, out, err = command(*words, "--json", "-q")
            assert code == 0, err
            found[kind] = json.loads(out)["metrics"]["top1"]
        # 80 guesses among ten: 0.1 with a deviation of 0.034.
        assert found["mixed"] < 0.21 < found["true"], (recipe, found)
