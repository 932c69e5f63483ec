"""ResNets that are by themselves or in any known wrapper, and the checkpoints of our own runs."""

from __future__ import annotations

from typing import Any

from .common import Format, guess_method
from .layout import Backbone, Layout
from .swav import SWAV_STD

__all__ = ["Run", "TorchvisionResNet"]


class Run(Format):
    """``global.safetensors`` of a run's checkpoint: ``learner/trunk.*``, heads, ``average/*``."""

    name = "zoo_run"
    what = "a checkpoint of one of the zoo's runs"

    def detect(self, layout: Layout) -> bool:
        """The learner's trunk, as ``zoo.engine.loop`` saves it."""
        return any(item.path == ("learner",) and item.key.startswith("trunk.") for item in layout.items)

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """The method, by the heads; the run's recipe says it surely."""
        method = guess_method(layout)
        return {"method": method, "std": SWAV_STD if method == "swav" else self.std}


class TorchvisionResNet(Format):
    """A ResNet by torchvision's names: torchvision's and timm's own, published backbones, bundles."""

    name = "torchvision"
    what = "a ResNet by torchvision's names"

    def detect(self, layout: Layout) -> bool:
        """Anything that has parts of a ResNet; the last to be asked."""
        return bool(layout.backbones)

    def details(self, layout: Layout, taken: Backbone) -> dict[str, Any]:
        """The method, if there are heads that tell."""
        return {"method": guess_method(layout)}
