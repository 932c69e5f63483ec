"""A command as a SLURM job, by submitit: one task for each GPU, queued again when its machines are taken.

``submit`` is for the machine that submits, ``QueuedCommand`` is what each task of the job runs there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_SAVED, InputError
from .slurm_request import SlurmRequest

__all__ = ["QueuedCommand", "SubmittedJob", "submit"]

log = logging.getLogger("zoo")

_ASKING_S = 60.0  # a busy controller takes its time
_END_IS_NEAR = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class SubmittedJob:
    """A job that SLURM took: its id, the folder of its logs, and the first task's log in it."""

    job_id: str
    logs: Path
    log: Path


def submit(words: Sequence[str], run: Path, request: SlurmRequest) -> SubmittedJob:
    """Queue a command as a job; it runs in the folder and the environment that this process has.

    Args:
        words: what follows ``python``, such as ``-m``, a module and its words.
        run: the folder that the command makes its run in, or goes on with; logs go to ``<run>.slurm``.
        request: what the job asks for.

    Raises:
        InputError: submitit is not installed, this is no machine of a SLURM cluster, or sbatch refused.
    """
    try:
        from submitit.core.utils import FailedJobError, FailedSubmissionError
        from submitit.slurm.slurm import SlurmExecutor
    except ImportError:
        raise InputError(
            "submitit, which submits SLURM jobs, is not installed.",
            where="--slurm",
            fix="pip install 'vision-model-zoo[slurm]'",
        ) from None
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        raise InputError(
            f"SLURM's {missing[0]} is not on this machine's PATH.",
            where="--slurm",
            fix="submit from a login node of the cluster",
        )
    logs = run.with_name(f"{run.name}.slurm")
    if "%" in str(logs):
        raise InputError("SLURM reads a % in a path as a pattern.", where=run, fix="choose another --out")
    new = not logs.exists()
    executor = SlurmExecutor(logs)
    # Never submitit's five minutes where no time is given, nor its wckey, which not every cluster knows.
    parameters = {"job_name": run.name, "wckey": None, "stderr_to_stdout": True, **request.parameters}
    executor.update_parameters(**parameters)
    try:
        job = executor.submit(QueuedCommand(list(words), str(run), request.requeues))
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        if new:
            shutil.rmtree(logs, ignore_errors=True)
        raise InputError(
            f"The job was not accepted: {' '.join(str(error).split()) or type(error).__name__}",
            where="--slurm",
            fix="see `sinfo` and `sacctmgr show assoc user=$USER` for what you may ask for",
        ) from None
    return SubmittedJob(str(job.job_id), logs, Path(job.paths.stdout))


@dataclass(frozen=True)
class QueuedCommand:
    """What each task of a job runs: the command, as a process of its own.

    It takes the signals instead of submitit, whose handler would queue the job again at once, in the
    middle of a step. They are handed on to the command, which saves and leaves with 75; then the first task
    asks SLURM to queue the job again, and the command goes on with the run that it finds in its folder.

    SIGUSR1 and SIGUSR2 say that the time is nearly up, and always lead to that. SIGTERM comes before a
    preemption, but also with ``scancel``: the job is queued again if SLURM still calls it running. Ctrl-C,
    bad input and failures end it.

    Attributes:
        words: what follows ``python``.
        run: the run's folder.
        requeues: how often the job may ask to be queued again.
    """

    words: list[str]
    run: str
    requeues: int

    def __call__(self) -> None:
        """Run the command; returns if it is done.

        Raises:
            SystemExit: with the exit code of the contract. Only the first task leaves with 75 or 130, the
                others with 0: srun ends all of them as soon as one leaves with anything else.
        """
        first = os.environ.get("SLURM_PROCID", "0") == "0"
        with _noted() as received:
            code = self._execute(received)
            if code == 0:
                return
            # What a signal met while it still started, or robbed of a partner, was stopped by it as well.
            if received and code != EXIT_BAD_INPUT:
                code = EXIT_INTERRUPTED if signal.SIGINT in received else EXIT_SAVED
            if first and code == EXIT_SAVED:
                self._queue_again(received)
        raise SystemExit(code if first or code not in (EXIT_SAVED, EXIT_INTERRUPTED) else 0)

    def _execute(self, received: Sequence[int]) -> int:
        process = subprocess.Popen([sys.executable, *self.words], env=self._environment(os.environ))
        told = 0
        while process.poll() is None:
            waiting = received[told:]
            told += len(waiting)
            for number in waiting:
                # SLURM may have reached the command as well, and a second Ctrl-C ends it without a save.
                process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
            time.sleep(0.1)
        code = process.returncode
        if code < 0 and -code not in received:
            log.warning("the command was killed by %s", signal.Signals(-code).name)
        return EXIT_FAILURE if code < 0 else code

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        begun = (Path(self.run) / "run.json").is_file()
        return {
            "OMP_NUM_THREADS": given.get("SLURM_CPUS_PER_TASK", "1"),
            "SLURM_RESTART_COUNT": "1" if begun else "0",  # SLURM's own holds where it has one
            **given,
        }

    def _queue_again(self, received: Sequence[int]) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or "0")
        reason: str | None
        if restarts >= self.requeues:
            reason = f"it was {restarts} time(s) already (requeues={self.requeues})"
        elif not set(received) & set(_END_IS_NEAR) and not _is_running(job):
            reason = "SLURM is ending the job, or has queued it again itself"
        else:
            reason = _ask(["scontrol", "requeue", job])[1]
            if reason is None:
                log.warning("job %s is queued again and will go on with %s", job, self.run)
                return
        again = f"zoo pretrain --resume {self.run} --slurm ..."
        if "transfer" in self.words:  # its folder is all that it needs
            again = f"the same command and --out {self.run}"
        log.warning("job %s is not queued again: %s; go on with: %s", job, reason, again)


@contextlib.contextmanager
def _noted() -> Iterator[list[int]]:
    """While the context lasts, signals are only noted: the list of their numbers."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {
        number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, *_END_IS_NEAR)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_running(job: str) -> bool:
    """Whether SLURM means the job to go on: one that was cancelled or is queued again is COMPLETING."""
    said, problem = _ask(["squeue", "--noheader", "--jobs", job, "--format", "%T"])
    return problem is None and said.strip() == "RUNNING"


def _ask(command: Sequence[str]) -> tuple[str, str | None]:
    """What a command of SLURM's prints, and what went wrong, if anything did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASKING_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} failed ({error})"
    if done.returncode:
        return "", f"{command[0]} failed ({' '.join(done.stderr.split()) or f'exit code {done.returncode}'})"
    return done.stdout, None
