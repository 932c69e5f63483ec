"""Settings of the SVM recipes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from ..config import TransferConfig

__all__ = ["SvmBase", "SvmConfig"]


class SvmBase(TransferConfig):
    """What ``svm`` and ``lowshot`` share: the data, the features, and LIBLINEAR's costs."""

    default_data: ClassVar[str] = "builtin:photos-voc"

    features: Literal["pooled", "vissl"] = Field(
        default="pooled",
        description="pooled: the model's, of the central crop (SwAV A.5); vissl: the image squashed to the crop's "
        "square, the last maps pooled to 2 x 2",
    )
    # VISSL's SVM benchmark and SwAV A.5
    costs: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] = Field(
        default=(0.01, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 50.0, 100.0, 1000.0),
        min_length=1,
        description="LIBLINEAR's C to choose from",
    )
    positive_weight: float = Field(default=2.0, gt=0, description="of a class's images in the cost")
    negative_weight: float = Field(default=1.0, gt=0, description="of the other images in the cost")
    train_split: str = Field(default="trainval", description="VOC's image set to train on")
    test_split: str = Field(default="test", description="VOC's image set to score on")

    @property
    def image_sets(self) -> tuple[str, str]:
        return self.train_split, self.test_split

    @field_validator("costs")
    @classmethod
    def _rising_costs(cls, costs: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sorted(set(costs)))


class SvmConfig(SvmBase):
    """A linear SVM for each class on frozen features (VOC07: SwAV A.5, VISSL's SVM benchmark).

    LIBLINEAR's squared hinge; features of unit length; a cost for each class by cross validation on average
    precision; difficult images are negatives in training and left out of the test.
    """

    folds: int = Field(default=3, ge=2, description="of the cross validation that chooses each class's cost")
