"""A list of checks, and those that every kind of weights goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import InputError, ZooError
from ..models.factory import create_trunk
from ..models.foreign import is_foreign
from .description import check_preprocessing
from .fill import STANDARD_PREPROCESSING, fill_trunk
from .formats.base import Network
from .reading.notes import shown

__all__ = [
    "FAILED",
    "NOT_CHECKED",
    "NOT_RECORDED",
    "OK",
    "Check",
    "Verification",
    "all_finite",
    "describe_network",
    "finite",
    "licence",
    "lineage",
    "preprocessing",
    "strict",
]

OK, FAILED, NOT_RECORDED, NOT_CHECKED = "ok", "FAILED", "not recorded", "not checked"
T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One line: what was checked, how it stands (``OK``, ``FAILED``, ...), and what was seen."""

    name: str
    state: str
    detail: str


@dataclass
class Verification:
    """What was found of a model.

    Args:
        reference: the model, as it was named.
        kind: what it is: ``a published model``, ``released weights``, ``a file`` ...
        checks: one after the other; what could not be checked because of a failure says so.
    """

    reference: str
    kind: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed; what nobody recorded is no failure."""
        return all(check.state != FAILED for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, schema 1."""
        return {"schema": 1, **asdict(self), "passed": self.passed}

    def add(self, name: str, state: str, detail: str) -> None:
        """Write a check down."""
        self.checks.append(Check(name, state, detail))

    def attempt(self, name: str, work: Callable[[], tuple[T, str]]) -> T | None:
        """Do a check: it gives a value and what was seen. An error fails it; then there is no value."""
        try:
            value, detail = work()
        except ZooError as error:
            place = "" if error.where is None else f" [{error.where}]"
            fix = "" if error.fix is None else f" What helps: {error.fix}."
            self.add(name, FAILED, f"{error.what}{place}{fix}")
            return None
        self.add(name, OK, detail)
        return value

    def skip(self, *names: str) -> Verification:
        """Write down what can't be checked any more."""
        for name in names:
            self.add(name, NOT_CHECKED, "what it needs has failed")
        return self


def describe_network(network: Network) -> str:
    """Which network, in a few words: ``resnet18 (base_planes 8)``."""
    usual = Network(network.arch)
    own = {
        key: getattr(network, key)
        for key in ("stem", "base_planes")
        if getattr(network, key) != getattr(usual, key)
    }
    said = ", ".join(f"{key} {value}" for key, value in {**own, **network.options}.items())
    return f"{network.arch} ({said})" if said else network.arch


def strict(
    network: Network,
    tensors: Mapping[str, torch.Tensor],
    where: object,
    expected: Mapping[str, Any],
    how: Mapping[str, Any] = STANDARD_PREPROCESSING,
) -> tuple[Any, str]:
    """Fill the network, every tensor in its place.

    Args:
        network: which.
        tensors: its trunk.
        where: what they were read from, for messages.
        expected: ``num_features`` and ``parameters``, as far as somebody states them.
        how: its preprocessing.

    Raises:
        InputError: they don't fit, or there are more or fewer than is stated.
    """
    trunk = fill_trunk(create_trunk, network, tensors, where, how)
    counted = {
        "parameters": sum(parameter.numel() for parameter in trunk.parameters()),
        "num_features": trunk.num_features,
    }
    for key, value in counted.items():
        if expected.get(key, value) != value:
            raise InputError(f"{key} is said to be {expected[key]}; the network has {value}.", where=where)
    return trunk, (
        f"{describe_network(network)}: all {len(tensors)} tensors fit, {counted['parameters']:,} parameters, "
        f"{counted['num_features']} features"
    )


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity in it."""
    small = tensor.is_floating_point() and tensor.dtype.itemsize == 1  # torch can't tell for those
    return bool(torch.isfinite(tensor.float() if small else tensor).all())


def finite(tensors: Mapping[str, torch.Tensor], where: object) -> tuple[bool, str]:
    """Look for NaN and infinity.

    Raises:
        InputError: there is one; the tensors are named.
    """
    odd = [name for name, value in tensors.items() if not all_finite(value)]
    if odd:
        listed = ", ".join(map(shown, odd[:3])) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        raise InputError(f"NaN or infinity in {listed}.", where=where, fix="zoo doctor says more")
    return True, f"{len(tensors)} tensors hold nothing but finite numbers"


def preprocessing(found: Verification, how: Mapping[str, Any], trunk: Any, where: object) -> bool:
    """Check a preprocessing, against the network's channels if there is a network; whether it passes.

    A network that is not the zoo's own was tried with them when it was built.
    """
    known = trunk is not None and not is_foreign(trunk)
    channels = int(next(trunk.parameters()).shape[1]) if known else None

    def check() -> tuple[bool, str]:
        check_preprocessing(how, where, channels)
        size = f"resize {how['resize']} ({how['interpolation']}), crop {how['crop']}"
        return True, f"{size}, mean {how['mean']}, std {how['std']}"

    return found.attempt("preprocessing", check) is not None


def licence(found: Verification, name: str) -> None:
    """Whether a licence is stated."""
    stated = name != "unspecified"
    found.add("licence", OK if stated else NOT_RECORDED, name if stated else "the publisher states none")


def lineage(found: Verification, known: Mapping[str, Any]) -> None:
    """Whether it is said where the weights come from."""
    if "converted_from" in known:
        origin = known["converted_from"]
        said = f"converted from {origin.get('released') or origin.get('file') or origin.get('what')}"
    elif "run" in known:
        said = f"run {known['run']}, step {known.get('step')} of {known.get('total_steps')}"
        if known.get("init_from"):
            said += f", begun from {known['init_from']}"
    else:
        said = ", ".join(f"{key} {value}" for key, value in known.items())
    found.add("lineage", OK if said else NOT_RECORDED, said or "nothing is said of where it comes from")
