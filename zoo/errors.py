"""The errors a user can meet: what happened, where, and what to do about it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_FAILURE",
    "EXIT_INTERRUPTED",
    "EXIT_SAVED",
    "InputError",
    "RunError",
    "Stopped",
    "ZooError",
    "did_you_mean",
    "in_one_line",
    "is_out_of_memory",
]

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_SAVED = 75  # stopped by a signal with everything saved: resume me (BSD's EX_TEMPFAIL)
EXIT_INTERRUPTED = 130


class ZooError(Exception):
    """An error with a message for people.

    Args:
        what: one sentence that says what happened.
        where: the file, key or field it happened at, if there is one.
        fix: what the user can do about it.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, what: str, *, where: object = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append(f"  where: {in_one_line(self.where)}")
        if self.fix is not None:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword arguments survive the trip from a data worker to the training process.
        return (_rebuild, (type(self), self.what, self.where, self.fix))


def _rebuild(kind: type[ZooError], what: str, where: str | None, fix: str | None) -> ZooError:
    return kind(what, where=where, fix=fix)


class InputError(ZooError):
    """What the user gave (a file, a key, an option, a folder) can't be used as it is."""

    exit_code = EXIT_BAD_INPUT


class Stopped(ZooError):
    """A signal asked the work to stop; everything is saved.

    Args:
        what: what was stopped, and where it stands.
        exit_code: 75, or 130 after Ctrl-C.
        fix: how to go on.
    """

    def __init__(self, what: str, *, exit_code: int, fix: str | None = None) -> None:
        super().__init__(what, fix=fix)
        self.exit_code = exit_code


class RunError(ZooError):
    """The input was fine, but the work could not be done (disk, memory, a number that blew up)."""


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def in_one_line(text: str) -> str:
    """A file's name as a terminal may be shown it: line breaks and control characters are spelled out."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, Python's or torch's, says that there is no memory left."""
    # On a GPU torch has a class of its own for it, on a processor only these words.
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("out of memory" in str(error).lower() or "DefaultCPUAllocator" in str(error))
    )


def did_you_mean(word: str, known: Iterable[str], count: int = 1, likeness: float = 0.5) -> str:
    """``"did you mean X? "`` with the nearest known names, or nothing: the beginning of a ``fix``."""
    near = difflib.get_close_matches(word, list(known), n=count, cutoff=likeness)
    return f"did you mean {' or '.join(near)}? " if near else ""
