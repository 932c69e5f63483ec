"""Settings of the linear recipe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ..config import TransferConfig

__all__ = ["LinearConfig"]

# AMDIM's released code, for CIFAR and STL-10 (task_classifiers.py, train.py)
_AMDIM = {"epochs": 120, "batch_size": 200, "lr": (2e-4,), "weight_decay": (1e-5,), "drop_at": (80, 110)}


class LinearConfig(TransferConfig):
    """A linear classifier on a frozen trunk in eval mode: SGD, momentum 0.9, cosine to 0.

    ``cached`` (for small sets) computes the test-transform features once, standardises them by the
    training set, trains all ``lr`` x ``weight_decay`` at once and chooses by a held-out part of the
    training set. ``exact`` is SwAV's protocol (A.3): augmented views each epoch, one learning rate.

    ``amdim`` trains AMDIM's two evaluators, a linear and an MLP classifier, by its code's views, cost and
    optimizer; what isn't given has its code's values for CIFAR and STL-10: 120 epochs, batch 200, Adam of
    2e-4, decay 1e-5, drops at 80 and 110 (ImageNet: 30, at 15 and 25; Places205: 15, at 7 and 12). The trunk
    is in eval mode. ``amdim-train-bn`` is the same as its authors did it, with the trunk's BatchNorm in train
    mode: test images take part in what it remembers, so its numbers flatter and stay out of cards.
    """

    protocol: Literal["cached", "exact", "amdim", "amdim-train-bn"] = Field(
        default="cached",
        description="cached, exact (SwAV A.3), amdim (linear and MLP), or amdim-train-bn (as its authors did: "
        "the trunk's BatchNorm in train mode)",
    )
    epochs: int = Field(default=100, ge=1, description="passes over the training images; amdim: 120")
    batch_size: int = Field(default=256, ge=1, description="images a step; amdim: 200")
    lr: tuple[float, ...] = Field(
        default=(0.003, 0.03, 0.3, 3.0), min_length=1, description="learning rates; amdim: 0.0002"
    )
    weight_decay: tuple[float, ...] = Field(
        default=(1e-6,), min_length=1, description="weight decays; amdim: 1e-5"
    )
    held_out: float = Field(default=0.2, gt=0, lt=1, description="share of the training set to choose by")
    drop_at: tuple[int, ...] = Field(
        default=(), description="epochs after which amdim's rate drops to a fifth; amdim: 80,110"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_the_protocol(cls, given: Any) -> Any:
        if isinstance(given, dict) and str(given.get("protocol", "")).startswith("amdim"):
            return {**_AMDIM, **given}
        return given

    @model_validator(mode="after")
    def _drops(self) -> LinearConfig:
        if self.drop_at and not self.protocol.startswith("amdim"):
            raise ValueError("drop_at belongs to the amdim protocols; the others follow a cosine")
        return self
