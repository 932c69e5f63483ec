"""The methods by name: one line each."""

from __future__ import annotations

from ...registry import Entry, Registry

__all__ = ["METHODS"]

METHODS = Registry(
    "method",
    __name__,
    Entry("swav", "swav_config:SwAVConfig", "swav:SwAV", "swapped prediction of Sinkhorn codes"),
)
