"""Runs: start one, go on with one. This file puts recipe, data, method and engine together."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.open import absolute_source
from ..engine.checkpoint_copy import check_address
from ..engine.collectives import Collectives
from ..engine.dashboards import check_trackers
from ..engine.launch import leave_for_good
from ..engine.loop import Callback
from ..engine.progress import choose_progress
from ..engine.world import process_world
from ..errors import EXIT_FAILURE, InputError, RunError, Stopped
from ..files import fresh_path
from .collapse import Event
from .config import Recipe
from .images import OwnTransform
from .methods.base import Method
from .resolve import Resolved, differences, resolve
from .rundir import RunFolder, list_runs, runs_root
from .session import Ended, Session

__all__ = ["RunResult", "resume", "start"]

log = logging.getLogger("zoo")

# What torchrun and SLURM tell the processes that they start again.
_RESTARTS, _REQUEUES = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"

# What may differ when a run goes on; anything else would make it another run.
_MAY_CHANGE = (
    "epochs",
    "samples",
    "device",
    "checkpoint.",
    "health.",
    "probe.",
    "engine.compile",
    "engine.activation_checkpointing",
    *(
        f"data.{key}"
        for key in ("workers", "on_error", "sources", "max_pixels", "max_bytes", "max_text_bytes")
    ),
)


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    ``exit_code`` is 0 when all steps are done, 75 or 130 when a signal stopped it (saved, resume it), 1 when it
    was halted (saved as well): by the doctor for ``event``, or by a watcher.
    ``method`` holds the trained trunk and heads.
    """

    path: Path
    step: int
    total_steps: int
    exit_code: int
    bad_files: int
    method: Method
    event: Event | None = None

    def require_finished(self) -> None:
        """Raise ``Stopped`` if a signal ended the run early, ``RunError`` if it was halted."""
        if self.exit_code == EXIT_FAILURE:
            event = self.event
            why = "" if event is None else f" ({event.name}: {event.seen})"
            raise RunError(
                f"The run was stopped and saved at step {self.step} of {self.total_steps}{why}.",
                where=self.path,
                fix=f"{'' if event is None else f'a new run with {event.advice}; or '}go on all the same: "
                f"zoo pretrain --resume {self.path}",
            )
        if self.exit_code:
            raise Stopped(
                f"The run was stopped and saved at step {self.step} of {self.total_steps}.",
                exit_code=self.exit_code,
                fix=f"go on with: zoo pretrain --resume {self.path}",
            )


def start(
    recipe: str | Path | Mapping[str, Any] = "swav_tiny",
    *,
    data: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    init_from: str | Path | None = None,
    views: OwnTransform | None = None,
    trackers: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    progress: str = "auto",
) -> RunResult:
    """Start a new run; in each process of it, where there are several (torchrun, srun).

    A group of processes that torchrun or SLURM starts again goes on with the run that it had begun; it is
    known by ``out``, or by an id of the launch that no other has (``torchrun --rdzv-id``, SLURM's job).

    Args:
        recipe: a recipe's name, a YAML file or a mapping.
        data: one or several sources of images; the recipe's own by default.
        out: the run's folder, new or empty; by default a fresh one below ``runs``.
        overrides: dotted recipe key -> value.
        options: like ``overrides``, for a command's own flags; they win.
        init_from: a run, a file of weights or any other model (see ``zoo.load``) that the trunk starts from;
            all else is fresh.
        views: the user's own transforms instead of the recipe's views (``zoo.data.views.own.OwnViews``).
        trackers: dashboards that get the figures too: ``tensorboard``, ``trackio``, ``wandb``.
        callbacks: watchers of the run, see ``zoo.engine.loop.Callback``.
        progress: ``auto``, ``live``, ``lines``, ``json`` or ``quiet``.

    Raises:
        InputError: a recipe, source or folder that can't be used.
        RunError: the disk failed, or the loss is not finite.
        Stopped: torchrun started again what had been asked to stop.
    """
    flags = dict(options or {})
    if data is not None:
        flags["data.sources"] = [data] if isinstance(data, str) else list(data)
    resolved = _absolute_paths(resolve(recipe, overrides, flags))
    check_trackers(trackers)
    if resolved.recipe.checkpoint.copy_to is not None:
        check_address(resolved.recipe.checkpoint.copy_to)
    with process_world(resolved.recipe.device) as (device, world):
        begun = _begun_before(out, world)
        if begun is not None:
            log.warning("started again by the launcher: going on with %s", begun)
            return _go_on(_TakenUp(begun, views), (device, world), views, trackers, callbacks, progress)
        session = Session(resolved, device, world, views)
        if init_from is not None:
            init_from = _absolute(str(init_from)) if Path(init_from).expanduser().exists() else str(init_from)
            session.init_from(init_from)
        session.images.place(session.method.trunk, device)
        folder = None
        if world.rank == 0:
            folder = Path(out) if out is not None else fresh_path(runs_root(), resolved.recipe.name)
            info = {
                "recipe_name": resolved.recipe.name,
                "method": resolved.recipe.method.name,
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "command": sys.argv,
                "total_steps": session.shape.total_steps,
                "init_from": init_from,
                "precision": session.precision.name,
                "sources": resolved.sources,
                "augment_on": session.images.augment_on,
                "own_views": views is not None,
                "launch": _launch_id(),
                "resumed": [],
            }
            fingerprint = session.images.source.fingerprint()
            RunFolder(folder).create(info, resolved.to_yaml(), fingerprint)
        place = world.gather_values(None if folder is None else str(folder.absolute()))[0]
        run = RunFolder(Path(place) if folder is None else folder)
        watchers = [*choose_progress(progress), *callbacks] if world.rank == 0 else []
        return _result(session, run, session.train(run, watchers, trackers))


def resume(
    run: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    views: OwnTransform | None = None,
    trackers: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    progress: str = "auto",
) -> RunResult:
    """Go on with a run from its newest whole checkpoint, as if it had never stopped.

    A finished run can be extended with ``overrides={"epochs": ...}``: from the next step on the
    learning rate follows the schedule of a run of the new length; what was done is not redone.

    Raises:
        InputError: not a run, other data than it was started on, or a changed recipe.
        RunError: another process trains it, the disk failed, or the loss is not finite.
        Stopped: torchrun started again what had been asked to stop.
    """
    check_trackers(trackers)
    taken = _TakenUp(Path(run), views, overrides, options)
    with process_world(taken.resolved.recipe.device) as place:
        return _go_on(taken, place, views, trackers, callbacks, progress)


class _TakenUp:
    """A run as it was left, and the recipe that it goes on with."""

    def __init__(
        self,
        path: Path,
        views: OwnTransform | None,
        overrides: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = RunFolder(path)
        self.info = self.folder.read()
        self.resolved = _absolute_paths(resolve(self.folder.recipe, overrides, options))
        self.changes = _changes(resolve(self.folder.recipe).recipe, self.resolved.recipe)
        if (views is not None) != self.info.get("own_views", False):
            raise InputError(
                "The run was started with your own transforms."
                if views is None
                else "The run was started with the recipe's views, not with your own transforms.",
                where=path,
                fix="pass the same views again (--views, or views= in Python)"
                if views is None
                else "leave the transforms away",
            )


def _go_on(
    taken: _TakenUp,
    place: tuple[torch.device, Collectives],
    views: OwnTransform | None,
    trackers: Sequence[str],
    callbacks: Sequence[Callback],
    progress: str,
) -> RunResult:
    device, world = place
    folder, info = taken.folder, taken.info
    if "stopped" in info and any(world.gather_values(_was_restarted(_RESTARTS))):
        raise Stopped(
            "The run was asked to stop and is saved; torchrun started it again, but it does not go on by itself.",
            exit_code=info["stopped"],
            fix=f"go on with: zoo pretrain --resume {folder.path}",
        )
    session = Session(taken.resolved, device, world, views, info.get("precision"))
    session.images.place(session.method.trunk, device, info.get("augment_on", "worker"))
    same = world.rank != 0 or session.images.source.fingerprint() == folder.data()
    if not all(world.gather_values(same)):
        raise InputError(
            "The data is not what the run was started on (other files, names or sizes).",
            where=session.images.source.name,
            fix="point --data at the original images, or start a new run with --init-from",
        )
    watchers = [*choose_progress(progress), *callbacks] if world.rank == 0 else []
    return _result(session, folder, session.train(folder, watchers, trackers, info, taken.changes))


def _result(session: Session, folder: RunFolder, ended: Ended) -> RunResult:
    if ended.exit_code == EXIT_FAILURE:
        leave_for_good()
    if ended.exit_code and _RESTARTS in os.environ:
        # To torchrun every exit code but 0 is a failure, after which it may start all processes again.
        if session.world.rank == 0:
            folder.write_info({**folder.read(), "stopped": ended.exit_code})
        with contextlib.suppress(RuntimeError):  # one that was killed meanwhile is no reason not to leave
            session.world.barrier()
    return RunResult(
        path=folder.path,
        step=ended.step,
        total_steps=session.shape.total_steps,
        exit_code=ended.exit_code,
        bad_files=ended.bad_files,
        method=session.method,
        event=ended.event,
    )


def _begun_before(out: str | Path | None, world: Collectives) -> Path | None:
    """The run that this launch began, if its processes are started again; the first one looks for all."""
    # An agent of torchrun counts only the failures of its own machine: elsewhere the count may still be 0.
    again = any(world.gather_values(_was_restarted(_RESTARTS) or _was_restarted(_REQUEUES)))
    begun = _find_begun(out, again) if world.rank == 0 else None
    found = world.gather_values(None if begun is None else str(begun.absolute()))[0]
    return None if found is None else Path(found)


def _find_begun(out: str | Path | None, again: bool) -> Path | None:
    mine = _launch_id()
    if out is not None:
        run = RunFolder(Path(out))
        if not (run.path / "run.json").is_file():
            return None
        # Nobody counts a restart because another machine came or left.
        ours = mine is not None and _begun_by(run) == (mine, sys.argv)
        return run.path if again or ours else None
    if not again:
        return None
    if mine is None:
        log.warning(
            "started again by torchrun, but without --out or --rdzv-id it can't be known which run was begun: "
            "a new one is started"
        )
        return None
    begun = [run.path for run in list_runs(runs_root()) if _begun_by(run)[0] == mine]
    return begun[-1] if begun else None


def _begun_by(run: RunFolder) -> tuple[str | None, list[str] | None]:
    try:
        info = run.read()
    except InputError:  # a damaged run is none of ours
        return None, None
    return info.get("launch"), info.get("command")


def _launch_id() -> str | None:
    """What no other launch is called, if there is such a name."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if elastic and elastic != "none":  # torchrun's default
        return elastic
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    return f"slurm-{job}.{step}" if job else None


def _was_restarted(counter: str) -> bool:
    return os.environ.get(counter, "0") != "0"


def _absolute_paths(resolved: Resolved) -> Resolved:
    """A run goes on from any folder: paths in it don't depend on where it was started."""
    recipe = resolved.recipe
    index, copy_to = recipe.data.class_index, recipe.checkpoint.copy_to
    data = {
        "sources": tuple(map(absolute_source, recipe.data.sources)),
        "class_index": index if index is None else _absolute(index),
    }
    checkpoint = {"copy_to": copy_to if not copy_to or ":" in copy_to else _absolute(copy_to)}
    update = {
        "data": recipe.data.model_copy(update=data),
        "checkpoint": recipe.checkpoint.model_copy(update=checkpoint),
        "probe": recipe.probe.model_copy(update={"data": tuple(map(absolute_source, recipe.probe.data))}),
    }
    return Resolved(recipe.model_copy(update=update), resolved.sources, resolved.layers)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _changes(before: Recipe, after: Recipe) -> dict[str, tuple[Any, Any]]:
    changed = differences(before, after)
    for key, (old, _) in changed.items():
        if not any(key == may or (may.endswith(".") and key.startswith(may)) for may in _MAY_CHANGE):
            raise InputError(
                f"{key} can't change when a run goes on (it was {old!r}).",
                where=f"--set {key}",
                fix="start a new run, with --init-from if it should begin from these weights",
            )
    return changed
