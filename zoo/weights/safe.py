"""Read any file of weights, from anybody, without running anything that is in it.

A file is known by its bytes, not by its name. Its names, sizes and offsets are compared with what is
really there before memory is taken; nothing in it is called, and nothing is written. What can't be read so
is refused with a line that says what the file is and what helps. A file that is refused has taken at most
64 MB plus twice its size.

Neither ``torch.load`` nor ``pickle`` is used: ``zoo.weights.reading`` explains how it is done, and why.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import InputError, RunError, ZooError
from .reading.dense import Memory
from .reading.examine import Found, examine
from .reading.inert import Values
from .reading.notes import AGAIN, Allowance, Buffer, shown

__all__ = ["Content", "Look", "look_at", "read_content"]

_ALLOWANCE = 48 << 20  # bytes that reading may take besides the file's size
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Content:
    """What a file holds.

    Args:
        container: ``safetensors``, ``torch zip``, ``torch legacy`` or ``numpy pickle``.
        value: nested dict, list, tuple, set, str, bytes, numbers and None; dense CPU tensors that need no
            gradient; numpy arrays and scalars; ``argparse.Namespace``, ``torch.dtype`` and ``torch.device``
            as they are. An OrderedDict or Counter comes as a dict, a torch.Size as a tuple, a device that
            this torch doesn't know as text.
    """

    container: str
    value: Any


@dataclass(frozen=True)
class Look:
    """What a look at a file tells without building anything.

    Args:
        kind: the container (see ``Content``), or what the file is instead, e.g. ``an HTML page``.
        size: in bytes.
        globals: every name that its pickles mention, fit to be printed.
        refused: those that are not inert.
        problem: why ``read_content`` would refuse the file, as far as a look tells; None if it shows nothing.
        fix: what helps.
    """

    kind: str
    size: int
    globals: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    problem: str | None = None
    fix: str | None = None


def read_content(path: Path, *, sha256: str | None = None) -> Content:
    """Read a file of weights.

    Without a hash, tensors of a torch zip or safetensors file lie in the mapped file: they take memory when
    they are used, and changing them doesn't change the file. The file must not be shortened meanwhile.

    Args:
        path: the file; its suffix doesn't matter.
        sha256: what the hash of its bytes must be, in hexadecimal. The bytes that are hashed are those that
            are read: the file is copied into memory first.

    Raises:
        InputError: the hash is another one, or this is no whole file of weights, or it asks for more than
            plain data.
        RunError: there is not enough memory.
    """
    path = Path(path)
    with _plainly(path), _opened(path) as file:
        before = os.fstat(file.fileno())
        data = _mapped(file) if sha256 is None else _copied(file, sha256)
        found, allowance = Found(), Allowance(_ALLOWANCE + before.st_size)
        examine(data, found, allowance)
        memory = Memory(data, sha256 is None, found.spans, allowance)
        if found.kind == "safetensors":
            value = {name: memory.row(*tensor) for name, tensor in found.tensors.items()}
        else:
            value = Values(memory, allowance).value(found.note)
        after = os.fstat(file.fileno())
        if sha256 is None and (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise InputError("The file was changed while it was read.", fix="try again when it is finished")
        return Content(found.kind, value)


def look_at(path: Path) -> Look:
    """Tell what a file is and what its pickles mention; nothing is built.

    Raises:
        InputError: there is no such file, or it can't be opened.
    """
    path = Path(path)
    with _plainly(path), _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        found = Found()
        problem: InputError | None = None
        try:
            with _plainly(path):
                examine(_mapped(file), found, Allowance(_ALLOWANCE + size))
        except InputError as error:
            problem = error
        return Look(
            found.kind,
            size,
            tuple(map(shown, found.names)),
            tuple(map(shown, found.refused())),
            problem.what if problem else None,
            problem.fix if problem else None,
        )


@contextlib.contextmanager
def _plainly(path: Path) -> Iterator[None]:
    """Every error names the file, and what a made-up file provokes in a library is bad input, no crash."""
    try:
        yield
    except InputError as error:
        raise InputError(error.what, where=path, fix=error.fix) from None
    except ZooError:
        raise
    except MemoryError:
        raise RunError("There is not enough memory to read the file.", where=path) from None
    except OSError as error:
        raise InputError(f"The file can't be read ({error.strerror or error}).", where=path) from None
    except Exception as error:
        reason = shown(f"{type(error).__name__}: {error}")
        raise InputError(f"The file is damaged ({reason}).", where=path, fix=AGAIN) from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    # Opening a pipe would wait for somebody to write, and opening a device can do anything.
    _check_regular(path.stat().st_mode)
    with open(path, "rb", opener=_open_at_once) as file:
        _check_regular(os.fstat(file.fileno()).st_mode)
        yield file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise InputError("This is a folder.", fix="name a file of weights in it")
    if not stat.S_ISREG(mode):
        raise InputError("This is a pipe, socket or device.", fix="name a file of weights")


def _mapped(file: BufferedReader) -> Buffer:
    if os.fstat(file.fileno()).st_size == 0:
        return b""  # nothing can't be mapped
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _copied(file: BufferedReader, sha256: str) -> Buffer:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise InputError("A SHA-256 is 64 hexadecimal digits.", fix=f"correct the hash {shown(sha256)!r}")
    data = bytearray(os.fstat(file.fileno()).st_size)
    view, at, digest = memoryview(data), 0, hashlib.sha256()
    while count := file.readinto(view[at : at + _BLOCK]):
        digest.update(view[at : at + count])
        at += count
    if at < len(data) or digest.hexdigest() != sha256.lower():
        raise InputError(f"The file's SHA-256 is {digest.hexdigest()}, not {sha256.lower()}.", fix=AGAIN)
    return data
