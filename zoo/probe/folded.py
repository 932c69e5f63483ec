"""A trunk made for nothing but features: BatchNorm inside its convolutions, channels-last, half type."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import Conv2dNormActivation, FrozenBatchNorm2d

__all__ = ["folded", "for_features"]


def folded(trunk: nn.Module) -> Any:
    """A copy in eval mode whose convolutions do the work of the BatchNorms behind them.

    In eval mode a BatchNorm multiplies each channel by a number and adds one, which the weights and a bias of
    the convolution before it can do. The order of a network's modules doesn't say which stands behind which, so
    this is done in torchvision's ResNets, their blocks and its convolutions with a norm alone; other networks are
    copied as they are.

    Args:
        trunk: is not changed; a ResNet may also lie within it.

    Returns:
        The same features to rounding.
    """
    copied = copy.deepcopy(trunk).eval()
    for parent, convolution, norm in list(_pairs(copied)):
        conv, bn = getattr(parent, convolution), getattr(parent, norm)
        if _foldable(conv, bn):
            _fold(conv, bn)
            setattr(parent, norm, nn.Identity())
    return copied


def for_features(trunk: nn.Module, dtype: torch.dtype) -> Any:
    """A folded copy in channels-last memory; its convolutions and linear layers hold their weights in ``dtype``.

    To be called under autocast of the same type, which would else convert the weights in each pass.
    """
    network = folded(trunk).to(memory_format=torch.channels_last)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(dtype)
    return network


def _pairs(network: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Modules with the names of a convolution and of the norm that is called right behind it."""
    for module in network.modules():
        if type(module) in (ResNet, BasicBlock, Bottleneck):  # a class made from them may call them otherwise
            for number in (1, 2, 3):
                if hasattr(module, f"conv{number}") and hasattr(module, f"bn{number}"):
                    yield module, f"conv{number}", f"bn{number}"
            shortcut = getattr(module, "downsample", None)
            if isinstance(shortcut, nn.Sequential) and len(shortcut) == 2:
                yield shortcut, "0", "1"
        elif type(module) is Conv2dNormActivation and "1" in module._modules:
            yield module, "0", "1"


def _foldable(conv: nn.Module, bn: nn.Module) -> bool:
    watched = any(module._forward_hooks or module._forward_pre_hooks for module in (conv, bn))
    kinds = (nn.BatchNorm2d, nn.SyncBatchNorm, FrozenBatchNorm2d)
    kept = type(bn) in kinds and bn.running_mean is not None
    return isinstance(conv, nn.Conv2d) and "weight" in conv._parameters and kept and not watched


def _fold(conv: Any, bn: Any) -> None:
    """In float64, so that folding itself costs no digit."""
    factor = (bn.running_var.double() + bn.eps).rsqrt()
    if bn.weight is not None:
        factor = factor * bn.weight.double()
    before = 0.0 if conv.bias is None else conv.bias.double()
    bias = (before - bn.running_mean.double()) * factor
    if bn.bias is not None:
        bias = bias + bn.bias.double()
    like = conv.weight.dtype
    with torch.no_grad():
        weight = (conv.weight.double() * factor[:, None, None, None]).to(like)
    conv.weight = nn.Parameter(weight, requires_grad=False)
    conv.bias = nn.Parameter(bias.detach().to(like), requires_grad=False)
