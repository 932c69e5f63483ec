"""Settings of the kNN recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..config import TransferConfig

__all__ = ["KnnConfig"]


class KnnConfig(TransferConfig):
    """Weighted kNN, cosine similarity (Wu et al. 2018; the protocol that SwAV and MoCo users report).

    Its k is 200 and its temperature 0.07 on ImageNet; the k here is for small sets. The first k and the first
    temperature make ``top1`` and ``top5``.
    """

    k: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(20,), min_length=1, description="neighbours; several at once"
    )
    temperature: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(0.07,), min_length=1, description="of the neighbours' weights; several at once"
    )
    leave_one_out: bool = Field(
        default=False, description="ask each training image after the others; no test part is needed"
    )
