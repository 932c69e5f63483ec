"""Several processes of one command on this machine, with the exit code of the contract."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_SAVED, InputError, RunError

__all__ = ["die_with_parent", "first_to_say", "launch", "leave_for_good", "run_worker"]

log = logging.getLogger("zoo")

_LEFT_ON_REQUEST = (EXIT_SAVED, EXIT_INTERRUPTED)
_TO_END_S = 10.0  # after a second Ctrl-C
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
_FOLDER = "ZOO_LAUNCH_FOLDER"
_FOR_GOOD = "for-good"


def launch(command: Sequence[str], nproc: int, max_restarts: int = 0) -> int:
    """Run a Python command in ``nproc`` processes with torchrun's agent and wait for them.

    The processes meet through the agent, on a port of this machine that it chose. SIGINT, SIGTERM, SIGUSR1
    and SIGUSR2 are handed on to each of them, and they may take their time to save; a second Ctrl-C ends
    them at once. Rank 0 prints where this process does, the others print to standard error.
    OMP_NUM_THREADS, unless set, becomes each process's share of the processors.

    A process that leaves with 75 or 130 counts as done, and the others may finish; when one fails in any
    other way, the others get SIGTERM and 30 s. Call it from the main thread, or signals are not handed on.

    Args:
        command: what follows ``python``: ``-m``, a module and its words; or a script and its words.
        nproc: number of processes, at least 1.
        max_restarts: how often all of them are started again after one failed or was killed; but not after
            a signal, nor for bad input. They find the count in TORCHELASTIC_RESTART_COUNT.

    Returns:
        0 done; 75 saved after a signal; 130 after Ctrl-C; 2 bad input; 1 any other failure.

    Raises:
        InputError: no command, or ``nproc`` or ``max_restarts`` out of range.
        RunError: the processes could not be started.
    """
    if nproc < 1 or max_restarts < 0 or not command:
        raise InputError(
            f"Can't start {nproc} processes (with {max_restarts} restarts) of {list(command)}.",
            fix="start one or more processes of a command, with 0 or more restarts",
        )
    code = EXIT_FAILURE
    with tempfile.TemporaryDirectory(prefix="zoo-launch-") as folder, _Signals() as signals, _quiet_agent():
        for restart in range(max_restarts + 1):
            group = _Group(command, nproc, restart, Path(folder) / str(restart))
            code = group.run(signals)
            if code != EXIT_FAILURE or group.left_for_good():
                break
            if signals.received or restart == max_restarts:
                log.error("%s", group.what_failed())
                break
            log.warning(
                "%s; starting all %d again (%d of %d)", group.what_failed(), nproc, restart + 1, max_restarts
            )
    return code


class _Group:
    """All processes, from their start until the last one left.

    The agent's own restarts are not used: it would repeat bad input, and go on after a signal.
    """

    def __init__(self, command: Sequence[str], nproc: int, restart: int, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._failures: list[tuple[int, int]] = []  # rank and exit code, the first first
        self._error: BaseException | None = None
        self._agent = _make_agent(_worker_arguments(command, nproc, restart, folder), nproc, folder)

    def run(self, signals: _Signals) -> int:
        """Wait for the processes, handing on signals; the exit code of the contract."""
        # Outside the main thread the agent takes no signals: it would kill after 30 s what is still saving.
        thread = threading.Thread(target=self._run_agent, name="agent", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            signals.hand_on([worker.id for worker in self._agent.get_worker_group().workers])
        if self._error is not None:
            raise RunError(
                f"The processes could not be started ({self._error}).",
                fix="try again, or start them with torchrun",
            ) from self._error
        return self._exit_code(signals)

    def _run_agent(self) -> None:
        try:
            failures = self._agent.run().failures
        except Exception as error:
            self._error = error
        else:
            in_order = sorted(failures.items(), key=lambda item: item[1].timestamp)
            self._failures = [(rank, failure.exitcode) for rank, failure in in_order]
        finally:
            with contextlib.suppress(Exception):
                self._agent.get_worker_group().spec.rdzv_handler.shutdown()

    def _exit_code(self, signals: _Signals) -> int:
        if not self._failures:
            return max((int(file.read_text()) for file in self._folder.glob("left-*")), default=0)
        first = self._failures[0][1]
        if any(code == EXIT_BAD_INPUT for _, code in self._failures):
            return EXIT_BAD_INPUT
        if first in (EXIT_INTERRUPTED, -signal.SIGINT) or signals.received.count(signal.SIGINT) > 1:
            return EXIT_INTERRUPTED
        return EXIT_SAVED if first == EXIT_SAVED else EXIT_FAILURE

    def left_for_good(self) -> bool:
        """Whether the processes failed on purpose."""
        return (self._folder / _FOR_GOOD).exists()

    def what_failed(self) -> str:
        """The first process that failed, for people."""
        rank, code = self._failures[0]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        return f"process {rank} of {len(self._agent.get_worker_group().workers)} {how}"


def _worker_arguments(command: Sequence[str], nproc: int, restart: int, folder: Path) -> list[str]:
    from .precision import processors

    threads = max(1, processors() // nproc)
    words = list(command[1:] if command[0] == sys.executable else command)
    # Processes import what this one would, whatever lies in the folder they are started in.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run_worker; "
        f"run_worker({str(folder)!r}, {restart}, {threads})"
    )
    return [word.replace("$", "$$") for word in ("-c", code, *words)]  # the agent fills in templates


def _make_agent(arguments: list[str], nproc: int, folder: Path) -> Any:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    meeting = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
    )
    spec = WorkerSpec(
        role="worker",
        local_world_size=nproc,
        rdzv_handler=registry.get_rendezvous_handler(meeting),
        entrypoint=sys.executable,
        args=tuple(arguments),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder)))


class _Signals:
    """While active, notes the signals that this process gets; ``hand_on`` passes them to others."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._told: dict[int, int] = {}
        self._end_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self.received.count(signal.SIGINT) > 1 and self._end_at is None:
            self._end_at = time.monotonic() + _TO_END_S

    def hand_on(self, pids: Sequence[int | None]) -> None:
        """Send each process every signal that it was not sent yet; kill what a second Ctrl-C did not end."""
        for pid in pids:
            if pid is None or not _is_running_child(pid):
                continue
            waiting = self.received[self._told.get(pid, 0) :]
            for number in waiting:
                os.kill(pid, number)
            self._told[pid] = self._told.get(pid, 0) + len(waiting)
            if self._end_at is not None and time.monotonic() > self._end_at:
                os.killpg(pid, signal.SIGKILL)  # with its data workers


def _is_running_child(pid: int) -> bool:
    """Whether the number still is a child's of this process, and no stranger's who got it after its end."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Leave out what the agent logs: ``launch`` says itself what failed."""
    agent = logging.getLogger("torch.distributed.elastic")
    silence, propagate = logging.NullHandler(), agent.propagate
    agent.addHandler(silence)
    agent.propagate = False
    try:
        yield
    finally:
        agent.removeHandler(silence)
        agent.propagate = propagate


def leave_for_good() -> None:
    """Tell ``launch``, if it started this process, that a failure to come is meant: nothing is to be repeated."""
    folder = os.environ.get(_FOLDER)
    if folder is not None:
        Path(folder, _FOR_GOOD).touch()


def first_to_say(text: str) -> bool:
    """Whether no other process that ``launch`` started with this one asked before with the same text."""
    folder = os.environ.get(_FOLDER)
    if folder is not None:
        with contextlib.suppress(OSError):
            mark = Path(folder, f"said-{hashlib.sha256(text.encode(errors='replace')).hexdigest()}")
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                return False
    return True


def run_worker(folder: str, restart: int, threads: int) -> None:
    """What ``launch`` runs in each process: the command in ``sys.argv[1:]``.

    A process that leaves with 75 or 130 notes that in ``folder`` and exits with 0, since the agent ends
    all others as soon as one exits with anything else.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # before torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)
    os.environ[_FOLDER] = folder
    rank = os.environ["RANK"]
    if rank != "0":
        os.dup2(2, 1)
        sys.stdout = sys.stderr
    die_with_parent()
    try:
        _run_as_main(sys.argv[1:])
    except SystemExit as leaving:
        if leaving.code not in _LEFT_ON_REQUEST:
            raise
        Path(folder, f"left-{rank}").write_text(str(leaving.code))


def die_with_parent() -> None:
    """Let this process get SIGTERM when the one that started it ends, killed or not."""
    with contextlib.suppress(OSError, AttributeError):  # where there is no prctl a killed launch leaves them
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)


def _run_as_main(command: list[str]) -> None:
    """As ``python`` followed by these words would."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).absolute().parent))
        runpy.run_path(command[0], run_name="__main__")
