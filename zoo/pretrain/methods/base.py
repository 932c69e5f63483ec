"""What the engine asks of a method: heads, a loss and their state around a trunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...data.loader import Batch

__all__ = ["Method", "Seen", "encode"]


@dataclass
class Seen:
    """What a step had before it, for whoever watches over the run's health (``zoo.pretrain.health``).

    The tensors are those of the step, without gradients, of this process alone; of a batch in parts they are
    the last part's.

    Args:
        outcomes: a loss of ln ``outcomes`` is that of telling nothing apart: prototypes, classes, or a positive
            and its negatives.
        embeddings: (N, D), unit length.
        scores: (N, K), against the prototypes of one set: what they predict, before any temperature.
        codes: (B, K), what is to be predicted, rows that sum to 1; for the same prototypes.
        queue_age: steps since the oldest embedding that the loss made use of was made.
    """

    outcomes: float
    embeddings: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    queue_age: float | None = None

    def __post_init__(self) -> None:
        for name in ("embeddings", "scores", "codes"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.detach())


class Method(nn.Module):
    """Base class: a trunk with heads that turns a batch of views into a loss.

    ``state_dict()`` is the state shared by all processes; what belongs to one process (a queue) goes
    through ``local_state``. The engine calls, in this order: ``on_epoch_start`` at the first step of an
    epoch, then for each step ``before_step``, ``step``, ``before_update`` (gradients are there),
    ``after_step``.
    """

    trunk: nn.Module
    whole_trunk = False
    """Whether all of the trunk that learns has a part in the loss, even of one that isn't a ResNet."""
    watched = False
    """Whether somebody will look at what the next step saw, so that it must keep it in ``seen``."""
    seen: Seen | None = None

    def param_groups(self, exclude_one_dimensional: bool) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer; by default all parameters that learn, alike."""
        from ...optim.groups import split_one_dimensional

        learning = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        if exclude_one_dimensional:
            return split_one_dimensional(learning)
        return [{"params": [p for _, p in learning]}]

    def on_trunk_replaced(self) -> None:
        """Called when the trunk was given other values before the first step (``--init-from``)."""

    def on_epoch_start(
        self, epoch: int, batches: Callable[[], Iterator[tuple[list[torch.Tensor], Batch]]]
    ) -> None:
        """Called before step 0 of an epoch, epochs counted from 0; runs without gradients.

        Args:
            epoch: the one that begins.
            batches: gives this epoch's own batches once more, in the order (and the parts) that they are then
                trained in, their views as ``step`` gets them. Going through them costs reading all images
                again. Where it is stopped by a signal, it raises, and the epoch begins anew in the next
                session: only a finished pass may leave traces.
        """

    def rehearse(self) -> None:
        """Called instead of ``on_epoch_start`` where a step is counted, not computed (``zoo.pretrain.costs``).

        No tensor has values then. What a step finds of an epoch's beginning must have its shapes.
        """

    def before_step(self, step: int, epoch: int) -> None:
        """Called before the forward pass of a step, counted from 0 over the whole run."""

    def first_pass(self, parts: Sequence[tuple[Callable[[], list[torch.Tensor]], Batch]]) -> list[Any]:
        """What a batch that is trained in parts must know of itself as a whole; runs without gradients.

        Args:
            parts: for each part a function that prepares its views (called once at most), and the part.

        Returns:
            For each part what ``step`` is then given. By default nothing: right for a loss that is a mean
            over images which know nothing of one another.
        """
        return [None] * len(parts)

    def step(
        self, views: list[torch.Tensor], batch: Batch, given: Any = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of one batch, and figures for the log.

        Args:
            views: normalised images on the device, one tensor for each run of views of one size; with
                ``engine.views_apart`` one for each view.
            batch: ids and labels of the images.
            given: what ``first_pass`` found for this part, if the batch is trained in parts.
        """
        raise NotImplementedError

    def before_update(self, step: int) -> None:
        """Called between the backward pass and the optimizer."""

    def after_step(self, step: int) -> None:
        """Called after the optimizer."""

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """Pooled trunk features (N, F) of normalised images."""
        return self.trunk(images)  # type: ignore[no-any-return]

    def local_state(self) -> dict[str, Any]:
        """State of this process alone."""
        return {}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Take ``local_state`` back."""

    def share_out(self, states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """This process's own state out of those of another number of processes, in rank order.

        By default empty states stay empty; a method with a state of its own must say how it is dealt out.
        """
        if any(states):
            raise NotImplementedError(f"{type(self).__name__} does not say how to share its state out")
        return {}


def encode(trunk: nn.Module, views: list[torch.Tensor]) -> torch.Tensor:
    """One trunk pass for each tensor, that is for each resolution: pooled features of all views, (V * B, F), crop-major.

    BatchNorm therefore sees each resolution as a batch of its own, as in the reference.
    """
    return torch.cat([trunk(group) for group in views])
