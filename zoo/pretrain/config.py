"""A recipe: everything that decides how a backbone is trained. No torch here."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
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

from ..data.decoding import PLAIN, Decoding
from ..data.views.params import CropSpec, ViewPlan
from .methods import METHODS
from .methods.config_base import MethodConfig, Strict

__all__ = ["Recipe"]

Level = Annotated[int, Field(ge=0, le=255)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class TrunkConfig(Strict):
    """The network that is trained (``zoo.models.factory.create_trunk``).

    ``arch``: a ResNet, ``amdim``, ``timm:NAME`` or the user's own ``MODULE:FUNCTION``. ``options``: of
    ``amdim``, or keyword arguments of timm's network or of the function.
    """

    arch: str = "resnet50"
    stem: Literal["imagenet", "medium", "small"] = "imagenet"
    base_planes: PositiveInt | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("options")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            return dict(json.loads(json.dumps(value, allow_nan=False)))  # as a run and a model will keep them
        except (TypeError, ValueError) as error:
            raise ValueError(f"options are plain values, as in JSON ({error})") from None


class ViewsConfig(Strict):
    """Multi-crop: four lists of one length, an entry for each kind of crop (A.2), and the distortions.

    What each key means stands in ``zoo.data.views.params.ViewPlan``. ``preset`` names where the values
    started from (``zoo views --list``); keys that are given as well win.
    """

    preset: str | None = None
    count: tuple[PositiveInt, ...] = (2, 6)
    size: tuple[PositiveInt, ...] = (224, 96)
    min_scale: tuple[PositiveFloat, ...] = (0.14, 0.05)
    max_scale: tuple[PositiveFloat, ...] = (1.0, 0.14)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    translate: int = Field(default=0, ge=0)
    translate_p: float = Field(default=1.0, ge=0, le=1)
    flip_p: float = Field(default=0.5, ge=0, le=1)
    shared_flip: bool = False
    jitter: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, float] = (0.8, 0.8, 0.8, 0.2)
    jitter_p: float = Field(default=0.8, ge=0, le=1)
    gray_p: float = Field(default=0.2, ge=0, le=1)
    gray_first: bool = False
    blur_p: float = Field(default=0.5, ge=0, le=1)
    blur_radius: tuple[NonNegativeFloat, NonNegativeFloat] = (0.1, 2.0)
    blur: Literal["pil", "gaussian"] = "pil"
    blur_kernel: PositiveInt = Field(default=23, le=1001)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[PositiveFloat, ...] = (0.228, 0.224, 0.225)

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
        if self.blur_kernel % 2 == 0:
            raise ValueError(f"blur_kernel counts taps around a middle one: odd, not {self.blur_kernel}")
        if self.blur_radius[1] > max(self.size):  # nothing is left but the mean, after minutes of summing
            raise ValueError(f"blur_radius reaches beyond views of {max(self.size)} pixels")
        if self.translate and 2 * self.translate >= min(self.size):
            raise ValueError(f"translate ({self.translate}) moves half of the view or more out of it")
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
        shared = [field.name for field in fields(ViewPlan) if field.name != "crops"]
        return ViewPlan(tuple(crops), **{name: getattr(self, name) for name in shared})

    @classmethod
    def keys_of(cls, plan: ViewPlan) -> dict[str, Any]:
        """The keys that ``plan`` would come from: the inverse of ``plan()``."""
        kinds = [(crop, len(list(run))) for crop, run in itertools.groupby(plan.crops)]
        keys: dict[str, Any] = {
            "count": [count for _, count in kinds],
            "size": [crop.size for crop, _ in kinds],
            "min_scale": [crop.min_scale for crop, _ in kinds],
            "max_scale": [crop.max_scale for crop, _ in kinds],
        }
        rest = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "crops"}
        return keys | {key: list(v) if isinstance(v, tuple) else v for key, v in rest.items()}


class EvaluationConfig(Strict):
    """How test images are brought to the trunk: shorter side to ``resize``, central ``crop``; in pixels."""

    resize: PositiveInt = 256
    crop: PositiveInt = 224
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    @model_validator(mode="after")
    def _crop_fits(self) -> EvaluationConfig:
        if self.crop > self.resize:
            raise ValueError(f"the crop ({self.crop}) is larger than the resized image ({self.resize})")
        return self


class OptimizerConfig(Strict):
    """``exclude_one_dimensional`` keeps biases and norms from weight decay and layer-wise adaptation.

    ``adam`` adds ``weight_decay`` times the weights to their gradients, ``adamw`` takes it off the weights.
    """

    name: Literal["lars", "sgd", "adam", "adamw"] = "lars"
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 1e-6
    momentum: Momentum = 0.9
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    trust: PositiveFloat = 0.001
    exclude_one_dimensional: bool = False


class ScheduleConfig(Strict):
    """Linear warm-up from ``start_lr`` to the optimizer's rate, then ``cosine`` to ``final_lr``, or ``step``.

    The warm-up takes ``warmup_epochs``, or ``warmup_steps`` whatever the length of an epoch and of the run.
    ``step``: the rate is multiplied by ``drop`` at each epoch of ``drop_at``. ``per``: whether warm-up and
    cosine move at each step, or at each epoch and stay within it.
    """

    name: Literal["cosine", "step"] = "cosine"
    per: Literal["step", "epoch"] = "step"
    warmup_epochs: NonNegativeFloat = Field(default=0.0, le=1e6)
    warmup_steps: PositiveInt | None = None
    start_lr: NonNegativeFloat = 0.0
    final_lr: NonNegativeFloat = 0.0
    drop_at: tuple[PositiveInt, ...] = ()
    drop: PositiveFloat = 0.1

    @model_validator(mode="after")
    def _drops_belong_to_steps(self) -> ScheduleConfig:
        if self.name == "cosine" and self.drop_at:
            raise ValueError("drop_at belongs to schedule.name step, a cosine has no drops")
        return self

    @model_validator(mode="after")
    def _one_warm_up(self) -> ScheduleConfig:
        if self.warmup_steps and (self.warmup_epochs or self.per == "epoch"):
            raise ValueError("warmup_steps counts steps: leave warmup_epochs at 0 and per at step")
        return self


class DataConfig(Strict):
    """Where images come from and how they are read (``zoo.data.decode.Decoding``).

    ``workers`` null: decided on the machine. ``augment_on``: where colours and blur are computed.
    ``scaled_decoding``: large JPEGs are decoded at half, a quarter or an eighth of their size where every
    crop allows it. ``class_index``: a file that numbers the class folders (``zoo.data.class_index``).
    """

    sources: tuple[str, ...] = ()
    class_index: str | None = None
    on_error: Literal["error", "skip"] = "error"
    workers: int | None = Field(default=None, ge=0)
    augment_on: Literal["auto", "worker", "device"] = "auto"
    scaled_decoding: bool = True
    channels: PositiveInt = 3
    orientation: Literal["exif", "stored"] = "exif"
    background: tuple[Level, Level, Level] = (255, 255, 255)
    max_pixels: PositiveInt = PLAIN.max_pixels
    max_bytes: PositiveInt = PLAIN.max_bytes
    max_text_bytes: PositiveInt = PLAIN.max_text_bytes

    def decoding(self) -> Decoding:
        """The same as the data layer wants it."""
        names = (field.name for field in fields(Decoding))
        return Decoding(**{name: getattr(self, name) for name in names})


class CheckpointConfig(Strict):
    """When state is saved (also at the end and when the run is stopped), and how many stay.

    The newest ``keep`` stay, and those of every ``keep_every_epochs``. ``copy_to``: a folder or any fsspec
    address (s3://bucket/run) that gets a copy of each.
    """

    every_epochs: PositiveInt | None = 1
    every_steps: PositiveInt | None = None
    keep: PositiveInt = 2
    keep_every_epochs: PositiveInt | None = None
    copy_to: str | None = None


class EngineConfig(Strict):
    """How steps are computed.

    ``accumulate``: parts that each process trains its share of the batch in, one after the other, for less
    memory; codes are those of the whole batch. ``activation_checkpointing``: activations inside a stage are
    computed twice instead of kept. ``compile``: the trunk goes through torch.compile. ``ema_decay``:
    a running average of the weights is kept and published. ``sync_batchnorm``: BatchNorm sees the batch
    of all processes, or of groups of ``batchnorm_group`` of them. ``views_apart``: each view goes through the
    trunk on its own, so that BatchNorm sees one view of every image at a time; else all views of one size go
    through it together, as in the reference.
    """

    accumulate: PositiveInt = 1
    activation_checkpointing: bool = False
    compile: bool = False
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    sync_batchnorm: bool = True
    batchnorm_group: PositiveInt | None = None
    views_apart: bool = False

    @model_validator(mode="after")
    def _compiled_or_computed_twice(self) -> EngineConfig:
        if self.compile and self.activation_checkpointing:
            raise ValueError(
                "torch.compile takes no blocks that are computed twice, and saves some memory by itself: leave out "
                "compile or activation_checkpointing"
            )
        return self


class HealthConfig(Strict):
    """The doctor (``zoo.pretrain.health``): looks at a step out of ``every``; 0: never.

    ``stop_on_collapse``: what it finds ends the run, saved.
    """

    every: int = Field(default=10, ge=0)
    stop_on_collapse: bool = False

    @model_validator(mode="after")
    def _can_stop(self) -> HealthConfig:
        if self.stop_on_collapse and not self.every:
            raise ValueError("stop_on_collapse needs a doctor who looks: set every above 0")
        return self


class ProbeConfig(Strict):
    """Classifiers on labelled images while the run trains, which learns nothing from them; off without ``data``.

    ``data``: a folder that holds ``train`` and ``val``, or a name such as ``builtin:photos``; or two sources,
    training images first. ``knn`` and ``linear``: which classifiers.
    """

    data: tuple[str, ...] = Field(default=(), max_length=2)
    every_epochs: PositiveInt = 1
    knn: bool = True
    linear: bool = True

    @field_validator("data", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else [] if value is None else value


class Recipe(Strict):
    """A whole recipe. ``batch_size`` is over all processes; learning rates are used as they stand.

    ``samples``, where given, is how many images the run sees, instead of ``epochs`` passes; its schedule is as
    long, and an epoch is still one pass.
    """

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
    samples: PositiveInt | None = None
    batch_size: int
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()
    health: HealthConfig = HealthConfig()
    probe: ProbeConfig = ProbeConfig()

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        """A run's folder is called after it, below ``runs``."""
        if not value.strip() or "/" in value or "\0" in value:
            raise ValueError("a run's folder gets this name: it can't be empty or have a / in it")
        return value

    @field_validator("samples", mode="before")
    @classmethod
    def _in_words(cls, value: Any) -> Any:
        """1e9, which YAML takes for a word."""
        try:
            number = float(value)
            return int(number) if isinstance(value, str | float) and number.is_integer() else value
        except (TypeError, ValueError):
            return value

    @field_validator("batch_size")
    @classmethod
    def _several_images(cls, value: int) -> int:
        if value < 2:
            raise ValueError("BatchNorm and the losses need a batch of two images or more")
        return value

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if "name" not in value:
                raise ValueError("a method needs a name, such as `name: swav`")
            return METHODS.config(str(value["name"])).model_validate(value)
        return value

    @model_validator(mode="after")
    def _at_least_a_step(self) -> Recipe:
        if self.samples is not None and self.samples < self.batch_size:
            raise ValueError(f"samples ({self.samples}) are fewer than one batch ({self.batch_size})")
        return self

    @model_validator(mode="after")
    def _channels_agree(self) -> Recipe:
        channels, views = self.data.channels, self.views
        for key in ("mean", "std"):
            count = len(getattr(views, key))
            if count != channels:
                raise ValueError(
                    f"views.{key} has {count} numbers for images of {channels} channels (data.channels)"
                )
        if channels != 3 and (views.gray_p or (views.jitter_p and any(views.jitter[2:]))):
            raise ValueError(
                "images without three colours have no saturation, hue or grayscale: set views.gray_p to 0 and "
                "the last two numbers of views.jitter to 0"
            )
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run."""
        return self.epochs * steps_per_epoch if self.samples is None else self.samples // self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON."""
        return self.model_dump(mode="json", by_alias=True)
