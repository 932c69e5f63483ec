"""Tensors against the network that they should be: what is missing, has another shape, or is too much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import InputError
from ..reading.notes import shown

__all__ = ["COUNTER", "Comparison", "Shape", "compare"]

Shape = tuple[int, ...]
# Norms count their batches; files older than the counter, and some of detectron2's, lack it.
COUNTER = ".num_batches_tracked"


@dataclass(frozen=True)
class Comparison:
    """How tensors compare with a network's, but for counters of norms, which may be absent.

    Args:
        missing: the network's that are absent.
        wrong: those of another shape: name, shape found, shape wanted.
        extra: those that it has no place for.
        matched: those that are there in the right shape.
        total: the network's.
    """

    missing: tuple[str, ...]
    wrong: tuple[tuple[str, Shape, Shape], ...]
    extra: tuple[str, ...]
    matched: int
    total: int

    @property
    def whole(self) -> bool:
        return not (self.missing or self.wrong or self.extra)

    @property
    def likeness(self) -> float:
        """What both have alike, as a part of what either has: 1 if nothing differs."""
        return self.matched / (self.total + len(self.extra))

    def problem(self, name: str, where: object) -> InputError | None:
        """What keeps the tensors from being the network called ``name``; None if nothing does."""
        counted = f"{self.matched} of the {self.total} tensors of {name}, the network that fits best,"
        if self.missing:
            gone = f"{_first(self.missing)} missing"
            more = f"; {len(self.wrong)} of the others have another shape" if self.wrong else ""
            return InputError(
                f"Only {counted} are in the file; {gone}{more}.",
                where=where,
                fix="use a file that holds the whole backbone",
            )
        if self.wrong:
            key, got, want = self.wrong[0]
            return InputError(
                f"Only {counted} have its shapes; the first that differs is {key}: {got} in the file, {want} in "
                "the network.",
                where=where,
                fix="use weights of a network that the zoo has",
            )
        if self.extra:
            return InputError(
                f"The backbone has more than {name}, the network that fits best: {_first(self.extra)} too much.",
                where=where,
                fix="it is a variant (a deep stem, attention, anti-aliasing ...) that the zoo doesn't have",
            )
        return None


def compare(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> Comparison:
    """Shapes that a network has against those in a file."""
    absent = [name for name in wanted if name not in found]
    missing = [name for name in absent if not _excused(name, found)]
    wrong = [
        (name, found[name], shape)
        for name, shape in wanted.items()
        # Some frameworks write a counter as a vector of one.
        if name in found and found[name] != shape and not (name.endswith(COUNTER) and found[name] == (1,))
    ]
    return Comparison(
        missing=tuple(missing),
        wrong=tuple(wrong),
        extra=tuple(name for name in found if name not in wanted),
        matched=len(wanted) - len(absent) - len(wrong),
        total=len(wanted) - (len(absent) - len(missing)),
    )


def _excused(name: str, found: Mapping[str, Shape]) -> bool:
    """Whether it is the counter of a norm that is there."""
    return name.endswith(COUNTER) and f"{name.removesuffix(COUNTER)}.weight" in found


def _first(names: tuple[str, ...]) -> str:
    first = shown(names[0])
    return f"{first} is" if len(names) == 1 else f"{len(names)} tensors, the first of them {first}, are"
