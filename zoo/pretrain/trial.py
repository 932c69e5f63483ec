"""Some real steps of a recipe on this machine, in a folder that is thrown away: what a plan can measure."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from ..data.builtin import open_builtin
from ..engine.loop import Callback, StepRecord
from ..engine.precision import choose_device
from .checks import check_shares
from .methods.deepcluster_v2_config import BankConfig
from .resolve import Resolved
from .run import start

__all__ = ["Trial", "try_steps"]

_STEPS = 6
_WARM_UP = 2  # memory is allocated and kernels are chosen in them
# Of a step on a CPU, at most: a GPU's share would take it minutes. 16 images of 2x224+6x96.
_PIXELS = 16 * (2 * 224**2 + 6 * 96**2)
_PHOTOS = "builtin:photos"

log = logging.getLogger("zoo")


@dataclass(frozen=True)
class Trial:
    """What some steps in one process took.

    Args:
        device: where.
        steps: that were measured, after the first two.
        images: of a step.
        images_per_second: by the median step, reading included.
        data_wait_share: of the steps' time.
        memory: bytes at the peak: on a GPU those of tensors, on a CPU by how much the process grew; None where
            it can't be known.
        data: what the images were.
    """

    device: str
    steps: int
    images: int
    images_per_second: float
    data_wait_share: float
    memory: int | None
    data: str


class _Watch(Callback):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)


def try_steps(resolved: Resolved, devices: int) -> Trial:
    """Train for six steps with what one of ``devices`` would have of each batch, or as much as a CPU can.

    Recipes without data get some of the built-in photographs; so do methods that look at all images before an
    epoch, with no more prototypes than there are images.

    Raises:
        InputError: a recipe that can't be trained so.
        RunError: memory ran out.
    """
    recipe = resolved.recipe
    check_shares(recipe, devices)
    device = choose_device(recipe.device)
    images = recipe.batch_size // devices
    if device.type == "cpu":
        # What parts and BatchNorm's groups divide, the batch must remain a multiple of.
        unit = 2 * math.lcm(recipe.engine.accumulate, getattr(recipe.method, "shuffle_groups", 1))
        most = _PIXELS // sum(count * size**2 for size, count in recipe.views.plan().groups)
        images = min(images, max(unit, most // unit * unit))
    looks_ahead = isinstance(recipe.method, BankConfig)
    own = bool(recipe.data.sources) and not looks_ahead
    options: dict[str, Any] = {
        "batch_size": images,
        "samples": _STEPS * images,
        "checkpoint.copy_to": None,
        "checkpoint.every_steps": None,
        "checkpoint.every_epochs": None,
        "health.every": 0,
        "health.stop_on_collapse": False,
        "probe.data": [],
    }
    if isinstance(recipe.method, BankConfig):
        options["method.prototypes"] = [min(k, _STEPS * images) for k in recipe.method.prototypes]
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder, _quietly(), _Growth(device) as growth:
        if not own:
            options["data.sources"] = [_some_pictures(Path(folder) / "images", _STEPS * images)]
        out = Path(folder) / "run"
        start(recipe.to_dict(), out=out, options=options, callbacks=(watch,), progress="quiet")
    measured = watch.records[_WARM_UP:]
    return Trial(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        steps=len(measured),
        images=images,
        images_per_second=images / median(record.step_time for record in measured),
        data_wait_share=sum(r.data_wait for r in measured) / sum(r.step_time for r in measured),
        memory=growth.bytes,
        data=" + ".join(recipe.data.sources) if own else _PHOTOS,
    )


def _some_pictures(folder: Path, count: int) -> str:
    """Built-in photographs in two class folders."""
    source = open_builtin(_PHOTOS, "train")
    for index in range(count):
        place = folder / str(index % 2) / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(source.read(index % len(source))).save(place)
    return str(folder)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What a small batch makes the recipe warn of is no news about the plan."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class _Growth:
    """The most memory that was taken meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def __enter__(self) -> _Growth:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with contextlib.suppress(OSError):  # Linux alone has them
                Path("/proc/self/clear_refs").write_text("5", "ascii")
            self._before = _resident("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._before is not None:
            peak = _resident("VmHWM")
            self.bytes = None if peak is None else peak - self._before


def _resident(which: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])
    except (OSError, StopIteration):
        return None
