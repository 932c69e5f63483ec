"""A running average of a network's weights, kept beside the ones that are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["WeightAverage"]


class WeightAverage:
    """average <- decay * average + (1 - decay) * weights after each update; buffers are copied.

    Source: Polyak and Juditsky 1992, in the exponential form that is usual for networks.

    Args:
        network: what is averaged.
        decay: 0..1; 0.999 remembers about a thousand updates.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._network = network
        self.decay = decay
        self._average = {key: value.detach().clone() for key, value in network.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an update."""
        pairs: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {True: [], False: []}
        for key, value in self._network.state_dict().items():
            pairs[value.is_floating_point()].append((self._average[key], value))
        floats = pairs[True]
        torch._foreach_lerp_([mine for mine, _ in floats], [new for _, new in floats], 1 - self.decay)
        for mine, new in pairs[False]:
            mine.copy_(new)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._average)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            self._average[key].copy_(value)
