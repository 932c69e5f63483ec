"""Memory for batches that data workers and the process they work for have in common, used again and again.

Fresh shared memory for every batch costs a page fault for every 4 kB in the worker and others where it arrives: a
sixth of the time that views take. This memory is mapped once, before the workers are forked, and needs no room in
``/dev/shm``.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import RunError

__all__ = ["Room", "Slot", "Wanted", "arrived"]

Wanted = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of a tensor."""

_ALIGNED = 64  # bytes
_HELD = 2  # batches that training can hold while its workers lack none


class Room:
    """Slots for the batches of some workers.

    A worker takes a slot of its own for a batch. It is free again when the last tensor in it is gone in the process
    that the batch was sent to, however long that keeps it.

    Args:
        workers: data processes, to be forked after this.
        ahead: batches that each of them can be ahead.
        size: bytes of a batch.
        pieces: tensors that it consists of.

    Raises:
        RunError: the system has no such memory.
    """

    def __init__(self, workers: int, ahead: int, size: int, pieces: int) -> None:
        self.slots = ahead + _HELD
        self.size = _whole(size + pieces * _ALIGNED, mmap.PAGESIZE)
        count = workers * self.slots
        try:
            self._taken = mmap.mmap(-1, count)  # a byte for each slot
            # Apart: a tensor that is kept longer than all this keeps its own slot alone.
            self._memory = [mmap.mmap(-1, self.size) for _ in range(count)]
        except OSError as error:
            raise RunError(
                f"The data workers need {count * self.size / 2**20:.1f} MB for their batches, and the system gives no "
                f"such memory ({error.strerror}).",
                fix="use fewer workers (--workers), or a smaller batch",
            ) from None
        self.key = next(_keys)
        _rooms[self.key] = self

    def take(self, worker: int, wanted: Sequence[Wanted]) -> Slot | None:
        """Tensors in a free slot of a worker; None if all its slots are still in use, or they don't fit in."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        starts = [0, *itertools.accumulate(_whole(size, _ALIGNED) for size in sizes)]
        if starts[-1] > self.size:
            return None
        for number in range(worker * self.slots, (worker + 1) * self.slots):
            if not self._taken[number]:
                self._taken[number] = 1
                memory = self.bytes_of(number)
                pieces = [
                    memory[start : start + size].view(dtype).reshape(shape)
                    for start, size, (shape, dtype) in zip(starts, sizes, wanted, strict=False)
                ]
                return Slot(self.key, number, memory.ctypes.data, [torch.from_numpy(one) for one in pieces])
        return None

    def bytes_of(self, number: int) -> np.ndarray:
        """A slot, uint8."""
        return np.frombuffer(self._memory[number], np.uint8)

    def lend(self, number: int) -> np.ndarray:
        """A slot, uint8, to the process that a batch was sent to: it is free when this array is gone."""
        memory = self.bytes_of(number)
        weakref.finalize(memory, _give_back, self._taken, number, os.getpid()).atexit = False
        return memory


def _give_back(taken: mmap.mmap, number: int, owner: int) -> None:
    # A process that was forked from the owner has copies of the tensors, and may drop them earlier.
    if os.getpid() == owner:
        taken[number] = 0


_keys = itertools.count()
_rooms: weakref.WeakValueDictionary[int, Room] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Slot:
    """A worker's memory of one batch."""

    room: int
    number: int
    address: int
    tensors: list[torch.Tensor]
    """Uninitialised."""

    def sent(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What ``arrived`` makes tensors of that lie here: their places."""
        places = [
            (x.dtype, tuple(x.shape), x.stride(), (x.data_ptr() - self.address) // x.itemsize)
            for x in tensors
        ]
        return self.room, self.number, places


def arrived(key: int, number: int, places: list[Any]) -> list[torch.Tensor]:
    """The tensors that lie in a slot; when the last one is gone, it is free."""
    # torch holds this very array as long as any tensor looks into it.
    whole = torch.from_numpy(_rooms[key].lend(number))
    return [whole.view(dtype).as_strided(shape, stride, offset) for dtype, shape, stride, offset in places]


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit
