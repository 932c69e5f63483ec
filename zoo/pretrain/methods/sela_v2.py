"""SeLa-v2: predict the balanced code that an image had in the last epoch.

Sources: SwAV section 5.1 and its authors in issue 59 of the repository: DeepCluster-v2 with Sinkhorn in the place
of k-means, and prototypes that are learned. No code was released; what that leaves open is an option, and the
recipe ``selav2_rn50_400ep_2x224`` argues for the defaults.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ...engine.collectives import Collectives
from ..losses.deepcluster import UNSEEN, nearest, sinkhorn_offsets
from .config_base import RunShape
from .deepcluster_v2 import BankMethod
from .sela_v2_config import SeLaV2Config

__all__ = ["SeLaV2"]


class SeLaV2(BankMethod):
    """Targets are Sinkhorn codes of the last epoch's embeddings, over the whole set at once.

    When an epoch begins, each head's codes are made of the bank of the assigning crop h (in turn) and the
    prototypes as they are then; they stay for the epoch. Prototypes are of unit length in every forward pass,
    as in SwAV.

    Soft codes of all images would be N x K numbers. Kept are all images' embeddings instead, in each process,
    which with the prototypes of the epoch's beginning give them again.
    """

    config: SeLaV2Config

    def __init__(self, trunk: Any, config: SeLaV2Config, shape: RunShape, world: Collectives) -> None:
        super().__init__(trunk, config, shape, world)
        # Of each head: prototypes / epsilon, and what Sinkhorn adds. Codes are the softmax of these scores.
        self._coding: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before_step(self, step: int, epoch: int) -> None:
        super().before_step(step, epoch)
        for prototypes in self.heads():
            prototypes.normalize()

    def assign(self, epoch: int) -> torch.Tensor:
        """Labels (N, heads) int64 of this process's rows; for soft codes their embeddings (N, crops, D)."""
        assert self.bank is not None
        config = self.config
        self._coding = []
        labels = []
        for head, prototypes in enumerate(self.heads()):
            prototypes.normalize()
            rows, weight = self.bank[head % len(self.bank)], prototypes.weight.detach()
            offsets = sinkhorn_offsets(rows, weight, config.epsilon, config.sinkhorn_iterations, self.world)
            self._coding.append((weight / config.epsilon, offsets))
            if config.codes == "hard":
                labels.append(nearest(rows, *self._coding[-1]))
        return torch.stack(labels, dim=1) if labels else self.bank.transpose(0, 1).contiguous()

    def _assigned(self) -> torch.Tensor:
        if self.config.codes == "hard":
            return super()._assigned()
        assert self.bank is not None
        weights = [prototypes.weight.detach() for prototypes in self.heads()]
        self._coding = [(weight.clone(), weight.new_zeros(len(weight))) for weight in weights]
        return self.bank.transpose(0, 1).contiguous()

    def targets(self, found: torch.Tensor, known: torch.Tensor) -> list[torch.Tensor]:
        if self.config.codes == "hard":
            return list(found.masked_fill(~known[:, None], UNSEEN).unbind(dim=1))
        with torch.autocast(found.device.type, enabled=False):
            return [
                F.softmax(F.linear(found[:, head % found.shape[1]], *coding), dim=1) * known[:, None]
                for head, coding in enumerate(self._coding)
            ]

    def local_state(self) -> dict[str, Any]:
        state = super().local_state()
        return {**state, "coding": self._coding} if state and self.config.codes == "soft" else state

    def load_local_state(self, state: dict[str, Any]) -> None:
        rows = dict(state)
        coding = rows.pop("coding", [])
        self._coding = [(weight.to(self.device), offsets.to(self.device)) for weight, offsets in coding]
        super().load_local_state(rows)

    def share_out(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        dealt = super().share_out(states, rank, world_size)
        return {**dealt, "coding": states[0]["coding"]} if "coding" in states[0] else dealt
