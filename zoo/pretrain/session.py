"""One process's share of a run: everything built, trained, saved and taken up again."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.resnet import ResNet

from ..addresses import without_credentials
from ..data.loader import Batch
from ..engine.average import WeightAverage
from ..engine.checkpoint import Checkpoint, CheckpointFolder
from ..engine.checkpoint_writer import CheckpointWriter
from ..engine.collectives import Collectives
from ..engine.dashboards import choose_trackers
from ..engine.efficiency import EfficiencyReport
from ..engine.loop import Callback, Loop
from ..engine.precision import Precision, compute_threads, shared_precision
from ..engine.signals import StopRequest
from ..engine.sync_batchnorm import synchronize_batchnorm, warn_of_others
from ..engine.trackers import BadFileLog, MetricsLog, cut_after
from ..errors import EXIT_FAILURE, InputError, is_out_of_memory
from ..keyed import keyed_seed
from ..models.factory import create_trunk
from ..models.foreign import check_sizes, is_foreign
from ..models.recompute import recompute_blocks
from ..models.small_maps import use_matrix_products
from ..weights.fill import copy_into
from ..weights.load import load_trunk
from ..weights.reference import parse_reference
from .build import build_method, build_optimizer, learning_rate
from .checks import beginning, inconsistencies, run_shape, shards_of, tell
from .collapse import Event
from .environment import describe_environment
from .health import Autopsy, doctor_of
from .images import OwnTransform, RunImages, view_preparer
from .methods.base import Method
from .methods.config_base import machine_memory
from .online_probe import probe_of
from .publish import read_run
from .resolve import Resolved
from .rundir import RunFolder, RunLock

__all__ = ["Ended", "Session"]

log = logging.getLogger("zoo")

_LENGTH = ("epochs", "samples")


def _precision(wanted: str, before: str | None, device: torch.device, world: Collectives) -> Precision:
    """The same on all processes; ``auto`` stays what it was ``before``, where the device has that."""
    if wanted == "auto" and before is not None and (before != "float16" or device.type == "cuda"):
        wanted = before
    return shared_precision(wanted, device, world)


def _memory_of(device: torch.device) -> dict[str, Any]:
    """What a method's dictionaries must fit into, as ``RunShape`` calls it: a GPU, or a share of this machine."""
    if device.type != "cuda":
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        there = machine_memory() // processes
        return {"memory": there, "place": f"each of {processes} processes here"} if processes > 1 else {}
    return {"memory": torch.cuda.mem_get_info(device)[1], "place": str(device)}


def _check_kind(loop: Loop, checkpoint: Checkpoint) -> None:
    """What another run's checkpoint may hold that would be taken up without a word."""
    shared, learner = checkpoint.shared, loop.learner.state_dict()
    if shared["step"] != checkpoint.step:
        raise ValueError(f"it was saved at step {shared['step']}")
    if ("average" in shared) != (loop.average is not None):
        raise ValueError("only one of them keeps an average of the weights")
    for name in learner.keys() & shared["learner"].keys():
        if learner[name].dtype != shared["learner"][name].dtype:
            raise ValueError(f"{name} is {shared['learner'][name].dtype}, not {learner[name].dtype}")
    saved, group = shared["optimizer"]["param_groups"][0], loop.optimizer.param_groups[0]
    for name in ("momentum", "betas", "trust"):
        if (name in saved) != (name in group):
            raise ValueError(f"only one of the optimizers has {name}")


class _Step(nn.Module):
    """The method's step as a forward pass, which is what DDP wraps."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, views: list[torch.Tensor], batch: Batch, given: Any) -> Any:
        return self.method.step(views, batch, given)


@dataclass(frozen=True)
class Ended:
    """How far a session came, why it ended (0, 75 or 130; 1: halted), and how many files were unreadable.

    ``event`` is what the doctor halted the run for, known to the first process.
    """

    step: int
    exit_code: int
    bad_files: int
    event: Event | None = None


class Session:
    """Everything of a run in this process, built; nothing is trained yet.

    Args:
        resolved: the recipe.
        device: where this process trains.
        world: all processes of the run.
        own_views: the user's transforms.
        precision: what ``auto`` was when the run was begun, if it was begun before.
    """

    def __init__(
        self,
        resolved: Resolved,
        device: torch.device,
        world: Collectives,
        own_views: OwnTransform | None = None,
        precision: str | None = None,
    ) -> None:
        self.resolved = resolved
        self.world = world
        self.device = device
        self.recipe = recipe = resolved.recipe
        self.images = RunImages(recipe, own_views, world)
        self.shape = run_shape(
            recipe,
            len(self.images.source),
            self.images.groups,
            world.world_size,
            classes=tuple(self.images.source.classes),
            data=self.images.source.name,
            **_memory_of(device),
        )
        shards, workers = shards_of(self.images.source), self.images.workers(device)
        tell(inconsistencies(resolved, self.shape, shards, workers, begun=precision is not None))
        self.precision = _precision(recipe.precision, precision, device, world)
        self.method = build_method(recipe, self.shape, world)
        if device.type == "cpu":
            use_matrix_products(self.method)  # a momentum encoder too
        if recipe.engine.activation_checkpointing:
            recompute_blocks(self.method.trunk)
        self.method.to(device=device, dtype=self.precision.master_dtype)
        self.method.to(memory_format=self.precision.memory_format)
        if is_foreign(self.method.trunk):
            check_sizes(self.method.trunk, recipe.trunk.arch, recipe.data.channels, self.shape.sizes)
        if recipe.engine.sync_batchnorm:
            synchronize_batchnorm(self.method, world, recipe.engine.batchnorm_group)
            warn_of_others(self.method, world, recipe.engine.batchnorm_group)
        if recipe.engine.compile:
            for network in (self.method.trunk, getattr(self.method, "momentum_encoder", None)):
                if network is not None:
                    network.compile()
        self.optimizer = build_optimizer(
            recipe.optimizer, self.method.param_groups(recipe.optimizer.exclude_one_dimensional), device
        )
        self.probe = probe_of(recipe) if world.rank == 0 else None
        self.started_from_weights = False

    def init_from(self, reference: str) -> None:
        """Fill the trunk from a run's newest checkpoint or from any other model.

        Raises:
            InputError: no such model, or one of another network.
        """
        target = parse_reference(reference)
        if target.kind == "run":
            _, tensors, _ = read_run(Path(target.name).expanduser())
            account = f"{len(tensors)} tensors of a run"
        else:
            loaded = load_trunk(target, create_trunk, progress=self.world.rank == 0, verify=False)
            tensors, account = loaded.trunk.state_dict(), loaded.account
        if not all(value.isfinite().all() for value in tensors.values() if value.is_floating_point()):
            raise InputError(
                "The weights to start from hold numbers that are not finite.",
                where=target.where,
                fix="look at them: zoo doctor MODEL",
            )
        copy_into(self.method.trunk, tensors, target.where)
        self.method.on_trunk_replaced()
        log.info("initialised from %s: %s", target.where, account)
        self.started_from_weights = True

    def train(
        self,
        folder: RunFolder,
        callbacks: Sequence[Callback],
        trackers: Sequence[str] = (),
        info: dict[str, Any] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Ended:
        """Train in ``folder``; with ``info`` (of an existing run) from its newest checkpoint."""
        first = self.world.rank == 0
        bad_files = BadFileLog(folder.bad_files_of(self.world.rank))
        watchers: list[Callback] = [bad_files]
        doctor = doctor_of(self.recipe, self.shape, folder.events) if first else None
        if first:
            watchers += [
                *(watcher for watcher in (doctor, self.probe) if watcher is not None),
                MetricsLog(folder.metrics),
                # Before the progress view: one of them may ask for a login.
                *choose_trackers(trackers, folder.path, folder.path.name, self._shown_recipe()),
                *callbacks,
                EfficiencyReport(folder.efficiency),
            ]
        workers = self.images.workers(self.device)
        lock = RunLock(folder.path) if first else contextlib.nullcontext()
        with (
            lock,
            StopRequest() as stop,
            compute_threads(self.device, workers) as threads,
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
        ):
            own_stream = (self.world.rank,) if self.world.rank else ()
            torch.manual_seed(keyed_seed(self.recipe.seed, "train", *own_stream))
            loop = self._loop(folder, watchers)
            if info is not None:
                self._restore(folder, loop, info, dict(changes or {}))
                self._warn_of_threads(folder, threads)
            if first:
                used = {
                    "device": str(self.device),
                    "precision": self.precision.name,
                    "workers": workers,
                    "threads": threads,
                    "processes": self.world.world_size,
                }
                folder.write_environment({**describe_environment(), **used})
                if info is None:
                    learning = sum(p.numel() for p in self.method.parameters() if p.requires_grad)
                    log.info("plan: %s", beginning(self.recipe, self.shape, learning))
            log.info("training in %s", folder.path)
            if info is None and self.started_from_weights:
                loop.save()  # a resume must not depend on the file that the weights came from
            loop.run(stop)
        if bad_files.files:
            log.warning("%d unreadable images were left out, see %s", len(bad_files.files), bad_files.path)
        done = loop.step >= self.shape.total_steps
        code = EXIT_FAILURE if self.world.any(loop.halted) else 0 if done else stop.exit_code
        return Ended(loop.step, code, len(bad_files.files), doctor.event if doctor else None)

    def _shown_recipe(self) -> dict[str, Any]:
        """The recipe for dashboards, which are not for passwords."""
        shown = self.recipe.to_dict()
        if self.recipe.checkpoint.copy_to is not None:
            shown["checkpoint"]["copy_to"] = without_credentials(self.recipe.checkpoint.copy_to)
        shown["data"]["sources"] = [without_credentials(source) for source in self.recipe.data.sources]
        return shown

    def _warn_of_threads(self, folder: RunFolder, threads: int) -> None:
        before = folder.environment().get("threads", threads)
        if self.device.type == "cpu" and before != threads:
            log.warning(
                "the run computed on %d threads so far, from here on on %d: sums are rounded in another order, "
                "so it is not bit for bit the same",
                before,
                threads,
            )

    def _loop(self, folder: RunFolder, callbacks: Sequence[Callback]) -> Loop:
        recipe, shape, engine = self.recipe, self.shape, self.recipe.engine
        saving = recipe.checkpoint
        save_every = saving.every_steps
        if save_every is None and saving.every_epochs is not None:
            save_every = saving.every_epochs * shape.steps_per_epoch
        kept = saving.keep_every_epochs and saving.keep_every_epochs * shape.steps_per_epoch
        checkpoints = CheckpointFolder(folder.checkpoints, saving.keep, kept)
        return Loop(
            learner=self.method,
            optimizer=self.optimizer,
            lr_at=learning_rate(recipe, shape),
            batches=lambda first: self.images.batches(first, shape.total_steps, self.device),
            prepare=view_preparer(recipe, self.precision),
            precision=self.precision,
            steps_per_epoch=shape.steps_per_epoch,
            total_steps=shape.total_steps,
            checkpoints=CheckpointWriter(checkpoints, self.world, saving.copy_to),
            save_every=save_every,
            callbacks=callbacks,
            world=self.world,
            compute=self._averaged_step(),
            accumulate=engine.accumulate,
            autopsy=Autopsy(folder.nonfinite, self.images.source, self.world),
            average=None if engine.ema_decay is None else WeightAverage(self.method.trunk, engine.ema_decay),
        )

    def _averaged_step(self) -> Any:
        """The method's step; with several processes, in DDP, which averages gradients over them."""
        if self.world.world_size == 1:
            return self.method.step
        with warnings.catch_warnings():
            # What newer versions of torch would rather have called otherwise is all that older ones know.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                _Step(self.method),
                device_ids=[self.device] if self.device.type == "cuda" else None,
                # Buffers are a process's own (a queue), or alike anyway (synchronised norms), or, where norms
                # are not synchronised, those of rank 0 are saved: as if they were broadcast before each pass.
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                # AMDIM's embeddings serve its own loss alone; what a foreign network leaves out is its own affair.
                find_unused_parameters=not (self.method.whole_trunk or isinstance(self.method.trunk, ResNet)),
            )

    def _restore(self, folder: RunFolder, loop: Loop, info: dict[str, Any], changes: dict[str, Any]) -> None:
        checkpoint, problems = loop.checkpoints.folder.newest_for(self.world)
        for problem in problems:
            log.warning("a checkpoint is skipped: %s", problem)
        if checkpoint is None and problems:
            raise InputError(
                "No checkpoint of this run is whole.",
                where=folder.checkpoints,
                fix="put back an undamaged copy, or start a new run",
            )
        if checkpoint is not None:
            self._take_up(loop, checkpoint, folder)
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
        longer = [f"{key} {changes[key][0]} -> {changes[key][1]}" for key in _LENGTH if key in changes]
        if longer:
            log.info(
                "%s: from step %d on, the learning rate follows the schedule of the new length",
                ", ".join(longer),
                loop.step,
            )
        elif loop.step >= self.shape.total_steps:
            log.info("this run is finished; extend it with --set epochs=N")
        else:
            log.info("going on from step %d of %d", loop.step, self.shape.total_steps)
        cut_after(folder.bad_files_of(self.world.rank), loop.step)
        if self.world.rank == 0:
            cut_after(folder.metrics, loop.step)
            cut_after(folder.events, loop.step)
            info = {key: value for key, value in info.items() if key not in ("schema", "stopped")}
            info["total_steps"] = self.shape.total_steps
            info["resumed"] = [*info.get("resumed", []), {"step": loop.step, "changes": changes}]
            if changes:
                folder.rewrite_recipe(self.resolved.to_yaml())
            folder.write_info(info)

    def _check_same_network(self, checkpoint: Checkpoint) -> None:
        """A function may be another one by now, and timm another release."""
        before = {name: value.shape for name, value in checkpoint.shared["learner"].items()}
        now = {name: value.shape for name, value in self.method.state_dict().items()}
        other = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if other:
            raise InputError(
                f"{self.recipe.trunk.arch} makes another network than when the run was started ({other[0]}).",
                where=checkpoint.path,
                fix="put the code back as it was, or start a new run",
            )

    def _load(self, loop: Loop, checkpoint: Checkpoint, states: list[dict[str, Any]] | None = None) -> None:
        try:
            _check_kind(loop, checkpoint)
            loop.restore(checkpoint, states)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                "The checkpoint is whole, but not one of this run: network, method, optimizer or precision differ "
                f"({' '.join(str(error).split())[:200]}).",
                where=checkpoint.path,
                fix="put the run's own checkpoints back, or start a new run (--init-from takes over weights)",
            ) from error

    def _take_up(self, loop: Loop, checkpoint: Checkpoint, folder: RunFolder) -> None:
        if checkpoint.step > self.shape.total_steps:
            raise InputError(
                f"The run has done {checkpoint.step} steps already, more than it is to have now "
                f"({self.shape.total_steps}).",
                where=folder.path,
                fix="ask for more epochs, or samples",
            )
        if is_foreign(self.method.trunk):
            self._check_same_network(checkpoint)
        if checkpoint.world_size == self.world.world_size:
            self._load(loop, checkpoint)
            return
        self._load(loop, checkpoint, loop.checkpoints.folder.load_locals(checkpoint.step))
        log.warning(
            "the run had %d process(es) so far, from here on %d: weights, optimizer and schedule go on as they "
            "were, queues are dealt out anew, random streams of the processes begin afresh; sums are rounded "
            "in another order, so it is not bit for bit the same",
            checkpoint.world_size,
            self.world.world_size,
        )
