"""What a pickle asks for, written down: the words between ``pickles`` (reads) and ``inert`` (builds)."""

from __future__ import annotations

import codecs
import mmap
import re
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError

__all__ = [
    "AGAIN",
    "RESAVE",
    "Allowance",
    "Buffer",
    "Call",
    "Members",
    "Name",
    "Pairs",
    "Stored",
    "Text",
    "natural",
    "odd",
    "shown",
    "unquoted",
]

AGAIN = "fetch the file again and compare its SHA-256 with the publisher's"
RESAVE = (
    "where you trust the file, load it with the code that made it and save only its tensors: "
    "torch.save(model.state_dict(), 'weights.pth')"
)
_PIECE = 1 << 20

Buffer = bytes | bytearray | mmap.mmap


class Name(str):
    """``module.name`` of something that the pickle wants imported."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class Call:
    """A call that the pickle wants made.

    Args:
        name: of what is to be called.
        args: its arguments.
        steps: what is to be done to the result, in turn: ``("state", [value])``, ``("items", [key, value,
            ...])``, ``("members", [...])`` or ``("keywords", [Pairs])``.
    """

    name: Name
    args: tuple[Any, ...]
    steps: list[tuple[str, list[Any]]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Stored:
    """A reference to something outside the pickle (torch: a storage)."""

    key: Any


class Pairs(list[tuple[Any, Any]]):
    """A dict; as pairs, because a key may be a note, or made so that hashing it takes for ever."""

    __slots__ = ()


class Members(list[Any]):
    """A set or frozenset."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class Text:
    """Long text that still lies in the file; numpy arrays of protocols 0 to 2 are such.

    Args:
        raw: the bytes.
        encoding: a codec, or ``string-escape`` for a quoted byte string of Python 2.
    """

    raw: memoryview
    encoding: str

    def read(self) -> str | bytes:
        """The text; bytes if it is a byte string.

        Raises:
            InputError: it is longer than a megabyte and has characters above U+00FF; every character
                would take up to four bytes.
            ValueError: it can't be decoded.
        """
        if self.encoding == "string-escape":
            return unquoted(self.raw)
        wide = rb"[\xc4-\xff]" if self.encoding == "utf-8" else rb"\\U|\\u(?!00)"
        if len(self.raw) > 1 << 20 and re.search(wide, self.raw):
            raise InputError(
                "The file holds a text of more than a megabyte that is no Latin-1.",
                fix="save the weights without it",
            )
        return str(self.raw, self.encoding, "surrogatepass")

    def latin1(self) -> bytes | bytearray:
        """The bytes that the text stands for, one for each letter; piece by piece, to save memory.

        Raises:
            ValueError: it can't be decoded, or has other letters.
        """
        if self.encoding == "string-escape":
            return unquoted(self.raw)
        decoder = codecs.getincrementaldecoder(self.encoding)()
        made = bytearray()
        for start in range(0, len(self.raw), _PIECE):
            made += decoder.decode(bytes(self.raw[start : start + _PIECE])).encode("latin-1")
        made += decoder.decode(b"", final=True).encode("latin-1")
        return made


class Allowance:
    """How many bytes of memory the content of a file may still take."""

    def __init__(self, size: int) -> None:
        self.left = size

    def spend(self, size: int) -> None:
        """Take some of it.

        Raises:
            InputError: that much is not left.
        """
        self.left -= size
        if self.left < 0:
            raise odd("The content would take far more memory than a file of this size should need.")


def odd(what: str) -> InputError:
    """The error for content that no honest program writes."""
    return InputError(what, fix="don't use this file: it is damaged, or made to mislead")


def natural(value: Any) -> bool:
    """Whether this is a whole number that can count something."""
    return type(value) is int and 0 <= value < 2**63


def shown(text: object) -> str:
    """A name out of a file, fit to be printed: no control characters, not too long."""
    plain = str(text).encode("unicode_escape").decode("ascii")
    return plain if len(plain) <= 100 else f"{plain[:97]}..."


def unquoted(raw: memoryview) -> bytes:
    """What a quoted byte string of Python 2 stands for.

    Raises:
        ValueError: it is no such string.
    """
    quote = bytes(raw[:1])
    if len(raw) < 2 or quote not in (b"'", b'"') or raw[-1:] != quote:
        raise ValueError("a string without quotes")
    # The codec prints a warning at an escape that Python 2 has never written. (A search for one after
    # any number of backslashes would take memory for each.)
    unknown = rb"(?<!\\)(?:\\\\){0,200}\\(?![\\'\"nrtx])"
    body = raw[1:-1]
    if re.search(rb"\\{400}", body) or re.search(unknown, body):
        raise ValueError("an unknown escape in a string")
    decoded: Any = codecs.escape_decode(body)[0]  # bytes, whatever the stubs say
    return bytes(decoded)
