"""What is written down of a run: files that grow by a line, and watchers that may fail without harm."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ..files import disk_errors, whole_file
from .loop import Callback, Loop, StepRecord

__all__ = ["BadFileLog", "Guarded", "JsonLines", "MetricsLog", "cut_after", "step_line", "without_secrets"]

SCHEMA = 1

log = logging.getLogger("zoo")


class JsonLines:
    """Appends one JSON object a line; each line reaches the system before the next step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def write(self, value: dict[str, Any]) -> None:
        with disk_errors("Writing a log line", self.path):
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
            self._file.write((json.dumps(value, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_after(path: Path, step: int) -> None:
    """Drop the lines of steps >= ``step`` and a half-written last line: they will be written again."""
    if not path.exists():
        return
    with disk_errors("Rewinding a log", path):
        kept = []
        for line in path.read_bytes().splitlines(keepends=True):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # also one that is no step's
                if line.endswith(b"\n") and json.loads(line)["step"] < step:
                    kept.append(line)
        with whole_file(path) as temporary:
            temporary.write_bytes(b"".join(kept))


class MetricsLog(Callback):
    """``metrics.jsonl``: schema, step, epoch, loss, lr, img_s, data_wait, step_time and time in seconds."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def on_step(self, record: StepRecord) -> None:
        self._lines.write(step_line(record))

    def close(self) -> None:
        self._lines.close()


def step_line(record: StepRecord) -> dict[str, Any]:
    """A step as it stands in ``metrics.jsonl``."""
    return {
        "schema": SCHEMA,
        "step": record.step,
        "epoch": record.epoch,
        "loss": record.loss,
        "lr": record.lr,
        "img_s": round(record.images_per_second, 2),
        "data_wait": round(record.data_wait, 5),
        "step_time": round(record.step_time, 5),
        "time": round(record.time, 3),
        **record.logs,
    }


class BadFileLog(Callback):
    """``bad_files.jsonl``: each image that was left out, once a step it was wanted in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = JsonLines(path)
        self._step = 0
        self.files: set[str] = set()

    def on_start(self, loop: Loop) -> None:
        self._step = loop.step

    def on_batch(self, batch: Any) -> None:
        for bad in batch.bad:
            self.files.add(bad.where)
            line = {"schema": SCHEMA, "step": self._step, "file": bad.where, "problem": bad.problem}
            self._lines.write({**line, "sample": bad.sample})

    def on_step(self, record: StepRecord) -> None:
        self._step = record.step + 1

    def close(self) -> None:
        self._lines.close()


_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """The text with the values of environment variables such as ``..._TOKEN`` or ``..._KEY`` blotted out."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return text


class Guarded(Callback):
    """A watcher that a run can do without: after its first failure it warns once and stays off.

    Args:
        label: what it is called in the warning.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.failed = False

    def guard(self, doing: str, work: Callable[..., object], *arguments: object) -> None:
        """Do the work unless something failed before; an exception becomes the warning.

        Ctrl-C and the like pass through.
        """
        if self.failed:
            return
        try:
            work(*arguments)
        except Exception as error:
            self.failed = True
            reason = without_secrets(str(error)).strip().splitlines()[:1]
            log.warning(
                "%s failed while %s (%s) and is off for the rest of this run; the run goes on",
                self.label,
                doing,
                ": ".join([type(error).__name__, *reason]),
            )
