"""What a published table is made of. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Column", "Measure", "Panel", "PaperTable", "Row"]


@dataclass(frozen=True, eq=False)
class Measure:
    """A transfer recipe that measures what columns show; each is itself alone.

    Args:
        recipe: a key of ``transfer.RECIPES``.
        datasets: names of the paper's data set, in small letters.
        settings: the paper's; what isn't named is the recipe's default.
        stands_for: whether another data set, with a label, may stand where this one is out of reach.
    """

    recipe: str
    datasets: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    stands_for: bool = True


@dataclass(frozen=True)
class Column:
    """Numbers of one kind.

    Args:
        title: as in the paper.
        measure: how it is measured here; None where no result holds it.
        metric: the result's name for it.
    """

    title: str
    measure: Measure | None = None
    metric: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Args:
        method: as in the paper.
        about: what the paper says of it, one for each of the panel's ``about``.
        values: one for each column, as printed; None where the paper has no number.
        models: names in the catalog, packaged recipes, and ``random:ARCH`` whose results belong into this row.
        ours: the same method's name here.
        settings: where the method's own protocol is another one than the column's: by recipe.
        sizes: resized shorter side and central crop of the test images, in pixels.
        by_authors: titles of the columns that SwAV's authors ran for another method.
        source: where the row stands, if not where the panel does.
    """

    method: str
    about: tuple[str, ...]
    values: tuple[float | str | None, ...]
    models: tuple[str, ...] = ()
    ours: str = ""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sizes: tuple[int, int] = (256, 224)
    by_authors: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Panel:
    """A part of a table or figure: rows of the same columns.

    Args:
        title: what it shows.
        source: where it stands.
        about: titles of what is said of each row beside its method.
        columns: titles of the numbers.
        rows: from top to bottom.
        notes: what to know when numbers are held against each other.
    """

    title: str
    source: str
    about: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.values) != len(self.columns) or len(row.about) != len(self.about):
                raise ValueError(f"{self.source}: the row {row.method} {row.about} doesn't fit the columns")


@dataclass(frozen=True)
class PaperTable:
    """A table or a figure."""

    name: str
    title: str
    panels: tuple[Panel, ...] = field(default=())
