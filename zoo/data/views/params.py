"""First half of a view: its parameters, drawn as a pure function of uniform numbers.

The distributions are those of the reference pipelines: RandomResizedCrop or AMDIM's small translation,
flip, colour jitter in random order, grayscale, blur.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "DRAWS_PER_VIEW",
    "ORDERS",
    "CropSpec",
    "ViewParams",
    "ViewPlan",
    "draw_view",
    "draw_views",
    "shrink_for",
]

_CROP_ATTEMPTS = 10
ORDERS = tuple(itertools.permutations(range(4)))
"""The orders in which brightness (0), contrast (1), saturation (2) and hue (3) can be changed."""

# Each view owns a fixed row of uniforms, so that no draw shifts another one.
_CROP_AT = 0  # per attempt: area, aspect; or the translation's decision, columns and rows
_POSITION_AT = 2 * _CROP_ATTEMPTS  # top, left
_FLIP_AT = _POSITION_AT + 2
_JITTER_AT = _FLIP_AT + 1  # decision, order, brightness, contrast, saturation, hue
_GRAY_AT = _JITTER_AT + 6
_BLUR_AT = _GRAY_AT + 1  # decision, radius
DRAWS_PER_VIEW = _BLUR_AT + 2


@dataclass(frozen=True)
class CropSpec:
    """One view's crop: the side in pixels that it is resized to, and its share of the image's area."""

    size: int
    min_scale: float
    max_scale: float


@dataclass(frozen=True)
class ViewPlan:
    """How all views of one image are made.

    Args:
        crops: one spec a view.
        ratio: width / height of a crop, drawn log-uniformly.
        interpolation: ``bilinear`` or ``bicubic``, both with antialiasing.
        translate: instead of a crop, the whole image moved by up to so many pixels each way (0: crops).
        translate_p: how often it is moved.
        flip_p: how often a view is mirrored.
        shared_flip: all views of an image are mirrored, or none.
        jitter: strengths of brightness, contrast, saturation (a factor from [max(0, 1 - s), 1 + s]) and
            hue (a shift from [-h, h], in turns).
        jitter_p: how often colours are changed.
        gray_p: how often colours are dropped.
        gray_first: grayscale comes before the jitter (MoCo v1), not after it.
        blur_p: how often a view is blurred.
        blur_radius: standard deviation from this range, in pixels of the view.
        blur: ``pil`` (Pillow's three box filters) or ``gaussian`` (a true Gaussian).
        blur_kernel: taps of the true Gaussian, odd.
        mean: of values in 0..1, a number each channel.
        std: likewise.
    """

    crops: tuple[CropSpec, ...]
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    translate: int = 0
    translate_p: float = 1.0
    flip_p: float = 0.5
    shared_flip: bool = False
    jitter: tuple[float, float, float, float] = (0.8, 0.8, 0.8, 0.2)
    jitter_p: float = 0.8
    gray_p: float = 0.2
    gray_first: bool = False
    blur_p: float = 0.5
    blur_radius: tuple[float, float] = (0.1, 2.0)
    blur: str = "pil"
    blur_kernel: int = 23
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.228, 0.224, 0.225)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(size, count) of each run of consecutive views of one size: one trunk pass each."""
        runs = itertools.groupby(self.crops, key=lambda crop: crop.size)
        return tuple((size, len(list(run))) for size, run in runs)


@dataclass  # a frozen one takes ten times as long to make, and each image has eight
class ViewParams:
    """One view of one image, decided: a box in pixels, and what is done to it afterwards."""

    top: int
    left: int
    height: int
    width: int
    size: int
    flip: bool
    jitter: tuple[float, float, float, float] | None
    """Factors of brightness, contrast and saturation, and the shift of hue."""
    jitter_order: tuple[int, ...]
    gray: bool
    blur_radius: float | None
    shift: tuple[int, int] = (0, 0)
    """Pixels of the view by which its content is moved right and down."""


def draw_views(
    plan: ViewPlan, height: int, width: int, uniforms: Sequence[Sequence[float]]
) -> list[ViewParams]:
    """Decide all views of one image.

    Args:
        plan: the distributions.
        height: the image's height in pixels.
        width: the image's width in pixels.
        uniforms: for each view ``DRAWS_PER_VIEW`` uniform numbers from [0, 1).
    """
    first = uniforms[0]
    return [
        draw_view(plan, crop, height, width, u, flip_draw=(first if plan.shared_flip else u)[_FLIP_AT])
        for crop, u in zip(plan.crops, uniforms, strict=True)
    ]


def draw_view(
    plan: ViewPlan,
    crop: CropSpec,
    height: int,
    width: int,
    u: Sequence[float],
    flip_draw: float | None = None,
) -> ViewParams:
    """Decide one view; see ``draw_views``. ``flip_draw`` replaces the view's own number for the flip."""
    if plan.translate:
        top, left, h, w = 0, 0, height, width
        shift = _draw_shift(plan, u)
    else:
        top, left, h, w = _draw_box(crop, plan.ratio, height, width, u)
        shift = (0, 0)
    jitter = None
    order = ORDERS[0]
    if u[_JITTER_AT] < plan.jitter_p:
        order = ORDERS[int(u[_JITTER_AT + 1] * len(ORDERS))]
        brightness, contrast, saturation, hue = plan.jitter
        jitter = (
            _factor(brightness, u[_JITTER_AT + 2]),
            _factor(contrast, u[_JITTER_AT + 3]),
            _factor(saturation, u[_JITTER_AT + 4]),
            _between(-hue, hue, u[_JITTER_AT + 5]),
        )
    flip = (u[_FLIP_AT] if flip_draw is None else flip_draw) < plan.flip_p
    gray = u[_GRAY_AT] < plan.gray_p
    blur = _between(*plan.blur_radius, u[_BLUR_AT + 1]) if u[_BLUR_AT] < plan.blur_p else None
    return ViewParams(top, left, h, w, crop.size, flip, jitter, order, gray, blur, shift)


def shrink_for(views: Sequence[ViewParams]) -> int:
    """By how much (1, 2, 4, 8) an image may be decoded smaller: every crop keeps its output size."""
    room = min(min(view.height, view.width) / view.size for view in views)
    return next(shrink for shrink in (8, 4, 2, 1) if room >= shrink or shrink == 1)


def _factor(strength: float, u: float) -> float:
    return _between(max(0.0, 1.0 - strength), 1.0 + strength, u)


def _between(low: float, high: float, u: float) -> float:
    return low + (high - low) * u


def _draw_shift(plan: ViewPlan, u: Sequence[float]) -> tuple[int, int]:
    if u[_CROP_AT] >= plan.translate_p:
        return 0, 0
    right, down = (int(v * (2 * plan.translate + 1)) - plan.translate for v in u[_CROP_AT + 1 : _CROP_AT + 3])
    return right, down


def _draw_box(
    crop: CropSpec, ratio: tuple[float, float], height: int, width: int, u: Sequence[float]
) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params: ten attempts, then the largest central box."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(_CROP_ATTEMPTS):
        area = height * width * _between(crop.min_scale, crop.max_scale, u[_CROP_AT + 2 * attempt])
        aspect = math.exp(_between(low, high, u[_CROP_AT + 2 * attempt + 1]))
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(u[_POSITION_AT] * (height - h + 1))
            left = int(u[_POSITION_AT + 1] * (width - w + 1))
            return top, left, h, w
    h, w = height, width
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w
