"""Images in tar shards, each read by its position: nothing is scanned, nothing unpacked."""

from __future__ import annotations

import bisect
import errno
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...addresses import without_credentials
from ...errors import InputError, RunError
from ..class_index import renumber
from ..decode import Picture, open_image
from ..decoding import PLAIN, Decoding
from ..identify import SKIP
from ..source import UNLABELLED
from .index import ShardIndex
from .opening import local_index
from .pattern import is_address, local_shards
from .remote import RemoteShards, addresses_of, remote_index, split
from .scan import shown
from .tar import BLOCK, Damaged, Member, Refused, read_member

__all__ = ["LocalShards", "ShardImages", "ShardPlaces", "open_shards"]

log = logging.getLogger("zoo")

_OPEN = 64  # shards that a process holds open; the order of training touches about as many at a time


class ShardPlaces(Protocol):
    """Where shards are; picklable."""

    def __len__(self) -> int: ...

    def shown(self, shard: int) -> str:
        """What messages call it."""
        ...

    def path(self, shard: int) -> str:
        """A file on this machine; it may have to be fetched."""
        ...

    def soon(self, shards: Sequence[int]) -> None:
        """These will be wanted next."""
        ...


class LocalShards:
    """Shards that are files of this machine."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def shown(self, shard: int) -> str:
        return self._paths[shard]

    path = shown

    def soon(self, shards: Sequence[int]) -> None:
        """Nothing has to be fetched."""


class ShardImages:
    """The images of tar shards, numbered in the order of the shards and of their place in them.

    Args:
        name: what the user called them.
        places: the shards.
        index: their samples.
        class_names: all classes in the order of their numbers, if not the index's own.
        notes: remarks for the user.

    Raises:
        InputError: classes that ``class_names`` doesn't know.
    """

    decoding: Decoding = PLAIN
    """How the images become pixels."""

    def __init__(
        self,
        name: str,
        places: ShardPlaces,
        index: ShardIndex,
        class_names: tuple[str, ...] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self._places = places
        self._index = index
        self._ends: list[int] = index.ends.tolist()
        self._handles = _Handles()
        self._numbers: np.ndarray | None = None
        self.classes: tuple[str, ...] = ()
        unlabelled = int(index.columns["unlabelled"].sum())
        if unlabelled and unlabelled < len(index):
            notes = (*notes, f"{unlabelled} of {len(index)} samples have no label: labels are not used")
        self.notes = notes
        if not unlabelled:
            self.classes = index.classes if class_names is None else class_names
            if class_names is not None:
                new = renumber(index.classes, index.named, class_names, name)
                self._numbers = None if new is None else np.array(new)

    def __len__(self) -> int:
        return len(self._index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": _Handles()}

    @property
    def stretches(self) -> np.ndarray:
        """Samples of each shard: what is read together (``zoo.data.shards.order``)."""
        return self._index.columns["counts"]

    def soon(self, samples: Sequence[int]) -> None:
        """The shards of these samples will be wanted next."""
        self._places.soon(sorted({self._locate(sample)[0] for sample in samples}))

    def _locate(self, index: int) -> tuple[int, int]:
        """(shard, where in it the image's first header stands)."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has no sample {index}")
        return bisect.bisect_right(self._ends, index), int(self._index.starts[index]) * BLOCK

    def open(self, index: int) -> Picture:
        """The picture with its size read, not yet decoded."""
        shard, start = self._locate(index)
        name = self._places.shown(shard)
        try:
            handle = self._handles.of(shard, self._places)
            member = read_member(lambda offset, length: os.pread(handle, length, offset), start)
            if member is None or not member.is_file:
                raise Damaged("there is no image where the index has one", start)
            self._check(member, name)
            data = os.pread(handle, member.size, member.data)
            if len(data) < member.size:
                raise Damaged(f"cut off after {len(data)} of {member.size} bytes", start, member.name)
        except (Damaged, Refused) as error:
            raise InputError(
                f"The shard is damaged: {error.what}.",
                where=shown(name, start, error.name),
                fix=f"copy it again or make it again (zoo data shard), or {SKIP}",
            ) from None
        except OSError as error:
            raise _unreadable(error, shown(name, start)) from error
        return open_image(data, name=shown(name, start, member.name), how=self.decoding)

    def _check(self, member: Member, shard: str) -> None:
        if member.size > self.decoding.max_bytes:
            raise InputError(
                f"The image has {member.size} bytes, more than the limit of {self.decoding.max_bytes}.",
                where=shown(shard, member.start, member.name),
                fix=f"raise the limit (--max-bytes, or --set data.max_bytes=N), or {SKIP}",
            )

    def read(self, index: int) -> np.ndarray:
        return self.open(index).pixels()

    def label(self, index: int) -> int:
        if not self.classes or self._index.labels is None:
            return UNLABELLED
        number = int(self._index.labels[index])
        return number if self._numbers is None else int(self._numbers[number])

    def where(self, index: int) -> str:
        shard, start = self._locate(index)
        return shown(self._places.shown(shard), start)

    def fingerprint(self) -> dict[str, Any]:
        """Names and sizes of the shards, places and labels of the samples; the images are not read."""
        columns = self._index.columns
        digest = hashlib.sha256("\0".join(self._index.names).encode("utf-8", "surrogateescape"))
        for key in ("sizes", "counts", "digests"):
            digest.update(columns[key].tobytes())
        return {
            "kind": "shards",
            "count": len(self),
            "shards": len(self._index.names),
            "bytes": int(columns["sizes"].sum()),
            "sha256": digest.hexdigest(),
        }


def _unreadable(error: OSError, where: str) -> InputError | RunError:
    if error.errno in (errno.EMFILE, errno.ENFILE):  # not the shard's fault: nothing to skip
        return RunError(
            "The process ran out of file handles.",
            where=where,
            fix="raise the limit (ulimit -n 65536) or use fewer workers (--workers)",
        )
    if isinstance(error, FileNotFoundError):
        return InputError("The shard is not there (any more).", where=where, fix=f"put it back, or {SKIP}")
    return InputError(
        f"The shard can't be read ({error.strerror}).",
        where=where,
        fix=f"check its permissions and the disk, or {SKIP}",
    )


class _Handles:
    """The shards that were read last, open."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, int] = OrderedDict()

    def of(self, shard: int, places: ShardPlaces) -> int:
        handle = self._open.get(shard)
        if handle is None:
            try:
                handle = os.open(places.path(shard), os.O_RDONLY)
            except FileNotFoundError:  # a copy in the cache may just have been removed to make room
                handle = os.open(places.path(shard), os.O_RDONLY)
            self._open[shard] = handle
            if len(self._open) > _OPEN:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(shard)
        return handle

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


def open_shards(
    spec: str,
    how: Decoding = PLAIN,
    class_names: tuple[str, ...] | None = None,
    *,
    skip_bad: bool = False,
    paths: Sequence[str] | None = None,
) -> ShardImages:
    """Open tar shards by a pattern; the first time their headers are read, then there is an index.

    Args:
        spec: ``/data/{000..999}.tar``, ``/data/*.tar``, or an address that fsspec knows with such braces.
        how: how images are decoded.
        class_names: as for ``ShardImages``.
        skip_bad: go on without shards that are missing, and with what can be read of damaged ones.
        paths: the shards, if they are known.

    Raises:
        InputError: nothing there, a damaged shard, or one that holds what it must not.
        RunError: the network or the disk failed.
    """
    places: ShardPlaces
    spec = spec.removeprefix("file://")
    if is_address(spec):
        addresses = addresses_of(spec)
        by_name = [split(address) for address in addresses]
        known = dict(zip(by_name, addresses, strict=True))
        index = _index_of(
            by_name, lambda place, names: remote_index(place, {name: known[place, name] for name in names})
        )
        places = RemoteShards(addresses, index.columns["sizes"])
    else:
        paths = _there(spec, skip_bad) if paths is None else paths
        by_name = [os.path.split(path) for path in paths]
        index = _index_of(by_name, lambda place, names: local_index(Path(place), names))
        places = LocalShards(paths)
    for shard, what in index.damage.items():
        where = places.shown(index.names.index(shard))
        if not skip_bad:
            raise InputError(
                f"The shard is damaged: {what}.",
                where=where,
                fix="copy it again or make it again (zoo data shard), or use what can be read of it: "
                "zoo pretrain --on-error skip",
            )
        count = index.columns["counts"][index.names.index(shard)]
        log.warning("%s is damaged and gives %d images: %s", where, count, what)
    name = without_credentials(spec)
    if not len(index):
        raise InputError(
            "There are no images in the shards.",
            where=name,
            fix="WebDataset's names are KEY.jpg and KEY.cls; zoo data shard makes such shards of a folder",
        )
    images = ShardImages(name, places, index, class_names)
    images.decoding = how
    return images


def _there(spec: str, skip_bad: bool) -> list[str]:
    """The shards of a pattern that are there; that others are not is an error unless they may be left out."""
    paths, missing = local_shards(spec)
    if missing:
        what = f"{len(missing)} of {len(paths) + len(missing)} shards are not there"
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        if not skip_bad:
            fix = "put them back, name others, or go without: zoo pretrain --on-error skip"
            raise InputError(f"{what}.", where=some, fix=fix)
        log.warning("%s: %s", what, some)
    return paths


def _index_of(
    shards: Sequence[tuple[str, str]], index_of_place: Callable[[str, list[str]], ShardIndex]
) -> ShardIndex:
    """One index of shards given as (place, name), in their order; each place has an index of its own."""
    names: dict[str, list[str]] = {}
    for place, name in shards:
        names.setdefault(place, []).append(name)
    indexes = {place: index_of_place(place, inner) for place, inner in names.items()}
    if len(indexes) == 1:
        return next(iter(indexes.values()))
    named = {index.classes for index in indexes.values() if index.named}
    if len(named) > 1:
        raise InputError(
            "The shards at these places number different classes.",
            where=", ".join(list(indexes)[:3]),
            fix="give each place a --data of its own (labels are then not used), or make the shards together",
        )
    # Whole paths would make it another collection when it is moved.
    parts = {place: place.split("/") for place in indexes}
    common = 0
    while len({tuple(part[: common + 1]) for part in parts.values()}) == 1:
        common += 1
    numbers = {place: {name: number for number, name in enumerate(inner)} for place, inner in names.items()}
    entries = []
    for place, name in shards:
        entry = indexes[place].entry(numbers[place][name])
        entries.append(replace(entry, name="/".join([*parts[place][common:], name])))
    return ShardIndex.of(entries, named.pop() if named else None)
