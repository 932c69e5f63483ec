"""Settings of the detection recipe."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ..config import TransferConfig

__all__ = ["DetectConfig"]


class DetectConfig(TransferConfig):
    """Faster or Mask R-CNN with detectron2's semantics, by a published protocol.

    What is 0 or empty is the protocol's (``transfer.detect.protocols``).
    """

    default_data: ClassVar[str] = "builtin:photos-voc"

    head: str = Field(default="", description="c4, fpn or mask-fpn; none: by the data set")
    schedule: str = Field(default="", description="24k, 1x, 2x or small; none: by the data set")
    method: str = Field(default="", description="whose rate on VOC, swav or moco; none: the model's method")
    runs: int = Field(default=1, ge=1, description="trainings, with seeds from --seed on; mean and deviation")
    batch_size: int = Field(
        default=0,
        ge=0,
        description="images a step; rate, steps and warm-up follow (0: 2 a process, 16 at most)",
    )
    steps: int = Field(default=0, ge=0, description="updates; a shorter training than the protocol's")
    lr: float = Field(default=0.0, ge=0, description="learning rate, after the warm-up")
    warmup_steps: int = Field(default=-1, ge=-1, description="linear warm-up (-1: the protocol's)")
    min_size: int = Field(default=0, ge=0, description="shorter side in pixels, in training and test")
    max_size: int = Field(default=0, ge=0, description="longest side in pixels")
    precise_batches: int = Field(
        default=-1, ge=-1, description="batches that BatchNorm is measured on at the end (-1: the protocol's)"
    )
    precision: str = Field(default="auto", description="auto, float32, bfloat16, float16 or float64")
    nproc: int = Field(default=1, ge=1, description="processes, one a GPU")
    save_every: int = Field(default=1000, ge=1, description="steps between two checkpoints")
    tracker: str = Field(default="", description="tensorboard, wandb or trackio; several with commas")
    train_split: str = Field(default="trainval", description="image set to train on")
    test_split: str = Field(default="test", description="image set to score on")
    ap: Literal["", "11-point", "area"] = Field(
        default="", description="VOC's AP: 11-point or area; none: 11-point for 2007's test set"
    )
    rounding: bool = Field(default=True, description="score VOC's boxes as detectron2 prints them")
    keep_empty: bool = Field(default=False, description="train on images without objects, too")
    limit: int = Field(default=0, ge=0, description="use only so many images of each set (0: all)")
    test_on_train: bool = Field(default=False, description="score on the training images: can it over-fit?")
