"""``zoo predict``: draw what a trained detector finds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._options import Device, Json, MaxPixels, Precision, Quiet
from ._output import print_json, set_up_notes

__all__ = ["predict"]


def predict(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The folder that zoo transfer detect wrote (--out).")
    ],
    images: Annotated[str, typer.Argument(metavar="IMAGES", help="A picture, or a folder of pictures.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder for the drawn pictures.")],
    score: Annotated[
        float, typer.Option("--score", min=0.0, max=1.0, help="Draw what has at least this score.")
    ] = 0.5,
    device: Device = None,
    precision: Precision = None,
    max_pixels: MaxPixels = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw the boxes and masks that a trained detector finds; predictions.json beside the pictures has them all."""
    set_up_notes(quiet)
    from transfer.detect.predict import predict as run
    from zoo.data.decoding import MAX_PIXELS

    found = run(
        model,
        images,
        out,
        score=score,
        device=device or "auto",
        precision=precision or "auto",
        max_pixels=max_pixels or MAX_PIXELS,
    )
    if as_json:
        print_json(found)
        return
    drawn = sum(value >= score for image in found["images"] for value in image["scores"])
    everything = Path(out) / "predictions.json"
    print(f"{out}: {len(found['images'])} pictures, {drawn} objects drawn; all in {everything}")
