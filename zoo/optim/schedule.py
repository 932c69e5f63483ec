"""Learning rates as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WarmupCosine", "WarmupSteps"]


def _warm_up(step: int, start: float, base: float, steps: int) -> float:
    """A line from ``start`` to ``base``, both included; of a single step only ``start``."""
    if steps == 1:
        return start
    if step == steps - 1:
        return base
    return start + step * ((base - start) / (steps - 1))


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up, then half a cosine (SwAV ``main_swav.py``).

    The warm-up runs from ``start`` to ``base`` inclusive; the cosine begins at ``base`` again, so that
    value appears twice, and stops one step short of ``final``.

    Args:
        base: the peak learning rate.
        final: where the cosine heads.
        start: the first rate of the warm-up.
        warmup_steps: may be 0.
        total_steps: steps of the whole run.
    """

    base: float
    final: float
    start: float
    warmup_steps: int
    total_steps: int

    def at(self, step: int) -> float:
        """The learning rate of a step, 0 <= step < total_steps."""
        if step < self.warmup_steps:
            return _warm_up(step, self.start, self.base, self.warmup_steps)
        span = self.total_steps - self.warmup_steps
        turn = math.pi * (step - self.warmup_steps) / span
        return self.final + 0.5 * (self.base - self.final) * (1.0 + math.cos(turn))


@dataclass(frozen=True)
class WarmupSteps:
    """The same warm-up, then a constant rate that is multiplied at some steps (MoCo ``main_moco.py``).

    Args:
        base: the rate before any drop.
        start: the first rate of the warm-up.
        warmup_steps: may be 0.
        drops: the steps from which on the rate is multiplied once more.
        factor: what it is multiplied by.
        meets_drops: the warm-up leads to the rate that is due at its end, as detectron2's does; else to ``base``,
            whatever was dropped until then, as AMDIM's.
    """

    base: float
    start: float
    warmup_steps: int
    drops: tuple[int, ...]
    factor: float
    meets_drops: bool = False

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            end = self._dropped(self.warmup_steps - 1) if self.meets_drops else self.base
            return _warm_up(step, self.start, end, self.warmup_steps)
        return self._dropped(step)

    def _dropped(self, step: int) -> float:
        return self.base * self.factor ** sum(step >= drop for drop in self.drops)
