"""Released files by their addresses: fetched once, verified, kept in the cache. No torch here.

Files of the catalog are looked for on the user's own mirrors first: ``ZOO_MIRROR`` is a folder, or
several folders and addresses with spaces between them, which hold files by their base names. Then come
the publisher's. ``ZOO_OFFLINE=1`` (or ``HF_HUB_OFFLINE=1``) forbids the network, not folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ...addresses import forbidden
from ...errors import InputError, RunError, ZooError
from ...files import disk_errors, fsync_path, sha256_of
from ...homes import cache_home
from ..catalog import Card, Remote
from ..lock import file_sha256, lock_path, pin, pinned, remember_sha256
from .partial import Partial
from .transport import PATIENT, Patience, Unreachable, Watch, check_address, get, shown

__all__ = ["fetch", "forbidden"]

log = logging.getLogger("zoo")


def fetch(
    what: Card | Remote | str, *, progress: bool = True, verify: bool = False, patience: Patience = PATIENT
) -> Path:
    """A released file on this machine: from the cache, or downloaded, whole and verified.

    It has the hash that its publisher states, as far as one is stated, and the SHA-256 that it had when it
    was first used (``zoo.weights.lock``). Once it is there no network is touched.

    Args:
        what: a card of the catalog, one of its files, or an address (``http``, ``https``, ``file``).
        progress: say on standard error what is downloaded; on a terminal with a bar.
        verify: read every byte of a file in the cache even if it is as it was when last checked.
        patience: how long to wait for a server.

    Returns:
        The file's path; treat it as read-only.

    Raises:
        InputError: no address that can be used, a file that is not the one that was published or first
            used, one that nobody serves any more, or no network allowed.
        RunError: no address gave the file (each is named), or the disk is full or can't be written.
    """
    item = _item(what)
    if _in_cache(item, verify):
        return item.target
    with disk_errors("Preparing a download", item.target.parent, "ZOO_CACHE"):
        item.target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(item, progress):
        if _in_cache(item, verify):  # another process fetched it while we waited
            return item.target
        return _download(item, progress, patience)


@dataclass(frozen=True)
class _Item:
    """A file that is wanted: what is known of it, its name in the list of pins, its place, its addresses."""

    remote: Remote
    key: str
    target: Path
    addresses: list[str]


def _item(what: Card | Remote | str) -> _Item:
    downloads = cache_home() / "downloads"
    if isinstance(what, str):
        address = check_address(what)
        query = urlsplit(address).query
        key = shown(address) + (f"?{_digest(query)}" if query else "")  # a query may hold secrets
        base = unquote(shown(address).rpartition("/")[2])
        name = re.sub(r"[^A-Za-z0-9._-]", "_", base)[-100:].lstrip(".") or "file"
        return _Item(Remote(name, (address,)), key, downloads / _digest(key) / name, [address])
    remote = what.file if isinstance(what, Card) else what
    addresses = [*_own_mirrors(remote.name), *remote.mirrors]
    return _Item(remote, remote.name, downloads / remote.name, addresses)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _own_mirrors(name: str) -> list[str]:
    value = os.environ.get("ZOO_MIRROR", "").strip()
    words = [value] if os.path.isdir(os.path.expanduser(value)) else value.split()
    found = []
    for word in words:
        if "://" in word:
            parts = urlsplit(check_address(word, "ZOO_MIRROR: "))
            path = f"{parts.path.rstrip('/')}/{quote(name)}"
            found.append(urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")))
        else:
            found.append((Path(word).expanduser().absolute() / name).as_uri())
    return found


# --- is it the right file? ---


class _Fault(NamedTuple):
    """Why a file is not the one that is wanted, and whether only the user's own pin says so."""

    reason: str
    is_pin: bool = False


def _fault(item: _Item, path: Path, digest: str, source: str) -> _Fault | None:
    """Hold a file against what is known of it; what is used for the first time is pinned."""
    remote, size = item.remote, path.stat().st_size
    if remote.size not in (None, size):
        return _Fault(f"it has {size} bytes, and the publisher's has {remote.size}")
    if not digest.startswith(remote.sha256):
        return _Fault(f"its SHA-256 is {digest}, and the publisher's begins with {remote.sha256}")
    if remote.md5 and pinned(item.key) is None:
        md5 = _md5(path)
        if not md5.startswith(remote.md5):
            return _Fault(f"its MD5 is {md5}, and the publisher's begins with {remote.md5}")
    known = pinned(item.key) or pin(item.key, digest, size, source)
    if known != digest:
        return _Fault(f"its SHA-256 is {digest}, and that of the first download was {known}", is_pin=True)
    return None


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # it is what the publisher states
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _cache_fault(item: _Item, full: bool) -> _Fault | None:
    with disk_errors("Reading the cache", item.target):
        return _fault(item, item.target, file_sha256(item.target, full=full), "the cache")


def _in_cache(item: _Item, full: bool) -> bool:
    return item.target.is_file() and _cache_fault(item, full) is None


# --- fetching it ---


def _download(item: _Item, progress: bool, patience: Patience) -> Path:
    pinned(item.key)  # a list that can't be read is told before anything is downloaded
    offline = forbidden()
    part = Partial(item.target.with_name(f".{item.target.name}.part"))
    failures: list[str] = []
    fault: _Fault | None = None
    if item.target.exists() and (damage := _cache_fault(item, full=False)):
        failures.append(f"{item.target}: {damage.reason}")
        if offline is None:  # else it may be the only copy that can be had
            log.warning(
                "%s in the cache is damaged and is fetched again (%s)", item.target.name, damage.reason
            )
            with disk_errors("Removing a damaged file", item.target):
                item.target.unlink()
    for address in item.addresses:
        if offline is not None and not address.startswith("file:"):
            failures.append(f"{shown(address)}: not asked, for {offline} is set")
            continue
        try:
            with _watching(item, address, progress) as watch:
                get(address, part, patience=patience, watch=watch)
        except Unreachable as error:
            failures.append(f"{shown(address)}: {error}")
            continue
        with disk_errors("Checking a download", part.path):
            fsync_path(part.path)
            digest = sha256_of(part.path)
            found = _fault(item, part.path, digest, shown(address))
            if found is None:
                os.replace(part.path, item.target)
                fsync_path(item.target.parent)
        part.discard()
        if found is None:
            remember_sha256(item.target, digest)
            return item.target
        failures.append(f"{shown(address)}: {found.reason}")
        fault = found
    raise _failure(item, failures, fault, offline)


def _failure(item: _Item, failures: list[str], fault: _Fault | None, offline: str | None) -> ZooError:
    """What to tell when no address gave the right file; all that was tried is named."""
    name, where = item.remote.name, "; ".join(failures) or item.remote.gone
    own_copy = "pass the path of a copy instead"
    if item.key == name:  # a file of the catalog
        own_copy = f"put {name} into a folder and set ZOO_MIRROR to it, or {own_copy}"
    accept = f"if you trust it as it is now, delete the entry {item.key!r} of {lock_path()}"
    if fault is not None and fault.is_pin:
        return InputError(f"{name} is not the file that was downloaded first.", where=where, fix=accept)
    if fault is not None:
        return InputError(
            f"{name} is not the file that was published.", where=where, fix=f"use another mirror: {own_copy}"
        )
    if item.remote.gone:
        return InputError(
            f"Nobody serves {name} any more: its publisher's storage is gone.",
            where=where,
            fix=f"get it from somebody who kept it; then {own_copy}",
        )
    if offline is not None and item.target.exists():
        return InputError(
            f"{name} is damaged in the cache, and {offline} forbids the network.",
            where=where,
            fix=f"unset {offline} once, and it is fetched again; or {own_copy}",
        )
    if offline is not None:
        return InputError(
            f"{name} is not in the cache, and {offline} forbids the network.",
            where=where,
            fix=f"unset {offline} once; or {own_copy}",
        )
    return RunError(
        f"{name} could not be downloaded.", where=where, fix=f"check the connection; or {own_copy}"
    )


@contextlib.contextmanager
def _alone(item: _Item, progress: bool) -> Iterator[None]:
    """One process at a time fetches a file; the others wait and find it."""
    with disk_errors("Preparing a download", item.target.parent, "ZOO_CACHE"):
        handle = os.open(item.target.with_name(f".{item.target.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with disk_errors("Preparing a download", item.target.parent, "ZOO_CACHE"):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if progress:
                    print(f"another process is fetching {item.target.name}; waiting for it", file=sys.stderr)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _watching(item: _Item, address: str, progress: bool) -> Iterator[Watch]:
    """Where progress is told: a bar on a terminal, one line elsewhere, nowhere if it isn't wanted."""
    place = urlsplit(shown(address)).netloc or Path(shown(address)).parent
    bar = _bar() if progress and sys.stderr.isatty() else None
    if bar is not None:
        with bar:
            task = bar.add_task(f"{item.target.name} from {place}", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    if progress:
        print(f"fetching {item.target.name} from {place}", file=sys.stderr)
    yield lambda done, total: None


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
    except ImportError:  # a torch.hub checkout has no more than what hubconf.py depends on
        return None
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))
