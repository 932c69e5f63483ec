"""``zoo views``: the views that a recipe or preset makes of some images, drawn as a picture."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..data.decode import IMAGE_SUFFIXES, Picture, open_image
from ..data.decoding import PLAIN, Decoding
from ..data.identify import kind_of
from ..data.open import open_source
from ..data.source import open_picture
from ..data.views.apply import apply_view
from ..data.views.grid import draw_grid
from ..data.views.maker import PlannedViews
from ..data.views.params import ViewPlan
from ..data.views.presets import PRESETS, SHORT, find_preset
from ..errors import InputError, did_you_mean
from ..files import disk_errors, whole_file
from ..keyed import keyed_key
from .resolve import list_recipes, resolve

__all__ = ["show_views"]


def show_views(
    source: str,
    preset: str,
    out: Path,
    *,
    count: int = 4,
    epoch: int = 0,
    seed: int = 0,
    max_pixels: int | None = None,
) -> dict[str, Any]:
    """Draw the views of images and write the picture.

    For a folder they are the very views that training with this seed sees in this epoch (without
    scaled decoding).

    Args:
        source: a picture file, or what ``--data`` accepts.
        preset: a view preset, or a recipe.
        out: the picture to write, ``.png`` or ``.jpg``.
        count: how many images of a collection, evenly spread.
        epoch: counted from 0.
        seed: the run's seed.
        max_pixels: larger pictures are refused; by default the recipe's limit.

    Returns:
        What was drawn, as JSON.

    Raises:
        InputError: an unknown preset, an unreadable picture, or a format that isn't written.
    """
    formats = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
    if out.suffix.lower() not in formats:
        raise InputError("Views are drawn as .png or .jpg.", where=out)
    plan, how = _plan(preset)
    if max_pixels is not None:
        how = replace(how, max_pixels=max_pixels)
    maker = PlannedViews(plan)
    rows, described = [], []
    for sample, name, picture in _pictures(source, count, how):
        pixels = picture.pixels()
        params = maker.params(picture.height, picture.width, keyed_key(seed, "views", epoch, sample))
        views = [apply_view(np.ascontiguousarray(pixels), view, plan) for view in params]
        rows.append((name, pixels, views, params))
        described.append({"image": name, "views": [asdict(view) for view in params]})
    page = draw_grid(rows, plan, f"{preset}, seed {seed}, epoch {epoch}")
    with disk_errors("Writing the picture", out), whole_file(out) as temporary:
        page.save(temporary, formats[out.suffix.lower()])
    views_each = len(plan.crops)
    return {"schema": 1, "picture": str(out), "preset": preset, "views": views_each, "images": described}


def _plan(name: str) -> tuple[ViewPlan, Decoding]:
    if name in list_recipes() or name.endswith((".yaml", ".yml")):
        recipe = resolve(name).recipe
        return recipe.views.plan(), recipe.data.decoding()
    try:
        return find_preset(name).plan, PLAIN
    except InputError:
        known = [*SHORT, *PRESETS, *list_recipes()]
        raise InputError(
            "There is no view preset and no recipe of this name.",
            where=name,
            fix=did_you_mean(name, known) + "All of them: zoo views --list, zoo recipes",
        ) from None


def _is_picture(path: Path) -> bool:
    """By its first bytes; tables, shards and lists of paths are files as well."""
    try:
        with path.open("rb") as file:
            return not kind_of(file.read(4096)).startswith(("a ", "an "))
    except OSError:
        return False


def _pictures(source: str, count: int, how: Decoding) -> list[tuple[int, str, Picture]]:
    path = Path(source).expanduser()
    if not os.path.isdir(path) and (path.suffix.lower() in IMAGE_SUFFIXES or _is_picture(path)):
        if not os.path.exists(path):
            raise InputError("There is no such picture.", where=source, fix="check the path")
        return [(0, path.name, open_image(path, how=how))]
    images = open_source(source, how=how)
    chosen = sorted({int(i) for i in np.linspace(0, len(images) - 1, min(count, len(images)))})
    return [(i, Path(images.where(i)).name, open_picture(images, i)) for i in chosen]
