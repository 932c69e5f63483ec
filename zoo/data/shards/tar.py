"""Tar archives read by position: every header is checked, no name leads outside, nothing is unpacked.

The layout is POSIX ustar with the extensions of pax (``path``, ``size``) and GNU (long names, large sizes).
Unlike ``tarfile``, which ends quietly at a header it can't read, this tells damage from the end.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["BLOCK", "Damaged", "Member", "ReadAt", "Refused", "members", "next_header", "read_member"]

BLOCK = 512
_ZEROS = bytes(BLOCK)
_LARGEST_EXTENSION = 1 << 20  # bytes of a name or of a pax header
_FILES, _FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL = (b"0", b"\0", b"7"), b"5", b"L", b"K", b"x", b"g"
_PLAIN = re.compile(r"[\w-][\w.-]*")  # nearly all names: no folder, no doubt
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}

ReadAt = Callable[[int, int], bytes]
"""(offset, length) -> as many bytes, or fewer at the file's end."""


class Damaged(Exception):
    """The archive is not what its writer wrote."""

    def __init__(self, what: str, offset: int, name: str = "") -> None:
        super().__init__(what)
        self.what, self.offset, self.name = what, offset, name


class Refused(Exception):
    """The archive is whole, but holds what is not read from an archive."""

    def __init__(self, what: str, offset: int, name: str = "") -> None:
        super().__init__(what)
        self.what, self.offset, self.name = what, offset, name


class Member(NamedTuple):
    """A file in an archive; offsets in bytes from the archive's start.

    ``start`` is that of its first header, ``data`` that of its content, ``end`` that of what follows.
    """

    name: str
    start: int
    data: int
    size: int
    end: int
    is_file: bool


def read_member(read: ReadAt, start: int) -> Member | None:
    """The member whose first header stands at ``start``, or None at the end mark (a block of zeros).

    Raises:
        Damaged: no valid header there, or the archive ends within it.
        Refused: a link, a device, or a name that is absolute or leads upwards.
    """
    name: bytes | None = None
    size: int | None = None
    offset = start
    while True:
        block = _exactly(read, offset, BLOCK, "the archive ends without an end mark: it was cut off")
        if block == _ZEROS and offset == start:
            return None
        kind, length = block[156:157], _check(block, offset)
        data = offset + BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL):
            if length > _LARGEST_EXTENSION:
                raise Damaged(f"an extended header of {length} bytes", offset)
            content = _exactly(read, data, length, "the archive is cut off within a header")
            if kind == _LONG_NAME:
                name = content.rstrip(b"\0")
            elif kind in (_PAX, _PAX_OF_ALL):
                records = _records(content, offset)
                if any(key.startswith(b"GNU.sparse") for key in records):
                    raise Refused("a sparse file is not read", offset)
                if kind == _PAX_OF_ALL and records.keys() & {b"path", b"size"}:
                    raise Refused("one name or size for all members makes no sense", offset)
                name = records.get(b"path", name)
                size = _decimal(records[b"size"], offset) if b"size" in records else size
            offset = data + _padded(length)
            continue
        shown = _clean(name if name is not None else _plain_name(block), offset)
        if kind in _REFUSED:
            raise Refused(f"{_REFUSED[kind]} is not read from an archive", offset, shown)
        if kind not in (*_FILES, _FOLDER):
            raise Damaged(f"a header of the unknown kind {kind!r}", offset, shown)
        length = length if size is None else size
        is_file = kind != _FOLDER and not shown.endswith("/")
        if is_file and not shown:
            raise Damaged("a member without a name", offset)
        return Member(shown, start, data, length, data + _padded(length), is_file)


def members(read: ReadAt, size: int, start: int = 0) -> Iterator[Member]:
    """All members from ``start`` on; ``size`` is the archive's.

    Raises:
        Damaged: also for a member that is cut off, or where more than zeros follows the end mark.
        Refused: see ``read_member``.
    """
    while True:
        member = read_member(read, start)
        if member is None:
            _only_zeros(read, start, size)
            return
        if member.data + member.size > size:
            there = max(0, size - member.data)
            raise Damaged(f"cut off after {there} of {member.size} bytes", member.start, member.name)
        yield member
        start = member.end


def next_header(read: ReadAt, start: int, size: int) -> int | None:
    """Where the next thing that looks like a header stands: where to go on after damage."""
    for offset in range(start, size - BLOCK + 1, BLOCK):
        block = read(offset, BLOCK)
        if block[257:262] == b"ustar":
            try:
                _check(block, offset)
            except Damaged:
                continue
            return offset
    return None


def _exactly(read: ReadAt, offset: int, length: int, otherwise: str) -> bytes:
    found = read(offset, length)
    if len(found) < length:
        raise Damaged(otherwise, offset)
    return found


def _check(block: bytes, offset: int) -> int:
    """The size that a header states, if its checksum is right."""
    stated = block[148:156]  # of all bytes, these taken for spaces
    total = _octal(stated, offset) - 8 * 32 + sum(stated)
    # Half of Adler-32 is the sum of the bytes, plus 1, modulo 65521: ten times as fast as adding them here.
    if zlib.adler32(block) & 0xFFFF != (total + 1) % 65521:
        raise Damaged("a header's checksum is wrong", offset)
    field = block[124:136]
    if field[0] & 0x80:  # GNU's large sizes: big-endian
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    return _octal(field, offset)


def _octal(field: bytes, offset: int) -> int:
    digits = field.partition(b"\0")[0].strip()
    if digits and not (digits.isdigit() and max(digits) < ord("8")):
        raise Damaged("there is no tar header here", offset)
    return int(digits or b"0", 8)


def _decimal(value: bytes, offset: int) -> int:
    if not value.isdigit() or len(value) > 20:
        raise Damaged(f"a pax header states the size {value[:20]!r}", offset)
    return int(value)


def _plain_name(block: bytes) -> bytes:
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    # GNU keeps times where ustar has the prefix.
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _records(content: bytes, offset: int) -> dict[bytes, bytes]:
    """A pax header's ``LENGTH KEY=VALUE`` lines."""
    found: dict[bytes, bytes] = {}
    while content:
        digits, space, _ = content.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        key, equals, value = content[len(digits) + 1 : length - 1].partition(b"=")
        if not space or not equals or content[length - 1 : length] != b"\n":
            raise Damaged("a pax header can't be read", offset)
        found[key] = value
        content = content[length:]
    return found


def _clean(name: bytes, offset: int) -> str:
    """A name inside the archive as text, without a leading ``./``; empty for the folder it was made in."""
    text = name.decode("utf-8", "surrogateescape")
    if _PLAIN.fullmatch(text):
        return text
    parts = text.replace("\\", "/").split("/")
    if ".." in parts:
        raise Refused("a name with .. is not read from an archive", offset, text)
    if (not parts[0] and text) or re.fullmatch("[A-Za-z]:", parts[0]):
        raise Refused("an absolute name is not read from an archive", offset, text)
    if "\0" in text:
        raise Damaged("a member's name holds a zero", offset)
    return re.sub(r"^(\./+)+", "", text)


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _only_zeros(read: ReadAt, start: int, size: int) -> None:
    """A zeroed header looks like the end mark; so do archives that were joined by ``cat``."""
    step = 1 << 16
    for offset in range(start, size, step):
        if any(read(offset, step)):
            raise Damaged("an end mark stands here, and more than zeros follows it", start)
