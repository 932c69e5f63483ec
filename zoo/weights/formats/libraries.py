"""Files of VISSL, detectron2, solo-learn and lightly.

Source of the layouts: VISSL ``vissl/models`` (``trunks/resnext.py``, ``heads``), MoCo's
``convert-pretrain-to-detectron2.py``, solo-learn ``solo/methods``, lightly's examples and benchmarks.
"""

from __future__ import annotations

from typing import Any

from .common import Format, guess_method
from .layout import Backbone, Layout

__all__ = ["VISSL", "Detectron2", "Lightly", "SoloLearn"]


class VISSL(Format):
    """``classy_state_dict.base_model.model``: ``trunk`` with ``_feature_blocks.*``, and ``heads``."""

    name = "vissl"
    what = "VISSL checkpoint"

    def detect(self, layout: Layout) -> bool:
        """The module dict that VISSL's trunks keep their layers in."""
        return bool(layout.backbones) and "_feature_blocks" in layout.components

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """The method, by the heads."""
        return {"method": guess_method(layout)}


class Detectron2(Format):
    """A pickle ``{model, __author__, matching_heuristics}`` of numpy arrays, ``res2.0.conv1.norm.weight``."""

    name = "detectron2"
    what = "a backbone converted for detectron2"
    linear = ()  # MoCo's script brings the projection head along, as stem.fc

    def detect(self, layout: Layout) -> bool:
        """detectron2's names of a ResNet's layers."""
        return any(each.dialect == "detectron2" for each in layout.backbones)

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """MoCo's script signs its files."""
        author = layout.value.get("__author__") if isinstance(layout.value, dict) else None
        return {"method": "moco" if author == "MOCO" else "unknown"}


class SoloLearn(Format):
    """Lightning's ``state_dict``: ``backbone``, ``classifier``, ``projector``, ``momentum_backbone`` ..."""

    name = "solo_learn"
    what = "solo-learn checkpoint"

    def detect(self, layout: Layout) -> bool:
        """Its online classifier beside its projector or DINO head."""
        heads = layout.heads
        return bool(layout.backbones) and "classifier" in heads and bool(heads & {"projector", "head"})

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """The method, by the heads."""
        found: dict[str, Any] = {"method": guess_method(layout)}
        if taken.fit.plan.kernel == 3:
            found["notes"] = (
                "solo-learn pads the 3x3 stem by 2, the zoo by 1: features at the border differ",
            )
        return found


class Lightly(Format):
    """``backbone`` as a sequence of a ResNet's children, or heads with ``layers``."""

    name = "lightly"
    what = "a network like those of lightly's examples"

    def detect(self, layout: Layout) -> bool:
        """A ResNet's children by number, or lightly's class of heads."""
        numbered = any(each.dialect.startswith("children") for each in layout.backbones)
        layers = any(tail.startswith("layers.") for head in layout.heads for tail in layout.names(head))
        return bool(layout.backbones) and (numbered or layers)

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """The method, by the heads."""
        return {"method": guess_method(layout)}
