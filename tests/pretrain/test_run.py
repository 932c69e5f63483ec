"""Runs: what they leave behind, and who watches them."""

from __future__ import annotations

import builtins
import json

import pytest
import torch
import yaml

import zoo
from tiny import (
    StopAfter,
    assert_same_state,
    lines,
    state,
    trace,
    train,
)
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.loop import Callback
from zoo.errors import EXIT_SAVED
from zoo.pretrain.rundir import RunLock

KEYS = {"schema", "step", "epoch", "loss", "lr", "img_s", "data_wait", "step_time", "time"}


def test_the_run_folder(finished, images):
    run = finished.path
    assert (finished.step, finished.total_steps, finished.exit_code) == (6, 6, 0)
    found = {file.name for file in run.iterdir()}
    wanted = {"run.json", "recipe.yaml", "environment.json", "data.json", "metrics.jsonl", "checkpoints"} | {
        "efficiency.json"
    }
    assert found == wanted | {"run.lock"}
    info = json.loads((run / "run.json").read_text("utf-8"))
    assert info["schema"] == 1
    assert info["total_steps"] == 6
    assert info["sources"]["method.dim"] == "--set"
    recipe = yaml.safe_load((run / "recipe.yaml").read_text("utf-8"))
    assert recipe["method"]["dim"] == 8
    assert recipe["data"]["sources"] == [str(images)]
    assert "  dim: 8  # --set" in (run / "recipe.yaml").read_text("utf-8").splitlines()
    environment = json.loads((run / "environment.json").read_text("utf-8"))
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (environment["device"], environment["precision"], environment["workers"]) == ("cpu", "float32", 0)
    data = json.loads((run / "data.json").read_text("utf-8"))
    assert data["count"] == 24
    assert CheckpointFolder(run / "checkpoints").steps() == [6]


def test_a_line_a_step(finished):
    found = lines(finished.path)
    assert [line["step"] for line in found] == list(range(6))
    assert [line["epoch"] for line in found] == [0, 0, 0, 1, 1, 1]
    assert all(set(line) >= KEYS and line["schema"] == 1 for line in found)
    assert all(0 < line["loss"] < 10 for line in found)
    assert all(line["img_s"] > 0 and 0 <= line["data_wait"] <= line["step_time"] for line in found)
    assert [line["time"] for line in found] == sorted(line["time"] for line in found)


def test_learning_rates_follow_the_recipe(images, tmp_path):
    run = train(
        images, tmp_path / "run", schedule__warmup_epochs=1, schedule__start_lr=0.0, optimizer__lr=0.003
    )
    rates = [lr for _, _, lr in trace(run.path)]
    assert rates == pytest.approx([0.0, 0.0015, 0.003, 0.003, 0.00225, 0.00075])


def test_checkpoints_are_kept_as_the_recipe_says(images, tmp_path):
    run = train(images, tmp_path / "run", checkpoint__every_steps=1, checkpoint__keep=3)
    assert CheckpointFolder(run.path / "checkpoints").steps() == [4, 5, 6]
    assert not any(path.name.startswith(".") for path in (run.path / "checkpoints").iterdir())


def test_the_same_again_is_the_same_and_another_seed_is_not(finished, images, tmp_path):
    again = train(images, tmp_path / "again")
    assert trace(again.path) == trace(finished.path)
    assert_same_state(again.path, finished.path)
    other = train(images, tmp_path / "other", seed=1)
    assert trace(other.path) != trace(finished.path)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_do_not_change_the_numbers(finished, images, tmp_path):
    run = train(images, tmp_path / "run", data__workers=2)
    assert trace(run.path) == trace(finished.path)
    assert_same_state(run.path, finished.path)


def test_learning_moves_every_part(finished, images, tmp_path):
    before = state(train(images, tmp_path / "short", epochs=1, optimizer__lr=1e-30).path)
    after = state(finished.path)
    for key in ("trunk.conv1.weight", "projection_head.0.weight", "prototypes.weight"):
        assert not torch.allclose(before[f"shared/learner/{key}"], after[f"shared/learner/{key}"], atol=1e-5)


def test_the_callable_module_runs_and_resumes(images, tmp_path, finished):
    from tiny import TINY

    options = {"data": str(images), "out": tmp_path / "run", "overrides": TINY, "progress": "quiet"}
    run = zoo.pretrain("swav_tiny", callbacks=[StopAfter(2)], **options)
    assert run.exit_code == EXIT_SAVED
    done = zoo.pretrain(resume=run.path, progress="quiet")
    assert done.step == 6
    assert_same_state(run.path, finished.path)


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def on_start(self, loop):
        self.calls.append("start")

    def on_batch(self, batch):
        self.calls.append(f"batch {batch.epoch}")

    def on_step(self, record):
        self.calls.append(f"step {record.step}")

    def on_epoch_end(self, epoch, loop):
        self.calls.append(f"epoch {epoch}")

    def on_checkpoint(self, step):
        self.calls.append(f"checkpoint {step}")

    def on_end(self, loop):
        self.calls.append("end")

    def close(self):
        self.calls.append("close")


def test_callbacks_are_called_in_order(images, tmp_path):
    recorder = Recorder()
    train(images, tmp_path / "run", batch_size=12, checkpoint__every_epochs=1, callbacks=(recorder,))
    saved = [call for call in recorder.calls if call.startswith("checkpoint")]
    assert saved == ["checkpoint 2", "checkpoint 4"]  # written in the background, told when done
    assert recorder.calls.index("checkpoint 2") > recorder.calls.index("epoch 0")
    assert recorder.calls[-3:] == ["checkpoint 4", "end", "close"]
    assert [call for call in recorder.calls if call not in saved] == [
        "start",
        *("batch 0", "step 0", "batch 0", "step 1", "epoch 0"),
        *("batch 1", "step 2", "batch 1", "step 3", "epoch 1"),
        *("end", "close"),
    ]


def test_an_error_in_a_callback_stops_the_run_and_closes_everything(images, tmp_path):
    class Failing(Recorder):
        def on_step(self, record):
            raise LookupError("mine")

    failing = Failing()
    with pytest.raises(LookupError, match="mine"):
        train(images, tmp_path / "run", callbacks=(failing,))
    assert failing.calls[-1] == "close"
    assert not RunLock.is_held(tmp_path / "run")


@pytest.mark.parametrize(("processors", "threads"), [(3, 2), (1, 1)])  # the caller's own limit is 2
def test_the_callers_generator_and_threads_are_as_before(images, tmp_path, monkeypatch, processors, threads):
    monkeypatch.setattr("zoo.engine.precision.processors", lambda: processors)
    seen = []

    class Threads(Callback):
        def on_start(self, loop):
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(11)
        generator = torch.get_rng_state()
        train(images, tmp_path / "run", epochs=1, callbacks=(Threads(),))
        assert seen == [threads]
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), generator)
    finally:
        torch.set_num_threads(before)


def test_apex_is_never_asked_for(images, tmp_path, monkeypatch):
    asked = []
    importing = builtins.__import__

    def watching(name, *args, **kwargs):
        asked.append(name.split(".")[0])
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", watching)
    run = train(images, tmp_path / "run", epochs=1, optimizer__name="lars", optimizer__lr=0.1)
    assert run.exit_code == 0
    assert asked
    assert "apex" not in asked


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_other_number_formats_train(images, tmp_path, precision):
    run = train(images, tmp_path / "run", epochs=1, precision=precision)
    expected = torch.float64 if precision == "float64" else torch.float32
    assert run.method.prototypes.weight.dtype == expected
    assert all(line["loss"] < 10 for line in lines(run.path))


@pytest.mark.parametrize(
    "settings", [{"codes": "hard"}, {"crops_for_assign": [1]}, {"learn_prototypes": False}]
)
def test_the_variants_of_the_method_train(images, tmp_path, settings):
    run = train(images, tmp_path / "run", epochs=1, **{f"method__{k}": v for k, v in settings.items()})
    assert run.exit_code == 0
