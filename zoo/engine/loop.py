"""The training loop. It knows no method, no trunk and no recipe: batches in, updates out."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.utils import get_total_norm

from ..errors import RunError
from .average import WeightAverage
from .checkpoint import Checkpoint
from .checkpoint_writer import CheckpointWriter
from .collectives import Collectives, WorldOfOne
from .memory import explained_memory
from .precision import Precision
from .sections import SectionTimer, clock_of
from .signals import StopRequest

__all__ = ["Callback", "Learner", "Loop", "StepRecord"]


class Learner(Protocol):
    """What is trained: a module with hooks (``zoo.pretrain.methods.base.Method`` is one)."""

    def on_epoch_start(self, epoch: int, batches: Callable[[], Iterator[tuple[Any, Any]]]) -> None: ...
    def before_step(self, step: int, epoch: int) -> None: ...
    def first_pass(self, parts: Sequence[tuple[Any, Any]]) -> list[Any]: ...
    def step(self, views: Any, batch: Any, given: Any = None) -> tuple[torch.Tensor, dict[str, float]]: ...
    def before_update(self, step: int) -> None: ...
    def after_step(self, step: int) -> None: ...
    def train(self, mode: bool = True) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...
    def local_state(self) -> dict[str, Any]: ...
    def load_local_state(self, state: dict[str, Any]) -> None: ...
    def share_out(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class StepRecord:
    """One finished step; times in seconds, ``time`` counted over the run without its pauses."""

    step: int
    epoch: int
    loss: float
    lr: float
    images: int
    step_time: float
    data_wait: float
    time: float
    logs: dict[str, float] = field(default_factory=dict)

    @property
    def images_per_second(self) -> float:
        return self.images / self.step_time if self.step_time > 0 else math.inf


class Callback:
    """Watches a run; override what you need. An exception in a callback stops the run."""

    def on_start(self, loop: Loop) -> None:
        """Before the first step (also after a resume)."""

    def on_batch(self, batch: Any) -> None:
        """A batch arrived from the workers."""

    def on_gradients(self, loop: Loop) -> None:
        """All gradients of a step are there, and the loss is finite; the update comes next."""

    def figures(self, record: StepRecord, loop: Loop) -> Mapping[str, float]:
        """A step was done and its update applied: figures that go into its record, for all watchers."""
        return {}

    def on_step(self, record: StepRecord) -> None:
        """A step was done and its record is complete."""

    def on_epoch_end(self, epoch: int, loop: Loop) -> None:
        """All steps of an epoch were done."""

    def on_checkpoint(self, step: int) -> None:
        """A checkpoint is safely on disk."""

    def on_end(self, loop: Loop) -> None:
        """After the last step, or after a stop that was asked for."""

    def close(self) -> None:
        """Let go of files and the terminal; called last, also after an error."""


class _PassStopped(Exception):
    """A stop was asked for while a learner looked at an epoch's batches."""


@dataclass
class Loop:
    """Trains a learner from a step to the last one.

    Args:
        learner: what is trained.
        optimizer: over the learner's parameters.
        lr_at: learning rate of each step; a parameter group's ``lr_scale`` multiplies it.
        batches: (first step) -> this process's batches from there on; called again where the learner looks at an
            epoch's batches before it begins.
        prepare: moves a batch's images to the device and normalises them.
        precision: how forward passes compute.
        steps_per_epoch: steps of one epoch.
        total_steps: steps of the whole run.
        checkpoints: where state is saved.
        save_every: save after every so many steps (None: only at the end and when stopped).
        callbacks: watchers, called in order; rank 0 has the ones that write.
        world: the processes that train together.
        compute: ``learner.step``, or what wraps it so that gradients are averaged over processes.
        accumulate: parts that a batch is trained in, one after the other.
        clip: the gradient of all parameters is shortened to at most this length; 0: it stays as it is.
        average: a running average of the learner's weights, kept beside it.
        autopsy: (loop, batch, loss) -> a sentence on where a loss that is not finite came from, and the file
            where more is written; called in all processes at once, with each one's own batch and loss.
    """

    learner: Learner
    optimizer: torch.optim.Optimizer
    lr_at: Callable[[int], float]
    batches: Callable[[int], Iterator[Any]]
    prepare: Callable[[Any], Any]
    precision: Precision
    steps_per_epoch: int
    total_steps: int
    checkpoints: CheckpointWriter
    save_every: int | None = None
    callbacks: Sequence[Callback] = ()
    world: Collectives = field(default_factory=WorldOfOne)
    compute: Any = None
    accumulate: int = 1
    clip: float = 0.0
    average: WeightAverage | None = None
    autopsy: Callable[[Loop, Any, float], tuple[str, Any]] | None = None
    step: int = 0
    elapsed: float = 0.0
    halted: bool = False
    """A watcher sets it to have the run stop after this step, its state saved."""
    sections: SectionTimer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._scaler = self.precision.scaler()
        self.sections = SectionTimer(clock_of(self.precision.device))
        if self.compute is None:
            self.compute = self.learner.step

    def run(self, stop: StopRequest) -> None:
        """Train until the last step or until ``stop`` is asked for; the state is saved either way.

        Raises:
            RunError: the loss is not finite (the weights are as before that step), memory ran out, or the
                disk failed.
        """
        self.learner.train()
        batches: Iterator[Any] = iter(())
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            if self.step < self.total_steps:
                batches = self.batches(self.step)
                with self.sections.active():
                    self._train(batches, stop)
            self.save(wait=True)  # before the data workers are waited for: after a signal every second counts
            for callback in self.callbacks:
                callback.on_end(self)
        finally:
            del batches
            self.checkpoints.close()
            for callback in self.callbacks:
                callback.close()

    def _train(self, batches: Iterator[Any], stop: StopRequest) -> None:
        while self.step < self.total_steps:
            epoch, position = divmod(self.step, self.steps_per_epoch)
            if position == 0 and not self._start_epoch(epoch, stop):
                return
            began = time.perf_counter()
            self.sections.begin()
            batch = next(batches, None)
            if batch is None:
                return
            arrived = time.perf_counter()
            self.sections.mark("other")
            for callback in self.callbacks:
                callback.on_batch(batch)
            with explained_memory(batch, self.precision.device):
                loss, lr, logs = self._one_step(batch, epoch)
            done = time.perf_counter()
            self.sections.end()
            self.elapsed += done - began
            record = StepRecord(
                step=self.step,
                epoch=epoch,
                loss=loss,
                lr=lr,
                images=len(batch.ids) * self.world.world_size,
                step_time=done - began,
                data_wait=arrived - began,
                time=self.elapsed,
                logs=dict(logs),
            )
            for callback in self.callbacks:
                record.logs.update(callback.figures(record, self))
            self.step += 1
            for callback in self.callbacks:
                callback.on_step(record)
            if self.step % self.steps_per_epoch == 0:
                for callback in self.callbacks:
                    callback.on_epoch_end(epoch, self)
                self.learner.train()
            self._tell_of_checkpoints()
            if self.world.any(stop.signal is not None or self.halted):
                return
            if self.save_every and self.step % self.save_every == 0 and self.step < self.total_steps:
                self.save()

    def _start_epoch(self, epoch: int, stop: StopRequest) -> bool:
        """The learner's hook, which may look at the epoch's batches first; false if that was stopped.

        It comes before the first batch is asked for: the data workers of two passes are never there at once
        before the first step.
        """
        began = time.perf_counter()
        try:
            with self.precision.autocast(), torch.no_grad():
                self.learner.on_epoch_start(epoch, lambda: self._pass(stop))
        except _PassStopped:
            return False
        self.elapsed += time.perf_counter() - began
        return True

    def _pass(self, stop: StopRequest) -> Iterator[tuple[Any, Any]]:
        """The batches of the epoch that begins, in the parts that they are trained in."""
        for batch in itertools.islice(self.batches(self.step), self.steps_per_epoch):
            if self.world.any(stop.signal is not None):
                raise _PassStopped
            for part in [batch] if self.accumulate == 1 else batch.split(self.accumulate):
                yield self.prepare(part), part

    def _one_step(self, batch: Any, epoch: int) -> tuple[float, float, dict[str, float]]:
        lr = self.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.learner.before_step(self.step, epoch)
        loss, logs = self._gradients(batch)
        own = loss.clone()
        value = float(self.world.sum_(loss)) / self.world.world_size
        if not math.isfinite(value):
            said, file = self.autopsy(self, batch, float(own)) if self.autopsy is not None else ("", None)
            raise RunError(
                f"The loss became {value} at step {self.step} (epoch {epoch}); "
                f"the weights were not touched by this step. {said}".rstrip(),
                where=file,
                fix="start a new run, if you like from these weights (--init-from), with a lower optimizer.lr, "
                "a longer schedule.warmup_epochs or, where the method has one, a higher temperature or epsilon",
            )
        self.learner.before_update(self.step)
        for callback in self.callbacks:
            callback.on_gradients(self)
        self.sections.mark("optimizer")
        if self.clip:
            self._shorten_gradients()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.sections.mark("other")
        if self.average is not None:
            self.average.update()
        self.learner.after_step(self.step)
        return value, lr, logs

    def _gradients(self, batch: Any) -> tuple[torch.Tensor, dict[str, float]]:
        """Forward and backward of all parts of a batch; the mean loss, without gradient."""
        sections, count = self.sections, self.accumulate
        parts = [batch] if count == 1 else batch.split(count)
        given: list[Any] = [None]
        if count > 1:
            sections.mark("forward")
            with self.precision.autocast(), torch.no_grad():
                given = self.learner.first_pass([(lambda p=part: self.prepare(p), part) for part in parts])
        total: Any = 0.0
        logs: dict[str, float] = {}
        for number, part in enumerate(parts):
            last = number == count - 1
            # Gradients are averaged over the processes once a step.
            alone = (
                contextlib.nullcontext()
                if last
                else getattr(self.compute, "no_sync", contextlib.nullcontext)()
            )
            with alone:
                with self.precision.autocast():
                    sections.mark("prepare")
                    views = self.prepare(part)
                    sections.mark("forward")  # the method marks where its loss begins
                    loss, logs = self.compute(views, part, given[number])
                total = total + loss.detach() / count
                sections.mark("backward")
                self._scaler.scale(loss / count).backward()
                sections.mark("other")
        return total.clone(), logs

    def gradient_norm(self) -> float:
        """The length of the gradient of all parameters; for ``Callback.on_gradients``."""
        norm = float(get_total_norm(self._all_gradients()))
        return norm / self._scaler.get_scale() if self._scaler.is_enabled() else norm

    def _all_gradients(self) -> list[torch.Tensor]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p.grad for p in parameters if p.grad is not None]

    def _shorten_gradients(self) -> None:
        share = self.clip / (self.gradient_norm() + 1e-6)
        if not share >= 1:  # also where the norm is no number: what is scaled too far must stay visible
            torch._foreach_mul_(self._all_gradients(), share)

    def save(self, wait: bool = False) -> None:
        """Begin to write a checkpoint of everything that the next step depends on.

        Args:
            wait: come back when it is safely on disk.

        Raises:
            RunError: a parameter is not finite (earlier checkpoints stay), or the disk failed.
        """
        parameters = [p.detach() for group in self.optimizer.param_groups for p in group["params"]]
        if not all(math.isfinite(norm) for norm in torch._foreach_norm(parameters)):
            raise RunError(
                f"A parameter is not finite after step {self.step - 1}; this state is not saved.",
                where=self.checkpoints.folder.folder,
                fix="resume from the checkpoint before it, or start a new run with a lower optimizer.lr",
            )
        shared = {
            "step": self.step,
            "elapsed": self.elapsed,
            "learner": dict(self.learner.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }
        if self.average is not None:
            shared["average"] = self.average.state_dict()
        local = {"learner": self.learner.local_state(), "torch_rng": _rng_state(self.precision.device)}
        self.checkpoints.begin(self.step, shared, local)
        if wait:
            self.checkpoints.wait()
            self._tell_of_checkpoints()

    def _tell_of_checkpoints(self) -> None:
        for step in self.checkpoints.finished():
            for callback in self.callbacks:
                callback.on_checkpoint(step)

    def restore(self, checkpoint: Checkpoint, locals_of_all: list[dict[str, Any]] | None = None) -> None:
        """Take up everything that ``save`` wrote.

        Args:
            checkpoint: as read by this process.
            locals_of_all: every saved process's own state, where another number of processes goes on.
        """
        shared, local = checkpoint.shared, checkpoint.local
        self.step = shared["step"]
        self.elapsed = shared["elapsed"]
        self.learner.load_state_dict(shared["learner"])
        self.optimizer.load_state_dict(shared["optimizer"])
        # Fused optimizers go through memory as it lies: a moment must lie as its parameter does.
        for parameter, moments in self.optimizer.state.items():
            for name, value in moments.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if shared["scaler"] and self._scaler.is_enabled():
            self._scaler.load_state_dict(shared["scaler"])
        if self.average is not None and "average" in shared:
            self.average.load_state_dict(shared["average"])
        if locals_of_all is not None:
            world = self.world
            states = [state["learner"] for state in locals_of_all]
            self.learner.load_local_state(self.learner.share_out(states, world.rank, world.world_size))
        elif local is not None:
            self.learner.load_local_state(local["learner"])
            _set_rng_state(self.precision.device, local["torch_rng"])


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_rng_state(device: torch.device, state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
