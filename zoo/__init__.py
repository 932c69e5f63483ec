"""A zoo of self-supervised vision backbones: made here, published, loaded and judged.

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["pretrain"]


def __getattr__(name: str) -> Any:
    if name == "pretrain":
        return importlib.import_module(".pretrain", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
