"""Shards at an address: each is fetched whole, in order and ahead of its use, into a bounded cache.

So all that reads shards reads files. The processes of a machine share the cache; what was read longest ago is
removed when it grows beyond ``ZOO_SHARD_CACHE`` (such as ``200GB``; 50 GB by default).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...addresses import forbidden, shown_urls, without_credentials
from ...errors import InputError, RunError
from ...files import disk_errors, whole_file
from ...homes import cache_home
from .index import INDEX, ShardIndex, read_header
from .opening import alone, cache_of, complete, known_index
from .pattern import expand, parse_size
from .scan import Scan, scan_shard

__all__ = ["RemoteShards", "addresses_of", "remote_index", "split"]

log = logging.getLogger("zoo")

T = TypeVar("T")

_BLOCK = 1 << 24  # bytes of a request
_WAIT = 60.0  # seconds for the answer to one
_PAUSES = (1.0, 5.0, 20.0)  # seconds before it is tried again
_CACHE = "50GB"
_NO_RIGHTS = re.compile(
    r"forbidden|access ?denied|unauthorized|no ?credentials|locate credentials", re.IGNORECASE
)


def split(address: str) -> tuple[str, str]:
    """The folder of an address and the file's name, without what follows a question mark."""
    place, _, _ = address.partition("?")
    folder, _, name = place.rpartition("/")
    return folder, name


def addresses_of(pattern: str) -> list[str]:
    """The addresses that a pattern stands for; ``*`` is looked up where addresses can be listed.

    Raises:
        InputError: it matches nothing, or the place can't be listed.
    """
    if "*" not in pattern:
        return expand(pattern)
    found: list[str] = []
    for address in expand(pattern):
        files, path = _file_system(address)
        names = _patiently(partial(files.glob, path), address)
        found += [files.unstrip_protocol(name) for name in sorted(names)]
    if not found:
        raise InputError("The pattern matches no shard.", where=without_credentials(pattern))
    return found


class RemoteShards:
    """Shards at addresses, read from copies in the cache.

    Args:
        addresses: of the shards.
        sizes: in bytes, where they are known.
    """

    def __init__(self, addresses: Sequence[str], sizes: np.ndarray | None = None) -> None:
        self._addresses = tuple(addresses)
        self._sizes = sizes
        self._wanted: deque[int] = deque()
        self._told: set[int] = set()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._addresses)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wanted": deque(), "_told": set(), "_thread": None}

    def shown(self, shard: int) -> str:
        return without_credentials(self._addresses[shard])

    def path(self, shard: int) -> str:
        """The copy of a shard; fetched if it isn't there.

        Raises:
            InputError: it isn't at its address, may not be read, or is another one than the index knows.
            RunError: the network or the disk failed.
        """
        address = self._addresses[shard]
        folder, name = split(address)
        mark = hashlib.sha256(address.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        target = cache_of(folder) / f"{mark}-{name}"
        size = None if self._sizes is None else int(self._sizes[shard])
        if not _is_there(target, size):
            with alone(target.with_name(f".{target.name}.lock")):
                if not _is_there(target, size):  # else another process fetched it meanwhile
                    _fetch(address, target, size)
                    _make_room(target)
        with contextlib.suppress(OSError):
            os.utime(target)  # it was used
        return str(target)

    def soon(self, shards: Sequence[int]) -> None:
        """Fetch these in the background, in this order."""
        new = [shard for shard in shards if shard not in self._told]
        self._told = set(shards)
        self._wanted.extend(new)
        if new and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._fetch_wanted, daemon=True, name="shards ahead")
            self._thread.start()

    def _fetch_wanted(self) -> None:
        while True:
            try:
                shard = self._wanted.popleft()
            except IndexError:
                return
            try:
                self.path(shard)
            except Exception as error:  # whoever needs it meets the same, and says it
                log.debug("fetching ahead failed: %s", type(error).__name__)


def _is_there(target: Path, size: int | None) -> bool:
    try:
        return size in (None, target.stat().st_size)
    except OSError:
        return False


def remote_index(folder: str, addresses: dict[str, str]) -> ShardIndex:
    """The samples of shards at one place: by the index that lies there, else by fetching and scanning each.

    Args:
        folder: the address of the place.
        addresses: of the shards, by name.
    """
    cache = cache_of(folder)
    theirs, mine = cache / f"fetched-{INDEX}", cache / INDEX

    def load() -> list[ShardIndex]:
        return [index for place in (theirs, mine) if (index := known_index(place)) is not None]

    def scan(name: str) -> Scan:
        places = RemoteShards([addresses[name]])
        return replace(scan_shard(places.path(0), places.shown(0)), changed=0)

    with alone(cache / "fetched.lock"):
        _fetch_index(f"{folder}/{INDEX}", theirs)
    return complete(
        list(addresses), load, lambda *_: True, scan, lambda index: index.save(mine), cache / "lock"
    )


def _fetch_index(address: str, target: Path) -> None:
    """Bring the copy of an index up to date; that there is none, or that it may not be read, is no error."""
    if forbidden() is not None and target.is_file():
        return
    try:
        files, path = _file_system(address)
        first = _patiently(lambda: files.cat_file(path, start=0, end=8), address)[:8]
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > _BLOCK:
            return
        start = _patiently(lambda: files.cat_file(path, start=0, end=8 + length), address)[: 8 + length]
        read_header(start)
        if target.is_file():
            with open(target, "rb") as file:
                if file.read(len(start)) == start:  # it holds a hash of the content
                    return
        _fetch(address, target)
    except (InputError, ValueError, KeyError, TypeError):
        target.unlink(missing_ok=True)
    except RunError as error:
        if not target.is_file():
            raise
        log.warning("the index that was fetched before is used: %s %s", error.what, error.where)


def _fetch(address: str, target: Path, size: int | None = None) -> None:
    """Copy a file from an address, block by block, whole or not at all.

    Args:
        address: for fsspec.
        target: where to put it.
        size: what it must have, in bytes.

    Raises:
        InputError: it isn't there, may not be read, or has another size.
        RunError: no answer, again and again, or the disk failed.
    """
    files, path = _file_system(address)
    there = _patiently(lambda: files.info(path).get("size"), address)
    if size is not None and there is not None and there != size:
        raise InputError(
            f"The shard has {there} bytes, and the index knows one of {size}.",
            where=without_credentials(address),
            fix=f"put the original back, or remove {cache_of(split(address)[0])} if it was changed on purpose",
        )
    with disk_errors("Fetching a shard", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):  # by a process that was killed
            left.unlink(missing_ok=True)
        with whole_file(target) as temporary, open(temporary, "wb") as file:
            if there is None:  # a server that doesn't say
                file.write(_patiently(lambda: files.cat_file(path), address))
                return
            while (done := file.tell()) < there:
                end = min(done + _BLOCK, there)
                file.write(_patiently(partial(_block, files, path, done, end, there), address))


def _block(files: Any, path: str, first: int, last: int, size: int) -> bytes:
    data = bytes(files.cat_file(path, start=first, end=last))
    if len(data) == size:  # a server that knows no parts sends all, each time
        return data[first:] if first else data
    if len(data) != last - first:
        raise OSError(f"{len(data)} bytes came instead of {last - first}")
    return data


def _file_system(address: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.registry import known_implementations  # type: ignore[import-untyped]

    protocol = address.partition("://")[0]
    variable = forbidden()
    if variable is not None and protocol not in ("memory", "file"):
        raise InputError(
            f"The shards are on the network, which {variable} forbids.",
            where=without_credentials(address),
            fix=f"unset {variable}, or name shards on this machine",
        )
    try:
        files, path = url_to_fs(address)
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        raise InputError(
            f"Shards at {protocol}:// need a package that isn't installed ({error.__cause__ or error}).",
            where=without_credentials(address),
            fix=f'pip install "{f"fsspec[{protocol}]" if package == "fsspec" else package}"',
        ) from None
    except ValueError as error:
        raise InputError(
            f"The address can't be used ({shown_urls(str(error))}).",
            where=without_credentials(address),
            fix="give a path, or an address such as s3://bucket/{000..999}.tar",
        ) from None
    return files, path


def _patiently(call: Callable[[], T], address: str) -> T:
    """What ``call`` returns; it is asked again after failures and silence, but not where that can't help."""
    failure: Exception = TimeoutError()
    for pause in (0.0, *_PAUSES):
        time.sleep(pause)
        try:
            return _within(call, _WAIT)
        except Exception as raised:
            error = _reason(raised)
            if isinstance(error, FileNotFoundError):
                raise InputError(
                    "There is nothing at this address.",
                    where=without_credentials(address),
                    fix="check the name, and that all shards of the pattern are there",
                ) from None
            if _no_rights(error):
                raise InputError(
                    f"The address may not be read ({type(error).__name__}).",
                    where=without_credentials(address),
                    fix="give this machine the rights: the provider's credentials, for S3 in AWS_PROFILE or "
                    "~/.aws/credentials; a wrong name of a bucket looks the same",
                ) from None
            failure = error
            log.debug("%s: %s", without_credentials(address), type(error).__name__)
    silent = isinstance(failure, TimeoutError)
    text = shown_urls(f"{type(failure).__name__}: {failure}".replace("\n", " "))[:200]
    raise RunError(
        f"The network gave no answer within {_WAIT:g} s, {len(_PAUSES) + 1} times."
        if silent
        else f"The network failed {len(_PAUSES) + 1} times ({text}).",
        where=without_credentials(address),
        fix="check the network and go on with --resume; or copy the shards to this machine",
    ) from None


def _within(call: Callable[[], T], seconds: float) -> T:
    """Call it in a thread that is left behind if it takes longer."""
    answer: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            answer.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True, name="network")
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not answer:
        raise TimeoutError
    return answer[0]


def _reason(error: Exception) -> Exception:
    """What went wrong: over HTTP fsspec says that a file isn't there whenever it can't ask for its size."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    absent = getattr(cause, "status", None) in (404, 410) or not type(cause).__module__.startswith("aiohttp")
    return error if absent and not isinstance(cause, TimeoutError) else cause


def _no_rights(error: Exception) -> bool:
    status = getattr(error, "status", None) or getattr(error, "code", None)
    known = isinstance(error, PermissionError) or status in (401, 403, "401", "403")
    return known or bool(_NO_RIGHTS.search(f"{type(error).__name__} {error}"))


def _make_room(newest: Path) -> None:
    """Remove what was used longest ago until the cache is no larger than it may be."""
    limit = parse_size(os.environ.get("ZOO_SHARD_CACHE", "").strip() or _CACHE, "ZOO_SHARD_CACHE")
    shards = []
    for path in (cache_home() / "shards").glob("*/*.tar"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            shards.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in shards)
    for _, size, path in sorted(shards):
        if total <= limit or path == newest:
            return
        path.unlink(missing_ok=True)
        total -= size
