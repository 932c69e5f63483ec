"""A trunk as DETR trains it: every norm frozen, the stem and the first stage as well.

Source: DETR ``models/backbone.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

__all__ = ["freeze_trunk"]

_PAIRS = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"), ("0", "1"))
"""A convolution and the norm right behind it, in a ResNet, its blocks and their shortcuts."""
_TRAINED = ("layer2.", "layer3.", "layer4.")


class _AppliedNorm(FrozenBatchNorm2d):
    """A frozen norm that the convolution before it applies: it holds the values and lets maps pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def line(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What channels are multiplied by, and what is added then."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return scale, self.bias - self.running_mean * scale


class _NormedConv2d(nn.Conv2d):
    """A convolution and the frozen norm behind it in one: the norm is a factor of the filters, and a bias.

    The same function and gradients as one after the other, without the passes over the map that a norm takes.
    """

    def __init__(self, conv: nn.Conv2d, norm: _AppliedNorm) -> None:
        size: Any = conv.kernel_size
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            size,
            conv.stride,  # type: ignore[arg-type]
            conv.padding,  # type: ignore[arg-type]
            conv.dilation,  # type: ignore[arg-type]
            conv.groups,
            bias=False,
            device="meta",
        )
        self.weight = conv.weight
        self._norm = (norm,)  # in a tuple, since it is its block's module, not this one's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self._norm[0].line()
        weight = self.weight * scale.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, shift, self.stride, self.padding, self.dilation, self.groups)


def freeze_trunk(trunk: Any) -> None:
    """Turn every BatchNorm into constants, and let only the last three stages learn.

    Names stay; what was a norm's parameter is a buffer afterwards.
    """
    for parent in list(trunk.modules()):
        for conv_name, norm_name in _PAIRS:
            conv, norm = (parent._modules.get(name) for name in (conv_name, norm_name))
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                frozen = _constant(norm)
                setattr(parent, norm_name, frozen)
                setattr(parent, conv_name, _NormedConv2d(conv, frozen))
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(name.startswith(_TRAINED))


def _constant(norm: nn.BatchNorm2d) -> _AppliedNorm:
    made = _AppliedNorm(norm.num_features, norm.eps)
    for name in ("weight", "bias", "running_mean", "running_var"):
        setattr(made, name, getattr(norm, name).detach().clone())
    return made
