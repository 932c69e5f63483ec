"""``zoo pretrain``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ._jobs import submit_command, words_for_processes
from ._options import Device, Json, MaxPixels, Out, Precision, Progress, Quiet, Seed, Sets, Workers
from ._output import set_up_notes

__all__ = ["pretrain"]


def pretrain(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A recipe's name or a .yaml file (default: swav_tiny)."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SRC",
            help="Images: a folder, a text file of paths, tar shards ('/data/{000..999}.tar', s3://...), parquet "
            "files, hf-dataset:NAME:SPLIT, builtin:photos, or a name such as cifar10; may be repeated.",
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
        typer.Option(
            "--init-from", metavar="RUN|FILE|MODEL", help="Start a new run from these trunk weights."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the images.")] = None,
    samples: Annotated[
        str | None,
        typer.Option("--samples", help="Images that the run sees, such as 1e9, instead of --epochs."),
    ] = None,
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
    augment_on: Annotated[
        str | None,
        typer.Option("--augment-on", help="Colours and blur: worker, device or auto (measured)."),
    ] = None,
    channels: Annotated[
        int | None, typer.Option("--channels", min=1, help="Of the images: 3, 1 (gray), or many (TIFF).")
    ] = None,
    max_pixels: MaxPixels = None,
    views: Annotated[
        str | None,
        typer.Option(
            "--views",
            metavar="MODULE:NAME",
            help="Your own transforms for the recipe's views: an importable callable, or a list of them.",
        ),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option("--tracker", help="tensorboard, trackio or wandb; may be repeated (also on resume)."),
    ] = None,
    stop_on_collapse: Annotated[
        bool,
        typer.Option("--stop-on-collapse", help="End the run, saved, when the doctor finds a collapse."),
    ] = False,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            "--probe",
            metavar="SRC",
            help="Labelled images to judge by each epoch: a folder with train and val, a name, or twice a source.",
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Processes on this machine (one for each GPU).")
    ] = None,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="With --nproc: start all again so often if one dies.")
    ] = 3,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm",
            metavar="KEY=VALUE,...",
            help="Submit it as a SLURM job, such as partition=gpu,nodes=2,gpus=8,time=24:00:00.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    lines: Progress = False,
) -> None:
    """Train a backbone without labels. Without arguments: the small SwAV recipe on built-in photographs."""
    set_up_notes(quiet)
    from zoo.errors import InputError
    from zoo.pretrain.resolve import parse_assignments, resolve

    options = _given(
        {
            "epochs": epochs,
            "samples": samples,
            "batch_size": batch_size,
            "seed": seed,
            "device": device,
            "precision": precision,
            "data.workers": workers,
            "data.on_error": on_error,
            "data.augment_on": augment_on,
            "data.channels": channels,
            "data.max_pixels": max_pixels,
            "data.sources": data or None,
            "probe.data": probe or None,
            "health.stop_on_collapse": stop_on_collapse or None,
        }
    )
    if epochs is not None:
        if samples is not None:
            raise InputError(
                "--epochs and --samples can't be used together: each says how long the run is.",
                where=f"--epochs {epochs} --samples {samples}",
            )
        options["samples"] = None  # a recipe's own number would win otherwise
    overrides = parse_assignments(sets or [])
    if slurm:
        if nproc is not None:
            raise InputError(
                "--slurm and --nproc can't be used together: the job's tasks are the processes.",
                where=f"--nproc {nproc}",
                fix="say how many each machine has with --slurm gpus=N, or tasks=N on processors",
            )
        wanted = _recipe_of(recipe, resume, out, overrides, options)
        _submit(context.obj, slurm, wanted, resume or out, as_json)
        return
    if nproc is not None and nproc > 1 and "RANK" not in os.environ:
        # Mistakes show before anything starts; a launch that is repeated may find its own --out.
        name = _recipe_of(recipe, resume, None, overrides, options).name
        name = None if resume else name
        raise typer.Exit(_launch(context.obj, nproc, restarts, out, name))
    progress = "json" if as_json else "quiet" if quiet else "lines" if lines else "auto"
    if resume is not None:
        for given, name in ((recipe, "RECIPE"), (init_from, "--init-from"), (out, "--out")):
            if given is not None:
                raise InputError(
                    f"{name} and --resume can't be used together: a resumed run keeps its recipe and folder.",
                    where=f"--resume {resume}",
                )
        from zoo.pretrain.run import resume as resume_run

        result = resume_run(
            resume,
            overrides=overrides,
            options=options,
            views=_own_views(views),
            trackers=tracker or (),
            progress=progress,
        )
    else:
        resolve(recipe or "swav_tiny", overrides, options)  # mistakes show before torch is imported
        from zoo.pretrain.run import start

        result = start(
            recipe or "swav_tiny",
            out=out,
            overrides=overrides,
            options=options,
            init_from=init_from,
            views=_own_views(views),
            trackers=tracker or (),
            progress=progress,
        )
    result.require_finished()
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if not as_json and rank == "0":
        print(f"{result.path}: finished, {result.total_steps} steps")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _launch(words: Sequence[str], nproc: int, restarts: int, out: str | None, name: str | None) -> int:
    """Run this very command in several processes; ``name`` is that of a new run's recipe."""
    from zoo.engine.launch import launch
    from zoo.files import fresh_path
    from zoo.pretrain.rundir import runs_root

    folder = None
    if name is not None and out is None:
        # Chosen once for all processes, and known to them when they are started again.
        folder = fresh_path(runs_root(), name)
    code = launch(["-m", "_zoo_entry", *words_for_processes(words, folder)], nproc, restarts)
    if folder is not None:
        with contextlib.suppress(OSError):  # it holds a run, unless nothing was begun
            folder.rmdir()
    return code


def _recipe_of(
    recipe: str | None,
    resume: str | None,
    out: str | None,
    overrides: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """The recipe of a job; what can't be is refused before it waits in a queue."""
    from zoo.errors import InputError
    from zoo.pretrain.resolve import resolve
    from zoo.pretrain.rundir import RunFolder

    if resume is not None:
        folder = RunFolder(Path(resume))
        folder.read()
        return resolve(folder.recipe, overrides, options).recipe
    if out is not None and Path(out).is_dir() and any(Path(out).iterdir()):
        raise InputError(
            "The run's folder exists and is not empty.",
            where=out,
            fix=f"choose another --out, or go on with a stopped run: --resume {out}",
        )
    return resolve(recipe or "swav_tiny", overrides, options).recipe


def _submit(
    words: Sequence[str], slurm: Sequence[str], recipe: Any, place: str | None, as_json: bool
) -> None:
    """Queue this very command; ``place`` is the run's folder, if it was named."""
    from zoo.engine.slurm_request import parse_slurm
    from zoo.errors import InputError
    from zoo.files import fresh_path
    from zoo.pretrain.rundir import runs_root

    request = parse_slurm(slurm)
    shares = request.world_size * recipe.engine.accumulate
    if recipe.batch_size % shares:
        raise InputError(
            f"A batch of {recipe.batch_size} images can't be shared equally by {request.nodes} node(s) x "
            f"{request.tasks} task(s) x {recipe.engine.accumulate} part(s).",
            where="batch_size",
            fix=f"use a multiple of {shares}",
        )
    folder = Path(place).absolute() if place else fresh_path(runs_root(), recipe.name).absolute()
    submit_command(words, folder, request, place is not None, as_json)


def _own_views(place: str | None) -> Any:
    """Import what the user named; the current folder counts, as it does for ``python -m``."""
    if place is None:
        return None
    import importlib
    import sys

    from zoo.errors import InputError

    module, _, name = place.partition(":")
    if not module or not name:
        raise InputError("This is not of the form MODULE:NAME.", where=f"--views {place}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"The transforms can't be imported ({error}).", where=f"--views {place}") from None
