"""kill -9 at random moments, resumed, is the undisturbed run; polite signals have their exit codes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import pytest

from tiny import TINY, ZOO, as_options, assert_same_state, go_on, image_folder, trace, train

SETTINGS = {
    **TINY,
    "epochs": 20,
    "checkpoint.every_steps": 2,
    "method.queue_length": 16,
    "method.queue_start_epoch": 1,
}
STEPS = 60


def launch(*words, log):
    """The command on one processor, its output in a file."""

    def one_processor():
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    return subprocess.Popen(
        [ZOO, "pretrain", *map(str, words)],
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=one_processor,
        start_new_session=True,
    )


def wait_for_step(process, run, step, limit=90.0):
    """Until the run has logged ``step``; False if it ended first."""
    metrics, end = run / "metrics.jsonl", time.monotonic() + limit
    while time.monotonic() < end:
        if metrics.exists() and metrics.read_bytes().count(b"\n") > step:
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached in {limit} s")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Trained in this process: a run doesn't depend on the process it happens in either."""
    folder = tmp_path_factory.mktemp("undisturbed")
    data = image_folder(folder / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.engine.precision.processors", lambda: 1)
        run = train(data, folder / "run", **{key.replace(".", "__"): v for key, v in SETTINGS.items()})
    return data, run.path


def test_kill_at_random_moments(undisturbed, tmp_path):
    data, whole = undisturbed
    run, draw = tmp_path / "run", random.Random(20)
    words = ["swav_tiny", "--data", data, "--out", run, "--quiet", *as_options(SETTINGS)]
    killed = 0
    with open(tmp_path / "log", "wb") as log:
        for _, step in zip(range(3), sorted(draw.sample(range(1, STEPS - 20), 3)), strict=True):
            process = launch(*words, log=log)
            assert wait_for_step(process, run, step), (tmp_path / "log").read_text()
            time.sleep(draw.uniform(0, 0.03))  # somewhere inside a later step or a save
            process.kill()
            killed += process.wait() == -signal.SIGKILL  # on a busy machine the last one may be done already
            words = ["--resume", run, "--quiet"]
    assert killed >= 2
    done = go_on(run)
    assert (done.step, done.exit_code) == (STEPS, 0)
    assert trace(run) == trace(whole)
    assert_same_state(run, whole)
    assert not list(run.rglob("*.tmp"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_polite_signal_saves_and_says_how_to_go_on(undisturbed, tmp_path, number, code):
    data, whole = undisturbed
    run = tmp_path / "run"
    settings = {**SETTINGS, "checkpoint.every_steps": None, "checkpoint.every_epochs": None}
    words = ["swav_tiny", "--data", data, "--out", run, "--quiet", *as_options(settings)]
    with open(tmp_path / "log", "wb") as log:
        process = launch(*words, log=log)
        assert wait_for_step(process, run, 1), (tmp_path / "log").read_text()
        process.send_signal(number)
        assert process.wait(timeout=60) == code
    said = (tmp_path / "log").read_text()
    assert f"--resume {run}" in said
    assert "Traceback" not in said
    assert said.count("Ctrl-C again") == (number == signal.SIGINT)
    assert len(list((run / "checkpoints").glob("step-*"))) == 1  # only the one that the signal asked for
    assert go_on(run).exit_code == 0
    assert trace(run) == trace(whole)
    assert_same_state(run, whole)
