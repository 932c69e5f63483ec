"""Memory, time, exchanges and failures of a run on any number of devices. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .checks import check_shares
from .config import Recipe
from .methods.config_base import RunShape
from .scaling import Communication, DeviceKind, Failures, communication, lost_work

if TYPE_CHECKING:  # these import torch
    from .costs import StepCosts
    from .trial import Trial

__all__ = ["ON_TOP", "Forecast", "Machines", "Place"]

_GIGA = 2**30

ON_TOP = 1.5
"""How many times the bytes of its tensors a process takes: allocators, workspaces, the device's driver.

SwAV's table 4 has 1.5 to 1.7 times what is counted here, ``benchmarks/step_memory.py`` on a CPU 1.25 to 1.6.
"""

_COPIED = 5e9  # bytes a second into the host's memory, for which training waits; assumed


@dataclass(frozen=True)
class Machines:
    """Where the run would be, and what is known of it.

    Args:
        devices: None for those of this machine.
        kind: a key of ``zoo.pretrain.scaling.DEVICES``, ``cpu``, or None for this machine's own.
        img_s: images a second of one device, measured elsewhere.
        network_gbit: of each machine of eight devices, to the others.
        failures: of a device, a day; None if nobody asks.
        restart: seconds from a failure until the run goes on.
        save: seconds that training waits for a checkpoint; None: for a copy in the host's memory.
    """

    devices: int | None = None
    kind: str | None = None
    img_s: float | None = None
    network_gbit: float = 100.0
    failures: float | None = None
    restart: float = 300.0
    save: float | None = None


@dataclass(frozen=True)
class Place:
    """The devices: what one is called, its bytes (0: unknown), its kind where known, and how it computes."""

    name: str
    memory: int
    kind: DeviceKind | None
    precision: str
    devices: int


class Forecast:
    """What a counted step says about a run.

    Args:
        recipe: what is trained.
        shape: the run's sizes, on ``place.devices``.
        place: the devices.
        machines: what else is known.
        costs: the step; None if it can't be counted.
        trial: some real steps.
    """

    def __init__(
        self,
        recipe: Recipe,
        shape: RunShape,
        place: Place,
        machines: Machines,
        costs: StepCosts | None,
        trial: Trial | None = None,
    ) -> None:
        self.recipe, self.shape, self.place = recipe, shape, place
        self.machines, self.costs, self.trial = machines, costs, trial
        self.seconds_an_image, self.speed = self._speed()

    def _speed(self) -> tuple[float | None, dict[str, Any]]:
        """Seconds of one device for an image, and where they come from."""
        kind, precision = self.place.kind, self.place.precision
        if self.machines.img_s is not None:
            return 1 / self.machines.img_s, {"from": "given", "why": "--img-s"}
        if self.trial is not None:
            return 1 / self.trial.images_per_second, {
                "from": "measured",
                "why": f"{self.trial.steps} steps of {self.trial.images} images on {self.trial.device}",
            }
        known = kind.speed(precision) if kind is not None else None
        if self.costs is None or known is None:
            why = "nothing is known of this device's speed: --probe measures it, --img-s says it"
            return None, {"from": None, "why": why}
        peak, share = known
        return self.costs.flops / self.costs.images / (peak * share), {
            "from": "assumed",
            "why": f"{100 * share:.1f} % of {peak / 1e12:.4g} TFLOP/s ({precision}), from published runs on V100s; "
            "--probe measures it",
        }

    def rows(self, counts: Iterator[int] | list[int]) -> list[dict[str, Any]]:
        """One for each number of devices, see ``row``."""
        return [self.row(count) for count in counts]

    def row(self, devices: int) -> dict[str, Any]:
        """The run on so many devices, with the same batch; ``impossible`` says why not."""
        row: dict[str, Any] = dict.fromkeys(
            (
                "images_each",
                "memory",
                "step_seconds",
                "images_per_second",
                "communication_share",
                "run_seconds",
                "lost_share",
                "impossible",
            )
        )
        row = {"devices": devices, **row}
        try:
            self._check(devices)
        except InputError as error:
            return {**row, "impossible": error.what}
        each = self.recipe.batch_size // devices
        row["images_each"] = each
        if self.costs is not None:
            row["memory"] = round(self.costs.memory_with(each))
        if self.seconds_an_image is None:
            return row
        computing = each * self.seconds_an_image
        exposed = self._communication(devices).exposed
        step = computing + exposed
        row |= {
            "step_seconds": step,
            "images_per_second": self.recipe.batch_size / step,
            "communication_share": exposed / step,
            "run_seconds": step * self.shape.total_steps,
        }
        failures = self._failures(devices, step)
        if failures is not None:
            row["lost_share"] = failures.lost
        return row

    def _check(self, devices: int) -> None:
        check_shares(self.recipe, devices)
        list(self.recipe.method.check(replace(self.shape, world_size=devices)))

    def _communication(self, devices: int) -> Communication:
        each = self.recipe.batch_size // devices
        if self.costs is None or self.seconds_an_image is None:
            return Communication(0.0, 0.0, 0.0)
        share = each / self.costs.images
        exchanges = [
            # What is gathered are a process's own rows; what is summed has the same size on any number.
            replace(one, payload=round(one.payload * share))
            if (one.kind, one.of) == ("gather", "method")
            else one
            for one in self.costs.exchanges
        ]
        network = self.machines.network_gbit * 1e9 / 8
        link = network if self.place.kind is None else self.place.kind.link
        return communication(exchanges, devices, link, network, each * self.seconds_an_image)

    def _failures(self, devices: int, step: float) -> Failures | None:
        if self.machines.failures is None:
            return None
        every = self.save_every or self.shape.total_steps
        return lost_work(
            devices, self.machines.failures, every * step, self.machines.restart, self.save_seconds
        )

    @property
    def save_every(self) -> int | None:
        """Steps between checkpoints; None: only at the end."""
        saving = self.recipe.checkpoint
        if saving.every_steps is None and saving.every_epochs is not None:
            return saving.every_epochs * self.shape.steps_per_epoch
        return saving.every_steps

    @property
    def save_seconds(self) -> float:
        """Seconds that training waits for a checkpoint."""
        if self.machines.save is not None or self.costs is None:
            return self.machines.save or 0.0
        return (self.costs.checkpoint + self.costs.checkpoint_each) / _COPIED

    # The parts of the plan

    def details(self, row: dict[str, Any]) -> dict[str, Any]:
        """All that is told of the run on its own devices; ``row`` is that of these."""
        return {
            "parameters": self._parameters(),
            "crops": None if self.costs is None else [asdict(crop) for crop in self.costs.crops],
            "flops": None
            if self.costs is None
            else {"a_step": self.costs.flops, "an_image": self.costs.flops / self.costs.images},
            "memory": self._memory(),
            "exchanged": self._exchanged(),
            "checkpoints": self._checkpoints(),
            "time": self._time(row),
            "failures": self._lost(row),
        }

    def _parameters(self) -> dict[str, Any] | None:
        if self.costs is None:
            return None
        parts = self.costs.parameters
        return {"total": sum(parts.values()), "trained": self.costs.trained, "parts": parts}

    def _memory(self) -> dict[str, Any] | None:
        """Bytes of one device."""
        costs = self.costs
        if costs is None:
            return None
        return {
            "weights": costs.weights,
            "optimizer": costs.optimizer,
            "average": costs.average,
            "queues_and_buffers": costs.kept,
            "step": costs.step,
            "tensors": costs.memory,
            "in_practice": round(ON_TOP * costs.memory),
            "of_device": self.place.memory or None,
        }

    def _exchanged(self) -> dict[str, Any] | None:
        """Bytes and calls of a step: those of the tensors of one process, and what it sends on the way."""
        if self.costs is None:
            return None
        kinds: dict[str, dict[str, int]] = {}
        for exchange in self.costs.exchanges if self.shape.world_size > 1 else ():
            entry = kinds.setdefault(exchange.of, {"calls": 0, "bytes": 0})
            entry["calls"] += 1
            entry["bytes"] += exchange.payload
        sent = communication(self.costs.exchanges, self.shape.world_size, 1.0, 1.0, 0.0).sent
        return {"bytes": sum(one["bytes"] for one in kinds.values()), "sent": sent, "by": kinds}

    def _checkpoints(self) -> dict[str, Any] | None:
        if self.costs is None:
            return None
        saving, total = self.recipe.checkpoint, self.shape.total_steps
        size = self.costs.checkpoint + self.shape.world_size * self.costs.checkpoint_each
        written = -(-total // self.save_every) if self.save_every else 1
        apart = 0
        if saving.keep_every_epochs:
            apart = max(0, self.shape.epochs // saving.keep_every_epochs - saving.keep)
        kept = min(written, saving.keep + apart)
        return {
            "bytes": size,
            "every_steps": self.save_every,
            "written": written,
            "kept": kept,
            "on_disk": (kept + 1) * size,  # one more is being written before an old one goes
            "waited_seconds": self.save_seconds,
        }

    def _time(self, row: dict[str, Any]) -> dict[str, Any]:
        step = row["step_seconds"]
        one = None if self.seconds_an_image is None else 1 / self.seconds_an_image
        run = row["run_seconds"]
        return {
            "step_seconds": step,
            "epoch_seconds": None if step is None else step * self.shape.steps_per_epoch,
            "run_seconds": run,
            "device_hours": None if run is None else run * row["devices"] / 3600,
            "images_per_second": row["images_per_second"],
            "of_one_device": one,
            "communication_share": row["communication_share"],
            **self.speed,
        }

    def _lost(self, row: dict[str, Any]) -> dict[str, Any] | None:
        if row["step_seconds"] is None:
            return None
        failures = self._failures(row["devices"], row["step_seconds"])
        if failures is None:
            return None
        waste = failures.lost + failures.saving
        return {
            "a_device_a_day": self.machines.failures,
            "seconds_between": failures.between,
            "checkpoint_seconds": (self.save_every or self.shape.total_steps) * row["step_seconds"],
            "restart_seconds": self.machines.restart,
            "lost_share": failures.lost,
            "saving_share": failures.saving,
            "best_checkpoint_seconds": failures.best_interval,
            "run_seconds": row["run_seconds"] / (1 - waste) if waste < 1 else None,
        }

    def too_large(self) -> Iterator[str]:
        """A warning where the device is too small."""
        there = self.place.memory
        if self.costs is None or not there:
            return
        needed = ON_TOP * self.costs.memory
        if needed > there:
            yield (
                f"a step takes about {needed / _GIGA:.1f} GB ({self.costs.memory / _GIGA:.1f} GB of tensors, and what "
                f"allocators and libraries add), {self.place.name} has {there / _GIGA:.1f} GB: more devices, "
                "engine.accumulate, or engine.activation_checkpointing"
            )
