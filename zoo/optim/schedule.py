"""Learning rates as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WarmupCosine"]


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
            if self.warmup_steps == 1:
                return self.start
            if step == self.warmup_steps - 1:
                return self.base
            return self.start + step * ((self.base - self.start) / (self.warmup_steps - 1))
        span = self.total_steps - self.warmup_steps
        turn = math.pi * (step - self.warmup_steps) / span
        return self.final + 0.5 * (self.base - self.final) * (1.0 + math.cos(turn))
