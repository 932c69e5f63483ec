"""A folder that transformers' ``ResNetModel`` loads.

Source: transformers ``models/resnet`` (names of the modules, keys of the configuration). Its
``downsample_in_bottleneck`` false puts the stride into the 3x3 convolution, as torchvision does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from PIL import Image

from ...files import write_json
from ...tensors import standalone, write_safetensors
from ..bundle import WEIGHTS
from ..formats.resnets import Plan
from .base import NO_RESNET, NOT_STANDARD_STEM, Source, Writer

__all__ = ["Transformers", "transformers_key"]


class Transformers(Writer):
    """``ResNetModel.from_pretrained("FOLDER")``; ``pooler_output`` is the pooled features, (N, F, 1, 1).

    A folder ``transformers`` inside a bundle is loaded with ``subfolder="transformers"``, also from a hub.
    """

    name = "transformers"
    files = (WEIGHTS, "config.json", "preprocessor_config.json")
    keeps_preprocessing = True

    def refusal(self, source: Source) -> str | None:
        """Its ResNet has any depth and width, but no groups and one kind of stem."""
        if source.plan is None:
            return NO_RESNET
        if source.plan.groups != 1:
            return "its ResNets have no groups, so no ResNeXt is among them"
        return NOT_STANDARD_STEM if source.what.stem != "imagenet" else None

    def write(self, place: Path, source: Source) -> tuple[str, ...]:
        """Weights, configuration and preprocessing."""
        plan, how = source.plan, source.what.preprocessing
        assert plan is not None
        tensors = {transformers_key(name): standalone(tensor) for name, tensor in source.model.trunk.items()}
        write_safetensors(place / WEIGHTS, tensors)
        write_json(place / "config.json", _config(plan))
        write_json(place / "preprocessor_config.json", _preprocessor(how))
        return (f'load it with: transformers.ResNetModel.from_pretrained("{source.title}")',)


def transformers_key(name: str) -> str:
    """transformers' name of a tensor, from torchvision's."""
    name = re.sub(r"^conv1\.", "embedder.embedder.convolution.", name)
    name = re.sub(r"^bn1\.", "embedder.embedder.normalization.", name)
    name = re.sub(r"^layer(\d)\.(\d+)\.", lambda at: f"encoder.stages.{int(at[1]) - 1}.layers.{at[2]}.", name)
    name = name.replace("downsample.0.", "shortcut.convolution.")
    name = name.replace("downsample.1.", "shortcut.normalization.")
    parts = {"conv": "convolution", "bn": "normalization"}
    return re.sub(r"(?<=\.)(conv|bn)([123])\.", lambda at: f"layer.{int(at[2]) - 1}.{parts[at[1]]}.", name)


def _config(plan: Plan) -> dict[str, Any]:
    expansion = 1 if plan.kind == "basic" else 4
    return {
        "architectures": ["ResNetModel"],
        "model_type": "resnet",
        "num_channels": plan.channels,
        "embedding_size": plan.base,
        "hidden_sizes": [plan.base * expansion * 2**stage for stage in range(4)],
        "depths": list(plan.layers),
        "layer_type": plan.kind,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    }


def _preprocessor(how: dict[str, Any]) -> dict[str, Any]:
    """Shorter side to ``resize``, centre crop, values in 0..1, normalised: its ``BitImageProcessor``."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": how["resize"]},
        "resample": int(Image.Resampling[how["interpolation"].upper()]),
        "do_center_crop": True,
        "crop_size": {"height": how["crop"], "width": how["crop"]},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": how["mean"],
        "image_std": how["std"],
    }
