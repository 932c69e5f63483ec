"""MoCo v1, v2 and v3, and what its linear evaluation writes.

Source of the layouts: ``main_moco.py``, ``moco/builder.py`` and ``main_lincls.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .common import Format
from .layout import Backbone, Layout

__all__ = ["LinearEvaluation", "MoCo"]


class MoCo(Format):
    """``encoder_q`` is the backbone with its head in ``fc``; ``encoder_k`` follows it; ``queue``."""

    name = "moco"
    what = "MoCo pretraining weights"
    method = "moco"
    linear = ()  # fc is the projection head

    def detect(self, layout: Layout) -> bool:
        """The names of MoCo's two encoders."""
        parts = layout.components
        named = bool(parts & {"encoder_q", "encoder_k"}) or {"base_encoder", "momentum_encoder"} <= parts
        return bool(layout.backbones) and named

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """The version, by the head: a linear layer, an MLP, an MLP and a predictor."""
        version = "v3" if "predictor" in layout.heads else "v1" if "weight" in layout.names("fc") else "v2"
        return {"what": f"MoCo {version} pretraining weights", "facts": {"version": version}}


class LinearEvaluation(Format):
    """A frozen backbone and its trained ``fc``: a training checkpoint whose optimizer has only ``fc``."""

    name = "moco_lincls"
    what = "a backbone and its classifier, by MoCo's linear evaluation"
    method = "moco"

    def detect(self, layout: Layout) -> bool:
        """The optimizer has two parameters, of hundreds in the network."""
        if not layout.backbones or set(layout.names("fc")) != {"weight", "bias"}:
            return False
        optimizer = layout.value.get("optimizer") if isinstance(layout.value, Mapping) else None
        groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            return False
        return sum(len(group.get("params", ())) for group in groups) == 2

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """The evaluation's file doesn't say what it evaluated."""
        return {"facts": {"method_note": "SimSiam's linear evaluation writes the same layout"}}
