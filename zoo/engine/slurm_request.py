"""What a SLURM job asks for, as it is typed after ``--slurm``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, did_you_mean

__all__ = ["SlurmRequest", "parse_slurm"]

_DELAY_S = 300
_REQUEUES = 100

# Our words -> submitit's.
_PLAIN = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "name": "job_name",
}
_OURS = (*_PLAIN, "nodes", "gpus", "tasks", "cpus", "mem", "time", "delay", "requeues")
_ALSO = {
    "gpus-per-node": "gpus",
    "tasks-per-node": "tasks",
    "ntasks-per-node": "tasks",
    "cpus-per-task": "cpus",
    "job-name": "name",
}
# sbatch's own, passed on as they are; listed so that a slip of the pen is seen.
_PASSED_ON = (
    "begin",
    "clusters",
    "comment",
    "contiguous",
    "core-spec",
    "cpus-per-gpu",
    "deadline",
    "dependency",
    "distribution",
    "exclude",
    "exclusive",
    "export",
    "gpu-bind",
    "gpu-freq",
    "gres",
    "hint",
    "licenses",
    "mail-type",
    "mail-user",
    "mem-bind",
    "mem-per-cpu",
    "mem-per-gpu",
    "network",
    "nice",
    "nodelist",
    "prefer",
    "priority",
    "profile",
    "reservation",
    "switches",
    "threads-per-core",
    "tmp",
    "wckey",
)
_TAKEN = {
    "signal": "delay=SECONDS says how long before its end the job is told",
    "requeue": "requeues=N says how often it is queued again, 0 for never",
    "no-requeue": "requeues=0 does that",
    "gpus-per-task": "gpus=N asks for N GPUs a node, and each task takes its own of them",
    "ntasks": "tasks=N asks for N tasks a node",
    **dict.fromkeys(("output", "error", "open-mode"), "logs are written beside the run's folder"),
    **dict.fromkeys(("array", "chdir", "wrap"), "a run is one job, in the folder it was submitted from"),
}
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<numbers>\d+(?::\d+){0,2})")
_GPUS = re.compile(r"(?:[\w.-]+:)?(\d+)")
_MEMORY = re.compile(r"0|\d+[KMGT]B?", re.IGNORECASE)


@dataclass(frozen=True)
class SlurmRequest:
    """What a job asks SLURM for.

    Attributes:
        nodes: machines.
        tasks: processes on each of them.
        requeues: how often the job may ask to be queued again.
        delay: seconds before its end at which the job is told.
        parameters: the rest, as submitit's SLURM executor takes it.
    """

    nodes: int = 1
    tasks: int = 1
    requeues: int = _REQUEUES
    delay: int = _DELAY_S
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nodes * self.tasks


def parse_slurm(words: Sequence[str]) -> SlurmRequest:
    """Read ``partition=gpu,nodes=8,gpus=8,time=24:00:00`` (one word or several).

    ``nodes``; on each of them ``gpus`` (``8`` or ``a100:8``), ``tasks`` (default: one for each GPU) and
    ``mem`` (``64G``); ``cpus`` of each task; ``time`` as SLURM writes it, by default the partition's;
    ``partition``, ``account``, ``qos``, ``constraint``, ``name``; ``delay``, the seconds before its end at
    which the job is told to save (default: 300, or a quarter of a shorter time); ``requeues``, how often it
    is queued again (default: 100). What else there is becomes an option of sbatch (``exclusive=true``). A
    value may have commas in it (``partition=a,b``).

    Raises:
        InputError: no ``key=value``, a key that is nearly one of these, or a value that can't be.
    """
    given = dict(_pairs(words))
    nodes = _count(given, "nodes", 1, 1)
    gpus = given.pop("gpus", "0")
    of_a_node = _GPUS.fullmatch(gpus)
    if of_a_node is None:
        raise _bad("gpus", gpus, "a whole number, or TYPE:NUMBER")
    tasks = _count(given, "tasks", max(1, int(of_a_node[1])), 1)
    cpus = _count(given, "cpus", 0, 1)
    requeues = _count(given, "requeues", _REQUEUES, 0)
    minutes = _minutes(given.pop("time")) if "time" in given else None
    delay = _count(given, "delay", _DELAY_S if minutes is None else min(_DELAY_S, minutes * 15), 1)
    if minutes is not None and delay >= 60 * minutes:
        raise _bad("delay", str(delay), f"less than the job's whole time ({60 * minutes} s)")
    memory = given.pop("mem", None)
    if memory is not None and not _MEMORY.fullmatch(memory):
        raise _bad("mem", memory, "a number with its unit, such as 64G (0: all of the machine's)")
    parameters: dict[str, Any] = {_PLAIN[key]: given.pop(key) for key in _PLAIN if key in given}
    parameters |= {"nodes": nodes, "ntasks_per_node": tasks, "time": minutes, "mem": memory}
    # A process that failed would leave the others waiting for it. srun doesn't take cpus-per-task from sbatch.
    parameters["srun_args"] = ["--kill-on-bad-exit=1"]
    if cpus:
        parameters["cpus_per_task"] = cpus
        parameters["srun_args"].append(f"--cpus-per-task={cpus}")
    if int(of_a_node[1]):
        parameters["gpus_per_node"] = gpus
    others = {key: True if value.lower() == "true" else value for key, value in given.items()}
    parameters["additional_parameters"] = {"requeue": True, "signal": f"USR2@{delay}", **others}
    return SlurmRequest(nodes, tasks, requeues, delay, parameters)


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    key, value = "", ""
    for piece in (piece for word in words for piece in word.split(",")):
        name, sign, text = piece.partition("=")
        if sign:
            if key:
                yield key, value
            key, value = _known(name.strip()), text.strip()
        elif key and _spelt(piece.strip()) not in (*_OURS, *_ALSO, *_PASSED_ON):
            value += f",{piece.strip()}"
        else:
            raise InputError(
                "This is not of the form KEY=VALUE.",
                where=f"--slurm {piece}",
                fix="for example --slurm partition=gpu,nodes=2,gpus=8,time=24:00:00; a switch is KEY=true",
            )
        if not value:
            raise InputError(f"{key} has no value.", where=f"--slurm {piece}")
    if key:
        yield key, value


def _spelt(name: str) -> str:
    return name.lower().replace("_", "-")


def _known(name: str) -> str:
    key = _ALSO.get(_spelt(name), _spelt(name))
    if key in _TAKEN:
        raise InputError("This option is set by the toolkit.", where=f"--slurm {name}", fix=_TAKEN[key])
    if key in _OURS or key in _PASSED_ON:
        return key
    meant = did_you_mean(key, (*_OURS, *_PASSED_ON), likeness=0.75)
    if meant or not re.fullmatch(r"[a-z][a-z0-9-]*", key):
        raise InputError(
            "There is no such option.", where=f"--slurm {name}", fix=f"{meant}Known: {', '.join(_OURS)}"
        )
    return key


def _count(given: dict[str, str], key: str, default: int, least: int) -> int:
    text = given.pop(key, None)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise _bad(key, text, f"a whole number, {least} or more")
    return int(text)


def _minutes(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is not None:
        numbers = [int(number) for number in match["numbers"].split(":")]
        # With days hours come first; without, one or two numbers are minutes and seconds.
        if match["days"] is None and len(numbers) < 3:
            numbers.insert(0, 0)
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        total = 1440 * int(match["days"] or 0) + 60 * hours + minutes + (seconds > 0)
        if total:
            return total
    raise _bad("time", text, "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, and above 0")


def _bad(key: str, value: str, wanted: str) -> InputError:
    return InputError(f"{key} must be {wanted}.", where=f"--slurm {key}={value}")
