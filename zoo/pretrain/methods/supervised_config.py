"""Settings of training with labels: there is nothing to set but what all recipes have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ...errors import InputError
from .config_base import MethodConfig, RunShape

__all__ = ["SupervisedConfig"]


class SupervisedConfig(MethodConfig):
    """See ``zoo.pretrain.methods.supervised.Supervised``."""

    name: Literal["supervised"] = "supervised"

    def check(self, shape: RunShape) -> Iterator[str]:
        if len(shape.classes) < 2:
            found = f"one class, {shape.classes[0]!r}" if shape.classes else "no labels"
            raise InputError(
                f"Supervised training needs labelled images, but these {shape.samples} carry {found}.",
                where=shape.data or "data.sources",
                fix="pass --data a folder with one sub-folder for each class, or a labelled set such as cifar10 "
                "(several sources must have the same classes); without labels, train another method",
            )
        return iter(())
