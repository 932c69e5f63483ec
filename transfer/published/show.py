"""A paper's table with what was measured beside it, as JSON and as words. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compare import in_words
from .measured import beside
from .model import Panel, PaperTable

__all__ = ["panel_words", "table_json"]

_HERE = "here: "


def table_json(table: PaperTable, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table as JSON.

    Args:
        table: what was published.
        results: contents of ``result.json``.

    Returns:
        ``name``, ``title`` and ``panels``, each with ``rows`` (``published`` by column, ``measured``: what was
        measured of that very model by the paper's protocol) and ``also_measured`` (see ``measured.beside``).
    """
    return {"name": table.name, "title": table.title, "panels": [_panel(p, results) for p in table.panels]}


def _panel(panel: Panel, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    inside, below = beside(panel, results)
    titles = [column.title for column in panel.columns]
    rows = [
        {
            "method": row.method,
            "about": dict(zip(panel.about, row.about, strict=True)),
            "published": dict(zip(titles, row.values, strict=True)),
            "run_by_swavs_authors": list(row.by_authors),
            "source": f"SwAV paper, {row.source}" if row.source else panel.source,
            "measured": measured,
        }
        for row, measured in zip(panel.rows, inside, strict=True)
    ]
    return {
        "title": panel.title,
        "source": panel.source,
        "about": list(panel.about),
        "columns": titles,
        "rows": rows,
        "also_measured": below,
        "notes": list(panel.notes),
    }


def panel_words(panel: Mapping[str, Any]) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a panel of ``table_json``, for people.

    Published numbers have their columns, measured ones others (``here: ...``), each with by what; a column in which
    nothing was measured is left out.
    """
    entries = [*(entry for row in panel["rows"] for entry in row["measured"]), *panel["also_measured"]]
    here = [title for title in panel["columns"] if any(title in entry["values"] for entry in entries)]
    columns = ["method", *panel["about"], *panel["columns"], *(_HERE + title for title in here)]
    rows = []
    for row in panel["rows"]:
        first, *more = row["measured"] or [None]
        words = {"method": row["method"], **row["about"], **_published(row)}
        rows.append({**words, **_measured(first)} if first else words)
        rows += [{"method": row["method"], **row["about"], **_measured(entry)} for entry in more]
    rows += [{"method": entry["method"], **_measured(entry)} for entry in panel["also_measured"]]
    return [*columns, "by"] if here else columns, rows


def _published(row: Mapping[str, Any]) -> dict[str, str]:
    marks = dict.fromkeys(row["run_by_swavs_authors"], "+")
    values = {title: value for title, value in row["published"].items() if value is not None}
    return {
        title: (value if isinstance(value, str) else f"{value:.1f}") + marks.get(title, "")
        for title, value in values.items()
    }


def _measured(entry: Mapping[str, Any]) -> dict[str, str]:
    words = {_HERE + title: in_words(value) for title, value in entry["values"].items()}
    kinds = ["small protocol"] if entry["small"] else []
    kinds.append(f"not the paper's {', '.join(entry['differs'])}" if entry["differs"] else "as in the paper")
    seeds = ", ".join(map(str, entry["seeds"]))
    by = f"{entry['model']} on {entry['dataset']}, {entry['protocol']}, seed {seeds} ({'; '.join(kinds)})"
    return {**words, "by": by}
