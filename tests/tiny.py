"""Tiny images, a tiny recipe and runs of it: what the tests train on.

Kept out of ``conftest.py`` so that test modules can import it by name (pytest puts this folder on
``sys.path``) and a subprocess can too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.loop import Callback, StepRecord
from zoo.pretrain.run import RunResult, resume, start

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
ZOO = Path(sys.executable).with_name("zoo")

# 24 images and batches of 8: an epoch is 3 steps.
TINY: dict[str, Any] = {
    "trunk.base_planes": 8,
    "views.size": [16, 8],
    "views.count": [2, 1],
    "method.prototypes": 8,
    "method.hidden": 16,
    "method.dim": 8,
    "method.freeze_prototypes_steps": 0,
    "batch_size": 8,
    "epochs": 2,
    "precision": "float32",
    "device": "cpu",
    "data.workers": 0,
}


def pixels(seed: int, side: int = 20) -> np.ndarray:
    """A smooth, coloured picture: uint8, side x side x 3."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC))


def save_image(path: Path, seed: int, side: int = 20) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, side)).save(path)
    return path


def image_folder(folder: Path, count: int = 24, classes: int = 2, side: int = 20) -> Path:
    """``count`` PNG files in ``classes`` sub-folders (0: flat)."""
    for i in range(count):
        place = folder / f"class{i % classes}" if classes else folder
        save_image(place / f"{i:03d}.png", i, side)
    return folder


def half_jpeg(path: Path, seed: int = 0) -> Path:
    """The first half of a JPEG's bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name("whole.tmp")
    Image.fromarray(pixels(seed, 64)).save(whole, "JPEG")
    data = whole.read_bytes()
    whole.unlink()
    path.write_bytes(data[: len(data) // 2])
    return path


def train(
    data: Path | str | list[str],
    out: Path,
    *,
    init_from: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    **overrides: Any,
) -> RunResult:
    """A quiet tiny run; dots in keys are written as two underscores (``method__prototypes=4``)."""
    return start(
        "swav_tiny",
        data=[str(data)] if isinstance(data, Path) else data,
        out=out,
        overrides=with_tiny(**overrides),
        init_from=init_from,
        callbacks=callbacks,
        progress="quiet",
    )


def go_on(run: Path, *, callbacks: tuple[Callback, ...] = (), **overrides: Any) -> RunResult:
    """Resume a run quietly."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return resume(run, overrides=dotted, callbacks=callbacks, progress="quiet")


def with_tiny(**overrides: Any) -> dict[str, Any]:
    return {**TINY, **{key.replace("__", "."): value for key, value in overrides.items()}}


def as_options(overrides: dict[str, Any]) -> list[str]:
    """The same overrides for the command line."""
    return [word for key, value in overrides.items() for word in ("--set", f"{key}={json.dumps(value)}")]


class StopAfter(Callback):
    """Stops a run by its own signal after a step, as a preempting scheduler would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: StepRecord) -> None:
        if record.step + 1 == self.step:
            import signal

            os.kill(os.getpid(), signal.SIGUSR1)


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def trace(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, lr) of each line."""
    return [(line["step"], line["loss"], line["lr"]) for line in lines(run)]


def state(run: Path) -> dict[str, Any]:
    """Everything in the newest checkpoint, flat, without wall-clock time."""
    checkpoint, problems = CheckpointFolder(run / "checkpoints").newest()
    assert checkpoint is not None, problems
    out: dict[str, Any] = {}
    _flatten({"shared": checkpoint.shared, "local": checkpoint.local}, "", out)
    out.pop("shared/elapsed")
    return out


def _flatten(value: Any, path: str, out: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(item, f"{path}/{key}" if path else str(key), out)
    elif isinstance(value, list | tuple):
        _flatten(dict(enumerate(value)), path, out)
    else:
        out[path] = value


def assert_same_state(first: Path, second: Path) -> None:
    """Two runs' newest checkpoints hold the same bits: weights, optimizer, queue, generator, step."""
    a, b = state(first), state(second)
    assert a.keys() == b.keys()
    differing = [
        key
        for key, value in a.items()
        if not (torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key])
    ]
    assert differing == []
    assert any("momentum" in key or "exp_avg" in key for key in a)
