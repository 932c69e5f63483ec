"""Colour and blur of a whole batch at once, on the device that trains.

The same operations as ``apply.py`` with the same 8-bit steps, each sample by its own parameters, without a
loop over samples. Against Pillow: brightness, contrast, saturation and grayscale exact; hue within 6 levels
(0.05 on average); blur within 3, since Pillow rounds after each of six passes and a matrix doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .apply import box_shape
from .params import ORDERS, ViewParams, ViewPlan

__all__ = ["ColorTable", "color_table", "recolor_batch"]


@dataclass
class ColorTable:
    """The colour parameters of N views, row by row; small, and always in the main memory.

    ``order`` is an index into ``ORDERS`` or -1 (no jitter), ``factors`` (N, 4), ``gray`` bool,
    ``blur`` the radius in pixels or 0.
    """

    order: np.ndarray
    factors: np.ndarray
    gray: np.ndarray
    blur: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    def rows_of(self, images: slice, count: int) -> ColorTable:
        """The rows of some of ``count`` images, where the table holds several views of each, view by view."""
        parts = (self.order, self.factors, self.gray, self.blur)
        return ColorTable(
            *(a.reshape(-1, count, *a.shape[1:])[:, images].reshape(-1, *a.shape[1:]) for a in parts)
        )


def color_table(views: Sequence[ViewParams]) -> ColorTable:
    """Collect what ``recolor_batch`` needs of N views."""
    return ColorTable(
        np.array([-1 if v.jitter is None else ORDERS.index(v.jitter_order) for v in views], dtype=np.int64),
        np.array([v.jitter or (1.0, 1.0, 1.0, 0.0) for v in views], dtype=np.float32),
        np.array([v.gray for v in views], dtype=bool),
        np.array([v.blur_radius or 0.0 for v in views], dtype=np.float64),
    )


@torch.no_grad()
def recolor_batch(images: torch.Tensor, table: ColorTable, plan: ViewPlan) -> torch.Tensor:
    """Jitter, grayscale and blur of N views.

    Args:
        images: uint8 (N, C, S, S), on any device; the memory order is kept.
        table: their parameters.
        plan: what the views have in common.

    Returns:
        float32 (N, C, S, S) of whole numbers 0..255 on the same device, also inside of autocast.
    """
    with torch.autocast(images.device.type, enabled=False):  # levels blurred in half precision would show
        return _recolored(images.float(), table, plan)


def _recolored(out: torch.Tensor, table: ColorTable, plan: ViewPlan) -> torch.Tensor:
    gray = np.flatnonzero(table.gray)
    if plan.gray_first:
        _on_rows(out, gray, _gray)
    orders = np.array([*ORDERS, (-1,) * 4])[table.order]  # (N, 4): which operation comes when
    for stage in range(4):
        for which, operation in enumerate(_JITTERS):
            rows = np.flatnonzero(orders[:, stage] == which)
            if plan.jitter[which] and len(rows):
                factors = torch.from_numpy(table.factors[rows, which]).to(out.device)
                _on_rows(out, rows, operation, factors.view(-1, 1, 1, 1))
    if not plan.gray_first:
        _on_rows(out, gray, _gray)
    rows = np.flatnonzero(table.blur > 0)
    _on_rows(out, rows, _blur, table.blur[rows], plan)
    return out


def _on_rows(
    images: torch.Tensor, rows: np.ndarray, operation: Callable[..., torch.Tensor], *args: object
) -> None:
    if len(rows) == 0:
        return
    index = torch.from_numpy(rows).to(images.device)
    images[index] = operation(images[index], *args)


def _cut_off(values: torch.Tensor) -> torch.Tensor:
    return values.clamp_(0, 255).floor_()


def _luma(images: torch.Tensor) -> torch.Tensor:
    """Pillow's 8-bit gray, (N, 1, H, W); a single channel is its own."""
    if images.shape[1] != 3:
        return images
    r, g, b = images.split(1, dim=1)
    return torch.floor((19595 * r + 38470 * g + 7471 * b + 32768) / 65536)


def _gray(images: torch.Tensor) -> torch.Tensor:
    return _luma(images).expand_as(images)


def _brightness(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _cut_off(images * factor)


def _contrast(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    mean = torch.floor(_luma(images).mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64) + 0.5).float()
    return _cut_off(mean + factor * (images - mean))


def _saturation(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    gray = _luma(images)
    return _cut_off(gray + factor * (images - gray))


def _hue(images: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    r, g, b = images.split(1, dim=1)
    top = images.amax(dim=1, keepdim=True)
    spread = top - images.amin(dim=1, keepdim=True)
    safe = spread.clamp(min=1)
    hue = torch.where(
        r == top,
        (g - b) / safe,  # (top - b) / spread - (top - g) / spread
        torch.where(g == top, 2 + (b - r) / safe, 4 + (r - g) / safe),
    )
    hue = torch.floor(torch.remainder(hue / 6 + 1, 1) * 255)
    saturation = torch.floor(spread / top.clamp(min=1) * 255) / 255
    hue = torch.where(spread > 0, hue, torch.zeros_like(hue))
    hue = torch.remainder(hue + torch.trunc(turns * 255), 256)
    # Back: each channel is top minus a share of the spread that depends on its distance in hue.
    sector = hue * (6.0 / 255.0)
    whole = torch.floor(sector)
    part = sector - whole
    levels = (
        torch.floor(top * (1 - saturation) + 0.5),
        torch.floor(top * (1 - saturation * part) + 0.5),
        torch.floor(top * (1 - saturation * (1 - part)) + 0.5),
    )
    p, q, t = levels
    which = torch.remainder(whole, 6)
    channels = (
        _choose(which, top, q, p, p, t, top),
        _choose(which, t, top, top, q, p, p),
        _choose(which, p, p, t, top, top, q),
    )
    # Without saturation Pillow leaves the pixel gray at its value.
    return torch.where(saturation > 0, torch.cat(channels, dim=1), top)


def _choose(which: torch.Tensor, *levels: torch.Tensor) -> torch.Tensor:
    out = levels[0]
    for number, level in enumerate(levels[1:], 1):
        out = torch.where(which == number, level, out)
    return out


_JITTERS = (_brightness, _contrast, _saturation, _hue)


def _blur(images: torch.Tensor, radii: np.ndarray, plan: ViewPlan) -> torch.Tensor:
    """Blurring rows and columns is a matrix from either side, and it holds the treatment of the edges."""
    n, c, size, _ = images.shape
    matrix = _gaussian_matrix if plan.blur == "gaussian" else _box_matrix
    sides = matrix(radii, size, plan, images.device)
    flat = images.permute(0, 2, 1, 3).reshape(n, size, c * size)  # rows first
    out = torch.bmm(sides, flat).view(n, size, c, size).permute(0, 2, 1, 3)
    out = torch.matmul(out, sides.transpose(1, 2).unsqueeze(1))
    return torch.floor(out.clamp_(0, 255) + 0.5)


def _box_matrix(radii: np.ndarray, size: int, plan: ViewPlan, device: torch.device) -> torch.Tensor:
    """Three passes of Pillow's fractional box, each repeating the edge: float32 (N, size, size)."""
    whole, edge = (part[:, None] for part in box_shape(radii))
    reach = int(whole.max()) + 1
    away = np.abs(np.arange(-reach, reach + 1))
    weights = (away <= whole) + (away == whole + 1) * edge
    once = _banded(weights / weights.sum(axis=1, keepdims=True), size, device, mirror=False)
    return once @ once @ once


def _gaussian_matrix(radii: np.ndarray, size: int, plan: ViewPlan, device: torch.device) -> torch.Tensor:
    reach = plan.blur_kernel // 2
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / radii[:, None]) ** 2)
    return _banded(weights / weights.sum(axis=1, keepdims=True), size, device, mirror=True)


def _banded(weights: np.ndarray, size: int, device: torch.device, mirror: bool) -> torch.Tensor:
    """The matrix of a filter along one axis: (N, taps) -> (N, size, size)."""
    reach = weights.shape[1] // 2
    places = np.arange(size)[:, None] + np.arange(-reach, reach + 1)
    if mirror:
        period = max(2 * size - 2, 1)
        places = places % period
        places = np.where(places >= size, period - places, places)
    columns = torch.from_numpy(places.clip(0, size - 1)).to(device)
    values = torch.from_numpy(weights.astype(np.float32)).to(device)
    rows = torch.arange(size, device=device)
    matrix = torch.zeros(len(weights), size, size, device=device)
    for tap in range(weights.shape[1]):  # a few, whatever the number of samples
        matrix[:, rows, columns[:, tap]] += values[:, tap, None]
    return matrix
