"""A training in detectron2's settings: from ``get_cfg()``, a protocol, the weights, and a YAML of the user's own.

Source of the values: MoCo ``detection/configs``, detectron2 ``config/defaults.py`` and ``configs``; those of the
protocol are in ``transfer.detect.protocols``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zoo.errors import InputError
from zoo.weights.writers.detectron2_yaml import NORM, flat, merged, pyramid_settings

from ..protocols import Protocol

__all__ = ["contradictions", "laid_over", "protocol_settings"]

log = logging.getLogger("zoo")

_TRUSTED = 1e-3  # relative: means are printed with three digits and more
_CONTRADICTABLE = (
    "INPUT.FORMAT",
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "MODEL.RESNETS.STRIDE_IN_1X1",
    "MODEL.RESNETS.DEPTH",
    "MODEL.RESNETS.STEM_OUT_CHANNELS",
    "MODEL.RESNETS.RES2_OUT_CHANNELS",
    "MODEL.RESNETS.NUM_GROUPS",
    "MODEL.RESNETS.WIDTH_PER_GROUP",
)
"""What the weights decide; the other settings of ``backbone_settings`` are a matter of taste."""


def protocol_settings(protocol: Protocol, steps: int, classes: int, width: int) -> dict[str, Any]:
    """What a protocol says, nested as in detectron2's YAMLs.

    Args:
        protocol: already rescaled to the batch.
        steps: how many are trained; the rate follows the protocol's, however few they are.
        classes: without the background.
        width: channels of the trunk's stem, for the pyramid of a narrow one.
    """
    (before, before_test), (after, after_test) = protocol.rpn_before, protocol.rpn_after
    model: dict[str, Any] = {
        "META_ARCHITECTURE": "GeneralizedRCNN",
        "MASK_ON": protocol.head == "mask-fpn",
        "RPN": {
            "PRE_NMS_TOPK_TRAIN": before,
            "PRE_NMS_TOPK_TEST": before_test,
            "POST_NMS_TOPK_TRAIN": after,
            "POST_NMS_TOPK_TEST": after_test,
            "BATCH_SIZE_PER_IMAGE": protocol.anchors,
        },
        "ROI_HEADS": {"NUM_CLASSES": classes, "BATCH_SIZE_PER_IMAGE": protocol.regions},
    }
    if protocol.head == "c4":
        model["ROI_HEADS"]["NAME"] = "Res5ROIHeadsExtraNorm" if protocol.extra_norm else "Res5ROIHeads"
    found = {
        "MODEL": model,
        "INPUT": {
            "MIN_SIZE_TRAIN": list(protocol.sizes),
            "MAX_SIZE_TRAIN": protocol.most,
            "MIN_SIZE_TEST": protocol.test_size,
            "MAX_SIZE_TEST": protocol.most,
        },
        "SOLVER": {
            "IMS_PER_BATCH": protocol.batch,
            "BASE_LR": protocol.lr,
            "MOMENTUM": protocol.momentum,
            "WEIGHT_DECAY": protocol.weight_decay,
            "WEIGHT_DECAY_NORM": 0.0,
            "LR_SCHEDULER_NAME": "WarmupMultiStepLR",
            "STEPS": list(protocol.drops),
            "GAMMA": protocol.drop,
            "WARMUP_ITERS": protocol.warmup,
            "WARMUP_FACTOR": protocol.warmup_factor,
            "MAX_ITER": max(steps, protocol.steps),  # detectron2 would shorten the warm-up with it
        },
        "TEST": {
            "PRECISE_BN": {"ENABLED": protocol.precise_batches > 0, "NUM_ITER": protocol.precise_batches}
        },
    }
    if protocol.head == "c4":
        return found
    return merged(found, pyramid_settings(width, NORM if protocol.fpn_norm else ""))


def laid_over(cfg: Any, file: Path, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Lay a YAML of the user's over a config.

    Args:
        cfg: detectron2's; changed.
        file: the YAML; it may name others (``_BASE_``).
        mine: dotted names and values that the command decides; the YAML can't change them.

    Returns:
        What the YAML changed, by dotted names.

    Raises:
        InputError: no such file, no YAML of detectron2's, or it contradicts the weights.
    """
    before = flat(_plain(cfg))
    try:
        cfg.merge_from_file(str(file), allow_unsafe=False)
    except (
        KeyError,
        ValueError,
        TypeError,
        AssertionError,
        AttributeError,
        OSError,
        RecursionError,  # it is its own base
        yaml.YAMLError,
    ) as error:
        reason = " ".join(str(error).strip("'\"").split())[:300]
        raise InputError(
            f"This is no YAML that detectron2 takes ({type(error).__name__}: {reason}).",
            where=file,
            fix="check it against get_cfg(), whose names are the ones that there are",
        ) from None
    after = flat(_plain(cfg))
    wrong = contradictions(after, before)
    if wrong:
        raise InputError(
            f"The YAML contradicts the weights: {'; '.join(wrong)}.",
            where=file,
            fix="leave these keys out of it: they come with the weights",
        )
    refused = [key for key in mine if after[key] != before[key]]
    if refused:
        log.warning("of the YAML these are not taken, the command decides them: %s", ", ".join(refused))
        cfg.merge_from_list([part for key in refused for part in (key, before[key])])
    return {key: value for key, value in after.items() if value != before.get(key) and key not in refused}


def contradictions(given: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """What settings say of the weights that isn't so, in words.

    Args:
        given: settings by dotted names; what they don't say is no contradiction.
        weights: those that the weights were trained with.
    """
    found = []
    for key in _CONTRADICTABLE:
        if key in given and key in weights and not _same(given[key], weights[key]):
            found.append(f"{key} is {given[key]}, for these weights it must be {weights[key]}")
    return found


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, float | int) and isinstance(second, float | int):
        return math.isclose(first, second, rel_tol=_TRUSTED)
    return bool(first == second)


def _plain(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain dicts."""
    return {key: _plain(value) if isinstance(value, dict) else value for key, value in cfg.items()}
