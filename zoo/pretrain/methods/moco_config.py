"""MoCo's settings. Defaults are those of ``main_moco.py``, which are version 1's (facts: golden, papers)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from ...errors import InputError
from .config_base import MethodConfig, RunShape, machine_memory

__all__ = ["MoCoConfig"]

_GIGA = 2**30
_BYTES = 4  # of a float32


class MoCoConfig(MethodConfig):
    """See ``zoo.pretrain.methods.moco.MoCo``; sections and equations are the MoCo paper's.

    Version 2 is ``hidden: 2048`` and ``temperature: 0.2``, with stronger distortions and a cosine schedule.
    """

    name: Literal["moco"] = "moco"
    dictionary: Literal["queue", "batch", "memory_bank"] = Field(
        default="queue", description="what keys a query is compared with (figure 2)"
    )
    negatives: PositiveInt = Field(
        default=65536, description="K: the queue's length, or keys drawn from the memory bank for a step"
    )
    hidden: int = Field(
        default=0, ge=0, description="hidden width of the projection head; 0: one linear layer, as in v1"
    )
    head_norm: bool = Field(
        default=False, description="BatchNorm in the projection head: short runs start faster with it"
    )
    dim: PositiveInt = Field(default=128, description="D, the length of an embedding")
    temperature: PositiveFloat = Field(default=0.07, description="T of the softmax over keys (eq. 1)")
    momentum: float = Field(default=0.999, ge=0, le=1, description="m of the momentum encoder (eq. 2)")
    bank_momentum: float = Field(
        default=0.5, ge=0, lt=1, description="share of its old vector that an image keeps in the memory bank"
    )
    key_views: tuple[int, ...] = Field(
        default=(1,),
        min_length=1,
        description="views that keys come from; each is compared with all other views; a memory bank has none",
    )
    shuffle_groups: PositiveInt = Field(
        default=1,
        description="groups, over all processes, that BatchNorm sees a batch in, keys shuffled; 1: no shuffling",
    )

    @field_validator("key_views")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value) or min(value) < 0:
            raise ValueError("views are named once each, counted from 0")
        return value

    def check(self, shape: RunShape) -> Iterator[str]:
        if self.dictionary != "memory_bank":
            self._check_views(shape)
            yield from self._check_shuffling(shape)
        self._check_memory(shape)
        keys = len(self.key_views) * shape.batch_size
        if self.dictionary == "queue" and self.negatives < keys:
            yield (
                f"the queue (method.negatives {self.negatives}) is shorter than the {keys} keys of a batch: "
                "the first of them are never compared with anything"
            )

    def _check_views(self, shape: RunShape) -> None:
        beyond = [view for view in self.key_views if view >= shape.views]
        if beyond:
            raise InputError(
                f"Keys are to come from view {beyond[0]}, but an image has only {shape.views} view(s).",
                where="method.key_views",
                fix="set views.count to two views or more"
                if shape.views < 2
                else f"name views from 0 to {shape.views - 1}",
            )
        if shape.views < 2:
            raise InputError(
                "MoCo needs at least two views of an image: one for the query, one for the key.",
                where="views.count",
                fix="set it to 2",
            )

    def _check_shuffling(self, shape: RunShape) -> Iterator[str]:
        groups, shares = self.shuffle_groups, shape.world_size * shape.accumulate
        if groups == 1:
            yield (
                "keys are not shuffled (method.shuffle_groups 1): where the network has BatchNorm it can tell a "
                "query's own key by the statistics that the two share; the reference has 8 groups of 32 images"
            )
            return
        if shape.batch_size % groups or shape.batch_size // groups < 2:
            raise InputError(
                f"A batch of {shape.batch_size} images can't be divided into {groups} equal groups of two or "
                "more.",
                where="method.shuffle_groups",
                fix=f"choose a number that divides {shape.batch_size}, or a batch_size that is a multiple of "
                f"{groups}",
            )
        if groups % shares:
            raise InputError(
                f"{groups} BatchNorm groups can't be shared equally by {shape.world_size} process(es) x "
                f"{shape.accumulate} part(s) of a batch.",
                where="method.shuffle_groups",
                fix=f"use a multiple of {shares}; or 1, which shuffles nothing",
            )
        if groups == shape.accumulate:
            raise InputError(
                f"With engine.accumulate {shape.accumulate} each part of a batch is one of the {groups} groups, "
                "and keys are shuffled within a part: nothing would be shuffled.",
                where="method.shuffle_groups",
                fix=f"use {2 * groups}, or a larger multiple of {groups}",
            )
        if shape.sync_batchnorm and shape.world_size > 1:
            yield (
                "engine.sync_batchnorm undoes method.shuffle_groups: BatchNorm sees groups of all processes at "
                "once; set engine.sync_batchnorm to false"
            )

    def _check_memory(self, shape: RunShape) -> None:
        """Refuse a dictionary that the machine can't hold, before anything is allocated."""
        rows = {"queue": self.negatives, "memory_bank": shape.samples, "batch": 0}[self.dictionary]
        needed, there = rows * self.dim * _BYTES, shape.memory or machine_memory()
        if needed > there > 0:
            raise InputError(
                f"{rows} keys of {self.dim} numbers take {needed} bytes ({needed / _GIGA:.1f} GB) in each "
                f"process; {shape.place} has {there / _GIGA:.1f} GB of memory.",
                where="method.dictionary" if self.dictionary == "memory_bank" else "method.negatives",
                fix="use dictionary: queue, or a smaller method.dim"
                if self.dictionary == "memory_bank"
                else "use a shorter queue",
            )
