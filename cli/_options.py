"""Options that several commands share, spelt once."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Device", "Json", "MaxPixels", "Out", "Precision", "Progress", "Quiet", "Seed", "Sets", "Workers"]

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key, e.g. method.prototypes=300."),
]
Out = Annotated[str | None, typer.Option("--out", "-o", help="The folder to write to.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of every random draw.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")]
Precision = Annotated[
    str | None,
    typer.Option("--precision", help="auto, float32, bfloat16, float16 or float64."),
]
Workers = Annotated[int | None, typer.Option("--workers", min=0, help="Data processes (0: none).")]
MaxPixels = Annotated[
    int | None, typer.Option("--max-pixels", min=1, help="Refuse larger pictures (default: 178956970).")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and the result.")]
Progress = Annotated[bool, typer.Option("--lines", help="Plain progress lines instead of the live view.")]
