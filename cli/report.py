"""``zoo report``: a page about runs, or about results of detection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ._options import Json, Quiet
from ._output import print_json, set_up_notes

__all__ = ["report"]


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Folders of runs, or of what zoo transfer detect wrote, overlaid (default: the newest run).",
        ),
    ] = None,
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="The HTML file to write; it is replaced.")
    ] = "report.html",
    views: Annotated[
        int,
        typer.Option(
            "--views",
            min=0,
            help="Images whose views are drawn; of detection the best, typical and worst (0: none).",
        ),
    ] = 3,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one self-contained page: a run's curves, warnings with advice, views and recipe, or what a detector found."""
    set_up_notes(quiet)
    made = _writer(runs or [])(runs or [], out, views)
    if as_json:
        print_json(made)
        return
    for run in made["runs"]:
        for note in run["notes"]:
            print(f"{run['run']}: {note}")
    print(made["report"])


def _writer(places: list[str]) -> Any:
    """What writes the page; by whether the folders are of runs or of results."""
    from zoo.errors import InputError

    results = [place for place in places if (Path(place).expanduser() / "result.json").is_file()]
    if not results:
        from zoo.pretrain.report import write_report

        return write_report
    if len(results) < len(places):
        raise InputError(
            "A page is about runs or about results, not about both.",
            where=next(place for place in places if place not in results),
            fix="call zoo report once for the runs and once for the results",
        )
    from transfer.detect import report as detection

    return detection.write_report
