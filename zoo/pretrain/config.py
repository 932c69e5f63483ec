"""A recipe: everything that decides how a backbone is trained. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from ..data.views.params import CropSpec, ViewPlan
from .methods import METHODS
from .methods.config_base import MethodConfig, Strict

__all__ = ["Recipe"]

Triple = tuple[float, float, float]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class TrunkConfig(Strict):
    """The network that is trained (``zoo.models.factory``)."""

    arch: str = "resnet50"
    stem: Literal["imagenet", "medium", "small"] = "imagenet"
    base_planes: PositiveInt | None = None


class ViewsConfig(Strict):
    """Multi-crop: four lists of one length, an entry for each kind of crop (A.2), and the distortions."""

    count: tuple[PositiveInt, ...] = (2, 6)
    size: tuple[PositiveInt, ...] = (224, 96)
    min_scale: tuple[PositiveFloat, ...] = (0.14, 0.05)
    max_scale: tuple[PositiveFloat, ...] = (1.0, 0.14)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    flip_p: float = Field(default=0.5, ge=0, le=1)
    jitter: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, float] = (0.8, 0.8, 0.8, 0.2)
    jitter_p: float = Field(default=0.8, ge=0, le=1)
    gray_p: float = Field(default=0.2, ge=0, le=1)
    blur_p: float = Field(default=0.5, ge=0, le=1)
    blur_radius: tuple[NonNegativeFloat, NonNegativeFloat] = (0.1, 2.0)
    mean: Triple = (0.485, 0.456, 0.406)
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.228, 0.224, 0.225)

    @model_validator(mode="after")
    def _equal_lengths(self) -> ViewsConfig:
        lists = {name: getattr(self, name) for name in ("count", "size", "min_scale", "max_scale")}
        lengths = [len(values) for values in lists.values()]
        usual = max(set(lengths), key=lengths.count)
        odd = [f"{name} has {len(values)}" for name, values in lists.items() if len(values) != usual]
        if odd:
            raise ValueError(f"the crop lists must be equally long: {', '.join(odd)}, the others {usual}")
        for size, low, high in zip(self.size, self.min_scale, self.max_scale, strict=True):
            if not low <= high <= 1.0:
                raise ValueError(f"crops of {size} pixels: scales must satisfy min {low} <= max {high} <= 1")
        for label, (low, high) in (("ratio", self.ratio), ("blur_radius", self.blur_radius)):
            if low > high:
                raise ValueError(f"{label} runs from the smaller to the larger value, not ({low}, {high})")
        if not 0 <= self.jitter[3] <= 0.5:
            raise ValueError(f"jitter: the hue's strength must lie in 0..0.5, not {self.jitter[3]}")
        return self

    def plan(self) -> ViewPlan:
        """The same as the data layer wants it: one crop spec for each view."""
        crops = [
            CropSpec(size, low, high)
            for n, size, low, high in zip(self.count, self.size, self.min_scale, self.max_scale, strict=True)
            for _ in range(n)
        ]
        shared = ("ratio", "flip_p", "jitter", "jitter_p", "gray_p", "blur_p", "blur_radius", "mean", "std")
        return ViewPlan(tuple(crops), **{name: getattr(self, name) for name in shared})


class EvaluationConfig(Strict):
    """How test images are brought to the trunk: shorter side to ``resize``, central ``crop``; in pixels."""

    resize: PositiveInt = 256
    crop: PositiveInt = 224

    @model_validator(mode="after")
    def _crop_fits(self) -> EvaluationConfig:
        if self.crop > self.resize:
            raise ValueError(f"the crop ({self.crop}) is larger than the resized image ({self.resize})")
        return self


class OptimizerConfig(Strict):
    """``exclude_one_dimensional`` keeps biases and norms from weight decay and layer-wise adaptation."""

    name: Literal["lars", "sgd", "adamw"] = "lars"
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 1e-6
    momentum: Momentum = 0.9
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    trust: PositiveFloat = 0.001
    exclude_one_dimensional: bool = False


class ScheduleConfig(Strict):
    """Linear warm-up from ``start_lr`` to the optimizer's rate, cosine to ``final_lr``, step by step."""

    warmup_epochs: NonNegativeFloat = 0.0
    start_lr: NonNegativeFloat = 0.0
    final_lr: NonNegativeFloat = 0.0


class DataConfig(Strict):
    """Where images come from; ``workers`` null: decided on the machine."""

    sources: tuple[str, ...] = ()
    on_error: Literal["error", "skip"] = "error"
    workers: int | None = Field(default=None, ge=0)


class CheckpointConfig(Strict):
    """When state is saved (also at the end and when the run is stopped), and how many stay."""

    every_epochs: PositiveInt | None = 1
    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2


class Recipe(Strict):
    """A whole recipe. ``batch_size`` is over all processes; learning rates are used as they stand."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str
    summary: str = ""
    method: SerializeAsAny[MethodConfig]
    trunk: TrunkConfig = TrunkConfig()
    views: ViewsConfig = ViewsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    epochs: PositiveInt
    batch_size: int = Field(ge=2)
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if "name" not in value:
                raise ValueError("a method needs a name, such as `name: swav`")
            return METHODS.config(str(value["name"])).model_validate(value)
        return value

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON."""
        return self.model_dump(mode="json", by_alias=True)
