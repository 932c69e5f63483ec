"""A folder that timm loads: its ``config.json`` beside the weights."""

from __future__ import annotations

from pathlib import Path

from ...files import write_json
from ...tensors import write_safetensors
from ..bundle import WEIGHTS, config_of, timm_builds
from .base import NO_RESNET, NOT_STANDARD_STEM, Source, Writer

__all__ = ["Timm"]


class Timm(Writer):
    """``timm.create_model("local-dir:FOLDER", pretrained=True)`` gives the same network, difference 0.

    torchvision's and timm's ResNets have the same names; a classifier is ``fc`` in both. A trunk that is a
    network of timm's goes back to it as it is.
    """

    name = "timm"
    files = (WEIGHTS, "config.json")
    keeps_classifier = True
    keeps_preprocessing = True

    def refusal(self, source: Source) -> str | None:
        """timm has the standard networks under names of their own."""
        plan = source.plan
        if timm_builds(source.what):
            named = ":" not in source.what.arch or not source.what.num_classes
            return None if named else "its name for the classifier of this network is not known here"
        if plan is None:
            return NO_RESNET
        if source.what.stem != "imagenet":
            return NOT_STANDARD_STEM
        if plan.base != 64:
            return (
                f"its ResNets have a stem of 64 channels, this one has {plan.base} (timm's wide_resnet50_2 "
                "widens the 3x3 convolutions only)"
            )
        return f"{source.what.arch} is not among its networks"

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """Both files."""
        config, classes = config_of(source.what), source.what.num_classes
        config["num_classes"] = config["pretrained_cfg"]["num_classes"] = classes
        write_safetensors(place / WEIGHTS, source.network_tensors())
        write_json(place / "config.json", config)
        return (f'load it with: timm.create_model("local-dir:{source.title}", pretrained=True)',)
