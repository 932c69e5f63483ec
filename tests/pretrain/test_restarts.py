"""Processes that torchrun or SLURM starts again find the run that they had begun, and no other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tiny import StopAfter, assert_same_state, go_on, lines, train, with_tiny
from zoo.errors import InputError, Stopped
from zoo.pretrain.run import start
from zoo.pretrain.rundir import RunFolder

VARIABLES = (
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
JOB = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sets what a launcher tells its processes, and nothing else of that kind."""
    monkeypatch.setenv("ZOO_RUNS", str(tmp_path / "runs"))

    def tell(**variables: str) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    tell()
    return tell


def killed(images: Path, out: Path | None) -> Path:
    """A run that ended after four of its six steps, and not because it was asked to."""
    run = start(
        data=str(images), out=out, overrides=with_tiny(), callbacks=(StopAfter(4),), progress="quiet"
    ).path
    info = RunFolder(run).read()
    info.pop("stopped", None)
    RunFolder(run).write_info(info)
    return run


def again(images: Path, out: Path | None = None) -> Path:
    return start(data=str(images), out=out, overrides=with_tiny(), progress="quiet").path


@pytest.mark.parametrize("counter", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_named_folder_is_gone_on_with(images, finished, tmp_path, launched, counter):
    run = killed(images, tmp_path / "run")
    with pytest.raises(InputError, match="not empty"):
        again(images, run)
    launched(**{counter: "0"})
    with pytest.raises(InputError, match="not empty"):
        again(images, run)
    launched(**{counter: "1"})
    assert again(images, run) == run
    assert len(lines(run)) == 6
    assert_same_state(run, finished.path)


def test_a_restart_before_the_run_was_begun_starts_it(images, tmp_path, launched):
    launched(TORCHELASTIC_RESTART_COUNT="1", TORCHELASTIC_RUN_ID="a")
    assert len(lines(again(images, tmp_path / "run"))) == 6
    assert len(lines(again(images))) == 6


@pytest.mark.parametrize(
    ("first", "restarted"),
    [
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "a"}),
        (JOB, {**JOB, "SLURM_RESTART_COUNT": "1"}),
        ({**JOB, "TORCHELASTIC_RUN_ID": "none"}, {**JOB, "TORCHELASTIC_RESTART_COUNT": "2"}),
    ],
)
def test_a_folder_that_was_not_named_is_found_by_the_launch(images, tmp_path, launched, first, restarted):
    launched(**first)
    mine = killed(images, None)
    launched(TORCHELASTIC_RUN_ID="another")
    other = killed(images, None)
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "run.json").write_text("{}")
    launched(**restarted)
    assert again(images) == mine
    assert (len(lines(mine)), len(lines(other))) == (6, 4)


def test_torchruns_default_name_is_none(images, launched, caplog):
    launched(TORCHELASTIC_RUN_ID="none")
    last_week = killed(images, None)
    launched(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="1")
    new = again(images)
    assert new != last_week
    assert len(lines(last_week)) == 4
    assert "--rdzv-id" in caplog.text


def test_a_restart_that_nobody_counts(images, tmp_path, launched, monkeypatch):
    """When a machine comes or leaves, torchrun starts all processes again, as the same launch."""
    launched(TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="0")
    run = killed(images, tmp_path / "run")
    launched(TORCHELASTIC_RUN_ID="b", TORCHELASTIC_RESTART_COUNT="0")
    with pytest.raises(InputError, match="not empty"):
        again(images, run)
    launched(TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="0")
    with monkeypatch.context() as patch, pytest.raises(InputError, match="not empty"):
        patch.setattr(sys, "argv", ["another", "command"])
        again(images, run)
    assert again(images, run) == run
    assert len(lines(run)) == 6


def test_a_stop_is_not_undone_by_a_restart(images, tmp_path, launched):
    run = tmp_path / "run"
    launched(TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="0")
    assert train(images, run, callbacks=(StopAfter(4),)).exit_code == 75
    launched(TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="1")
    for restart in (lambda: again(images, run), lambda: again(images, None), lambda: go_on(run)):
        with pytest.raises(Stopped, match="asked to stop") as caught:
            restart()
        assert caught.value.exit_code == 75
        assert f"--resume {run}" in str(caught.value)
        if not (tmp_path / "runs").exists():  # so that it is found by its launch as well
            (tmp_path / "runs").mkdir()
            (tmp_path / "runs" / "run").symlink_to(run)
    assert len(lines(run)) == 4
    launched(TORCHELASTIC_RUN_ID="b", TORCHELASTIC_RESTART_COUNT="0")
    assert go_on(run).exit_code == 0


def test_slurm_goes_on_after_a_stop(images, tmp_path, launched):
    """Its stops are what a job is queued again for, also where torchrun is what the job starts."""
    run = tmp_path / "run"
    launched(**JOB, TORCHELASTIC_RESTART_COUNT="0")
    assert train(images, run, callbacks=(StopAfter(4),)).exit_code == 75
    launched(**JOB, TORCHELASTIC_RESTART_COUNT="0", SLURM_RESTART_COUNT="1")
    assert again(images, run) == run
    assert "stopped" not in RunFolder(run).read()
