"""``zoo report``: a page about runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ._options import Json, Quiet
from ._output import print_json, set_up_notes

__all__ = ["report"]


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Folders of runs, overlaid (default: the newest run)."),
    ] = None,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write; it is replaced.")
    ] = "report.html",
    views: Annotated[int, typer.Option("--views", min=0, help="Images whose views are drawn (0: none).")] = 3,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One self-contained page: curves, the doctor's warnings with advice, views, the resolved recipe."""
    set_up_notes(quiet)
    from zoo.pretrain.report import write_report

    made = write_report(runs or [], out, views)
    if as_json:
        print_json(made)
        return
    for run in made["runs"]:
        for note in run["notes"]:
            print(f"{run['run']}: {note}")
    print(made["report"])
