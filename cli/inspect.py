"""``zoo runs``, ``zoo recipes`` and ``zoo env``: looking, not touching."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._options import Json, Sets
from ._output import print_json, print_table

__all__ = ["env", "recipes", "runs"]


def runs(
    root: Annotated[
        str | None,
        typer.Argument(help="The folder that holds runs (default: $ZOO_RUNS, else ./runs)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs: recipe, state, steps, loss."""
    from zoo.pretrain.rundir import list_runs, runs_root

    folder = Path(root).expanduser() if root else runs_root()
    rows = [run.summary() for run in list_runs(folder)]
    if as_json:
        print_json({"schema": 1, "root": str(folder), "runs": rows})
    elif not rows:
        print(f"no runs in {folder} (start one with: zoo pretrain)")
    else:
        shown = [{**row, "steps": f"{row['step']}/{row['total_steps'] or '?'}"} for row in rows]
        print_table(f"Runs in {folder}", ["run", "recipe", "state", "steps", "loss", "created"], shown)


recipes = typer.Typer(help="List the recipes, show one with the source of each value, or compare two.")


@recipes.callback(invoke_without_command=True)
def recipes_list(context: typer.Context, as_json: Json = False) -> None:
    """List the recipes, show one with the source of each value, or compare two."""
    if context.invoked_subcommand is not None:
        return
    from zoo.pretrain.resolve import list_recipes

    found = list_recipes()
    if as_json:
        print_json({"schema": 1, "recipes": found})
    else:
        rows = [{"recipe": name, "what it is": summary} for name, summary in found.items()]
        print_table("Recipes", ["recipe", "what it is"], rows)


@recipes.command("show")
def recipes_show(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or a .yaml file.")],
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Print a resolved recipe; each line ends in where its value came from."""
    from zoo.pretrain.resolve import parse_assignments, resolve

    resolved = resolve(recipe, parse_assignments(sets or []))
    if as_json:
        print_json({"schema": 1, "recipe": resolved.recipe.to_dict(), "sources": resolved.sources})
    else:
        print(resolved.to_yaml(), end="")


@recipes.command("diff")
def recipes_diff(
    first: Annotated[str, typer.Argument(help="A recipe's name or a .yaml file.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    as_json: Json = False,
) -> None:
    """Show the keys whose values differ between two recipes."""
    from zoo.pretrain.resolve import differences, resolve

    changed = differences(resolve(first).recipe, resolve(second).recipe)
    if as_json:
        print_json({"schema": 1, "differences": changed})
    else:
        rows = [{"key": key, first: str(old), second: str(new)} for key, (old, new) in changed.items()]
        print_table(f"{first} and {second}", ["key", first, second], rows)


def env(as_json: Json = False) -> None:
    """Print versions, hardware and folders, as a bug report needs them."""
    from transfer.results import results_root
    from zoo.homes import cache_home, hub_home
    from zoo.pretrain.environment import describe_environment
    from zoo.pretrain.rundir import runs_root

    found = describe_environment()
    folders = {"hub": hub_home(), "cache": cache_home(), "runs": runs_root(), "results": results_root()}
    found["folders"] = {name: str(path) for name, path in folders.items()}
    if as_json:
        print_json(found)
        return
    packages, folders = found.pop("packages"), found.pop("folders")
    rows = [{"what": key, "found": str(value)} for key, value in {**found, **folders, **packages}.items()]
    print_table("Environment", ["what", "found"], rows)
