"""What training and test see of an image: one size, drawn from a list by key, and a flip.

Source: detectron2 ``data/transforms/augmentation_impl.py`` (``ResizeShortestEdge``, ``RandomFlip``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from zoo.keyed import keyed_key, keyed_uniforms

__all__ = ["draw_view", "flip_boxes", "flip_mask", "output_size", "resize", "scale_mask"]


def output_size(height: int, width: int, short: int, most: int) -> tuple[int, int]:
    """The (height, width) that has the shorter side ``short`` and no side above ``most``; at least a pixel each."""
    scale = short / min(height, width)
    new = [short, scale * width] if height < width else [scale * height, short]
    if max(new) > most:
        shrink = most / max(new)
        new = [side * shrink for side in new]
    return max(1, int(new[0] + 0.5)), max(1, int(new[1] + 0.5))


def resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 (H, W, 3) to another (height, width): bilinear, averaging where it shrinks."""
    if pixels.shape[:2] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BILINEAR))


def draw_view(seed: int, epoch: int, sample: int, sizes: Sequence[int]) -> tuple[int, bool]:
    """The shorter side and the flip of a sample in an epoch."""
    first, second = keyed_uniforms(keyed_key(seed, "detect view", epoch, sample), 2)
    return sizes[int(first * len(sizes))], bool(second < 0.5)


def flip_boxes(boxes: np.ndarray, width: float) -> np.ndarray:
    """Mirror boxes (N, 4) in an image of this width."""
    return np.stack((width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]), axis=1)


def scale_mask(mask: Any, old: tuple[int, int], new: tuple[int, int]) -> Any:
    """Polygons or a bitmap of an image of one (height, width) in another."""
    if isinstance(mask, list):
        factor = np.array([new[1] / old[1], new[0] / old[0]])
        return [(np.asarray(p, dtype=np.float64).reshape(-1, 2) * factor).ravel() for p in mask]
    picture = Image.fromarray(np.asarray(mask, dtype=np.uint8))
    return np.asarray(picture.resize((new[1], new[0]), Image.Resampling.NEAREST))


def flip_mask(mask: Any, width: int) -> Any:
    """Mirror polygons or a bitmap in an image of this width."""
    if isinstance(mask, list):
        turned = [np.asarray(p, dtype=np.float64).reshape(-1, 2) * [-1.0, 1.0] + [width, 0.0] for p in mask]
        return [p.ravel() for p in turned]
    return np.ascontiguousarray(np.asarray(mask)[:, ::-1])
