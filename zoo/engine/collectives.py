"""What processes say to one another. The world of one says nothing."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..errors import InputError

__all__ = ["Collectives", "TorchWorld", "WorldOfOne"]


class Collectives(Protocol):
    """The exchanges that losses and the engine use.

    Every process must make the same exchanges in the same order, with tensors of the same shape and type.
    ``rank`` counts all processes from 0, ``local_rank`` those of one machine.
    """

    rank: int
    world_size: int
    local_rank: int

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by its sum over all processes; no gradient flows."""
        ...

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by its elementwise maximum over all processes; no gradient flows."""
        ...

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Replace ``tensor`` by that of the process of rank ``source``; no gradient flows."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all processes in rank order, with gradients: (N, ...) -> (world_size * N, ...).

        Backward, a process gets the sum over all processes of the gradient of its own rows: what is
        differentiated is the sum of all processes' losses. Each of them must therefore use the result in
        its loss, and each parameter's gradient is that of the sum once it is summed over the processes.
        DDP averages instead, which divides by ``world_size``: right as it is where each loss is a mean over
        the process's own rows (the average of these is the mean over all rows), and right, too, where every
        process computes the same mean over all rows, since then the sum counts it ``world_size`` times.
        """
        ...

    def gather_values(self, value: Any) -> list[Any]:
        """The plain value of each process in rank order; it travels as JSON, so tuples become lists."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process: how a stop that one was asked for reaches all."""
        ...

    def barrier(self) -> None:
        """Wait until every process is here."""
        ...

    def split(self, size: int) -> Collectives:
        """The world of the ``size`` neighbouring ranks that this process is one of; all must call it.

        Raises:
            InputError: ``world_size`` is no multiple of ``size``.
        """
        ...


class WorldOfOne:
    """A single process: every exchange is the identity."""

    rank = 0
    world_size = 1
    local_rank = 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather_values(self, value: Any) -> list[Any]:
        # Through JSON like anywhere else: what can't travel fails with one process already.
        return [json.loads(json.dumps(value))]

    def any(self, flag: bool) -> bool:
        return bool(flag)

    def barrier(self) -> None:
        pass

    def split(self, size: int) -> WorldOfOne:
        _check_split(self.world_size, size)
        return self


class TorchWorld:
    """The exchanges over a process group of torch.distributed.

    Tensors must be where the group's backend works (nccl: on this process's GPU). gloo computes a sum in
    the tensor's own number format, so half types should be promoted first.

    Args:
        local_rank: this process's number on its machine, which is its GPU's with nccl.
        group: None for the default group, which must exist (``open_world`` makes it).
        timeout: how long members of a ``split`` wait for one another; None for torch's own limit.

    Attributes:
        bytes_exchanged: the bytes of the tensors that this process passed to its exchanges so far.
    """

    def __init__(
        self,
        local_rank: int = 0,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.local_rank = local_rank
        self.timeout = timeout
        self.bytes_exchanged = 0
        self._on_gpu = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", local_rank) if self._on_gpu else torch.device("cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchWorld:
        # A copied network (a momentum encoder) talks to the same processes.
        return self

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def broadcast_(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        sender = source if self.group is None else dist.get_global_rank(self.group, source)
        whole = self._outgoing(tensor)
        dist.broadcast(whole, sender, group=self.group)
        return _taken_over(tensor, whole)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = _Gather.apply(tensor, self)
        return gathered

    def gather_values(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        lengths = self.gather(torch.tensor([len(text)], device=self._device)).tolist()
        padded = torch.zeros(1, max(lengths), dtype=torch.uint8)
        padded[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.gather(padded.to(self._device)).cpu().numpy()
        return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def any(self, flag: bool) -> bool:
        return bool(self.max_(torch.tensor([int(flag)], device=self._device)).item())

    def barrier(self) -> None:
        dist.barrier(self.group, device_ids=[self.local_rank] if self._on_gpu else None)

    def split(self, size: int) -> TorchWorld:
        _check_split(self.world_size, size)
        if size == self.world_size:
            return self
        if self.group is not None:
            raise ValueError("only the whole world can be split")
        # Making a group is an exchange of the whole world: each process takes part in making all of them.
        groups: list[Any] = [
            dist.new_group(list(range(first, first + size)), timeout=self.timeout)
            for first in range(0, self.world_size, size)
        ]
        return TorchWorld(self.local_rank, groups[self.rank // size], self.timeout)

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError("a reduction carries no gradient: detach the tensor, or use gather")
        whole = self._outgoing(tensor)
        dist.all_reduce(whole, op=operation, group=self.group)
        return _taken_over(tensor, whole)

    def _outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes_exchanged += tensor.numel() * tensor.element_size()
        return tensor.detach().contiguous()


def _taken_over(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Put the result into a tensor that could not be exchanged in place, since its memory has gaps."""
    if tensor.data_ptr() != whole.data_ptr():
        tensor.detach().copy_(whole)
    return tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, world: TorchWorld) -> torch.Tensor:
        ctx.world = world
        mine = world._outgoing(tensor)
        everyone = [torch.empty_like(mine) for _ in range(world.world_size)]
        dist.all_gather(everyone, mine, group=world.group)
        return torch.cat(everyone)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        world: TorchWorld = ctx.world
        total = world.sum_(gradient.clone(memory_format=torch.contiguous_format))
        return total.chunk(world.world_size)[world.rank], None


def _check_split(world_size: int, size: int) -> None:
    if size < 1 or world_size % size:
        raise InputError(
            f"{world_size} processes can't be divided into groups of {size}.",
            fix="choose a group size that divides the number of processes",
        )
