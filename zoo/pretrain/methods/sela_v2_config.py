"""SeLa-v2's settings. No code of it was released: the recipes say where each default comes from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from .config_base import RunShape
from .deepcluster_v2_config import BankConfig

__all__ = ["SeLaV2Config"]


class SeLaV2Config(BankConfig):
    """See ``zoo.pretrain.methods.sela_v2.SeLaV2``."""

    name: Literal["sela_v2"] = "sela_v2"
    codes: Literal["hard", "soft"] = Field(
        default="hard", description="hard: an image's largest code is its label; soft: codes as they are"
    )
    epsilon: PositiveFloat = Field(default=0.05, description="weight of the codes' entropy")
    sinkhorn_iterations: PositiveInt = Field(default=10, description="Sinkhorn iterations, each epoch")

    @property
    def needs_less(self) -> str:
        return super().needs_less if self.codes == "hard" else "method.codes hard"

    def bank_bytes(self, shape: RunShape) -> int:
        """For soft codes also the embeddings that codes are made of: this process's, and all images'."""
        own = super().bank_bytes(shape)
        return own if self.codes == "hard" else own * (2 + shape.world_size)
