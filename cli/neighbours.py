"""``zoo neighbours``: the images that are most like a given one."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from ._options import Device, Json, MaxPixels, Quiet
from ._output import print_json, print_table, set_up_notes

__all__ = ["neighbours"]

log = logging.getLogger("zoo")


def neighbours(
    model: Annotated[
        str, typer.Argument(help="A model: org/name\\[@tag], a folder, a run, random:resnet50, ...")
    ],
    images: Annotated[str, typer.Argument(help="A folder, a text file of paths, or builtin:photos.")],
    query: Annotated[
        list[str],
        typer.Option(
            "--query",
            metavar="X",
            help="A picture, or an image by its path in IMAGES; give it several times for several.",
        ),
    ],
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours of each.")] = 10,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Images at once.")] = 64,
    device: Device = None,
    max_pixels: MaxPixels = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the images nearest to a picture, by the cosine of their features."""
    set_up_notes(quiet)
    from zoo.data.decoding import MAX_PIXELS
    from zoo.neighbourhood import neighbours as find_neighbours

    found = find_neighbours(
        model,
        images,
        query,
        k=k,
        batch_size=batch_size,
        device=device or "auto",
        max_pixels=max_pixels or MAX_PIXELS,
        progress=not quiet,
    )
    for one in found:
        if one.left_out:
            log.info("%s is in the collection and left out: %s", one.query, ", ".join(one.left_out))
    if as_json:
        print_json({"schema": 1, "model": model, "queries": [one.to_json() for one in found]})
        return
    for one in found:
        print_table(f"{one.query}: the {len(one.images)} nearest images", ["image", "score"], one.rows())
