"""All kinds of detectors, made from their settings."""

from __future__ import annotations

from typing import Any

from ..detr.detector import DetrDetector, DetrSettings
from .detectors import C4Detector, DetectorSettings, FpnDetector, build_detector
from .roi import RoiSettings
from .rpn import RpnSettings

__all__ = ["AnyDetector", "AnySettings", "make_detector", "settings_from"]

AnyDetector = C4Detector | FpnDetector | DetrDetector
AnySettings = DetectorSettings | DetrSettings


def make_detector(trunk: Any, settings: AnySettings) -> AnyDetector:
    """A detector around a trunk (draws the new layers from torch's global generator)."""
    if isinstance(settings, DetrSettings):
        return DetrDetector(trunk, settings)
    return build_detector(trunk, settings)


def settings_from(values: dict[str, Any]) -> AnySettings:
    """Settings from the JSON that they were written as.

    Raises:
        KeyError, TypeError: they are no detector's.
    """
    if values["head"] == "detr":
        return DetrSettings(**values)
    others = dict(values)
    rpn, roi = others.pop("rpn"), others.pop("roi")
    return DetectorSettings(
        **others,
        rpn=RpnSettings(**{key: _tupled(value) for key, value in rpn.items()}),
        roi=RoiSettings(**roi),
    )


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
