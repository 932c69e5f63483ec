"""How commands print: data on standard output, notes on standard error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["print_json", "print_table", "set_up_notes"]


def set_up_notes(quiet: bool = False) -> None:
    """Show the library's notes (``note:``) and warnings (``warning:``) on standard error."""
    logger = logging.getLogger("zoo")
    logger.handlers = [_Notes()]
    logger.propagate = False
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        label = "warning" if record.levelno >= logging.WARNING else "note"
        print(f"{label}: {record.getMessage()}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A table on standard output; on a terminal with lines and colours, in a pipe plain and unwrapped."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    print(title)
    if not sys.stdout.isatty():
        _print_plain([list(columns), *cells])
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.ROUNDED)
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def _print_plain(lines: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
