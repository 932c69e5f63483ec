"""Runs: what they leave behind, how they go on, and what they refuse."""

from __future__ import annotations

import builtins
import errno
import json
import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

import zoo
from tiny import (
    StopAfter,
    assert_same_state,
    go_on,
    half_jpeg,
    image_folder,
    lines,
    save_image,
    state,
    trace,
    train,
)
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.loop import Callback
from zoo.errors import EXIT_SAVED, InputError, RunError
from zoo.files import fresh_path
from zoo.pretrain.methods.swav import SwAV
from zoo.pretrain.resolve import resolve
from zoo.pretrain.rundir import RunLock

KEYS = {"schema", "step", "epoch", "loss", "lr", "img_s", "data_wait", "step_time", "time"}


# --- what a run leaves behind ---


def test_the_run_folder(finished, images):
    run = finished.path
    assert (finished.step, finished.total_steps, finished.exit_code) == (6, 6, 0)
    found = {file.name for file in run.iterdir()}
    wanted = {"run.json", "recipe.yaml", "environment.json", "data.json", "metrics.jsonl", "checkpoints"}
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
    assert recorder.calls == [
        "start",
        *("batch 0", "step 0", "batch 0", "step 1", "epoch 0", "checkpoint 2"),
        *("batch 1", "step 2", "batch 1", "step 3", "epoch 1"),
        *("checkpoint 4", "end", "close"),
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


def test_the_callers_generator_and_threads_are_as_before(images, tmp_path, monkeypatch):
    monkeypatch.setattr("zoo.engine.precision.processors", lambda: 3)
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
        assert seen == [3]
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


# --- going on ---


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
        file.write(json.dumps({"step": 2, "loss": -1.0, "lr": 0.0}) + '\n{"step": 3, "lo')
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
    import shutil

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


@pytest.mark.parametrize("name", ["data.json", "recipe.yaml", "run.json"])
def test_a_run_with_a_damaged_description_is_bad_input(finished, tmp_path, name):
    import shutil

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


# --- starting from weights ---


def trunk_of(run):
    return {
        key.removeprefix("shared/learner/trunk."): value
        for key, value in state(run).items()
        if key.startswith("shared/learner/trunk.")
    }


def begun_from(images, out, source):
    """The trunk of a run started from weights, before its first update."""
    taken = {}

    class Look(Callback):
        def on_start(self, loop):
            taken.update({k: v.clone() for k, v in loop.learner.trunk.state_dict().items()})
            assert loop.step == 0
            assert not loop.optimizer.state

    train(images, out, epochs=1, seed=5, init_from=source, callbacks=(Look(),))
    return taken


def test_init_from_a_run(finished, images, tmp_path):
    taken = begun_from(images, tmp_path / "run", finished.path)
    wanted = trunk_of(finished.path)
    assert taken.keys() == wanted.keys()
    assert all(torch.equal(taken[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("prefix", ["", "module.", "module.encoder_q.", "encoder."])
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_init_from_a_file(finished, images, tmp_path, prefix, kind, caplog):
    wanted = trunk_of(finished.path)
    tensors = {prefix + key: value for key, value in wanted.items()}
    tensors[prefix + "fc.weight"] = torch.ones(2, 64)
    file = tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        save_file(tensors, file)
    else:
        torch.save({"state_dict": tensors, "epoch": 3}, file)
    with caplog.at_level(logging.INFO, logger="zoo"):
        taken = begun_from(images, tmp_path / "run", file)
    assert all(torch.equal(taken[key], wanted[key]) for key in wanted)
    assert f"{len(wanted)} of {len(wanted)} trunk tensors matched" in caplog.text
    assert "1 others" in caplog.text


def test_init_from_weights_of_another_shape_names_it(finished, images, tmp_path):
    with pytest.raises(InputError, match=r"conv1\.weight has shape") as caught:
        train(images, tmp_path / "run", trunk__base_planes=4, init_from=finished.path)
    assert "trunk" in caught.value.fix
    file = tmp_path / "few.safetensors"
    save_file({"conv1.weight": torch.ones(8, 3, 7, 7)}, file)
    with pytest.raises(InputError, match=r"Only 1 of the trunk's \d+ tensors") as caught:
        train(images, tmp_path / "run", init_from=file)
    assert caught.value.where == str(file)
    assert not (tmp_path / "run").exists()


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_malicious_pickle_is_refused_and_not_executed(images, tmp_path):
    for name, dump in (
        ("new.pt", torch.save),
        ("old.pt", lambda value, path: path.write_bytes(pickle.dumps(value))),
    ):
        dump({"state_dict": {"conv1.weight": Evil(tmp_path / "executed")}}, tmp_path / name)
        with pytest.raises(InputError, match="safely") as caught:
            train(images, tmp_path / "run", init_from=tmp_path / name)
        assert caught.value.where == str(tmp_path / name)
        assert not (tmp_path / "executed").exists()
    # The file does what it is feared to do when it is read carelessly.
    pickle.loads((tmp_path / "old.pt").read_bytes())
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x80\x02}q\x00.", b"\xff\xd8\xff\xe0" * 40, b"PK\x03\x04xx"]
)
def test_what_is_no_file_of_weights_is_named(images, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        train(images, tmp_path / "run", init_from=tmp_path / name)
    assert caught.value.where == str(tmp_path / name)
    assert not (tmp_path / "run").exists()


def test_a_missing_file_of_weights_is_named(images, tmp_path):
    with pytest.raises(InputError) as caught:
        train(images, tmp_path / "run", init_from=tmp_path / "gone.pt")
    assert "gone.pt" in str(caught.value)


# --- SwAV's thresholds ---


class Prototypes(Callback):
    """The prototypes after each step."""

    def __init__(self):
        self.seen = []

    def on_start(self, loop):
        self.learner = loop.learner
        self.seen.append(loop.learner.prototypes.weight.detach().clone())

    def on_step(self, record):
        self.seen.append(self.learner.prototypes.weight.detach().clone())


@pytest.mark.parametrize("optimizer", ["lars", "adamw", "sgd"])
def test_prototypes_rest_while_frozen_and_move_after(images, tmp_path, optimizer):
    watch = Prototypes()
    train(
        images,
        tmp_path / "run",
        method__freeze_prototypes_steps=3,
        optimizer__name=optimizer,
        optimizer__lr=0.5 if optimizer == "lars" else 0.01,
        optimizer__weight_decay=0.1,
        schedule__warmup_epochs=0,
        callbacks=(watch,),
    )
    start, *steps = watch.seen
    unit = torch.nn.functional.normalize(start, dim=1)
    for weight in steps[:3]:
        torch.testing.assert_close(weight, unit, rtol=0, atol=1e-6)  # normalised, and nothing else
    moved = (torch.nn.functional.normalize(steps[3], dim=1) - unit).abs().max()
    assert moved > 1e-4


def test_prototypes_that_are_not_learned_never_move(images, tmp_path):
    watch = Prototypes()
    train(images, tmp_path / "run", method__learn_prototypes=False, callbacks=(watch,))
    unit = torch.nn.functional.normalize(watch.seen[0], dim=1)
    torch.testing.assert_close(watch.seen[-1], unit, rtol=0, atol=1e-6)


def test_no_queue_row_enters_sinkhorn_before_the_queue_is_full(images, tmp_path, monkeypatch):
    from zoo.pretrain.methods import swav as module

    rows = []

    def counting(scores, *args):
        rows.append(len(scores))
        assert not (scores == 0).all(dim=1).any()  # a row that was never filled has only zeros
        return original(scores, *args)

    original = module.sinkhorn
    monkeypatch.setattr(module, "sinkhorn", counting)
    train(images, tmp_path / "run", epochs=3, method__queue_length=16, method__queue_start_epoch=1)
    # Two assigning crops a step. Epoch 0 (3 steps): no queue. Then two steps fill it; then 16 + 8 rows.
    assert rows == [8] * 6 + [8] * 4 + [24] * 8


def test_the_queue_is_newest_first_and_holds_unit_embeddings(images, tmp_path, monkeypatch):
    seen = []
    codes = SwAV.codes

    def watching(self, embeddings, scores, batch):
        out = codes(self, embeddings, scores, batch)
        seen.append((embeddings.clone(), self.queue.clone()))
        return out

    monkeypatch.setattr(SwAV, "codes", watching)
    train(images, tmp_path / "run", epochs=1, method__queue_length=16, method__queue_start_epoch=0)
    for crop in (0, 1):
        rows = slice(8 * crop, 8 * crop + 8)
        _, queue = seen[2]
        assert torch.equal(queue[crop, :8], seen[2][0][rows])
        assert torch.equal(queue[crop, 8:], seen[1][0][rows])
        torch.testing.assert_close(queue[crop].norm(dim=1), torch.ones(16))


# --- what goes wrong ---


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_update(images, tmp_path, monkeypatch, value):
    seen = {}
    step = SwAV.step

    def failing(self, views, batch):
        loss, logs = step(self, views, batch)
        seen["count"] = seen.get("count", 0) + 1
        if seen["count"] == 3:
            seen["weights"] = {k: v.detach().clone() for k, v in self.named_parameters()}
            seen["learner"] = self
            loss = loss * value
        return loss, logs

    monkeypatch.setattr(SwAV, "step", failing)
    with pytest.raises(RunError, match=r"at step 2 \(epoch 0\)") as caught:
        train(images, tmp_path / "run", checkpoint__every_steps=1)
    assert "optimizer.lr" in caught.value.fix
    assert str(value) in caught.value.what
    assert caught.value.exit_code == 1
    for key, weight in seen["learner"].named_parameters():
        assert torch.equal(weight, seen["weights"][key])
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").steps() == [1, 2]
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1]


def test_a_run_that_blew_up_goes_on_from_its_last_checkpoint(finished, images, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        step = SwAV.step
        patch.setattr(
            SwAV, "step", lambda self, *a: (step(self, *a)[0] * (float("nan") if len(calls) > 3 else 1), {})
        )
        calls = []
        patch.setattr(SwAV, "before_step", counted(SwAV.before_step, calls))
        with pytest.raises(RunError):
            train(images, tmp_path / "run", checkpoint__every_steps=2)
    go_on(tmp_path / "run")
    assert trace(tmp_path / "run") == trace(finished.path)
    assert_same_state(tmp_path / "run", finished.path)


def counted(function, calls):
    def wrapper(*args):
        calls.append(args)
        return function(*args)

    return wrapper


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_fails_while_saving(images, tmp_path, monkeypatch, code):
    from zoo.engine import checkpoint as module

    writing = module.write_safetensors
    calls = []

    def failing(path, tensors):
        calls.append(path)
        if len(calls) > 3:  # two files a checkpoint: the second one breaks off in the middle
            raise OSError(code, os.strerror(code), str(path))
        writing(path, tensors)

    monkeypatch.setattr(module, "write_safetensors", failing)
    with pytest.raises(RunError) as caught:
        train(images, tmp_path / "run", checkpoint__every_steps=2)
    assert os.strerror(code) in caught.value.what
    assert caught.value.fix
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [entry.name for entry in checkpoints.iterdir()] == ["step-00000002"]
    assert CheckpointFolder(checkpoints).load(2).step == 2
    monkeypatch.setattr(module, "write_safetensors", writing)
    assert go_on(tmp_path / "run").step == 6


def test_a_disk_that_fails_while_logging(images, tmp_path, monkeypatch):
    from zoo.engine import trackers as module

    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self):
            pass

    monkeypatch.setattr(module, "open", lambda *a, **k: Full(), raising=False)
    with pytest.raises(RunError, match="No space left") as caught:
        train(images, tmp_path / "run")
    assert caught.value.where.endswith("metrics.jsonl")


def test_a_place_that_cannot_be_written(images, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="Making the run's folder failed") as caught:
        train(images, tmp_path / "file" / "run")
    assert "file/run" in caught.value.where
    assert (tmp_path / "file").read_text() == "x"


def test_a_second_process_on_the_same_run_is_refused(images, tmp_path):
    run = train(images, tmp_path / "run", callbacks=(StopAfter(2),))
    holder = (
        "import sys; from pathlib import Path; from zoo.pretrain.rundir import RunLock\n"
        "with RunLock(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"held\n"
        before = (run.path / "metrics.jsonl").read_bytes()
        with pytest.raises(RunError, match=f"pid {process.pid}"):
            go_on(run.path)
        assert (run.path / "metrics.jsonl").read_bytes() == before
        assert RunLock.is_held(run.path)
    finally:
        process.kill()  # the system lets go of a dead process's lock
        process.communicate()
    assert not RunLock.is_held(run.path)
    assert go_on(run.path).exit_code == 0


# --- unreadable images ---


@pytest.fixture()
def damaged(tmp_path):
    data = image_folder(tmp_path / "damaged", 15)
    half_jpeg(data / "class0" / "bad.jpg")
    return data


def test_an_unreadable_image_stops_the_run_and_is_named(damaged, tmp_path):
    with pytest.raises(InputError) as caught:
        train(damaged, tmp_path / "run")
    assert caught.value.where.endswith("class0/bad.jpg")


def test_skipped_images_are_counted_reported_and_repeatable(damaged, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="zoo"):
        run = train(damaged, tmp_path / "run", data__on_error="skip")
    assert run.bad_files == 1
    assert "1 unreadable image" in caplog.text
    found = [json.loads(line) for line in (run.path / "bad_files.jsonl").read_text("utf-8").splitlines()]
    assert len(found) == 2  # once each epoch
    assert all(line["file"].endswith("bad.jpg") and line["schema"] == 1 for line in found)
    half = train(damaged, tmp_path / "half", data__on_error="skip", callbacks=(StopAfter(1),))
    go_on(half.path)
    assert_same_state(half.path, run.path)
    assert (half.path / "bad_files.jsonl").read_bytes() == (run.path / "bad_files.jsonl").read_bytes()


def test_a_skipped_image_whose_name_is_no_utf8_is_reported(damaged, tmp_path):
    try:
        os.rename(damaged / "class0" / "bad.jpg", os.fsencode(damaged) + b"/class0/M\xfcll.jpg")
    except OSError:
        pytest.skip("this file system wants UTF-8")
    run = train(damaged, tmp_path / "run", data__on_error="skip", epochs=1)
    (line,) = (run.path / "bad_files.jsonl").read_text("utf-8").splitlines()
    assert os.fsencode(json.loads(line)["file"]).endswith(b"M\xfcll.jpg")


def test_a_folder_whose_name_is_no_utf8(images, tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xe9t\xe9")
    try:
        os.symlink(images, name)
    except OSError:
        pytest.skip("this file system wants UTF-8")
    run = train(name, tmp_path / "run", epochs=1)
    assert resolve(run.path / "recipe.yaml").recipe.data.sources == (name,)


def test_a_forked_child_does_not_keep_the_run_locked(tmp_path):
    ready, go = os.pipe(), os.pipe()
    lock = RunLock(tmp_path)
    lock.__enter__()
    child = os.fork()
    if child == 0:  # stands for a data worker that outlives its trainer
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert RunLock.is_held(tmp_path)
        lock.__exit__()
        with RunLock(tmp_path):
            pass
    finally:
        os.write(go[1], b"1")
        os.waitpid(child, 0)


def test_a_state_that_is_not_finite_is_never_saved(images, tmp_path):
    """Gradients can blow up under a finite loss: the checkpoints before it must survive."""

    class Poison(Callback):
        def on_start(self, loop):
            self.loop = loop

        def on_step(self, record):
            if record.step == 4:
                with torch.no_grad():
                    self.loop.learner.trunk.conv1.weight[0, 0, 0, 0] = float("nan")

    with pytest.raises(RunError, match=r"(not finite after step 4|became nan at step 5)"):
        train(images, tmp_path / "run", checkpoint__every_steps=5, callbacks=[Poison()])
    with pytest.raises(RunError, match="not finite after step"):
        train(images, tmp_path / "other", checkpoint__every_steps=1, callbacks=[Poison()])
    assert CheckpointFolder(tmp_path / "other" / "checkpoints").steps() == [3, 4]


def test_initial_weights_are_saved_before_the_first_step(images, finished, tmp_path):
    """A resume must not depend on the file that the weights came from."""

    class Die(Callback):
        def on_step(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(images, tmp_path / "run", init_from=finished.path, callbacks=[Die()])
    checkpoint, _ = CheckpointFolder(tmp_path / "run" / "checkpoints").newest()
    assert checkpoint.step == 0
    weights = checkpoint.shared["learner"]["trunk.conv1.weight"]
    assert torch.equal(weights, finished.method.trunk.conv1.weight)


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    assert len({fresh_path(tmp_path, "run") for _ in range(5)}) == 5
    assert all(path.is_dir() for path in tmp_path.iterdir())
