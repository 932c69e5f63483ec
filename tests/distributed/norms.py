"""Inputs of the BatchNorm tests: whole batches, and which rows each process has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["NORMS_OF_FOUR", "NORMS_OF_TWO"]


def _case(
    kind: str,
    rows: tuple[int, ...],
    *shape: int,
    dtype: torch.dtype = torch.float64,
    mean: float = 0.0,
    group_size: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(shape))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layer = getattr(nn, kind)(shape[0], **options)
    state = {
        name: torch.rand(value.shape, generator=generator).to(value.dtype) + (name == "running_var")
        for name, value in layer.state_dict().items()
    }
    ends = torch.tensor(rows).cumsum(0).tolist()
    # Each process's part has another mean and another spread.
    sizes = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    by_process = sizes.view(-1, *(1,) * len(shape)).double()
    x = draw(sum(rows), *shape) * (1 + by_process) + 3 * by_process + mean
    return {
        "kind": kind,
        "options": options,
        "dtype": torch.float32 if dtype == torch.bfloat16 else dtype,
        "state": state,
        "x": x.to(dtype),
        "gradient": draw(*x.shape).to(dtype),
        "rows": [[end - count, end] for end, count in zip(ends, rows, strict=True)],
        "group_size": group_size,
    }


NORMS_OF_TWO = {
    "1d": _case("BatchNorm1d", (4, 4), 5),
    "1d of sequences": _case("BatchNorm1d", (4, 4), 5, 3),
    "2d": _case("BatchNorm2d", (2, 2), 3, 4, 5),
    "unequal": _case("BatchNorm2d", (1, 5), 3, 4, 2),
    "one value on one": _case("BatchNorm1d", (1, 5), 3),
    "nothing on one": _case("BatchNorm1d", (0, 6), 3),
    "cumulative": _case("BatchNorm2d", (3, 2), 3, 4, 2, momentum=None),
    "plain": _case("BatchNorm1d", (3, 4), 6, affine=False, eps=0.1),
    "without running statistics": _case("BatchNorm1d", (3, 4), 6, track_running_stats=False),
    "float32": _case("BatchNorm2d", (6, 2), 3, 8, 8, dtype=torch.float32),
    "float32 far from 0": _case("BatchNorm2d", (6, 2), 3, 8, 8, dtype=torch.float32, mean=1e4),
    "bfloat16": _case("BatchNorm2d", (6, 2), 3, 8, 8, dtype=torch.bfloat16),
}
NORMS_OF_FOUR = {
    "groups of two": _case("BatchNorm2d", (2, 3, 1, 4), 3, 2, 2, group_size=2),
    "all": _case("BatchNorm2d", (2, 3, 1, 4), 3, 2, 2),
}
