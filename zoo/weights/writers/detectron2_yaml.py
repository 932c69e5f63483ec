"""What detectron2 must be told of a backbone: its settings, as a YAML, and the lines that use them. No torch here.

detectron2's defaults are another network's: BGR, a deviation of 1, the stride in the 1x1 convolution, the first
stages and all norms frozen. With them the weights load without an error and compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..formats.resnets import Plan

__all__ = [
    "NORM",
    "backbone_settings",
    "flat",
    "merged",
    "pyramid_settings",
    "suits_c4",
    "usage",
    "yaml_text",
]

NORM = "naiveSyncBN"  # plain BatchNorm in one process, and unlike SyncBN also on a CPU


def backbone_settings(arch: str, plan: Plan, how: Mapping[str, Any]) -> dict[str, Any]:
    """detectron2's settings for a ResNet, nested as in its YAMLs.

    Norms are trained and nothing is frozen, as in the papers' detection (MoCo ``detection/configs``).

    Args:
        arch: its name, which tells the depth.
        plan: its widths and groups.
        how: preprocessing, of which mean and std (of values in 0..1) count.
    """

    def pixels(key: str) -> list[float]:
        return [round(255 * value, 4) for value in how[key]]

    return {
        "INPUT": {"FORMAT": "RGB"},
        "MODEL": {
            "PIXEL_MEAN": pixels("mean"),
            "PIXEL_STD": pixels("std"),
            "BACKBONE": {"FREEZE_AT": 0},
            "RESNETS": {
                "STRIDE_IN_1X1": False,
                "DEPTH": int(re.findall(r"\d+", arch)[0]),
                "STEM_OUT_CHANNELS": plan.base,
                "RES2_OUT_CHANNELS": plan.base * (1 if plan.kind == "basic" else 4),
                "NUM_GROUPS": plan.groups,
                "WIDTH_PER_GROUP": int(plan.base * plan.width / 64),
                "NORM": NORM,
            },
        },
    }


def suits_c4(plan: Plan) -> bool:
    """Whether a ResNet's last stage is what detectron2's C4 head, its default, is made of: three bottlenecks."""
    return (plan.kind, plan.layers[3]) == ("bottleneck", 3)


def pyramid_settings(width: int, norm: str = NORM) -> dict[str, Any]:
    """detectron2's settings for a feature pyramid and its heads, which any ResNet suits.

    Args:
        width: channels of the trunk's stem: a narrow one gets a narrow pyramid.
        norm: of the pyramid's convolutions; empty for none.
    """
    stages, levels, channels = ["res2", "res3", "res4", "res5"], ["p2", "p3", "p4", "p5"], min(256, 4 * width)
    box_head = {"NAME": "FastRCNNConvFCHead", "NUM_FC": 2, "FC_DIM": 1024, "POOLER_RESOLUTION": 7}
    mask_head = {"NAME": "MaskRCNNConvUpsampleHead", "NUM_CONV": 4, "CONV_DIM": channels}
    return {
        "MODEL": {
            "BACKBONE": {"NAME": "build_resnet_fpn_backbone"},
            "RESNETS": {"OUT_FEATURES": stages},
            "FPN": {"IN_FEATURES": stages, "OUT_CHANNELS": channels, "NORM": norm},
            "ANCHOR_GENERATOR": {"SIZES": [[32], [64], [128], [256], [512]]},
            "RPN": {"IN_FEATURES": [*levels, "p6"]},
            "ROI_HEADS": {"NAME": "StandardROIHeads", "IN_FEATURES": levels},
            "ROI_BOX_HEAD": box_head,
            "ROI_MASK_HEAD": {**mask_head, "POOLER_RESOLUTION": 14},
        }
    }


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{above}.{key}" if above else str(key)
        found |= flat(value, name) if isinstance(value, Mapping) else {name: value}
    return found


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both settings; the second one's where both say something."""
    found = dict(first)
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found


def yaml_text(*settings: Mapping[str, Any]) -> str:
    """Settings laid over one another, for detectron2's ``merge_from_file``."""
    every: dict[str, Any] = {"VERSION": 2}
    for one in settings:
        every = merged(every, one)
    return yaml.safe_dump(every, sort_keys=False, allow_unicode=True)


def usage(weights: Path, settings: Path | None) -> tuple[str, ...]:
    """Five lines of Python that build detectron2's model and load the weights."""
    told = f"cfg.MODEL.WEIGHTS = {str(weights)!r}  # and what else it must be told: --yaml writes all of it"
    if settings is not None:
        told = f"cfg.merge_from_file({str(settings)!r})  # without a GPU also: cfg.MODEL.DEVICE = 'cpu'"
    return (
        "from detectron2 import checkpoint, config, modeling",
        "cfg = config.get_cfg()",
        told,
        "model = modeling.build_model(cfg)",
        "checkpoint.DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)",
    )
