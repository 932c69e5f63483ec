"""``zoo diff``: in what two models differ, tensor by tensor and in what is known of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .verify import checked_contents
from .weights.bundle import weights_digest
from .weights.checks import describe_network
from .weights.formats.base import ForeignModel

__all__ = ["Difference", "Part", "TensorDifference", "diff"]

_PARTS = ("trunk", "heads", "classifier")


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor that both models have in one shape differs.

    Args:
        name: with the part in front, if it isn't the trunk's.
        max_abs: the largest difference of two values; None if one of them is no finite number.
        relative: the norm of the difference as a part of the first one's norm; None where that is zero or
            not finite.
        cosine: of the angle between them; None where one is zero or not finite.
    """

    name: str
    max_abs: float | None
    relative: float | None
    cosine: float | None


@dataclass(frozen=True)
class Part:
    """A stage of the trunk, the heads or the classifier.

    Args:
        name: ``stem``, ``layer1``, ... ``heads``, ``classifier``.
        equal: tensors that are the same, bit by bit, in shape and type too.
        different: those whose values differ.
        max_abs: the largest difference in it; None if one is no finite number.
        relative: of the weights of its convolutions and linear layers together, as in ``TensorDifference``.
            Norms and counters are left out: they are large and alike in all networks.
        cosine: of the same.
    """

    name: str
    equal: int
    different: int
    max_abs: float | None
    relative: float | None
    cosine: float | None


@dataclass(frozen=True)
class Difference:
    """All that differs between two models.

    Args:
        first: the one, as it was named.
        second: the other.
        identical: nothing differs. What only one side knows (a licence, a recipe) is no difference.
        sha256: of the trunk's tensors, of each side: what ``model.safetensors`` has or would have.
        only_first: tensors that the second lacks.
        only_second: tensors that the first lacks.
        shapes: name, shape in the first and in the second.
        dtypes: name, type in the first and in the second.
        parts: what both have, in summary.
        worst: the tensors that differ most, by ``relative``.
        known: what both say of themselves and not alike: key, value of the first and of the second.
    """

    first: str
    second: str
    identical: bool
    sha256: tuple[str, str]
    only_first: list[str]
    only_second: list[str]
    shapes: list[tuple[str, list[int], list[int]]]
    dtypes: list[tuple[str, str, str]]
    parts: list[Part]
    worst: list[TensorDifference]
    known: dict[str, tuple[Any, Any]]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, schema 1."""
        return {"schema": 1, **asdict(self)}


def diff(first: str, second: str, *, worst: int = 8, progress: bool = True) -> Difference:
    """Compare two models.

    Args:
        first: anything that ``zoo.load`` takes but a random model.
        second: another one.
        worst: how many tensors are listed by themselves.
        progress: say on standard error what is downloaded.

    Raises:
        InputError: no such model, or a damaged or refused file.
        RunError: a download failed.
    """
    sides = [checked_contents(reference, progress=progress) for reference in (first, second)]
    (a, known_a), (b, known_b) = sides
    tensors_a, tensors_b = _tensors(a), _tensors(b)
    shared = [name for name in tensors_a if name in tensors_b]
    shapes = [
        (name, list(tensors_a[name].shape), list(tensors_b[name].shape))
        for name in shared
        if tensors_a[name].shape != tensors_b[name].shape
    ]
    dtypes = [
        (name, _dtype(tensors_a[name]), _dtype(tensors_b[name]))
        for name in shared
        if tensors_a[name].dtype != tensors_b[name].dtype
    ]
    misshapen = {name for name, *_ in shapes}
    groups: dict[str, list[_Sums]] = {}
    for name in shared:
        if name not in misshapen:
            groups.setdefault(_part(name), []).append(_compare(name, tensors_a[name], tensors_b[name]))
    changed = [each.summary() for group in groups.values() for each in group if not each.equal]
    changed.sort(key=_rank)
    known = dict(_differences(_known(a, known_a), _known(b, known_b)))
    only_first = [name for name in tensors_a if name not in tensors_b]
    only_second = [name for name in tensors_b if name not in tensors_a]
    return Difference(
        first=first,
        second=second,
        identical=not any((only_first, only_second, shapes, dtypes, changed, known)),
        sha256=(_digest(a, known_a), _digest(b, known_b)),
        only_first=only_first,
        only_second=only_second,
        shapes=shapes,
        dtypes=dtypes,
        parts=[_summary(name, group) for name, group in groups.items()],
        worst=changed[:worst],
        known=known,
    )


def _rank(each: TensorDifference) -> tuple[bool, float]:
    """The largest first; counters last, since those of two trainings say nothing about the networks."""
    return each.name.endswith("num_batches_tracked"), -math.inf if each.relative is None else -each.relative


# --- tensors ---


@dataclass(frozen=True)
class _Sums:
    """Of one tensor or of several: squares of the values, of the differences, and products, in float64."""

    name: str
    equal: bool
    weights: bool
    max_abs: float
    squares_a: float
    squares_b: float
    squares: float
    products: float

    def summary(self) -> TensorDifference:
        return TensorDifference(self.name, _plain(self.max_abs), *self.relative_and_cosine())

    def relative_and_cosine(self) -> tuple[float | None, float | None]:
        relative = (self.squares / self.squares_a) ** 0.5 if self.squares_a else None
        both = (self.squares_a * self.squares_b) ** 0.5
        cosine = _plain(self.products / both) if both else None
        return _plain(relative), None if cosine is None else max(-1.0, min(1.0, cosine))


def _compare(name: str, a: torch.Tensor, b: torch.Tensor) -> _Sums:
    equal = a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    x, y = (_numbers(each).double().flatten() for each in (a, b))
    gap = y - x
    largest = float(gap.abs().max()) if len(gap) else 0.0
    sums = (float(each) for each in (x @ x, y @ y, gap @ gap, x @ y))
    return _Sums(name, equal, a.ndim > 1, 0.0 if equal else largest, *sums)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """By its bits NaN equals the same NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _summary(name: str, group: list[_Sums]) -> Part:
    def total(field: str) -> float:
        return float(sum(getattr(each, field) for each in group if each.weights))

    # NaN counts as the largest.
    largest = max((each.max_abs for each in group), key=lambda value: math.inf if value != value else value)
    whole = _Sums(
        name, False, True, largest, *map(total, ("squares_a", "squares_b", "squares", "products"))
    ).summary()
    equal = sum(each.equal for each in group)
    return Part(name, equal, len(group) - equal, whole.max_abs, whole.relative, whole.cosine)


def _plain(value: float | None) -> float | None:
    """A number that JSON has."""
    return value if value is not None and math.isfinite(value) else None


def _tensors(model: ForeignModel) -> dict[str, torch.Tensor]:
    named = {part: getattr(model, part) for part in _PARTS}
    return {
        name if part == "trunk" else f"{part}.{name}": tensor
        for part, tensors in named.items()
        for name, tensor in tensors.items()
    }


def _part(name: str) -> str:
    first, _, rest = name.partition(".")
    if first in ("conv1", "bn1"):
        return "stem"
    return f"{first}.{rest.partition('.')[0]}" if first == "layer_list" else first


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtypes(model: ForeignModel) -> list[str]:
    return sorted({_dtype(tensor) for tensor in model.trunk.values() if tensor.is_floating_point()})


def _digest(model: ForeignModel, known: Mapping[str, Any]) -> str:
    return str(known.get("weights_sha256") or weights_digest(model.trunk))


# --- what is known ---


def _known(model: ForeignModel, known: Mapping[str, Any]) -> dict[str, Any]:
    """What counts when two models are compared; absent where it isn't known."""
    found = {
        "network": describe_network(model.network),
        "method": model.method,
        "stored as": model.facts.get("dtype") or _dtypes(model),
        "licence": known.get("licence"),
        "preprocessing": model.preprocessing,
        "recipe": known.get("recipe"),
    }
    return {key: value for key, value in found.items() if value not in (None, {}, "unknown", "unspecified")}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in a:
        if key in b:
            flat_a, flat_b = _flat(key, a[key]), _flat(key, b[key])
            for name in dict.fromkeys((*flat_a, *flat_b)):
                if flat_a.get(name) != flat_b.get(name):
                    yield name, (flat_a.get(name), flat_b.get(name))


def _flat(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: list(value) if isinstance(value, tuple) else value}
    return {
        name: item for inner, entry in value.items() for name, item in _flat(f"{key}.{inner}", entry).items()
    }
