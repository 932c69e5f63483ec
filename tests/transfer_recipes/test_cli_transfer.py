"""``zoo transfer RECIPE`` and ``zoo results``."""

from __future__ import annotations

import json

import pytest

from weights.published import assert_clear, class_folders, describe, publish


def test_json_and_table(command, small, greys, tmp_path):
    words = ("transfer", "knn", "--model", small, "--dataset", "greys", "--data", greys)
    code, out, err = command(*words, "--k", "1,5", "--json", "--quiet")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["schema"] == 1 and answer["protocol"]["k"] == [1, 5] and answer["dataset"] == "greys"
    code, out, _ = command(*words, "--temperature", "0.1", "--seed", "3", "--out", tmp_path / "mine")
    assert code == 0 and "top1" in out and str(tmp_path / "mine" / "result.json") in out
    written = json.loads((tmp_path / "mine" / "result.json").read_text())
    assert written["protocol"]["temperature"] == [0.1] and written["seeds"] == [3]
    assert written["protocol"]["k"] == [20]


def test_a_folder_alone_is_the_data_set(command, small, greys):
    answer = json.loads(command("transfer", "knn", "--model", small, "--data", greys, "--json")[1])
    assert answer["dataset"] == "greys" and answer["data"]["class_names"] == ["a", "b", "c"]


def test_results_are_listed(command, small, greys, tmp_path):
    code, out, _ = command("results")
    assert code == 0 and "no results" in out
    assert command("transfer", "knn", "--model", small, "--dataset", greys)[0] == 0
    flags = ("--epochs", "3", "--lr", "0.1")
    assert command("transfer", "linear", "--model", small, "--dataset", greys, *flags)[0] == 0
    code, out, _ = command("results")
    assert code == 0 and "knn" in out and "linear" in out and "greys" in out
    answer = json.loads(command("results", "--json")[1])
    assert answer["schema"] == 1 and len(answer["results"]) == 2
    assert json.loads(command("results", tmp_path / "results", "--json")[1]) == answer


def test_without_arguments_the_newest_model_meets_the_builtin_pictures(command, monkeypatch):
    monkeypatch.setattr("zoo.data.builtin._COUNTS", {"train": (4, 2), "val": (2, 1)})
    assert_clear(command("transfer", "knn"), "zoo publish")
    publish("me/old")
    done = publish("me/new", seed=1, what=describe(lineage={"run": "n", "step": 1, "total_steps": 1}))
    code, out, _ = command("transfer", "knn", "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["model"] == "local:me/new" and answer["dataset"] == "builtin:photos"
    assert answer["data"]["train"]["count"] == 15 * 6 and answer["data"]["val"]["count"] == 15 * 3
    assert done.new


def test_a_diverged_training_is_a_failure_with_a_result(command, noise, tmp_path):
    words = ("transfer", "linear", "--model", "pixels:1", "--dataset", noise, "--lr", "1e6", "--epochs", "3")
    answer = command(*words, "--out", tmp_path / "out")
    assert_clear(answer, "diverged", "lower the lr", tmp_path / "out" / "result.json", code=1)
    listed = command("results", tmp_path)[1]
    assert "linear" in listed and "diverged" in listed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--model", "me/none"), "me/none"),
        (("--model", "pixels:x"), "pixels:x"),
        (("--data", "/no/such/folder"), "/no/such/folder"),
        (("--dataset", "cifra10"), "did you mean cifar10"),
        (("--k", "0.5"), "knn: k"),
        (("--temperature", "-1"), "knn: temperature"),
        (("--crop", "50", "--resize", "40"), "--crop"),
    ],
)
def test_bad_input_is_an_error_of_one_message(command, small, greys, words, named):
    given = {"--model": small, "--dataset": str(greys)}
    given.update(dict(zip(words[::2], words[1::2], strict=True)))
    assert_clear(command("transfer", "knn", *(word for pair in given.items() for word in pair)), named)


@pytest.mark.parametrize("words", [("transfer", "lienar"), ("transfer", "knn", "--temprature", "1")])
def test_a_word_that_does_not_exist(command, words):
    code, out, err = command(*words)
    assert code == 2 and out == "" and "Traceback" not in err


def test_an_unknown_class_is_named(command, small, tmp_path):
    class_folders(tmp_path / "d" / "train", {"a": 1, "b": 2}, 2)
    class_folders(tmp_path / "d" / "val", {"a": 1, "d": 2}, 2, seed=1)
    answer = command("transfer", "knn", "--model", small, "--dataset", tmp_path / "d")
    assert_clear(answer, "know: d", "a, b")


def test_help_shows_the_settings_of_each_recipe(command):
    code, out, _ = command("transfer", "--help")
    assert code == 0
    for recipe in ("knn", "linear", "semisup", "detect"):
        assert recipe in out
    out = command("transfer", "semisup", "--help")[1]
    assert "--fraction" in out and "--lr-head" in out and "--allow-overlap" in out


def test_the_help_names_what_a_recipe_takes(command):
    _, detect, _ = command("transfer", "detect", "--help")
    assert "Further values of --backbone-lr." in detect and "--class-index" not in detect
    assert "--class-index" in command("transfer", "knn", "--help")[1]


def test_the_help_says_a_default_once(command):
    """What a 0 or nothing stands for is said; the number beside it would only confuse."""
    detect = " ".join(command("transfer", "detect", "--help")[1].replace("\u2502", " ").split())
    assert "(0: the protocol's)" in detect and "none: by the data set" in detect
    assert "'s) (default" not in detect and "by the data set (default" not in detect
    assert "half of its training views (default: on)" in detect
