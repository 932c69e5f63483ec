"""How a judged model was trained, as a result records it: whose row of a paper it can stand in. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from zoo.pretrain.config import Recipe
from zoo.pretrain.published import is_published, published_images
from zoo.pretrain.resolve import resolve
from zoo.weights.catalog import CATALOG

__all__ = ["described_training", "trained_as"]


def trained_as(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's description says of its training.

    Args:
        info: the model's ``zoo_info``.

    Returns:
        JSON: ``arch``, ``method`` (``random`` for random weights), ``released`` (its name in the catalog),
        ``recipe`` (its name) and ``as_published``: the recipe comes with the package, nothing of it was changed,
        and it was run to its end on as many images as it is for. None where nothing is known.
    """
    lineage = info.get("lineage") or {}
    released = lineage.get("released") or (lineage.get("converted_from") or {}).get("released")
    random = str(info.get("reference", "")).startswith("random:")
    recipe = info.get("recipe") or {}
    images = (info.get("data") or {}).get("count")
    return {
        "arch": info.get("arch"),
        "method": "random" if random else info.get("method"),
        "released": released if released in CATALOG else None,
        "recipe": recipe.get("name"),
        "as_published": bool(recipe) and _as_published(recipe, images, lineage),
    }


def described_training(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a result says of its model's training; of older ones only what the reference tells."""
    if isinstance(result.get("trained"), Mapping):
        return {**trained_as({}), **result["trained"]}
    kind, _, name = str(result.get("model", "")).partition(":")
    if kind == "catalog" and name in CATALOG:
        card = CATALOG[name]
        return trained_as({"arch": card.arch, "method": card.method, "lineage": {"released": name}})
    if kind in ("random", "supervised"):
        arch = name.partition("@")[0].partition("+")[0]
        return trained_as({"reference": result["model"], "arch": arch, "method": kind})
    return None


def _as_published(recipe: Mapping[str, Any], images: Any, lineage: Mapping[str, Any]) -> bool:
    try:
        found = Recipe.model_validate(dict(recipe))
    except ValidationError:  # of another version
        return False
    if not is_published(found):
        return False
    whole = resolve(found.name).recipe
    known = published_images(found.name)
    return (
        (found.epochs, found.samples) == (whole.epochs, whole.samples)
        and known is not None
        and isinstance(images, int)
        and images >= known[1]
        and lineage.get("step") == lineage.get("total_steps")
    )
