"""Which process this is, and the way into the world of all of them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ..errors import InputError, RunError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from .collectives import Collectives

__all__ = ["open_world", "process_world", "slurm_environment", "strip_local_rank"]

log = logging.getLogger("zoo")

_STORE_OUTLIVES = "TORCHELASTIC_USE_AGENT_STORE"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT_S = 3600.0  # the first process may do something long (judge, download) while the others wait
_LEAVE_S = 5.0
_OF_AN_EXCHANGE = re.compile(r"gloo|NCCL")
_LOCAL_RANK = re.compile(r"--local[-_]rank(?:=(.*))?", re.DOTALL)


@contextlib.contextmanager
def open_world(device: torch.device) -> Iterator[Collectives]:
    """The world this process was started into; its group is closed when the context ends.

    Without RANK in the environment, and with WORLD_SIZE absent or 1, it is the world of one, which needs
    nothing. Started by torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) or by SLURM's
    srun, it is torch's default process group: nccl for a GPU, which becomes the current one, else gloo.
    ZOO_TIMEOUT_S is how many seconds processes wait for one another (default: an hour).

    Raises:
        InputError: an incomplete or impossible environment.
        RunError: the processes did not find one another; or, while the context lasted, lost one another.
    """
    place = _find_place(device.type == "cuda")
    if place is None:
        from .collectives import WorldOfOne

        yield WorldOfOne()
        return

    import torch.distributed as dist

    world = _enter(place, device)
    try:
        yield world
    except BaseException as error:
        # Closing waits for exchanges under way, and a process that failed must not wait for the others.
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)
        if isinstance(error, RuntimeError) and _OF_AN_EXCHANGE.search(str(error)):
            raise RunError(
                f"An exchange with the other processes failed ({_first_line(error)}); this is number "
                f"{world.rank} of {world.world_size}.",
                where=place.address,
                fix="most likely another one failed or was killed: see what it said; then go on with the run",
            ) from error
        raise
    dist.destroy_process_group()


@dataclass(frozen=True)
class _Place:
    rank: int
    world_size: int
    local_rank: int
    address: str
    timeout: timedelta


@contextlib.contextmanager
def process_world(device_name: str) -> Iterator[tuple[torch.device, Collectives]]:
    """This process's device and its world (``open_world``); only the first process speaks of what all of them do.

    Args:
        device_name: auto, cpu, cuda, ...
    """
    import torch

    from .precision import choose_device

    device = choose_device(device_name)
    level = log.level
    with open_world(device) as world:
        if device.type == "cuda" and world.world_size > 1:
            device = torch.device("cuda", world.local_rank)
        if world.rank:
            log.setLevel(logging.ERROR)
        try:
            yield device, world
        finally:
            log.setLevel(level)


def _enter(place: _Place, device: torch.device) -> Collectives:
    import torch
    import torch.distributed as dist

    from .collectives import TorchWorld

    if device.type == "cuda":
        if place.local_rank >= torch.cuda.device_count():
            raise InputError(
                f"This is process {place.local_rank} of its machine (counted from 0), which shows it "
                f"{torch.cuda.device_count()} GPUs.",
                where=f"LOCAL_RANK={place.local_rank}",
                fix="start as many processes as there are GPUs; where the scheduler shows each process "
                "only its own GPU, set LOCAL_RANK=0 for all",
            )
        torch.cuda.set_device(place.local_rank)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_own_corner(place) if os.environ.get(_STORE_OUTLIVES) == "True" else None,
            rank=place.rank,
            world_size=place.world_size,
            timeout=place.timeout,
        )
        world = TorchWorld(place.local_rank, timeout=place.timeout)
        world.barrier()  # nccl connects at the first exchange: let it fail here, with advice
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(
            f"The {place.world_size} processes did not find one another ({_first_line(error)}); this is number "
            f"{place.rank}.",
            where=place.address,
            fix="check that all of them were started and are alive, that they can reach this address, and "
            "that its port is free (MASTER_ADDR, MASTER_PORT); on machines with several networks name the "
            "right one in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; ZOO_TIMEOUT_S is how long they wait",
        ) from error
    return world


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _own_corner(place: _Place) -> Store:
    """A part of torchrun's store that only the processes of this start know.

    The agents keep the store when they start their processes again. The addresses of the dead ones are still
    in it, under names that the new ones use as well: who is early would take them for its partners'. So each
    process calls with a number that nobody had before it, and the first one answers with the name of the part.
    """
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

    store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=place.timeout))
    mine = uuid.uuid4().hex
    if place.rank:
        store.set(f"zoo/call/{place.rank}", mine)
        corner = store.get(f"zoo/answer/{mine}").decode()
        store.add(f"zoo/here/{corner}", 1)
        return PrefixStore(corner, store)
    end, answered = time.monotonic() + place.timeout.total_seconds(), set()
    while (missing := place.world_size - 1 - store.add(f"zoo/here/{mine}", 0)) > 0:
        for call in (f"zoo/call/{rank}" for rank in range(1, place.world_size)):
            number = store.get(call).decode() if store.check([call]) else None
            if number is not None and number not in answered:
                store.set(f"zoo/answer/{number}", mine)
                answered.add(number)
        if time.monotonic() > end:
            raise RuntimeError(f"{missing} of the others did not come")
        time.sleep(0.01)
    return PrefixStore(mine, store)


def _find_place(on_gpu: bool) -> _Place | None:
    """Read the environment; under srun, complete it first, since torch reads it as well."""
    if "RANK" not in os.environ:
        os.environ.update(slurm_environment())
    given = {name: os.environ[name] for name in _NAMES if os.environ.get(name)}
    if (given.get("RANK"), given.get("WORLD_SIZE")) in {(None, None), (None, "1"), ("0", "1")}:
        return None
    if not on_gpu:
        given.setdefault("LOCAL_RANK", "0")  # it only chooses the GPU
    missing = [name for name in _NAMES if name not in given]
    if missing:
        raise InputError(
            "The environment speaks of several processes, but is incomplete: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.",
            where=", ".join(f"{name}={given[name]}" for name in _NAMES if name in given),
            fix="start the processes with torchrun or srun, or unset RANK and WORLD_SIZE to use one process",
        )
    rank, world_size, local_rank = (_whole(name, given[name]) for name in _NAMES[:3])
    if rank >= world_size:
        raise InputError(
            f"Process number {rank} (counted from 0) can't be one of {world_size}.",
            where=f"RANK={rank}, WORLD_SIZE={world_size}",
        )
    address = f"{given['MASTER_ADDR']}:{_whole('MASTER_PORT', given['MASTER_PORT'])}"
    return _Place(rank, world_size, local_rank, address, _timeout())


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{name} must be a whole number, not {text!r}.", where=f"environment: {name}")
    return int(text)


def _timeout() -> timedelta:
    text = os.environ.get("ZOO_TIMEOUT_S") or str(_TIMEOUT_S)
    try:
        limit = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise InputError(
            f"ZOO_TIMEOUT_S must be a number of seconds above 0, not {text!r}.",
            where="environment: ZOO_TIMEOUT_S",
        )
    return limit


def slurm_environment() -> dict[str, str]:
    """torchrun's variables for a process that srun started; nothing outside srun, or for a lone task.

    The first host of the step's node list is where the processes meet, at a port that depends on the job
    and step. MASTER_ADDR, MASTER_PORT and LOCAL_RANK that are set already win.
    """
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
    rank, tasks, local_rank, nodes = (os.environ.get(name, "") for name in names)
    # A batch script that srun did not start has the first three, too.
    if not (rank and tasks and local_rank and nodes) or tasks == "1":
        return {}
    step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    found = {
        "RANK": rank,
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": local_rank,
        "MASTER_ADDR": _first_host(nodes),
        "MASTER_PORT": str(12000 + zlib.crc32(step.encode()) % 20000),  # below the range of passing ports
    }
    winning = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {**found, **{name: os.environ[name] for name in winning if os.environ.get(name)}}


def _first_host(nodes: str) -> str:
    """``node[01-04,07],other`` -> ``node01``."""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes).split(",")[0]


def strip_local_rank(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """Take out ``--local-rank=N`` or ``--local_rank=N``, which old launchers put on the command line.

    The number becomes LOCAL_RANK where that is unset.

    Returns:
        The other words, and the number, or None if there was none.

    Raises:
        InputError: no whole number is given.
    """
    rest: list[str] = []
    rank: int | None = None
    words = iter(argv)
    for word in words:
        match = _LOCAL_RANK.fullmatch(word)
        if match is None:
            rest.append(word)
        else:
            value = match[1] if match[1] is not None else next(words, "")
            rank = _whole(word.split("=")[0], value)
    if rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(rank))
    return rest, rank
