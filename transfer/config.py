"""What all transfer configs share. No torch here."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from zoo.pretrain.methods.config_base import Strict

__all__ = ["TransferConfig", "cosine", "steps_down"]


class TransferConfig(Strict):
    """Settings of one transfer recipe; every field is also a command-line option."""

    files: ClassVar[tuple[str, ...]] = ()
    """The settings that name a file."""
    folders: ClassVar[tuple[str, ...]] = ()
    """The settings that name a folder."""
    default_data: ClassVar[str] = "builtin:photos"
    """The data set if none is named."""
    spread: ClassVar[str] = ""
    """The list whose further values may follow as words of their own: ``--backbone-lr 1e-5 5e-5``."""
    frozen_trunk: ClassVar[bool] = True
    """The trunk is the same afterwards, bit for bit: it is hashed before and after."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of every random draw")
    allow_overlap: bool = Field(default=False, description="accept test files that are also training files")

    @property
    def image_sets(self) -> tuple[str, str] | None:
        """VOC's sets to train and to score on, if the recipe is for images with several classes each."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        """A list may be a single value, or a text: ``0.1,1`` or ``[0.1, 1]``."""
        if not isinstance(given, dict):
            return given
        lists = {name for name, field in cls.model_fields.items() if isinstance(field.default, tuple)}
        return {name: _as_list(value) if name in lists else value for name, value in given.items()}


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        parts = value.strip().removeprefix("[").removesuffix("]").split(",")
        return tuple(part.strip() for part in parts if part.strip())
    return (value,) if isinstance(value, int | float) else value


def cosine(epochs: int) -> list[float]:
    """What rates are multiplied by in each epoch: half a cosine, from 1 towards 0."""
    from zoo.optim.schedule import WarmupCosine

    schedule = WarmupCosine(base=1.0, final=0.0, start=1.0, warmup_steps=0, total_steps=epochs)
    return [schedule.at(epoch) for epoch in range(epochs)]


def steps_down(epochs: int, drop_at: tuple[int, ...], factor: float) -> list[float]:
    """What rates are multiplied by in each epoch: ``factor`` once more after each of the epochs ``drop_at``."""
    return [factor ** sum(epoch >= drop for drop in drop_at) for epoch in range(epochs)]
