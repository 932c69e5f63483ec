"""What the tests of plans share: shapes of runs, and a tiny recipe."""

from __future__ import annotations

from typing import Any

from tiny import TINY
from zoo.pretrain.methods.config_base import RunShape
from zoo.pretrain.resolve import Resolved, resolve

IMAGENET = 1_281_167
# ResNet-50, head of 2048 and 128, 3,000 prototypes: by hand.
HEAD = 2048 * 2048 + 2048 + 2 * 2048 + 2048 * 128 + 128
PARAMETERS = {"trunk": 23_508_032, "projection_head": HEAD, "prototypes": 3000 * 128}
GRADIENTS = 4 * sum(PARAMETERS.values())


def shape_of(resolved: Resolved, devices: int = 1, images: int = IMAGENET, **more: Any) -> RunShape:
    """The shape of a run of this recipe."""
    recipe = resolved.recipe
    groups = recipe.views.plan().groups
    batches = images // recipe.batch_size
    steps = recipe.total_steps(batches)
    sizes: dict[str, Any] = {
        "views": sum(count for _, count in groups),
        "batch_size": recipe.batch_size,
        "world_size": devices,
        "steps_per_epoch": batches,
        "epochs": -(-steps // batches),
        "samples": images,
        "classes": tuple(map(str, range(1000))),
        "accumulate": recipe.engine.accumulate,
        "sync_batchnorm": recipe.engine.sync_batchnorm,
        "sizes": tuple(size for size, _ in groups),
        "steps": steps,
        "memory": 2**40,
    }
    return RunShape(**sizes | more)


def tiny(name: str = "swav_tiny", **overrides: Any) -> Resolved:
    """A tiny recipe; ``__`` in keys stands for a dot, and None leaves a key as the recipe has it."""
    given = {**TINY, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return resolve(name, {key: value for key, value in given.items() if value is not None})
