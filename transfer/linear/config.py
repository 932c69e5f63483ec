"""Settings of the linear recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..config import TransferConfig, cosine, steps_down

__all__ = ["LARGE", "LinearConfig"]

LARGE = 100_000
"""Training images from which on a set is judged by the paper's protocol unless another one is named."""

# Each protocol's own numbers; what isn't said is the field's default.
_PROTOCOLS: dict[str, dict[str, Any]] = {
    # This project's choice for small sets: rates a factor of ten apart, the best one found by held-out images.
    "cached": {},
    # SwAV's appendix A.3 and eval_linear.py: ImageNet; cosine to 0, a step an epoch.
    "swav": {"epochs": 100, "batch_size": 256, "lr": (0.3,), "weight_decay": (1e-6,)},
    # MoCo's main_lincls.py: ImageNet; x 0.1 at 60 and 80.
    "moco": {
        "epochs": 100,
        "batch_size": 256,
        "lr": (30.0,),
        "weight_decay": (0.0,),
        "drop_at": (60, 80),
        "drop": 0.1,
    },
    # SwAV's appendix A.5: x 0.1 three times, at equal distances.
    "places205": {
        "epochs": 28,
        "batch_size": 256,
        "lr": (0.01,),
        "weight_decay": (1e-4,),
        "drop_at": (7, 14, 21),
        "drop": 0.1,
    },
    "inat18": {
        "epochs": 84,
        "batch_size": 256,
        "lr": (0.01,),
        "weight_decay": (1e-4,),
        "drop_at": (24, 48, 72),
        "drop": 0.1,
    },
    # AMDIM's released code, for CIFAR and STL-10 (task_classifiers.py, train.py)
    "amdim": {
        "epochs": 120,
        "batch_size": 200,
        "lr": (2e-4,),
        "weight_decay": (1e-5,),
        "drop_at": (80, 110),
        "drop": 0.2,
    },
}
_PROTOCOLS["amdim-train-bn"] = _PROTOCOLS["amdim"]
_ALIASES = {"exact": "swav"}  # its name before there were others that are as exact

_Rate = Annotated[float, Field(gt=0)]
_Decay = Annotated[float, Field(ge=0)]
_Norm = Literal["none", "standard", "batch"]


class LinearConfig(TransferConfig):
    """A linear classifier on a frozen trunk in eval mode: SGD, momentum 0.9, weights from N(0, 0.01).

    ``swav``, ``moco``, ``places205`` and ``inat18`` are the papers' protocols: a fresh random crop and flip of
    each image each epoch. ``cached``, for small sets, computes the features once: of the central crop and of
    ``views`` random ones, which take turns. ``auto`` is ``cached`` below 100,000 training images, else
    ``swav``.

    Several of ``lr``, ``weight_decay``, ``stages`` and ``norm`` are a grid: all its heads are trained at once on
    the same features, and the best on a held-out part of the training set is the one that is judged. ``cached``
    then trains it once more on all training images; the others don't, their features would be computed twice.

    ``amdim`` trains AMDIM's two evaluators, a linear and an MLP classifier, by its code's views, cost and
    optimizer; what isn't given has its code's values for CIFAR and STL-10: 120 epochs, batch 200, Adam of
    2e-4, decay 1e-5, drops at 80 and 110 (ImageNet: 30, at 15 and 25; Places205: 15, at 7 and 12). The trunk
    is in eval mode. ``amdim-train-bn`` is the same as its authors did it, with the trunk's BatchNorm in train
    mode: test images take part in what it remembers, so its numbers flatter and stay out of cards.
    """

    protocol: Literal["auto", "cached", "swav", "moco", "places205", "inat18", "amdim", "amdim-train-bn"] = (
        Field(
            default="auto",
            description="cached (small sets), swav (A.3), moco, places205 and inat18 (A.5), amdim (linear and MLP), "
            "amdim-train-bn (as its authors did: the trunk's BatchNorm in train mode), or auto: cached below "
            "100,000 training images, else swav",
        )
    )
    epochs: int = Field(default=100, ge=1, description="passes over the training images; else the protocol's")
    batch_size: int = Field(default=256, ge=1, description="images a step; amdim: 200")
    lr: tuple[_Rate, ...] = Field(
        default=(0.003, 0.03, 0.3, 3.0), min_length=1, description="learning rates; else the protocol's"
    )
    weight_decay: tuple[_Decay, ...] = Field(
        default=(1e-6,), min_length=1, description="weight decays; else the protocol's"
    )
    stages: tuple[str, ...] = Field(
        default=("final",), min_length=1, description="whose pooled features: layer1 to layer4, final"
    )
    norm: tuple[_Norm, ...] = Field(
        default=(),
        description="what features go through: none, standard (the training set's mean and deviation: cached "
        "only), batch (BatchNorm without weights); else the protocol's: standard for cached, none for others",
    )
    views: int = Field(
        default=0, ge=0, description="cached: random crops of each image beside the central one (0: none)"
    )
    held_out: float = Field(default=0.2, gt=0, lt=1, description="share of the training set to choose by")
    drop_at: tuple[int, ...] = Field(
        default=(),
        description="epochs after which rates drop, else the protocol's; without any, a cosine to 0",
    )
    drop: float = Field(default=0.1, gt=0, le=1, description="what they drop to; amdim: 0.2")
    limit: int = Field(default=0, ge=0, description="stop after so many steps, as a trial (0: all)")

    @model_validator(mode="before")
    @classmethod
    def _of_the_protocol(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("protocol", "auto")
        name = _ALIASES.get(name, name) if isinstance(name, str) else name
        known = _PROTOCOLS.get(name, {}) if isinstance(name, str) else {}
        return {**known, **given, "protocol": name}

    @model_validator(mode="after")
    def _fits_the_protocol(self) -> LinearConfig:
        if self.protocol.startswith("amdim"):
            odd = [n for n in ("stages", "norm", "views", "held_out", "limit") if n in self.model_fields_set]
            if odd:
                raise ValueError(f"the amdim protocols have no {odd[0]}")
        elif self.protocol not in ("auto", "cached"):
            if "standard" in self.norm:
                raise ValueError("norm=standard needs the cached protocol: take norm=batch")
            if self.views:
                raise ValueError("views belongs to the cached protocol: the others draw anew each epoch")
        return self

    def settled(self, images: int) -> LinearConfig:
        """The same with the protocol that ``auto`` means for so many training images."""
        if self.protocol != "auto":
            return self
        given = self.model_dump(include=self.model_fields_set - {"protocol"})
        return LinearConfig.model_validate({**given, "protocol": "cached" if images < LARGE else "swav"})

    @property
    def norms(self) -> tuple[_Norm, ...]:
        """``norm``, or the protocol's."""
        return self.norm or (("standard",) if self.protocol == "cached" else ("none",))

    def factors(self) -> list[float]:
        """What rates are multiplied by in each epoch."""
        return steps_down(self.epochs, self.drop_at, self.drop) if self.drop_at else cosine(self.epochs)
