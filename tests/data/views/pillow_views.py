"""Views by the libraries that the reference pipelines use, one operation after the other."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
from PIL import Image, ImageFilter
from torchvision.transforms import functional as F

from zoo.data.views.params import ViewParams, ViewPlan

__all__ = ["ADJUST", "differences", "only", "pillow_view", "plain_view"]

ADJUST = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def plain_view(image: np.ndarray, **changes: object) -> ViewParams:
    """The whole image at its own size, unchanged but for ``changes``."""
    height, width = image.shape[:2]
    view = ViewParams(0, 0, height, width, width, False, None, (0, 1, 2, 3), False, None)
    return replace(view, **changes)


def only(which: int, value: float) -> tuple[float, ...]:
    """Factors, or strengths for a plan, of one kind of jitter."""
    return tuple(value if i == which else 0.0 for i in range(4))


def pillow_view(image: np.ndarray, view: ViewParams, plan: ViewPlan) -> np.ndarray:
    """What torchvision's functions on Pillow images make of the same parameters."""
    out = F.resized_crop(
        Image.fromarray(image),
        view.top,
        view.left,
        view.height,
        view.width,
        [view.size, view.size],
        F.InterpolationMode(plan.interpolation),
    )
    if view.flip:
        out = F.hflip(out)
    if view.shift != (0, 0):
        # Torch's reflection leaves the edge pixel out, as AMDIM's does.
        band = max(map(abs, view.shift))
        right, down = view.shift
        out = F.crop(
            F.pad(out, [band], padding_mode="reflect"), band - down, band - right, view.size, view.size
        )
    if view.gray and plan.gray_first:
        out = F.rgb_to_grayscale(out, 3)
    if view.jitter is not None:
        for which in (kind for kind in view.jitter_order if plan.jitter[kind]):
            out = ADJUST[which](out, view.jitter[which])
    if view.gray and not plan.gray_first:
        out = F.rgb_to_grayscale(out, 3)
    if view.blur_radius is not None and plan.blur == "pil":
        out = out.filter(ImageFilter.GaussianBlur(view.blur_radius))
    elif view.blur_radius is not None:
        out = cv2.GaussianBlur(np.asarray(out), (plan.blur_kernel,) * 2, view.blur_radius)
    return np.asarray(out)


def differences(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Largest and mean absolute difference, in levels, over all pairs."""
    all_ = np.concatenate([np.abs(np.subtract(a, b, dtype=np.float64)).ravel() for a, b in pairs])
    return float(all_.max()), float(all_.mean())
