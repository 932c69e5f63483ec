"""Collapses of a training by its figures: which one it is, and what helps. No torch here.

What the figures are is said in ``zoo.pretrain.health``, which measures them.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Recipe

__all__ = ["EVENTS", "Event", "Monitor", "advice_for", "read_events"]

# A name comes before those that it explains: they are not told while it holds.
EVENTS = {
    "non-finite-gradient": "a gradient that is not finite",
    "rank-collapse": "all embeddings are alike",
    "one-prototype": "one prototype takes all",
    "uniform-codes": "the codes say nothing",
    "diverging": "the loss is worse than that of guessing and doesn't fall",
    "stuck-at-chance": "the loss is that of guessing",
}

# Of healthy runs of swav, moco, simclr, deepcluster_v2 and sela_v2 on small images the rank stayed above 4 and the
# spread above 0.08 (both MoCo's, in its first ten steps), the share of a prototype below 0.3, codes below 0.9.
# A rate of 100 gives a rank of 1.5 and a spread of 0.015 after two steps; epsilon 5 gives codes above 0.9999.
_RANK = 1.5
_SPREAD = 0.03
_SHARE = 0.95
_UNIFORM = 0.995
_LOOKS = 3  # in a row that must say the same

_NEAR = 0.005  # of chance
_WORSE = 1.2  # times chance; an untrained network may guess worse, but learns not to
_FLAT = 30  # steps in a row that a loss must be so near, or so far and not fall
_FLAT_EARLY = 300  # the same while a warm-up or frozen prototypes hold the learning back


@dataclass(frozen=True)
class Event:
    """Something that a run's owner should know.

    Args:
        name: a key of ``EVENTS``.
        step: when it was seen.
        seen: the numbers, in a sentence.
        advice: what helps.
    """

    name: str
    step: int
    seen: str
    advice: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {self.seen}. What helps: {self.advice}"


def read_events(file: Path) -> list[dict[str, Any]]:
    """The lines of an ``events.jsonl``; those that are damaged are left out."""
    events = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            event = json.loads(line)
            Event(**{key: event[key] for key in ("name", "step", "seen", "advice")})
        except (ValueError, TypeError, KeyError):
            continue
        events.append(event)
    return events


class Monitor:
    """Turns a run's figures into events, each name once.

    Args:
        advice: of each name, see ``advice_for``.
        quiet_until: the step until which the loss may be that of guessing for longer, since learning is held
            back.
    """

    def __init__(self, advice: Mapping[str, str] | None = None, quiet_until: int = 0) -> None:
        self._advice = advice or {}
        self._quiet_until = quiet_until
        self._told: set[str] = set()
        self._looks = dict.fromkeys(EVENTS, 0)
        self._always_uniform = True
        self._losses: deque[float] = deque(maxlen=_FLAT_EARLY)
        self._chance: float | None = None
        self._newest: Mapping[str, float] = {}

    def remember(self, names: Iterable[str]) -> None:
        """These were told before the run was interrupted."""
        self._told.update(names)

    def update(self, step: int, loss: float, figures: Mapping[str, float]) -> list[Event]:
        """Take in a step; at most one event comes back.

        Args:
            step: its number.
            loss: of the step.
            figures: what ``zoo.pretrain.health`` measured at this step; mostly nothing.
        """
        self._losses.append(loss)
        self._chance = figures.get("chance", self._chance)
        if figures:
            self._look(figures)
        for name, holds in self._holding(step).items():
            if self._looks[name] == _LOOKS - 1 and not holds:
                return []  # it may explain all that follows: the next look will tell
            if holds:
                if name in self._told:
                    return []
                self._told.add(name)
                return [Event(name, step, self._seen(name), self._advice.get(name, ""))]
        return []

    def _look(self, figures: Mapping[str, float]) -> None:
        self._newest = figures
        uniform = figures.get("code_entropy", 0.0) > _UNIFORM
        # Codes that become uniform later have nothing left to tell apart; then the loss says so.
        self._always_uniform &= uniform
        now = {
            "non-finite-gradient": not math.isfinite(figures.get("grad_norm", 0.0)),
            "rank-collapse": figures.get("rank", math.inf) < _RANK
            or figures.get("spread", math.inf) < _SPREAD,
            "one-prototype": figures.get("top_share", 0.0) >= _SHARE,
            "uniform-codes": uniform and self._always_uniform,
        }
        for name, holds in now.items():
            self._looks[name] = self._looks[name] + 1 if holds else 0

    def _holding(self, step: int) -> dict[str, bool]:
        needed = {"non-finite-gradient": 1}
        found = {name: count >= needed.get(name, _LOOKS) for name, count in self._looks.items()}
        chance, steps = self._chance, _FLAT_EARLY if step < self._quiet_until else _FLAT
        if chance and len(self._losses) >= steps:
            newest = list(self._losses)[-steps:]
            found["diverging"] = min(newest) > _WORSE * chance and not _falls(newest)
            found["stuck-at-chance"] = all(abs(loss - chance) <= _NEAR * chance for loss in newest)
        return found

    def _seen(self, name: str) -> str:
        loss, chance = self._losses[-1], self._chance
        said = f"{EVENTS[name]}; the loss is {loss:.3f}"
        if chance is not None:
            said += f", that of guessing would be ln {round(math.exp(chance))} = {chance:.3f}"
        newest = self._newest
        known = [f"{label} {newest[key]:.3g}" for key, label in _LABELS.items() if key in newest]
        return "; ".join([said, *known])


def _falls(losses: Sequence[float]) -> bool:
    """Whether the second half is lower than the first by more than noise: two standard errors."""
    half = len(losses) // 2
    before, after = fmean(losses[:half]), fmean(losses[half:])
    squares = sum((loss - before) ** 2 for loss in losses[:half])
    squares += sum((loss - after) ** 2 for loss in losses[half:])
    return before - after > 2 * math.sqrt(squares / (half * (half - 1)))


_LABELS = {
    "rank": "effective rank of the embeddings",
    "spread": "their spread",
    "top_share": "largest share of a prototype",
    "usage": "prototypes in use",
    "code_entropy": "entropy of a code",
    "grad_norm": "gradient norm",
}


def advice_for(recipe: Recipe) -> dict[str, str]:
    """What helps against each event, in the recipe's own keys with their present values."""
    method: Any = recipe.method
    warmup = "steps" if recipe.schedule.warmup_steps else "epochs"
    known: dict[str, str] = {
        "rate": f"a lower optimizer.lr (now {recipe.optimizer.lr:g})",
        "warmup": f"a longer warm-up (schedule.warmup_{warmup})",
        "crops": f"softer crops (a larger views.min_scale, now {list(recipe.views.min_scale)})",
        "images": "images that differ more than the views of one of them do (zoo views shows them)",
    }
    if hasattr(method, "epsilon"):
        known["epsilon"] = f"a smaller method.epsilon (now {method.epsilon:g})"
    if hasattr(method, "freeze_prototypes_steps"):
        known["freeze"] = (
            f"a longer method.freeze_prototypes_steps (now {method.freeze_prototypes_steps} steps)"
        )
    if hasattr(method, "prototypes"):
        known["prototypes"] = f"fewer method.prototypes (now {method.prototypes})"
    if getattr(method, "queue_length", 0):
        known["queue"] = (
            f"a smaller or later queue (method.queue_length, now {method.queue_length}, from epoch "
            f"method.queue_start_epoch, now {method.queue_start_epoch})"
        )
    wanted = {
        "non-finite-gradient": ("rate", "warmup"),
        "rank-collapse": ("rate", "warmup", "freeze", "images", "epsilon"),
        "one-prototype": ("rate", "epsilon", "freeze", "prototypes", "queue"),
        "uniform-codes": ("epsilon", "prototypes", "rate", "freeze"),
        "diverging": ("rate", "warmup", "freeze"),
        "stuck-at-chance": ("images", "crops", "epsilon", "rate", "prototypes", "freeze", "queue"),
    }
    return {name: "; ".join(known[key] for key in keys if key in known) for name, keys in wanted.items()}
