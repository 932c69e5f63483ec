"""Second half of a view: apply decided parameters to one image (in a data worker).

Colour operations keep Pillow's definitions, through which the reference pipelines go: each works on
8-bit values and ends in 8 bits. Against Pillow on real images: bilinear resizing, brightness, contrast,
saturation, grayscale and Pillow's blur within 1 level; hue within 12 (0.25 on average), since Pillow rounds
hue and saturation to 8 bits and OpenCV rounds them otherwise; bicubic resizing within 2 of Pillow 10, while
Pillow 13 orders its two passes otherwise and so cuts overshoots off elsewhere: a few values in a thousand
differ by more.
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import cv2
import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.nn import functional as F
from torchvision.transforms import functional as pillow_ops

from .params import ViewParams, ViewPlan

__all__ = [
    "apply_view",
    "blur",
    "box_kernel",
    "box_shape",
    "cut",
    "jitter",
    "normalize",
    "resize_and_center",
    "translate_reflect",
]

_CACHED = 2**19  # floats


def apply_view(pixels: np.ndarray, view: ViewParams, plan: ViewPlan, shrink: int = 1) -> np.ndarray:
    """Make one view of an image: uint8, size x size x C.

    Args:
        pixels: uint8, H x W x C.
        view: what was drawn; colours other than brightness and contrast need C = 3.
        plan: what the views of a plan have in common.
        shrink: ``pixels`` was decoded so many times smaller than the image that ``view`` speaks of.
    """
    image = cut(pixels, view, plan, shrink)
    if view.gray and plan.gray_first:
        image = _gray3(image)
    image = jitter(image, view, plan)
    if view.gray and not plan.gray_first:  # one channel is blurred in a third of the time
        return cv2.cvtColor(blur(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), view, plan), cv2.COLOR_GRAY2RGB)
    return blur(image, view, plan)


def cut(pixels: np.ndarray, view: ViewParams, plan: ViewPlan, shrink: int = 1) -> np.ndarray:
    """The geometry of a view: crop, resize (antialiased), mirror, move."""
    top, left = round(view.top / shrink), round(view.left / shrink)
    bottom = max(top + 1, round((view.top + view.height) / shrink))
    right = max(left + 1, round((view.left + view.width) / shrink))
    # Crop first: a filter that saw pixels outside the box would be another transform.
    box = pixels[top:bottom, left:right].copy()
    size = view.size
    if box.shape[:2] != (size, size):
        # The strides of channels-last memory, the batch's too, are what opens torch's vectorised path.
        batch = torch.from_numpy(box).unsqueeze(0).permute(0, 3, 1, 2)
        resized = F.interpolate(batch, (size, size), mode=plan.interpolation, antialias=True)
        box = np.ascontiguousarray(resized.numpy()[0].transpose(1, 2, 0))
    if view.flip:
        box = _with_channels(cv2.flip(box, 1))
    return translate_reflect(box, *view.shift) if view.shift != (0, 0) else box


def translate_reflect(image: np.ndarray, right: int, down: int) -> np.ndarray:
    """Move the content; the uncovered band is a reflection without the edge pixel (AMDIM, ``datasets.py``)."""
    height, width = image.shape[:2]
    band = max(abs(right), abs(down))
    padded = np.pad(image, ((band, band), (band, band), (0, 0)), mode="reflect")
    return np.ascontiguousarray(
        padded[band - down : band - down + height, band - right : band - right + width]
    )


def jitter(image: np.ndarray, view: ViewParams, plan: ViewPlan) -> np.ndarray:
    """Brightness, contrast, saturation and hue in the drawn order: uint8 to uint8."""
    if view.jitter is not None:
        for which in view.jitter_order:
            if plan.jitter[which]:
                image = _JITTERS[which](image, view.jitter[which])
    return image


def _with_channels(image: np.ndarray) -> np.ndarray:
    return image if image.ndim == 3 else image[:, :, None]  # OpenCV drops a single channel's axis


def _gray3(image: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


# Pillow cuts fractions off where OpenCV rounds: the offset turns one into the other.
_CUT = -0.4999
_GRAY = (0.299, 0.587, 0.114)


def _linear(image: np.ndarray, factor: float, offset: float = 0.0) -> np.ndarray:
    offset += _CUT
    if image.shape[2] != 3:
        flat = cv2.transform(image.reshape(len(image), -1), np.array([[factor, offset]]))
        return flat.reshape(image.shape)
    matrix = np.zeros((3, 4))
    matrix[0, 0] = matrix[1, 1] = matrix[2, 2] = factor
    matrix[:, 3] = offset
    return cv2.transform(image, matrix)


def _brightness(image: np.ndarray, factor: float) -> np.ndarray:
    return _linear(image, factor)


def _contrast(image: np.ndarray, factor: float) -> np.ndarray:
    if image.shape[2] == 3:
        mean = sum(map(operator.mul, _GRAY, cv2.mean(image)))
    else:
        mean = cv2.mean(image.reshape(len(image), -1))[0]
    return _linear(image, factor, (1.0 - factor) * int(mean + 0.5))


def _saturation(image: np.ndarray, factor: float) -> np.ndarray:
    # Pillow rounds the gray value first: a value in eight differs by 1 level, in a third of the time.
    red, green, blue = ((1.0 - factor) * share for share in _GRAY)
    rows = [
        [red + factor, green, blue, _CUT],
        [red, green + factor, blue, _CUT],
        [red, green, blue + factor, _CUT],
    ]
    return cv2.transform(image, np.array(rows))


def _hue(image: np.ndarray, turns: float) -> np.ndarray:
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    step = np.zeros((image.shape[1], 3), dtype=np.uint8)
    step[:, 0] = int(turns * 255) % 256  # Pillow's step; the sum wraps around
    rows = hsv.reshape(len(hsv), -1)  # whole rows: adding to every third byte would not be vectorised
    np.add(rows, step.reshape(-1), out=rows)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


_JITTERS = (_brightness, _contrast, _saturation, _hue)


def blur(image: np.ndarray, view: ViewParams, plan: ViewPlan) -> np.ndarray:
    """Blur by the drawn radius, Pillow's way or by a true Gaussian (OpenCV's, edges mirrored).

    uint8, H x W or H x W x C.
    """
    if view.blur_radius is None:
        return image
    if plan.blur == "gaussian":
        kernel = (plan.blur_kernel, plan.blur_kernel)
        return cv2.GaussianBlur(image, kernel, view.blur_radius).reshape(image.shape)
    if view.blur_radius == round(view.blur_radius, 3):
        return _pillow_blur(image, view.blur_radius)
    return _box_blur(image, view.blur_radius)


def _pillow_blur(image: np.ndarray, radius: float) -> np.ndarray:
    # The taps of a round radius, such as 1, are simple fractions: often a sum lies half-way between two levels, and
    # nothing but Pillow's own arithmetic tells which one it takes. Radii that are drawn are never round.
    if image.ndim == 3 and image.shape[2] != 3:
        return np.stack([_pillow_blur(channel, radius) for channel in image.transpose(2, 0, 1)], axis=2)
    return np.array(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)))


_HALF = np.array([0.5], dtype=np.float32)


def _box_blur(image: np.ndarray, radius: float) -> np.ndarray:
    # Pass by pass, as Pillow does: each one rounds and repeats the edge of what the last one made. The last pass over
    # rows and the first over columns are one here, which saves a rounding: a value in nine differs by 1 level.
    kernel = box_kernel(radius)
    out = image
    for _ in range(2):
        out = cv2.filter2D(out, -1, kernel[None], borderType=cv2.BORDER_REPLICATE)
    out = cv2.sepFilter2D(out, -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE)
    # Columns have a faster filter. Twice a half: OpenCV rounds the taps of one whose sum is 1 to 8 bits.
    kernel *= 2
    for _ in range(2):
        out = cv2.sepFilter2D(out, -1, _HALF, kernel, borderType=cv2.BORDER_REPLICATE)
    return out.reshape(image.shape)  # OpenCV drops the axis of a single channel


_Radius = TypeVar("_Radius", float, np.ndarray)


def box_shape(radius: _Radius) -> tuple[_Radius, _Radius]:
    """Of one radius or of many: how many whole taps a box has on each side of its middle, and its last taps' share.

    Its variance is a third of ``radius`` squared (Pillow, ``BoxBlur.c``: Gwosdek et al.'s extended box).
    """
    variance = radius * radius / 3
    whole = ((12 * variance + 1) ** 0.5 - 1) // 2
    edge = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    return whole, edge


def box_kernel(radius: float) -> np.ndarray:
    """The box with fractional ends that Pillow's Gaussian blur applies three times: float32, odd length.

    See ``box_shape``.
    """
    whole, edge = box_shape(radius)
    inner = 2 * int(whole) + 1
    total = inner + 2 * edge
    return np.array([edge / total, *[1 / total] * inner, edge / total], dtype=np.float32)


def resize_and_center(
    pixels: np.ndarray, resize: int, crop: int, interpolation: str = "bilinear"
) -> np.ndarray:
    """The test transform: shorter side to ``resize``, central ``crop`` x ``crop``; uint8, H x W x C.

    Pillow does it, as in the reference evaluations; more channels than it knows go through torch.
    """
    mode = pillow_ops.InterpolationMode(interpolation)
    channels = pixels.shape[2]
    image: Any
    if channels in (1, 3):
        image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    else:
        image = torch.from_numpy(pixels).permute(2, 0, 1)
    image = pillow_ops.resize(image, [resize], interpolation=mode, antialias=True)
    image = pillow_ops.center_crop(image, [crop])
    if channels in (1, 3):
        return np.asarray(image).reshape(crop, crop, channels)
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def normalize(images: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """From levels 0..255 (N, C, H, W) to float32, scaled to 0..1 and normalised per channel.

    Runs on the device of ``images`` and keeps their memory order.
    """
    scale = torch.tensor([1 / (255 * s) for s in std], dtype=torch.float32, device=images.device)
    offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float32)
    offset = offset.to(images.device)
    if images.is_contiguous(memory_format=torch.channels_last) and images.shape[1] > 1:
        # Whole pixel rows at a time: a channel axis of three is too short to be vectorised.
        n, c, h, w = images.shape
        rows = images.permute(0, 2, 3, 1).reshape(n * h, w * c)
        offset, scale = offset.repeat(w), scale.repeat(w)
        out = torch.empty(rows.shape, device=rows.device)
        # On a CPU piece by piece, so that the intermediate stays in the processor's cache.
        piece = max(1, _CACHED // (w * c)) if rows.device.type == "cpu" else max(1, n * h)
        for source, target in zip(rows.split(piece), out.split(piece), strict=True):
            torch.addcmul(offset, source.float(), scale, out=target)
        return out.view(n, h, w, c).permute(0, 3, 1, 2)
    shape = (1, -1, 1, 1)
    return torch.addcmul(offset.view(shape), images.float(), scale.view(shape))
