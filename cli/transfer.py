"""``zoo transfer`` (a command for each recipe, built from its config) and ``zoo results``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ._options import Device, Json, MaxPixels, Out, Quiet, Sets
from ._output import print_json, print_table, set_up_notes

__all__ = ["app", "results"]

app = typer.Typer(
    help="Judge a model: kNN, linear, semi-supervised, detection.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="REF",
        help="org/name\\[@tag], a folder, a run, random:resnet50, supervised:resnet50, pixels:48.",
    ),
]
_Dataset = Annotated[
    str | None, typer.Option("--dataset", metavar="D", help="A data set's name or a folder.")
]
_Data = Annotated[
    str | None, typer.Option("--data", metavar="ROOT", help="The folder that holds the data set.")
]
_Pixels = Annotated[int | None, typer.Option(min=1, help="In pixels, if not the model's own preprocessing.")]
_ClassIndex = Annotated[
    str | None,
    typer.Option(
        "--class-index", metavar="FILE", help="Class names in the order of their numbers (JSON or lines)."
    ),
]
_Workers = Annotated[int, typer.Option("--workers", min=0, help="Data processes.")]


def _judge(recipe: str, settings: dict[str, Any], common: dict[str, Any]) -> None:
    set_up_notes(common["quiet"])
    from transfer.run import transfer
    from zoo.data.decoding import MAX_PIXELS
    from zoo.pretrain.resolve import parse_assignments
    from zoo.weights.hubs.local import LocalHub

    given = {key: value for key, value in settings.items() if value is not None}
    # A folder alone is the data set: the built-in one must not lend it its name.
    builtin = "builtin:photos-voc" if recipe == "detect" else "builtin:photos"
    result = transfer(
        recipe,
        model=common["model"] or LocalHub().newest(),
        dataset=common["dataset"] or common["data"] or builtin,
        data=common["data"],
        settings={**given, **parse_assignments(common["sets"] or [])},
        out=common["out"],
        workers=common["workers"],
        resize=common["resize"],
        crop=common["crop"],
        device=common["device"] or "auto",
        max_pixels=common["max_pixels"] or MAX_PIXELS,
        class_index=common["class_index"],
    )
    if common["as_json"]:
        print_json({"schema": 1, **result})
        return
    rows = [{"metric": name, "value": value} for name, value in result["metrics"].items()]
    print_table(f"{_recipe_of(result)}: {result['model']} on {result['dataset']}", ["metric", "value"], rows)
    if result["details"].get("flatters"):
        print(f"not for comparison: {result['details']['flatters']}")
    print(f"the evidence is in {result['path']}")


def _recipe_of(result: dict[str, Any]) -> str:
    """The recipe's name, and which of its protocols, if it has several."""
    protocol = result.get("protocol", {}).get("protocol")
    return f"{result['recipe']} ({protocol})" if protocol else str(result["recipe"])


def _command(recipe: str, summary: str) -> Callable[..., None]:
    """A function whose parameters are the common options and the fields of the recipe's config."""
    from transfer import RECIPES

    parameters: list[inspect.Parameter] = []
    for name, kind, default in (
        ("model", _Model, None),
        ("dataset", _Dataset, None),
        ("data", _Data, None),
        ("out", Out, None),
        ("workers", _Workers, 0),
        ("resize", _Pixels, None),
        ("crop", _Pixels, None),
        ("device", Device, None),
        ("max_pixels", MaxPixels, None),
        ("class_index", _ClassIndex, None),
        ("sets", Sets, None),
        ("as_json", Json, False),
        ("quiet", Quiet, False),
    ):
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        )
    common = {parameter.name for parameter in parameters}
    for name, field in RECIPES.config(recipe).model_fields.items():
        flag = "--" + name.replace("_", "-")
        shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        text = f"{field.description} (default: {'none' if shown == '' else shown})"
        if field.annotation is bool:
            annotation: Any = Annotated[bool | None, typer.Option(flag + "/--no-" + flag[2:], help=text)]
        else:
            typed: Any = field.annotation if field.annotation in (int, float, str) else str
            annotation = Annotated[typed | None, typer.Option(flag, help=text)]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    several = {
        name
        for name, field in RECIPES.config(recipe).model_fields.items()
        if isinstance(field.default, tuple)
    }

    def command(**given: Any) -> None:
        settings = {
            name: [part for part in value.split(",") if part]
            if name in several and value is not None
            else value
            for name, value in given.items()
            if name not in common
        }
        _judge(recipe, settings, {name: given[name] for name in common})

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = summary[0].upper() + summary[1:] + "."
    return command


def register() -> None:
    """Add a command for each recipe; called only when ``transfer`` was asked for."""
    from transfer import RECIPES

    for name, entry in RECIPES.items():
        app.command(name)(_command(name, entry.summary))


def results(
    root: Annotated[
        str | None,
        typer.Argument(help="The folder that holds results (default: $ZOO_RESULTS, else ./results)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List transfer results."""
    from pathlib import Path

    from transfer.results import list_results, results_root

    folder = Path(root).expanduser() if root else results_root()
    found = list_results(folder)
    if as_json:
        print_json({"schema": 1, "root": str(folder), "results": found})
        return
    if not found:
        print(f"no results in {folder} (measure one with: zoo transfer knn)")
        return
    rows = [
        {
            "recipe": _recipe_of(result),
            "model": result["model"],
            "data": result["dataset"],
            "metrics": ", ".join(f"{k} {v:.4g}" for k, v in result["metrics"].items() if v is not None),
            "seed": result["seeds"][0],
            "when": result["created"],
        }
        for result in found
    ]
    print_table(f"Results in {folder}", ["recipe", "model", "data", "metrics", "seed", "when"], rows)
