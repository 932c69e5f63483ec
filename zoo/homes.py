"""Where things live: the user's data folder (kept) and cache (may be cleaned at any time)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["cache_home", "hub_home"]


def hub_home() -> Path:
    """The local hub: ``$ZOO_HOME/hub``, else below the user's data folder. Never the cache: it may hold the only copy."""
    if os.environ.get("ZOO_HOME"):
        return Path(os.environ["ZOO_HOME"]).expanduser() / "hub"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "zoo" / "hub"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "zoo" / "hub"


def cache_home() -> Path:
    """Downloads, receipts and other things that can be made again: ``$ZOO_CACHE``, else the user's cache."""
    if os.environ.get("ZOO_CACHE"):
        return Path(os.environ["ZOO_CACHE"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "zoo"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoo"
