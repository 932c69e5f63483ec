"""What a person (or a script) sees of a run while it goes on."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import InputError, did_you_mean
from .loop import Callback, Loop, StepRecord
from .trackers import step_line

__all__ = ["JsonProgress", "LineProgress", "RichProgress", "choose_progress"]

_WINDOW = 50  # steps that the shown speed and loss are averaged over


def choose_progress(name: str) -> list[Callback]:
    """``auto`` (a live view on a terminal, else lines), ``live``, ``lines``, ``json`` or ``quiet``.

    Raises:
        InputError: no such view, with the nearest name.
    """
    if name == "auto":
        name = "live" if _can_redraw() else "lines"
    if name not in _VIEWS:
        raise InputError(
            "There is no progress view of this name.",
            where=name,
            fix=did_you_mean(name, _NAMES) + "Known: " + ", ".join(_NAMES),
        )
    return [view() for view in _VIEWS[name]]


def _can_redraw() -> bool:
    """Whether a person looks on: a log file, a pipe or a terminal that can only append gets lines."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class _Window:
    """Loss and speed over the last steps."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=_WINDOW)

    def add(self, record: StepRecord) -> None:
        self.records.append(record)

    @property
    def loss(self) -> float:
        return sum(r.loss for r in self.records) / len(self.records)

    @property
    def step_time(self) -> float:
        return sum(r.step_time for r in self.records) / len(self.records)

    @property
    def images_per_second(self) -> float:
        return sum(r.images for r in self.records) / max(1e-9, sum(r.step_time for r in self.records))


class RichProgress(Callback):
    """A bar with loss, learning rate, images a second and the time that is left, on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[speed]} img/s"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=2,  # each drawing takes milliseconds of a processor that has better to do
        )
        self._window = _Window()
        self._task: Any = None

    def on_start(self, loop: Loop) -> None:
        self._task = self._bar.add_task(
            "steps", total=loop.total_steps, completed=loop.step, epoch="-", loss="-", lr="-", speed="-"
        )
        self._bar.start()

    def on_step(self, record: StepRecord) -> None:
        self._window.add(record)
        self._bar.update(
            self._task,
            completed=record.step + 1,
            epoch=str(record.epoch + 1),
            loss=f"{self._window.loss:.3f}",
            lr=f"{record.lr:.2e}",
            speed=f"{self._window.images_per_second:.0f}",
        )

    def close(self) -> None:
        self._bar.stop()


class LineProgress(Callback):
    """A line every ten seconds and at the end, on standard error: for logs."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._window = _Window()
        self._total = 0
        self._said = time.monotonic()

    def on_start(self, loop: Loop) -> None:
        self._total = loop.total_steps
        self._said = time.monotonic()

    def on_step(self, record: StepRecord) -> None:
        self._window.add(record)
        now = time.monotonic()
        last = record.step + 1 == self._total
        if last or now - self._said >= self._every:
            self._said = now
            left = (self._total - record.step - 1) * self._window.step_time
            print(
                f"step {record.step + 1}/{self._total}  epoch {record.epoch + 1}  loss {self._window.loss:.3f}  "
                f"lr {record.lr:.2e}  {self._window.images_per_second:.0f} img/s  {_duration(left)} left",
                file=sys.stderr,
                flush=True,
            )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class JsonProgress(Callback):
    """The lines of ``metrics.jsonl`` on standard output: for scripts."""

    def on_step(self, record: StepRecord) -> None:
        print(json.dumps(step_line(record)), flush=True)


_VIEWS: dict[str, list[Callable[[], Callback]]] = {
    "live": [RichProgress],
    "lines": [LineProgress],
    "json": [JsonProgress],
    "quiet": [],
}
_NAMES = ("auto", *_VIEWS)
