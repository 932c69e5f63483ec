"""The index of some shards: what is known of them already, and headers read where nothing is."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...errors import InputError, RunError
from ...homes import cache_home
from .index import INDEX, Entry, ShardIndex
from .scan import Scan, scan_shard

__all__ = ["alone", "cache_of", "complete", "known_index", "local_index"]

log = logging.getLogger("zoo")

_SPOKEN = 10.0  # seconds between two lines about progress
_SAVED = 120.0  # and between two states of a long scan on disk


def local_index(folder: Path, names: Sequence[str]) -> ShardIndex:
    """The samples of shards that lie in one folder.

    Shards that the index beside them doesn't know, or that have another size or time stamp than it says, are
    scanned; what is found is kept beside the shards, or in the cache where that may not be written.

    Raises:
        InputError: a shard that can't be read or holds what it must not.
    """
    cache = cache_of(os.fspath(folder.resolve())) / INDEX

    def valid(name: str, size: int, changed: int) -> bool:
        try:
            status = os.stat(os.path.join(folder, name))
        except OSError:
            return False
        return size == status.st_size and changed in (0, status.st_mtime_ns)

    def save(index: ShardIndex) -> None:
        for place in (folder / INDEX, cache):
            with contextlib.suppress(RunError, OSError):
                if place == cache:
                    cache.parent.mkdir(parents=True, exist_ok=True)
                return index.save(place)
        log.warning(
            "the index of the shards in %s can be written nowhere: the next start reads them again", folder
        )

    def load() -> list[ShardIndex]:
        return [index for place in (folder / INDEX, cache) if (index := known_index(place)) is not None]

    return complete(names, load, valid, lambda name: scan_shard(folder / name), save, cache.with_name("lock"))


def cache_of(place: str) -> Path:
    """The folder of the cache for shards that lie in one place."""
    return cache_home() / "shards" / hashlib.sha256(os.fsencode(place)).hexdigest()[:16]


def known_index(path: Path) -> ShardIndex | None:
    """An index that was kept; a damaged one is said and made again."""
    if not path.is_file():
        return None
    try:
        return ShardIndex.load(path)
    except InputError as error:
        log.warning("%s %s: the headers of the shards are read again", error.what, error.where)
        return None


def complete(
    names: Sequence[str],
    load: Callable[[], list[ShardIndex]],
    valid: Callable[[str, int, int], bool],
    scan: Callable[[str], Scan],
    save: Callable[[ShardIndex], None],
    lock: Path,
) -> ShardIndex:
    """An index of ``names``, in that order.

    Args:
        names: the shards.
        load: the indexes that there are, the most trusted first.
        valid: whether a shard still has the size and the time stamp of its entry.
        scan: reads a shard's headers.
        save: keeps what is known now, also while a long scan is under way.
        lock: a file that only one process scans under; the others wait and take what it found.
    """
    whole, _, _ = _gather(names, load(), valid)
    if whole is not None:
        return whole
    with alone(lock):
        whole, entries, classes = _gather(names, load(), valid)
        if whole is not None:
            return whole
        wanting = [name for name in names if name not in entries]
        if len(wanting) > 1:
            log.info("reading the headers of %d shards, once", len(wanting))
        others: Counter[str] = Counter()
        spoken = saved = time.monotonic()
        for done, name in enumerate(wanting):
            now = time.monotonic()
            if now - spoken > _SPOKEN:
                spoken = now
                images = sum(len(entry.starts) for entry in entries.values())
                log.info("read the headers of %d of %d shards: %d images", done, len(wanting), images)
            if now - saved > _SAVED:
                save(ShardIndex.of((entries[key] for key in sorted(entries)), classes))
                saved = time.monotonic()
            found = scan(name)
            shard = (name, found.size, found.changed)
            entries[name] = Entry(*shard, found.starts, found.labels, found.unlabelled, found.damage)
            others += found.others
        if others:
            ranked = ", ".join(f"{ending} {n}" for ending, n in others.most_common(5))
            log.info("shards: left out %d members that are no images or labels (%s)", others.total(), ranked)
        everything = ShardIndex.of((entries[key] for key in sorted(entries)), classes)
        save(everything)
        return everything.select(names)


def _gather(
    names: Sequence[str], indexes: Sequence[ShardIndex], valid: Callable[[str, int, int], bool]
) -> tuple[ShardIndex | None, dict[str, Entry], tuple[str, ...] | None]:
    """An index that holds all of ``names``, if there is one; else valid entries, and the classes' names."""
    for index in indexes:
        there = set(index.names)
        if there.issuperset(names):
            chosen = index.select(names)
            if all(map(valid, names, *(chosen.columns[key].tolist() for key in ("sizes", "changed")))):
                return chosen, {}, None
    entries: dict[str, Entry] = {}
    for index in reversed(indexes):
        for shard, name in enumerate(index.names):
            entry = index.entry(shard)
            if valid(name, entry.size, entry.changed):
                entries[name] = entry
    classes = next((index.classes for index in indexes if index.named), None)
    return None, entries, classes


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process holds ``lock``, and hold it; without a place for it, go ahead."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing would not do: a process that was forked meanwhile holds the file open, too.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)
