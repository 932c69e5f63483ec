"""A small run of two processes that the tests of launchers share, and how far one has come."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import ROOT, as_options, image_folder, with_tiny

__all__ = ["PAIR", "STEPS", "environment", "images_of", "pair", "steps_of", "wait_until", "words"]

# 24 images in batches of 8: an epoch is 3 steps.
STEPS = 24
PAIR: dict[str, Any] = {
    "epochs": 8,
    "precision": "float64",
    "method__queue_length": 16,
    "method__queue_start_epoch": 1,
    "checkpoint__every_steps": 3,
    "checkpoint__every_epochs": None,
}


def images_of(factory: pytest.TempPathFactory) -> Path:
    """The folder of images, one for the whole test session."""
    folder = factory.getbasetemp() / "images-of-runs"
    return folder if folder.exists() else image_folder(folder)


def words(images: Path, out: Path, **overrides: Any) -> list[str]:
    """The command line of a run, after ``zoo``."""
    options = as_options(with_tiny(**{**PAIR, **overrides}))
    return ["pretrain", "--data", str(images), "--out", str(out), *options, "--lines"]


def environment(**more: str) -> dict[str, str]:
    """One thread for each process, whatever the machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def pair(factory: pytest.TempPathFactory) -> Path:
    """A run of two processes on this machine that nothing happened to, one for the whole test session."""
    out = factory.getbasetemp() / "undisturbed-pair"
    if not out.exists():
        launched = [sys.executable, "-m", "_zoo_entry", *words(images_of(factory), out), "--nproc", "2"]
        done = subprocess.run(
            launched, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("finished, ") == 1, done.stdout  # the first process speaks for both
    return out


def steps_of(run: Path) -> int:
    """Steps that a run has noted."""
    with contextlib.suppress(OSError):
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[Any], *logs: Path) -> None:
    """Until ``ready``; that the process ends before, or two minutes pass, is a failure."""
    end = time.monotonic() + 120
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail("".join(log.read_text("utf-8") for log in logs))
        time.sleep(0.01)
