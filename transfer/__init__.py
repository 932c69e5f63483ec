"""How good a backbone is: transfer recipes, each a folder with a torch-free config and its code."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from zoo.errors import InputError, did_you_mean

__all__ = ["RECIPES", "RecipeEntry", "config_class", "recipe_function"]


class RecipeEntry(NamedTuple):
    """Where a recipe's torch-free config and its code live, and what it is."""

    config: str
    run: str
    summary: str


RECIPES: dict[str, RecipeEntry] = {
    "knn": RecipeEntry(
        "knn.config:KnnConfig", "knn.run:run", "weighted nearest neighbours on frozen features"
    ),
    "linear": RecipeEntry(
        "linear.config:LinearConfig", "linear.run:run", "a linear classifier on frozen features"
    ),
    "semisup": RecipeEntry(
        "semisup.config:SemisupConfig", "semisup.run:run", "fine-tuning on a tenth of the labels"
    ),
    "detect": RecipeEntry(
        "detect.config:DetectConfig", "detect.run:run", "Faster R-CNN with FPN on a VOC-layout folder"
    ),
}


def config_class(name: str) -> Any:
    """The pydantic class of a recipe's settings; imports no torch."""
    return _load(_entry(name).config)


def recipe_function(name: str) -> Any:
    """The recipe itself: see ``transfer.run.Context`` for what it is given."""
    return _load(_entry(name).run)


def _entry(name: str) -> RecipeEntry:
    if name not in RECIPES:
        raise InputError(
            "There is no transfer recipe of this name.",
            where=name,
            fix=did_you_mean(name, RECIPES) + "Known: " + ", ".join(RECIPES),
        )
    return RECIPES[name]


def _load(target: str) -> Any:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)
