"""Where a step's time goes: named sections that together make up the whole step."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch

__all__ = [
    "KEEP",
    "SECTIONS",
    "WARM_UP",
    "Clock",
    "DeviceClock",
    "HostClock",
    "SectionTimer",
    "clock_of",
    "mark",
]

# In the order in which a step goes through them. ``other`` is the engine itself: watchers of the batch, the
# method's hooks around the step, the learning rate.
SECTIONS = ("data", "prepare", "forward", "loss", "backward", "optimizer", "other")

KEEP = 4096  # steps; older ones are forgotten, so a long run is told by its end
WARM_UP = 2  # first steps of a session: memory is allocated and kernels are chosen in them


class Clock(Protocol):
    """Stamps points of time; the time between two of them may be known only later."""

    name: str

    def stamp(self) -> Any: ...
    def passed(self, stamp: Any) -> bool: ...
    def wait(self, stamp: Any) -> None: ...
    def seconds(self, first: Any, last: Any) -> float: ...


class HostClock:
    """The processor's own time."""

    name = "host"

    def stamp(self) -> float:
        return time.perf_counter()

    def passed(self, stamp: float) -> bool:
        return True

    def wait(self, stamp: float) -> None:
        return

    def seconds(self, first: float, last: float) -> float:
        return last - first


class DeviceClock:
    """The time of a CUDA device: a stamp is an event in its queue of work.

    Work is queued long before it is done, so the host's time would blame whoever waits for the device.
    Here the waiting of the device for the host is what counts: data that arrives while it still
    computes costs nothing.
    """

    name = "device"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())

    def wait(self, stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1000.0  # CUDA tells milliseconds


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when work on a device is done."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


_active: ContextVar[SectionTimer | None] = ContextVar("zoo_active_section_timer", default=None)


def mark(name: str) -> None:
    """From here on the step is in section ``name``, one of ``SECTIONS``; nothing happens outside a run.

    A method calls ``mark("loss")`` in its ``step`` where the forward pass ends and the loss begins.

    Raises:
        ValueError: no such section.
    """
    if name not in SECTIONS:
        raise ValueError(f"section {name!r} is none of {', '.join(SECTIONS)}")
    timer = _active.get()
    if timer is not None:
        timer.mark(name)


class SectionTimer:
    """Splits steps into sections. A section lasts from its mark to the next one, so nothing is left out.

    A stamp costs about a microsecond; the device is never waited for while the run goes on.

    Args:
        clock: what stamps are taken from.
        keep: steps that are remembered, the newest ones.
        warm_up: first steps that are left out.
    """

    def __init__(self, clock: Clock | None = None, keep: int = KEEP, warm_up: int = WARM_UP) -> None:
        self.clock: Clock = clock or HostClock()
        self._warm_up = warm_up
        self._steps = 0
        self._marks: list[tuple[str, Any]] = []
        self._pending: deque[list[tuple[str, Any]]] = deque()
        self._rows: deque[dict[str, float]] = deque(maxlen=keep)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While it lasts, the function ``mark`` speaks to this timer."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def begin(self) -> None:
        """A step begins, waiting for its data. A step that was begun but not ended is forgotten."""
        self._marks = [("data", self.clock.stamp())]

    def mark(self, name: str) -> None:
        """From here on the step is in section ``name``."""
        self._marks.append((name, self.clock.stamp()))

    def end(self) -> None:
        """The step is over; what comes before the next ``begin`` belongs to no step."""
        self._steps += 1
        if self._steps > self._warm_up:
            self._pending.append([*self._marks, ("", self.clock.stamp())])
        self._read(wait=False)

    def rows(self) -> list[dict[str, float]]:
        """Seconds of each section, a mapping for each remembered step, the oldest first; may wait."""
        self._read(wait=True)
        return list(self._rows)

    def _read(self, wait: bool) -> None:
        while self._pending:
            marks = self._pending[0]
            if wait:
                self.clock.wait(marks[-1][1])
            elif not self.clock.passed(marks[-1][1]):
                return
            self._pending.popleft()
            row = dict.fromkeys(SECTIONS, 0.0)
            for (name, first), (_, last) in itertools.pairwise(marks):
                row[name] += self.clock.seconds(first, last)
            self._rows.append(row)
