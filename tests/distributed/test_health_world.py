"""The doctor of a run of two processes: all stop with the first one, for good, and all say what they had."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from distributed.training import PAIR, environment, images_of, words
from tiny import ROOT, StopAfter, trace, train
from zoo.engine.checkpoint import CheckpointFolder
from zoo.pretrain.collapse import read_events


def launched(images, out, *more: str, **overrides: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "_zoo_entry", *words(images, out, **overrides), "--nproc", "2", *more]
    paths = environment(PYTHONPATH=str(ROOT / "tests"))
    return subprocess.run(
        command, cwd=ROOT, env=paths, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_collapse_stops_both_and_nothing_is_started_again(tmp_path_factory, tmp_path):
    images, plant = images_of(tmp_path_factory), {"method__epsilon": 5.0, "health__every": 2}
    done = launched(images, tmp_path / "run", "--stop-on-collapse", **plant)
    assert done.returncode == 1, done.stderr
    (event,) = read_events(tmp_path / "run" / "events.jsonl")
    assert (event["name"], event["step"]) == ("uniform-codes", 4)
    assert done.stderr.count("The run was stopped and saved at step 5") >= 1
    assert "starting all" not in done.stderr and "Traceback" not in done.stderr
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").steps()[-1] == 5
    settings = {**PAIR, "method__epsilon": 5.0, "health__every": 0}
    alone = train(images, tmp_path / "alone", **settings, callbacks=(StopAfter(5),))
    losses = [loss for _, loss, _ in trace(tmp_path / "run")]
    assert losses == pytest.approx([loss for _, loss, _ in trace(alone.path)], rel=1e-9)


def broken(picture):
    """Views for ``--views``; those of dark pictures are not finite."""
    import numpy as np
    import torch

    small = torch.from_numpy(np.array(picture.resize((12, 12)))).permute(2, 0, 1).float() / 255
    bad = float("nan") if np.array(picture)[0, 0, 0] < 60 else 1.0
    return [small * bad, small.flip(2)]


def test_a_loss_that_is_not_finite_is_told_by_both(tmp_path_factory, tmp_path):
    place = f"{__name__}:broken"
    done = launched(images_of(tmp_path_factory), tmp_path / "run", "--views", place, "--restarts", "0")
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "run" / "nonfinite.json").read_text("utf-8"))
    assert [process["rank"] for process in found["processes"]] == [0, 1]
    assert all(len(process["images"]) == 4 for process in found["processes"])
    images = [image for process in found["processes"] for image in process["images"]]
    assert len({image["file"] for image in images}) == 8
    sick = [process for process in found["processes"] if any(len(image) > 2 for image in process["images"])]
    assert sick and all(process["loss"] == "nan" for process in sick)
    assert "nonfinite.json" in done.stderr
