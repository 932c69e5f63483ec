"""Golden cases: numbers that the reference code produced, read where they are published.

Nothing of them is kept in the project. A case is named by its id; new cases of a family are picked up
by their prefix.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

__all__ = [
    "Case",
    "case_ids",
    "fill_rule",
    "fill_state",
    "hash_signed",
    "hash_uniform",
    "load",
    "shared_folder",
]


def shared_folder() -> Path:
    """Where the shared facts should be; the folder need not exist."""
    named = os.environ.get("ZOO_SHARED")
    return Path(named) if named else Path(__file__).parents[3] / "shared"


def _index(folder: Path) -> dict[str, dict[str, Any]]:
    text = (folder / "golden" / "index.json").read_text(encoding="utf-8")
    return {entry["id"]: entry for entry in json.loads(text)["cases"]}


def case_ids(prefix: str, *, without: Sequence[str] = ()) -> list[str]:
    """Ids that begin with ``prefix`` and with none of ``without``, for ``pytest.mark.parametrize``.

    Where the facts are absent it is one placeholder: its test then asks the ``shared`` fixture, which
    skips or fails.

    Raises:
        LookupError: the facts are there, but no such case.
    """
    try:
        known = _index(shared_folder())
    except FileNotFoundError:
        return [f"{prefix}*"]
    found = [name for name in known if name.startswith(prefix) and not name.startswith(tuple(without))]
    if not found:
        raise LookupError(f"no golden case begins with {prefix}")
    return found


@dataclass(frozen=True)
class Case:
    """One golden case with its tensors."""

    id: str
    args: dict[str, Any]
    tolerance: dict[str, Any]
    entry: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]

    def check(self, name: str, got: torch.Tensor | Sequence[float] | float, **tighter: float) -> None:
        """Hold ``got`` against output ``name``, within the case's tolerance or the ``tighter`` one.

        Raises:
            AssertionError: another shape, or values outside the tolerance; with the largest deviation.
        """
        self.compare(name, got, self.outputs[name], **tighter)

    def compare(
        self,
        name: str,
        got: torch.Tensor | Sequence[float] | float,
        want: torch.Tensor | Sequence[float],
        **tighter: float,
    ) -> None:
        """Like ``check``, for a part of an output; ``name`` is only for the message."""
        tolerance = {**self.tolerance, **tighter}
        got_tensor, want_tensor = (
            value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            for value in (got, want)
        )
        assert got_tensor.shape == want_tensor.shape, f"{self.id}/{name}: shape {tuple(got_tensor.shape)}"
        if tolerance.get("exact") or not (want_tensor.is_floating_point() or "max_abs_levels" in tolerance):
            assert torch.equal(got_tensor, want_tensor), f"{self.id}/{name}: not equal"
            return
        deviation = (got_tensor.double() - want_tensor.double()).abs()
        if "max_abs_levels" in tolerance:
            allowed = torch.full_like(deviation, tolerance["max_abs_levels"])
        else:
            allowed = tolerance["atol"] + tolerance["rtol"] * want_tensor.double().abs()
        outside = ~(deviation <= allowed)  # a NaN is outside, too
        assert not outside.any(), (
            f"{self.id}/{name}: {int(outside.sum())} of {outside.numel()} values outside {tolerance}, "
            f"largest deviation {float(deviation.max()):.3g}"
        )


def load(folder: Path, name: str) -> Case:
    """Read a case with all its tensors."""
    entry = _index(folder)[name]
    parts: dict[str, dict[str, torch.Tensor]] = {"in": {}, "out": {}}
    with safe_open(folder / "golden" / entry["file"], framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            if key.startswith(f"{name}/"):
                side, tensor = key[len(name) + 1 :].split("/", 1)
                parts[side][tensor] = file.get_tensor(key)
    for side, listed in (("in", entry["inputs"]), ("out", entry["outputs"])):
        assert parts[side].keys() == listed.keys(), f"{name}: the file's tensors are not the index's"
    return Case(name, entry["args"], entry["tolerance"], entry, parts["in"], parts["out"])


def hash_uniform(name: str, count: int) -> np.ndarray:
    """The index's formula: ``count`` float64 numbers in (0, 1) that depend on ``name`` alone."""
    mask = 0xFFFFFFFF
    bits = np.arange(count, dtype=np.uint64)
    bits *= np.uint64(0x9E3779B1)
    bits += np.uint64(zlib.crc32(name.encode()))
    bits &= np.uint64(mask)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
        bits &= np.uint64(mask)
    bits ^= bits >> np.uint64(16)
    return (bits + 0.5) / (mask + 1)


def hash_signed(name: str, shape: Sequence[int], scale: float) -> torch.Tensor:
    """Numbers in (-scale, scale), float32."""
    values = scale * (2.0 * hash_uniform(name, math.prod(shape)) - 1.0)
    return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape))


def fill_rule(key: str, shape: Sequence[int], gain: float) -> torch.Tensor:
    """The value of the entry of a state dict with the reference's ``key``: float32, counters int64."""
    if key.endswith("num_batches_tracked"):
        return torch.zeros(tuple(shape), dtype=torch.int64)
    uniform = hash_uniform(key, math.prod(shape))
    signed = 2.0 * uniform - 1.0
    if key.endswith("running_var"):
        values = 0.5 + uniform
    elif key.endswith(("running_mean", "bias")):
        values = 0.1 * signed
    elif len(shape) == 1:
        values = 1.0 + 0.1 * signed
    else:
        values = gain * math.sqrt(3.0 / math.prod(shape[1:])) * signed
    return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape))


def fill_state(module: torch.nn.Module, case: Case) -> None:
    """Fill a module by ``fill_rule`` and hold some of its tensors against the case's digest.

    The module's names are the reference's but for the ``trunk.`` in front of the trunk's.
    """
    state = {key.removeprefix("trunk."): tensor for key, tensor in module.state_dict().items()}
    for key, tensor in state.items():
        tensor.copy_(fill_rule(key, tensor.shape, case.args["gain"]))
    for key, digest in case.entry.get("weight_digest", {}).items():
        values = state[key].double().flatten()
        assert torch.allclose(values[:3], torch.tensor(digest["first3"], dtype=torch.float64), atol=1e-9), key
        assert math.isclose(float(values.sum()), digest["sum_float64"], rel_tol=1e-9, abs_tol=1e-9), key
