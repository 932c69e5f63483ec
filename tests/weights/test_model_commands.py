"""``zoo publish``, ``list``, ``show``, ``tag``, ``rm`` and ``pull``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer

from zoo.weights.hubs.local import LocalHub

from .published import assert_clear, flip, names_no_place, publish


class Terminal:
    """Standard input or error of somebody who is there."""

    def __init__(self, stream):
        self._stream = stream

    def isatty(self):
        return True

    def __getattr__(self, name):
        return getattr(self._stream, name)


def test_publish_says_what_it_did(command, run):
    code, out, err = command("publish", run, "--name", "me/tiny", "--tag", "v1")
    assert code == 0 and err == ""
    revision = LocalHub().refs("me/tiny")["v1"]
    assert out == f'published me/tiny@{revision} as v1\nload it with: zoo.load("me/tiny")\n'
    code, out, _ = command("publish", run, "--name", "me/tiny", "--tag", "v1")
    assert code == 0
    assert f"me/tiny@{revision} was published before" in out
    code, out, _ = command("publish", run, "--name", "me/tiny", "--json")
    answer = json.loads(out)
    assert answer.pop("path").endswith(revision)
    assert answer == {"schema": 1, "name": "me/tiny", "revision": revision, "new": False}


def test_the_licence_is_asked_for_on_a_terminal_only(command, run, monkeypatch):
    asked = []
    monkeypatch.setattr(typer, "prompt", lambda text, **_: asked.append(text) or "mit")
    assert command("publish", run)[0] == 0
    assert LocalHub().resolve("me/swav_tiny").info["licence"] == "unspecified"
    assert asked == []
    monkeypatch.setattr(sys, "stdin", Terminal(sys.stdin))
    monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    assert command("publish", run)[0] == 0
    assert LocalHub().resolve("me/swav_tiny").info["licence"] == "mit"
    assert len(asked) == 1
    assert command("publish", run, "--licence", "apache-2.0")[0] == 0
    assert LocalHub().resolve("me/swav_tiny").info["licence"] == "apache-2.0"
    assert len(asked) == 1


def test_publish_refuses_clearly(command, run, tmp_path):
    assert_clear(command("publish"), "no run with a checkpoint", "zoo pretrain")
    assert_clear(command("publish", tmp_path), tmp_path)
    assert_clear(command("publish", run, "--name", "../../x"), "../../x", "org/name")
    assert_clear(command("publish", run, "--name", "a/b", "--tag", "latest"), "latest")
    assert command("publish", run, "--tag", "v1")[0] == 0
    taken = command("publish", run, "--tag", "v1", "--licence", "mit")
    assert_clear(taken, "me/swav_tiny@v1", "--force")
    assert command("publish", run, "--tag", "v1", "--licence", "mit", "--force")[0] == 0


def test_results_go_into_the_card(command, run, tmp_path):
    """A result of the run itself counts: the weights are the same, by their hash."""
    from .published import class_folders

    for part, seed in (("train", 0), ("val", 1)):
        class_folders(tmp_path / "grey" / part, {"dark": 60, "light": 190}, 6, seed=seed)
    done = command("transfer", "knn", "--model", run, "--dataset", tmp_path / "grey", "--crop", 32, "--json")
    assert done[0] == 0, done[2]
    first = json.loads(command("publish", run, "--json")[1])
    second = json.loads(command("publish", run, "--with-results", "--json")[1])
    assert first["revision"] != second["revision"]
    bundle = LocalHub().resolve("me/swav_tiny")
    assert bundle.weights_sha256 == LocalHub().resolve("me/swav_tiny", first["revision"]).weights_sha256
    (result,) = bundle.info["results"]
    assert result["recipe"] == "knn" and result["weights_sha256"] == bundle.weights_sha256
    card = (bundle.path / "README.md").read_text()
    assert "| knn | grey | top1 | 1 | seed 0, " in card
    for name in ("zoo.json", "README.md"):
        names_no_place((Path(bundle.path) / name).read_text(), tmp_path, run, run.parent)


def test_list(command):
    code, out, _ = command("list")
    assert code == 0 and "no models" in out and "zoo publish" in out
    first = publish("me/one", tag="v1")
    second = publish("me/one", seed=1)
    publish("you/two")
    code, out, _ = command("list")
    assert code == 0 and "me/one" in out and "you/two" in out and second.revision in out
    answer = json.loads(command("list", "--json")[1])
    assert answer["schema"] == 1
    assert answer["models"][0] == {
        "model": "me/one",
        "latest": second.revision,
        "tags": ["v1"],
        "revisions": 2,
    }
    assert first.revision != second.revision


def test_show(command):
    done = publish("me/one", tag="v1")
    code, out, _ = command("show", "local:me/one@v1")
    assert code == 0 and "# me/one" in out and done.revision in out and "all hashes checked" in out
    assert "checked before" in command("show", "me/one")[1]
    answer = json.loads(command("show", "me/one", "--verify", "--json")[1])
    assert answer["schema"] == 1 and answer["checked"] == "full" and answer["arch"] == "resnet18"
    assert set(answer["files"]) == {"README.md", "config.json", "model.safetensors", "zoo.json"}
    assert_clear(command("show", "me/two"), "did you mean me/one")
    assert_clear(command("show", "me/one@v2"), "v1", done.revision)


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors", "zoo.json", "SHA256SUMS"])
def test_show_names_a_damaged_file(command, name):
    done = publish("me/one")
    assert command("show", "me/one")[0] == 0
    flip(done.path / name, 3)
    for words in (("show", "me/one"), ("show", "me/one", "--verify"), ("show", "me/one", "--json")):
        assert_clear(command(*words), done.path / name, "publish or pull the model again")


def test_tag(command):
    first = publish("me/one")
    code, out, _ = command("tag", "me/one", "v1")
    assert (code, out) == (0, f"me/one@v1 is {first.revision}\n")
    publish("me/one", seed=1)
    assert_clear(command("tag", "me/one", "v1"), "--force")
    assert command("tag", f"me/one@{first.revision}", "v1")[0] == 0
    assert command("tag", "me/one", "v1", "--force")[0] == 0
    assert_clear(command("tag", "me/one", "latest"), "latest")


def test_rm_asks(command, monkeypatch):
    publish("me/one")
    assert_clear(command("rm", "me/one"), "no terminal", "--yes")
    monkeypatch.setattr(sys, "stdin", Terminal(sys.stdin))

    def refuse(*_, **__):
        raise typer.Abort

    monkeypatch.setattr(typer, "confirm", refuse)
    assert command("rm", "me/one")[0] == 1
    assert LocalHub().names() == ["me/one"]
    assert_clear(command("rm", "me/two", "--yes"), "me/one")
    assert_clear(command("rm", "../..", "--yes"), "../..")
    code, out, _ = command("rm", "me/one", "--yes")
    assert (code, out) == (0, "deleted me/one\n")
    assert LocalHub().names() == []


def test_pull(command, tmp_path, monkeypatch):
    publish("me/one", tag="v1")
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("pull", "me/one@v1")
    assert code == 0 and "one" in out
    assert (tmp_path / "one" / "model.safetensors").is_file()
    assert_clear(command("pull", "me/one"), "exists already", "--out")
    assert command("pull", "me/one", "--out", tmp_path / "other")[0] == 0
    assert_clear(command("pull", "one", "--out", tmp_path / "third"), "org/name")
    assert_clear(command("pull", "one"), "org/name")
    assert_clear(command("pull", "../../x"), "org/name")
    assert_clear(command("pull", "me/one", "--name", "me/two"), "--name", "another home")
