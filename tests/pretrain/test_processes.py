"""Runs of several processes: the same numbers as one, and nothing lost when one of them dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import (
    ROOT,
    as_options,
    assert_same_state,
    go_on,
    image_folder,
    lines,
    state,
    trace,
    train,
    with_tiny,
)
from zoo.engine.checkpoint import CheckpointFolder

# 40 images in batches of 8: 20 steps in 4 epochs; a queue from the second epoch on.
RUN: dict[str, Any] = {
    "epochs": 4,
    "precision": "float64",
    "method__queue_length": 16,
    "method__queue_start_epoch": 1,
    "checkpoint__every_steps": 3,
    "checkpoint__every_epochs": None,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"), count=40)


def command(images: Path, out: Path, processes: int, *more: str, **overrides: Any) -> list[str]:
    options = as_options(with_tiny(**{**RUN, **overrides}))
    words = ["pretrain", "swav_tiny", "--data", str(images), "--out", str(out), *options, "--lines"]
    return [sys.executable, "-m", "_zoo_entry", *words, "--nproc", str(processes), *more]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def alone(images, tmp_path_factory) -> Path:
    return train(images, tmp_path_factory.mktemp("alone") / "run", **RUN).path


@pytest.fixture(scope="module")
def pair(images, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("pair") / "run"
    done = run(command(images, out, 2))
    assert done.returncode == 0, done.stderr
    assert "synchronised" in done.stderr
    return out


def assert_close(one: Path, other: Path) -> None:
    """Losses, prototypes, weights, statistics and momentum agree; queues hold the same rows."""
    for (step, loss, lr), (other_step, other_loss, other_lr) in zip(trace(one), trace(other), strict=True):
        assert (step, lr) == (other_step, other_lr)
        assert loss == pytest.approx(other_loss, rel=1e-6)
    a, b = state(one), state(other)
    for key, value in a.items():
        if key.startswith("shared") and isinstance(value, torch.Tensor):
            assert torch.allclose(value.double(), b[key].double(), rtol=1e-6, atol=1e-8), key


@pytest.mark.parametrize("processes", [2, 4])
def test_the_number_of_processes_changes_no_number(images, tmp_path, alone, pair, processes):
    if processes == 2:
        out = pair
    else:
        out = tmp_path / "run"
        done = run(command(images, out, processes))
        assert done.returncode == 0, done.stderr
    assert len(trace(out)) == 20
    assert_close(alone, out)
    saved, _ = CheckpointFolder(out / "checkpoints").newest()
    assert saved.world_size == processes
    assert {f"rank-{rank}.json" for rank in range(processes)} < {f.name for f in saved.path.iterdir()}
    whole = state(alone)["local/learner/queue"]
    mine = state(out)["local/learner/queue"]  # that of rank 0: the first rows of each batch
    share = 8 // processes
    assert torch.allclose(mine, whole.unflatten(1, (2, 8))[:, :, :share].flatten(1, 2), atol=1e-6)


def test_a_killed_process_costs_nothing(images, tmp_path, pair):
    out = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = command(images, out, 2, "--restarts", "2")
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_step(out, 8, process)
        os.kill(worker(process.pid, rank=1), signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "killed by SIGKILL" in errors
    assert "going on with" in errors
    assert_same_state(pair, out)
    assert trace(out) == trace(pair)


def test_a_stop_is_saved_and_taken_up_by_another_number_of_processes(images, tmp_path, alone, pair):
    out = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(images, out, 2), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for_step(out, 7, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 75, errors
    assert errors.count(f"--resume {out}") == 1
    assert 7 <= len(lines(out)) < 20
    go_on(out)
    assert_close(alone, out)
    assert lines(out)[0]["loss"] == lines(pair)[0]["loss"]


def test_a_batch_that_cannot_be_shared_is_bad_input_for_all(images, tmp_path):
    done = run(command(images, tmp_path / "run", 3))
    assert done.returncode == 2
    assert done.stderr.count("can't be shared equally by 3 process(es)") == 1  # not by each of them
    assert not (tmp_path / "run").exists()


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            if (run / "metrics.jsonl").read_bytes().count(b"\n") >= step:
                return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"the run did not get that far: {process.communicate()[1]}")


def worker(launcher: int, rank: int) -> int:
    """The process of a rank: a child of the launcher with that number in its environment."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"\0RANK={rank}\0".encode() in b"\0" + (entry / "environ").read_bytes():
                return int(entry.name)
    pytest.fail(f"no process of rank {rank}")
