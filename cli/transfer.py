"""``zoo transfer`` (a command for each recipe, built from its config) and ``zoo results``."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ._jobs import submit_command
from ._options import Device, Json, MaxPixels, Out, Quiet
from ._output import print_json, print_table, set_up_notes

__all__ = ["app", "results"]

app = typer.Typer(
    help="Judge a model: kNN, linear, SVM, fine-tuning, detection; or all at once.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="REF",
        help="org/name\\[@tag], a folder, a run, random:resnet50, supervised:resnet50, pixels:48 (default: the model "
        "published last).",
    ),
]
_Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="D",
        help="A name (cifar10, builtin:photos, ...; with --data also imagenet, places205, inat18, voc07) or a folder: "
        "train/CLASS and val/CLASS, or tables of path and label.",
    ),
]
_Boxes = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="D",
        help="A name, with --data (voc07, voc07+12, coco2017), or a folder: of VOC, COCO, or tables of boxes.",
    ),
]
_Data = Annotated[
    str | None, typer.Option("--data", metavar="ROOT", help="The folder that holds the data set.")
]
_Resize = Annotated[
    int | None,
    typer.Option("--resize", min=1, help="Shorter side of the images, in pixels (default: the model's)."),
]
_Crop = Annotated[
    int | None,
    typer.Option("--crop", min=1, help="Side of their central crop, in pixels (default: the model's)."),
]
_ClassIndex = Annotated[
    str | None,
    typer.Option(
        "--class-index", metavar="FILE", help="Class names in the order of their numbers (JSON or lines)."
    ),
]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting by its name, e.g. allow_overlap=true (zoo transfer all: of each recipe that has it).",
    ),
]
_MoreModels = Annotated[list[str] | None, typer.Argument(metavar="REF", help="Further models of --compare.")]
_CacheFeatures = Annotated[
    bool, typer.Option("--cache-features", help="Keep the trunk's features for later calls, and use them.")
]
_Workers = Annotated[int, typer.Option("--workers", min=0, help="Data processes.")]
_NOT_OF_DETECT = ("resize", "crop", "class_index", "cache_features")
"""Options that detection refuses."""


_Slurm = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        metavar="KEY=VALUE,...",
        help="Submit it as a SLURM job, such as partition=gpu,nodes=2,gpus=8,time=24:00:00.",
    ),
]


def _submit(recipe: str, settings: dict[str, Any], common: dict[str, Any]) -> None:
    """Queue this very command; its tasks are the processes."""
    from pathlib import Path

    from transfer import RECIPES
    from transfer.results import new_result_path
    from transfer.run import settings_of
    from zoo.engine.slurm_request import parse_slurm
    from zoo.errors import InputError

    set_up_notes(common["quiet"])
    settings_of(recipe, _given(settings, common))  # what can't be is refused before it waits in a queue
    if settings.get("nproc"):
        raise InputError(
            "--slurm and --nproc can't be used together: the job's tasks are the processes.",
            where=f"--nproc {settings['nproc']}",
            fix="say how many each machine has with --slurm gpus=N, or tasks=N on processors",
        )
    request = parse_slurm(common["slurm"])
    out = common["out"]
    dataset = common["dataset"] or common["data"] or RECIPES.config(recipe).default_data
    folder = Path(out) if out else new_result_path(recipe, dataset)
    words = common["context"].obj
    submit_command(words, folder.absolute(), request, bool(out), common["as_json"])


def _given(settings: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """The recipe's settings that were typed."""
    from zoo.pretrain.resolve import parse_assignments

    given = {key: value for key, value in settings.items() if value is not None}
    return {**given, **parse_assignments(common["sets"] or [])}


def _judge(recipe: str, settings: dict[str, Any], common: dict[str, Any]) -> None:
    set_up_notes(common["quiet"])
    from transfer import RECIPES
    from transfer.compare import protocol_of
    from transfer.run import transfer
    from zoo.data.decoding import MAX_PIXELS
    from zoo.weights.hubs.local import LocalHub

    # A folder alone is the data set: the built-in one must not lend it its name.
    result = transfer(
        recipe,
        model=common["model"] or LocalHub().newest(),
        dataset=common["dataset"] or common["data"] or RECIPES.config(recipe).default_data,
        data=common["data"],
        settings=_given(settings, common),
        out=common["out"],
        workers=common["workers"],
        resize=common["resize"],
        crop=common["crop"],
        device=common["device"] or "auto",
        max_pixels=common["max_pixels"] or MAX_PIXELS,
        class_index=common["class_index"],
        cache_features=common["cache_features"],
    )
    if os.environ.get("RANK", "0") != "0":
        return  # of several processes the first one speaks
    if common["as_json"]:
        print_json({"schema": 1, **result})
        return
    rows = [{"metric": name, "value": value} for name, value in result["metrics"].items()]
    for row in rows:
        low_high = result["intervals"].get(row["metric"])
        row["95 %"] = None if low_high is None else f"{low_high[0]:.4g} - {low_high[1]:.4g}"
    title = f"{protocol_of(result)}: {result['model']} on {result['dataset']}"
    print_table(title, ["metric", "value", "95 %"], rows)
    details = result["details"]
    if classes := details.get("per_class"):
        print_table("Classes", list(classes[0]), classes)
    if "best_epoch" in details:
        print(
            f"the last epoch is {details['last_epoch']}, the best one {details['best_epoch']}, by the test images"
        )
    if selection := details.get("selection"):
        print(f"{selection['what']} {selection['chosen']:g}: the best by {selection['by']}")
    if details.get("flatters"):
        print(f"not for comparison: {details['flatters']}")
    print(f"the evidence is in {result['path']}")


def _hidden(kind: Any) -> Any:
    """An option that --help leaves out."""
    option = copy.copy(kind.__metadata__[0])
    option.hidden = True
    return Annotated[kind.__origin__, option]


def _with_default(description: str, default: Any) -> str:
    """A setting's help; its default is not repeated where the description says what the default means."""
    if isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = (",".join(map(str, default)) if isinstance(default, tuple) else str(default)) or "none"
    meaning = f"({default:g}:" if isinstance(default, int | float) else "none:"
    if meaning in description or "else the protocol's" in description:
        return description
    return f"{description} (default: {shown})"


def _command(recipe: str, summary: str) -> Callable[..., None]:
    """A function whose parameters are the common options and the fields of the recipe's config."""
    from transfer import RECIPES

    parameters: list[inspect.Parameter] = []
    for name, kind, default in (
        ("model", _Model, None),
        ("dataset", _Boxes if recipe == "detect" else _Dataset, None),
        ("data", _Data, None),
        ("out", Out, None),
        ("workers", _Workers, 0),
        ("resize", _Resize, None),
        ("crop", _Crop, None),
        ("device", Device, None),
        ("max_pixels", MaxPixels, None),
        ("class_index", _ClassIndex, None),
        ("cache_features", _CacheFeatures, False),
        ("sets", _Settings, None),
        ("as_json", Json, False),
        ("quiet", Quiet, False),
    ):
        option = _hidden(kind) if recipe == "detect" and name in _NOT_OF_DETECT else kind
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        )
    if "nproc" in RECIPES.config(recipe).model_fields:
        more: dict[str, Any] = {"slurm": _Slurm, "context": typer.Context}
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in more.items()
        ]
    common = {parameter.name for parameter in parameters}
    spread = RECIPES.config(recipe).spread
    if spread:
        parameters.append(
            inspect.Parameter(
                "more",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    list[str] | None,
                    typer.Argument(metavar="VALUE", help=f"Further values of --{spread.replace('_', '-')}."),
                ],
            )
        )
    for name, field in RECIPES.config(recipe).model_fields.items():
        flag = "--" + name.replace("_", "-")
        text = _with_default(field.description or "", field.default)
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
        more = given.pop("more", None) or []
        if more and given[spread] is None:
            from zoo.errors import InputError

            flag = "--" + spread.replace("_", "-")
            raise InputError("A word too many.", where=more[0], fix=f"further values come after {flag}")
        if more:
            given[spread] = ",".join([given[spread], *more])
        settings = {
            name: [part for part in value.split(",") if part]
            if name in several and value is not None
            else value
            for name, value in given.items()
            if name not in common
        }
        shared = {name: given[name] for name in common}
        if shared.get("slurm"):
            _submit(recipe, settings, shared)
        else:
            _judge(recipe, settings, shared)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = summary[0].upper() + summary[1:] + "."
    return command


def register() -> None:
    """Add a command for each recipe; called only when ``transfer`` was asked for."""
    from transfer import RECIPES

    for name, entry in RECIPES.items():
        app.command(name)(_command(name, entry.summary))
    app.command("all")(_suite)


def _suite(
    model: _Model = None,
    dataset: _Dataset = None,
    data: _Data = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="REF ...",
            help="Other models, as many as you like: random: is this network with random weights, "
            "supervised: its architecture's supervised ones.",
        ),
    ] = None,
    more: _MoreModels = None,
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="For a mean and a deviation.")] = "0",
    out: Out = None,
    workers: _Workers = 0,
    resize: _Resize = None,
    crop: _Crop = None,
    device: Device = None,
    max_pixels: MaxPixels = None,
    class_index: _ClassIndex = None,
    cache_features: _CacheFeatures = False,
    sets: _Settings = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """All that the data allow: knn, linear, semisup with 10 % and 1 %; with several labels an image, svm and lowshot."""
    set_up_notes(quiet)
    from transfer.compare import table_of
    from transfer.suite import run_suite
    from zoo.data.decoding import MAX_PIXELS
    from zoo.errors import InputError, RunError
    from zoo.pretrain.resolve import parse_assignments
    from zoo.weights.hubs.local import LocalHub

    if more and not compare:
        raise InputError("A word too many.", where=more[0], fix="other models come after --compare")
    if not all(word.strip().isdecimal() for word in seeds.split(",")):
        raise InputError("Seeds are whole numbers.", where=f"--seeds {seeds}", fix="e.g. --seeds 0,1,2")
    found = run_suite(
        [model or LocalHub().newest(), *([compare, *(more or [])] if compare else [])],
        dataset or data or "builtin:photos",
        data,
        seeds=[int(word) for word in seeds.split(",")],
        settings=parse_assignments(sets or []),
        out=out,
        workers=workers,
        resize=resize,
        crop=crop,
        device=device or "auto",
        max_pixels=max_pixels or MAX_PIXELS,
        class_index=class_index,
        cache_features=cache_features,
    )
    if as_json:
        print_json(found)
    else:
        columns, rows = table_of(found["groups"])
        print_table(f"{found['dataset']}, seeds {seeds}, in percent", columns, rows)
        for note in found["skipped"]:
            print(f"skipped: {note}")
        print(f"the evidence is in {found['path']}")
    if found["failed"]:
        raise RunError("; ".join(found["failed"]), where=found["path"])


def results(
    root: Annotated[
        str | None,
        typer.Argument(help="The folder that holds results (default: $ZOO_RESULTS, else ./results)."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Models beside each other, by data set and protocol.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List transfer results, or compare models by them."""
    from pathlib import Path

    from transfer.compare import compared, groups_of, protocol_of
    from transfer.results import list_results, results_root

    folder = Path(root).expanduser() if root else results_root()
    found = list_results(folder)
    groups = groups_of(found) if compare else []
    if as_json:
        listed = {"groups": groups} if compare else {"results": found}
        print_json({"schema": 1, "root": str(folder), **listed})
        return
    if not found:
        print(f"no results in {folder} (measure one with: zoo transfer knn)")
        return
    for group in groups:
        title = f"{group['dataset']}, {group['protocol']}, in percent"
        print_table(title, ["model", "crop", "seeds", *group["metrics"]], compared(group))
    if compare:
        return
    rows = [
        {
            "recipe": protocol_of(result),
            "model": result["model"],
            "data": result["dataset"],
            "metrics": ", ".join(
                [f"{k} {v:.4g}" for k, v in result["metrics"].items() if v is not None]
                + ["diverged"] * bool(result.get("details", {}).get("diverged"))
            ),
            "seed": result["seeds"][0],
            "when": result["created"],
        }
        for result in found
    ]
    print_table(f"Results in {folder}", ["recipe", "model", "data", "metrics", "seed", "when"], rows)
