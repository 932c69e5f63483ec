"""Frozen features of whole image collections."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.source import ImageSource
from ..data.views.apply import normalize, resize_and_center
from ..errors import RunError

__all__ = ["eval_mode", "source_features", "trunk_features"]

log = logging.getLogger("zoo")

_NEWS_EVERY = 10.0  # seconds
_READERS = 4  # threads; decoding and resizing let go of the interpreter


@contextlib.contextmanager
def eval_mode(trunk: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the trunk is given back in the mode it came in."""
    mode = trunk.training
    trunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        trunk.train(mode)


def trunk_features(trunk: nn.Module, images: torch.Tensor, how: Mapping[str, Any]) -> torch.Tensor:
    """Pooled features, float32 (N, F) on the CPU, of uint8 images (N, 3, H, W); the caller sets the mode."""
    like = next(trunk.parameters(), torch.empty(0))
    inputs = normalize(images.to(like.device), tuple(how["mean"]), tuple(how["std"])).to(like.dtype)
    return trunk(inputs).float().cpu()  # type: ignore[no-any-return]


def source_features(
    trunk: nn.Module,
    source: ImageSource,
    how: Mapping[str, Any],
    batch_size: int = 64,
    finite: bool = True,
    mode: Callable[[nn.Module], contextlib.AbstractContextManager[None]] = eval_mode,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of a whole source by the test transform, in the source's order.

    Every pass has exactly ``batch_size`` rows (the last is filled up), so an image's features are the
    same bits whichever images come with it.

    Args:
        trunk: (N, 3, H, W) -> (N, F); is given back as it came.
        source: the images.
        how: preprocessing: mean, std, resize, crop, interpolation (bilinear unless given).
        batch_size: images a pass.
        finite: insist on finite numbers; a training that diverged is judged by what it gives, whatever that is.
        mode: what the trunk is in meanwhile.

    Returns:
        float32 (N, F), and labels int64 (N,), -1 where there are none.

    Raises:
        RunError: features that are no finite numbers.
    """
    resize, crop = int(how["resize"]), int(how["crop"])
    interpolation, channels = str(how.get("interpolation", "bilinear")), len(how["mean"])

    def read(index: int) -> np.ndarray:
        return resize_and_center(source.read(index), resize, crop, interpolation)

    out = []
    told = time.monotonic()
    with mode(trunk), ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(source), batch_size):
            rows = range(start, min(start + batch_size, len(source)))
            block = np.zeros((batch_size, crop, crop, channels), dtype=np.uint8)
            for row, pixels in enumerate(pool.map(read, rows)):
                block[row] = pixels
            images = torch.from_numpy(block).permute(0, 3, 1, 2)
            out.append(trunk_features(trunk, images, how)[: len(rows)])
            if finite and not torch.isfinite(out[-1]).all():
                raise RunError(
                    "The network's features of these images are no finite numbers.",
                    where=source.where(start),
                    fix="look at the weights: zoo doctor MODEL",
                )
            if time.monotonic() - told > _NEWS_EVERY:
                told = time.monotonic()
                log.info("features of %s: %d of %d images", source.name, rows.stop, len(source))
    labels = np.array([source.label(index) for index in range(len(source))], dtype=np.int64)
    return torch.cat(out), torch.from_numpy(labels)
