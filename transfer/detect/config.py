"""Settings of the detection recipe."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ..config import TransferConfig

__all__ = ["DetectConfig"]


class DetectConfig(TransferConfig):
    """Faster or Mask R-CNN with detectron2's semantics, or DETR, by a published protocol.

    What is 0 or empty is the protocol's (``transfer.detect.protocols``).
    """

    default_data: ClassVar[str] = "builtin:photos-voc"
    files: ClassVar[tuple[str, ...]] = ("yaml",)
    folders: ClassVar[tuple[str, ...]] = ("init_from",)
    spread: ClassVar[str] = "backbone_lr"

    engine: Literal["torchvision", "detectron2"] = Field(
        default="torchvision",
        description="torchvision (its parts are enough), or detectron2, if it is installed",
    )
    head: str = Field(
        default="",
        description="c4 or fpn (Faster R-CNN), mask-fpn (Mask R-CNN) or detr; none: by the data set",
    )
    schedule: str = Field(
        default="",
        description="24k (VOC), 1x or 2x (COCO), small (few images), with detr 300ep or small; none: by the data set",
    )
    method: Literal["", "swav", "moco"] = Field(
        default="", description="whose rate and warm-up on VOC, swav's or moco's; none: by the model's method"
    )
    runs: int = Field(default=1, ge=1, description="trainings, each with the next seed; their mean counts")
    batch_size: int = Field(
        default=0,
        ge=0,
        description="images a step; rate, steps and warm-up follow (0: 2 a process, 16 at most)",
    )
    init_from: str = Field(
        default="",
        description="a trained detector's folder to start from; with other classes its class layers are new",
    )
    steps: int = Field(default=0, ge=0, description="updates, for a shorter training (0: the protocol's)")
    lr: float = Field(default=0.0, ge=0, description="learning rate after the warm-up (0: the protocol's)")
    backbone_lr: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(),
        description="DETR's rate of the trunk; of several, the best on held-out training images (none: the protocol's)",
    )
    queries: int = Field(
        default=0,
        ge=0,
        description="DETR's queries, the most objects that it can find in an image (0: the protocol's)",
    )
    crops: bool = Field(default=True, description="DETR crops half of its training views")
    warmup_steps: int = Field(default=-1, ge=-1, description="linear warm-up (-1: the protocol's)")
    min_size: int = Field(
        default=0, ge=0, description="shorter side in pixels, in training and test (0: the protocol's)"
    )
    max_size: int = Field(default=0, ge=0, description="longest side in pixels (0: the protocol's)")
    yaml: str = Field(
        default="", description="a YAML of your own, laid over the protocol's settings of --engine detectron2"
    )
    precise_batches: int = Field(
        default=-1, ge=-1, description="batches that BatchNorm is measured on at the end (-1: the protocol's)"
    )
    precision: str = Field(default="auto", description="auto, float32, bfloat16, float16 or float64")
    nproc: int = Field(default=1, ge=1, description="processes on this machine, one for each GPU")
    save_every: int = Field(default=1000, ge=1, description="steps between two checkpoints")
    tracker: str = Field(default="", description="tensorboard, wandb or trackio; several with commas")
    train_split: str = Field(default="trainval", description="image set of a folder to train on")
    test_split: str = Field(default="test", description="image set of a folder to score on")
    ap: Literal["", "11-point", "area"] = Field(
        default="", description="VOC's AP: 11-point or area; none: 11-point for 2007's test set, else area"
    )
    rounding: bool = Field(default=True, description="round VOC's boxes and scores, as detectron2 does")
    keep_empty: bool = Field(default=False, description="train on images without objects, too")
    limit: int = Field(default=0, ge=0, description="use only so many images of each set (0: all)")
    test_on_train: bool = Field(default=False, description="score on the training images, as a check")
