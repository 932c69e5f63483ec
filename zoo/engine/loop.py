"""The training loop. It knows no method, no trunk and no recipe: batches in, updates out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..errors import RunError
from .checkpoint import Checkpoint, CheckpointFolder
from .precision import Precision
from .signals import StopRequest

__all__ = ["Callback", "Learner", "Loop", "StepRecord"]


class Learner(Protocol):
    """What is trained: a module with hooks (``zoo.pretrain.methods.base.Method`` is one)."""

    def on_epoch_start(self, epoch: int) -> None: ...
    def before_step(self, step: int, epoch: int) -> None: ...
    def step(self, views: Any, batch: Any) -> tuple[torch.Tensor, dict[str, float]]: ...
    def before_update(self, step: int) -> None: ...
    def after_step(self, step: int) -> None: ...
    def train(self, mode: bool = True) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...
    def local_state(self) -> dict[str, Any]: ...
    def load_local_state(self, state: dict[str, Any]) -> None: ...


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

    def on_step(self, record: StepRecord) -> None:
        """A step was done and its update applied."""

    def on_epoch_end(self, epoch: int, loop: Loop) -> None:
        """All steps of an epoch were done."""

    def on_checkpoint(self, step: int) -> None:
        """A checkpoint is safely on disk."""

    def on_end(self, loop: Loop) -> None:
        """After the last step, or after a stop that was asked for."""

    def close(self) -> None:
        """Let go of files and the terminal; called last, also after an error."""


@dataclass
class Loop:
    """Trains a learner from a step to the last one.

    Args:
        learner: what is trained.
        optimizer: over the learner's parameters.
        lr_at: learning rate of each step.
        batches: (first step) -> batches from there on.
        prepare: moves a batch's images to the device and normalises them.
        precision: how forward passes compute.
        steps_per_epoch: steps of one epoch.
        total_steps: steps of the whole run.
        checkpoints: where state is saved.
        save_every: save after every so many steps (None: only at the end and when stopped).
        callbacks: watchers, called in order.
    """

    learner: Learner
    optimizer: torch.optim.Optimizer
    lr_at: Callable[[int], float]
    batches: Callable[[int], Iterator[Any]]
    prepare: Callable[[Any], Any]
    precision: Precision
    steps_per_epoch: int
    total_steps: int
    checkpoints: CheckpointFolder
    save_every: int | None = None
    callbacks: Sequence[Callback] = ()
    step: int = 0
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        self._scaler = self.precision.scaler()

    def run(self, stop: StopRequest) -> None:
        """Train until the last step or until ``stop`` is asked for; the state is saved either way.

        Raises:
            RunError: the loss is not finite (the weights are as before that step), or the disk failed.
        """
        self.learner.train()
        batches: Iterator[Any] = iter(())
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            if self.step < self.total_steps:
                batches = self.batches(self.step)
                self._train(batches, stop)
            self.save()  # before the data workers are waited for: after a signal every second counts
            for callback in self.callbacks:
                callback.on_end(self)
        finally:
            del batches
            for callback in self.callbacks:
                callback.close()

    def _train(self, batches: Iterator[Any], stop: StopRequest) -> None:
        began = time.perf_counter()
        for batch in batches:
            arrived = time.perf_counter()
            for callback in self.callbacks:
                callback.on_batch(batch)
            epoch, position = divmod(self.step, self.steps_per_epoch)
            if position == 0:
                self.learner.on_epoch_start(epoch)
            loss, lr, logs = self._one_step(batch, epoch)
            done = time.perf_counter()
            self.elapsed += done - began
            record = StepRecord(
                step=self.step,
                epoch=epoch,
                loss=loss,
                lr=lr,
                images=len(batch.ids),
                step_time=done - began,
                data_wait=arrived - began,
                time=self.elapsed,
                logs=logs,
            )
            self.step += 1
            for callback in self.callbacks:
                callback.on_step(record)
            if self.step % self.steps_per_epoch == 0:
                for callback in self.callbacks:
                    callback.on_epoch_end(epoch, self)
                self.learner.train()
            if stop.signal is not None:
                return
            if self.save_every and self.step % self.save_every == 0 and self.step < self.total_steps:
                self.save()
            began = time.perf_counter()

    def _one_step(self, batch: Any, epoch: int) -> tuple[float, float, dict[str, float]]:
        lr = self.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.learner.before_step(self.step, epoch)
        with self.precision.autocast():
            loss, logs = self.learner.step(self.prepare(batch), batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RunError(
                f"The loss became {value} at step {self.step} (epoch {epoch}); "
                "the weights were not touched by this step.",
                fix="start a new run, if you like from these weights (--init-from), with a lower optimizer.lr, "
                "a longer schedule.warmup_epochs or a higher method.epsilon",
            )
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.learner.before_update(self.step)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.learner.after_step(self.step)
        return value, lr, logs

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on.

        Raises:
            RunError: a parameter is not finite (earlier checkpoints stay), or the disk failed.
        """
        parameters = [p.detach() for group in self.optimizer.param_groups for p in group["params"]]
        if not all(math.isfinite(norm) for norm in torch._foreach_norm(parameters)):
            raise RunError(
                f"A parameter is not finite after step {self.step - 1}; this state is not saved.",
                where=self.checkpoints.folder,
                fix="resume from the checkpoint before it, or start a new run with a lower optimizer.lr",
            )
        shared = {
            "step": self.step,
            "elapsed": self.elapsed,
            "learner": dict(self.learner.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }
        local = {"learner": self.learner.local_state(), "torch_rng": _rng_state(self.precision.device)}
        self.checkpoints.save(self.step, shared, local)
        for callback in self.callbacks:
            callback.on_checkpoint(self.step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up everything that ``save`` wrote."""
        shared, local = checkpoint.shared, checkpoint.local
        self.step = shared["step"]
        self.elapsed = shared["elapsed"]
        self.learner.load_state_dict(shared["learner"])
        self.optimizer.load_state_dict(shared["optimizer"])
        if shared["scaler"] and self._scaler.is_enabled():
            self._scaler.load_state_dict(shared["scaler"])
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
