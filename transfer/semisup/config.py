"""Settings of the semi-supervised recipe, and what fine-tuning on all labels shares with it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ..config import TransferConfig, steps_down

__all__ = ["LARGE", "SemisupConfig", "TuningConfig"]

LARGE = 10_000
"""Labelled images from which on the paper's protocol is meant unless another one is named."""

# SwAV's appendix A.4 and eval_semisup.py: ImageNet, batch 256, 20 epochs, x 0.2 at 12 and 16, momentum 0.9.
_SWAV = {"epochs": 20, "batch_size": 256, "drop_at": (12, 16), "drop": 0.2, "weight_decay": 0.0}
# This project's choice: A.4's batch and rates of a share of 10 % for so few images that a batch of 256 would be
# an epoch; as many steps for the smallest shares as epochs can give.
_SMALL = {"epochs": 20, "batch_size": 32, "drop_at": (12, 16), "drop": 0.2, "weight_decay": 0.0}
_SMALLEST = {**_SMALL, "epochs": 60, "drop_at": (36, 48)}
# Trunk and classifier: A.4 for 1 % and for 10 % of the labels.
_FEW, _MORE = {"lr": 0.02, "lr_head": 5.0}, {"lr": 0.01, "lr_head": 0.2}
_FEW_SHARE = 0.05  # between A.4's two


class TuningConfig(TransferConfig):
    """Everything is trained: SGD with momentum 0.9, one rate for the trunk and one for the new classifier.

    BatchNorm is in train mode and sees the batch of this process (the paper's SyncBN sees the same 256
    images). What isn't given has the protocol's value.
    """

    frozen_trunk: ClassVar[bool] = False

    protocol: Literal["auto", "swav", "small"] = Field(
        default="auto",
        description="swav (A.4: batch 256), small (batch 32), or auto: small below 10,000 labelled images",
    )
    epochs: int = Field(default=20, ge=1, description="passes over the labelled images; else the protocol's")
    batch_size: int = Field(default=32, ge=2, description="images a step; swav: 256")
    lr: float = Field(default=0.01, gt=0, description="learning rate of the trunk; swav at 1 %: 0.02")
    lr_head: float = Field(default=0.2, gt=0, description="learning rate of the classifier; swav at 1 %: 5")
    weight_decay: float = Field(default=0.0, ge=0, description="of all tensors")
    drop_at: tuple[int, ...] = Field(default=(12, 16), description="epochs after which rates drop")
    drop: float = Field(default=0.2, gt=0, le=1, description="what they drop to")
    limit: int = Field(default=0, ge=0, description="stop after so many steps, as a trial (0: all)")

    def _filled(self, labelled: int, share: float) -> dict[str, Any]:
        """The protocol and its values for so many labelled images, what was given on top."""
        name = self.protocol if self.protocol != "auto" else ("swav" if labelled >= LARGE else "small")
        if name == "swav":
            values: dict[str, Any] = {**_SWAV, **(_FEW if share < _FEW_SHARE else _MORE)}
        else:
            values = {**(_SMALLEST if share < _FEW_SHARE else _SMALL), **_MORE}
        return {**values, **self.model_dump(include=self.model_fields_set), "protocol": name}

    def factors(self) -> list[float]:
        """What both rates are multiplied by in each epoch."""
        return steps_down(self.epochs, self.drop_at, self.drop)


class SemisupConfig(TuningConfig):
    """Fine-tune everything on a share of the labels (SwAV A.4, ``eval_semisup.py``).

    ``swav``: 20 epochs of batches of 256, rates times 0.2 at 12 and 16, no decay; trunk / classifier at 0.01 /
    0.2, and at 0.02 / 5 where fewer than 5 % are labelled (the paper has 10 % and 1 %). ``small``, for small
    sets: batches of 32, 0.01 / 0.2, and 60 epochs below 5 %.
    """

    files: ClassVar[tuple[str, ...]] = ("labels",)

    fraction: float = Field(default=0.1, gt=0, le=1, description="share of each class's labels")
    labels: str = Field(
        default="", description="a text file that names the labelled images instead, one a line"
    )

    def settled(self, labelled: int, share: float) -> SemisupConfig:
        """The same with the protocol's values for so many labelled images, such a share of all."""
        return SemisupConfig.model_validate(self._filled(labelled, share))
