"""What is typed for shards: patterns such as ``/data/{000..999}.tar``, and sizes such as ``256MB``."""

from __future__ import annotations

import glob
import itertools
import os
import re
from pathlib import Path

from ...errors import InputError
from ..decode import IMAGE_SUFFIXES
from .index import INDEX

__all__ = ["expand", "is_address", "is_pattern", "local_shards", "parse_size", "shards_in"]

_MOST = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def is_address(spec: str) -> bool:
    """Whether it is something like ``s3://bucket/x.tar``."""
    return bool(_ADDRESS.match(spec))


def is_pattern(spec: str) -> bool:
    """Whether it names shards: an address, or something that ends in ``.tar``."""
    return is_address(spec) or spec.lower().endswith((".tar", *_COMPRESSED))


def expand(pattern: str) -> list[str]:
    """``x{000..002}`` -> ``x000``, ``x001``, ``x002``; ``{a,b}`` -> ``a``, ``b``; several braces multiply.

    Raises:
        InputError: a brace that is neither, or millions of names.
    """
    parts = _BRACES.split(pattern)
    if len(parts) == 1 or any(c in text for text in parts[::2] for c in "{}"):
        if not any(c in pattern for c in "{}"):
            return [pattern]
        raise InputError(
            "The braces of the pattern can't be read.", where=pattern, fix="write {000..999} or {a,b}"
        )
    choices: list[list[str]] = []
    for number, part in enumerate(parts):
        choices.append(_choices(part, pattern) if number % 2 else [part])
    count = 1
    for words in choices:
        count *= len(words)
    if count > _MOST:
        raise InputError(f"The pattern stands for {count} shards, more than {_MOST}.", where=pattern)
    return ["".join(words) for words in itertools.product(*choices)]


def _choices(inner: str, pattern: str) -> list[str]:
    found = _RANGE.fullmatch(inner)
    if not found:
        if "," not in inner:
            raise InputError(
                f"The braces {{{inner}}} stand for nothing.", where=pattern, fix="write {000..999} or {a,b}"
            )
        return inner.split(",")
    first, last = int(found[1]), int(found[2])
    if first > last or last - first >= _MOST:
        raise InputError(
            f"The braces {{{inner}}} stand for {'nothing' if first > last else 'too many shards'}.",
            where=pattern,
            fix="count upwards: {000..999}",
        )
    width = max(map(len, found.groups())) if any(word.startswith("0") for word in found.groups()) else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def shards_in(folder: Path) -> list[str]:
    """The shards of a folder that holds nothing else (a folder of pictures isn't one), sorted."""
    found = []
    try:
        indexed = (folder / INDEX).is_file()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.name.lower().endswith(".tar"):
                    found.append(entry.path)
                elif not indexed and (_is_picture(entry.name) or entry.is_dir()):
                    return []
    except OSError:  # what can't be listed is said by whoever looks for pictures in it
        return []
    return sorted(found)


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def local_shards(pattern: str) -> tuple[list[str], list[str]]:
    """Shards on this machine: those that are there, and those that the pattern names and that aren't.

    Raises:
        InputError: none is there; compressed ones; the same one twice.
    """
    if pattern.lower().endswith(_COMPRESSED):
        raise InputError(
            "The shards are compressed: images in them can't be read by their position.",
            where=pattern,
            fix="unpack them to plain .tar; images are compressed already",
        )
    there: list[str] = []
    missing: list[str] = []
    whole = Path(pattern).expanduser()
    names = [str(whole)] if os.path.isfile(whole) else expand(str(whole))
    for name in names:
        if not os.path.exists(name) and glob.has_magic(name):
            there += sorted(glob.glob(name))  # noqa: PTH207 - the pattern may be absolute
        else:
            (there if os.path.isfile(name) else missing).append(name)
    if not there:
        raise InputError(
            "The pattern matches no shard.",
            where=f"{pattern} ({_some(names)})",
            fix="check the path of --data",
        )
    if len(set(there)) < len(there):
        raise InputError("The pattern names a shard twice.", where=pattern)
    return there, missing


def _some(names: list[str]) -> str:
    """What a pattern stands for, in a message."""
    shown = ", ".join(names[:2] if len(names) > 3 else names)
    return shown if len(names) <= 3 else f"{shown}, ..., {names[-1]}: {len(names)} names"


def parse_size(text: str, where: str) -> int:
    """Bytes: ``256MB``, ``1.5 GB``, ``1000000``.

    Raises:
        InputError: it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(B?)", text.strip().upper())
    size = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise InputError(f"{text!r} is no size.", where=where, fix="write 256MB or 1GB")
    return size
