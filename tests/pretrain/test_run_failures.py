"""What goes wrong in a run: numbers, disks, locks, images."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from tiny import (
    StopAfter,
    assert_same_state,
    go_on,
    half_jpeg,
    image_folder,
    lines,
    trace,
    train,
)
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.loop import Callback
from zoo.errors import InputError, RunError
from zoo.files import fresh_path
from zoo.pretrain.methods.swav import SwAV
from zoo.pretrain.resolve import resolve
from zoo.pretrain.rundir import RunLock


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_update(images, tmp_path, monkeypatch, value):
    seen = {}
    step = SwAV.step

    def failing(self, views, batch, given=None):
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


def test_an_address_for_copies_that_cannot_be_leaves_no_run_behind(images, tmp_path):
    with pytest.raises(InputError, match="nope://"):
        train(images, tmp_path / "run", checkpoint__copy_to="nope://bucket/run")
    assert not (tmp_path / "run").exists()  # the same command, mended, finds its --out free


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
