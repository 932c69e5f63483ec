"""Things by name, imported only when one is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .errors import InputError, did_you_mean

__all__ = ["Entry", "Registry"]


class Entry(NamedTuple):
    """A torch-free config class and the code that it configures, as ``module:attribute``, and what it is."""

    name: str
    config: str
    code: str
    summary: str


class Registry(Mapping[str, Entry]):
    """Entries by name; an unknown one says what was meant.

    Args:
        kind: what the entries are, for messages.
        package: the package that their modules are relative to.
        entries: in the order they are listed.

    Raises:
        ValueError: two entries of one name.
    """

    def __init__(self, kind: str, package: str, *entries: Entry) -> None:
        self._kind = kind
        self._package = package
        self._entries = {entry.name: entry for entry in entries}
        if len(self._entries) != len(entries):
            names = [entry.name for entry in entries]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two {kind}s are called {twice!r}")

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def config(self, name: str) -> Any:
        """The config class of an entry; imports no torch."""
        return self._load(self._find(name).config)

    def code(self, name: str) -> Any:
        """The class or function of an entry."""
        return self._load(self._find(name).code)

    def _find(self, name: str) -> Entry:
        if name not in self._entries:
            raise InputError(
                f"There is no {self._kind} of this name.",
                where=name,
                fix=did_you_mean(name, self) + "Known: " + ", ".join(self),
            )
        return self._entries[name]

    def _load(self, target: str) -> Any:
        module, attribute = target.split(":")
        return getattr(importlib.import_module(f".{module}", self._package), attribute)
