"""Commands as SLURM jobs: what is submitted, and what is said of it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ._output import print_json

if TYPE_CHECKING:
    from zoo.engine.slurm_request import SlurmRequest

__all__ = ["submit_command", "words_for_processes"]


def submit_command(
    words: Sequence[str], folder: Path, request: SlurmRequest, named: bool, as_json: bool
) -> None:
    """Queue a command that was typed, and say where its log will be.

    Args:
        words: what was typed after ``zoo``.
        folder: what it writes to; removed again if the job isn't accepted, unless the user ``named`` it.
        request: what the job asks for.
        named: the words say the folder already.
        as_json: print JSON.
    """
    from zoo.engine.slurm import submit

    try:
        inner = words_for_processes(words, None if named else folder)
        job = submit(["-m", "_zoo_entry", *inner], folder, request)
    except BaseException:
        if not named:
            folder.rmdir()
        raise
    if as_json:
        print_json({"schema": 1, "job": job.job_id, "run": str(folder), "logs": str(job.logs)})
        return
    print(f"job {job.job_id}: {request.nodes} node(s) x {request.tasks} task(s)")
    print(f"  run:    {folder}")
    print(f"  logs:   {job.logs}")
    print(f"  follow: tail -F {shlex.quote(str(job.log))}; squeue -j {job.job_id}")
    print(f"  stop:   scancel {job.job_id}")


def words_for_processes(words: Sequence[str], out: Path | None) -> list[str]:
    """What was typed, without what concerns the launching, and with the folder to write to."""
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        flag, sign, _ = word.partition("=")
        if flag in ("--nproc", "--restarts", "--slurm"):
            if not sign:
                next(remaining, None)
        else:
            rest.append(word)
    return rest if out is None else [*rest, "--out", str(out)]
