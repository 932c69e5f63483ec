"""Settings of the low-shot recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from ..svm.config import SvmBase

__all__ = ["LowshotConfig"]


class LowshotConfig(SvmBase):
    """A linear SVM for each class on few labelled images (VOC07: VISSL's low-shot SVM benchmark).

    Of each class k positives and 19 k negatives, drawn by the seed; difficult images are left out.
    """

    # VISSL's low-shot SVM benchmark
    k: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 4, 8, 16, 32, 64, 96), min_length=1, description="positives of each class"
    )
    negatives: int = Field(default=19, ge=1, description="negatives for each positive")
    samples: int = Field(default=5, ge=1, description="how often images are drawn")

    @field_validator("k")
    @classmethod
    def _rising(cls, k: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(k)))
