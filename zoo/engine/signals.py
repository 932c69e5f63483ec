"""Stopping politely: finish the step, save, leave with the exit code of the contract."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from ..errors import EXIT_INTERRUPTED, EXIT_SAVED

__all__ = ["StopRequest"]

_STOPPING = (
    b"\nStopping: the step is finished and the state saved. Ctrl-C again ends at once, without that.\n"
)


class StopRequest:
    """While active, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 ask the loop to stop after its step.

    A second Ctrl-C ends the process at once. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._interrupted = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 75 ("saved, resume me") after any other signal."""
        return EXIT_INTERRUPTED if self.signal == signal.SIGINT else EXIT_SAVED

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
                number = getattr(signal, name, None)
                if number is not None:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:  # whatever other signal came in between
            self._restore()
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        self._interrupted |= number == signal.SIGINT
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            # Past Python's own buffers, one of which may be what was interrupted.
            os.write(2, _STOPPING)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
