"""Convolutions over small maps, on CPUs, as matrix products.

The last stages of a ResNet see maps of one or two pixels a side where views are small: 2 x 2 from 64 pixels,
1 x 1 from 32. There most taps of a 3x3 kernel meet padding, and oneDNN (3.12, torch 2.14) works at a quarter of
the speed of a matrix product. It also leaves the weight gradient of a strided bfloat16 convolution over one
pixel partly unwritten: it holds whatever was in memory, NaN included. A matrix product over the taps that meet
the map is the same sum, right, and several times faster.

Without padding, as of 1x1 kernels and all of AMDIM's encoder, oneDNN falls behind earlier: to make 7 x 7 pixels a
product of all patches with all taps takes 0.3 to 1.0 of its time, the less the more channels there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["use_matrix_products"]

_SIDE = 2  # pixels; a map of three has as many products as the convolution
_UNPADDED_SIDE = 7  # of what comes out; beyond it patches cost more than they save


class _SmallMapConv2d(nn.Conv2d):
    """A 3x3 convolution, padding 1, one stride for both directions."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        height, width = input.shape[-2:]
        stride = self.stride[0]
        out = (height - 1) // stride + 1, (width - 1) // stride + 1
        # Inductor (torch 2.14) can't compile the products for sizes that it doesn't know.
        if self.groups > 1 or torch.compiler.is_compiling():
            if height == width == 1:
                return F.conv2d(input, self.weight[:, :, 1:2, 1:2], self.bias, groups=self.groups)
            return super().forward(input)
        if max(out) > _SIDE:
            return super().forward(input)
        pixels = input.permute(0, 2, 3, 1)  # no copy in channels-last memory
        taps = self.weight.permute(0, 2, 3, 1)
        if max(height, width) > _SIDE:
            patches = F.pad(pixels, (0, 0, 1, 1, 1, 1)).unfold(1, 3, stride).unfold(2, 3, stride)
            rows, matrix = patches.permute(0, 1, 2, 4, 5, 3).flatten(3), taps.flatten(1)
            return F.linear(rows, matrix, self.bias).permute(0, 3, 1, 2)
        # A row of the matrix for each output pixel and channel: the taps that meet the map.
        seen = [
            taps[:, 1 - y : 1 - y + height, 1 - x : 1 - x + width]
            for y in range(0, out[0] * stride, stride)
            for x in range(0, out[1] * stride, stride)
        ]
        found = F.linear(pixels.flatten(1), torch.cat(seen).flatten(1))
        maps = found.unflatten(1, (*out, -1)).permute(0, 3, 1, 2)
        return maps if self.bias is None else maps + self.bias[:, None, None]


class _PatchProducts(torch.autograd.Function):
    """Pixels (N, H, W, C) and taps (D, K, K, C) -> (N, H', W', D).

    The patches hold each pixel several times: they are made again for the gradient, not kept.
    """

    @staticmethod
    def forward(ctx: Any, pixels: torch.Tensor, taps: torch.Tensor, stride: int) -> torch.Tensor:
        ctx.save_for_backward(pixels, taps)
        ctx.stride = stride
        return F.linear(_patches(pixels, taps.shape[1], stride), taps.flatten(1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        pixels, taps = ctx.saved_tensors
        stride, width = ctx.stride, taps.shape[1]
        rows = gradient.flatten(0, 2)
        of_pixels = of_taps = None
        if ctx.needs_input_grad[1]:
            of_taps = (rows.T @ _patches(pixels, width, stride).flatten(0, 2)).view_as(taps)
        if ctx.needs_input_grad[0]:
            of_patches = (rows @ taps.flatten(1)).view(*gradient.shape[:3], *taps.shape[1:])
            of_pixels = torch.zeros_like(pixels)
            height, length = (stride * (side - 1) + 1 for side in gradient.shape[1:3])
            for y in range(width):
                for x in range(width):
                    of_pixels[:, y : y + height : stride, x : x + length : stride] += of_patches[
                        :, :, :, y, x
                    ]
        return of_pixels, of_taps, None


def _patches(pixels: torch.Tensor, width: int, stride: int) -> torch.Tensor:
    """(N, H, W, C) -> (N, H', W', K * K * C): a row for each place of a K x K kernel."""
    return pixels.unfold(1, width, stride).unfold(2, width, stride).permute(0, 1, 2, 4, 5, 3).flatten(3)


class _UnpaddedConv2d(nn.Conv2d):
    """A square convolution without padding or groups, one stride for both directions."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        width, stride = self.kernel_size[0], self.stride[0]
        if not 0 <= max(input.shape[-2:]) - width < _UNPADDED_SIDE * stride or min(input.shape[-2:]) < width:
            return super().forward(input)
        pixels, taps = input.permute(0, 2, 3, 1), self.weight.permute(0, 2, 3, 1)
        if width == stride == 1:
            return F.linear(pixels, taps.flatten(1), self.bias).permute(0, 3, 1, 2)
        if torch.is_autocast_enabled(input.device.type):
            half = torch.get_autocast_dtype(input.device.type)
            pixels, taps = pixels.to(half), taps.to(half)
        maps: torch.Tensor = _PatchProducts.apply(pixels, taps, stride).permute(0, 3, 1, 2)
        return maps if self.bias is None else maps + self.bias[:, None, None].to(maps.dtype)


def use_matrix_products(network: nn.Module) -> None:
    """Make a network's convolutions right and fast on small maps; keys and values stay."""
    for module in network.modules():
        if type(module) is not nn.Conv2d or module.padding_mode != "zeros" or module.dilation != (1, 1):
            continue
        if len({*module.kernel_size}) > 1 or len({*module.stride}) > 1:
            continue
        if module.kernel_size == (3, 3) and module.padding == (1, 1):
            module.__class__ = _SmallMapConv2d
        elif module.padding == (0, 0) and module.groups == 1:
            module.__class__ = _UnpaddedConv2d
