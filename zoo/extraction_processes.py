"""Several processes of one call on this machine, each with work of its own; the first failure ends all."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from .engine.launch import die_with_parent
from .errors import RunError, ZooError

__all__ = ["run_processes"]


def run_processes(works: Sequence[Callable[[], None]]) -> None:
    """Call each in a process of its own and wait for all.

    Ctrl-C and the first failure end the others at once, and a process that is killed takes them along: what they
    do must be written whole or not at all.

    Args:
        works: can be pickled.

    Raises:
        ZooError: what went wrong in one of them.
        RunError: one was killed, or failed in another way.
    """
    context = multiprocessing.get_context("spawn")  # threads and GPUs don't survive a fork
    running: dict[int, tuple[Any, Connection]] = {}
    try:
        for work in works:
            answer, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(work, theirs), daemon=True)
            process.start()
            theirs.close()
            running[process.sentinel] = process, answer
        while running:
            for sentinel in wait(list(running)):
                process, answer = running.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                if process.exitcode:
                    raise _failure(answer, process.exitcode)
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()


def _failure(answer: Connection, code: int) -> Exception:
    try:
        return answer.recv()  # type: ignore[no-any-return]
    except EOFError:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        return RunError(
            f"A process {how}.", fix="call again: it goes on; with fewer processes if memory was short"
        )


def _run(work: Callable[[], None], answer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    die_with_parent()
    try:
        work()
    except Exception as error:
        known = isinstance(error, ZooError)
        answer.send(error if known else RunError(f"A process failed ({type(error).__name__}: {error})."))
        sys.exit(1)
