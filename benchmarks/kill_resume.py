"""Kill -9 a run at random moments, resume it, and compare it bit for bit with an undisturbed one.

    python benchmarks/kill_resume.py [--kills 20] [--processes 1 2] [--seed 0]

Half of the kills hit a run of one process, half one of two (``--nproc 2``). Three kinds of moments, dealt
by the seed: at a random time after a random step; while a checkpoint is being written in the background (as
soon as its temporary folder shows up); while the command is starting. And these victims: ``all``, the whole
tree of processes; ``main``, the only or the launching process, whose children must end by themselves; or
``rank 0`` or ``rank 1``, after which the launcher must start all again and go on without help.

In the end every tensor and every value of the last checkpoint (but the elapsed time) and step, loss and
learning rate of every line of ``metrics.jsonl`` must be the same as in the run that was left alone. Ends
with 1 on any difference, and if a process outlived a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from runner import load_average, write_result
from safetensors import safe_open

SETTINGS: dict[str, Any] = {
    "trunk.base_planes": 16,
    "epochs": 2,
    "views.count": "[2, 1]",
    "method.queue_length": 128,
    "method.queue_start_epoch": 0,
    "checkpoint.every_epochs": "null",
    "checkpoint.every_steps": 5,
    "data.workers": 1,
    "device": "cpu",
}
WORKER_LIMIT = 30.0  # seconds until what a killed process leaves behind must be gone
LOCK_LIMIT = 15.0  # seconds during which a resume may be told that the run is still being trained
LIMIT = 300.0  # seconds a single launch may take


def _processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent, state) of all living processes."""
    text = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split(None, 2) for line in text.splitlines())
    return {int(pid): (int(parent), state) for pid, parent, state in rows if not state.startswith("Z")}


def _children(pid: int) -> set[int]:
    """All descendants of a process."""
    processes, found, fresh = _processes(), set[int](), {pid}
    while fresh:
        fresh = {child for child, (parent, _) in processes.items() if parent in fresh} - found
        found |= fresh
    return found


def _seconds_until_gone(pids: set[int]) -> float | None:
    """How long it takes until none of the processes lives; None: longer than allowed."""
    began = time.monotonic()
    while time.monotonic() - began < WORKER_LIMIT:
        if not pids & _processes().keys():
            return time.monotonic() - began
        time.sleep(0.1)
    return None


def _lines(out: Path) -> list[dict[str, Any]]:
    """The whole lines of ``metrics.jsonl``."""
    try:
        data = (out / "metrics.jsonl").read_bytes()
    except OSError:
        return []
    return [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def _half_written(out: Path) -> list[str]:
    try:
        return [name for name in os.listdir(out / "checkpoints") if name.endswith(".tmp")]
    except OSError:
        return []


def _ranks(launcher: int) -> dict[int, int]:
    """rank -> pid of the processes that a launcher has started."""
    found = {}
    for pid, (parent, _) in _processes().items():
        with contextlib.suppress(OSError):
            if parent == launcher:
                for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if entry.startswith(b"RANK="):
                        found[int(entry[5:])] = pid
    return found


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Subject:
    """A run that is killed again and again, and the command that trains it, if that is alive."""

    out: Path
    log: Path
    processes: int
    dice: random.Random
    pool: ThreadPoolExecutor
    command: subprocess.Popen[bytes] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    gone: list[Future[float | None]] = field(default_factory=list)

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the run, or go on with it if it is one already."""
        words = ["pretrain", "--quiet"]
        if (self.out / "run.json").exists():
            words += ["--resume", str(self.out)]
        else:
            shutil.rmtree(self.out, ignore_errors=True)  # killed before it became a run
            words += ["swav_tiny", "--data", "builtin:photos", "--out", str(self.out)]
            for key, value in SETTINGS.items():
                words += ["--set", f"{key}={value}"]
        if self.processes > 1:
            words += ["--nproc", str(self.processes), "--restarts", "1000"]
        with open(self.log, "wb") as file:
            started = subprocess.Popen(
                [sys.executable, "-m", "_zoo_entry", *words], stdout=file, stderr=file, start_new_session=True
            )
        self.command = started
        return started

    def launch_past_lock(self) -> float:
        """Launch until the run's lock is free; returns for how many seconds it was not."""
        began = time.monotonic()
        while True:
            tried = time.monotonic()
            fresh = not (self.out / "run.json").exists()
            environment = self.out / "environment.json"  # written as soon as the lock is held
            before = environment.stat().st_mtime_ns if environment.exists() else 0
            command = self.launch()
            if fresh:
                return 0.0
            while command.poll() is None:
                if environment.exists() and environment.stat().st_mtime_ns != before:
                    return tried - began
                time.sleep(0.02)
            refusal = self.log.read_text("utf-8")
            if "Another process" not in refusal or time.monotonic() - began > LOCK_LIMIT:
                raise RuntimeError(f"resuming ended with {command.returncode}: {refusal}")

    def wait(self, ready: Callable[[], bool], pause: float) -> None:
        """Wait until ``ready``; an end or a standstill of the command before that is an error."""
        assert self.command is not None
        began = time.monotonic()
        while not ready():
            if self.command.poll() is not None:
                raise RuntimeError(
                    f"the run ended with {self.command.returncode}: {self.log.read_text('utf-8')}"
                )
            if time.monotonic() - began > LIMIT:
                _kill({self.command.pid, *_children(self.command.pid)})
                raise RuntimeError(f"the run stood still for {LIMIT:.0f} s: {self.log.read_text('utf-8')}")
            time.sleep(pause)

    def wait_until_gone(self) -> None:
        """Wait for what the kills so far left behind."""
        for earlier in self.gone:
            earlier.result()

    def kill(self, kind: str, planned: int, victim: str) -> None:
        """Launch, if nothing runs, wait for the moment, kill -9, note what happened."""
        locked, leftovers, restarting = 0.0, set(_half_written(self.out)), self.command is not None
        seen = _lines(self.out)
        step = max(planned, seen[-1]["step"] + 1) if seen else planned
        if kind == "start":
            if not restarting:
                self.wait_until_gone()  # else the launch may be refused, which is no kill
                self.launch()
            delay = self.dice.uniform(0.0, 4.0)
        else:
            if not restarting:
                if self.processes > 1:  # a launcher that was killed leaves ranks that save first
                    self.wait_until_gone()
                locked = self.launch_past_lock()
            self.wait(lambda: (_lines(self.out) or [{"step": -1}])[-1]["step"] >= step, 0.01)
            delay = self.dice.uniform(0.0, 0.3) if kind == "step" else self.dice.uniform(0.0, 0.02)
        command = self.command
        assert command is not None
        chosen = _ranks(command.pid)[int(victim[5:])] if victim.startswith("rank") else command.pid
        below = _children(chosen)
        if kind == "write":
            old = set(_half_written(self.out))
            self.wait(lambda: bool(set(_half_written(self.out)) - old), 0.0)
        time.sleep(delay)
        if kind == "start":
            below = _children(chosen)
        if victim == "all":
            _kill(below)
        _kill({chosen})
        if chosen == command.pid:
            command.wait()
            self.command = None
        lines = _lines(self.out)
        self.rows.append(
            {
                "processes": self.processes,
                "kind": kind,
                "victim": victim,
                "after_step": step if kind != "start" else None,
                "delay": round(delay, 4),
                "last_logged_step": lines[-1]["step"] if lines else None,
                "half_written_checkpoint": bool(set(_half_written(self.out)) - leftovers),
                "processes_below": len(below),
                "lock_held_before_launch_seconds": round(locked, 2),
            }
        )
        self.gone.append(self.pool.submit(_seconds_until_gone, below))

    def finish(self) -> float:
        """Run to the end; returns the seconds it took."""
        began = time.monotonic()
        if self.command is None:
            self.wait_until_gone()
            self.launch_past_lock()
        assert self.command is not None
        if self.command.wait(timeout=LIMIT):
            raise RuntimeError(f"the run ended with {self.command.returncode}: {self.log.read_text('utf-8')}")
        return time.monotonic() - began


def _newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*"))


def _tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    with safe_open(file, "pt") as tensors:
        loaded = {key: tensors.get_tensor(key).contiguous() for key in tensors.keys()}  # noqa: SIM118
    return {
        key: (str(t.dtype), list(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, t in loaded.items()
    }


def _compare(left: Path, right: Path, processes: int) -> tuple[list[str], dict[str, int]]:
    """All differences between two finished runs, and how much was compared."""
    differences, counts = [], {"tensors": 0, "bytes": 0, "metrics_lines": 0}
    first, second = _newest(left), _newest(right)
    if first.name != second.name:
        differences.append(f"last checkpoint: {first.name} and {second.name}")
    for name in ("global", *(f"rank-{rank}" for rank in range(processes))):
        ours, theirs = (_tensors(folder / f"{name}.safetensors") for folder in (first, second))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                differences.append(f"{name}.safetensors: {key}")
        counts["tensors"] += len(ours)
        counts["bytes"] += sum(len(value[2]) for value in ours.values())
        plain = [json.loads((folder / f"{name}.json").read_text("utf-8")) for folder in (first, second)]
        for values in plain:
            values.pop("elapsed", None)
        if plain[0] != plain[1]:
            differences.append(f"{name}.json")
    logs = [[(x["step"], x["loss"], x["lr"]) for x in _lines(out)] for out in (left, right)]
    counts["metrics_lines"] = len(logs[0])
    if len(logs[0]) != len(logs[1]):
        differences.append(f"metrics.jsonl: {len(logs[0])} and {len(logs[1])} lines")
    differences += [f"metrics.jsonl: {a} and {b}" for a, b in zip(*logs, strict=False) if a != b]
    return [f"{processes} process(es): {difference}" for difference in differences], counts


def _plan(kills: int, total: int, processes: int, dice: random.Random) -> list[tuple[str, int, str]]:
    """(kind, step, victim) of each kill, by step; about half of them hit a write, a fifth the start."""
    deck = (["write", "step", "write", "step", "start"] * kills)[:kills]
    victims = ["main", "all"] if processes == 1 else ["rank 1", "all", "rank 0", "main"]
    whom = (victims * kills)[:kills]
    dice.shuffle(deck)
    dice.shuffle(whom)
    # What is starting has no ranks yet.
    whom = [
        "all" if kind == "start" and w.startswith("rank") else w for kind, w in zip(deck, whom, strict=True)
    ]
    # The last steps stay free: a kill of kind "write" happens up to ``every_steps`` steps after its step.
    steps = sorted(dice.sample(range(1, total - 2 * SETTINGS["checkpoint.every_steps"]), kills))
    return list(zip(deck, steps, whom, strict=True))


def _measure(processes: int, kills: int, dice: random.Random) -> dict[str, Any]:
    """One run left alone and one killed again and again: what the result says of this number of processes."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        calm = Subject(folder / "calm", folder / "calm.txt", processes, dice, pool)
        killed = Subject(folder / "killed", folder / "killed.txt", processes, dice, pool)
        seconds = calm.finish()
        total = len(_lines(calm.out))
        print(f"{processes} process(es), undisturbed: {total} steps in {seconds:.0f} s", flush=True)
        try:
            for kind, step, victim in _plan(kills, total, processes, dice):
                killed.kill(kind, step, victim)
                print(", ".join(f"{key} {value}" for key, value in killed.rows[-1].items()), flush=True)
            killed.finish()
        finally:
            if killed.command is not None:
                _kill({killed.command.pid, *_children(killed.command.pid)})
        for row, gone in zip(killed.rows, killed.gone, strict=True):
            row["gone_after_seconds"] = None if gone.result() is None else round(gone.result() or 0.0, 2)
        differences, counts = _compare(calm.out, killed.out, processes)
    return {"seconds": seconds, "differences": differences, "compared": counts, "kills": killed.rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of all numbers of processes together")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    dice, load, began = random.Random(arguments.seed), load_average(), time.monotonic()
    share = -(-arguments.kills // len(arguments.processes))
    parts = {count: _measure(count, share, dice) for count in arguments.processes}
    rows = [row for part in parts.values() for row in part["kills"]]
    differences = [difference for part in parts.values() for difference in part["differences"]]
    counts = {
        key: sum(part["compared"][key] for part in parts.values())
        for key in ("tensors", "bytes", "metrics_lines")
    }
    orphans = [index for index, row in enumerate(rows) if row["gone_after_seconds"] is None]
    hits = sum(row["half_written_checkpoint"] for row in rows)
    result = {
        "load_before": load,
        "seed": arguments.seed,
        "settings": SETTINGS,
        "seconds": time.monotonic() - began,
        "undisturbed_seconds": {str(count): part["seconds"] for count, part in parts.items()},
        "compared": counts,
        "differences": differences,
        "kills": rows,
        "half_written_checkpoints": hits,
        "orphans_left": orphans,
        "met": not differences and not orphans,
    }
    write_result("kill_resume", result)
    for difference in differences[:20]:
        print(f"DIFFERENT: {difference}")
    print(
        f"{len(rows)} kills, {hits} while a checkpoint was being written; compared {counts['tensors']} "
        f"tensors ({counts['bytes']} bytes) and {counts['metrics_lines']} log lines: "
        f"{len(differences)} differences; processes left over after {len(orphans)} kills"
    )
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
