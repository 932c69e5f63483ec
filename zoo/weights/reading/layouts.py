"""Where things lie in a ZIP archive and in a safetensors file, read with distrust.

torch stores its archives without compression, so an entry is a part of the file: nothing is unpacked, and
nothing can grow. Formats: PKWARE's APPNOTE 6.3.10 (sections 4.3 to 4.5), and the safetensors README.
"""

from __future__ import annotations

import json
import math
import re
import stat
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...errors import InputError
from .dense import DTYPES
from .notes import AGAIN, Buffer, natural, odd, shown

__all__ = ["Entry", "Tensor", "read_directory", "read_header"]

_DIRECTORY = 2 << 20  # bytes of a directory or header that any file may have; large files may have more
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_UNIX = 3  # the system that an entry's attributes are of

_SAFETENSORS = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32"},
    **{"I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16"},
    **{"F32": "float32", "F64": "float64", "C64": "complex64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}


class Tensor(NamedTuple):
    """A tensor of a safetensors file and the bytes it is in."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of an archive's directory.

    Args:
        name: its path in the archive.
        system: what the attributes belong to.
        flags: bit 0: encrypted.
        method: of compression; 0 is none.
        packed: size in the archive.
        size: size of the content.
        attributes: of the system.
        offset: where its own header begins.
    """

    name: str
    system: int
    flags: int
    method: int
    packed: int
    size: int
    attributes: int
    offset: int

    def span(self, data: Buffer) -> tuple[int, int]:
        """Where its content starts and ends in the file.

        Raises:
            InputError: it is no plain stored file with a harmless name.
        """
        name = shown(self.name)
        parts = re.split(r"[/\\]", self.name)
        drive = re.match(r"[A-Za-z]:/", self.name)
        if ".." in parts or not parts[0] or drive or "\0" in self.name or "\\" in self.name:
            raise odd(f"The archive's entry {name} leaves the archive.")
        if self.system == _UNIX and stat.S_ISLNK(self.attributes >> 16):
            raise odd(f"The archive's entry {name} is a link.")
        if self.flags & 0x2041:
            raise InputError(f"The archive's entry {name} is encrypted.", fix="decrypt it first")
        if self.method != 0 or self.packed != self.size:
            raise InputError(
                f"The archive's entry {name} is compressed; torch compresses nothing.",
                fix="unpack the archive and pack it again without compression: zip -0",
            )
        if self.offset + _LOCAL.size > len(data):
            raise InputError(f"The archive ends before its entry {name}.", fix=AGAIN)
        signature, _, _, method, *_, named, extra = _LOCAL.unpack_from(data, self.offset)
        begin = self.offset + _LOCAL.size
        start = begin + named + extra
        same = _decoded(bytes(data[begin : begin + named]), self.flags) == self.name
        if signature != b"PK\x03\x04" or method != 0 or not same:
            raise odd(f"The archive's entry {name} is not what its directory says.")
        if start + self.size > len(data):
            raise InputError(f"The archive ends in the middle of its entry {name}.", fix=AGAIN)
        return start, start + self.size


def read_directory(data: Buffer) -> list[Entry]:
    """The entries of an archive, unchecked.

    Raises:
        InputError: it has no whole directory.
    """
    size = len(data)
    end = data.rfind(b"PK\x05\x06", max(0, size - _END.size - 0xFFFF))
    if end < 0 or end + _END.size > size:
        raise InputError("The archive has no end: the file is not whole.", fix=AGAIN)
    _, disk, first_disk, _, count, length, offset, comment = _END.unpack_from(data, end)
    if end + _END.size + comment != size:
        raise InputError("The archive doesn't end where the file ends.", fix=AGAIN)
    if 0xFFFF in (disk, first_disk, count) or 0xFFFFFFFF in (length, offset):
        count, length, offset, end = _end_64(data, end)
    if offset + length > end:
        raise InputError("The archive's directory is damaged.", fix=AGAIN)
    if length > _DIRECTORY + size // 64:
        raise odd("The archive's directory is far too large for the file.")
    entries, at = [], offset
    while at < offset + length:
        if at + _ENTRY.size > offset + length:
            raise InputError("The archive's directory is damaged.", fix=AGAIN)
        entry, at = _entry(data, at)
        entries.append(entry)
    if len(entries) != count or at != offset + length:
        raise InputError("The archive's directory is damaged.", fix=AGAIN)
    return entries


def _end_64(data: Buffer, end: int) -> tuple[int, int, int, int]:
    """Count, length and offset of the directory, and where its end record begins, for large archives."""
    at = end - _LOCATOR_64.size
    if at >= 0:
        signature, _, start, _ = _LOCATOR_64.unpack_from(data, at)
        if signature == b"PK\x06\x07" and start + _END_64.size <= at:
            signature, *_, count, length, offset = _END_64.unpack_from(data, start)
            if signature == b"PK\x06\x06":
                return count, length, offset, start
    raise InputError("The archive's directory is damaged.", fix=AGAIN)


def _entry(data: Buffer, at: int) -> tuple[Entry, int]:
    fields = _ENTRY.unpack_from(data, at)
    signature, made_by, _, flags, method, _, _, _, packed, size = fields[:10]
    named, extra, comment, _, _, attributes, offset = fields[10:]
    begin = at + _ENTRY.size
    stop = begin + named + extra + comment
    if signature != b"PK\x01\x02" or stop > len(data):
        raise InputError("The archive's directory is damaged.", fix=AGAIN)
    # Values that need 64 bits stand in the extra field, in this order.
    large = iter(_large(bytes(data[begin + named : begin + named + extra])))
    size, packed, offset = (
        next(large, value) if value == 0xFFFFFFFF else value for value in (size, packed, offset)
    )
    name = _decoded(bytes(data[begin : begin + named]), flags)
    return Entry(name, made_by >> 8, flags, method, packed, size, attributes, offset), stop


def _large(extra: bytes) -> list[int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        field = extra[at + 4 : at + 4 + length]
        if kind == 1:
            return [value for (value,) in struct.iter_unpack("<Q", field[: len(field) // 8 * 8])]
        at += 4 + length
    return []


def _decoded(name: bytes, flags: int) -> str:
    return name.decode("utf-8" if flags & 0x800 else "cp437", "backslashreplace")


def read_header(data: Buffer) -> dict[str, Tensor]:
    """The tensors that a safetensors file describes.

    Raises:
        InputError: the description is damaged, or not one of this file.
    """
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if length > size - 8:
        raise InputError(
            f"The header of the safetensors file would take {length} bytes, and the file has {size}.",
            fix=AGAIN,
        )
    if length > _DIRECTORY // 2 + size // 64:
        raise odd("The header of the safetensors file is far too large for the file.")
    try:
        header = json.loads(bytes(data[8 : 8 + length]).decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise InputError("The header of the safetensors file is damaged.", fix=AGAIN) from None
    tensors = {
        name: _described(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
    }
    at = 8 + length
    for name, (_, _, (start, stop)) in sorted(tensors.items(), key=lambda item: item[1].span):
        if start != at:
            raise odd(f"The tensor {shown(name)} overlaps another one, or there is a gap before it.")
        at = stop
    if at != size:
        raise InputError(f"The tensors of the file end at byte {at}, and the file has {size}.", fix=AGAIN)
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError
    return made


def _described(name: str, entry: Any, begin: int) -> Tensor:
    damaged = odd(f"The description of the tensor {shown(name)} makes no sense.")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise damaged
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(isinstance(row, list) and all(map(natural, row)) for row in (shape, offsets)):
        raise damaged
    if len(shape) > 32 or len(offsets) != 2:
        raise damaged
    known = DTYPES.get(_SAFETENSORS.get(dtype, "")) if isinstance(dtype, str) else None
    if known is None:
        raise InputError(
            f"The tensor {shown(name)} has numbers of type {shown(dtype)}, which this torch can't hold.",
            fix="save it in another type, or use a newer torch",
        )
    if math.prod(shape) * known.itemsize != offsets[1] - offsets[0]:
        raise odd(f"The tensor {shown(name)} has another size than its shape says.")
    return Tensor(known, tuple(shape), (begin + offsets[0], begin + offsets[1]))
