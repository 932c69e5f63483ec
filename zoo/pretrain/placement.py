"""Where colours and blur are computed: in the data workers, or for a whole batch on the device."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ..data.source import ImageSource, open_picture
from ..data.views.device import color_table, recolor_batch
from ..data.views.maker import PlannedViews
from ..data.views.params import ViewPlan
from ..errors import InputError
from ..keyed import keyed_key

__all__ = ["choose_augment_place", "seconds_an_image"]

log = logging.getLogger("zoo")

_IMAGES = 16


def choose_augment_place(
    wanted: str, source: ImageSource, plan: ViewPlan, trunk: Any, device: torch.device, workers: int
) -> str:
    """``worker`` or ``device``; ``auto`` measures which gives more images a second.

    Workers and device work side by side, so an image costs the longer of the two times. On a CPU both
    are the same processors, and the per-image operations are the cheaper ones: nothing is measured.

    Args:
        wanted: ``worker``, ``device`` or ``auto``.
        source: the images; a few are read.
        plan: how views are made.
        trunk: on the device; its forward pass stands for the training step (3 times as long).
        device: where it trains.
        workers: data processes.
    """
    if wanted != "auto":
        return wanted
    if device.type == "cpu":
        return "worker"
    on_workers, on_device = seconds_an_image(source, plan, trunk, device, workers)
    place = "device" if on_device < on_workers else "worker"
    log.info(
        "colours and blur on the %s: an image takes %.2f ms with them in the workers, %.2f ms on the device",
        place,
        1000 * on_workers,
        1000 * on_device,
    )
    return place


def seconds_an_image(
    source: ImageSource, plan: ViewPlan, trunk: Any, device: torch.device, workers: int
) -> tuple[float, float]:
    """What an image costs with its colours made in the workers, and on the device; see above."""
    samples = _some_readable(source)
    everything, cut_only = PlannedViews(plan), PlannedViews(plan, colors=False)
    count = len(samples)

    def made(maker: PlannedViews) -> list[Any]:
        return [maker.make(open_picture(source, i), keyed_key(0, "views", i)) for i in samples]

    share = max(1, workers) * count
    in_worker = _seconds(partial(made, everything)) / share
    without_colors = _seconds(partial(made, cut_only)) / share
    colors, step = 0.0, 0.0
    views_and_params = made(cut_only)
    first = 0
    for _, views_of_size in plan.groups:
        mine = slice(first, first + views_of_size)
        first += views_of_size
        pixels = np.concatenate([np.stack(views[mine]) for views, _ in views_and_params])
        table = color_table([row for _, params in views_and_params for row in params[mine]])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device)
        colors += _seconds(partial(recolor_batch, images, table, plan), device) / count
        step += 3 * _seconds(partial(_forward, trunk, images), device) / count
    return max(in_worker, step), max(without_colors, step + colors)


def _some_readable(source: ImageSource) -> list[int]:
    """A few images, evenly spread: what to do about unreadable ones is decided in training."""
    found: list[int] = []
    for index in np.linspace(0, len(source) - 1, min(4 * _IMAGES, len(source))).astype(int).tolist():
        with contextlib.suppress(InputError):
            source.read(index)
            found.append(index)
        if len(found) == _IMAGES:
            return found
    if not found:
        raise InputError(
            "None of the images that were tried can be read.",
            where=source.name,
            fix="check the data: zoo data check",
        )
    return found


@torch.no_grad()
def _forward(trunk: Any, images: torch.Tensor) -> None:
    mode = trunk.training
    trunk.eval()  # running statistics must not see this
    dtype = next(trunk.parameters()).dtype
    with torch.autocast(images.device.type, enabled=dtype == torch.float32):
        trunk(images.to(dtype) / 255)
    trunk.train(mode)


def _seconds(work: Callable[[], Any], device: torch.device | None = None) -> float:
    """The shorter of two timings after one that warms up."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])
