"""Commands of our own in SLURM's place."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.main import run as zoo_command

submitit = pytest.importorskip("submitit")

JOB = "4711"

# Starts SLURM_NTASKS tasks, notes their numbers, and ends all when one leaves with anything but 0.
SRUN = """
words = sys.argv[1:]
output = words[words.index("--output") + 1]
count = int(os.environ["SLURM_NTASKS"])
tasks = []
for rank in range(count):
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "0"}
    place["SLURM_STEP_NODELIST"] = "127.0.0.1"
    log = open(output.replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", str(rank)), "a")
    python = words[words.index("-u") - 1:]
    tasks.append(subprocess.Popen(python, env={**os.environ, **place}, stdout=log, stderr=log))
Path(os.environ["TASKS"]).write_text(" ".join(str(task.pid) for task in tasks))
codes = {}
while len(codes) < count:
    for rank, task in enumerate(tasks):
        if task.poll() is not None and rank not in codes:
            codes[rank] = task.returncode
            if task.returncode:
                for other in tasks:
                    other.terminate()
    time.sleep(0.02)
sys.exit(max(abs(code) for code in codes.values()))
"""


def command(folder: Path, name: str, body: str) -> None:
    """A program of this name; ``calls`` in its folder notes what it was called with."""
    file = folder / name
    start = f"""\
        #!{sys.executable} -SE
        import os, signal, subprocess, sys, time
        from pathlib import Path
        with open({str(folder / "calls")!r}, "a") as calls:
            calls.write(" ".join([{name!r}, *sys.argv[1:]]) + "\\n")
        """
    file.write_text(textwrap.dedent(start) + textwrap.dedent(body), "utf-8")
    file.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs on the PATH: sbatch keeps the script, scontrol agrees, the job is running."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    command(folder, "sbatch", f"print('Submitted batch job {JOB}')")
    command(folder, "scontrol", "")
    command(folder, "squeue", "print('RUNNING')")
    command(folder, "srun", SRUN)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SUBMITIT_"))]:
        monkeypatch.delenv(name)
    return folder


@pytest.fixture
def zoo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[Any, str, str]]]:
    """Runs a command in a folder of its own: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("zoo")
    before = logger.handlers, logger.propagate, logger.level

    def run(*words: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as left:
            zoo_command(list(words))
        return left.value.code, *capsys.readouterr()

    yield run
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def calls(cluster: Path, name: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        said = (cluster / "calls").read_text("utf-8").splitlines()
        return [call.removeprefix(f"{name} ") for call in said if call.split()[0] == name]
    return []


def sent(logs: Path) -> Any:
    return submitit.core.utils.DelayedSubmission.load(logs / f"{JOB}_submitted.pkl").function
