"""Weight decay and learning rates as detectron2 sets them.

Source: detectron2 ``solver/build.py`` and ``solver/lr_scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import FrozenBatchNorm2d

from zoo.optim.schedule import WarmupSteps

__all__ = ["learning_rate", "parameter_groups"]

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


def learning_rate(
    base: float, factor: float, warmup: int, drops: tuple[int, ...], drop: float
) -> Callable[[int], float]:
    """The rate of each step: from ``factor * base`` to ``base`` at step ``warmup``, times ``drop`` at each drop."""
    steps = warmup + 1 if warmup else 0  # the first full rate belongs to the line
    return WarmupSteps(base, base * factor, steps, drops, drop).at
