"""Ours and the peer, timed in turn in one process run.

A claim about speed is a ``Case``: two callables that do the same work. They run A B, B A, A B, ... so
that a machine which slows down meanwhile slows both; each pair gives one ratio, and the median of the
ratios is what counts. ``measure`` prints a row for each case and writes ``results/<name>.json``.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["RESULTS", "Case", "load_average", "machine", "measure", "run_command", "write_result"]

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        name: a few words.
        ours: does the work once, our way.
        peer: does the same work the other way.
        target: how many times as fast as the peer we must be (peer's time / our time), or None.
        pairs: timed pairs; the order within a pair alternates.
        warmup: untimed calls of each before the first pair.
        amount: units of work in a call, for a rate.
        unit: what is counted; empty: no rate is shown.
    """

    name: str
    ours: Callable[[], object]
    peer: Callable[[], object]
    target: float | None = None
    pairs: int = 5
    warmup: int = 1
    amount: float = 1.0
    unit: str = ""

    def run(self) -> dict[str, Any]:
        """Time all pairs.

        Returns:
            JSON: ``pairs`` (seconds of ours and the peer, in order of measurement), ``speedup`` with
            median, min and max over the pairs, ``target`` and ``met`` (None without a target).
        """
        for _ in range(self.warmup):
            self.ours()
            self.peer()
        pairs = []
        for index in range(self.pairs):
            first, second = (self.ours, self.peer) if index % 2 == 0 else (self.peer, self.ours)
            times = [_seconds(first), _seconds(second)]
            ours, peer = times if index % 2 == 0 else reversed(times)
            pairs.append({"ours": ours, "peer": peer, "speedup": peer / ours})
        ratios = [pair["speedup"] for pair in pairs]
        out: dict[str, Any] = {
            "name": self.name,
            "pairs": pairs,
            "seconds": {who: median(pair[who] for pair in pairs) for who in ("ours", "peer")},
            "speedup": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
            "target": self.target,
            "met": None if self.target is None else median(ratios) >= self.target,
        }
        if self.unit:
            out["unit"] = self.unit
            out["rate"] = {who: self.amount / out["seconds"][who] for who in ("ours", "peer")}
        return out


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run_command(
    command: Sequence[str], limit: float = 600.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a whole command as a subprocess, its output kept; to be used inside a case's callable.

    ``env`` holds variables that are added to this process's.

    Raises:
        RuntimeError: the command failed (a failure must never be timed as a success).
        subprocess.TimeoutExpired: it took longer than ``limit`` seconds.
    """
    variables = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=variables)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done


def measure(name: str, cases: Sequence[Case], extra: dict[str, Any] | None = None) -> bool:
    """Run the cases, print a row for each, write ``results/<name>.json``.

    Args:
        name: the document's name.
        cases: what to compare.
        extra: more keys for the document, e.g. the settings.

    Returns:
        Whether no target was missed.
    """
    load = load_average()
    results = []
    print(f"{'case':<44} {'ours':>12} {'peer':>12} {'x as fast (min - max)':>24} {'target':>8}")
    for case in cases:
        result = case.run()
        results.append(result)
        print(_row(result), flush=True)
    write_result(name, {"load_before": load, **(extra or {}), "cases": results})
    return all(result["met"] is not False for result in results)


def _row(result: dict[str, Any]) -> str:
    if "rate" in result:
        shown = [f"{result['rate'][who]:.4g} {result['unit']}" for who in ("ours", "peer")]
    else:
        shown = [f"{result['seconds'][who]:.4g} s" for who in ("ours", "peer")]
    ratio = result["speedup"]
    spread = f"{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})"
    target = "-" if result["target"] is None else f"{result['target']:g}"
    verdict = {None: "", True: "met", False: "MISSED"}[result["met"]]
    return f"{result['name']:<44} {shown[0]:>12} {shown[1]:>12} {spread:>24} {target:>8} {verdict}".rstrip()


def load_average() -> list[float] | None:
    """The machine's load over 1, 5 and 15 minutes: above about 0.5, don't trust a time."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def machine() -> dict[str, Any]:
    """Processor, cores and versions (imports torch: ask after timing)."""
    from zoo.pretrain.environment import describe_environment

    return {key: value for key, value in describe_environment().items() if key != "schema"}


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write one document: schema, name, date and machine around ``result``; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    document = {"schema": SCHEMA, "name": name, "date": date, "machine": machine(), **result}
    path = RESULTS / f"{name}.json"
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    temporary.replace(path)
    return path
