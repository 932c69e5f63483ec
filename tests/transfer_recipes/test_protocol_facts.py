"""Every single-label protocol through the command line for two steps, held against the shared list of facts.

What the facts say is read from their file; what was done is read from the result: rates of the epochs that ran,
the optimizer, its groups, the views.
"""

from __future__ import annotations

import json
import math
import re

import pytest

from weights.published import describe

from .layouts import imagenet as imagenet_layout
from .layouts import inat18, places205


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Three images of each of three classes to train on, in the layouts of the papers' data sets."""
    folder = tmp_path_factory.mktemp("data")
    return {
        "imagenet": imagenet_layout(folder / "imagenet", "devkit", val=1, side=40),
        "places205": places205(folder / "places", val=1, side=40),
        "inat18": inat18(folder / "inat", val=1, side=40),
    }


def numbers(text, pattern):
    found = re.search(pattern, text)
    assert found, f"the facts no longer say {pattern}"
    return [float(value) for value in found.groups()]


def imagenet(facts, column):
    """Rate and decay of the table's SwAV (0) or MoCo (1) column."""
    swav_lr, swav_wd, moco_lr, moco_wd = numbers(
        facts, r"learning rate / weight decay \| ([\d.e-]+) / ([\d.e-]+) \| ([\d.e-]+) / ([\d.e-]+) \|"
    )
    return ((swav_lr, swav_wd), (moco_lr, moco_wd))[column]


def two_steps(command, tmp_path, protocol, recipe, model, few, *words):
    """The result; rates made for a million images are too high for nine, and that has to be said."""
    name = protocol if protocol in few else "imagenet"
    where = ("--model", model, "--dataset", name, "--data", few[name])
    flags = (*where, "--limit", 2, "--out", tmp_path / "out", "-q", *words)
    code, _, err = command("transfer", recipe, "--protocol", protocol, *flags)
    assert "Traceback" not in err and (code == 0 or (code == 1 and "diverged" in err)), err
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["details"]["diverged"] is (code == 1)
    assert result["dataset"] == name and result["details"]["flatters"].startswith("a part of")
    return result


def check_views(result, facts):
    size, resize, crop = numbers(facts, r"RandomResizedCrop (\d+) \+ flip; test (\d+) / (\d+) centre crop")
    train, test = result["details"]["train_view"], result["details"]["test_view"]
    assert (train["crop"], train["flip_p"], train["scale"]) == (size, 0.5, [0.08, 1.0])
    assert (train["jitter_p"], train["gray_p"], train["blur_p"]) == (0, 0, 0)
    assert (test["resize"], test["crop"]) == (resize, crop)
    assert test["std"] == describe().preprocessing["std"]  # the weights' own


@pytest.mark.parametrize("protocol", ["swav", "moco", "places205", "inat18"])
def test_linear(command, tmp_path, facts, standard, few, protocol):
    result = two_steps(command, tmp_path, protocol, "linear", standard, few)
    how, done = result["protocol"], result["details"]
    assert how["protocol"] == protocol and how["batch_size"] == 256 and "batch 256" in facts
    if protocol in ("swav", "moco"):
        lr, decay = imagenet(facts, protocol == "moco")
        epochs = numbers(facts, r"schedule, (\d+) epochs, batch 256")[0]
        drops = numbers(facts, r"x0\.1 at (\d+), (\d+) \|") if protocol == "moco" else []
    else:
        lr, decay = numbers(
            facts, r"Places205 / iNat18 \(A\.5\): lr ([\d.]+), .*?, wd ([\d.e-]+), momentum 0\.9"
        )
        every = numbers(facts, r"\((\d+),(\d+),(\d+) and (\d+),(\d+),(\d+)\)")
        drops = every[:3] if protocol == "places205" else every[3:]
        epochs = numbers(facts, r"batch 256, (\d+) / (\d+) epochs")[protocol == "inat18"]
    assert how["epochs"] == epochs and how["drop_at"] == drops
    assert (done["chosen"]["lr"], done["chosen"]["weight_decay"], done["chosen"]["norm"]) == (
        lr,
        decay,
        "none",
    )
    second = 0.5 * (1 + math.cos(math.pi / epochs)) if protocol == "swav" else 1.0
    assert done["rates"] == pytest.approx(
        [lr, lr * second]
    )  # nine images are one batch: two steps, two epochs
    assert done["optimizer"] == {
        "kind": "SGD",
        "momentum": 0.9,
        "schedule": "cosine" if protocol == "swav" else "steps",
    }
    assert drops == [] or how["drop"] == 0.1
    trunk = done["trunk_sha256"]
    assert trunk["before"] == trunk["after"] == result["weights_sha256"]
    check_views(result, facts)


@pytest.mark.parametrize("share", [1, 10])
def test_semisup(command, tmp_path, facts, standard, few, share):
    result = two_steps(command, tmp_path, "swav", "semisup", standard, few, "--fraction", share / 100)
    how, done = result["protocol"], result["details"]
    lrs = numbers(facts, rf"{share} %: ([\d.]+) / ([\d.]*\d)")
    epochs, drop, *drops = numbers(facts, r"batch 256, (\d+) epochs, x([\d.]+) at (\d+) and (\d+), wd 0")
    assert [how["lr"], how["lr_head"]] == lrs and how["batch_size"] == 256
    assert (how["epochs"], how["drop"], how["drop_at"]) == (epochs, drop, drops)
    assert how["weight_decay"] == 0 and done["optimizer"]["momentum"] == 0.9
    assert done["rates"] == [lrs, lrs] and done["labelled_images"] == 3
    trunk, head = done["optimizer"]["groups"]
    assert head == 2 and trunk == 60  # a ResNet-18 has 62 tensors with its classifier
    check_views(result, facts)


def test_finetune(command, tmp_path, facts, standard, few):
    result = two_steps(command, tmp_path, "swav", "finetune", standard, few)
    assert [result["protocol"]["lr"], result["protocol"]["lr_head"]] == numbers(
        facts, r"10 %: ([\d.]+) / ([\d.]*\d)"
    )
    assert result["details"]["labelled_images"] == 9 and result["protocol"]["batch_size"] == 256
    check_views(result, facts)


@pytest.mark.parametrize(
    ("recipe", "words"), [("linear", ()), ("semisup", ()), ("finetune", ()), ("knn", ())]
)
def test_the_small_protocols_run_by_default(command, small, greys, recipe, words):
    limit = () if recipe == "knn" else ("--limit", 2)
    flags = ("--model", small, "--dataset", greys, *limit, "--json", "-q", *words)
    code, out, err = command("transfer", recipe, *flags)
    assert code == 0, err
    result = json.loads(out)
    assert result["protocol"].get("protocol") in (None, "cached", "small")
    assert 0 <= result["metrics"]["top5"] <= 1 and set(result["intervals"]) >= {"top1", "top5"}
