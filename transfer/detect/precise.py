"""Statistics of BatchNorm over many batches, measured when training is over.

Source: fvcore ``nn/precise_bn.py``: of all positions of all batches together, without Bessel's correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zoo.engine.collectives import Collectives, WorldOfOne

__all__ = ["precise_batchnorm"]


@torch.no_grad()
def precise_batchnorm(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[Any], Any],
    world: Collectives | None = None,
) -> None:
    """Put the exact mean and variance over ``batches`` into every BatchNorm of ``model``.

    Args:
        model: in training mode.
        batches: of this process.
        forward: takes a batch through the model.
        world: the processes whose batches are measured together.
    """
    world = world or WorldOfOne()
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    sums = [torch.zeros(2 * norm.num_features + 1, dtype=torch.float64) for norm in norms]
    device = next(model.parameters()).device

    def add(number: int, x: torch.Tensor) -> None:
        rows = [0, *range(2, x.dim())]
        full = x.double() if device.type != "mps" else x.float()
        count = full.new_tensor([full.numel() / full.shape[1]])
        part = torch.cat((count, full.sum(rows), full.square().sum(rows)))
        sums[number] = sums[number].to(part.device) + part

    def hook(number: int) -> Any:
        return lambda module, inputs: add(number, inputs[0].detach())

    handles = [norm.register_forward_pre_hook(hook(number)) for number, norm in enumerate(norms)]
    try:
        for batch in batches:
            forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    for norm, total in zip(norms, sums, strict=True):
        whole = world.sum_(total.to(device))
        count, mean, squares = whole.split([1, norm.num_features, norm.num_features])
        if float(count) > 0 and norm.running_mean is not None and norm.running_var is not None:
            mean, squares = mean / count, squares / count
            norm.running_mean.copy_(mean)
            norm.running_var.copy_((squares - mean.square()).clamp(min=0.0))
