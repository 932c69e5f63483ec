"""``zoo assign``: the cluster of each image, as a table, a file, or folders of links."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from ._options import Device, Json, MaxPixels, Quiet
from ._output import print_json, print_table, set_up_notes

__all__ = ["assign"]

log = logging.getLogger("zoo")


def assign(
    model: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, or a model published from one: org/name\\[@tag].")
    ],
    images: Annotated[str, typer.Argument(help="A folder, a text file of paths, or builtin:photos.")],
    head: Annotated[
        int, typer.Option("--head", min=0, help="Which set of prototypes, if there are several.")
    ] = 0,
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="N", min=1, help="Only the N images nearest to each prototype."),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="clusters.csv or clusters.json")] = None,
    links: Annotated[
        str | None,
        typer.Option(
            "--links", metavar="DIR", help="Make a folder of links to its images for each prototype."
        ),
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the files into --links instead.")] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Images at once.")] = 64,
    device: Device = None,
    max_pixels: MaxPixels = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tell the prototype (the cluster) of each image of a collection, and how near it is."""
    set_up_notes(quiet)
    from zoo.assignment import assign as assign_images
    from zoo.data.decoding import MAX_PIXELS

    found = assign_images(
        model,
        images,
        head=head,
        top=top,
        out=out,
        links=links,
        copy=copy,
        batch_size=batch_size,
        device=device or "auto",
        max_pixels=max_pixels or MAX_PIXELS,
        progress=not quiet,
    )
    about = found.summary()
    log.info(
        "head %d of %d: %d of %d prototypes have images; the largest, %d, has %d of %d; "
        "as even as %.1f prototypes (perplexity)",
        *(head, found.heads, about["used"], about["prototypes"], about["largest"]),
        *(about["largest_images"], about["images"], about["perplexity"]),
    )
    if as_json:
        print_json(found.to_json())
        return
    if out is not None:
        print(f"{out}: the prototypes of {len(found.images)} images")
    if links is not None:
        print(f"{links}: {len(found.images)} {'copies' if copy else 'links'} in {about['used']} folders")
    if out is None and links is None:
        title = f"{model}: the nearest of {about['prototypes']} prototypes (head {head} of {found.heads})"
        print_table(title, ["image", "prototype", "score"], found.rows())
