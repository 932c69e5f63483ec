"""Frozen features of whole image collections."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.models.resnet import ResNet

from ..data.source import ImageSource
from ..data.views.apply import normalize, resize_and_center
from ..errors import InputError, RunError, did_you_mean
from ..models.resnet import stage_features
from .linear import FINAL

__all__ = ["PooledStages", "eval_mode", "source_features", "source_labels", "trunk_features"]

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


class PooledStages(nn.Module):
    """A trunk whose output is that of several of its stages side by side, each map averaged to a vector.

    Args:
        trunk: what ``zoo.load`` gives.
        stages: names of its ``feature_info``; ``final`` is the trunk's own output.

    Raises:
        InputError: no such stage.
    """

    def __init__(self, trunk: Any, stages: Sequence[str]) -> None:
        super().__init__()
        self.trunk = trunk
        self.training = trunk.training
        self.stages = tuple(stages)
        known = {name: channels for name, channels, _ in getattr(trunk, "feature_info", ())}
        known[FINAL] = trunk.num_features
        for stage in self.stages:
            if stage not in known:
                raise InputError(
                    f"The network has no stage {stage!r}.",
                    where="stages",
                    fix=did_you_mean(stage, known) + "known: " + ", ".join(known),
                )
        self.widths: dict[str, int] = {stage: known[stage] for stage in self.stages}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = stage_features(self.trunk, images) if set(self.stages) != {FINAL} else {}
        return torch.cat(
            [
                maps[stage].mean(dim=(2, 3)) if stage != FINAL else self._final(images, maps)
                for stage in self.stages
            ],
            dim=1,
        )

    def _final(self, images: torch.Tensor, maps: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if "layer4" in maps and isinstance(self.trunk, ResNet):  # the rest of its own forward
            return self.trunk.fc(self.trunk.avgpool(maps["layer4"]).flatten(1))
        return self.trunk(images)


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
    rows: range | None = None,
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
        rows: which images, one after the other; all by default.

    Returns:
        float32 (N, F), and labels int64 (N,), -1 where there are none.

    Raises:
        RunError: features that are no finite numbers.
    """
    resize, crop = int(how["resize"]), int(how["crop"])
    interpolation, channels = str(how.get("interpolation", "bilinear")), len(how["mean"])
    wanted = range(len(source)) if rows is None else rows

    def read(index: int) -> np.ndarray:
        return resize_and_center(source.read(index), resize, crop, interpolation)

    out = []
    told = time.monotonic()
    with mode(trunk), ThreadPoolExecutor(_READERS) as pool:
        for start in wanted[::batch_size]:
            batch = range(start, min(start + batch_size, wanted.stop))
            block = np.zeros((batch_size, crop, crop, channels), dtype=np.uint8)
            for row, pixels in enumerate(pool.map(read, batch)):
                block[row] = pixels
            images = torch.from_numpy(block).permute(0, 3, 1, 2)
            out.append(trunk_features(trunk, images, how)[: len(batch)])
            if finite and not torch.isfinite(out[-1]).all():
                raise RunError(
                    "The network's features of these images are no finite numbers.",
                    where=source.where(start),
                    fix="look at the weights: zoo doctor MODEL",
                )
            if time.monotonic() - told > _NEWS_EVERY:
                told = time.monotonic()
                log.info("features of %s: %d of %d images", source.name, batch.stop, len(source))
    return torch.cat(out), source_labels(source, wanted)


def source_labels(source: ImageSource, rows: range | None = None) -> torch.Tensor:
    """Labels of a source's images, or of some of them: int64 (N,), -1 where there are none."""
    wanted = range(len(source)) if rows is None else rows
    return torch.tensor([source.label(index) for index in wanted], dtype=torch.int64)
