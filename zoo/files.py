"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import RunError

__all__ = [
    "disk_errors",
    "fresh_path",
    "fsync_path",
    "read_json",
    "sha256_of",
    "whole_file",
    "whole_folder",
    "write_json",
    "write_text",
]

_ADVICE = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "your quota is used up: free some space, or write to another disk",
    errno.EROFS: "this disk is read-only: choose another place",
    errno.EACCES: "you may not write there: choose another place or change its permissions",
    errno.EEXIST: "a file is where the folder should be: choose another place",
    errno.ENOTDIR: "a file is where a folder should be: choose another place",
    errno.ENOENT: "the folder above it is not there: if it was moved or removed, put it back",
    errno.EPERM: "you may not write there: choose another place or change its permissions",
}


@contextlib.contextmanager
def disk_errors(doing: str, where: Path, variable: str | None = None) -> Iterator[None]:
    """Turn an ``OSError`` into a message that says what was being done, where, and what helps.

    ``variable`` names the environment's variable that sets the place, if one does.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = _ADVICE.get(error.errno or 0)
        if fix and variable:
            fix = f"{fix} (the variable {variable} sets it)"
        raise RunError(f"{doing} failed: {reason}.", where=where, fix=fix) from error


def fsync_path(path: Path) -> None:
    """Make a file's or folder's content survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file that appears complete under its name, or not at all.

    Yields a temporary name beside ``path`` to write to; on success it replaces ``path``.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    with whole_file(path) as temporary:
        # File names that are no UTF-8 hold lone surrogates: \udcXX is how JSON and YAML spell them.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people and programs, in one step."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a UTF-8 JSON file, with a byte order mark or without one."""
    return json.loads(path.read_text("utf-8-sig"))


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder that appears complete under its name, or not at all.

    Yields a temporary folder beside ``target``; on success its files are flushed to disk and it is
    renamed to ``target``, which must be absent or empty.
    """
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                if not (Path(folder) / name).is_symlink():  # what it points to isn't ours
                    fsync_path(Path(folder) / name)
            fsync_path(Path(folder))
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_path(target.parent)


def fresh_path(root: Path, label: str) -> Path:
    """Make an empty folder below ``root`` that nobody else has: the label, date and time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = root / f"{label}-{stamp}"
    count = 2
    with disk_errors("Making a folder", root):
        root.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()  # claims the name: of two processes only one succeeds
                return path
            except FileExistsError:
                path = root / f"{label}-{stamp}-{count}"
                count += 1


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
