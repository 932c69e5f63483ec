"""A method's steps as the loop makes them, by one process or by several, without the loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zoo.data.loader import Batch
from zoo.engine.collectives import Collectives, TorchWorld
from zoo.pretrain.methods.base import Method

__all__ = ["train_steps"]


class _Step(nn.Module):
    """A method's step as a forward pass, which is what DDP wraps."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, *given: Any) -> Any:
        return self.method.step(*given)


def train_steps(
    method: Method,
    optimizer: torch.optim.Optimizer,
    world: Collectives,
    share_of: Callable[[int], Batch],
    steps: Iterable[int],
    parts: int = 1,
) -> tuple[list[float], list[dict[str, Any]]]:
    """Train; gradients are averaged over processes.

    Args:
        method: in train mode, in float64.
        optimizer: of its parameters.
        world: of the processes.
        share_of: from a step to this process's images of it.
        steps: which ones.
        parts: that each process trains its share in.

    Returns:
        The loss of each step, averaged over processes, and what its last part logged.
    """
    compute: Any = method.step
    if isinstance(world, TorchWorld):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch calls it otherwise
            compute = DistributedDataParallel(
                _Step(method), process_group=world.group, broadcast_buffers=False
            )
    losses, logs = [], []
    for step in steps:
        batch = share_of(step)
        shares = [batch] if parts == 1 else batch.split(parts)
        method.before_step(step, 0)
        given: list[Any] = [None]
        if parts > 1:
            with torch.no_grad():
                given = method.first_pass([(lambda p=part: p.views, part) for part in shares])
        total = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(shares):
            waits = number < parts - 1 and isinstance(world, TorchWorld)
            with compute.no_sync() if waits else contextlib.nullcontext():
                loss, figures = compute(part.views, part, given[number])
                (loss / parts).backward()
            total += loss.detach() / parts
        losses.append(float(world.sum_(total)) / world.world_size)
        logs.append(dict(figures))
        method.before_update(step)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(step)
    return losses, logs
