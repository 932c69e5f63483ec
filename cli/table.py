"""``zoo table``: the SwAV paper's tables and figures, and beside them what was measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ._options import Json
from ._output import print_json, print_table

__all__ = ["table"]


def table(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME ...]", help="table1 to table6, figure2, ... (all by default)."),
    ] = None,
    results: Annotated[
        list[str] | None,
        typer.Option(
            "--results",
            metavar="FOLDER",
            help="Where results lie; several times for several (default: $ZOO_RESULTS, else ./results).",
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Which tables and figures there are.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Show the SwAV paper's tables and figures, and in columns of their own what was measured here, by which protocol.

    A measured number stands in a row of the paper only if model, data and protocol are the paper's. Others of the same
    method come below, and say what differs.
    """
    from pathlib import Path

    from transfer.published import PAPER, find_table
    from transfer.published.show import panel_words, table_json
    from transfer.results import list_results, results_root
    from transfer.trained import described_training
    from zoo.errors import InputError

    chosen = [find_table(name) for name in names] if names else list(PAPER.values())
    if listed:
        known = [{"name": each.name, "title": each.title, "source": each.panels[0].source} for each in chosen]
        if as_json:
            print_json({"schema": 1, "tables": known})
        else:
            print_table("Tables and figures of the SwAV paper", ["name", "title"], known)
        return
    folders = [Path(folder).expanduser() for folder in results or [str(results_root())]]
    for folder in folders:
        if results and not folder.is_dir():
            raise InputError("There is no such folder of results.", where=folder, fix="check --results")
    found = [result for folder in folders for result in list_results(folder)]
    found.sort(key=lambda result: str(result.get("created")))
    unknown = sum(described_training(result) is None for result in found)
    told = [table_json(each, found) for each in chosen]
    if as_json:
        about = {
            "results": [str(folder) for folder in folders],
            "found": len(found),
            "of_unknown_training": unknown,
        }
        print_json({"schema": 1, **about, "tables": told})
        return
    show = _print_markdown if markdown else print_table
    for each in told:
        for panel in each["panels"]:
            show(f"{panel['source']}: {panel['title']}", *panel_words(panel))
            for note in panel["notes"]:
                print(f"{'- ' if markdown else ''}{note}")
            print()
    _say_what_was_looked_at(folders, found, unknown)


def _say_what_was_looked_at(folders: Sequence[Any], found: Sequence[Any], unknown: int) -> None:
    places = ", ".join(map(str, folders))
    if not found:
        print(f"Published numbers alone: no results in {places} (measure one with: zoo transfer linear)")
        return
    more = f"; {unknown} don't say how their model was trained and are left out" if unknown else ""
    print(f"Measured: what fits of {len(found)} results in {places}{more}")


def _print_markdown(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[str(row.get(column) or "-").replace("|", "\\|") for column in columns] for row in rows]
    print(f"**{title}**\n")
    for line in lines:
        print(f"| {' | '.join(line)} |")
    print()
