"""AMDIM's settings. Defaults are those of the released code (facts: papers, protocols; golden: quirks)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from ...errors import InputError
from .config_base import MethodConfig, RunShape

__all__ = ["AMDIMConfig"]


class AMDIMConfig(MethodConfig):
    """See ``zoo.pretrain.methods.amdim.AMDIM``; sections and equations are the AMDIM paper's.

    Local DIM, which AMDIM extends, is ``costs: [1to7]`` and ``across_views: false`` with one view.
    """

    name: Literal["amdim"] = "amdim"
    costs: tuple[Literal["1to5", "1to7", "5to5"], ...] = Field(
        default=("1to5", "1to7", "5to5"),
        min_length=1,
        description="n-to-m: features of the n x n map predict those of the m x m map (eq. 5)",
    )
    across_views: bool = Field(
        default=True,
        description="two views of an image predict each other (eq. 4); false: one view predicts itself (eq. 1)",
    )
    clip: PositiveFloat = Field(default=20.0, description="c of the soft clip c tanh(score / c)")
    regularizer: NonNegativeFloat = Field(
        default=0.05,
        description="weight of the scores' mean square before the clip: 0.05 as released, 0.04 in the paper",
    )
    classifiers: bool = Field(
        default=False,
        description="train a linear and an MLP classifier beside the encoder, on detached features: needs labels",
    )
    mixtures: int = Field(
        default=0,
        ge=0,
        description="k mixture features of each 1 x 1 map (section 4.7); 0: none, as released",
    )
    mixture_hidden: PositiveInt | None = Field(
        default=None, description="hidden width of the MLP that makes them; null: the encoder's n_rkhs"
    )
    mixture_entropy: PositiveFloat = Field(
        default=1.0, description="alpha, the weight of q's entropy (eq. 6); the paper gives no number"
    )
    mixture_temperature: PositiveFloat | None = Field(
        default=None,
        description="tau of the softmax that q is (eq. 7); null: 1 / alpha, the optimum of eq. 6; larger: greedier",
    )

    @field_validator("costs")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("each cost is named once")
        return value

    def check(self, shape: RunShape) -> Iterator[str]:
        self._check_views(shape)
        if set(self.costs) == {"5to5"}:
            raise InputError(
                "With the cost 5to5 alone the last layers, which make the encoder's features, learn nothing.",
                where="method.costs",
                fix="add 1to5 or 1to7",
            )
        if self.classifiers and len(shape.classes) < 2:
            found = f"one class, {shape.classes[0]!r}" if shape.classes else "no labels"
            raise InputError(
                f"Classifiers beside the encoder need labelled images, but these {shape.samples} carry {found}.",
                where="method.classifiers",
                fix="set it to false, which changes nothing for the encoder; or pass --data a folder with one "
                "sub-folder for each class, or a labelled set such as cifar10",
            )
        return iter(())

    def _check_views(self, shape: RunShape) -> None:
        wanted = 2 if self.across_views else 1
        sizes = sorted(set(shape.sizes), reverse=True)
        if shape.views != wanted or len(sizes) > 1:
            of = f" of {' and '.join(map(str, sizes))} pixels" if sizes else ""
            what = "AMDIM takes two views of one size" if self.across_views else "Local DIM takes one view"
            raise InputError(
                f"{what}, but an image has {shape.views}{of}.",
                where="views.count",
                fix="use views.preset amdim-32, amdim-64 or amdim-128"
                + ("" if self.across_views else ", and views.count [1]"),
            )
        if not self.across_views and "5to5" in self.costs:
            raise InputError(
                "Within one view the cost 5to5 asks for a feature that is given.",
                where="method.costs",
                fix="leave it out (Local DIM is [1to7]), or set method.across_views to true",
            )
