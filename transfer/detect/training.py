"""One training of a detector on the zoo's own engine: loop, checkpoints, exact resume, processes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zoo.engine.checkpoint import CheckpointFolder
from zoo.engine.checkpoint_writer import CheckpointWriter
from zoo.engine.collectives import Collectives
from zoo.engine.dashboards import choose_trackers
from zoo.engine.loop import Callback, Loop
from zoo.engine.precision import Precision, compute_threads
from zoo.engine.progress import choose_progress
from zoo.engine.signals import StopRequest
from zoo.engine.trackers import MetricsLog, cut_after
from zoo.errors import RunError
from zoo.keyed import keyed_seed

from .batches import DetectionBatch, Stream
from .detr.protocol import DetrProtocol
from .models.images import Images, pad_images
from .models.kinds import AnyDetector
from .optimizer import learning_rate, make_optimizer
from .precise import precise_batchnorm
from .protocols import AnyProtocol

__all__ = [
    "Ended",
    "Normalisation",
    "Plan",
    "last_loss",
    "make_images",
    "make_loop",
    "measure_norms",
    "train",
]

log = logging.getLogger("zoo")


@dataclass(frozen=True)
class Normalisation:
    """Mean and deviation of the channels, in 0..255."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """What a training needs to know besides the detector and its data."""

    protocol: AnyProtocol
    steps: int
    folder: Path
    colours: Normalisation
    workers: int = 0
    save_every: int = 1000
    trackers: tuple[str, ...] = ()
    progress: str = "auto"


@dataclass(frozen=True)
class Ended:
    """How a training ended: the last step, the mean loss of its last tenth, and 75 or 130 if it was stopped."""

    step: int
    loss: float
    exit_code: int
    diverged: bool = False


class _Learner(nn.Module):
    """The detector as the loop sees it; all that is drawn follows from batch and step: there is no state to keep."""

    def __init__(self, detector: AnyDetector, world: Collectives, seed: int) -> None:
        super().__init__()
        self.detector = detector
        self.world = world
        self.seed = seed
        self.diverged = False

    def forward(self, images: Images, batch: DetectionBatch, given: Any = None) -> Any:
        return self.step(images, batch, given)

    def step(
        self, images: Images, batch: DetectionBatch, given: Any = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        losses = self.detector.losses(images, batch.targets(images.pixels.device), self.world)
        total = torch.stack(list(losses.values())).sum()
        values = torch.stack([loss.detach() for loss in losses.values()]).tolist()
        return total, {**dict(zip(losses, values, strict=True)), **self.detector.figures}

    def note_divergence(self, loop: Loop, batch: DetectionBatch, loss: float) -> tuple[str, None]:
        """The loop's ``autopsy``: in every process at once the loss of all is not finite."""
        self.diverged = True
        return "", None

    def on_epoch_start(self, epoch: int, batches: Any) -> None: ...
    def before_step(self, step: int, epoch: int) -> None:
        torch.manual_seed(keyed_seed(self.seed, "detect dropout", step, self.world.rank))

    def before_update(self, step: int) -> None: ...
    def after_step(self, step: int) -> None: ...
    def local_state(self) -> dict[str, Any]:
        return {}

    def load_local_state(self, state: dict[str, Any]) -> None: ...
    def first_pass(self, parts: Sequence[Any]) -> list[Any]:
        return [None] * len(parts)

    def share_out(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        return {}


def last_loss(metrics: Path, steps: int) -> float:
    """The mean loss of the last tenth of the steps, also of those before a resume."""
    first = steps - max(1, steps // 10)
    lines = map(json.loads, metrics.read_text("utf-8").splitlines())
    losses = [line["loss"] for line in lines if line["step"] >= first]
    return sum(losses) / len(losses) if losses else math.nan


def train(
    detector: AnyDetector, stream: Stream, plan: Plan, precision: Precision, world: Collectives
) -> Ended:
    """Train a detector in ``plan.folder``, from its newest checkpoint if there is one; then measure BatchNorm.

    Args:
        detector: on the device, its norms synchronised already.
        stream: the training views.
        plan: schedule and places.
        precision: how it computes.
        world: the processes that train together.

    Raises:
        RunError: the disk failed, or memory ran out; or of several processes one met a number that isn't finite.
    """
    protocol, folder = plan.protocol, plan.folder
    watchers: list[Callback] = []
    if world.rank == 0:
        shown = {**protocol.to_json(), "steps": plan.steps}
        watchers += [
            MetricsLog(folder / "metrics.jsonl"),
            *choose_trackers(plan.trackers, folder, folder.name, shown),
            *choose_progress(plan.progress),
        ]

    loop = make_loop(detector, stream, plan, precision, world, watchers)
    learner: Any = loop.learner
    drawn_on = [precision.device] if precision.device.type == "cuda" else []
    with (
        StopRequest() as stop,
        compute_threads(precision.device, plan.workers),
        torch.random.fork_rng(drawn_on),  # each step seeds it
    ):
        _take_up(loop, folder, world)
        try:
            loop.run(stop)
        except (RunError, FloatingPointError) as error:
            # A loss or a parameter that isn't finite is met by all processes at once, a proposal perhaps by one.
            alone = isinstance(error, FloatingPointError)
            if not (alone or learner.diverged or not _is_finite(detector)):
                raise
            if alone and world.world_size > 1:  # the others may wait for this one: only its end frees them
                raise RunError(f"The training diverged at step {loop.step}.", fix="lower the lr") from error
            return Ended(loop.step, math.nan, 0, diverged=True)
        if loop.step < plan.steps:
            return Ended(loop.step, math.nan, stop.exit_code)
        if protocol.precise_batches:
            more = _batches(stream, plan, world, plan.steps, plan.steps + protocol.precise_batches)
            measure_norms(detector, more, loop.prepare, precision, world)
    loss = last_loss(folder / "metrics.jsonl", plan.steps) if world.rank == 0 else None
    return Ended(loop.step, float(world.gather_values(loss)[0]), 0)


def make_loop(
    detector: AnyDetector,
    stream: Stream,
    plan: Plan,
    precision: Precision,
    world: Collectives,
    watchers: Sequence[Callback] = (),
) -> Loop:
    """The loop of a training, at its first step; arguments as of ``train``."""
    protocol = plan.protocol
    learner = _Learner(detector, world, stream.seed)
    return Loop(
        learner=learner,
        optimizer=make_optimizer(detector, protocol),
        lr_at=learning_rate(
            protocol.lr, protocol.warmup_factor, protocol.warmup, protocol.drops, protocol.drop
        ),
        batches=lambda first: _batches(stream, plan, world, first, plan.steps),
        prepare=lambda batch: make_images(detector, batch.pictures, plan.colours, precision),
        precision=precision,
        steps_per_epoch=max(1, len(stream.images) // protocol.batch),
        total_steps=plan.steps,
        checkpoints=CheckpointWriter(CheckpointFolder(plan.folder / "checkpoints"), world),
        save_every=plan.save_every,
        callbacks=watchers,
        world=world,
        compute=_averaged(learner, world, precision),
        clip=protocol.clip if isinstance(protocol, DetrProtocol) else 0.0,
        autopsy=learner.note_divergence,
    )


def _batches(
    stream: Stream, plan: Plan, world: Collectives, first: int, last: int
) -> Iterator[DetectionBatch]:
    return stream.batches(first, last, plan.protocol.batch, plan.workers, world.rank, world.world_size)


def measure_norms(
    detector: AnyDetector, batches: Any, prepare: Any, precision: Precision, world: Collectives
) -> None:
    """Precise statistics of BatchNorm over more batches of the stream."""

    def forward(batch: DetectionBatch) -> None:
        images = prepare(batch)
        with precision.autocast():
            detector.losses(images, batch.targets(images.pixels.device), world)

    precise_batchnorm(detector.train(), batches, forward, world)


def make_images(
    detector: AnyDetector,
    views: Sequence[torch.Tensor],
    colours: Normalisation,
    precision: Precision,
) -> Images:
    """Normalise and pad views on the device."""
    mean, std = (
        torch.tensor(values, device=precision.device, dtype=precision.master_dtype)
        for values in (colours.mean, colours.std)
    )
    images = pad_images(views, mean, std, detector.divisor)
    return Images(images.pixels.contiguous(memory_format=precision.memory_format), images.sizes)


def _averaged(learner: _Learner, world: Collectives, precision: Precision) -> Any:
    if world.world_size == 1:
        return learner.step
    return DistributedDataParallel(
        learner,
        device_ids=[precision.device] if precision.device.type == "cuda" else None,
        broadcast_buffers=False,  # synchronised norms are alike anyway
        find_unused_parameters=True,  # a process may have no object to take a mask from
    )


def _take_up(loop: Loop, folder: Path, world: Collectives) -> None:
    checkpoint, problems = loop.checkpoints.folder.newest_for(world)
    for problem in problems:
        log.warning("a checkpoint is skipped: %s", problem)
    if checkpoint is None:
        if world.rank == 0:
            (folder / "metrics.jsonl").unlink(missing_ok=True)
        return
    if checkpoint.world_size == world.world_size:
        loop.restore(checkpoint)
    else:
        loop.restore(checkpoint, loop.checkpoints.folder.load_locals(checkpoint.step))
    log.info("going on from step %d of %d", loop.step, loop.total_steps)
    if world.rank == 0:
        cut_after(folder / "metrics.jsonl", loop.step)


def _is_finite(detector: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in detector.parameters())
