"""Read every image of a collection once, and write down which ones can't be used."""

from __future__ import annotations

import errno
import json
import os
import signal
import statistics
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..errors import InputError, RunError
from ..files import disk_errors, whole_file
from .source import ImageSource, open_picture

__all__ = ["CheckReport", "check_images"]

SCHEMA = 1
_CHUNK = 32  # images a task: large enough that handing tasks out costs little
_AHEAD = 4  # tasks a process that wait, so that ten million images don't queue up at once


@dataclass
class CheckReport:
    """What reading everything showed; sizes in pixels."""

    images: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    """``file``, ``problem``, ``fix`` and ``sample`` of each unusable one."""
    classes: Counter[str] = field(default_factory=Counter)
    smallest: tuple[int, int] | None = None
    largest: tuple[int, int] | None = None
    median_side: float | None = None
    """Median of the shorter side."""
    gray: int = 0
    """Pictures whose three channels are equal."""

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "classes": dict(self.classes)}


@dataclass(frozen=True)
class _Seen:
    sample: int
    size: tuple[int, int] | None
    gray: bool
    where: str = ""
    problem: str = ""
    fix: str | None = None


_source: ImageSource | None = None


def _take_source(source: ImageSource) -> None:
    global _source
    _source = source
    # Ctrl-C reaches the whole process group; the process that hands out work decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import cv2

    cv2.setNumThreads(0)


def _look(samples: range) -> list[_Seen]:
    assert _source is not None
    return [_look_at(_source, sample) for sample in samples]


def _look_at(source: ImageSource, sample: int) -> _Seen:
    try:
        pixels = open_picture(source, sample).pixels()
    except InputError as error:
        return _Seen(sample, None, False, error.where or source.where(sample), error.what, error.fix)
    height, width = pixels.shape[:2]
    gray = pixels.shape[2] == 3 and bool(
        (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all()
    )
    return _Seen(sample, (height, width), gray)


def check_images(
    source: ImageSource,
    *,
    report: str | Path | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, bad: None,
) -> CheckReport:
    """Decode every image completely.

    Args:
        source: the images.
        report: a file that gets one JSON line for each unusable image (whole, and also when there are
            none: then it is empty).
        workers: processes; as many as there are processors by default, 0 works in this one.
        progress: called with the number of images read and of bad ones so far.

    Raises:
        RunError: the report can't be written (said before anything is read), or a process was killed.
    """
    if report is not None:
        _try_to_write(Path(report))
    found = CheckReport()
    sides: list[int] = []
    for seen in _all_seen(source, _processors() if workers is None else workers):
        found.images += 1
        if seen.size is None:
            line = {"file": seen.where, "problem": seen.problem, "fix": seen.fix, "sample": seen.sample}
            found.bad.append({"schema": SCHEMA, **line})
        else:
            area = seen.size[0] * seen.size[1]
            sides.append(min(seen.size))
            if found.smallest is None or area < found.smallest[0] * found.smallest[1]:
                found.smallest = seen.size
            if found.largest is None or area > found.largest[0] * found.largest[1]:
                found.largest = seen.size
            found.gray += seen.gray
        label = source.label(seen.sample)
        if label >= 0:
            found.classes[source.classes[label]] += 1
        progress(found.images, len(found.bad))
    found.median_side = statistics.median(sides) if sides else None
    if report is not None:
        with disk_errors("Writing the report", Path(report)), whole_file(Path(report)) as temporary:
            lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in found.bad)
            temporary.write_bytes("".join(lines).encode(errors="backslashreplace"))
    return found


def _try_to_write(report: Path) -> None:
    """Reading everything can take hours: a report that can't be written should not wait for the end."""
    with disk_errors("Writing the report", report):
        if report.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        report.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=report.parent).close()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):  # fewer than the machine has, in a container
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _all_seen(source: ImageSource, workers: int) -> Iterator[_Seen]:
    if workers == 0:
        yield from (_look_at(source, sample) for sample in range(len(source)))
        return
    tasks = (range(first, min(first + _CHUNK, len(source))) for first in range(0, len(source), _CHUNK))
    pool = ProcessPoolExecutor(workers, get_context(), _take_source, (source,))
    waiting: deque[tuple[range, Future[list[_Seen]]]] = deque()
    try:
        for task in islice(tasks, workers * _AHEAD):
            waiting.append((task, pool.submit(_look, task)))
        while waiting:
            yield from waiting[0][1].result()
            waiting.popleft()
            waiting += [(task, pool.submit(_look, task)) for task in islice(tasks, 1)]
    except BrokenProcessPool:
        raise _killed(source, waiting, workers) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _killed(
    source: ImageSource, waiting: Iterable[tuple[range, Future[list[_Seen]]]], workers: int
) -> RunError:
    open_tasks = [task for task, future in waiting if future.exception() is not None]
    # Tasks are begun in order, so it was one of the first of those that nobody finished.
    begun = open_tasks[: workers + 1]
    where = f"{source.where(begun[0][0])} to {source.where(begun[-1][-1])}" if begun else None
    return RunError(
        "A process that reads images was killed, at one of the images named below.",
        where=where,
        fix="if the system's memory ran out: fewer processes (--workers), or a lower --max-pixels; "
        "otherwise one of these files crashes its decoder: take it out",
    )
