"""Words for when memory runs out in a step: how much there was, and what to change by how much.

The shares were measured by ``benchmarks/step_memory.py``: SwAV, ResNet-50, 16 images of 2x224+6x96.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import RunError, is_out_of_memory

__all__ = ["explained_memory"]

_GIGA = 2**30
_ADVICE = (
    "what a step needs grows with these pixels. From the least change to the greatest, with what is left "
    "of a ResNet-50's memory: --set engine.accumulate=2 (the same batch in two parts: 50 %; in four: 29 %), "
    "--set engine.activation_checkpointing=true (activations are computed twice: 49 %), "
    "--precision bfloat16 (50 % of float32), all three (14 %), smaller or fewer crops (views.size, "
    "views.count; 2x224 alone: 78 % of 2x224+6x96), or a smaller --batch-size (half: 51 %; with "
    "optimizer.lr in proportion)"
)


@contextlib.contextmanager
def explained_memory(batch: Any, device: torch.device) -> Iterator[None]:
    """Turn running out of memory into what to change.

    Args:
        batch: what was trained on (``zoo.data.loader.Batch``); its ``memory_advice``, if it has one, is given.
        device: where.

    Raises:
        RunError: with what was measured and the settings that need less.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        pixels = sum(view.shape[0] * view.shape[-1] * view.shape[-2] for view in batch.views)
        views = ", ".join(f"{view.shape[0]} of {view.shape[-1]} px" for view in batch.views)
        raise RunError(
            f"Memory ran out on {device} in a step of {batch.size} images ({views}; {pixels / 1e6:.0f} million "
            f"pixels){_used(device)}.",
            fix=getattr(batch, "memory_advice", _ADVICE),
        ) from error


def _used(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_allocated(device)
        return f"; of {total / _GIGA:.1f} GB this process held up to {peak / _GIGA:.1f} GB, {free / _GIGA:.1f} GB are free"
    try:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    except ImportError:
        return ""
    return f"; this process held up to {peak / _GIGA:.1f} GB"
