"""What stands on a trunk: projection heads, prototypes, and the classifiers that judge features."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MapClassifier", "Prototypes", "feature_classifier", "projection_head"]


def projection_head(
    in_features: int, hidden: int, out_features: int, norm: bool = True, output_norm: bool = False
) -> nn.Module:
    """Linear, BatchNorm, ReLU, Linear; one Linear if ``hidden`` is 0.

    SwAV's head (``src/resnet50.py``). Without ``norm`` it is MoCo v2's, and that of SwAV's widest network.
    With ``output_norm`` another BatchNorm follows, as in SimCLR's own (``model_util.py``; its last one doesn't shift).
    """
    last = [nn.BatchNorm1d(out_features)] if output_norm else []
    if hidden == 0:
        linear = nn.Linear(in_features, out_features)
        return nn.Sequential(linear, *last) if last else linear
    first = nn.Linear(in_features, hidden)
    between = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(first, *between, nn.ReLU(inplace=True), nn.Linear(hidden, out_features), *last)


class Prototypes(nn.Linear):
    """K prototype vectors as the rows of a bias-free linear layer: (N, D) -> scores (N, K)."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__(dim, count, bias=False)

    @torch.no_grad()
    def normalize(self) -> None:
        """Bring every prototype to unit length, in place (SwAV does so before each forward pass)."""
        self.weight.copy_(F.normalize(self.weight, dim=1, p=2))


class MapClassifier(nn.Module):
    """SwAV's linear classifier (``RegLog`` of ``eval_linear.py``): maps (N, C, 7, 7) -> logits.

    Args:
        channels: C.
        classes: of the data.
        average: pool each map to one number, whatever its size. Otherwise windows of 6 x 6 are averaged:
            four numbers a map of 7 x 7.
        norm: a BatchNorm over the four numbers' channels; the reference has none on averages.
    """

    def __init__(self, channels: int, classes: int, *, average: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.pool: nn.Module = nn.AdaptiveAvgPool2d(1) if average else nn.AvgPool2d(6, stride=1)
        self.bn = nn.BatchNorm2d(channels) if norm and not average else None
        self.linear = nn.Linear(channels if average else 4 * channels, classes)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        x = self.pool(maps)
        if self.bn is not None:
            x = self.bn(x)
        return self.linear(x.flatten(1))


def feature_classifier(
    in_features: int, classes: int, hidden: int = 0, dropout: float = 0.0
) -> nn.Sequential:
    """AMDIM's evaluators: pooled features (N, F) or (N, F, 1, 1) -> logits (N, classes).

    The reference trains two beside each other on detached features: a linear one, and an MLP of 1024
    hidden units with dropout 0.2.

    Args:
        in_features: F.
        classes: of the data.
        hidden: units of the MLP's hidden layer; 0 for the linear classifier.
        dropout: probability, before each linear layer.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    if hidden:
        layers += [
            nn.Dropout(dropout),
            nn.Linear(in_features, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
        ]
    layers += [nn.Dropout(dropout), nn.Linear(hidden or in_features, classes)]
    return nn.Sequential(*layers)
