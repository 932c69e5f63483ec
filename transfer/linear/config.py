"""Settings of the linear recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..config import TransferConfig

__all__ = ["LinearConfig"]


class LinearConfig(TransferConfig):
    """A linear classifier on a frozen trunk in eval mode: SGD, momentum 0.9, cosine to 0.

    ``cached`` (for small sets) computes the test-transform features once, standardises them by the
    training set, trains all ``lr`` x ``weight_decay`` at once and chooses by a held-out part of the
    training set. ``exact`` is SwAV's protocol (A.3): augmented views each epoch, one learning rate.
    """

    protocol: Literal["cached", "exact"] = Field(default="cached", description="cached or exact (SwAV A.3)")
    epochs: int = Field(default=100, ge=1, description="passes over the training images")
    batch_size: int = Field(default=256, ge=1, description="images a step")
    lr: tuple[float, ...] = Field(default=(0.003, 0.03, 0.3, 3.0), min_length=1, description="learning rates")
    weight_decay: tuple[float, ...] = Field(default=(1e-6,), min_length=1, description="weight decays")
    held_out: float = Field(default=0.2, gt=0, lt=1, description="share of the training set to choose by")
