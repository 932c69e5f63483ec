"""What processes say to one another. The world of one says nothing."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Collectives", "WorldOfOne"]


class Collectives(Protocol):
    """The exchanges that losses and the engine use; tensors are reduced in place."""

    rank: int
    world_size: int

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by its sum over all processes."""
        ...

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` by its elementwise maximum over all processes."""
        ...


class WorldOfOne:
    """A single process: every reduction is the identity."""

    rank = 0
    world_size = 1

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor
