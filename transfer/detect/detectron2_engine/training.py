"""One training by detectron2's own trainer, solver, hooks and checkpoints, on our stream of views.

Written against detectron2 0.6 and what came after: ``SimpleTrainer`` and ``AMPTrainer``, ``hooks``, ``solver``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.collectives import Collectives
from zoo.engine.dashboards import choose_trackers
from zoo.engine.loop import Callback, StepRecord
from zoo.engine.precision import Precision, compute_threads
from zoo.engine.progress import choose_progress
from zoo.engine.signals import StopRequest
from zoo.engine.trackers import MetricsLog, cut_after
from zoo.errors import RunError
from zoo.keyed import keyed_seed

from ..batches import Stream
from ..training import Ended, Plan, last_loss
from .data import Loader
from .draws import keyed_samples

__all__ = ["logged_to", "train_model"]

log = logging.getLogger("zoo")

LOG = "detectron2.log"


class _Halt(BaseException):
    """A stop was asked for and the state is saved. No ``Exception``: detectron2 would print it as a failure."""


def train_model(
    model: Any, cfg: Any, plan: Plan, stream: Stream, precision: Precision, world: Collectives
) -> Ended:
    """Train detectron2's model in ``plan.folder``, from its newest checkpoint there if there is one.

    Args:
        model: on the device, its weights loaded.
        cfg: detectron2's config.
        plan: steps, workers, watchers.
        stream: the training views, whose keys the samples are drawn by, too.
        precision: float16 is detectron2's mixed precision.
        world: the processes that train together.

    Raises:
        RunError: with several processes, that it diverged.
    """
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.engine import AMPTrainer, SimpleTrainer
    from detectron2.solver import build_lr_scheduler, build_optimizer

    def loader(first: int, last: int) -> Loader:
        return Loader(stream, first, last, plan.protocol.batch, plan.workers, world.rank, world.world_size)

    optimizer = build_optimizer(cfg, model)
    schedule = build_lr_scheduler(cfg, optimizer)
    whole = _distributed(model, world, precision)
    batches = _Steps(loader, plan.steps)
    kind = AMPTrainer if precision.name == "float16" else SimpleTrainer
    trainer = kind(whole, batches, optimizer)
    # The schedule, too: detectron2's hook asks for a class that newer versions' isn't of, and then forgets it.
    states = {"trainer": trainer, "schedule": schedule}
    checkpointer = DetectionCheckpointer(whole, str(plan.folder / "detectron2"), **states)
    watchers = _watchers(plan) if world.rank == 0 else []
    precise = loader(plan.steps, plan.steps + plan.protocol.precise_batches)
    drawn_on = [precision.device] if precision.device.type == "cuda" else []
    with StopRequest() as stop:
        trainer.register_hooks(
            [
                *_hooks(plan, stream, schedule, watchers, checkpointer, precise, world),
                _stop_hook(stop, checkpointer, plan.steps, world),
            ]
        )
        batches.first = _take_up(checkpointer, trainer, plan, world)
        try:
            with (
                compute_threads(precision.device, plan.workers),
                _watched(watchers, batches.first, plan.steps),
                torch.random.fork_rng(drawn_on),  # each step seeds it, should a YAML's own parts draw from it
                keyed_samples(model),
            ):
                if batches.first < plan.steps:
                    trainer.train(batches.first, plan.steps)
        except _Halt:
            return Ended(trainer.iter + 1, math.nan, stop.exit_code)
        except FloatingPointError as error:
            if world.world_size > 1:  # the others wait for this one: only its end frees them
                raise RunError(
                    f"The training diverged at step {trainer.iter}.", fix="lower the lr"
                ) from error
            return Ended(trainer.iter, math.nan, 0, diverged=True)
    loss = last_loss(plan.folder / "metrics.jsonl", plan.steps) if world.rank == 0 else None
    return Ended(plan.steps, float(world.gather_values(loss)[0]), 0)


def _hooks(
    plan: Plan,
    stream: Stream,
    schedule: Any,
    watchers: Sequence[Callback],
    checkpointer: Any,
    precise: Loader,
    world: Collectives,
) -> list[Any]:
    """What happens beside each step, in this order: the norms are measured before they are saved."""
    from detectron2.engine import hooks

    def seed(trainer: Any) -> None:
        torch.manual_seed(keyed_seed(stream.seed, "detectron2 step", trainer.iter, world.rank))

    found = [
        hooks.CallbackHook(before_step=seed),
        hooks.LRScheduler(schedule.optimizer, schedule),
        hooks.CallbackHook(after_step=_Recorder(watchers, stream, plan)),
    ]
    if plan.protocol.precise_batches:
        found.append(hooks.PreciseBN(0, checkpointer.model, precise, plan.protocol.precise_batches))
    if world.rank == 0:
        found.append(hooks.PeriodicCheckpointer(checkpointer, plan.save_every, max_to_keep=1))
    return found


class _Steps:
    """The batches from the step that the training begins at, which is known only when a checkpoint is read.

    Some versions of detectron2 ask for the iterator before that: nothing is opened until the first batch is wanted.
    """

    def __init__(self, loader: Any, last: int) -> None:
        self.loader, self.first, self.last = loader, 0, last

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader(self.first, self.last)


class _Recorder:
    """What detectron2 stores of each step, for our watchers."""

    def __init__(self, watchers: Sequence[Callback], stream: Stream, plan: Plan) -> None:
        self.watchers, self.batch = watchers, plan.protocol.batch
        self.steps_per_epoch = max(1, len(stream.images) // self.batch)
        self.began = self.before = time.monotonic()

    def __call__(self, trainer: Any) -> None:
        if not self.watchers:
            return
        now = time.monotonic()
        stored = {name: value for name, (value, _) in trainer.storage.latest().items()}
        record = StepRecord(
            trainer.iter,
            trainer.iter // self.steps_per_epoch,
            float(stored["total_loss"]),
            float(stored["lr"]),
            self.batch,
            now - self.before,
            float(stored.get("data_time", 0.0)),
            now - self.began,
            {name: float(value) for name, value in stored.items() if name.startswith("loss_")},
        )
        self.before = now
        for watcher in self.watchers:
            watcher.on_step(record)


def _stop_hook(stop: StopRequest, checkpointer: Any, steps: int, world: Collectives) -> Any:
    from detectron2.engine import hooks

    def after_step(trainer: Any) -> None:
        if trainer.iter + 1 < steps and world.any(stop.signal is not None):
            if world.rank == 0:
                checkpointer.save(f"model_{trainer.iter:07d}", iteration=trainer.iter)
            world.barrier()
            raise _Halt

    return hooks.CallbackHook(after_step=after_step)


def _take_up(checkpointer: Any, trainer: Any, plan: Plan, world: Collectives) -> int:
    """Load the newest checkpoint; the step to go on with."""
    metrics = plan.folder / "metrics.jsonl"
    if not checkpointer.has_checkpoint():
        if world.rank == 0:
            metrics.unlink(missing_ok=True)
        return 0
    checkpointer.load(checkpointer.get_checkpoint_file())
    step = int(trainer.iter) + 1
    log.info("going on from step %d of %d", step, plan.steps)
    if world.rank == 0:
        cut_after(metrics, step)
    return step


def _watchers(plan: Plan) -> list[Callback]:
    shown = {**plan.protocol.to_json(), "steps": plan.steps, "engine": "detectron2"}
    return [
        MetricsLog(plan.folder / "metrics.jsonl"),
        *choose_trackers(plan.trackers, plan.folder, plan.folder.name, shown),
        *choose_progress(plan.progress),
    ]


@contextlib.contextmanager
def _watched(watchers: Sequence[Callback], first: int, steps: int) -> Iterator[None]:
    standing: Any = SimpleNamespace(step=first, total_steps=steps)
    try:
        for watcher in watchers:
            watcher.on_start(standing)
        yield
        for watcher in watchers:
            watcher.on_end(standing)
    finally:
        for watcher in watchers:
            watcher.close()


def _distributed(model: Any, world: Collectives, precision: Precision) -> Any:
    if world.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[precision.device] if precision.device.type == "cuda" else None,
        broadcast_buffers=False,  # synchronised norms are alike anyway
        find_unused_parameters=True,
    )


@contextlib.contextmanager
def logged_to(folder: Path) -> Iterator[None]:
    """What detectron2 and its libraries say goes into a file of the folder, not between our lines."""
    handler = logging.FileHandler(folder / LOG, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("detectron2", "fvcore", "iopath")]
    before = [(one.level, one.propagate) for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.INFO)
        one.propagate = False
    try:
        yield
    finally:
        for one, (level, propagate) in zip(loggers, before, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)
            one.propagate = propagate
        handler.close()
