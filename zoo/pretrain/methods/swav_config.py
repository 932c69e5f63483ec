"""SwAV's settings. Defaults are the released 2x224+6x96, batch 4096 script's (facts: protocols, golden)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from ...errors import InputError
from .config_base import MethodConfig, RunShape

__all__ = ["SwAVConfig"]


class SwAVConfig(MethodConfig):
    """See ``zoo.pretrain.methods.swav.SwAV``; sections, equations and tables are the paper's."""

    name: Literal["swav"] = "swav"
    prototypes: int | tuple[int, ...] = Field(
        default=3000, description="K, the number of prototypes; a list: several sets, the loss is their mean"
    )
    hidden: int = Field(
        default=2048, ge=0, description="hidden width of the projection head; 0: one linear layer"
    )
    head_norm: bool = Field(default=True, description="BatchNorm in the projection head")
    dim: PositiveInt = Field(default=128, description="D, the length of an embedding")
    temperature: PositiveFloat = Field(default=0.1, description="T of the softmax over prototypes (eq. 2)")
    epsilon: PositiveFloat = Field(default=0.05, description="weight of the codes' entropy (eq. 3)")
    sinkhorn_iterations: PositiveInt = Field(default=3, description="Sinkhorn iterations")
    codes: Literal["soft", "hard"] = Field(
        default="soft", description="hard: rounded, the paper's inferior variant"
    )
    crops_for_assign: tuple[int, ...] = Field(
        default=(0, 1), min_length=1, description="views that codes come from"
    )
    learn_prototypes: bool = Field(default=True, description="false: random prototypes stay as they are")
    freeze_prototypes_steps: int = Field(default=313, ge=0, description="steps before the prototypes move")
    queue_length: int = Field(default=0, ge=0, description="embeddings kept for Sinkhorn, over all processes")
    queue_start_epoch: int = Field(default=15, ge=0, description="first epoch (counted from 0) with a queue")
    momentum_encoder: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="codes and queue from a running average of the network, which keeps this share a step",
    )

    @field_validator("prototypes", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        several = value if isinstance(value, list | tuple) else [value]
        if not several or any(type(count) is not int or count < 1 for count in several):
            raise ValueError("a number above 0, or for several sets of prototypes a list of such numbers")
        return value

    @field_validator("crops_for_assign")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value) or min(value) < 0:
            raise ValueError("views are named once each, counted from 0")
        return value

    @property
    def counts(self) -> tuple[int, ...]:
        """Prototypes of each set."""
        return (self.prototypes,) if isinstance(self.prototypes, int) else self.prototypes

    def rounded_queue(self, shape: RunShape) -> int:
        """The queue's length over all processes: a multiple of the global batch (reference: rounds down)."""
        return self.queue_length - self.queue_length % shape.batch_size

    def check(self, shape: RunShape) -> Iterator[str]:
        beyond = [view for view in self.crops_for_assign if view >= shape.views]
        if beyond:
            raise InputError(
                f"Codes are to come from view {beyond[0]}, but an image has only {shape.views} views.",
                where="method.crops_for_assign",
                fix=f"name views from 0 to {shape.views - 1}",
            )
        if shape.views < 2:
            raise InputError("SwAV needs at least two views of an image.", where="views.count")
        queue = self.rounded_queue(shape)
        if queue != self.queue_length:
            yield (
                f"method.queue_length {self.queue_length} is not a multiple of the global batch "
                f"{shape.batch_size}: rounded down to {queue}" + ("" if queue else ", that is, no queue")
            )
        if min(self.counts) == 1:
            yield "method.prototypes 1: every image has the same code, the loss is 0 and nothing is learned"
        if max(self.counts) > shape.batch_size + queue:
            yield (
                f"more prototypes ({max(self.counts)}) than samples per assignment (batch {shape.batch_size} + "
                f"queue {queue} = {shape.batch_size + queue}): some prototypes can get no sample; use fewer "
                "prototypes, a larger batch or a queue"
            )
        if self.learn_prototypes and self.freeze_prototypes_steps >= shape.total_steps:
            yield (
                f"method.freeze_prototypes_steps {self.freeze_prototypes_steps} is not below the run's "
                f"{shape.total_steps} steps: the prototypes will never move (steps, not epochs: an epoch "
                f"has {shape.steps_per_epoch}); 0 trains them from the start"
            )
        if queue and self.queue_start_epoch >= shape.epochs:
            yield (
                f"method.queue_start_epoch {self.queue_start_epoch} is not below the run's {shape.epochs} "
                "epochs: the queue will never be used"
            )
