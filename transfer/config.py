"""What all transfer configs share. No torch here."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from zoo.pretrain.methods.config_base import Strict

__all__ = ["TransferConfig"]


class TransferConfig(Strict):
    """Settings of one transfer recipe; every field is also a command-line option."""

    files: ClassVar[tuple[str, ...]] = ()
    """The settings that name a file."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of every random draw")
    allow_overlap: bool = Field(default=False, description="accept test files that are also training files")
