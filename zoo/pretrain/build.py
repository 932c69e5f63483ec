"""What a recipe describes, built: the trunk, the method around it, the optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..engine.collectives import Collectives
from ..errors import InputError, is_out_of_memory
from ..keyed import keyed_seed
from ..models.amdim import check_views
from ..models.factory import create_trunk
from ..optim.lars import LARS
from ..optim.schedule import WarmupCosine, WarmupSteps
from ..tensors import seeded
from .config import OptimizerConfig, Recipe, TrunkConfig
from .methods import METHODS
from .methods.base import Method
from .methods.config_base import RunShape

__all__ = ["build_method", "build_optimizer", "build_trunk", "learning_rate"]


def build_trunk(recipe: Recipe) -> Any:
    """The recipe's trunk, freshly initialised (draws from torch's global generator).

    Raises:
        InputError: no such trunk, or something that it doesn't take, by its key in the recipe.
    """
    config = recipe.trunk
    try:
        return create_trunk(
            config.arch,
            stem=config.stem,
            base_planes=config.base_planes,
            options=config.options,
            channels=recipe.data.channels,
            size=recipe.evaluation.crop,
        )
    except InputError as error:
        if error.where is None or error.where.partition(".")[0] not in TrunkConfig.model_fields:
            raise
        raise InputError(error.what, where=f"trunk.{error.where}", fix=error.fix) from None


def build_method(recipe: Recipe, shape: RunShape, world: Collectives) -> Method:
    """The recipe's method around a fresh trunk, initialised from the recipe's seed alone.

    Raises:
        InputError: a trunk or a method that refuses the recipe, or is larger than the memory.
    """
    try:
        with seeded(keyed_seed(recipe.seed, "init")):
            trunk = build_trunk(recipe)
            method: Method = METHODS.code(recipe.method.name)(trunk, recipe.method, shape, world)
    except (MemoryError, RuntimeError, TypeError) as error:
        sizes_overflow = "Overflow" in str(error)  # what torch says of sizes above 2^63
        if not is_out_of_memory(error) and not sizes_overflow:
            raise
        raise InputError(
            "The network or its heads, as the recipe asks for them, are larger than the memory.",
            where=f"recipe {recipe.name}",
            fix="lower the largest of trunk.base_planes and the sizes in method (zoo plan tells what they take)",
        ) from error
    check_views(trunk, shape.sizes, recipe.evaluation.crop)
    return method


def build_optimizer(
    config: OptimizerConfig, groups: list[dict[str, Any]], device: torch.device
) -> torch.optim.Optimizer:
    """The recipe's optimizer over parameter groups (``Method.param_groups``) that lie on a device."""
    shared: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "lars":
        return LARS(groups, momentum=config.momentum, trust=config.trust, **shared)
    if config.name == "sgd":
        # Not fused: that fails where a parameter (a frozen prototype) gets its first gradient later.
        return torch.optim.SGD(groups, momentum=config.momentum, **shared)
    fused = device.type in ("cpu", "cuda")  # one pass over each tensor, the same formula
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=config.betas, fused=fused, **shared)


def learning_rate(recipe: Recipe, shape: RunShape) -> Callable[[int], float]:
    """The learning rate of each step; ``schedule.per`` says what the schedule is made of."""
    config, base = recipe.schedule, recipe.optimizer.lr
    stride = shape.steps_per_epoch if config.per == "epoch" else 1
    unit = shape.steps_per_epoch // stride  # of the schedule's own steps, in an epoch
    total = -(-shape.total_steps // stride)
    warmup = config.warmup_steps or min(round(config.warmup_epochs * unit), total)
    schedule: WarmupCosine | WarmupSteps
    if config.name == "step":
        drops = tuple(epoch * unit for epoch in config.drop_at)
        schedule = WarmupSteps(base, config.start_lr, warmup, drops, config.drop)
    else:
        schedule = WarmupCosine(base, config.final_lr, config.start_lr, warmup, total)
    return lambda step: schedule.at(step // stride)
