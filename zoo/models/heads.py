"""Projection heads and prototypes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Prototypes", "projection_head"]


def projection_head(in_features: int, hidden: int, out_features: int) -> nn.Module:
    """SwAV's head (``src/resnet50.py``): Linear, BatchNorm, ReLU, Linear; one Linear if ``hidden`` is 0."""
    if hidden == 0:
        return nn.Linear(in_features, out_features)
    return nn.Sequential(
        nn.Linear(in_features, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, out_features),
    )


class Prototypes(nn.Linear):
    """K prototype vectors as the rows of a bias-free linear layer: (N, D) -> scores (N, K)."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__(dim, count, bias=False)

    @torch.no_grad()
    def normalize(self) -> None:
        """Bring every prototype to unit length, in place (SwAV does so before each forward pass)."""
        self.weight.copy_(F.normalize(self.weight, dim=1, p=2))
