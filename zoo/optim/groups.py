"""Which parameters are decayed and adapted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["split_one_dimensional"]


def split_one_dimensional(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two groups: matrices and filters; and biases and norms, without weight decay or adaptation."""
    named = list(named)
    main = [p for _, p in named if p.ndim > 1]
    small = [p for _, p in named if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": main}] if main else []
    if small:
        groups.append({"params": small, "weight_decay": 0.0, "adapt": False})
    return groups
