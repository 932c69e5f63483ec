"""The SwAV paper's tables and figures as data, each number with where it stands, and what was measured beside them."""

from __future__ import annotations

import re

from zoo.errors import InputError, did_you_mean

from .figures import FIGURES
from .model import PaperTable
from .tables import TABLES

__all__ = ["PAPER", "find_table"]

PAPER = {table.name: table for table in (*TABLES, *FIGURES)}
"""By name: ``table1``, ..., ``figure6``."""


def find_table(name: str) -> PaperTable:
    """A table or figure by its name; ``Table 1``, ``fig. 2`` and ``fig2`` will do.

    Raises:
        InputError: there is none of this name; those that there are are named.
    """
    plain = re.sub(r"[\s._-]", "", name.lower())
    plain = re.sub(r"^(fig|tab)(?=\d)", lambda short: {"fig": "figure", "tab": "table"}[short[1]], plain)
    if plain not in PAPER:
        raise InputError(
            "There is no such table or figure.",
            where=name,
            fix=did_you_mean(plain, PAPER) + "known: " + ", ".join(PAPER),
        )
    return PAPER[plain]
