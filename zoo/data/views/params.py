"""First half of a view: its parameters, drawn as a pure function of uniform numbers.

The distributions are those of SwAV's multi-crop (appendix A.2; ``src/multicropdataset.py``):
RandomResizedCrop, flip, colour jitter in random order, grayscale, blur.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DRAWS_PER_VIEW", "CropSpec", "ViewParams", "ViewPlan", "draw_view"]

_CROP_ATTEMPTS = 10
_ORDERS = tuple(itertools.permutations(range(4)))

# Each view owns a fixed row of uniforms, so that no draw shifts another one.
_CROP_AT = 0  # per attempt: area, aspect
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

    ``jitter`` holds the strengths of brightness, contrast, saturation (a factor from
    [max(0, 1 - s), 1 + s]) and hue (a shift from [-h, h], in turns); ``blur_radius`` is in pixels of
    the view. ``mean`` and ``std`` are of values in 0..1.
    """

    crops: tuple[CropSpec, ...]
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_p: float = 0.5
    jitter: tuple[float, float, float, float] = (0.8, 0.8, 0.8, 0.2)
    jitter_p: float = 0.8
    gray_p: float = 0.2
    blur_p: float = 0.5
    blur_radius: tuple[float, float] = (0.1, 2.0)
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.228, 0.224, 0.225)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(size, count) of each run of consecutive views of one size: one trunk pass each."""
        runs = itertools.groupby(self.crops, key=lambda crop: crop.size)
        return tuple((size, len(list(run))) for size, run in runs)


@dataclass(frozen=True)
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


def draw_view(plan: ViewPlan, crop: CropSpec, height: int, width: int, u: Sequence[float]) -> ViewParams:
    """Decide one view.

    Args:
        plan: the distributions.
        crop: which of the plan's crops.
        height: the image's height in pixels.
        width: the image's width in pixels.
        u: ``DRAWS_PER_VIEW`` uniform numbers from [0, 1).
    """
    top, left, h, w = _draw_box(crop, plan.ratio, height, width, u)
    jitter = None
    order = _ORDERS[0]
    if u[_JITTER_AT] < plan.jitter_p:
        order = _ORDERS[int(u[_JITTER_AT + 1] * len(_ORDERS))]
        values = u[_JITTER_AT + 2 : _JITTER_AT + 6]
        brightness, contrast, saturation = (
            _between(max(0.0, 1.0 - s), 1.0 + s, v) for s, v in zip(plan.jitter[:3], values[:3], strict=True)
        )
        jitter = (brightness, contrast, saturation, _between(-plan.jitter[3], plan.jitter[3], values[3]))
    blur = _between(*plan.blur_radius, u[_BLUR_AT + 1]) if u[_BLUR_AT] < plan.blur_p else None
    return ViewParams(
        top=top,
        left=left,
        height=h,
        width=w,
        size=crop.size,
        flip=u[_FLIP_AT] < plan.flip_p,
        jitter=jitter,
        jitter_order=order,
        gray=u[_GRAY_AT] < plan.gray_p,
        blur_radius=blur,
    )


def _between(low: float, high: float, u: float) -> float:
    return low + (high - low) * u


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
