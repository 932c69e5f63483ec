"""SwAV, DeepCluster-v2 and SeLa-v2: pretraining files and what their evaluations write.

Source of the layouts: ``main_swav.py``, ``main_deepclusterv2.py``, ``eval_semisup.py`` and
``eval_linear.py`` of SwAV, and its hub files (a bare dict under ``module.``).
"""

from __future__ import annotations

import re
from typing import Any

from ...errors import InputError
from .base import ForeignClassifier, ForeignModel
from .common import Format, as_classifier, find_linear
from .layout import Backbone, Layout
from .tables import plain_facts

__all__ = ["SWAV_STD", "LinearClassifier", "SemiSupervised", "SwAV"]

SWAV_STD = (0.228, 0.224, 0.225)  # the reference's first one is not the usual 0.229


class SwAV(Format):
    """A backbone, ``projection_head`` and ``prototypes.weight``, or several sets of prototypes.

    DeepCluster-v2 and SeLa-v2 number them: ``prototypes.prototypes0.weight`` and so on.
    """

    name = "swav"
    what = "SwAV pretraining weights"
    method = "swav"
    std = SWAV_STD

    def detect(self, layout: Layout) -> bool:
        """Prototypes of these names beside a projection head."""
        heads = {"prototypes", "projection_head"} <= layout.heads
        sets = layout.names("prototypes")
        return bool(layout.backbones) and heads and all(map(_is_set, sets))

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """Which of the methods; the files of two of them are alike."""
        if "weight" in layout.names("prototypes"):
            return {}
        return {
            "what": "DeepCluster-v2 or SeLa-v2 pretraining weights",
            "method": "deepcluster_v2",
            "facts": {"method_note": "deepcluster_v2 or sela_v2: their files are alike"},
        }


def _is_set(tail: str) -> bool:
    return re.fullmatch(r"(prototypes\d+\.)?weight", tail) is not None


class SemiSupervised(Format):
    """A backbone that was fine-tuned on few labels; the ``projection_head`` is its classifier."""

    name = "swav_semisup"
    what = "a network fine-tuned by SwAV's semi-supervised evaluation"
    method = "swav"
    std = SWAV_STD
    linear = ("projection_head",)

    def detect(self, layout: Layout) -> bool:
        """A single linear projection head and nothing else."""
        single = layout.heads == {"projection_head"} and set(layout.names("projection_head")) == {
            "weight",
            "bias",
        }
        return bool(layout.backbones) and single

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """Any weights can have been fine-tuned so."""
        return {"facts": {"method_note": "fine-tuned with labels, most likely from SwAV's weights"}}


class LinearClassifier(Format):
    """A classifier alone, ``linear.weight`` and ``linear.bias``: what SwAV's linear evaluation writes."""

    name = "linear_classifier"
    what = "a linear classifier without its backbone"

    def detect(self, layout: Layout) -> bool:
        """One linear layer, possibly a BatchNorm before it, and nothing else."""
        found = find_linear(layout, layout.model_items, self.linear, None)
        others = len(layout.model_items) - len(found)
        return bool(found) and not layout.backbones and others == len(layout.names("bn"))

    def read(self, layout: Layout) -> ForeignModel:
        """Never gives a model.

        Raises:
            InputError: always.
        """
        found = self.classifier(layout)
        raise InputError(
            f"The file holds a linear classifier alone ({found.num_classes} classes on {found.num_features} "
            "features), no backbone.",
            where=layout.where,
            fix="load the backbone that it was trained on; read_classifier reads this file",
        )

    def classifier(self, layout: Layout) -> ForeignClassifier:
        """The classifier.

        Raises:
            InputError: it stands on something else than pooled features.
        """
        if layout.names("bn"):
            raise InputError(
                "The classifier has a BatchNorm before it: it stands on a map of features, not on pooled ones.",
                where=layout.where,
                fix="use one that was trained on globally pooled features",
            )
        tensors = as_classifier(find_linear(layout, layout.model_items, self.linear, None))
        return ForeignClassifier(
            self.name, self.what, tensors["weight"], tensors["bias"], plain_facts(layout.value)
        )
