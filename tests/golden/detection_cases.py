"""Golden cases of detection: detectron2's numbers, with the tolerance of each output."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .cases import Case, fill_rule, hash_uniform, shared_folder

__all__ = [
    "DTYPE",
    "EXACT",
    "OPERATIONS",
    "DetectionCase",
    "check_found",
    "detection_ids",
    "fill_named",
    "load_detection",
    "picture",
    "summary",
    "their_name",
]

OPERATIONS = "detection_ops"
EXACT = bool(os.environ.get("ZOO_EXACT"))
DTYPE = torch.float64 if EXACT else torch.float32


def _index(folder: Path) -> dict[str, dict[str, Any]]:
    text = (folder / "golden" / "index_detection.json").read_text("utf-8")
    return {entry["id"]: entry for entry in json.loads(text)["cases"]}


def detection_ids(family: str, usual: Sequence[str] = ()) -> list[str]:
    """Ids of a family, for ``pytest.mark.parametrize``; a placeholder where the facts are absent.

    Without ZOO_EXACT only the ``usual`` ones, if there are any: a network of full size takes seconds each.
    """
    try:
        known = _index(shared_folder())
    except FileNotFoundError:
        return [f"{family}*"]
    found = [name for name, entry in known.items() if entry["family"] == family]
    if not found:
        raise LookupError(f"no golden case is of the family {family}")
    return [name for name in found if EXACT or not usual or name in usual]


class DetectionCase(Case):
    """A case whose tolerance may differ by output."""

    def check(self, name: str, got: Any, **tighter: float) -> None:
        self.compare(name, got, self.outputs[name], **{**self.tolerance_of(name), **tighter})

    def tolerance_of(self, name: str) -> dict[str, Any]:
        """``exact``, or ``atol`` and ``rtol``."""
        found: Any = self.tolerance
        if isinstance(found, dict) and "per_output" in found:
            found = found["per_output"][name]
        return {"exact": True} if isinstance(found, str) else dict(found)

    def compare(self, name: str, got: Any, want: Any, **tighter: float) -> None:
        case = Case(self.id, self.args, {}, self.entry, self.inputs, self.outputs)
        case.compare(name, got, want, **(tighter or self.tolerance_of(name)))


def load_detection(folder: Path, name: str) -> DetectionCase:
    """Read a case with all its tensors."""
    entry = _index(folder)[name]
    parts: dict[str, dict[str, torch.Tensor]] = {"in": {}, "out": {}}
    if entry["file"] is not None and entry["file"].endswith(".safetensors"):
        with safe_open(folder / "golden" / entry["file"], framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                if key.startswith(f"{name}/"):
                    side, tensor = key[len(name) + 1 :].split("/", 1)
                    parts[side][tensor] = file.get_tensor(key)
        for side, listed in (("in", entry["inputs"]), ("out", entry["outputs"])):
            assert parts[side].keys() == listed.keys(), f"{name}: the file's tensors are not the index's"
    return DetectionCase(name, entry["args"], entry["tolerance"], entry, parts["in"], parts["out"])


def picture(name: str, height: int, width: int) -> torch.Tensor:
    """The uint8 image (3, height, width) of a name."""
    values = (256 * hash_uniform(name, 3 * height * width)).astype("uint8")
    return torch.from_numpy(values).view(3, height, width)


def fill_named(
    module: torch.nn.Module, names: dict[str, str], gains: dict[str, float], kept: dict[Any, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Fill a module that was built on the meta device by the rule under the reference's names.

    Args:
        module: what is filled, in ``DTYPE``.
        names: beginnings of our names -> theirs.
        gains: of their names; 1 for the others.
        kept: values that were computed before, by name: most of the time would be spent on them.

    Returns:
        Its state; a copy.
    """
    state = {}
    for key, tensor in module.state_dict().items():
        theirs = their_name(key, names)
        gain = gains.get(theirs, 1.0)
        if (theirs, gain) not in kept:
            kept[theirs, gain] = fill_rule(theirs, tensor.shape, gain)
        value = kept[theirs, gain]
        state[key] = value.to(DTYPE) if value.is_floating_point() else value
    module.load_state_dict({key: value.clone() for key, value in state.items()}, assign=True)
    return state


def their_name(key: str, names: dict[str, str]) -> str:
    """Our name by the reference's rules."""
    for ours, theirs in names.items():
        if key.startswith(ours):
            return theirs + key[len(ours) :]
    return key


def summary(tensor: torch.Tensor) -> torch.Tensor:
    """The reference's digest: mean, deviation, mean size, least, most, and eight values."""
    x = tensor.detach().double().flatten()
    places: Sequence[int] = [round(i * (len(x) - 1) / 7) for i in range(8)]
    five = [x.mean(), x.std(correction=0), x.abs().mean(), x.min(), x.max()]
    return torch.cat((torch.stack(five), x[list(places)]))


def check_found(case: DetectionCase, row: int, found: Any) -> torch.Tensor:
    """Compare the detections of an image; those whose scores the tolerance can't tell apart may change places.

    Returns:
        The order of ours that is theirs.
    """
    key = f"infer/det{row}"
    labels, boxes = (case.outputs[f"{key}_{name}"] for name in ("classes", "boxes"))
    case.check(f"{key}_scores", found.scores, **({"rtol": 1e-6, "atol": 1e-8} if EXACT else {}))
    apart = (found.boxes[None].double() - boxes[:, None].double()).abs().amax(dim=2)
    apart += 1e6 * (found.labels[None] != labels[:, None])
    order = apart.argmin(dim=1)
    assert sorted(order.tolist()) == list(range(len(labels))), f"{case.id}: other detections"
    case.check(f"{key}_classes", found.labels[order])
    case.check(f"{key}_boxes", found.boxes.float()[order])
    case.check(f"{key}_scores", found.scores[order])
    if EXACT:
        assert torch.equal(order, torch.arange(len(labels)))
    return order
