"""What all transfer configs share. No torch here."""

from __future__ import annotations

from pydantic import Field

from zoo.pretrain.methods.config_base import Strict

__all__ = ["TransferConfig"]


class TransferConfig(Strict):
    """Settings of one transfer recipe; every field is also a command-line option."""

    seed: int = Field(default=0, ge=0, description="seed of every random draw")
    batch_size: int = Field(default=64, ge=1, description="images a step")
    allow_overlap: bool = Field(default=False, description="accept test files that are also training files")
