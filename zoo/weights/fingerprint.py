"""What a network makes of one picture, so that anybody can see whether a copy still computes the same.

The picture is drawn by a formula on whole numbers and the features are computed in float64: machines and
releases of torch differ in the last of 16 digits then, of which 6 are kept. So the record of the same
weights is the same everywhere, and publishing again on another machine changes nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..models.factory import create_trunk
from ..models.foreign import is_foreign
from .fill import fill_trunk
from .formats.base import Network

__all__ = ["TOLERANCE", "feature_record", "features_differ", "made_picture", "record_features"]

PICTURE = "rings-1"  # another formula gets another name
TOLERANCE = 1e-4
_COUNT = 16  # features that are written down
_SIDE = 448  # pixels; larger pictures tell no more
_DIGITS = 6


def made_picture(side: int, channels: int = 3) -> torch.Tensor:
    """A picture of rings that become finer from one corner to the other, each channel its own.

    Args:
        side: in pixels.
        channels: how many.

    Returns:
        uint8 (channels, side, side).
    """
    across = torch.arange(side, dtype=torch.int64) * 256 // side
    x, y = across[None, :], across[:, None]
    planes = [
        (((c + 1) * x * x + (c + 2) * y * y + 3 * x * y) // 128 + 41 * c) % 256 for c in range(channels)
    ]
    return torch.stack(planes).to(torch.uint8)


def feature_record(trunk: Any, how: Mapping[str, Any], where: object) -> dict[str, Any]:
    """What ``zoo.json`` keeps under ``features``.

    Args:
        trunk: the network; it is set to eval mode. One that is not the zoo's own is left in the type that it
            was computed in: float64, or float32 if it can't.
        how: its preprocessing. The picture is drawn with the side ``crop`` (448 at most, for the zoo's own
            networks); ``mean`` and ``std`` are applied.
        where: what it was read from, for messages.

    Returns:
        ``picture`` (its name), ``norm`` of all pooled features, and ``values``: the first 16 of them.

    Raises:
        InputError: features that are no finite numbers, or a preprocessing that doesn't fit the network.
    """
    mean, std = (torch.tensor(how[key], dtype=torch.float64)[:, None, None] for key in ("mean", "std"))
    side = int(how["crop"]) if is_foreign(trunk) else min(int(how["crop"]), _SIDE)
    image = (made_picture(side, len(mean)).double() / 255 - mean) / std
    try:
        with torch.no_grad():
            features = _features(trunk.eval(), image[None])[0]
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"The network can't take an image by its preprocessing ({reason}).", where=where
        ) from None
    norm = float(features.norm())
    if not math.isfinite(norm):
        raise InputError(
            "The network's features of a plain picture are no finite numbers.",
            where=where,
            fix="look at the weights (zoo doctor); use those of an earlier step",
        )
    values = [_short(float(value)) for value in features[:_COUNT]]
    return {"picture": PICTURE, "norm": _short(norm), "values": values}


def _features(trunk: nn.Module, images: torch.Tensor) -> torch.Tensor:
    if not is_foreign(trunk):
        with _layers_in_float64(trunk):
            return trunk(images)  # type: ignore[no-any-return]
    try:
        return trunk.double()(images)  # type: ignore[no-any-return]
    except RuntimeError:  # it makes float32 of something on the way
        return trunk.float()(images.float())  # type: ignore[no-any-return]


@contextlib.contextmanager
def _layers_in_float64(trunk: nn.Module) -> Iterator[None]:
    """Each layer computes in float64, and has its own numbers back when it is done.

    The whole network at once would take twice its memory again.
    """
    kept: dict[nn.Module, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}

    def enter(layer: nn.Module, inputs: Any) -> None:
        tables: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
        kept[layer] = [
            (table, name, value)
            for table in tables
            for name, value in table.items()
            if value is not None and value.is_floating_point()
        ]
        for table, name, value in kept[layer]:
            table[name] = value.double()

    def leave(layer: nn.Module, inputs: Any, output: Any) -> None:
        for table, name, value in kept.pop(layer):
            table[name] = value

    layers = [layer for layer in trunk.modules() if not any(layer.children())]
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in list(kept):  # an error in it
            leave(layer, None, None)


def record_features(
    network: Network, tensors: Mapping[str, torch.Tensor], how: Mapping[str, Any], where: object
) -> dict[str, Any]:
    """``feature_record`` of a trunk that is still a dict of tensors, which stay as they are.

    Raises:
        InputError: as ``feature_record``, or tensors that don't fit the network.
    """
    return feature_record(fill_trunk(create_trunk, network, tensors, where, how), how, where)


def features_differ(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """How two records differ by more than ``TOLERANCE`` (of a value, and of a hundredth of the norm).

    Args:
        recorded: of the published weights.
        found: of those that were loaded.

    Returns:
        A sentence, or None if they agree.
    """
    norm = float(recorded["norm"])
    pairs = {"norm": (norm, float(found["norm"]))}
    for index, (was, now) in enumerate(zip(recorded["values"], found["values"], strict=False)):
        pairs[f"feature {index}"] = (float(was), float(now))
    for name, (was, now) in pairs.items():
        if not abs(was - now) <= TOLERANCE * (abs(was) + norm / 100):
            return f"{name} is {now:g}, recorded is {was:g}"
    if len(recorded["values"]) != len(found["values"]):
        return f"{len(recorded['values'])} values are recorded, not {len(found['values'])}"
    return None


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
