"""Where colours and blur are computed: in the data workers, or for a whole batch on the device."""

from __future__ import annotations

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
from ..keyed import keyed_key

__all__ = ["choose_augment_place"]

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
    share = max(1, workers)
    samples = [int(i) for i in np.linspace(0, len(source) - 1, min(_IMAGES, len(source)))]

    def read(colors: bool) -> float:
        maker = PlannedViews(plan, colors=colors)
        return _seconds(
            lambda: [maker.make(open_picture(source, i), keyed_key(0, "views", i)) for i in samples]
        )

    in_worker, without_colors = read(True) / len(samples), read(False) / len(samples)
    colors, step = 0.0, 0.0
    maker = PlannedViews(plan, colors=False)
    made = [maker.make(open_picture(source, i), keyed_key(0, "views", i)) for i in samples]
    first = 0
    for _, count in plan.groups:
        mine = slice(first, first + count)
        first += count
        pixels = np.concatenate([np.stack(views[mine]) for views, _ in made])
        table = color_table([row for _, params in made for row in params[mine]])
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device)
        colors += _seconds(partial(recolor_batch, images, table, plan), device) / len(samples)
        step += 3 * _seconds(partial(_forward, trunk, images), device) / len(samples)
    on_workers = max(in_worker / share, step)
    on_device = max(without_colors / share, step + colors)
    place = "device" if on_device < on_workers else "worker"
    log.info(
        "colours and blur on the %s: an image takes %.2f ms with them in the workers, %.2f ms on the device",
        place,
        1000 * on_workers,
        1000 * on_device,
    )
    return place


@torch.no_grad()
def _forward(trunk: Any, images: torch.Tensor) -> None:
    mode = trunk.training
    trunk.eval()  # running statistics must not see this
    with torch.autocast(images.device.type):
        trunk(images.float() / 255)
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
