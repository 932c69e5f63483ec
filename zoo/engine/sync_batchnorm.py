"""BatchNorm over the batch of several processes."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InputError
from .collectives import Collectives, TorchWorld

__all__ = ["AllReduceBatchNorm", "synchronize_batchnorm", "warn_of_others"]

log = logging.getLogger("zoo")


def synchronize_batchnorm(module: nn.Module, world: Collectives, group_size: int | None = None) -> nn.Module:
    """Let every BatchNorm1d and BatchNorm2d normalise over the batches of several processes.

    Parameters and buffers stay the same objects under the same names. On GPUs the layers become torch's
    SyncBatchNorm, elsewhere ``AllReduceBatchNorm``; subclasses of BatchNorm are left alone. Every process
    must call it, and before the network is wrapped or copied.

    Args:
        module: changed in place; a BatchNorm itself is replaced, so use what is returned.
        world: all processes; a world of one leaves the module as it is.
        group_size: this many neighbouring ranks share statistics; None for all.

    Raises:
        InputError: the number of processes is no multiple of ``group_size``.
    """
    if world.world_size == 1:
        return module
    size = world.world_size if group_size is None else group_size
    if size < 1 or world.world_size % size:
        raise InputError(
            f"BatchNorm can't be shared by groups of {size} among {world.world_size} processes.",
            fix="choose a group size that divides the number of processes",
        )
    if size == 1:
        return module
    group = world.split(size)
    tensors = itertools.chain(module.parameters(), module.buffers())
    on_gpu = next((tensor.is_cuda for tensor in tensors), False)
    done: dict[nn.Module, nn.Module] = {}
    module = _converted(module, group, on_gpu, done)
    if not on_gpu and world.rank == 0 and any(new is not old for old, new in done.items()):
        log.info("BatchNorm is synchronised by exchanges of our own: torch's SyncBatchNorm needs GPUs")
    return module


def warn_of_others(module: nn.Module, world: Collectives, group_size: int | None = None) -> None:
    """Name the kinds of BatchNorm that ``synchronize_batchnorm``, called before, left alone."""
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    left = {type(n).__name__ for n in norms if not isinstance(n, nn.SyncBatchNorm | AllReduceBatchNorm)}
    if left and world.rank == 0 and 1 not in (world.world_size, group_size):
        log.warning(
            "BatchNorms of another kind than torch's (%s) are not synchronised: each sees the images of its process",
            ", ".join(sorted(left)),
        )


def _converted(
    module: nn.Module, group: Collectives, on_gpu: bool, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in done:  # one layer in several places stays one
        return done[module]
    done[module] = module
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d):
        done[module] = _converted_layer(module, group, on_gpu)
    for name, child in list(module._modules.items()):  # named_children would leave out a second name
        if child is not None:
            module._modules[name] = _converted(child, group, on_gpu, done)
    return done[module]


def _converted_layer(layer: Any, group: Collectives, on_gpu: bool) -> nn.Module:
    new: Any
    if on_gpu:
        process_group = group.group if isinstance(group, TorchWorld) else None
        new = nn.SyncBatchNorm(layer.num_features, process_group=process_group)
    else:
        new = AllReduceBatchNorm(layer.num_features, group)
    # All that the layer is, hooks included; the new class adds where its processes are.
    new.__dict__.update(layer.__dict__)
    return new  # type: ignore[no-any-return]


class AllReduceBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are those of the batches of all processes together.

    Input (N, C, ...); N may differ between processes and be 0 on some of them. In evaluation, and in its
    state dict, it is torch's BatchNorm. Half types are computed in float32 and returned as they came.

    Args:
        num_features: C.
        world: the processes that share the batch.
        options: as for torch's BatchNorm.

    Source: Ioffe and Szegedy 2015, algorithm 1; the processes' means and sums of squares are combined as
    in Chan, Golub and LeVeque 1979, which stays accurate where a mean is large.
    """

    def __init__(self, num_features: int, world: Collectives, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.world = world

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (N, C, ...), got {input.dim()} dimensions")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, C, ...) -> the same shape and type.

        Raises:
            ValueError: all processes together have fewer than two values of each channel.
        """
        if not self.training:
            # Like torch's own: one process may evaluate alone.
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance = _Normalize.apply(input, self.weight, self.bias, self.eps, self.world)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self._update(mean, variance)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), share)


class _Normalize(torch.autograd.Function):
    """(x, weight, bias) -> normalised x, and mean and unbiased variance of all processes' x, float64 (C,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        world: Collectives,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = [0, *range(2, x.dim())]
        full = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        own_count = x.numel() // x.shape[1]
        # Values less the process's own mean are small: their rounding doesn't depend on the mean's size.
        center = full.sum(rows) / max(own_count, 1)
        centered = full - _channels(center, x)
        rest = centered.sum(rows).double()
        squares = centered.square().sum(rows).double() - rest.square() / max(own_count, 1)
        squares = squares.clamp_min(0)
        own_mean = center.double() + rest / max(own_count, 1)
        count, mean, squares = _combined(own_count, own_mean, squares, world)
        if count < 2:
            raise ValueError(f"expected several values of each channel in training, got {count}")
        shift = (center.double() - mean).to(full.dtype)
        scale = torch.rsqrt(squares / count + eps).to(full.dtype)
        ctx.save_for_backward(x, weight, center, shift, scale)
        ctx.count, ctx.world, ctx.bias_dtype = count, world, None if bias is None else bias.dtype
        factor = scale if weight is None else scale * weight.to(full.dtype)
        offset = shift * factor if bias is None else shift * factor + bias.to(full.dtype)
        output = torch.addcmul(_channels(offset, x), centered, _channels(factor, x))
        variance = squares / (count - 1)
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *unused: torch.Tensor) -> tuple[Any, ...]:
        x, weight, center, shift, scale = ctx.saved_tensors
        rows = [0, *range(2, x.dim())]
        full, gradient = x.to(center.dtype), gradient.to(center.dtype)
        centered = full - _channels(center, x)
        normalized = (centered + _channels(shift, x)) * _channels(scale, x)
        sums = torch.stack((gradient.sum(rows), (gradient * normalized).sum(rows)))
        # A parameter's gradient is this process's share: summing over processes is the optimizer's business.
        grad_bias = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        grad_weight = None if weight is None else sums[1].to(weight.dtype)
        total = ctx.world.sum_(sums.to(torch.float64, copy=True))
        means = (total / ctx.count).to(full.dtype)
        factor = scale if weight is None else scale * weight.to(full.dtype)
        grad = torch.addcmul(gradient - _channels(means[0], x), normalized, _channels(-means[1], x))
        return (grad * _channels(factor, x)).to(x.dtype), grad_weight, grad_bias, None, None


def _combined(
    count: int, mean: torch.Tensor, squares: torch.Tensor, world: Collectives
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Count, mean and sum of squares around it of all processes, from each one's own; float64 (C,)."""
    own = torch.cat((mean.new_tensor([count]), mean, squares))
    everyone = world.gather(own.unsqueeze(0))
    counts, means, inner = everyone.split([1, len(mean), len(mean)], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    return int(total), mean, (inner + counts * (means - mean).square()).sum(0)


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) -> (1, C, 1, ...), to be used with (N, C, ...)."""
    return values.view(1, -1, *(1,) * (like.dim() - 2))
