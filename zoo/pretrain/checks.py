"""What doesn't fit together in a run: said in ``zoo plan`` and before each training. No torch here."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..models.factory import is_resnet
from .config import Recipe
from .methods.config_base import RunShape
from .resolve import Resolved, is_packaged, packaged_roots, resolve

__all__ = [
    "Rate",
    "beginning",
    "check_enough",
    "check_shares",
    "inconsistencies",
    "run_shape",
    "scaled_rate",
    "shards_of",
    "tell",
]

log = logging.getLogger("zoo")

# By how much a ResNet makes maps smaller, by its stem.
_REDUCTION = {"imagenet": 32, "medium": 16, "small": 8}
_FAR = 2.0  # times the scaled rate, or its fraction
_FAR_ADAPTIVE = 10.0  # the same where the batch doesn't count
# Optimizers whose rate goes with the batch. Adam divides by the gradients' size: AMDIM's published rate is the
# same for batches of 200, 480 and 1008.
_LINEAR = ("lars", "sgd")


@dataclass(frozen=True)
class Rate:
    """The rate that a recipe would have by the linear rule (Goyal et al. 2017): in proportion to the batch.

    Args:
        scaled: ``reference``'s rate times the batch over its batch.
        reference: the packaged recipe that is compared with.
        lr: its rate.
        batch_size: its batch.
    """

    scaled: float
    reference: str
    lr: float
    batch_size: int


def check_shares(recipe: Recipe, world_size: int) -> None:
    """Refuse a batch that can't be shared equally.

    Raises:
        InputError: with a batch that can.
    """
    parts = recipe.engine.accumulate
    shares = world_size * parts
    if recipe.batch_size % shares or recipe.batch_size // shares < 2:
        raise InputError(
            f"A batch of {recipe.batch_size} images can't be shared equally by {world_size} process(es) x "
            f"{parts} part(s), two images or more each.",
            where="batch_size",
            fix=f"use a multiple of {shares}, such as {max(2, round(recipe.batch_size / shares)) * shares}",
        )


def run_shape(
    recipe: Recipe, samples: int, groups: Sequence[tuple[int, int]], world_size: int, **known: Any
) -> RunShape:
    """The sizes of a run.

    Args:
        recipe: what is trained.
        samples: training images.
        groups: of the views: (side, count) each.
        world_size: processes.
        known: what else is known of it, see ``RunShape``.
    """
    batches = samples // recipe.batch_size
    steps = recipe.total_steps(batches)
    return RunShape(
        views=sum(count for _, count in groups),
        batch_size=recipe.batch_size,
        world_size=world_size,
        steps_per_epoch=batches,
        epochs=-(-steps // batches),
        samples=samples,
        accumulate=recipe.engine.accumulate,
        sync_batchnorm=recipe.engine.sync_batchnorm and recipe.engine.batchnorm_group != 1,
        views_apart=recipe.engine.views_apart,
        sizes=tuple(size for size, _ in groups),
        steps=steps,
        **known,
    )


def check_enough(recipe: Recipe, images: int, source: str) -> None:
    """Refuse a set that is smaller than a batch.

    Raises:
        InputError: with both numbers.
    """
    if images < recipe.batch_size:
        raise InputError(
            f"The batch ({recipe.batch_size}) is larger than the set ({images} images).",
            where=source,
            fix="lower batch_size, or pass more images",
        )


def inconsistencies(
    resolved: Resolved, shape: RunShape, shards: int = 0, workers: int = 0, *, begun: bool = False
) -> Iterator[str]:
    """Warnings about settings that don't fit one another, or the run.

    What a packaged recipe says is left alone: its rates and crops are published ones.

    Args:
        resolved: the recipe.
        shape: the run's sizes.
        shards: that the images lie in; 0 if they don't.
        workers: data processes of each process.
        begun: whether the run goes on: what can't change any more was said when it began.

    Raises:
        InputError: a setting that can't work.
    """
    yield from resolved.recipe.method.check(shape)
    yield from _schedule(resolved.recipe, shape)
    readers = shape.world_size * max(1, workers)
    if 0 < shards < readers:
        yield (
            f"{shards} shard(s) for {readers} readers ({shape.world_size} process(es) x {max(1, workers)} data "
            "worker(s)): several read from the same shard; make more shards (zoo data shard), or use fewer "
            "data.workers"
        )
    if not begun:
        yield from _rate(resolved)
        yield from _crops(resolved, shape)


def beginning(recipe: Recipe, shape: RunShape, parameters: int) -> str:
    """What a run that begins will do, in a line; ``parameters`` are those that are trained."""
    epochs = f"{shape.epochs} epoch{'s' * (shape.epochs > 1)} of {shape.steps_per_epoch:,}"
    share = f", {shape.batch_size // shape.world_size} in each of {shape.world_size} processes"
    return (
        f"{shape.total_steps:,} steps, {epochs}; a batch of {shape.batch_size}"
        f"{share if shape.world_size > 1 else ''}; {recipe.optimizer.name} at {recipe.optimizer.lr:g}; "
        f"{parameters:,} parameters. Costs, memory and time: zoo plan"
    )


def tell(warnings: Iterable[str]) -> None:
    """Log warnings before a training, and, of several, how many they are."""
    count = 0
    for warning in warnings:
        log.warning("%s", warning)
        count += 1
    if count > 1:
        log.warning("%d warnings about this recipe in all: zoo plan shows the whole plan", count)


def shards_of(source: object) -> int:
    """How many shards a source's images lie in; 0 if they don't."""
    stretches = getattr(source, "stretches", None)
    return 0 if stretches is None else len(stretches)


def scaled_rate(resolved: Resolved) -> Rate | None:
    """The rate by the linear rule; None where there is no such rule, or nothing to compare with.

    The reference is the packaged recipe of this name, or the nearest one that is extended; else of the method's
    own, with the same optimizer, the one of the nearest batch.
    """
    recipe = resolved.recipe
    found = _reference(resolved) if recipe.optimizer.name in _LINEAR else None
    if found is None:
        return None
    name, other = found
    lr, batch_size = other.optimizer.lr, other.batch_size
    return Rate(lr * recipe.batch_size / batch_size, name, lr, batch_size)


def _reference(resolved: Resolved) -> tuple[str, Recipe] | None:
    recipe = resolved.recipe
    named = [name for name in (recipe.name, *reversed(resolved.layers)) if is_packaged(name)]
    names = named[:1] or packaged_roots(recipe.method.name)
    others = {name: resolve(name).recipe for name in names}
    alike = {
        name: other
        for name, other in others.items()
        if (other.method.name, other.optimizer.name) == (recipe.method.name, recipe.optimizer.name)
    }
    if not alike:
        return None
    name = min(alike, key=lambda name: abs(math.log(alike[name].batch_size / recipe.batch_size)))
    return name, alike[name]


def _rate(resolved: Resolved) -> Iterator[str]:
    sources = (resolved.sources.get(key, "") for key in ("optimizer.lr", "batch_size"))
    if all(map(is_packaged, sources)):
        return
    name, lr = resolved.recipe.optimizer.name, resolved.recipe.optimizer.lr
    batch, rate = resolved.recipe.batch_size, scaled_rate(resolved)
    if name not in _LINEAR:
        yield from _adaptive_rate(resolved)
        return
    if rate is None or 1 / _FAR <= lr / rate.scaled <= _FAR:
        return
    yield (
        f"optimizer.lr {lr:g} is {_times(lr / rate.scaled)} what a batch of {batch} would get in proportion to "
        f"{rate.reference} ({rate.lr:g} x {batch} / {rate.batch_size} = {rate.scaled:.3g})"
    )


def _adaptive_rate(resolved: Resolved) -> Iterator[str]:
    """Such a rate hardly depends on the batch."""
    found, optimizer = _reference(resolved), resolved.recipe.optimizer
    if found is None or 1 / _FAR_ADAPTIVE <= optimizer.lr / found[1].optimizer.lr <= _FAR_ADAPTIVE:
        return
    name, known = found[0], found[1].optimizer.lr
    yield (
        f"optimizer.lr {optimizer.lr:g} is {_times(optimizer.lr / known)} that of {name} ({known:g}); with "
        f"{optimizer.name} a rate hardly depends on the batch"
    )


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor > 1 else f"1/{1 / factor:.3g} of"


def _crops(resolved: Resolved, shape: RunShape) -> Iterator[str]:
    recipe = resolved.recipe
    source = resolved.sources.get("views.size", "")
    said = is_packaged(source) or source.startswith("preset ") or not source
    if not is_resnet(recipe.trunk.arch) or (said and set(shape.sizes) <= set(recipe.views.size)):
        return
    step = _REDUCTION[recipe.trunk.stem]
    odd = [size for size in dict.fromkeys(shape.sizes) if size % step]
    if odd:
        better = sorted({max(1, near) * step for size in odd for near in (size // step, -(-size // step))})
        fitting = [name for name, by in _REDUCTION.items() if not any(size % by for size in shape.sizes)]
        stem = f", or trunk.stem {fitting[0]}" if fitting else ""
        yield (
            f"crops of {' and '.join(map(str, odd))} pixels are not divisible by {step}, by which {recipe.trunk.arch} "
            "makes its maps smaller: it computes for borders that are not there; use "
            f"{' or '.join(map(str, better))}{stem}"
        )


def _schedule(recipe: Recipe, shape: RunShape) -> Iterator[str]:
    schedule, total = recipe.schedule, shape.total_steps
    if schedule.drop_at and max(schedule.drop_at) * shape.steps_per_epoch >= total:
        yield (
            f"schedule.drop_at {list(schedule.drop_at)} reaches beyond the run's {shape.epochs} epochs: not all "
            "drops of the learning rate will come"
        )
    warmup = schedule.warmup_steps or round(schedule.warmup_epochs * shape.steps_per_epoch)
    if warmup and warmup >= total:
        yield f"the warm-up takes {warmup} steps, the run has {total}: the learning rate never gets beyond it"
