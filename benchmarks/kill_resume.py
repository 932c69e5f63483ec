"""Kill -9 a run at random moments, resume it, and compare it bit for bit with an undisturbed one.

    python benchmarks/kill_resume.py [--kills 10] [--seed 0]

Three kinds of moments, dealt by the seed: at a random time after a random step; while a checkpoint is
being written (as soon as its temporary folder shows up); while the command is starting. Only the main
process is killed; its data workers must end by themselves. In the end every tensor and every value of
the last checkpoint (but the elapsed time) and step, loss and learning rate of every line of
``metrics.jsonl`` must be the same as in the run that was left alone. Ends with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from runner import load_average, write_result
from safetensors import safe_open

SETTINGS = {
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
WORKER_LIMIT = 15.0  # seconds until orphaned data workers must be gone
LOCK_LIMIT = 15.0  # seconds during which a resume may be told that the run is still being trained
LIMIT = 300.0  # seconds a single launch may take


def _launch(out: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the run, or go on with it if it is one already."""
    code = "from _zoo_entry import main; main()"
    command = [sys.executable, "-c", code, "pretrain", "--quiet"]
    if (out / "run.json").exists():
        command += ["--resume", str(out)]
    else:
        shutil.rmtree(out, ignore_errors=True)  # killed before it became a run
        command += ["swav_tiny", "--data", "builtin:photos", "--out", str(out)]
        for key, value in SETTINGS.items():
            command += ["--set", f"{key}={value}"]
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


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


def _wait(process: subprocess.Popen[bytes], log: Path, ready: Callable[[], bool], pause: float) -> None:
    """Wait until ``ready``; an end or a standstill of the process before that is an error."""
    began = time.monotonic()
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode}: {log.read_text('utf-8')}")
        if time.monotonic() - began > LIMIT:
            process.kill()
            raise RuntimeError(f"the run stood still for {LIMIT:.0f} s")
        time.sleep(pause)


def _launch_past_lock(out: Path, log: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Launch until the run's lock is free; returns the process and for how many seconds it was not."""
    began = time.monotonic()
    while True:
        tried = time.monotonic()
        fresh = not (out / "run.json").exists()
        environment = out / "environment.json"  # written as soon as the lock is held
        before = environment.stat().st_mtime_ns if environment.exists() else 0
        process = _launch(out, log)
        if fresh:
            return process, 0.0
        while process.poll() is None:
            if environment.exists() and environment.stat().st_mtime_ns != before:
                return process, tried - began
            time.sleep(0.02)
        refusal = log.read_text("utf-8")
        if "Another process" not in refusal or time.monotonic() - began > LOCK_LIMIT:
            raise RuntimeError(f"resuming ended with {process.returncode}: {refusal}")


def _kill_once(
    out: Path, log: Path, kind: str, step: int, dice: random.Random, pool: ThreadPoolExecutor
) -> tuple[dict[str, Any], Future[float | None]]:
    """Launch, wait for the moment, kill -9; the future tells when the data workers were gone."""
    locked, leftovers = 0.0, set(_half_written(out))
    if kind == "start":
        process = _launch(out, log)
        delay = dice.uniform(0.0, 4.0)
        time.sleep(delay)
        children = _children(process.pid)
    else:
        process, locked = _launch_past_lock(out, log)
        _wait(process, log, lambda: (_lines(out) or [{"step": -1}])[-1]["step"] >= step, 0.01)
        children = _children(process.pid)
        delay = dice.uniform(0.0, 0.3) if kind == "step" else dice.uniform(0.0, 0.02)
        if kind == "write":
            old = set(_half_written(out))
            _wait(process, log, lambda: bool(set(_half_written(out)) - old), 0.0)
        time.sleep(delay)
    process.kill()
    process.wait()
    lines = _lines(out)
    row = {
        "kind": kind,
        "after_step": step if kind != "start" else None,
        "delay": round(delay, 4),
        "last_logged_step": lines[-1]["step"] if lines else None,
        "half_written_checkpoint": bool(set(_half_written(out)) - leftovers),
        "data_workers": len(children),
        "lock_held_before_launch_seconds": round(locked, 2),
    }
    return row, pool.submit(_seconds_until_gone, children)


def _newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*"))


def _tensors(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    with safe_open(file, "pt") as tensors:
        loaded = {key: tensors.get_tensor(key).contiguous() for key in tensors.keys()}  # noqa: SIM118
    return {
        key: (str(t.dtype), list(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, t in loaded.items()
    }


def _compare(left: Path, right: Path) -> tuple[list[str], dict[str, int]]:
    """All differences between two finished runs, and how much was compared."""
    differences, counts = [], {"tensors": 0, "bytes": 0, "metrics_lines": 0}
    first, second = _newest(left), _newest(right)
    if first.name != second.name:
        differences.append(f"last checkpoint: {first.name} and {second.name}")
    for name in ("global", "rank-0"):
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
    return differences, counts


def _finish(out: Path, log: Path) -> float:
    """Run to the end; returns the seconds it took."""
    began = time.monotonic()
    process, _ = _launch_past_lock(out, log)
    if process.wait(timeout=LIMIT):
        raise RuntimeError(f"the run ended with {process.returncode}: {log.read_text('utf-8')}")
    return time.monotonic() - began


def _plan(kills: int, total: int, dice: random.Random) -> list[tuple[str, int]]:
    """(kind, step) of each kill, by step; about half the kills hit a write, one or more the start."""
    deck = (["write", "step", "write", "step", "start"] * kills)[:kills]
    dice.shuffle(deck)
    # The last steps stay free: a kill of kind "write" happens up to ``every_steps`` steps after its step.
    steps = sorted(dice.sample(range(1, total - 2 * SETTINGS["checkpoint.every_steps"]), kills))
    return list(zip(deck, steps, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    dice, load = random.Random(arguments.seed), load_average()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        calm, killed, log = Path(folder, "calm"), Path(folder, "killed"), Path(folder, "log.txt")
        seconds = _finish(calm, log)
        total = len(_lines(calm))
        print(f"undisturbed: {total} steps in {seconds:.0f} s")
        rows: list[dict[str, Any]] = []
        futures = []
        for kind, planned in _plan(arguments.kills, total, dice):
            seen = _lines(killed)
            step = max(planned, seen[-1]["step"] + 1) if seen else planned
            if kind == "start" and futures:
                futures[-1].result()  # else the launch may be refused, which is no kill
            row, gone = _kill_once(killed, log, kind, step, dice, pool)
            rows.append(row)
            futures.append(gone)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        _finish(killed, log)
        for row, gone in zip(rows, futures, strict=True):
            row["workers_gone_after_seconds"] = None if gone.result() is None else round(gone.result(), 2)
        differences, counts = _compare(calm, killed)
    orphans = [index for index, row in enumerate(rows) if row["workers_gone_after_seconds"] is None]
    hits = sum(row["half_written_checkpoint"] for row in rows)
    result = {
        "load_before": load,
        "seed": arguments.seed,
        "settings": SETTINGS,
        "undisturbed_seconds": seconds,
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
        f"{len(differences)} differences; data workers left over after {len(orphans)} kills"
    )
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
