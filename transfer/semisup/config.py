"""Settings of the semi-supervised recipe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ..config import TransferConfig

__all__ = ["SemisupConfig"]


class SemisupConfig(TransferConfig):
    """Fine-tune everything on a balanced share of the labels (SwAV A.4, ``eval_semisup.py``).

    Published: 20 epochs, rates times 0.2 at 12 and 16, no decay, momentum 0.9, batch 256; trunk / head
    rate 0.01 / 0.2 for 10 % and 0.02 / 5 for 1 % of ImageNet. The batch here is for small sets.
    """

    files: ClassVar[tuple[str, ...]] = ("labels",)

    fraction: float = Field(default=0.1, gt=0, le=1, description="share of each class's labels")
    labels: str = Field(
        default="", description="a text file that names the labelled images instead, one a line"
    )
    epochs: int = Field(default=20, ge=1, description="passes over the labelled share")
    batch_size: int = Field(default=32, ge=2, description="images a step")
    lr: float = Field(default=0.01, gt=0, description="learning rate of the trunk")
    lr_head: float = Field(default=0.2, gt=0, description="learning rate of the classifier")
    decay_epochs: tuple[int, ...] = Field(default=(12, 16), description="epochs after which rates drop")
    decay: float = Field(default=0.2, gt=0, le=1, description="the factor they drop by")
