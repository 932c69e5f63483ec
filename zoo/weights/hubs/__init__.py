"""Homes of published models.

A home is a file with ``fetch_model(name, revision, *, progress, verify) -> Bundle``, which brings a model to
this machine, verified, and one line here: under the kind of reference that means it.
"""

from __future__ import annotations

from ...registry import Entry, Registry

__all__ = ["HUBS"]


def _entry(name: str, code: str, summary: str) -> Entry:
    return Entry(name, code, code, summary)  # a home has nothing to configure


HUBS = Registry(
    "hub",
    __name__,
    _entry("local", "local:fetch_model", "a folder of this machine"),
    _entry("hf", "hf_download:fetch_model", "the Hugging Face hub, or one that speaks its language"),
    _entry(
        "hub", "folder:fetch_model", "the local hub's layout at any address: a bucket, a disk, a web server"
    ),
)
