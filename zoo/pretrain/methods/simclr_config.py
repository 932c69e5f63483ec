"""SimCLR's settings. Defaults are those of the SwAV paper's own SimCLR (A.8, the head of A.1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from ...errors import InputError
from .config_base import MethodConfig, RunShape

__all__ = ["SimCLRConfig"]


class SimCLRConfig(MethodConfig):
    """See ``zoo.pretrain.methods.simclr.SimCLR``."""

    name: Literal["simclr"] = "simclr"
    hidden: int = Field(
        default=2048, ge=0, description="hidden width of the projection head; 0: one linear layer"
    )
    dim: PositiveInt = Field(default=128, description="length of an embedding")
    output_norm: bool = Field(
        default=False, description="BatchNorm of the embeddings too, as SimCLR's own head has it"
    )
    temperature: PositiveFloat = Field(default=0.1, description="what similarities are divided by (eq. 7)")

    def check(self, shape: RunShape) -> Iterator[str]:
        if shape.views < 2:
            raise InputError(
                "SimCLR needs at least two views of an image.", where="views.count", fix="ask for 2 or more"
            )
        return iter(())
