"""A zoo of self-supervised vision backbones: made here, published, loaded and judged.

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "assign",
    "convert",
    "describe",
    "extract",
    "list_models",
    "load",
    "neighbours",
    "pretrain",
    "publish",
    "publish_to",
    "pull",
]


def __getattr__(name: str) -> Any:
    if name == "pretrain":
        return importlib.import_module(".pretrain", __name__)
    if name == "load":
        return importlib.import_module(".loading", __name__).load
    if name in ("describe", "list_models"):
        return getattr(importlib.import_module(".weights.listing", __name__), name)
    if name == "convert":
        return importlib.import_module(".conversion", __name__).convert
    if name == "publish":
        return importlib.import_module(".pretrain.publish", __name__).publish_run
    if name in ("publish_to", "pull"):
        return getattr(importlib.import_module(".publishing", __name__), name)
    if name == "extract":
        return importlib.import_module(".extraction", __name__).extract
    if name == "assign":
        return importlib.import_module(".assignment", __name__).assign
    if name == "neighbours":
        return importlib.import_module(".neighbourhood", __name__).neighbours
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
