"""A backbone as detectron2's checkpointer reads it, checked by its features before it is kept.

Source of the layout: MoCo's ``detection/convert-pretrain-to-detectron2.py`` and detectron2's
``modeling/backbone/resnet.py``. MoCo's script keeps the norms' ``num_batches_tracked`` and brings what stands
on the trunk along as ``stem.fc.*``; detectron2's frozen norms have no such counter, and nothing uses the
head. Both are left out here: of a ResNet-50 stay 265 tensors. Read back, the counters are 0.

The pickle has no place for the channels' order, mean and deviation, and detectron2's defaults are others: a YAML
beside it says them (``detectron2_yaml``).
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ...errors import RunError
from ...models.resnet import stage_features
from ...tensors import standalone
from ..formats.compare import COUNTER
from .base import NO_RESNET, NOT_STANDARD_STEM, Source, Writer
from .detectron2_yaml import backbone_settings, flat, pyramid_settings, suits_c4, usage, yaml_text

__all__ = [
    "STAGES",
    "TOLERANCE",
    "Detectron2",
    "detectron2_arrays",
    "detectron2_features",
    "detectron2_key",
    "feature_check",
    "is_untrained",
    "largest_difference",
    "noise_pixels",
    "write_arrays",
]

AUTHOR = "vision-model-zoo"
STAGES = ("res2", "res3", "res4", "res5")
# Largest difference of a feature, of the largest feature of its stage; a wrong stride gives over 0.17.
TOLERANCE = 1e-3


class Detectron2(Writer):
    """``{"model": arrays, "__author__": ..., "matching_heuristics": True}``, a pickle of plain values."""

    name = "detectron2"
    suffix = ".pkl"
    needs_suffix = True  # detectron2 opens anything else with torch.load
    has_yaml = True

    def refusal(self, source: Source) -> str | None:
        """Its ResNets have any depth, width and groups, and one kind of stem."""
        if source.plan is None:
            return NO_RESNET
        return NOT_STANDARD_STEM if source.what.stem != "imagenet" else None

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """The file, if features rebuilt from its arrays are the trunk's."""
        arrays = detectron2_arrays(source.model.trunk)
        found = feature_check(arrays, source.trunk, source.what.preprocessing)
        worst = max(found, key=lambda stage: found[stage])
        notes = [
            f"{len(arrays)} arrays; features that detectron2's network computes from them (res2 to res5, one "
            f"image) differ from the trunk's by {found[worst]:.1g} of the largest at most"
        ]
        if source.trunk.conv1.weight.dtype != torch.float32:
            notes.append("the weights were made float32")
        if is_untrained(source.model.trunk):
            notes.append(
                "all norms have the statistics of an untrained network: that check says little of them"
            )
        plan = source.plan
        assert plan is not None
        if not suits_c4(plan):
            notes.append(
                "detectron2's default, a C4 detector, takes three bottlenecks as its last stage: build one with a "
                "feature pyramid, as the settings that --yaml writes say"
            )
        if plan.kind == "basic" and plan.base != 64:
            notes.append(f"detectron2 builds a {source.what.arch} of the usual width only, with a stem of 64")
        write_arrays(place, arrays)
        told = flat(self._settings(source))
        return (*notes, "detectron2 must be told: " + ", ".join(f"{key} {told[key]}" for key in told))

    def write_yaml(self, place: Path, source: Source, target: Path) -> None:
        """Settings for ``get_cfg().merge_from_file``: the weights, and what they were trained with."""
        assert source.plan is not None
        around = {} if suits_c4(source.plan) else pyramid_settings(source.plan.base)
        where = {"MODEL": {"WEIGHTS": str(target)}}
        place.write_text(yaml_text(where, self._settings(source), around), encoding="utf-8")

    def usage(self, target: Path, yaml: Path | None) -> tuple[str, ...]:
        """Python that loads it."""
        return usage(target, yaml)

    def _settings(self, source: Source) -> dict[str, Any]:
        assert source.plan is not None
        return backbone_settings(source.what.arch, source.plan, source.what.preprocessing)


def detectron2_key(name: str) -> str:
    """detectron2's name of a tensor, from torchvision's."""
    name = re.sub(r"^layer(\d)", lambda at: f"res{int(at[1]) + 1}", name)
    if not name.startswith("res"):
        name = f"stem.{name}"
    name = re.sub(r"\.bn(\d)\.", r".conv\1.norm.", name)
    return name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")


def detectron2_arrays(trunk: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """A ResNet's tensors by detectron2's names, in float32, without the norms' counters; copied only if need be."""
    return {
        detectron2_key(name): standalone(tensor.float()).numpy()
        for name, tensor in trunk.items()
        if not name.endswith(COUNTER)
    }


def detectron2_features(
    arrays: Mapping[str, np.ndarray[Any, Any]], images: torch.Tensor, *, stride_in_1x1: bool = False
) -> dict[str, torch.Tensor]:
    """The maps that detectron2's ResNet computes from these arrays: by their names alone, not by our network.

    Args:
        arrays: by detectron2's names.
        images: (N, C, H, W), normalised.
        stride_in_1x1: where a bottleneck has its stride, as ``MODEL.RESNETS.STRIDE_IN_1X1``. True is
            detectron2's default, and wrong for torchvision's weights.

    Returns:
        ``stem`` (after the max pooling) and ``res2`` to ``res5``.
    """

    def layer(x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        """A convolution and its frozen norm."""
        kernel = torch.from_numpy(arrays[f"{name}.weight"])
        groups = x.shape[1] // kernel.shape[1]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[2] // 2, groups=groups)
        mean, var, weight, bias = (
            torch.from_numpy(arrays[f"{name}.norm.{part}"])
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, var, weight, bias)

    def block(x: torch.Tensor, name: str, stride: int) -> torch.Tensor:
        strides: tuple[int, ...] = (stride, 1)
        if f"{name}.conv3.weight" in arrays:
            strides = (stride, 1, 1) if stride_in_1x1 else (1, stride, 1)
        out = x
        for index, one in enumerate(strides, start=1):
            out = layer(out, f"{name}.conv{index}", one)
            if index < len(strides):
                out = F.relu(out)
        if f"{name}.shortcut.weight" in arrays:
            x = layer(x, f"{name}.shortcut", stride)
        return F.relu(out + x)

    x = F.max_pool2d(F.relu(layer(images, "stem.conv1", 2)), 3, stride=2, padding=1)
    maps = {"stem": x}
    for stage in STAGES:
        index = 0
        while f"{stage}.{index}.conv1.weight" in arrays:
            x = block(x, f"{stage}.{index}", 2 if index == 0 and stage != "res2" else 1)
            index += 1
        maps[stage] = x
    return maps


@torch.no_grad()
def feature_check(
    arrays: Mapping[str, np.ndarray[Any, Any]], trunk: Any, how: Mapping[str, Any]
) -> dict[str, float]:
    """Compare what detectron2 computes from the arrays with what the trunk computes, on one image.

    detectron2's side gets the pixels as its settings say (0 to 255, ``PIXEL_MEAN`` and ``PIXEL_STD``), the
    trunk's as the zoo's transform gives them, so these are checked as well.

    Args:
        arrays: by detectron2's names.
        trunk: the zoo's ResNet, in evaluation mode.
        how: preprocessing, of which mean and std count.

    Returns:
        Stage -> the largest difference, as a part of the stage's largest feature.

    Raises:
        RunError: they differ by more than rounding.
    """
    pixels = noise_pixels(len(how["mean"]))[None].float()
    mean, std = (torch.tensor(how[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    dtype = trunk.conv1.weight.dtype
    ours = stage_features(trunk, ((pixels / 255 - mean) / std).to(dtype))
    theirs = detectron2_features(arrays, (pixels - 255 * mean) / (255 * std))
    found = {}
    for number, stage in enumerate(STAGES, start=1):
        found[stage] = largest_difference(theirs[stage], ours[f"layer{number}"])
        if not found[stage] <= TOLERANCE:  # NaN is not
            raise RunError(
                f"detectron2 would compute other features from these arrays: {stage} differs by "
                f"{found[stage]:.2g} of its largest value. Nothing was written.",
                fix="if the weights are finite, please report it",
            )
    return found


def noise_pixels(channels: int) -> torch.Tensor:
    """The image that features are compared on, uint8 (channels, 96, 128): no two channels or places are alike."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (channels, 96, 128), generator=generator, dtype=torch.uint8)


def largest_difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Of two maps, as a part of the largest value of ``ours``."""
    return float((theirs - ours).abs().max() / ours.abs().max().clamp_min(1e-30))


def is_untrained(trunk: Mapping[str, torch.Tensor]) -> bool:
    """Whether all norms have the means of a network that never saw an image."""
    means = [tensor for name, tensor in trunk.items() if name.endswith("running_mean")]
    return not any(bool(mean.any()) for mean in means)


def write_arrays(place: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """The pickle; the same arrays give the same bytes."""
    with open(place, "wb") as file:
        for piece in _pickle(arrays):
            file.write(piece)


def _pickle(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[bytes | memoryview]:
    """The pickle, piece by piece.

    ``pickle.dump`` would name a module of numpy 2 that older ones lack, and they are what many who train
    detectors have; and it would keep a copy of every array until the end.
    """

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, protocol=3)[2:-1]  # without the mark of the protocol and the stop

    yield b"\x80\x03}("
    yield plain("model") + b"}("
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, dtype="<f4")
        # _reconstruct(ndarray, (0,), b"b"), then the state: version, shape, type, order of columns, bytes
        yield plain(name) + b"cnumpy.core.multiarray\n_reconstruct\n" + plain((np.ndarray, (0,), b"b")) + b"R"
        yield b"(" + plain(1) + plain(data.shape) + plain(data.dtype) + plain(False)
        yield b"B" + struct.pack("<I", data.nbytes)
        yield data.reshape(-1).view(np.uint8).data
        yield b"tb"
    yield b"u"
    yield plain("__author__") + plain(AUTHOR)
    yield plain("matching_heuristics") + plain(True)
    yield b"u."
