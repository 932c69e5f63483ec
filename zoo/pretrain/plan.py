"""The plan of a run, before it: what it will do, cost and need, and what in it doesn't fit together."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError
from .checks import check_enough, check_shares, inconsistencies, run_shape, scaled_rate, shards_of
from .config import Recipe
from .forecast import Forecast, Machines, Place
from .methods.config_base import RunShape, machine_memory
from .published import PAPERS, is_published, published_images
from .resolve import Resolved, is_packaged
from .scaling import DEVICES, device_kind

if TYPE_CHECKING:  # these import torch
    from .costs import StepCosts
    from .trial import Trial

__all__ = ["make_plan"]

SCHEMA = 1

_COUNTS = tuple(2**power for power in range(11))  # of devices, in the table
# Sets that need not be opened, or downloaded: images that are trained on, and classes.
_SETS = {
    "cifar10": (50_000, 10),
    "cifar100": (50_000, 100),
    "stl10": (105_000, 10),
    "svhn": (73_257, 10),
    "food101": (75_750, 101),
    "flowers102": (1_020, 102),
    "oxford_pets": (3_680, 37),
}


class _Images(NamedTuple):
    number: int
    classes: tuple[str, ...]
    name: str
    shards: int = 0


def make_plan(
    resolved: Resolved,
    machines: Machines = Machines(),  # noqa: B008
    images: int | None = None,
    trial: Trial | None = None,
) -> dict[str, Any]:
    """All that ``zoo plan`` tells, as plain values.

    Args:
        resolved: the recipe; its ``data.sources`` are opened to count the images, unless that is known.
        machines: where it would run.
        images: how many there are, instead of any source.
        trial: some real steps, if there were any.

    Raises:
        InputError: a recipe that can't be trained so.
    """
    recipe = resolved.recipe
    published = is_published(recipe)
    place = _place_of(recipe, machines)
    check_shares(recipe, place.devices)
    found = _images_of(recipe, images)
    check_enough(recipe, found.number, found.name)
    shape = run_shape(
        recipe,
        found.number,
        recipe.views.plan().groups,
        place.devices,
        classes=found.classes,
        data=found.name,
        memory=place.memory or None,
        place="this machine" if place.kind is None else place.name,
    )
    warnings = list(inconsistencies(resolved, shape, found.shards, recipe.data.workers or 0))
    costs, uncounted = _costs(recipe, shape, place)
    forecast = Forecast(recipe, shape, place, machines, costs, trial)
    row = forecast.row(place.devices)
    rate = scaled_rate(resolved)
    return {
        "schema": SCHEMA,
        "name": recipe.name,
        "summary": recipe.summary,
        "published": published,
        "recipe": recipe.to_dict(),
        "sources": resolved.sources,
        "images": {"count": found.number, "source": found.name, "classes": len(found.classes)},
        "devices": {
            "count": place.devices,
            "name": place.name,
            "memory": place.memory or None,
            "precision": place.precision,
        },
        "steps": {
            "an_epoch": shape.steps_per_epoch,
            "epochs": shape.epochs,
            "total": shape.total_steps,
            "batch_size": recipe.batch_size,
            "images_each": recipe.batch_size // place.devices,
            "parts": recipe.engine.accumulate,
            "images_seen": shape.total_steps * recipe.batch_size,
        },
        "learning_rate": {
            "lr": recipe.optimizer.lr,
            "optimizer": recipe.optimizer.name,
            "linear_rule": None if rate is None else asdict(rate),
        },
        **forecast.details(row),
        "uncounted": uncounted,
        "scaling": forecast.rows(sorted({*_COUNTS, place.devices})),
        "paper": _paper(recipe, published, shape, place, row, costs),
        "trial": None if trial is None else asdict(trial),
        "warnings": [*warnings, *forecast.too_large()],
    }


def _images_of(recipe: Recipe, images: int | None) -> _Images:
    sources = recipe.data.sources
    if images is not None:
        return _Images(images, _names(1000), "as given")
    if len(sources) == 1 and not Path(sources[0]).exists() and sources[0] in _SETS:
        count, classes = _SETS[sources[0]]
        return _Images(count, _names(classes), sources[0])
    if sources:
        from ..data.class_index import read_class_index
        from ..data.open import open_sources

        index = recipe.data.class_index
        names = None if index is None else read_class_index(Path(index))
        source = open_sources(sources, how=recipe.data.decoding(), class_names=names)
        return _Images(len(source), tuple(source.classes), source.name, shards_of(source))
    known = published_images(recipe.name) if is_packaged(recipe.name) else None
    if known is None:
        raise InputError(
            "It isn't known how many images there are: the recipe names no data.",
            where="data.sources",
            fix="pass --data, or say how many: --images 1281167",
        )
    name, count, classes = known
    return _Images(count, _names(classes), f"{name}, as published; no data is given")


def _names(classes: int) -> tuple[str, ...]:
    return tuple(map(str, range(classes)))


def _place_of(recipe: Recipe, machines: Machines) -> Place:
    wanted, devices = recipe.precision, machines.devices
    if machines.kind is not None and machines.kind != "cpu":
        kind = device_kind(machines.kind)
        if wanted == "auto":
            wanted = "float16" if kind.name.startswith("v100") else "bfloat16"
        return Place(kind.name, kind.memory, kind, wanted, devices or 1)
    import torch

    from ..engine.precision import choose_device, choose_precision

    device = choose_device("cpu" if machines.kind == "cpu" else recipe.device)
    precision = choose_precision(wanted, device).name
    if device.type != "cuda":
        return Place(device.type, machine_memory(), None, precision, devices or 1)
    name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    alike = [kind for kind in DEVICES.values() if kind.name.partition("-")[0].upper() in name]
    nearest = min(alike, key=lambda kind: abs(kind.memory - memory), default=None)
    return Place(name, memory, nearest, precision, devices or torch.cuda.device_count())


def _costs(recipe: Recipe, shape: RunShape, place: Place) -> tuple[StepCosts | None, str | None]:
    """The step's costs, or why they can't be counted."""
    from .costs import count_step

    try:
        return count_step(recipe, shape, place.precision in ("bfloat16", "float16")), None
    except Exception as error:
        if ":" not in recipe.trunk.arch:
            raise
        # A network of somebody else's may want to see values. One that nobody could train is refused here.
        from .build import build_trunk

        build_trunk(recipe)
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return None, f"the step can't be counted without computing it ({reason}); --probe measures it"


def _paper(
    recipe: Recipe,
    published: bool,
    shape: RunShape,
    place: Place,
    row: dict[str, Any],
    costs: StepCosts | None,
) -> dict[str, Any] | None:
    """The published run of this recipe; beside it the plan's own figures, if they are of the same machines."""
    paper = PAPERS.get(recipe.name)
    if paper is None or not published:
        return None
    same = place.devices == paper.devices and place.name.startswith("v100")
    step = row["step_seconds"]
    return {
        **asdict(paper),
        "planned_hours": step * shape.steps_per_epoch * paper.epochs / 3600 if same and step else None,
        "planned_tensors": costs.memory if same and costs is not None else None,
    }
