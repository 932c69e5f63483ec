"""The doctor of a run: figures of how it goes, and what a loss that is not finite came from.

Each ``health.every`` steps the first process looks at what the step had before it (``Seen``). With several
processes that is its own share of the batch; the gradient is everyone's. Nothing is drawn and nothing of the
training is touched: a run is the same bit for bit without its doctor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..data.loader import Batch
from ..data.source import ImageSource
from ..engine.collectives import Collectives
from ..engine.loop import Loop, StepRecord
from ..engine.trackers import Guarded, JsonLines
from ..files import disk_errors, write_json
from .collapse import Event, Monitor, advice_for, read_events
from .config import Recipe
from .methods.base import Seen
from .methods.config_base import RunShape

__all__ = ["Autopsy", "Doctor", "doctor_of", "figures_of"]

SCHEMA = 1
PREFIX = "health/"
_ROWS = 256  # that are looked at: a look must cost less than a hundredth of the steps between two
_LEAST = 8  # fewer say nothing
_NAMES = 20  # that a message or a report lists

log = logging.getLogger("zoo")


@torch.no_grad()
def figures_of(seen: Seen) -> dict[str, float]:
    """Figures of a step, of 8 to 256 rows; those that a method says nothing about are left out.

    * ``chance``: the loss of guessing, in nats.
    * ``rank``: effective rank of the embeddings, exp of the entropy of their normalised singular values
      (Roy and Vetterli 2007; RankMe, Garrido et al. 2023): 1 where all lie on a line through the origin.
    * ``spread``: sqrt(1 - |mean of the unit embeddings|^2): 0 where all are alike, 1 where they have no
      direction in common.
    * ``usage``: prototypes that some row is nearest to, over as many as there could be; ``top_share``: share of
      rows that the most frequent of them has.
    * ``entropy``: of the rows' distribution over nearest prototypes, over the largest that it could be.
    * ``code_entropy``: mean entropy of a code, over ln K: 1 where codes are uniform.
    * ``queue_age``: in steps.
    """
    found = {"chance": math.log(seen.outcomes)}
    if seen.embeddings is not None and len(seen.embeddings) >= _LEAST:
        found |= _of_embeddings(seen.embeddings[:_ROWS].to("cpu", torch.float64))
    if seen.scores is not None and seen.scores.shape[1] > 1:
        found |= _of_prototypes(seen.scores[:_ROWS])
    if seen.codes is not None and seen.codes.shape[1] > 1:
        codes = seen.codes[:_ROWS]
        coded = codes.sum(dim=1) > 0.5  # an image that has no code has a row of zeros
        entropies = torch.special.entr(codes).sum(dim=1)
        mean = float((entropies * coded).sum() / coded.sum().clamp_min(1))
        found["code_entropy"] = mean / math.log(codes.shape[1])
    if seen.queue_age is not None:
        found["queue_age"] = seen.queue_age
    return found


def _of_embeddings(rows: torch.Tensor) -> dict[str, float]:
    """(N, D) float64 on the CPU."""
    if not rows.isfinite().all():
        return {}
    products = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    singular = torch.linalg.eigvalsh(products).clamp_min(0).sqrt()
    shares = singular / singular.sum()
    return {
        "rank": float(torch.special.entr(shares).sum().exp()),
        "spread": float((1 - rows.mean(dim=0).square().sum()).clamp_min(0).sqrt()),
    }


def _of_prototypes(scores: torch.Tensor) -> dict[str, float]:
    """(N, K) -> how the rows are distributed over their nearest prototypes."""
    nearest = scores.argmax(dim=1)[scores.amax(dim=1) > scores.amin(dim=1)]  # all as near: none is
    rows, count = len(nearest), scores.shape[1]
    if rows < _LEAST:
        return {}
    shares = torch.bincount(nearest, minlength=count).to("cpu", torch.float64) / rows
    possible = min(rows, count)
    return {
        "usage": float((shares > 0).sum()) / possible,
        "top_share": float(shares.max()),
        "entropy": float(torch.special.entr(shares).sum()) / math.log(possible) if possible > 1 else 1.0,
    }


class Doctor(Guarded):
    """Measures a run's health, and warns of what the monitor finds, each kind once. For the first process.

    Args:
        monitor: makes events of figures.
        file: ``events.jsonl``, where they are kept.
        every: steps from one look to the next.
        stop: end the run, saved, after an event.
    """

    def __init__(self, monitor: Monitor, file: Path, every: int, stop: bool = False) -> None:
        super().__init__("The doctor")
        self.event: Event | None = None
        """The one that the run was stopped for."""
        self._monitor = monitor
        self._lines = JsonLines(file)
        self._every = every
        self._stop = stop
        self._loop: Loop | None = None
        self._norm = math.nan
        self._found: dict[str, float] = {}

    def on_start(self, loop: Loop) -> None:
        self._loop = loop
        self.guard("starting", self._recall)

    def _recall(self) -> None:
        self._monitor.remember(event["name"] for event in read_events(self._lines.path))

    def on_batch(self, batch: Batch) -> None:
        if self._loop is not None:
            self._watch(self._loop, self._loop.step % self._every == 0 and not self.failed)

    @staticmethod
    def _watch(loop: Loop, watched: bool) -> None:
        learner: Any = loop.learner
        learner.watched, learner.seen = watched, None

    def on_gradients(self, loop: Loop) -> None:
        if getattr(loop.learner, "watched", False):
            self.guard("measuring the gradient", self._measure_gradient, loop)

    def _measure_gradient(self, loop: Loop) -> None:
        self._norm = loop.gradient_norm()

    def figures(self, record: StepRecord, loop: Loop) -> Mapping[str, float]:
        self._found = {}
        self.guard("measuring", self._look, record, loop)
        return {PREFIX + key: value for key, value in self._found.items() if math.isfinite(value)}

    def _look(self, record: StepRecord, loop: Loop) -> None:
        learner: Any = loop.learner
        figures: dict[str, float] = {}
        if learner.watched:
            figures["grad_norm"] = self._norm
            if learner.seen is not None:
                figures |= figures_of(learner.seen)
            self._watch(loop, False)
            self._found = figures
            if loop.precision.name == "float16" and not math.isfinite(self._norm):
                figures = {
                    key: value for key, value in figures.items() if key != "grad_norm"
                }  # it is left out
        for event in self._monitor.update(record.step, record.loss, figures):
            log.warning("%s", event)
            self._lines.write({"schema": SCHEMA, **event.to_dict()})
            if self._stop:
                self.event = event
                loop.halted = True

    def close(self) -> None:
        self._lines.close()


def doctor_of(recipe: Recipe, shape: RunShape, file: Path) -> Doctor | None:
    """The doctor that a recipe asks for, who writes to ``file``."""
    config, schedule = recipe.health, recipe.schedule
    if not config.every:
        return None
    warmup = schedule.warmup_steps or round(schedule.warmup_epochs * shape.steps_per_epoch)
    frozen = getattr(recipe.method, "freeze_prototypes_steps", 0)
    monitor = Monitor(advice_for(recipe), max(warmup, frozen))
    return Doctor(monitor, file, config.every, config.stop_on_collapse)


class Autopsy:
    """Writes down where a loss that is not finite came from; see ``Loop.autopsy``.

    The file: ``step``, ``epoch``, ``lr``; ``parameters``, whose values, and whose gradients are not finite
    (names, at most 20 of each, and how many); ``processes``, of each its own ``loss`` and the images of its
    share of the batch, ``not_finite`` where a view of one (of the user's own transforms) is not finite itself.

    Args:
        file: where to, ``nonfinite.json``.
        source: the run's images.
        world: the run's processes; the first one writes.
    """

    def __init__(self, file: Path, source: ImageSource, world: Collectives) -> None:
        self._file = file
        self._source = source
        self._world = world

    def __call__(self, loop: Loop, batch: Batch, loss: float) -> tuple[str, Path]:
        learner: Any = loop.learner
        named = [(name, p) for name, p in learner.named_parameters() if p.requires_grad]
        values = [name for name, p in named if not p.isfinite().all()]
        gradients = [name for name, p in named if p.grad is not None and not p.grad.isfinite().all()]
        processes = self._world.gather_values({"loss": str(loss), "images": self._images(batch)})
        report = {
            "schema": SCHEMA,
            "step": loop.step,
            "epoch": batch.epoch,
            "lr": loop.lr_at(loop.step),
            "parameters": {"count": len(named), "values": _listed(values), "gradients": _listed(gradients)},
            "processes": [{"rank": rank, **found} for rank, found in enumerate(processes)],
        }
        if self._world.rank == 0:
            with disk_errors("Writing down the step", self._file):
                write_json(self._file, report)
        return _sentence(values, gradients, len(named), processes), self._file

    def _images(self, batch: Batch) -> list[dict[str, Any]]:
        ids = batch.ids.tolist()
        bad = {
            row % len(ids)
            for view in batch.views
            if view.is_floating_point()
            for row in (~view.flatten(1).isfinite().all(dim=1)).nonzero().flatten().tolist()
        }
        return [
            {"sample": sample, "file": self._source.where(sample)}
            | ({"not_finite": True} if row in bad else {})
            for row, sample in enumerate(ids)
        ]


def _listed(names: list[str]) -> dict[str, Any]:
    return {"count": len(names), "first": names[:_NAMES]}


def _sentence(values: list[str], gradients: list[str], count: int, processes: list[Any]) -> str:
    images = [image for found in processes for image in found["images"]]
    broken = [image["file"] for image in images if image.get("not_finite")]
    said = "Its parameters are finite"
    if values:
        said = f"{len(values)} of {count} parameters are not finite themselves, first {values[0]}"
    elif gradients:
        said += f", the gradients of {len(gradients)} of {count} are not, first that of {gradients[0]}"
    if broken:
        said += f"; a view of {broken[0]} is not finite"
    return f"{said}. All of this and the batch's {len(images)} images are written down."
