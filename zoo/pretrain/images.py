"""A run's images: from the recipe's sources to normalised views on the device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.class_index import read_class_index
from ..data.decode import ArrayPicture, Picture
from ..data.loader import Batch, view_batches
from ..data.open import open_sources
from ..data.shards.order import order_of
from ..data.source import ImageSource
from ..data.views.apply import normalize
from ..data.views.device import recolor_batch
from ..data.views.maker import PlannedViews, ViewMaker
from ..data.views.own import OwnViews
from ..engine.collectives import Collectives
from ..engine.precision import Precision, processors
from ..errors import InputError
from .checks import check_enough, check_shares
from .config import Recipe
from .placement import choose_augment_place

__all__ = ["OwnTransform", "RunImages", "view_preparer"]

log = logging.getLogger("zoo")

_TRIES = 100

OwnTransform = Callable[[Any], Any] | Sequence[Callable[[Any], Any]]


class RunImages:
    """Source, order and views of a run.

    Args:
        recipe: the run's recipe.
        own: the user's transforms instead of the recipe's views (``zoo.data.views.own``).
        world: the processes that share each batch.

    Raises:
        InputError: sources that can't be used, fewer images than a batch, or a batch that can't be shared.
    """

    def __init__(self, recipe: Recipe, own: OwnTransform | None, world: Collectives) -> None:
        self.recipe = recipe
        check_shares(recipe, world.world_size)
        index = recipe.data.class_index
        self.source: ImageSource = open_sources(
            recipe.data.sources,
            how=recipe.data.decoding(),
            class_names=None if index is None else read_class_index(Path(index)),
            skip_bad=recipe.data.on_error == "skip",
        )
        for note in getattr(self.source, "notes", ()):
            log.info("%s: %s", self.source.name, note)
        self.order = order_of(self.source, recipe.batch_size, recipe.seed, world.rank, world.world_size)
        check_enough(recipe, len(self.source), self.source.name)
        self._world = world
        self._plan = recipe.views.plan()
        if own is not None and recipe.data.augment_on == "device":
            raise InputError(
                "Your own transforms make their colours themselves: nothing is left for the device.",
                where="data.augment_on",
                fix="leave --augment-on away",
            )
        self._own = None if own is None else OwnViews(own, self._example())
        self.augment_on = "worker"
        """Where colours and blur are computed; see ``place``."""

    def _example(self) -> Picture:
        """Any image, to see which views the user's transforms make of it."""
        skip = self.recipe.data.on_error == "skip"
        for index in range(min(_TRIES, len(self.source)) if skip else 1):
            try:
                return ArrayPicture(self.source.read(index))
            except InputError:
                if not skip:
                    raise
        raise InputError(
            f"None of the first {_TRIES} images can be read.",
            where=self.source.name,
            fix="check the data: zoo data check",
        )

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(size, count) of each run of views of one size."""
        return self._plan.groups if self._own is None else self._own.groups

    def workers(self, device: torch.device) -> int:
        """Data processes: the recipe's number, or what suits the machine."""
        if self.recipe.data.workers is not None:
            return self.recipe.data.workers
        mine = processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if device.type == "cpu":
            # They would take processors from the trunk, which needs many times what the views need: with few
            # processors views are made between two steps.
            return min(8, mine // 4)
        return min(8, max(1, mine - 1))  # a GPU waits for all the workers it can get

    def place(self, trunk: Any, device: torch.device, before: str | None = None) -> None:
        """Decide where colours and blur are computed; a resumed run keeps what it had ``before``."""
        if self._own is None:
            place = before or choose_augment_place(
                self.recipe.data.augment_on, self.source, self._plan, trunk, device, self.workers(device)
            )
            self.augment_on = self._world.gather_values(place)[0]  # all do what the first one found

    def batches(self, first_step: int, last_step: int, device: torch.device) -> Iterator[Batch]:
        """The batches of these steps, see ``zoo.data.loader.view_batches``."""
        maker: ViewMaker = self._own or PlannedViews(
            self._plan,
            colors=self.augment_on == "worker",
            scaled_decoding=self.recipe.data.scaled_decoding,
        )
        return view_batches(
            self.source,
            maker,
            self.order,
            first_step=first_step,
            last_step=last_step,
            workers=self.workers(device),
            skip_bad=self.recipe.data.on_error == "skip",
            pin_memory=device.type == "cuda",
        )


def view_preparer(recipe: Recipe, precision: Precision) -> Callable[[Batch], list[torch.Tensor]]:
    """A function that brings a batch's views onto the device, coloured if that is left, and normalised."""
    plan, apart = recipe.views.plan(), recipe.engine.views_apart

    def prepare(batch: Batch) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for group, view in enumerate(batch.views):
            images = view.to(precision.device, non_blocking=True)
            if batch.colors is not None:
                images = recolor_batch(images, batch.colors[group], plan)
            if batch.colors is not None or images.dtype == torch.uint8:  # a user's float views are finished
                images = normalize(images, plan.mean, plan.std)
            images = images.to(dtype=precision.master_dtype, memory_format=precision.memory_format)
            out += images.split(batch.size) if apart else [images]
        return out

    return prepare
