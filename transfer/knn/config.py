"""Settings of the kNN recipe."""

from __future__ import annotations

from pydantic import Field

from ..config import TransferConfig

__all__ = ["KnnConfig"]


class KnnConfig(TransferConfig):
    """Weighted kNN, cosine similarity (Wu et al. 2018; the protocol that SwAV and MoCo users report)."""

    k: tuple[int, ...] = Field(default=(20,), min_length=1, description="neighbours; several at once")
    temperature: float = Field(default=0.07, gt=0, description="of the neighbours' weights")
