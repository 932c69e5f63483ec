"""Saving in the background, one process: snapshots, kills, full disks, what stays."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
import threading

import pytest
import torch

from tiny import TESTS
from zoo.engine import checkpoint as module
from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import WorldOfOne
from zoo.errors import RunError


def writer_in(folder, **arguments):
    return CheckpointWriter(CheckpointFolder(folder, **arguments), WorldOfOne())


def begin(writer, step, value=None):
    shared = {"value": torch.full((3,), float(step) if value is None else value)}
    writer.begin(step, shared, {"queue": torch.tensor([step])})


def begin_and_wait(writer, step, value=None):
    begin(writer, step, value)
    writer.wait()


@pytest.fixture
def gate(monkeypatch):
    """Holds the background back where it has written the tensors, until the test sets it."""
    gate, writing = threading.Event(), module.write_safetensors

    def held_back(path, tensors):
        assert gate.wait(30)
        writing(path, tensors)

    monkeypatch.setattr(module, "write_safetensors", held_back)
    yield gate
    gate.set()


def test_the_background_writes_what_saving_at_once_writes(tmp_path):
    begin_and_wait(writer_in(tmp_path / "a"), 4)
    CheckpointFolder(tmp_path / "b").save(4, {"value": torch.full((3,), 4.0)}, {"queue": torch.tensor([4])})
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / n / "step-00000004").iterdir()} for n in "ab")
    assert a == b
    assert len(a) == 5


def test_begin_returns_before_the_disk_is_written_and_tensors_may_change(tmp_path, gate):
    writer = writer_in(tmp_path)
    shared, local = {"value": torch.zeros(1000), "list": [1]}, {"queue": torch.zeros(3)}
    writer.begin(1, shared, local)
    shared["value"].fill_(7)
    shared["list"].append(2)
    local["queue"].fill_(7)
    assert writer.finished() == []
    assert writer.folder.steps() == []
    gate.set()
    writer.wait()
    found = writer.folder.load(1)
    assert found.shared["value"].eq(0).all()
    assert found.shared["list"] == [1]
    assert found.local["queue"].eq(0).all()


def test_each_step_is_told_once_when_it_is_there(tmp_path, gate):
    writer = writer_in(tmp_path, keep=9)
    begin(writer, 1)
    assert writer.finished() == []
    gate.set()
    begin(writer, 2)  # waits for the first
    assert writer.folder.load(1).step == 1
    writer.wait()
    assert writer.finished() == [1, 2]
    assert writer.finished() == []
    writer.wait()  # nothing is under way
    assert writer.finished() == []


def test_finished_sees_the_end_without_being_waited_for(tmp_path):
    writer = writer_in(tmp_path)
    begin(writer, 1)
    for thread in threading.enumerate():
        if thread.name == "checkpoint 1":
            thread.join()
    assert writer.finished() == [1]
    assert writer.folder.load(1).step == 1


def test_a_whole_step_is_not_written_again(tmp_path):
    writer = writer_in(tmp_path)
    begin_and_wait(writer, 2)
    begin_and_wait(writer, 2, value=-1.0)
    assert writer.finished() == [2]
    again = writer_in(tmp_path)  # after a resume
    begin_and_wait(again, 2, value=-1.0)
    assert again.finished() == [2]
    assert again.folder.load(2).shared["value"].tolist() == [2.0] * 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"]


def test_a_damaged_step_is_written_again(tmp_path):
    begin_and_wait(writer_in(tmp_path), 2)
    os.truncate(tmp_path / "step-00000002" / "rank-0.safetensors", 10)
    writer = writer_in(tmp_path)
    begin_and_wait(writer, 2, value=5.0)
    assert writer.folder.load(2).shared["value"].tolist() == [5.0] * 3


def test_milestones_stay_beside_the_newest(tmp_path):
    writer = writer_in(tmp_path, keep=2, keep_every=10)
    for step in (4, 10, 14, 20, 24, 28, 30, 33):
        begin_and_wait(writer, step)
    assert writer.folder.steps() == [10, 20, 30, 33]


def test_nothing_goes_before_the_new_one_is_complete(tmp_path, gate):
    gate.set()
    writer = writer_in(tmp_path, keep=1)
    begin_and_wait(writer, 2)
    gate.clear()
    begin(writer, 4)
    assert writer.folder.load(2).step == 2
    gate.set()
    writer.wait()
    assert writer.folder.steps() == [4]


def test_impossible_rules():
    for arguments in ({"keep": 0}, {"keep_every": 0}):
        with pytest.raises(ValueError):
            CheckpointFolder(TESTS, **arguments)


KILLED = """
import json, os, shutil, signal, sys, threading
from pathlib import Path
import torch
from zoo.engine import checkpoint, checkpoint_writer
from zoo.engine.collectives import WorldOfOne

torch.set_num_threads(1)
root = Path(sys.argv[1])
names = [(checkpoint, "write_json"), (checkpoint, "write_safetensors"), (checkpoint, "fsync_path"),
         (checkpoint, "sha256_of"), (checkpoint.os, "rename"), (checkpoint.shutil, "rmtree")]

def save(folder, step):
    writer = checkpoint_writer.CheckpointWriter(checkpoint.CheckpointFolder(folder), WorldOfOne())
    writer.begin(step, {"value": torch.full((50_000,), float(step))}, {"rank": torch.arange(9)})
    writer.wait()
    return writer.folder

def die_at_call(number):
    calls = [0]
    def deadly(function):
        def wrapper(*arguments, **options):
            if threading.current_thread() is not threading.main_thread():
                calls[0] += 1
                if calls[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return wrapper
    for owner, name in names:
        setattr(owner, name, deadly(getattr(owner, name)))

seen = []
for step in (2, 4):
    save(root / "before", step)
for number in range(1, 100):
    folder = root / str(number)
    shutil.copytree(root / "before", folder)
    child = os.fork()
    if child == 0:
        die_at_call(number)
        save(folder, 6)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    left = sorted(entry.name for entry in folder.iterdir())
    found, problems = checkpoint.CheckpointFolder(folder).newest()
    value = found.shared["value"]
    whole = bool(value.eq(found.step).all()) and value.numel() == 50_000
    after = save(folder, 8)
    seen.append({"killed": os.WIFSIGNALED(status), "left": left, "step": found.step, "whole": whole,
                 "problems": problems, "after": sorted(entry.name for entry in folder.iterdir())})
    if not os.WIFSIGNALED(status):
        break
print(json.dumps(seen))
"""


def test_kill_9_at_every_stage_of_a_write(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert [one["killed"] for one in seen] == [True] * (len(seen) - 1) + [False]
    assert len(seen) > 12
    assert all(one["whole"] and one["problems"] == [] for one in seen)
    half = [one for one in seen if any(name.endswith(".tmp") for name in one["left"])]
    assert len(half) > 8
    assert all(one["step"] == 4 and one["left"][1:] == ["step-00000002", "step-00000004"] for one in half)
    assert {one["step"] for one in seen} == {4, 6}
    for one in seen:
        assert one["after"][-1] == "step-00000008"
        assert one["after"] == [f"step-{one['step']:08d}", "step-00000008"]


LEAVING = """
import os, sys, time
from pathlib import Path
import torch
from zoo.engine import checkpoint, checkpoint_writer
from zoo.engine.collectives import WorldOfOne

torch.set_num_threads(1)
writing = checkpoint.write_safetensors
checkpoint.write_safetensors = lambda *a: (time.sleep(0.3), writing(*a))
for way in ("at once", "politely"):
    if way == "politely" or os.fork() == 0:
        folder = checkpoint.CheckpointFolder(Path(sys.argv[1]) / way)
        checkpoint_writer.CheckpointWriter(folder, WorldOfOne()).begin(3, {"value": torch.ones(5)}, {})
        if way == "at once":
            os._exit(0)
os.wait()
"""


def test_the_end_of_the_interpreter_waits_for_a_write(tmp_path):
    subprocess.run([sys.executable, "-c", LEAVING, tmp_path], check=True, timeout=120)
    assert CheckpointFolder(tmp_path / "politely").load(3).step == 3
    assert CheckpointFolder(tmp_path / "at once").steps() == []


def test_a_full_disk_is_told_at_the_next_call_and_the_writer_goes_on_later(tmp_path):
    """A real limit: the system refuses files above it."""
    writer = writer_in(tmp_path)
    begin_and_wait(writer, 2)
    assert writer.finished() == [2]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"value": torch.zeros(1_000_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        for ask in (writer.wait, writer.finished, lambda: begin(writer, 6)):
            writer.begin(4, big, {})
            for thread in threading.enumerate():
                if thread.name == "checkpoint 4":
                    thread.join()
            with pytest.raises(RunError, match=os.strerror(errno.EFBIG)) as caught:
                ask()
            assert caught.value.where == str(tmp_path)
            assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"]
            assert writer.finished() == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert writer.folder.load(2).step == 2
    writer.begin(4, big, {})
    writer.wait()
    assert writer.finished() == [4]
    assert writer.folder.load(4).shared["value"].numel() == 1_000_000


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_what_helps_against_a_disk_that_fails(tmp_path, monkeypatch, code):
    writer = writer_in(tmp_path)
    begin_and_wait(writer, 2)

    def failing(path, tensors):
        path.write_bytes(b"half")
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(module, "write_safetensors", failing)
    with pytest.raises(RunError, match=os.strerror(code)) as caught:
        begin_and_wait(writer, 4)
    assert caught.value.fix
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000002"]


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    writer = writer_in(tmp_path / "checkpoints")
    with pytest.raises(RunError, match="Saving a checkpoint failed") as caught:
        begin(writer, 2)
    assert caught.value.where == str(tmp_path / "checkpoints")
    assert (tmp_path / "checkpoints").read_text() == "mine"
    (tmp_path / "checkpoints").unlink()
    begin_and_wait(writer, 2)
    assert writer.finished() == [2]


def test_an_error_of_another_kind_is_told_too(tmp_path):
    writer = writer_in(tmp_path)
    writer.begin(2, {"value": float("nan")}, {})  # no JSON
    with pytest.raises(RunError, match="ValueError") as caught:
        writer.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    assert list(tmp_path.iterdir()) == []


def test_what_a_snapshot_cannot_hold_is_told_at_once(tmp_path):
    writer = writer_in(tmp_path)
    with pytest.raises(TypeError, match="value is a set"):
        writer.begin(2, {"value": {1}}, {})
    begin_and_wait(writer, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000004"]


def test_close_completes_what_is_under_way_and_raises_nothing(tmp_path, gate, monkeypatch, caplog):
    writer = writer_in(tmp_path)
    begin(writer, 2)
    threading.Timer(0.05, gate.set).start()
    writer.close()
    assert writer.folder.load(2).step == 2
    writer.close()
    assert writer.finished() == [2]
    monkeypatch.setattr(module, "write_safetensors", lambda *a: os.stat(tmp_path / "nothing"))
    begin(writer, 4)
    with caplog.at_level(logging.WARNING, "zoo"):
        writer.close()
    assert "step 4 was not saved" in caplog.text
    writer.wait()
    assert writer.folder.steps() == [2]
