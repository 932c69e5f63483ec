"""Options that several commands share, spelt once."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

__all__ = ["Device", "Json", "Out", "Precision", "Progress", "Quiet", "Seed", "Sets", "Workers"]

Sets = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this annotation at run time
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key, e.g. method.prototypes=300."),
]
Out = Annotated[Optional[str], typer.Option("--out", "-o", help="The folder to write to.")]  # noqa: UP045
Seed = Annotated[Optional[int], typer.Option("--seed", help="Seed of every random draw.")]  # noqa: UP045
Device = Annotated[Optional[str], typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")]  # noqa: UP045
Precision = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--precision", help="auto, float32, bfloat16, float16 or float64."),
]
Workers = Annotated[Optional[int], typer.Option("--workers", help="Data processes (0: none).")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and the result.")]
Progress = Annotated[bool, typer.Option("--lines", help="Plain progress lines instead of the live view.")]
