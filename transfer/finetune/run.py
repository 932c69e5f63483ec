"""Fine-tuning on all labels."""

from __future__ import annotations

from typing import Any

from ..run import Context
from ..semisup.training import check_tunable, fine_tune
from .config import FinetuneConfig

__all__ = ["run"]


def run(context: Context, config: FinetuneConfig) -> dict[str, Any]:
    """Top-1 and top-5 of the last and of the best epoch on the test images.

    Raises:
        InputError: nothing to fine-tune, or too few images for a batch.
    """
    check_tunable(context, len(context.train))
    config = config.settled(len(context.train))
    return {"settled": config, **fine_tune(context, context.train, config)}
