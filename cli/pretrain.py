"""``zoo pretrain``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ._options import Device, Json, Out, Precision, Progress, Quiet, Seed, Sets, Workers
from ._output import set_up_notes

__all__ = ["pretrain"]


def pretrain(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe's name or a .yaml file (default: swav_tiny)."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SRC",
            help="Images: a folder, a text file of paths, builtin:photos, or a name such as cifar10; may be repeated.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", help="Go on with a stopped run, or extend it (--set epochs=N)."
        ),
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option("--init-from", metavar="RUN|FILE", help="Start a new run from these trunk weights."),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the images.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Images a step, over all processes."),
    ] = None,
    sets: Sets = None,
    out: Out = None,
    seed: Seed = None,
    device: Device = None,
    precision: Precision = None,
    workers: Workers = None,
    on_error: Annotated[
        str | None,
        typer.Option("--on-error", help="Unreadable images: error (stop and name it) or skip (count them)."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    lines: Progress = False,
) -> None:
    """Train a backbone without labels. Without arguments: the small SwAV recipe on built-in photographs."""
    set_up_notes(quiet)
    from zoo.errors import InputError
    from zoo.pretrain.resolve import parse_assignments

    options = _given(
        {
            "epochs": epochs,
            "batch_size": batch_size,
            "seed": seed,
            "device": device,
            "precision": precision,
            "data.workers": workers,
            "data.on_error": on_error,
            "data.sources": data or None,
        }
    )
    overrides = parse_assignments(sets or [])
    progress = "json" if as_json else "quiet" if quiet else "lines" if lines else "auto"
    if resume is not None:
        for given, name in ((recipe, "RECIPE"), (init_from, "--init-from"), (out, "--out")):
            if given is not None:
                raise InputError(
                    f"{name} and --resume can't be used together: a resumed run keeps its recipe and folder.",
                    where=f"--resume {resume}",
                )
        from zoo.pretrain.run import resume as resume_run

        result = resume_run(resume, overrides=overrides, options=options, progress=progress)
    else:
        from zoo.pretrain.resolve import resolve

        resolve(recipe or "swav_tiny", overrides, options)  # mistakes show before torch is imported
        from zoo.pretrain.run import start

        result = start(
            recipe or "swav_tiny",
            out=out,
            overrides=overrides,
            options=options,
            init_from=init_from,
            progress=progress,
        )
    result.require_finished()
    if not as_json:
        print(f"{result.path}: finished, {result.total_steps} steps")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}
