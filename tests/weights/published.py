"""Small published models, homes of their own, and processes: what tests of the second half share."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tiny import ROOT, image_folder, train
from zoo.models.factory import create_trunk
from zoo.weights.bundle import Bundle, Description, write_bundle
from zoo.weights.card import model_card
from zoo.weights.hubs.local import LocalHub, Published

HOMES = {"ZOO_HOME": "home", "ZOO_CACHE": "cache", "ZOO_RUNS": "runs", "ZOO_RESULTS": "results"}
_KEPT: dict[str, Any] = {}


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Everything that the toolkit writes by itself goes below a folder; one thread."""
    for variable, name in HOMES.items():
        monkeypatch.setenv(variable, str(folder / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("zoo.engine.precision.processors", lambda: 1)


def describe(**changes: Any) -> Description:
    """What a narrow ResNet-18 says of itself."""
    fields: dict[str, Any] = {
        "arch": "resnet18",
        "stem": "imagenet",
        "base_planes": 8,
        "num_features": 64,
        "method": "swav",
        "preprocessing": {
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
            "resize": 40,
            "crop": 32,
            "interpolation": "bilinear",
        },
        "recipe": {"name": "swav_tiny", "epochs": 1},
        "data": {"sources": ["flowers"], "kind": "files", "count": 24},
        "lineage": {"run": "first", "step": 6, "total_steps": 6, "init_from": None},
        "versions": {"torch": "2"},
    }
    return Description(**{**fields, **changes})


def standard(arch: str = "resnet18", **changes: Any) -> Description:
    """What a network of the usual width says of itself."""
    features = 512 if arch in ("resnet18", "resnet34") else 2048
    return describe(arch=arch, base_planes=None, num_features=features, **changes)


def weights_of(what: Description, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state for the description's network, statistics of the norms included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunk = create_trunk(what.arch, stem=what.stem, base_planes=what.base_planes)
        for name, buffer in trunk.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0.0, 0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return trunk.state_dict()


def bundle_at(folder: Path, what: Description | None = None, seed: int = 0, **heads: torch.Tensor) -> Bundle:
    """A bundle in a new folder."""
    what = what or describe()
    folder.mkdir(parents=True)
    return write_bundle(folder, what, weights_of(what, seed), heads, model_card("me/small", what))


def publish(
    name: str = "me/small",
    seed: int = 0,
    tag: str | None = None,
    what: Description | None = None,
    hub: LocalHub | None = None,
    force: bool = False,
) -> Published:
    """Publish a small model to the local hub."""
    what = what or describe()
    trunk, card = weights_of(what, seed), model_card(name, what)
    return (hub or LocalHub()).publish(
        name, lambda folder: write_bundle(folder, what, trunk, {}, card), tag=tag, force=force
    )


def small_run(factory: pytest.TempPathFactory) -> Path:
    """A finished pretraining run of six steps (made once for all tests; read-only)."""
    if "run" not in _KEPT:
        with pytest.MonkeyPatch.context() as patch:
            isolate(patch, factory.mktemp("homes"))
            images = image_folder(factory.mktemp("pictures"))
            # As wide as is usual for the method's tests, with the full-size stem.
            _KEPT["run"] = train(images, factory.mktemp("runs") / "finished").path
    return _KEPT["run"]


def class_folders(
    folder: Path, classes: dict[str, int], count: int = 12, side: int = 32, seed: int = 0
) -> Path:
    """``count`` PNG files for each class: noise around the class's grey level, easy to tell apart."""
    rng = np.random.default_rng(seed)
    for name, level in classes.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            noise = rng.integers(-20, 21, (side, side, 3))
            pixels = np.clip(level + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index:03d}.png")
    return folder


def flip(file: Path, offset: int = -1, mask: int = 0x01) -> None:
    """Change bits of one byte in place, as a bad disk does: size and times stay."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[offset] ^= mask
    with open(file, "r+b") as handle:
        handle.write(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def in_fresh_process(code: str, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter with standard input closed; nothing of the tests is on its path."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, words)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def names_no_place(text: str, *places: Path) -> None:
    """A text that leaves the machine names no folder of it."""
    for place in (*places, ROOT, Path.home(), Path(sys.prefix)):
        if len(str(place)) > 1:
            assert str(place) not in text


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run ``zoo ...`` in this process: (exit code, standard output, standard error)."""
    from cli.main import run

    logger = logging.getLogger("zoo")
    before = (list(logger.handlers), logger.propagate, logger.level)

    def call(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            run([str(word) for word in words])
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    yield call
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def assert_clear(answer: tuple[int, str, str], *names: object, code: int = 2) -> None:
    """One message with a place and advice, no traceback, nothing on standard output."""
    status, out, err = answer
    assert (status, out) == (code, ""), err
    # What was loaded may have been said before.
    message = err[err.index("error: ") :]
    assert "Traceback" not in err and "Something unexpected" not in err
    assert len(message.splitlines()) <= 4
    for name in names:
        assert str(name) in message, err
