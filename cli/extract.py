"""``zoo extract``: frozen features of images, into a file."""

from __future__ import annotations

from typing import Annotated

import typer

from ._options import Device
from ._output import set_up_notes

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
) -> None:
    """Write pooled features (and the images' ids) of a whole collection, with a manifest beside them.

    Interrupted, the same command goes on where it was.
    """
    set_up_notes()
    from zoo.extraction import extract as extract_features

    features = extract_features(
        model,
        images,
        out=out,
        batch_size=batch_size,
        device=device or "auto",
        dtype=dtype,
        exact=exact,
        processes=processes,
    )
    print(f"{out}: {features['features'].shape[0]} x {features['features'].shape[1]} features")
