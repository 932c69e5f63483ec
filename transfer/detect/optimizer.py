"""Weight decay and learning rates as detectron2 sets them; DETR's optimizer.

Source: detectron2 ``solver/build.py`` and ``solver/lr_scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import FrozenBatchNorm2d

from zoo.optim.schedule import WarmupSteps

from .detr.detector import detr_groups
from .detr.protocol import DetrProtocol
from .protocols import AnyProtocol

__all__ = ["learning_rate", "make_optimizer", "parameter_groups"]

_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, FrozenBatchNorm2d)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: all that is decayed, biases of the heads included; and the norms, which are not."""
    norms = {
        id(p) for module in model.modules() if isinstance(module, _NORMS) for p in module.parameters(False)
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in norms], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in norms], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, protocol: AnyProtocol) -> torch.optim.Optimizer:
    """SGD with momentum, or for DETR AdamW that decays every parameter."""
    if isinstance(protocol, DetrProtocol):
        groups = detr_groups(model, protocol.lr, protocol.backbone_lr)
        return torch.optim.AdamW(groups, lr=protocol.lr, weight_decay=protocol.weight_decay, fused=True)
    groups = parameter_groups(model, protocol.weight_decay)
    return torch.optim.SGD(groups, lr=protocol.lr, momentum=protocol.momentum)


def learning_rate(
    base: float, factor: float, warmup: int, drops: tuple[int, ...], drop: float
) -> Callable[[int], float]:
    """The rate of each step: from ``factor * base`` to ``base`` at step ``warmup``, times ``drop`` at each drop."""
    steps = warmup + 1 if warmup else 0  # the first full rate belongs to the line
    return WarmupSteps(base, base * factor, steps, drops, drop, meets_drops=True).at
