"""Activation checkpointing: a block's inner activations are computed again instead of being kept.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock, Bottleneck

from ..errors import InputError
from .amdim import Residual

__all__ = ["recompute_blocks", "statistics_kept"]

_BLOCKS = (BasicBlock, Bottleneck, Residual)


@contextlib.contextmanager
def statistics_kept(network: nn.Module) -> Iterator[None]:
    """Norms in training mode use the batch's statistics without taking them into their running ones."""
    norms: list[Any] = [m for m in network.modules() if getattr(m, "track_running_stats", False)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # They stay in the computation, which must save the same tensors as the first time, but weigh nothing.
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def _contexts(block: nn.Module) -> tuple[Any, Any]:
    return contextlib.nullcontext(), statistics_kept(block)


class _RecomputedSequential(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(input)
        for block in self:
            # The second computation sees the same batch: running statistics must not move twice.
            input = checkpoint(
                block,
                input,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=partial(_contexts, block),
            )
        return input


def recompute_blocks(trunk: nn.Module) -> None:
    """Keep only the inputs of a trunk's residual blocks in training; keys and values stay.

    Raises:
        InputError: it has none that are known here: torchvision's, or AMDIM's.
    """
    known = False
    for module in trunk.modules():
        blocks = list(module.children())
        if type(module) is nn.Sequential and blocks and all(isinstance(block, _BLOCKS) for block in blocks):
            module.__class__ = _RecomputedSequential
            known = True
    if not known:
        raise InputError(
            f"This trunk ({type(trunk).__name__}) has no blocks whose activations could be computed twice.",
            where="engine.activation_checkpointing",
            fix="leave it out; engine.accumulate=2 saves memory with every trunk",
        )
