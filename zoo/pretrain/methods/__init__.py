"""The methods by name: one line each, imported only when asked for."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from ...errors import InputError, did_you_mean

__all__ = ["METHODS", "MethodEntry", "method_class", "method_config_class"]


class MethodEntry(NamedTuple):
    """Where a method's torch-free config and its code live, and what it is."""

    config: str
    method: str
    summary: str


METHODS: dict[str, MethodEntry] = {
    "swav": MethodEntry("swav_config:SwAVConfig", "swav:SwAV", "swapped prediction of Sinkhorn codes"),
}


def method_config_class(name: str) -> Any:
    """The pydantic class that validates a recipe's ``method`` section; imports no torch."""
    return _load(name, _entry(name).config)


def method_class(name: str) -> Any:
    """The method itself: a ``zoo.pretrain.methods.base.Method``."""
    return _load(name, _entry(name).method)


def _entry(name: str) -> MethodEntry:
    if name not in METHODS:
        raise InputError(
            "There is no method of this name.",
            where=f"method.name: {name}",
            fix=did_you_mean(name, METHODS) + "Known: " + ", ".join(METHODS),
        )
    return METHODS[name]


def _load(name: str, target: str) -> Any:
    module, attribute = target.split(":")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)
