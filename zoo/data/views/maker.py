"""From a picture and a key to its views: what a data worker does with each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...keyed import keyed_uniforms
from ..decode import Picture
from .apply import apply_view, cut
from .params import DRAWS_PER_VIEW, ViewParams, ViewPlan, draw_views, shrink_for

__all__ = ["PlannedViews", "ViewMaker"]


class ViewMaker(Protocol):
    """Makes the views of one image; picklable, without state."""

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(size, count) of each run of consecutive views of one size."""
        ...

    @property
    def image_bytes(self) -> int:
        """What the views of one image take in memory."""
        ...

    def make(self, picture: Picture, key: int) -> tuple[Sequence[np.ndarray], Sequence[ViewParams]]:
        """The views, size x size x C each, and their parameters (none, where colours are done already)."""
        ...


class PlannedViews:
    """Views by a plan.

    Args:
        plan: the distributions.
        colors: False leaves colours and blur to ``device.recolor_batch`` and hands out the parameters.
        scaled_decoding: decode a large JPEG at 1/2, 1/4 or 1/8 where every crop keeps its output size.
    """

    def __init__(self, plan: ViewPlan, *, colors: bool = True, scaled_decoding: bool = True) -> None:
        self.plan = plan
        self.colors = colors
        self.scaled_decoding = scaled_decoding

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        return self.plan.groups

    @property
    def image_bytes(self) -> int:
        return sum(size * size * count for size, count in self.groups) * len(self.plan.mean)

    def params(self, height: int, width: int, key: int) -> list[ViewParams]:
        """What the views of an image of this size will be, in pixels of the whole image."""
        count = len(self.plan.crops)
        draws = keyed_uniforms(key, count * DRAWS_PER_VIEW).reshape(count, -1).tolist()
        return draw_views(self.plan, height, width, draws)

    def make(self, picture: Picture, key: int) -> tuple[list[np.ndarray], list[ViewParams]]:
        params = self.params(picture.height, picture.width, key)
        shrink = shrink_for(params) if self.scaled_decoding and picture.can_shrink else 1
        pixels = picture.pixels(shrink)
        if self.colors:
            return [apply_view(pixels, view, self.plan, shrink) for view in params], []
        return [cut(pixels, view, self.plan, shrink) for view in params], params
