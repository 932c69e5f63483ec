"""Convolutions over maps of one or two pixels a side, on CPUs, as matrix products.

The last stages of a ResNet see such maps where views are small: 2 x 2 from 64 pixels, 1 x 1 from 32. There
most taps of a 3x3 kernel meet padding, and oneDNN (3.12, torch 2.14) works at a quarter of the speed of a
matrix product. It also leaves the weight gradient of a strided bfloat16 convolution over one pixel partly
unwritten: it holds whatever was in memory, NaN included. A matrix product over the taps that meet the map is
the same sum, right, and several times faster.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["use_matrix_products"]

_SIDE = 2  # pixels; a map of three has as many products as the convolution


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


def use_matrix_products(network: nn.Module) -> None:
    """Make a network's padded 3x3 convolutions right and fast on small maps; keys and values stay."""
    for module in network.modules():
        if type(module) is not nn.Conv2d or module.padding_mode != "zeros":
            continue
        square = module.kernel_size == (3, 3) and module.padding == (1, 1) and module.dilation == (1, 1)
        if square and module.stride[0] == module.stride[1]:
            module.__class__ = _SmallMapConv2d
