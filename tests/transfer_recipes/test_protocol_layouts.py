"""VOC07 and the lists of labelled images, in their true layouts through the command line, held against the facts."""

from __future__ import annotations

import json
import re

import pytest

from .layouts import WNIDS, imagenet, voc07


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    return voc07(tmp_path_factory.mktemp("data") / "voc")


def listed(facts, pattern):
    """The numbers in the braces that follow something."""
    found = re.search(pattern + r"\s*\{([^}]*)\}", facts)
    assert found, f"the facts no longer say {pattern}"
    return [float(word) for word in found.group(1).split(",")]


def judged(command, recipe, model, voc, *words):
    flags = ("--model", model, "--dataset", "voc07", "--data", voc, "--json", "-q", *words)
    code, out, err = command("transfer", recipe, *flags)
    assert code == 0, err
    result = json.loads(out)
    assert (result["preprocessing"]["resize"], result["preprocessing"]["crop"]) == (256, 224)
    trunk = result["details"]["trunk_sha256"]
    assert trunk["before"] == trunk["after"] == result["weights_sha256"]
    assert result["details"]["flatters"].startswith("a part of VOC 2007: 16 of 5011 and 8 of 4952")
    return result


def test_svm(command, facts, standard, voc):
    result = judged(command, "svm", standard, voc)
    how, rows = result["protocol"], result["details"]["per_class"]
    assert "shorter side 256, centre crop 224, global average pooled" in facts and how["features"] == "pooled"
    assert how["costs"] == listed(facts, r"C in")
    weights = re.search(r"class_weight \{1: (\d+), -1: (\d+)\}", facts)
    assert [how["positive_weight"], how["negative_weight"]] == [float(weight) for weight in weights.groups()]
    assert how["folds"] == int(
        re.search(r"by (\d+)-fold cross validation on average precision", facts).group(1)
    )
    assert (how["train_split"], how["test_split"]) == ("trainval", "test")
    assert len(rows) == 20 and "mAP over 20 classes" in facts
    assert {row["cost"] for row in rows} <= set(how["costs"])
    assert "not 11 points" in facts and result["details"]["average_precision"].startswith(
        "area under the envelope"
    )
    # Every fourth class is in the first images as difficult objects alone: negative in training, not asked in the test.
    for number, row in enumerate(rows):
        hard = number % 4 == 0
        assert (row["train_images"], row["test_images"]) == (4 - hard, 2 - hard)
        assert row["difficult_left_out"] == int(hard)
    for part in ("train", "val"):
        assert result["data"][part]["labels_from"] == "class files and annotations"


def test_lowshot(command, facts, standard, voc):
    result = judged(command, "lowshot", standard, voc, "--costs", "1")
    how, rows = result["protocol"], result["details"]["per_k"]
    assert how["k"] == listed(facts, r"Low-shot: k in")
    samples, negatives = re.search(r"(\d+) samples, k positives \+ (\d+)k negatives a class", facts).groups()
    assert (how["samples"], how["negatives"]) == (int(samples), int(negatives))
    # The rarest classes have three images.
    assert [row["k"] for row in rows] == [1, 2] and result["details"]["k_left_out"] == how["k"][2:]
    assert all(len(row["samples"]) == how["samples"] for row in rows)


@pytest.mark.parametrize("share", [1, 10])
def test_lists_of_labelled_images(command, tmp_path, facts, standard, share):
    """SimCLR's lists: a bare file name a line, its class the part before the underscore."""
    assert "`imagenet_subsets/{1,10}percent.txt`, one bare file name a line" in facts
    count = 41 if share == 1 else 3  # of each class: two listed of 41 are less than 5 %
    data = imagenet(tmp_path / "imagenet", "devkit", train=count, val=1, side=40)
    names = [f"{wnid}_{number}.JPEG" for wnid in WNIDS for number in range(2)]
    (tmp_path / f"{share}percent.txt").write_text("\n".join(names) + "\n")
    words = ("--model", standard, "--dataset", "imagenet", "--data", data, "--protocol", "swav", "--limit", 2)
    flags = ("--labels", tmp_path / f"{share}percent.txt", "--out", tmp_path / "out", "-q")
    code, _, err = command("transfer", "semisup", *words, *flags)
    assert code == 0 or (code == 1 and "diverged" in err), err
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    lrs = [float(lr) for lr in re.search(rf"{share} %: ([\d.]+) / ([\d.]*\d)", facts).groups()]
    assert result["details"]["rates"] == [lrs, lrs] and result["details"]["labelled_images"] == 6
    assert result["details"]["labelled_classes"] == 3
    assert result["protocol"]["labels"]["name"] == f"{share}percent.txt"
