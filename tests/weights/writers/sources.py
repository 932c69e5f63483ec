"""Small files to convert, with values like those of trained networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..formats.layouts import linear, save, small_backbone, with_prefix

__all__ = ["backbone", "classified", "same", "swav_file"]


def backbone(arch: str = "resnet18", **arguments: Any) -> dict[str, torch.Tensor]:
    """A narrow trunk, every value random, whose features are numbers."""
    trunk = small_backbone(arch, **arguments)
    return {
        name: tensor.abs() + 0.5 if name.endswith("running_var") else tensor for name, tensor in trunk.items()
    }


def swav_file(path: Path, trunk: dict[str, torch.Tensor]) -> Path:
    """A trunk with heads, under SwAV's names, as torch wrote files then."""
    heads = {**linear("projection_head", _features(trunk), 6), "prototypes.weight": torch.ones(3, 6)}
    return save(path, with_prefix("module.", {**trunk, **heads}), "legacy")


def classified(path: Path, trunk: dict[str, torch.Tensor], classes: int = 5) -> Path:
    """A trunk with a classifier, as torchvision's are saved."""
    return save(path, {**trunk, **linear("fc", _features(trunk), classes)})


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """The same names in the same order, with the same values."""
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def _features(trunk: dict[str, torch.Tensor]) -> int:
    return len([value for name, value in trunk.items() if name.startswith("layer4.") and value.ndim == 1][-1])
