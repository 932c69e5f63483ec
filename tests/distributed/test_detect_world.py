"""Detection in processes that somebody else started: torchrun, or SLURM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny import ROOT
from transfer.detect.photos import write_photos_voc
from weights.published import bundle_at, isolate
from zoo.engine.slurm import QueuedCommand

from .cluster import JOB, cluster, sent, zoo

__all__ = ["cluster", "zoo"]  # fixtures

FLAGS = [
    "--steps",
    "1",
    "--min-size",
    "64",
    "--max-size",
    "96",
    "--limit",
    "2",
    "--precise-batches",
    "1",
    "--precision",
    "float32",
    "--batch-size",
    "2",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and a small folder of boxes."""
    isolate(monkeypatch, tmp_path / "homes")
    monkeypatch.setattr("transfer.detect.photos._COUNTS", {"trainval": 8, "test": 4})
    bundle_at(tmp_path / "model")
    write_photos_voc(tmp_path / "boxes")
    return tmp_path


def torchrun(place: Path, *words: object) -> subprocess.CompletedProcess[str]:
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "_zoo_entry"]
    detect = ["transfer", "detect", "--model", place / "model", *FLAGS, *words]
    return subprocess.run(
        [sys.executable, *agent, *map(str, detect)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_torchruns_processes_train_one_detector(place: Path) -> None:
    done = torchrun(place, "--dataset", place / "boxes", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # the first process alone speaks
    (folder,) = (place / "homes" / "results").iterdir()  # one for both
    assert answer["path"] == str(folder / "result.json") and json.loads((folder / "result.json").read_text())
    assert answer["details"]["trained_by"]["batch"] == 2
    lines = (folder / "run-0" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1 and done.stderr.count("protocol: small") == 1


def test_what_is_wrong_is_said_once(place: Path) -> None:
    (place / "boxes/VOC2007/JPEGImages/test000.jpg").write_bytes(b"no picture")
    done = torchrun(place, "--dataset", place / "boxes")
    assert done.returncode and done.stdout == ""
    assert done.stderr.count("This is a text file, not a picture") == 1
    assert not list((place / "homes" / "results").iterdir())


def test_detection_as_a_job(cluster: Path, place: Path, zoo: Any) -> None:
    code, said, error = zoo("transfer", "detect", *FLAGS, "--slurm", "nodes=2,tasks=1,partition=a")
    assert code == 0, error
    (folder,) = (place / "homes" / "results").glob("detect-*[0-9]")
    assert f"job {JOB}: 2 node(s) x 1 task(s)" in said and f"run:    {folder}\n" in said
    words = ["-m", "_zoo_entry", "transfer", "detect", *FLAGS, "--out", str(folder)]
    assert sent(folder.with_name(f"{folder.name}.slurm")) == QueuedCommand(words, str(folder), 100)
    for words, message in (
        (("--slurm", "nodes=1", "--nproc", "2"), "can't be used together"),
        (("--slurm", "nodes=1", "--runs", "0"), "greater than or equal to 1"),
    ):
        code, said, error = zoo("transfer", "detect", *words)
        assert (code, said) == (2, "") and message in error
