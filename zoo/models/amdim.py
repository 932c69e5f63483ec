"""AMDIM's encoder for images of 32, 64 or 128 pixels, with the reference's tensor names.

Source: Bachman et al. 2019, "Learning representations by maximizing mutual information across views"
(section 4.6 and figure 1c), and the released code's layout of tensors. The network avoids padding: each
stage's first layer pools where its convolution strides, and the layers after it see one position each,
so that receptive fields stay small and the statistics are the same at every position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import InputError, did_you_mean

__all__ = ["AMDIMEncoder", "Residual", "amdim_encoder", "check_views"]

SIZES = (32, 64, 128)
OPTIONS = ("encoder_size", "ndf", "n_rkhs", "n_depth", "use_bn")


class _MaybeBatchNorm(nn.Module):
    """A BatchNorm2d whose tensors are always in the state dict, applied or not."""

    def __init__(self, channels: int, apply: bool) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels).requires_grad_(apply)
        self.use_bn = apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(x) if self.use_bn else x


class _Stem(nn.Module):
    """A convolution with bias, and ReLU; the border is mirrored, never zero."""

    def __init__(self, n_in: int, n_out: int, width: int, stride: int = 1, border: int = 0) -> None:
        super().__init__()
        self.border = border
        self.conv = nn.Conv2d(n_in, n_out, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.border:
            x = F.pad(x, (self.border,) * 4, mode="reflect")
        return F.relu(self.conv(x), inplace=True)


class Residual(nn.Module):
    """Mean pooling, and what a convolution of the same width and stride, ReLU and a 1x1 add to it.

    Where there are more channels after it than before, the pooled ones are followed by zeros.
    """

    def __init__(self, n_in: int, n_out: int, width: int, stride: int, use_bn: bool) -> None:
        super().__init__()
        self.more = n_out - n_in
        self.width = width
        self.stride = stride
        self.conv1 = nn.Conv2d(n_in, n_out, width, stride, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 1, bias=False)
        self.bn1 = _MaybeBatchNorm(n_out, use_bn)
        nn.init.zeros_(self.conv2.weight)  # a fresh network adds nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True))
        if self.width > 1:
            x = F.avg_pool2d(x, self.width, self.stride)
        if self.more:
            x = F.pad(x, (0, 0, 0, 0, 0, self.more))
        return added.add_(x) if added.dtype == x.dtype else x + added  # nobody else needs it


class _Block(nn.Module):
    """A residual layer that changes the maps' size, and ``depth - 1`` that see one position each."""

    def __init__(self, n_in: int, n_out: int, width: int, stride: int, depth: int, use_bn: bool) -> None:
        super().__init__()
        first = Residual(n_in, n_out, width, stride, use_bn)
        others = (Residual(n_out, n_out, 1, 1, use_bn) for _ in range(depth - 1))
        self.layer_list = nn.Sequential(first, *others)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_list(x)


class _Embedding(nn.Module):
    """phi_n of the paper: each position of a map to ``n_rkhs`` numbers, by an MLP beside a linear map."""

    def __init__(self, n_in: int, n_out: int, use_bn: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 1, bias=False)
        self.bn_hid = _MaybeBatchNorm(n_out, use_bn)
        self.bn_out = _MaybeBatchNorm(n_out, True)
        self.shortcut = nn.Conv2d(n_in, n_out, 1)
        # A fresh embedding is nearly the identity, followed by its norm.
        nn.init.zeros_(self.conv2.weight)
        nn.init.uniform_(self.shortcut.weight, -0.01, 0.01)
        with torch.no_grad():
            self.shortcut.weight[:, :, 0, 0].diagonal().fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.conv2(F.relu(self.bn_hid(self.conv1(x)), inplace=True))
        return self.bn_out(added + self.shortcut(x))


class AMDIMEncoder(nn.Module):
    """The encoder: images (N, C, S, S) -> pooled features (N, ``n_rkhs``).

    The stages, with the side of their maps (and C for ``ndf``):

    ====  ========  ==============  ==============  ==========  ==========  ==========  ==========
    S     stem      layer1          layer2          layer3      layer4      layer5      layer6
    ====  ========  ==============  ==============  ==========  ==========  ==========  ==========
    32    30 (C)    14 (2C)         7 (4C)          5 (4C)      3 (4C)      1 (n_rkhs)
    64    62 (C)    30 (2C)         14 (4C)         7 (8C)      5 (8C)      3 (8C)      1 (n_rkhs)
    128   62 (C)    30 (2C)         14 (4C)         7 (8C)      5 (8C)      3 (8C)      1 (n_rkhs)
    ====  ========  ==============  ==============  ==========  ==========  ==========  ==========

    ``fc`` is an ``nn.Identity`` that carries ``in_features``, as in the zoo's ResNets. ``options`` are the
    arguments but for ``channels``, as a description and a recipe have them. ``feature_info``
    lists (name, channels, reduction) of each stage; without padding a map is smaller than the image's
    side divided by ``reduction``, which is the distance of two neighbours in pixels.

    Args:
        encoder_size: S, 32, 64 or 128.
        ndf: channels of the stem.
        n_rkhs: length of the features and embeddings; at least the last stage's channels (4 or 8 ``ndf``).
        n_depth: residual layers in a block.
        use_bn: apply the norms inside; those of the three outputs always are.
        channels: of the images.

    Raises:
        InputError: a value that can't be, by field.
    """

    def __init__(
        self,
        *,
        encoder_size: int = 32,
        ndf: int = 128,
        n_rkhs: int = 1024,
        n_depth: int = 3,
        use_bn: bool = False,
        channels: int = 3,
    ) -> None:
        super().__init__()
        _check(encoder_size, ndf, n_rkhs, n_depth, use_bn)

        def block(n_in: int, n_out: int, width: int, stride: int) -> _Block:
            return _Block(n_in, n_out, width, stride, n_depth, use_bn)

        # (channels, stride, layers) of each stage
        stages: list[tuple[int, int, list[nn.Module]]]
        if encoder_size == 32:
            stages = [
                (ndf, 1, [_Stem(channels, ndf, 3), Residual(ndf, ndf, 1, 1, use_bn)]),
                (2 * ndf, 2, [block(ndf, 2 * ndf, 4, 2)]),
                (4 * ndf, 2, [block(2 * ndf, 4 * ndf, 2, 2)]),
            ]
        else:
            stem: tuple[int, int, list[nn.Module]] = (ndf, 1, [_Stem(channels, ndf, 3)])
            if encoder_size == 128:
                stem = (ndf, 2, [_Stem(channels, ndf, 5, 2, border=2), _Stem(ndf, ndf, 3)])
            stages = [
                stem,
                (2 * ndf, 2, [block(ndf, 2 * ndf, 4, 2)]),
                (4 * ndf, 2, [block(2 * ndf, 4 * ndf, 4, 2)]),
                (8 * ndf, 2, [block(4 * ndf, 8 * ndf, 2, 2)]),
            ]
        top = stages[-1][0]
        stages[-1][2].append(_MaybeBatchNorm(top, use_bn))
        stages += [
            (top, 1, [block(top, top, 3, 1)]),
            (top, 1, [block(top, top, 3, 1)]),
            (n_rkhs, 1, [Residual(top, n_rkhs, 3, 1, use_bn), _MaybeBatchNorm(n_rkhs, True)]),
        ]
        names = ["stem", *(f"layer{index}" for index in range(1, len(stages)))]
        reductions = accumulate((stride for _, stride, _ in stages), mul)
        ends = accumulate(len(layers) for _, _, layers in stages)
        self.options = dict(zip(OPTIONS, (encoder_size, ndf, n_rkhs, n_depth, use_bn), strict=True))
        self.encoder_size = encoder_size
        self.num_features = n_rkhs
        self.feature_info = [
            (name, width, reduction)
            for name, (width, _, _), reduction in zip(names, stages, reductions, strict=True)
        ]
        self._stage_after = {end - 1: name for end, name in zip(ends, names, strict=True)}
        self.layer_list = nn.ModuleList(layer for _, _, layers in stages for layer in layers)
        self.rkhs_block_5 = _Embedding(top, n_rkhs, use_bn)
        self.rkhs_block_7 = _Embedding(top, n_rkhs, use_bn)
        features: Any = nn.Identity()
        features.in_features = n_rkhs
        self.fc = features

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (N, C, S, S) -> what ``fc`` makes of the pooled features (N, ``n_rkhs``).

        Raises:
            InputError: images of another size.
        """
        self._check_size(images)
        x = images
        for layer in self.layer_list:
            x = layer(x)
        return self.fc(x.flatten(1))

    def maps(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """r1, r5 and r7: the top-most maps of one, 5 x 5 and 7 x 7 positions, embedded.

        Returns:
            (N, ``n_rkhs``, 1, 1), (N, ``n_rkhs``, 5, 5) and (N, ``n_rkhs``, 7, 7); r1 is the pooled
            features.

        Raises:
            InputError: images of another size.
        """
        self._check_size(images)
        *_, seven, five, _, one = self.stage_features(images).values()
        return one, self.rkhs_block_5(five), self.rkhs_block_7(seven)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Both ways through the network, ``forward`` and ``maps``, go through ``torch.compile``."""
        super().compile(*args, **kwargs)
        self.maps = torch.compile(self.maps, *args, **kwargs)  # type: ignore[method-assign]

    def stage_features(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """The map after each stage of ``feature_info``, (N, C, H, W); larger images give larger maps."""
        maps = {}
        x = images
        for index, layer in enumerate(self.layer_list):
            x = layer(x)
            if index in self._stage_after:
                maps[self._stage_after[index]] = x
        return maps

    def _check_size(self, images: torch.Tensor) -> None:
        height, width = images.shape[-2:]
        if height != self.encoder_size or width != self.encoder_size:
            raise InputError(
                f"This AMDIM encoder takes images of {self.encoder_size} x {self.encoder_size} pixels, "
                f"not {height} x {width}.",
                fix=f"crop to {self.encoder_size} pixels, as the model's preprocessing says",
            )


def amdim_encoder(options: Mapping[str, Any], channels: int = 3) -> AMDIMEncoder:
    """An encoder from the options of a description; absent ones have the reference's defaults.

    Raises:
        InputError: an option that there isn't, or a value that can't be, by field.
    """
    for name in options:
        if name not in OPTIONS:
            raise InputError(
                "AMDIM's encoder has no such option.",
                where=f"options.{name}",
                fix=did_you_mean(str(name), OPTIONS) + "known: " + ", ".join(OPTIONS),
            )
    return AMDIMEncoder(**options, channels=channels)


def check_views(trunk: Any, sizes: Iterable[int], crop: int | None = None) -> None:
    """Check that an encoder of AMDIM's gets images of its one size; other trunks are passed over.

    Args:
        trunk: any.
        sizes: sides of the views that it is trained on.
        crop: side of the test's images.

    Raises:
        InputError: others, by the key of the recipe.
    """
    if not isinstance(trunk, AMDIMEncoder):
        return
    takes = trunk.encoder_size
    for size in sizes:
        if size != takes:
            fix = f"set views.size to [{takes}] and evaluation.crop to {takes}"
            if size in SIZES:
                fix += f", or trunk.options.encoder_size to {size}"
            else:
                fix += f"; no encoder takes {size} pixels, the nearest takes {_nearest(size)}"
            raise InputError(
                f"The views have {size} x {size} pixels, the encoder takes {takes} x {takes} and nothing else.",
                where="views.size",
                fix=fix,
            )
    if crop not in (None, takes):
        raise InputError(
            f"The test's images have {crop} x {crop} pixels, the encoder takes {takes} x {takes}.",
            where="evaluation.crop",
            fix=f"set it to {takes}",
        )


def _check(encoder_size: int, ndf: int, n_rkhs: int, n_depth: int, use_bn: bool) -> None:
    for name, value in (("ndf", ndf), ("n_rkhs", n_rkhs), ("n_depth", n_depth)):
        if type(value) is not int or value < 1:
            raise InputError(
                f"{name} is a whole number of 1 or more, not {value!r}.", where=f"options.{name}"
            )
    if type(encoder_size) is not int or encoder_size not in SIZES:
        raise InputError(
            f"encoder_size is 32, 64 or 128, the side of the images, not {encoder_size!r}.",
            where="options.encoder_size",
            fix=f"the nearest is {_nearest(encoder_size)}" if type(encoder_size) is int else None,
        )
    if type(use_bn) is not bool:
        raise InputError(f"use_bn is true or false, not {use_bn!r}.", where="options.use_bn")
    top = (4 if encoder_size == 32 else 8) * ndf
    if n_rkhs < top:
        raise InputError(
            f"n_rkhs is {n_rkhs}, less than the {top} channels of the last stage, which the shortcuts can't drop.",
            where="options.n_rkhs",
            fix=f"n_rkhs of {top} or more, or a smaller ndf",
        )


def _nearest(size: int) -> int:
    return min(SIZES, key=lambda known: abs(known - size))
