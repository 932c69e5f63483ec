"""The frame of a report's page: its style, light and dark. Nothing in it is fetched from anywhere."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from ..errors import InputError
from ..files import disk_errors, write_text

__all__ = ["COLORS", "page_at", "write_page"]

COLORS = 8
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$TITLE</title>
<style>
:root { color-scheme: light dark; --back: #fff; --ink: #1d2430; --soft: #667085; --line: #d8dde5; --panel: #f6f7f9;
  --c0: #2563c9; --c1: #c2410c; --c2: #15803d; --c3: #9333a8; --c4: #a16207; --c5: #0e7490; --c6: #be185d;
  --c7: #4d5766; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181f; --ink: #e3e7ee; --soft: #98a2b3; --line: #333b49; --panel: #1c222c;
    --c0: #6ea8ff; --c1: #ff9a62; --c2: #5fd38a; --c3: #d99cf0; --c4: #e5bd55; --c5: #5cc8de; --c6: #ff85b3;
    --c7: #aab4c3; }
}
body { margin: 0 auto; max-width: 1180px; padding: 1.5rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; white-space: nowrap; }
th, .note { color: var(--soft); font-weight: normal; } .note { white-space: normal; }
li { margin-bottom: .5rem; overflow-wrap: anywhere; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem;
  margin-top: 1.5rem; }
figure { margin: 0; padding: .6rem; background: var(--panel); border-radius: 6px; }
figcaption { color: var(--soft); } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--line); stroke-width: 1; } .axis { stroke: var(--soft); }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke: currentColor; }
.band { opacity: .18; fill: currentColor; } circle, rect { fill: currentColor; }
.level { stroke: var(--soft); stroke-dasharray: 6 4; } text.level { stroke: none; }
.mark { stroke: currentColor; stroke-width: 2; stroke-dasharray: 2 3; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.key { background: currentColor; }
pre { background: var(--panel); padding: .8rem; border-radius: 6px; overflow-x: auto; font-size: 12.5px; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .4rem; } .pair img { width: 100%; }
</style>
</head>
<body>
<h1>$TITLE</h1>
$BODY
</body>
</html>
"""


def page_at(out: str | Path) -> Path:
    """Where a page is to be written.

    Raises:
        InputError: there is a folder.
    """
    out = Path(out)
    if out.is_dir():
        raise InputError(
            "The report would be where a folder is.", where=out, fix="name a file, such as report.html"
        )
    return out


def write_page(out: Path, title: str, body: str) -> None:
    """Write a page, whole or not at all.

    Args:
        out: the HTML file; it is replaced.
        title: plain text.
        body: HTML.

    Raises:
        RunError: the disk failed.
    """
    parts = {"TITLE": escape(title), "BODY": body}
    page = re.sub(r"\$(TITLE|BODY)", lambda match: parts[match[1]], _PAGE)
    with disk_errors("Writing the report", out):
        write_text(out, page)
