"""Views as one labelled picture: the crop boxes on the image, each view, and what was drawn for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .params import ViewParams, ViewPlan

__all__ = ["describe_view", "draw_grid"]

_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#000075")
_NAMES = ("brightness", "contrast", "saturation", "hue")
_GAP, _LINE, _FONT, _IMAGE_HEIGHT = 12, 15, 12, 300
_LEAST_SHOWN = 96  # smaller images and views are enlarged, or nothing would be seen
_PAPER, _INK, _EDGE = "#ffffff", "#202020", "#c0c0c0"

_Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def describe_view(view: ViewParams, plan: ViewPlan) -> list[str]:
    """The parameters of one view, a few words a line, in the order in which they apply."""
    flip = ["flipped"] if view.flip else []
    if plan.translate:
        lines = [*flip, f"moved {view.shift[0]:+d}, {view.shift[1]:+d} px"]
    else:
        lines = [f"{view.width} x {view.height} px at {view.left}, {view.top}", *flip]
    gray = ["grayscale"] if view.gray else []
    jitter = []
    if view.jitter is not None:
        changed = [(which, view.jitter[which]) for which in view.jitter_order if plan.jitter[which]]
        jitter = [
            f"{_NAMES[which]} {value:+.3f}" if which == 3 else f"{_NAMES[which]} x {value:.2f}"
            for which, value in changed
        ]
    lines += gray + jitter if plan.gray_first else jitter + gray
    if view.blur_radius is not None:
        lines.append(f"blur {view.blur_radius:.2f} px")
    return lines


def draw_grid(
    rows: Sequence[tuple[str, np.ndarray, Sequence[np.ndarray], Sequence[ViewParams]]],
    plan: ViewPlan,
    title: str,
) -> Image.Image:
    """One row an image.

    Args:
        rows: name, pixels (uint8, H x W x C), views (uint8, S x S x C) and their parameters.
        plan: what the views have in common.
        title: the first line.
    """
    font = ImageFont.load_default(_FONT)
    title = _writable(title)
    boxed = [_boxed(pixels, [] if plan.translate else params, font) for _, pixels, _, params in rows]
    columns = [_columns(views, params, plan, font) for _, _, views, params in rows]
    # Views stand below one another in all rows.
    first = max(image.width for image in boxed)
    widths = [max(column.width for column in same) for same in zip(*columns, strict=True)]
    strips = [
        _row(
            f"{_writable(name)}  ({pixels.shape[1]} x {pixels.shape[0]})", image, row, (first, *widths), font
        )
        for (name, pixels, _, _), image, row in zip(rows, boxed, columns, strict=True)
    ]
    width = max([strip.width for strip in strips] + [math.ceil(font.getlength(title)) + 2 * _GAP])
    height = 2 * _GAP + _LINE + sum(strip.height for strip in strips)
    page = Image.new("RGB", (width, height), _PAPER)
    ImageDraw.Draw(page).text((_GAP, _GAP), title, _INK, font)
    top = _GAP + _LINE + _GAP // 2
    for strip in strips:
        page.paste(strip, (0, top))
        top += strip.height
    return page


@dataclass(frozen=True)
class _Column:
    """A view with the line above it and the lines below it."""

    above: str
    image: Image.Image
    below: list[str]
    width: int


def _columns(
    views: Sequence[np.ndarray], params: Sequence[ViewParams], plan: ViewPlan, font: _Font
) -> list[_Column]:
    out = []
    for number, (view, drawn) in enumerate(zip(views, params, strict=True)):
        size = view.shape[0]
        times = max(1, _LEAST_SHOWN // size)
        image = _as_image(view).resize((times * size, times * size), Image.Resampling.NEAREST)
        above = f"view {number}: {size} px" + (f" (shown x {times})" if times > 1 else "")
        below = describe_view(drawn, plan)
        width = math.ceil(max(image.width, *(font.getlength(line) for line in (above, *below))))
        out.append(_Column(above, image, below, width))
    return out


def _row(
    name: str, boxed: Image.Image, columns: Sequence[_Column], widths: Sequence[int], font: _Font
) -> Image.Image:
    """One image and its views from left to right, each in its width."""
    width = max(sum(widths) + _GAP * (len(widths) - 1), math.ceil(font.getlength(name)))
    tallest = max([boxed.height] + [c.image.height + _LINE * (2 + len(c.below)) for c in columns])
    strip = Image.new("RGB", (width + 2 * _GAP, tallest + _LINE + 2 * _GAP), _PAPER)
    pen = ImageDraw.Draw(strip)
    pen.text((_GAP, _GAP // 2), name, _INK, font)
    top = _GAP // 2 + _LINE + 4
    strip.paste(boxed, (_GAP, top))
    left = _GAP + widths[0] + _GAP
    for number, (column, wide) in enumerate(zip(columns, widths[1:], strict=True)):
        color, image = _color(number), column.image
        pen.text((left, top), column.above, color, font)
        corner = top + _LINE + 2
        strip.paste(image, (left, corner))
        pen.rectangle((left - 1, corner - 1, left + image.width, corner + image.height), outline=color)
        for line, words in enumerate(column.below):
            pen.text((left, corner + image.height + 6 + _LINE * line), words, _INK, font)
        left += wide + _GAP
    return strip


def _boxed(pixels: np.ndarray, params: Sequence[ViewParams], font: _Font) -> Image.Image:
    """The image with each view's box and number."""
    height, width = pixels.shape[:2]
    scale = min(1.0, _IMAGE_HEIGHT / height, 1.5 * _IMAGE_HEIGHT / width)
    scale = max(scale, _LEAST_SHOWN / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = _as_image(pixels).resize(size, Image.Resampling.LANCZOS)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, size[0] - 1, size[1] - 1), outline=_EDGE)
    corners = [(view.left * scale, view.top * scale) for view in params]
    for number, ((left, top), view) in enumerate(zip(corners, params, strict=True)):
        right, bottom = max(left, left + view.width * scale - 1), max(top, top + view.height * scale - 1)
        pen.rectangle((left, top, right, bottom), outline=_color(number), width=2)
    taken: list[tuple[float, float]] = []
    for number, (left, top) in enumerate(corners):  # after the boxes, which would hide them
        wide = math.ceil(font.getlength(str(number))) + 6
        left, top = min(left, size[0] - wide), min(top, size[1] - _LINE)
        start = left
        while any(abs(left - x) < wide and abs(top - y) < _LINE for x, y in taken):
            left += 1  # nor do they hide one another
            if left > size[0] - wide:
                left, top = start, top + _LINE
        taken.append((left, top))
        pen.rectangle((left, top, left + wide - 1, top + _LINE - 1), fill=_color(number))
        pen.text((left + 3, top), str(number), _PAPER, font)
    return image


def _writable(text: str) -> str:
    """Pillow's font has the letters of ASCII alone: of all others it draws the same box."""
    return text.encode("unicode_escape").decode("ascii")


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _as_image(pixels: np.ndarray) -> Image.Image:
    """Of other channels than one the first three; a second one alone is shown with an empty third."""
    if pixels.shape[2] == 1:
        return Image.fromarray(pixels[:, :, 0]).convert("RGB")
    if pixels.shape[2] == 2:
        pixels = np.pad(pixels, ((0, 0), (0, 0), (0, 1)))
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
