"""Runs: start one, go on with one. This file puts recipe, data, method and engine together."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.loader import Batch, EpochOrder, view_batches
from ..data.open import open_sources
from ..data.source import ImageSource
from ..data.views.apply import normalize
from ..engine.checkpoint import CheckpointFolder
from ..engine.collectives import WorldOfOne
from ..engine.loop import Callback, Loop
from ..engine.precision import Precision, choose_device, choose_precision, compute_threads, processors
from ..engine.progress import choose_progress
from ..engine.signals import StopRequest
from ..engine.trackers import BadFileLog, MetricsLog, cut_after
from ..errors import InputError, Stopped
from ..files import fresh_path
from ..keyed import keyed_seed
from ..models.factory import create_trunk
from ..models.small_maps import use_central_tap
from ..optim.lars import LARS
from ..optim.schedule import WarmupCosine
from ..tensors import seeded
from ..weights.initial import load_trunk_weights, read_weights
from .config import OptimizerConfig, Recipe
from .environment import describe_environment
from .methods import METHODS
from .methods.base import Method
from .methods.config_base import RunShape
from .resolve import Resolved, differences, resolve
from .rundir import RunFolder, RunLock, runs_root

__all__ = ["RunResult", "build_method", "resume", "start", "view_preparer"]

log = logging.getLogger("zoo")

# What may differ when a run goes on; anything else would make it another run.
_MAY_CHANGE = ("epochs", "device", "data.workers", "data.on_error", "data.sources", "checkpoint.")


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    ``exit_code`` is 0 when all steps are done, 75 or 130 when a signal stopped it (saved, resume it).
    ``method`` holds the trained trunk and heads.
    """

    path: Path
    step: int
    total_steps: int
    exit_code: int
    bad_files: int
    method: Method

    def require_finished(self) -> None:
        """Raise ``Stopped`` if a signal ended the run early."""
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
    callbacks: Sequence[Callback] = (),
    progress: str = "auto",
) -> RunResult:
    """Start a new run.

    Args:
        recipe: a recipe's name, a YAML file or a mapping.
        data: one or several sources of images; the recipe's own by default.
        out: the run's folder, new or empty; by default a fresh one below ``runs``.
        overrides: dotted recipe key -> value.
        options: like ``overrides``, for a command's own flags; they win.
        init_from: a run or a file of weights that the trunk starts from; all else is fresh.
        callbacks: watchers of the run, see ``zoo.engine.loop.Callback``.
        progress: ``auto``, ``live``, ``lines``, ``json`` or ``quiet``.

    Raises:
        InputError: a recipe, source or folder that can't be used.
        RunError: the disk failed, or the loss is not finite.
    """
    flags = dict(options or {})
    if data is not None:
        flags["data.sources"] = [data] if isinstance(data, str) else list(data)
    resolved = _absolute_sources(resolve(recipe, overrides, flags))
    session = _Session(resolved)
    if init_from is not None:
        session.init_from(Path(init_from))
    fingerprint = session.source.fingerprint()
    info = {
        "recipe_name": resolved.recipe.name,
        "method": resolved.recipe.method.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "total_steps": session.shape.total_steps,
        "init_from": None if init_from is None else str(Path(init_from).absolute()),
        "precision": session.precision.name,
        "sources": resolved.sources,
        "resumed": [],
    }
    folder = RunFolder(Path(out) if out is not None else fresh_path(runs_root(), resolved.recipe.name))
    folder.create(info, resolved.to_yaml(), fingerprint)
    return session.train(folder, callbacks, progress)


def resume(
    run: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: str = "auto",
) -> RunResult:
    """Go on with a run from its newest whole checkpoint, as if it had never stopped.

    A finished run can be extended with ``overrides={"epochs": ...}``: from the next step on the
    learning rate follows the schedule of a run of the new length; what was done is not redone.

    Raises:
        InputError: not a run, other data than it was started on, or a changed recipe.
        RunError: another process trains it, the disk failed, or the loss is not finite.
    """
    folder = RunFolder(Path(run))
    info = folder.read()
    resolved = _absolute_sources(resolve(folder.recipe, overrides, options))
    before = resolve(folder.recipe).recipe
    changes = _changes(before, resolved.recipe)
    session = _Session(resolved)
    if session.source.fingerprint() != folder.data():
        raise InputError(
            "The data is not what the run was started on (other files, names or sizes).",
            where=session.source.name,
            fix="point --data at the original images, or start a new run with --init-from",
        )
    return session.train(folder, callbacks, progress, info=info, changes=changes)


def _absolute_sources(resolved: Resolved) -> Resolved:
    """A run goes on from any folder: paths in it don't depend on where it was started."""
    data = resolved.recipe.data
    paths = (Path(source).expanduser() for source in data.sources)
    sources = tuple(
        str(path.absolute()) if path.exists() else source
        for source, path in zip(data.sources, paths, strict=True)
    )
    update = {"data": data.model_copy(update={"sources": sources})}
    return Resolved(resolved.recipe.model_copy(update=update), resolved.sources)


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


def build_method(recipe: Recipe, shape: RunShape) -> Method:
    """The recipe's method around a fresh trunk, initialised from the recipe's seed alone."""
    with seeded(keyed_seed(recipe.seed, "init")):
        trunk = create_trunk(recipe.trunk.arch, stem=recipe.trunk.stem, base_planes=recipe.trunk.base_planes)
        return METHODS.code(recipe.method.name)(trunk, recipe.method, shape, WorldOfOne())  # type: ignore[no-any-return]


def _build_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    shared: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "lars":
        return LARS(groups, momentum=config.momentum, trust=config.trust, **shared)
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, **shared)
    return torch.optim.AdamW(groups, betas=config.betas, **shared)


class _Session:
    """One process's share of a run: everything built, nothing trained yet."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.recipe = recipe = resolved.recipe
        self.source: ImageSource = open_sources(recipe.data.sources)
        for note in getattr(self.source, "notes", ()):
            log.info("%s: %s", self.source.name, note)
        self.plan = recipe.views.plan()
        self.order = EpochOrder(len(self.source), recipe.batch_size, recipe.seed)
        if self.order.batches == 0:
            raise InputError(
                f"The batch ({recipe.batch_size}) is larger than the set ({len(self.source)} images).",
                where=self.source.name,
                fix="lower batch_size, or pass more images",
            )
        self.shape = RunShape(
            views=len(self.plan.crops),
            batch_size=recipe.batch_size,
            world_size=1,
            steps_per_epoch=self.order.batches,
            epochs=recipe.epochs,
        )
        for warning in recipe.method.check(self.shape):
            log.warning("%s", warning)
        self.device = choose_device(recipe.device)
        self.precision = choose_precision(recipe.precision, self.device)
        self.method = build_method(recipe, self.shape)
        if self.device.type == "cpu":
            use_central_tap(self.method.trunk)
        self.method.to(device=self.device, dtype=self.precision.master_dtype)
        self.method.to(memory_format=self.precision.memory_format)
        self.optimizer = _build_optimizer(
            recipe.optimizer, self.method.param_groups(recipe.optimizer.exclude_one_dimensional)
        )
        self.started_from_weights = False

    def init_from(self, path: Path) -> None:
        """Fill the trunk from a run's newest checkpoint or from a file of weights."""
        if path.is_dir():
            checkpoint, _ = CheckpointFolder(RunFolder(path).checkpoints).newest()
            if checkpoint is None:
                raise InputError("No whole checkpoint is in this folder.", where=path)
            learner = checkpoint.shared["learner"]
            tensors = {key: value for key, value in learner.items() if key.startswith("trunk.")}
        else:
            tensors = read_weights(path)
        log.info("initialised from %s: %s", path, load_trunk_weights(self.method.trunk, tensors, path))
        self.started_from_weights = True

    def train(
        self,
        folder: RunFolder,
        callbacks: Sequence[Callback],
        progress: str,
        info: dict[str, Any] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> RunResult:
        """Train in ``folder``; with ``info`` (of an existing run) from its newest checkpoint."""
        bad_files = BadFileLog(folder.bad_files)
        watchers = [MetricsLog(folder.metrics), bad_files, *choose_progress(progress), *callbacks]
        loop = self._loop(folder, watchers)
        workers = self._workers()
        with (
            RunLock(folder.path),
            StopRequest() as stop,
            compute_threads(self.device, workers) as threads,
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
        ):
            torch.manual_seed(keyed_seed(self.recipe.seed, "train"))
            if info is not None:
                self._restore(folder, loop, info, dict(changes or {}))
                self._warn_of_threads(folder, threads)
            used = {
                "device": str(self.device),
                "precision": self.precision.name,
                "workers": workers,
                "threads": threads,
            }
            folder.write_environment({**describe_environment(), **used})
            log.info("training in %s", folder.path)
            if info is None and self.started_from_weights:
                loop.save()  # a resume must not depend on the file that the weights came from
            loop.run(stop)
        if bad_files.files:
            log.warning("%d unreadable images were left out, see %s", len(bad_files.files), folder.bad_files)
        done = loop.step >= self.shape.total_steps
        return RunResult(
            path=folder.path,
            step=loop.step,
            total_steps=self.shape.total_steps,
            exit_code=0 if done else stop.exit_code,
            bad_files=len(bad_files.files),
            method=self.method,
        )

    def _warn_of_threads(self, folder: RunFolder, threads: int) -> None:
        before = folder.environment().get("threads", threads)
        if self.device.type == "cpu" and before != threads:
            log.warning(
                "the run computed on %d threads so far, from here on on %d: sums are rounded in another order, "
                "so it is not bit for bit the same",
                before,
                threads,
            )

    def _workers(self) -> int:
        if self.recipe.data.workers is not None:
            return self.recipe.data.workers
        # A GPU waits for all the workers it can get; on a CPU they share the processors with the trunk.
        share = processors() // 4 if self.device.type == "cpu" else processors() - 1
        return min(8, max(1, share))

    def _loop(self, folder: RunFolder, callbacks: Sequence[Callback]) -> Loop:
        recipe, shape = self.recipe, self.shape
        saving = recipe.checkpoint
        save_every = saving.every_steps
        if save_every is None and saving.every_epochs is not None:
            save_every = saving.every_epochs * shape.steps_per_epoch
        schedule = WarmupCosine(
            base=recipe.optimizer.lr,
            final=recipe.schedule.final_lr,
            start=recipe.schedule.start_lr,
            warmup_steps=round(min(recipe.schedule.warmup_epochs, recipe.epochs) * shape.steps_per_epoch),
            total_steps=shape.total_steps,
        )
        return Loop(
            learner=self.method,
            optimizer=self.optimizer,
            lr_at=schedule.at,
            batches=lambda first: view_batches(
                self.source,
                self.plan,
                self.order,
                first_step=first,
                last_step=shape.total_steps,
                workers=self._workers(),
                skip_bad=recipe.data.on_error == "skip",
                pin_memory=self.device.type == "cuda",
            ),
            prepare=view_preparer(self.recipe, self.precision),
            precision=self.precision,
            steps_per_epoch=shape.steps_per_epoch,
            total_steps=shape.total_steps,
            checkpoints=CheckpointFolder(folder.checkpoints, saving.keep),
            save_every=save_every,
            callbacks=callbacks,
        )

    def _restore(self, folder: RunFolder, loop: Loop, info: dict[str, Any], changes: dict[str, Any]) -> None:
        checkpoint, problems = loop.checkpoints.newest()
        for problem in problems:
            log.warning("a checkpoint is skipped: %s", problem)
        if checkpoint is None and problems:
            raise InputError(
                "No checkpoint of this run is whole.",
                where=folder.checkpoints,
                fix="put back an undamaged copy, or start a new run",
            )
        if checkpoint is not None:
            if checkpoint.step > self.shape.total_steps:
                raise InputError(
                    f"The run has done {checkpoint.step} steps already, more than epochs="
                    f"{self.recipe.epochs} would have ({self.shape.total_steps}).",
                    where=folder.path,
                    fix="ask for more epochs",
                )
            loop.restore(checkpoint)
        elif info.get("init_from"):
            raise InputError(
                "The run was killed before its first checkpoint, so its initial weights are not saved.",
                where=folder.path,
                fix=f"start again with --init-from {info['init_from']}",
            )
        if info.get("precision", self.precision.name) != self.precision.name:
            log.warning(
                "the run computed in %s so far, from here on in %s: not bit for bit the same",
                info["precision"],
                self.precision.name,
            )
        if "epochs" in changes:
            log.info(
                "epochs %d -> %d: from step %d on, the learning rate follows the schedule of the new length",
                *changes["epochs"],
                loop.step,
            )
        elif loop.step >= self.shape.total_steps:
            log.info("this run is finished; extend it with --set epochs=N")
        else:
            log.info("going on from step %d of %d", loop.step, self.shape.total_steps)
        for file in (folder.metrics, folder.bad_files):
            cut_after(file, loop.step)
        info = {key: value for key, value in info.items() if key != "schema"}
        info["total_steps"] = self.shape.total_steps
        info["resumed"] = [*info["resumed"], {"step": loop.step, "changes": changes}]
        if changes:
            folder.rewrite_recipe(self.resolved.to_yaml())
        folder.write_info(info)


def view_preparer(recipe: Recipe, precision: Precision) -> Callable[[Batch], list[torch.Tensor]]:
    """A function that brings a batch's views onto the device, normalised, in the right memory order."""
    mean, std = recipe.views.mean, recipe.views.std

    def prepare(batch: Batch) -> list[torch.Tensor]:
        return [
            normalize(view.to(precision.device, non_blocking=True), mean, std).to(
                dtype=precision.master_dtype, memory_format=precision.memory_format
            )
            for view in batch.views
        ]

    return prepare
