"""Settings of the detection recipe."""

from __future__ import annotations

from pydantic import Field

from ..config import TransferConfig

__all__ = ["DetectConfig"]


class DetectConfig(TransferConfig):
    """torchvision's stock Faster R-CNN with a feature pyramid on the loaded trunk; BatchNorm is frozen.

    Defaults suit small sets on a CPU; the papers' protocols for VOC07+12 are other recipes.
    """

    batch_size: int = Field(default=2, ge=1, description="images a step")
    steps: int = Field(default=300, ge=1, description="updates")
    lr: float = Field(default=0.01, gt=0, description="learning rate, after the warm-up")
    warmup_steps: int = Field(default=30, ge=0, description="linear warm-up")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of SGD")
    weight_decay: float = Field(default=1e-4, ge=0, description="of SGD")
    min_size: int = Field(default=256, ge=32, description="shorter side in pixels")
    max_size: int = Field(default=512, ge=32, description="longest side in pixels")
    train_split: str = Field(default="trainval", description="image set to train on")
    test_split: str = Field(default="test", description="image set to score on")
    limit: int = Field(default=0, ge=0, description="use only so many images of each set (0: all)")
    test_on_train: bool = Field(default=False, description="score on the training images: can it over-fit?")
