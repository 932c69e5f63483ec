"""Training steps of two sides, each in a process of its own, in turn: their time, and their peak memory.

A side's script is run with ``--serve SIDE`` and calls ``serve``; ``compare`` tells both when to step. Where a script
has one comparison, ``arguments`` reads its options and ``conclude`` prints and writes its figures. Linux only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from runner import load_average, write_result
from torch import nn

from zoo.engine.precision import processors

__all__ = ["Side", "Step", "arguments", "compare", "conclude", "resident", "serve", "show"]

SIDES = ("ours", "plain")

Step = Callable[[], float]  # trains once, gives the loss


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status: VmRSS (resident now) or VmHWM (at its peak)."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def arguments(description: str | None, batch: int, pairs: int) -> argparse.Namespace:
    """``batch``, ``pairs``, ``threads``, which torch then has, and ``serve``: the side that this process is, or None.

    Args:
        description: the script's docstring.
        batch: images of a step, by default.
        pairs: timed pairs, by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=batch, help="images")
    parser.add_argument("--pairs", type=int, default=pairs, help="timed pairs")
    parser.add_argument("--threads", type=int, default=processors(), help="of torch")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def serve(build: Callable[[dict[str, Any]], Step], warmup: int) -> None:
    """Build one side and step at each line of input, answering with JSON.

    Peak memory is by how much resident memory grew at its peak over all steps, counted from before ``build``,
    with everything imported: weights, gradients, the optimizer's state, activations and workspaces.

    Args:
        build: makes the step; what it adds to the dictionary is told first.
        warmup: steps before the first answer.
    """
    logging.disable(logging.WARNING)  # a batch may be smaller than the recipe's, and the recipe says so
    with torch.no_grad():
        nn.Conv2d(3, 8, 3)(torch.zeros(1, 3, 8, 8))  # what is loaded at first use is loaded now
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the high-water mark starts from here
    before = resident("VmRSS")
    about: dict[str, Any] = {}
    step = build(about)
    losses = [step() for _ in range(warmup)]
    print(json.dumps({"first_loss": losses[0], **about}), flush=True)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        step()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        grown = resident("VmHWM") - before
        print(json.dumps({"seconds": seconds, "cpu": cpu_seconds, "memory": grown}), flush=True)


class Side:
    """A process that answers lines of JSON with lines of JSON.

    Args:
        command: of Python's, whose first answer is what it tells ``about`` itself.
        env: added to the environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._command = [sys.executable, *command]
        self._env = {**os.environ, **(env or {})}

    def __enter__(self) -> Side:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env
        )
        self.about = self._answer()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, question: Any = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]


def compare(
    script: str,
    batch: int,
    threads: int,
    pairs: int,
    alike: Callable[[float, float], bool],
    between: Callable[[], None] = lambda: None,
    more: Sequence[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Step both sides in turn; the order alternates.

    Args:
        script: whose sides they are.
        batch: images of a step.
        threads: of each side.
        pairs: timed steps of each.
        alike: whether the two first losses may be those of the same step.
        between: called after each pair.
        more: words for both sides.

    Returns:
        The figures for the result's file, and what ours told about itself.
    """
    rows, load = [], load_average()
    command = [script, "--batch", str(batch), "--threads", str(threads), *more, "--serve"]
    with Side([*command, "ours"]) as ours, Side([*command, "plain"]) as plain:
        losses = [side.about["first_loss"] for side in (ours, plain)]
        if not alike(*losses):
            raise RuntimeError(f"not the same step: the first losses are {losses}")
        for index in range(pairs):
            order = list(zip(SIDES, (ours, plain), strict=True))
            rows.append({name: side.ask() for name, side in (order if index % 2 == 0 else order[::-1])})
            between()
        about = ours.about
    ratios = [row["plain"]["seconds"] / row["ours"]["seconds"] for row in rows]
    memory = {name: rows[-1][name]["memory"] for name in SIDES}
    found = {
        "load_before": load,
        "precision": about["precision"],
        "pairs": rows,
        "first_losses": losses,
        "images_per_second": {name: batch / median(row[name]["seconds"] for row in rows) for name in SIDES},
        "speedup": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        "speedup_by_processor_time": median(row["plain"]["cpu"] / row["ours"]["cpu"] for row in rows),
        "peak_memory_bytes": memory,
        "memory_of_plain": memory["ours"] / memory["plain"],
    }
    return found, about


def show(
    found: dict[str, Any], threads: int, target: float, target_memory: float | None, promised: bool
) -> bool:
    """Print what ``compare`` found; whether its targets are met, where they are ``promised``."""
    rates, ratio, memory = found["images_per_second"], found["speedup"], found["peak_memory_bytes"]
    fast = ratio["median"] >= target or not promised
    small = target_memory is None or found["memory_of_plain"] <= target_memory or not promised
    print(f"img/s: ours {rates['ours']:.3g}, plain {rates['plain']:.3g}, {threads} threads")
    print(f"computed in {found['precision']}, as a run would here")
    print(
        f"x as fast: {ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f}), "
        f"by processor time {found['speedup_by_processor_time']:.2f}, {_verdict(target, fast, promised)}"
    )
    print(
        f"peak memory: ours {memory['ours'] / 1e9:.2f} GB, plain {memory['plain'] / 1e9:.2f} GB, "
        f"{found['memory_of_plain']:.2f} of it, {_verdict(target_memory, small, promised)}"
    )
    return fast and small


def conclude(
    name: str,
    found: dict[str, Any],
    settings: dict[str, Any],
    targets: tuple[float, float],
    promised: bool = True,
) -> int:
    """Print what ``compare`` found and write ``results/<name>.json``.

    Args:
        name: of the comparison.
        found: the figures.
        settings: what they were measured with, ``threads`` among them.
        targets: how many times as fast as plain, and with which share of its memory.
        promised: whether the targets hold here.

    Returns:
        The script's exit code: 1 where a target was missed.
    """
    good = show(found, settings["threads"], *targets, promised)
    stated = dict(zip(("speedup", "memory_of_plain"), targets, strict=True))
    write_result(name, {**settings, "targets": stated, **found})
    return 0 if good else 1


def _verdict(target: float | None, met: bool, promised: bool) -> str:
    if target is None:
        return "no target"
    if not promised:
        return f"no target (that of {target} is for bfloat16)"
    return f"target {target}: {'met' if met else 'MISSED'}"
