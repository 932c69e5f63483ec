"""DeepCluster-v2's settings, and what SeLa-v2's have in common with them. Defaults: the released scripts'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from ...errors import InputError
from .config_base import MethodConfig, RunShape, machine_memory

__all__ = ["BankConfig", "DeepClusterV2Config"]

_GIGA = 2**30
_BYTES = 4  # of a float32


class BankConfig(MethodConfig):
    """What methods with a memory bank of the last epoch's embeddings have in common."""

    prototypes: tuple[int, ...] = Field(
        default=(3000, 3000, 3000), description="K of each head; a number is a single head"
    )
    hidden: int = Field(
        default=2048, ge=0, description="hidden width of the projection head; 0: one linear layer"
    )
    dim: PositiveInt = Field(default=128, description="D, the length of an embedding")
    temperature: PositiveFloat = Field(default=0.1, description="T of the softmax over prototypes")
    crops_for_assign: tuple[int, ...] = Field(
        default=(0, 1), min_length=1, description="views that are remembered; head h uses the h-th, in turn"
    )

    @field_validator("prototypes", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        heads = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not heads or any(type(count) is not int or count < 1 for count in heads):
            raise ValueError("a number above 0, or for several heads a list of such numbers")
        return heads

    @field_validator("crops_for_assign")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value) or min(value) < 0:
            raise ValueError("views are named once each, counted from 0")
        return value

    @property
    def needs_less(self) -> str:
        """What makes a process remember less."""
        return "more processes on more machines"

    def bank_bytes(self, shape: RunShape) -> int:
        """Bytes that a process remembers embeddings in, as float32."""
        rows = shape.steps_per_epoch * shape.batch_size // shape.world_size
        return len(self.crops_for_assign) * rows * self.dim * _BYTES

    def check_room(self, shape: RunShape, there: int, place: str) -> None:
        """Refuse a memory bank that needs more than ``there`` bytes.

        Raises:
            InputError: says how many.
        """
        needed = self.bank_bytes(shape)
        if needed > there:
            raise InputError(
                f"The memory bank of {shape.samples} images takes {needed} bytes ({needed / _GIGA:.1f} GB) in "
                f"each of {shape.world_size} process(es); {place} has {there / _GIGA:.1f} GB.",
                where="method.dim",
                fix=f"use {self.needs_less}, a smaller method.dim, one view in method.crops_for_assign, or swav, "
                "which remembers no image",
            )

    def check(self, shape: RunShape) -> Iterator[str]:
        beyond = [view for view in self.crops_for_assign if view >= shape.views]
        if beyond:
            raise InputError(
                f"View {beyond[0]} is to be remembered, but an image has only {shape.views} view(s).",
                where="method.crops_for_assign",
                fix=f"name views from 0 to {shape.views - 1}",
            )
        if shape.total_steps < shape.steps_per_epoch:
            raise InputError(
                f"The run ends after {shape.total_steps} steps, before the {shape.steps_per_epoch} of one pass over "
                "the images: this method works by several.",
                where="samples",
                fix="ask for two epochs or more, or train swav, which needs no second pass",
            )
        images, clusters = shape.steps_per_epoch * shape.batch_size, max(self.prototypes)
        if images < clusters:
            raise InputError(
                f"{images} images an epoch can't fill {clusters} clusters.",
                where="method.prototypes",
                fix=f"use {images} clusters at most, better a tenth of that, or pass more images",
            )
        there = shape.memory or machine_memory()
        if there:
            self.check_room(shape, there, shape.place)
        unused = len(self.crops_for_assign) - len(self.prototypes)
        if unused > 0:
            yield (
                f"method.crops_for_assign names {len(self.crops_for_assign)} views for {len(self.prototypes)} "
                f"head(s) in method.prototypes: the last {unused} are remembered for nothing"
            )
        if shape.epochs == 1:
            yield (
                "in a single epoch all assignments come from the untrained network: this method works by "
                "several passes over the data (epochs)"
            )


class DeepClusterV2Config(BankConfig):
    """See ``zoo.pretrain.methods.deepcluster_v2.DeepClusterV2``."""

    name: Literal["deepcluster_v2"] = "deepcluster_v2"
    kmeans_iterations: PositiveInt = Field(default=10, description="moves of the centroids, each epoch")
