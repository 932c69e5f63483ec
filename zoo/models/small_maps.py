"""Convolutions on CPUs as matrix products, where oneDNN (3.12, torch 2.14) is slow or wrong.

The last stages of a ResNet see small maps: 7 x 7 from 224 pixels, 2 x 2 from 64, 1 x 1 from 32. There most taps
of a 3x3 kernel meet padding, and oneDNN works at a fraction of the speed of a matrix product, above all in
bfloat16 and for the gradient of the weights: a tenth of it over 3 x 3 pixels on a processor with matrix units.
It also leaves that gradient of a strided bfloat16 convolution over one pixel partly unwritten: it holds whatever
was in memory, NaN included. A matrix product over the pixels, or over the taps that meet the map, is the same
sum, right, and several times faster.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

__all__ = ["use_matrix_products"]

_SIDE = 2  # pixels; over a map of three a 3x3 kernel needs as many products as the convolution
# In half precision, which torch leaves to oneDNN in products too (float32 to MKL, slow on AMD's processors):
_POINTWISE = 7  # pixels to a side, of a 1x1 convolution's output; of any size with matrix units (AMX)
_WEIGHTS = 7  # the same, of a 3x3 one, for the gradient of its weights alone


class _Matrix2d(nn.Conv2d):
    """What both kinds share: one stride for both directions, and a weight cast once for all groups of views."""

    _cast: tuple[Any, int, Any] | None = None  # the weight, its version, and its copy in autocast's type

    def _operands(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and weight as a convolution would see them under autocast."""
        cast = input.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if not cast or input.dtype is torch.float64:
            return input, self.weight
        dtype = torch.get_autocast_dtype("cpu")
        return input.to(dtype), self._weight_in(dtype)

    def _weight_in(self, dtype: torch.dtype) -> torch.Tensor:
        """Autocast keeps copies of weights for its own operations only. Ours lives as long as the step's graph."""
        if self.weight.dtype is dtype:
            return self.weight
        if self._cast is not None:
            owner, version, kept = self._cast[0](), self._cast[1], self._cast[2]()
            ours = owner is self.weight and version == self.weight._version
            needs_gradient = self.weight.requires_grad and torch.is_grad_enabled()
            if (
                ours
                and kept is not None
                and kept.dtype is dtype
                and (kept.requires_grad or not needs_gradient)
            ):
                return kept  # type: ignore[no-any-return]
        made = self.weight.to(dtype)
        self._cast = (weakref.ref(self.weight), self.weight._version, weakref.ref(made))
        return made

    def __getstate__(self) -> dict[str, Any]:  # of copies and pickles
        return {name: value for name, value in vars(self).items() if name != "_cast"}


@functools.cache
def _has_matrix_units() -> bool:
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


class _PointwiseConv2d(_Matrix2d):
    """A 1x1 convolution without padding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.groups > 1 or torch.compiler.is_compiling():
            return super().forward(input)
        stride = self.stride[0]
        given, weight = self._operands(input)
        small = (max(input.shape[-2:]) - 1) // stride < _POINTWISE
        if given.dtype.itemsize > 2 or not (small or _has_matrix_units()):
            return self._conv_forward(given, weight, self.bias)
        return _shifted(_Product.apply(given, weight, stride), self.bias)


class _SmallMapConv2d(_Matrix2d):
    """A 3x3 convolution, padding 1."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        height, width = input.shape[-2:]
        stride = self.stride[0]
        out = (height - 1) // stride + 1, (width - 1) // stride + 1
        # Inductor (torch 2.14) can't compile the products for sizes that it doesn't know.
        if self.groups > 1 or torch.compiler.is_compiling():
            if height == width == 1:
                return F.conv2d(input, self.weight[:, :, 1:2, 1:2], self.bias, groups=self.groups)
            return super().forward(input)
        given, weight = self._operands(input)
        if max(out) > _SIDE:
            if given.dtype.itemsize > 2 or max(out) > _WEIGHTS:
                return self._conv_forward(given, weight, self.bias)
            return _shifted(_Product.apply(given, weight, stride), self.bias)
        pixels = given.permute(0, 2, 3, 1)  # no copy in channels-last memory
        taps = weight.permute(0, 2, 3, 1)
        if max(height, width) > _SIDE:
            return F.linear(_patches(given, 3, stride), taps.flatten(1), self.bias).permute(0, 3, 1, 2)
        # A row of the matrix for each output pixel and channel: the taps that meet the map.
        seen = [
            taps[:, 1 - y : 1 - y + height, 1 - x : 1 - x + width]
            for y in range(0, out[0] * stride, stride)
            for x in range(0, out[1] * stride, stride)
        ]
        found = F.linear(pixels.flatten(1), torch.cat(seen).flatten(1))
        return _shifted(found.unflatten(1, (*out, -1)).permute(0, 3, 1, 2), self.bias)


def _shifted(maps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return maps if bias is None else maps + bias.to(maps.dtype)[:, None, None]


def _patches(maps: torch.Tensor, kernel: int, stride: int) -> torch.Tensor:
    """(B, C, H, W) to what a kernel, padded to keep the size, sees at each place: (B, H', W', taps * C)."""
    pixels = maps.permute(0, 2, 3, 1)  # no copy in channels-last memory
    if kernel == 1:
        return pixels[:, ::stride, ::stride]
    seen = F.pad(pixels, (0, 0, 1, 1, 1, 1)).unfold(1, kernel, stride).unfold(2, kernel, stride)
    return seen.permute(0, 1, 2, 4, 5, 3).flatten(3)


class _Product(torch.autograd.Function):
    """A convolution padded to keep the size: a 1x1 as products, a 3x3 with the gradient of its weights as one."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, stride: int) -> torch.Tensor:
        ctx.save_for_backward(input, weight)  # not views of them: `_weight_in` counts on it
        ctx.stride = stride
        kernel = weight.shape[-1]
        if kernel == 1:
            pixels = _patches(input, 1, stride)
            shape = (len(input), len(weight), *pixels.shape[1:3])
            # Not a view of something: a ReLU may write into it.
            maps = torch.empty(
                shape, dtype=input.dtype, device=input.device, memory_format=torch.channels_last
            )
            rows = maps.permute(0, 2, 3, 1).view(-1, len(weight))
            torch.mm(pixels.flatten(0, 2), weight.flatten(1).t(), out=rows)
            return maps
        return torch.conv2d(input, weight, stride=stride, padding=kernel // 2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        input, weight = ctx.saved_tensors
        kernel, stride = weight.shape[-1], ctx.stride
        pixels = gradient.permute(0, 2, 3, 1)
        of_input = of_weight = None
        if ctx.needs_input_grad[0] and kernel == 1:
            of_input = (pixels @ weight.flatten(1)).permute(0, 3, 1, 2)
            if stride > 1:
                of_input, seen = torch.zeros_like(input), of_input
                of_input[..., ::stride, ::stride] = seen
        elif ctx.needs_input_grad[0]:
            geometry = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1
            of_input = torch.ops.aten.convolution_backward(
                gradient, input, weight, None, *geometry, [True, False, False]
            )[0]
        if ctx.needs_input_grad[1]:
            product = pixels.flatten(0, 2).t() @ _patches(input, kernel, stride).flatten(0, 2)
            of_weight = product.unflatten(1, (kernel, kernel, -1)).permute(0, 3, 1, 2)
        return of_input, of_weight, None


def use_matrix_products(network: nn.Module) -> None:
    """Make a network's 1x1 and padded 3x3 convolutions right and fast on small maps; keys and values stay."""
    # By kernel and padding.
    kinds: dict[tuple[Any, Any], type[nn.Conv2d]] = {(1, 0): _PointwiseConv2d, (3, 1): _SmallMapConv2d}
    for module in network.modules():
        if type(module) is not nn.Conv2d or module.padding_mode != "zeros" or module.dilation != (1, 1):
            continue
        square = all(len(set(pair)) == 1 for pair in (module.kernel_size, module.padding, module.stride))
        kind = kinds.get((module.kernel_size[0], module.padding[0])) if square else None
        if kind is not None:
            module.__class__ = kind
