"""Trust on first use: the SHA-256 that each download had the first time, in the user's ``lock.json``.

Few publishers state a full hash. So the first download pins one, and every later one must have it. The
file lies beside the hub, not in the cache: cleaning the cache forgets no pin. No torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import disk_errors, read_json, sha256_of, write_json
from ..homes import cache_home, hub_home

__all__ = ["file_sha256", "lock_path", "pin", "pinned", "remember_sha256"]

SCHEMA = 1


def lock_path() -> Path:
    """``lock.json`` in the user's data folder (``$ZOO_HOME``)."""
    return hub_home().parent / "lock.json"


def pinned(key: str) -> str | None:
    """The SHA-256 that a download was pinned to, or nothing if it was never seen.

    Args:
        key: what the download is called in the list.

    Raises:
        InputError: the list can't be read.
    """
    entry = _read().get(key)
    return None if entry is None else str(entry["sha256"])


def pin(key: str, sha256: str, size: int, source: str) -> str:
    """Pin a download, unless it is pinned: of several processes the first one wins.

    Args:
        key: what the download is called in the list.
        sha256: of its content.
        size: in bytes, for people.
        source: where it came from, for people: no secrets.

    Returns:
        The SHA-256 that is pinned now.

    Raises:
        InputError: the list can't be read.
        RunError: it can't be written.
    """
    path = lock_path()
    with disk_errors("Pinning a download", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_name(f".{path.name}.lock")):
            pins = _read()
            if key not in pins:
                when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                pins[key] = {"sha256": sha256, "size": size, "from": source, "on": when}
                write_json(path, {"schema": SCHEMA, "pins": dict(sorted(pins.items()))})
    return str(pins[key]["sha256"])


def file_sha256(path: Path, *, full: bool = False) -> str:
    """SHA-256 of a file, from a receipt if the file is as it was when it was hashed last.

    A receipt holds the file's size, times and inode; it lies in the cache.

    Args:
        path: the file.
        full: read every byte, whatever a receipt says.
    """
    stamp = _stamp(path)
    if not full:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a damaged receipt is no receipt
            known = read_json(_receipt(path))
            if known["stamp"] == stamp and re.fullmatch("[0-9a-f]{64}", known["sha256"]):
                return str(known["sha256"])
    digest = sha256_of(path)
    _keep(path, digest, stamp)
    return digest


def remember_sha256(path: Path, sha256: str) -> None:
    """Write the receipt of a file that was hashed a moment ago under another name."""
    with contextlib.suppress(OSError):
        _keep(path, sha256, _stamp(path))


def _keep(path: Path, sha256: str, stamp: list[int]) -> None:
    receipt = _receipt(path)
    with contextlib.suppress(OSError):  # without a receipt the next use hashes again; that is all
        receipt.parent.mkdir(parents=True, exist_ok=True)
        write_json(receipt, {"sha256": sha256, "stamp": stamp})


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _receipt(path: Path) -> Path:
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return cache_home() / "receipts" / f"{place}.json"


def _read() -> dict[str, dict[str, Any]]:
    path = lock_path()
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}, this version reads {SCHEMA}")
        pins = content["pins"]
        for key, entry in pins.items():
            if not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
                raise ValueError(f"the SHA-256 of {key} is none")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"The list of pinned downloads can't be read ({type(error).__name__}: {error}).",
            where=path,
            fix="repair it, or delete it: then the next download of each file is trusted again",
        ) from None
    return dict(pins)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
