"""Second half of a view: apply decided parameters to one image (in a data worker)."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageFilter
from torchvision.transforms import functional as F

from .params import ViewParams

__all__ = ["apply_view", "normalize", "resize_and_center"]

_JITTERS = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def apply_view(image: Image.Image, view: ViewParams) -> np.ndarray:
    """Make one view of an RGB image: uint8, size x size x 3."""
    box = (view.left, view.top, view.left + view.width, view.top + view.height)
    # Crop first: resizing with a box would let the filter see pixels outside it.
    out = image.crop(box).resize((view.size, view.size), Image.Resampling.BILINEAR)
    if view.flip:
        out = out.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if view.jitter is not None:
        for which in view.jitter_order:
            out = _JITTERS[which](out, view.jitter[which])
    if view.gray:
        out = F.rgb_to_grayscale(out, num_output_channels=3)
    if view.blur_radius is not None:
        out = out.filter(ImageFilter.GaussianBlur(view.blur_radius))
    return np.asarray(out)


def resize_and_center(image: Image.Image, resize: int, crop: int) -> np.ndarray:
    """The test transform: shorter side to ``resize``, central ``crop`` x ``crop``; uint8, H x W x 3."""
    resized = F.resize(image, [resize], interpolation=F.InterpolationMode.BILINEAR)
    return np.asarray(F.center_crop(resized, [crop]))


def normalize(
    images: torch.Tensor, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> torch.Tensor:
    """From uint8 (N, 3, H, W) to float32, scaled to 0..1 and normalised per channel, on its own device."""
    shape = (1, 3, 1, 1)
    center = torch.tensor(mean, device=images.device).view(shape)
    spread = torch.tensor(std, device=images.device).view(shape)
    return images.float().div_(255.0).sub_(center).div_(spread)
