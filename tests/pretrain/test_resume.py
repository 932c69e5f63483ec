"""Going on: bit for bit, extended, refused."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch

from tiny import (
    StopAfter,
    assert_same_state,
    go_on,
    image_folder,
    save_image,
    state,
    trace,
    train,
)
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.loop import Callback
from zoo.errors import EXIT_SAVED, InputError, RunError
from zoo.pretrain.resolve import resolve


@pytest.mark.parametrize("optimizer", ["lars", "adamw", "sgd"])
@pytest.mark.parametrize("stop", [2, 3])  # in the middle and at the end of an epoch of three steps
def test_stopping_and_going_on_is_bit_for_bit(images, tmp_path, optimizer, stop):
    settings = {"optimizer__name": optimizer, "optimizer__lr": 0.05 if optimizer == "lars" else 0.001}
    whole = train(images, tmp_path / "whole", **settings)
    half = train(images, tmp_path / "half", callbacks=(StopAfter(stop),), **settings)
    assert (half.step, half.exit_code) == (stop, EXIT_SAVED)
    rest = go_on(half.path)
    assert (rest.step, rest.exit_code) == (6, 0)
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)


def test_going_on_with_a_queue_is_bit_for_bit(images, tmp_path):
    settings = {"method__queue_length": 16, "method__queue_start_epoch": 0, "epochs": 2}
    whole = train(images, tmp_path / "whole", **settings)
    half = train(images, tmp_path / "half", callbacks=(StopAfter(4),), **settings)  # full after 2 steps
    assert state(half.path)["local/learner/queue_rows_filled"] == 16
    assert state(half.path)["local/learner/queue"].abs().sum() > 0
    go_on(half.path)
    assert trace(half.path) == trace(whole.path)
    assert_same_state(half.path, whole.path)


def test_a_run_stopped_at_every_step_is_the_same(finished, images, tmp_path):
    run = train(images, tmp_path / "run", callbacks=(StopAfter(1),))
    for step in range(2, 7):
        go_on(run.path, callbacks=(StopAfter(step),))
    assert trace(run.path) == trace(finished.path)
    assert_same_state(run.path, finished.path)
    info = json.loads((run.path / "run.json").read_text("utf-8"))
    assert [entry["step"] for entry in info["resumed"]] == [1, 2, 3, 4, 5]


def test_lines_after_the_last_checkpoint_are_written_again(finished, images, tmp_path):
    run = train(images, tmp_path / "run", callbacks=(StopAfter(2),))
    with open(run.path / "metrics.jsonl", "a") as file:  # what a killed process had written beyond its save
        file.write(
            json.dumps({"step": 2, "loss": -1.0, "lr": 0.0}) + '\nnull\n[1]\n{"a": 1}\n{"step": 3, "lo'
        )
    go_on(run.path)
    assert trace(run.path) == trace(finished.path)


def test_resuming_a_finished_run_changes_nothing(images, tmp_path):
    run = train(images, tmp_path / "run")
    before, old_lines = state(run.path), trace(run.path)
    again = go_on(run.path)
    assert (again.step, again.exit_code) == (6, 0)
    assert trace(run.path) == old_lines
    assert before.keys() == state(run.path).keys()
    parameter = "trunk.conv1.weight"
    assert torch.equal(again.method.state_dict()[parameter], before[f"shared/learner/{parameter}"])


def test_extending_a_finished_run_follows_the_longer_schedule(images, tmp_path):
    run = train(images, tmp_path / "run", epochs=2, schedule__warmup_epochs=0)
    first = trace(run.path)
    more = go_on(run.path, epochs=4)
    assert (more.step, more.total_steps) == (12, 12)
    assert trace(run.path)[:6] == first
    long = train(images, tmp_path / "long", epochs=4, schedule__warmup_epochs=0)
    assert [lr for _, _, lr in trace(run.path)[6:]] == [lr for _, _, lr in trace(long.path)[6:]]
    assert resolve(run.path / "recipe.yaml").recipe.epochs == 4
    info = json.loads((run.path / "run.json").read_text("utf-8"))
    assert info["total_steps"] == 12
    assert info["resumed"] == [{"step": 6, "changes": {"epochs": [2, 4]}}]
    with pytest.raises(InputError, match="12 steps already") as caught:
        go_on(run.path, epochs=1)
    assert caught.value.fix
    assert resolve(run.path / "recipe.yaml").recipe.epochs == 4


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer__lr", 0.5), ("method__dim", 16), ("seed", 9), ("batch_size", 4)]
)
def test_a_changed_recipe_is_refused(finished, key, value):
    before = (finished.path / "recipe.yaml").read_bytes()
    with pytest.raises(InputError, match="can't change when a run goes on") as caught:
        go_on(finished.path, **{key: value})
    assert key.replace("__", ".") in caught.value.what
    assert "--init-from" in caught.value.fix
    assert (finished.path / "recipe.yaml").read_bytes() == before


def test_other_data_are_refused(tmp_path, images):
    data = image_folder(tmp_path / "images")
    run = train(data, tmp_path / "run", callbacks=(StopAfter(2),))
    save_image(data / "class0" / "new.png", 99)
    with pytest.raises(InputError, match="not what the run was started on") as caught:
        go_on(run.path)
    assert caught.value.where == str(data)
    # The same images elsewhere are the same data.
    moved = go_on(run.path, data__sources=[str(images)])
    assert moved.exit_code == 0


def test_the_run_goes_on_from_another_folder(tmp_path, images, monkeypatch):
    monkeypatch.chdir(images.parent)
    run = train(images.name, tmp_path / "run", callbacks=(StopAfter(2),))
    monkeypatch.chdir(tmp_path)
    assert go_on(run.path).exit_code == 0


def test_resume_of_what_is_no_run_suggests_init_from(tmp_path):
    (tmp_path / "folder").mkdir()
    weights = tmp_path / "weights.pt"
    torch.save({"conv1.weight": torch.ones(1)}, weights)
    for path in (tmp_path / "folder", weights):
        with pytest.raises(InputError) as caught:
            go_on(path)
        assert "--init-from" in caught.value.fix
        assert caught.value.where == str(path)
    with pytest.raises(InputError, match="no such run"):
        go_on(tmp_path / "nothing")


def test_a_damaged_newest_checkpoint_is_said_and_made_again(finished, images, tmp_path, caplog):
    run = train(images, tmp_path / "run", checkpoint__every_steps=2, callbacks=(StopAfter(5),))
    os.truncate(run.path / "checkpoints" / "step-00000005" / "global.safetensors", 100)
    with caplog.at_level(logging.WARNING, logger="zoo"):
        go_on(run.path, callbacks=(StopAfter(5),))
    assert "step-00000005" in caplog.text
    assert CheckpointFolder(run.path / "checkpoints").load(5).step == 5
    go_on(run.path)
    assert trace(run.path) == trace(finished.path)
    assert_same_state(run.path, finished.path)


def test_a_run_killed_before_its_first_checkpoint_starts_over(finished, images, tmp_path):
    run = train(images, tmp_path / "run", callbacks=(StopAfter(2),))
    shutil.rmtree(run.path / "checkpoints")
    go_on(run.path)
    assert trace(run.path) == trace(finished.path)
    assert_same_state(run.path, finished.path)


def test_a_run_without_a_whole_checkpoint_is_not_quietly_begun_again(images, tmp_path):
    run = train(images, tmp_path / "run", epochs=1)
    os.truncate(run.path / "checkpoints" / "step-00000003" / "global.safetensors", 100)
    before = (run.path / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="No checkpoint of this run is whole"):
        go_on(run.path)
    assert (run.path / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def stopped(images, tmp_path_factory):
    """A run that was stopped after a step; treat it as read-only."""
    return train(images, tmp_path_factory.mktemp("stopped") / "run", callbacks=(StopAfter(1),)).path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method__prototypes": 6}, "prototypes"),
        ({"optimizer__name": "sgd"}, "momentum"),
        ({"engine__ema_decay": 0.9}, "average"),
        ({"precision": "float64"}, "float64"),
        ({"method__queue_length": 16, "method__queue_start_epoch": 0}, "must match the size"),
    ],
)
def test_another_runs_checkpoints_are_not_taken_up(stopped, images, tmp_path, settings, words):
    shutil.copytree(stopped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    other = train(images, tmp_path / "other", callbacks=(StopAfter(1),), **settings).path
    shutil.copytree(other / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(InputError, match="not one of this run") as caught:
        go_on(tmp_path / "run")
    assert words in caught.value.what and "step-00000001" in caught.value.where


def test_a_folder_that_is_moved_meanwhile_is_not_begun_anew(images, tmp_path):
    class Move(Callback):
        def on_step(self, record):
            if record.step == 1:
                (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(RunError, match="Saving a checkpoint failed") as caught:
        train(images, tmp_path / "run", callbacks=(Move(),))
    assert "moved or removed" in caught.value.fix
    assert not (tmp_path / "run").exists()
    assert go_on(tmp_path / "moved").exit_code == 0


@pytest.mark.parametrize("name", ["data.json", "recipe.yaml", "run.json"])
def test_a_run_with_a_damaged_description_is_bad_input(finished, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)
    (run / name).write_bytes(b"\xff{")
    with pytest.raises(InputError) as caught:
        go_on(run)
    assert name in caught.value.where


def test_a_full_folder_is_not_written_over(finished, images, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="not empty") as caught:
        train(images, tmp_path / "mine")
    assert "--resume" in caught.value.fix
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    assert train(images, tmp_path / "empty", epochs=1).exit_code == 0


def test_other_threads_than_before_are_said(finished, images, tmp_path, caplog):
    run = train(images, tmp_path / "run", callbacks=(StopAfter(2),)).path
    environment = json.loads((run / "environment.json").read_text("utf-8"))
    assert environment["threads"] == 1
    (run / "environment.json").write_text(json.dumps({**environment, "threads": 5}))
    with caplog.at_level("WARNING", logger="zoo"):
        go_on(run)
    assert "on 5 threads so far, from here on on 1" in caplog.text
