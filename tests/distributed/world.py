"""Runs a function in several processes that form a world, as torchrun would start them.

Starting a process and importing torch in it takes a while: check many things in one call.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from zoo.engine.collectives import Collectives
from zoo.engine.world import open_world

__all__ = ["NAMES", "in_processes", "rows_of"]

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def in_processes(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0
) -> list[Any]:
    """Call ``function(world, *arguments)`` in each of ``world_size`` processes on the CPU, by gloo.

    Args:
        function: defined at the top of an importable module.
        world_size: number of processes; each computes on one thread.
        arguments: tensors and plain values, the same for all.
        timeout: seconds after which the processes are killed.

    Returns:
        What the function returned in each process, in rank order: tensors and plain values.

    Raises:
        AssertionError: a process failed (with its traceback) or ended early, or time is up; all are dead.
    """
    # The processes meet at a server that is there before them, as with torchrun: no port is guessed.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            place = (str(rank), str(world_size), str(rank), "127.0.0.1", str(store.port), "True")
            given = (theirs, dict(zip(NAMES, place, strict=True)), function, _packed(arguments))
            process = context.Process(target=_child, args=given, daemon=False)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collected(pipes, processes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collected(pipes: list[Connection], processes: list[Any], end: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(open_pipes), max(0.0, end - time.monotonic()))
        assert ready, f"processes {sorted(open_pipes.values())} were not done after {timeout} s"
        for pipe in ready:
            rank = open_pipes[pipe]  # type: ignore[index]
            try:
                fine, content = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(10)
                raise AssertionError(f"process {rank} ended: {processes[rank].exitcode}") from None
            assert fine, f"process {rank} failed:\n{content}"
            results[rank] = _unpacked(content)
    return [results[rank] for rank in range(len(pipes))]


def _child(pipe: Connection, place: dict[str, str], function: Callable[..., Any], arguments: bytes) -> None:
    os.environ.update(place)
    torch.set_num_threads(1)
    try:
        with open_world(torch.device("cpu")) as world:
            result = _packed(function(world, *_unpacked(arguments)))
            world.barrier()  # a process that leaves breaks the connections of those that still talk
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    else:
        pipe.send((True, result))


def _packed(value: Any) -> bytes:
    """As bytes: tensors sent as they are would be shared memory of a process that is gone."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def rows_of(world: Collectives, tensor: torch.Tensor) -> torch.Tensor:
    """This process's equal share of rows."""
    return tensor.chunk(world.world_size)[world.rank]
