"""One place that turns exceptions into messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback

from zoo.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    Stopped,
    ZooError,
    is_out_of_memory,
)

__all__ = ["report"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def report(error: BaseException, debug: bool) -> int:
    """Print an error for people on standard error and return the exit code of the contract."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if isinstance(error, ZooError):
        from zoo.engine.launch import first_to_say

        label = "stopped" if isinstance(error, Stopped) else "error"
        if first_to_say(f"{error.what} {error.where}"):
            print(f"{label}: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        _leave_output()  # whoever read it has seen enough
        return EXIT_FAILURE
    if isinstance(error, OSError) and error.errno in _FULL:
        print(
            f"error: {error.strerror}.\n"
            f"  where: {error.filename or 'what this is written to'}\n"
            "  fix:   free some space, or write to another disk (temporary files: TMPDIR)",
            file=sys.stderr,
        )
        _leave_output()
        return EXIT_FAILURE
    if is_out_of_memory(error):
        print(
            "error: The memory ran out.\n"
            "  fix:   lower batch_size, use fewer or smaller crops, or fewer --workers",
            file=sys.stderr,
        )
        return EXIT_FAILURE
    if not debug:
        kind = type(error).__name__
        print(
            f"error: Something unexpected happened ({kind}: {' '.join(str(error).split())[:300]}).\n"
            "  fix:   run it again with --debug to see where, and please report it",
            file=sys.stderr,
        )
    return EXIT_BAD_INPUT if isinstance(error, UnicodeDecodeError) else EXIT_FAILURE


def _leave_output() -> None:
    """Write what can be written; the rest is dropped, or Python would complain of it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
