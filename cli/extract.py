"""``zoo extract``: frozen features of images, into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._options import Device, Json, MaxPixels, Quiet
from ._output import print_json, set_up_notes

__all__ = ["extract"]


def extract(
    model: Annotated[
        str, typer.Argument(help="A model: org/name\\[@tag], a folder, a run, random:resnet50, ...")
    ],
    images: Annotated[str, typer.Argument(help="A folder, a text file of paths, or builtin:photos.")],
    out: Annotated[
        str, typer.Option("--out", "-o", help="features.safetensors, features.npz or features.parquet")
    ],
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Images at once.")] = 64,
    device: Device = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the file: float32 or float16.")] = "float32",
    exact: Annotated[
        bool, typer.Option("--exact", help="Compute in float32 even where the hardware is faster otherwise.")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Of this machine; each has a share of the images.")
    ] = 1,
    max_pixels: MaxPixels = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write pooled features (and the images' ids) of a whole collection, with a manifest beside them.

    Interrupted, the same command goes on where it was.
    """
    set_up_notes(quiet)
    from zoo.data.decoding import MAX_PIXELS
    from zoo.extraction import extract as extract_features
    from zoo.feature_files import manifest_path

    features = extract_features(
        model,
        images,
        out=out,
        batch_size=batch_size,
        device=device or "auto",
        dtype=dtype,
        exact=exact,
        processes=processes,
        max_pixels=max_pixels or MAX_PIXELS,
        progress=not quiet,
    )
    count, width = features["features"].shape
    if as_json:
        manifest = str(manifest_path(Path(out)))
        print_json({"schema": 1, "path": out, "manifest": manifest, "images": count, "width": width})
        return
    print(f"{out}: {count} x {width} features")
