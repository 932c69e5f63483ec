"""Our weights in detectron2's model and back: names, what must have arrived, and features that must be the same.

A wrong stride, channel order or deviation loads without an error, so features decide: those of res2 to res5 on an
image, with norms that have seen images or drawn statistics.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.errors import RunError
from zoo.files import whole_file
from zoo.models.resnet import stage_features
from zoo.tensors import seeded
from zoo.weights.writers.detectron2 import (
    STAGES,
    TOLERANCE,
    detectron2_arrays,
    detectron2_key,
    is_untrained,
    largest_difference,
    noise_pixels,
    write_arrays,
)

__all__ = [
    "check_features",
    "detector_state",
    "load_backbone",
    "take_over",
    "their_name",
    "unfilled",
    "write_backbone",
]

_HEADS = {
    "rpn.": "proposal_generator.rpn_head.",
    "predictor.": "roi_heads.box_predictor.",
    "norm.": "roi_heads.res5.norm.",
    "fc1.": "roi_heads.box_head.fc1.",
    "fc2.": "roi_heads.box_head.fc2.",
    "mask_head.predictor.": "roi_heads.mask_head.predictor.",
    "mask_head.deconv.": "roi_heads.mask_head.deconv.",
    **{f"mask_head.convolutions.{n}.": f"roi_heads.mask_head.mask_fcn{n + 1}." for n in range(4)},
    **{
        f"pyramid.{ours}_blocks.{n}.{part}.": f"backbone.fpn_{theirs}{n + 2}.{norm}"
        for ours, theirs in (("inner", "lateral"), ("layer", "output"))
        for n in range(4)
        for part, norm in ((0, ""), (1, "norm."))
    },
}
_NEW = (
    "proposal_generator.",
    "roi_heads.box_",
    "roi_heads.mask_head.",
    "roi_heads.res5.norm.",
    "backbone.fpn_",
)
"""What a backbone has no weights for."""


def their_name(name: str, head: str) -> str:
    """detectron2's name of a tensor of our detector (``transfer.detect.models.detectors``).

    Args:
        name: ours.
        head: ``c4``, whose last stage is the region head, or another.
    """
    if name.startswith("trunk."):
        key = detectron2_key(name.removeprefix("trunk."))
        if head != "c4":
            return f"backbone.bottom_up.{key}"
        return f"roi_heads.{key}" if key.startswith("res5.") else f"backbone.{key}"
    ours = next(start for start in _HEADS if name.startswith(start))
    return _HEADS[ours] + name.removeprefix(ours)


def write_backbone(file: Path, trunk: nn.Module) -> None:
    """Write a trunk as detectron2's checkpointer reads it, whole or not at all."""
    with whole_file(file) as temporary:
        write_arrays(temporary, detectron2_arrays(trunk.state_dict()))


def load_backbone(model: Any, file: Path) -> None:
    """Load a converted trunk through detectron2's checkpointer.

    Afterwards the new layers, whose weights no backbone has, are NaN: see ``take_over``.

    Raises:
        RunError: other layers than those got no weights.
    """
    from detectron2.checkpoint import DetectionCheckpointer

    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point() and not name.startswith("pixel_"):
                value.fill_(torch.nan)
    DetectionCheckpointer(model).load(str(file))
    missing = [name for name in unfilled(model) if not name.startswith(_NEW)]
    if missing:
        raise RunError(
            f"{len(missing)} tensors of detectron2's backbone got no weights, e.g. {missing[0]}. Nothing is trained.",
            where=file,
            fix="if a YAML of yours describes another backbone, leave that out of it",
        )


def take_over(model: Any, detector: nn.Module, head: str) -> None:
    """Give detectron2's model all weights of our detector: one seed is one beginning for both.

    Raises:
        RunError: detectron2's model has other layers than ours.
    """
    state, ours = (
        {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
        for module in (model, detector)
    )
    ours = {their_name(name, head): value for name, value in ours.items()}
    shapes = [{name: value.shape for name, value in side.items()} for side in (state, ours)]
    strange = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
    if strange:
        raise RunError(
            f"detectron2's model and a {head} detector differ in a layer: {strange[0]}.",
            fix="if a YAML of yours describes another head, leave that out of it",
        )
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(ours[name])


def detector_state(model: Any, detector: nn.Module, head: str) -> dict[str, torch.Tensor]:
    """What detectron2's model has learnt, by our detector's names, on the CPU."""
    state = model.state_dict()
    found = {}
    for name, value in detector.state_dict().items():
        theirs = state.get(their_name(name, head))  # a frozen norm of theirs has no counter
        found[name] = value if theirs is None else theirs.detach().cpu()
    return found


def check_features(
    model: Any, trunk: Any, how: Mapping[str, Any], channels: str, file: Path
) -> dict[str, float]:
    """Compare the features of detectron2's model, whose backbone is loaded from ``file``, with the trunk's.

    If the trunk's norms are those of an untrained network, they would hide a mistake: then a copy with drawn
    statistics is compared first, through a file of its own.

    Args:
        model: detectron2's, on the CPU or elsewhere; its backbone is loaded anew.
        trunk: ours.
        how: preprocessing, of which mean and std (of values in 0..1) count.
        channels: in which order detectron2's loader would give them, ``RGB`` or ``BGR``.
        file: the converted trunk.

    Returns:
        Stage -> the largest difference, as a part of the stage's largest feature; of all comparisons.

    Raises:
        RunError: they differ by more than rounding.
    """
    found = dict.fromkeys(STAGES, 0.0)
    if is_untrained(trunk.state_dict()):
        drawn = _with_drawn_statistics(trunk)
        with tempfile.TemporaryDirectory() as folder:
            other = Path(folder) / file.name
            write_backbone(other, drawn)
            load_backbone(model, other)
        found = _differences(model, drawn, how, channels)
    load_backbone(model, file)
    last = _differences(model, trunk, how, channels)
    found = {stage: max(found[stage], last[stage], key=_nan_is_most) for stage in STAGES}
    off = {stage: value for stage, value in found.items() if not value <= TOLERANCE}
    if off:
        stages = ", ".join(f"{stage} by {value:.2g}" for stage, value in off.items())
        raise RunError(
            f"detectron2 computes other features than torchvision from the same weights (of the largest: {stages}). "
            "Nothing is trained.",
            where=file,
            fix="check the channels' order, mean, deviation and the place of the stride, if a YAML of yours sets them",
        )
    return found


@torch.no_grad()
def _differences(model: Any, trunk: Any, how: Mapping[str, Any], channels: str) -> dict[str, float]:
    pixels = noise_pixels(3)
    mean, std = (torch.tensor(how[key]).view(3, 1, 1) for key in ("mean", "std"))
    was = model.training, trunk.training
    model.eval(), trunk.eval()
    dtype, device = trunk.conv1.weight.dtype, trunk.conv1.weight.device
    ours = stage_features(trunk, ((pixels / 255 - mean) / std)[None].to(device, dtype))
    shown = pixels.flip(0) if channels == "BGR" else pixels
    x = model.preprocess_image([{"image": shown}]).tensor
    backbone = getattr(model.backbone, "bottom_up", model.backbone)
    x = backbone.stem(x)
    found = {}
    for number, stage in enumerate(STAGES, 1):
        layers = getattr(backbone, stage, None)
        if layers is None:  # the last one of a C4 detector
            layers = nn.Sequential(
                *(m for name, m in model.roi_heads.res5.named_children() if name != "norm")
            )
        x = layers(x)
        want = ours[f"layer{number}"]
        found[stage] = largest_difference(x.to(want), want) if x.shape == want.shape else torch.inf
    model.train(was[0]), trunk.train(was[1])
    return found


def _with_drawn_statistics(trunk: Any) -> Any:
    """A copy whose norms shift and scale each channel in a way of its own."""
    found = copy.deepcopy(trunk)
    with seeded(0), torch.no_grad():
        for module in found.modules():
            if isinstance(module, nn.BatchNorm2d):
                for scale in (module.weight, module.get_buffer("running_var")):
                    scale.uniform_(0.5, 1.5)
                for shift in (module.bias, module.get_buffer("running_mean")):
                    shift.uniform_(-0.3, 0.3)
    return found


def unfilled(model: Any) -> list[str]:
    """The tensors that ``load_backbone`` had no weights for."""
    return [
        name
        for name, value in model.state_dict().items()
        if value.is_floating_point() and bool(value.isnan().any())
    ]


def _nan_is_most(value: float) -> float:
    return value if value == value else torch.inf
