"""What data workers need of the machine, how they begin and end, and words for when something lacks."""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import multiprocessing.queues
import os
import re
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import get_worker_info

from ..errors import RunError

__all__ = [
    "batch_memory",
    "check_shared_memory",
    "end_workers",
    "explained_worker_failures",
    "raise_handle_limit",
    "settle_worker",
    "watch_workers",
]

_SHARED_MEMORY = Path("/dev/shm")
_HANDLES_PER_WORKER = 64  # pipes, and a handle for each tensor on its way
_LEAST_HANDLES = 16  # of these, without a margin
_ORPHAN_POLL, _ORPHAN_GRACE = 2.0, 8.0  # seconds
_DEATH_NOTICE = 1.0  # seconds


def check_shared_memory(
    batch: int,
    workers: int,
    ahead: int,
    folder: Path = _SHARED_MEMORY,
) -> None:
    """Refuse to start workers whose batches can't lie in shared memory together.

    A worker that writes beyond the end of ``/dev/shm`` is killed without a word, so the room is counted
    before: for the batches on their way, and the one that training holds.

    Args:
        batch: bytes of a batch.
        workers: data processes.
        ahead: how many batches each of them can be ahead.
        folder: where shared memory is mounted.

    Raises:
        RunError: says what is needed, what there is, and what to do.
    """
    try:
        status = os.statvfs(folder)
    except (OSError, AttributeError):  # no such place on this system
        return
    batches = workers * ahead + 1
    free = status.f_bavail * status.f_frsize
    if batch * batches <= free:
        return
    fits = max(0, math.floor(free / batch) - 1) // ahead
    advice = f"use at most {fits} worker{'s' * (fits > 1)} (--workers)" if fits else "use --workers 0"
    raise RunError(
        f"The data workers need {batch * batches / 2**20:.1f} MB of shared memory ({batches} batches of "
        f"{batch / 2**20:.1f} MB), and {free / 2**20:.1f} MB are free.",
        where=folder,
        fix=f"{advice}, a smaller batch, or give the machine more: docker run --shm-size=8g, "
        "or mount -o remount,size=8g /dev/shm",
    )


def raise_handle_limit(workers: int) -> None:
    """Take more file handles if the workers may run out and the system's hard limit allows it.

    Raises:
        RunError: the hard limit leaves less than workers can do with.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + workers * _HANDLES_PER_WORKER
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    least = _open_handles() + 2 * _LEAST_HANDLES + workers * _LEAST_HANDLES
    if limit < least:
        raise RunError(
            f"{workers} data worker{'s need' if workers > 1 else ' needs'} about {least} file handles in this "
            f"process, and the system allows {limit}.",
            fix="raise the limit (ulimit -n 65536), or use fewer workers (--workers)",
        )


def _open_handles() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def batch_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
    """An uninitialised tensor for a batch; inside a data worker in shared memory.

    Left to the queue, the move there would happen in a thread of its own, whose errors nobody hears: a full
    ``/dev/shm`` would then let training wait for ever.
    """
    like = torch.from_numpy(np.empty(0, dtype))
    if get_worker_info() is None:
        return like.new_empty(shape)
    try:
        return like.new(like._typed_storage()._new_shared(math.prod(shape))).resize_(shape)
    except RuntimeError:
        # torch leaves the file that found no room; all others of this process have no name any more.
        if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
            for left in _SHARED_MEMORY.glob(f"torch_{os.getpid()}_*"):
                left.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def explained_worker_failures() -> Iterator[None]:
    """Turn what torch says about failing data workers into what it means.

    Raises:
        RunError: shared memory, file handles or processes ran out, or a worker was killed.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        explained = _explain(error)
        if explained is None:
            raise
        raise explained from error


def _explain(error: RuntimeError | OSError | EOFError) -> RunError | None:
    if isinstance(error.__cause__, RunError):  # what _ExplainedDeath raised, wrapped by torch
        return error.__cause__
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text or "ancdata" in text:
        return RunError(
            "The process ran out of file handles while data workers handed over a batch.",
            fix="raise the limit (ulimit -n 65536), or use fewer workers (--workers)",
        )
    if any(
        words in text for words in ("shared memory", "unable to resize file", "Bus error", "No space left")
    ):
        return RunError(
            "Shared memory ran out while data workers handed over a batch.",
            where=_SHARED_MEMORY,
            fix="use fewer workers (--workers), a smaller batch, or docker run --shm-size=8g",
        )
    if number in (errno.EAGAIN, errno.ENOMEM):
        return RunError(
            f"The system starts no more processes ({os.strerror(number)}).",
            fix="use fewer workers (--workers)",
        )
    dead = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(?: is killed by signal: (\w+))?", text)
    if dead is None and not isinstance(error, ConnectionError | EOFError):
        return None
    if dead is None:
        time.sleep(_DEATH_NOTICE)  # its connection ends before its death is known, which raises here
    name = f" (process {dead[1]})" if dead else ""
    how = f"was killed (signal: {dead[2]})" if dead and dead[2] else "ended unexpectedly"
    return RunError(
        f"A data worker{name} {how}.",
        fix="if the system's memory ran out, use fewer workers (--workers); then go on with --resume",
    )


class _ExplainedDeath:
    """torch's handler of SIGCHLD: raises in whatever the main thread is doing when a worker dies."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        with explained_worker_failures():
            self._handler(number, frame)


_watched: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # iterator -> process it is of


def watch_workers(batches: Any) -> None:
    """See to it that an iterator's workers end with this process, and that their death is explained."""
    if not _watched:  # not when this module is imported: torch's own exit function would come before
        atexit.unregister(_end_all_workers)
        atexit.register(_end_all_workers)
    _watched[batches] = os.getpid()
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, _ExplainedDeath):
            signal.signal(signal.SIGCHLD, _ExplainedDeath(handler))


def end_workers(batches: Any) -> None:
    """Let an iterator's workers end now.

    By itself it does so when the last reference to it goes, but the traceback of an exception holds one,
    and Python then waits at its end for workers that ignore the signal it sends them.
    """
    if _watched.pop(batches, None) == os.getpid():  # a forked copy must not end its parent's workers
        batches._shutdown_workers()


def _end_all_workers() -> None:
    for batches in list(_watched):
        end_workers(batches)


def settle_worker() -> None:
    """What a data worker must do to end when it should, and not to fail silently."""
    # Sending a batch happens in a thread; an error there would lose the batch, and training would wait.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_without_batch)  # type: ignore[attr-defined]
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_without_batch(error: BaseException, batch: object) -> None:
    traceback.print_exception(error)
    os._exit(1)


def _end_with_parent(parent: int) -> None:
    # torch's watchdog ends a worker whose parent died, but not one that waits for room in the pipe.
    while os.getppid() == parent:
        time.sleep(_ORPHAN_POLL)
    time.sleep(_ORPHAN_GRACE)
    os._exit(1)
