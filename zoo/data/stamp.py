"""Whether the files of a collection were touched: stricter than a fingerprint, and of this machine only."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from typing import Any

from .folder import FileImages
from .parquet import ParquetImages

__all__ = ["files_stamp"]


def files_stamp(source: Any) -> str:
    """SHA-256 of how files are decoded and of the size and times of every one.

    A fingerprint holds names and sizes: a picture that was painted over may keep both. What is kept on this
    machine (features half made, a cache) asks for this, too. Of shards the fingerprint has to do.

    Args:
        source: an ``ImageSource``, or one made of others (``source``, ``sources``).
    """
    digest = hashlib.sha256()
    _add(source, digest)
    return digest.hexdigest()


def _add(source: Any, digest: Any) -> None:
    for inner in (getattr(source, "source", None), *getattr(source, "sources", ())):
        if inner is not None:
            _add(inner, digest)
    if isinstance(source, FileImages):
        digest.update(repr(asdict(source.decoding)).encode())
        for index in range(len(source)):
            digest.update(_stamp(source.where(index)))
    elif isinstance(source, ParquetImages):
        for path in source.files:
            digest.update(_stamp(path))


def _stamp(path: str) -> bytes:
    try:
        status = os.stat(path)
    except OSError:  # reading it will say so
        return b"absent\n"
    return b"%d %d %d\n" % (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
