"""What a recipe's ``method`` section has in common for all methods. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

__all__ = ["MethodConfig", "RunShape", "Strict", "machine_memory"]


class Strict(BaseModel):
    """Unknown keys and infinite values are refused; values are frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class RunShape:
    """The sizes of a run that a method's settings are held against.

    Args:
        views: of an image.
        batch_size: images, over all processes.
        world_size: processes.
        steps_per_epoch: whole batches.
        epochs: of the run; the last one may be broken off.
        samples: images of the data.
        classes: names of the images' labels, in order; none where they carry none.
        data: what the user called it.
        accumulate: parts that a process trains its share of a batch in.
        sync_batchnorm: whether the processes share BatchNorm's statistics.
        views_apart: whether each view goes through the trunk on its own.
        sizes: pixels of the views' sides, for each run of views of one size; none where they aren't known.
        steps: of the whole run, where these are not all of the epochs'.
        memory: bytes that a process has for its tensors; None: this machine's.
        place: whose memory that is.
    """

    views: int
    batch_size: int
    world_size: int
    steps_per_epoch: int
    epochs: int
    samples: int = 0
    classes: tuple[str, ...] = ()
    data: str = ""
    accumulate: int = 1
    sync_batchnorm: bool = False
    views_apart: bool = False
    sizes: tuple[int, ...] = ()
    steps: int | None = None
    memory: int | None = None
    place: str = "this machine"

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs if self.steps is None else self.steps


class MethodConfig(Strict):
    """Base of all method configs."""

    name: str

    def check(self, shape: RunShape) -> Iterator[str]:
        """Warnings about settings that don't fit the run.

        Raises:
            InputError: a setting that can't work.
        """
        return iter(())


def machine_memory() -> int:
    """Bytes of this machine's memory; 0 where it can't be known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
