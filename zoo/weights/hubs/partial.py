"""The file that a download grows in, and what its bytes belong to. No torch here."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...errors import RunError
from ...files import disk_errors, read_json, write_json

__all__ = ["Known", "Partial"]


class Known(NamedTuple):
    """What a partial file holds: its size, the server's mark of the file that it is of, and the whole size."""

    offset: int
    validator: str
    size: int | None


class Partial:
    """A partial file; ``<path>.json`` beside it says what it is of.

    Args:
        path: where the bytes are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = path.with_name(f"{path.name}.json")

    @property
    def size(self) -> int:
        """Bytes that are there."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def known(self, address: str) -> Known | None:
        """What an earlier attempt left, if it came from this address and can be gone on with."""
        try:
            state = read_json(self._state)
            validator, size = state["validator"], state["size"]
            if state["address"] != _fingerprint(address) or not isinstance(validator, str):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        offset, whole = self.size, size if isinstance(size, int) else None
        if offset == 0 or (whole is not None and offset > whole):
            return None
        return Known(offset, validator, whole)

    def discard(self) -> None:
        """Remove it.

        Raises:
            RunError: the disk doesn't let us.
        """
        with disk_errors("Removing a partial download", self.path):
            self.path.unlink(missing_ok=True)
            self._state.unlink(missing_ok=True)

    def start(self, address: str, validator: str | None, size: int | None) -> None:
        """Begin again with nothing.

        Args:
            address: where the bytes will come from; only its hash is kept, for it may hold secrets.
            validator: the server's mark of the file; without one nobody can go on later.
            size: of the whole file, in bytes, if it is known.
        """
        self.discard()
        if validator is not None:
            state = {"address": _fingerprint(address), "validator": validator, "size": size}
            with disk_errors("Writing a download", self.path):
                write_json(self._state, state)

    @contextlib.contextmanager
    def writing(self, total: int | None) -> Iterator[Callable[[bytes], None]]:
        """A function that appends; a full disk is told apart from a network that fails.

        Args:
            total: bytes of the whole file, if that is known: the room is checked first.

        Raises:
            RunError: there is not enough room, or the disk can't be written.
        """
        with disk_errors("Writing a download", self.path):
            free = shutil.disk_usage(self.path.parent).free
            if total is not None and total - self.size > free:
                raise self._no_room(total)
            file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed below)

        def write(block: bytes) -> None:
            rest = memoryview(block)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._no_room(total) from error
                with disk_errors("Writing a download", self.path):
                    raise

        try:
            yield write
        finally:
            with disk_errors("Writing a download", self.path):
                file.close()

    def _no_room(self, total: int | None) -> RunError:
        free = shutil.disk_usage(self.path.parent).free
        need = "more" if total is None else f"{(total - self.size) / 1e6:.1f} MB"
        return RunError(
            f"The download doesn't fit on the disk: it needs {need}, and {free / 1e6:.1f} MB are free.",
            where=self.path.parent,
            fix="free some space, or set ZOO_CACHE to a folder on another disk",
        )


def _fingerprint(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()
