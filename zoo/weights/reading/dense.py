"""Plain dense tensors and arrays over the bytes of a file; no size is believed before it is compared.

torch before 2.10 corrupts memory when a file lies about sizes, also with ``weights_only=True``
(CVE-2026-24747), and numpy and torch of any version take petabytes at their word.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import InputError
from .notes import RESAVE, Allowance, Buffer, Name, Stored, natural, odd, shown

__all__ = ["DTYPES", "STORAGES", "Claim", "Memory", "claim_of", "dtype_of", "plain_array"]

_TENSOR = 800  # bytes that a tensor or array takes besides its numbers

# Without complex32 (torch prints warnings about it) and without quantised and packed types.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
STORAGES = {
    f"{module}.{kind}Storage": dtype
    for module in ("torch", "torch.cuda", "torch.storage")
    for kind, dtype in {
        **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16},
        **{"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16},
        **{"Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool, "Untyped": torch.uint8},
        **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
    }.items()
}


@dataclass(frozen=True)
class Claim:
    """What a pickle says of a storage, in elements.

    Args:
        key: its name in the file.
        dtype: of its elements.
        numel: how many there are.
        first: the first one of the part that is meant.
        count: how many belong to that part.
    """

    key: str
    dtype: torch.dtype
    numel: int
    first: int
    count: int


def claim_of(key: Any) -> Claim:
    """Understand the key of a ``Stored``: ("storage", type, key, device, numel[, part]).

    Raises:
        InputError: it is something else.
    """
    part = None
    if type(key) is tuple and len(key) == 6:  # the legacy layout
        *rest, part = key
        key = tuple(rest)
    if type(key) is tuple and len(key) == 5 and key[0] == "storage":
        _, kind, name, _, numel = key
        if type(kind) is Name and kind in STORAGES and type(name) is str and natural(numel):
            if part is None:
                return Claim(name, STORAGES[kind], numel, 0, numel)
            if type(part) is tuple and len(part) == 3 and natural(part[1]) and natural(part[2]):
                return Claim(name, STORAGES[kind], numel, part[1], min(part[2], max(numel - part[1], 0)))
    raise InputError("The pickle refers to something outside it that is no storage of tensors.", fix=RESAVE)


class Memory:
    """The bytes of a file as storages for tensors.

    Args:
        data: the whole file: a mapping that is private to this process, or a copy.
        mapped: it is such a mapping, and tensors may lie in it.
        spans: key of a storage -> where its bytes start and end.
        allowance: what copies may take.
    """

    def __init__(
        self, data: Buffer, mapped: bool, spans: Mapping[str, tuple[int, int]], allowance: Allowance
    ) -> None:
        self.whole = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        self.mapped = mapped
        self.spans = spans
        self.allowance = allowance
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.flags: set[str] = set()  # storages that were found to hold true and false only

    def tensor(
        self,
        stored: Any,
        first: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor over a storage that a pickle refers to.

        Args:
            stored: the reference, a ``Stored``.
            first: place of the first element in the storage.
            sizes: of the dimensions.
            strides: of the dimensions, in elements.
            dtype: of the elements if not the storage's.

        Raises:
            InputError: it doesn't lie within the storage.
        """
        claim = claim_of(stored.key if type(stored) is Stored else None)
        dtype = dtype or claim.dtype
        if len(sizes) != len(strides):
            raise odd("A tensor's size and strides don't belong together.")
        begin = claim.first * claim.dtype.itemsize
        if begin % dtype.itemsize:
            raise odd("A tensor begins in the middle of a number.")
        there = claim.count * claim.dtype.itemsize // dtype.itemsize
        count = math.prod(sizes)
        reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if count else -1
        if first + reach >= there:
            raise odd("A tensor reaches beyond the end of its storage.")
        # Numbers that are used several times (strides of 0) become real as soon as somebody copies them.
        self.allowance.spend(max(count - there, 0) * dtype.itemsize)
        if claim.key not in self.storages:
            self.storages[claim.key] = self._storage(*self.spans[claim.key], align=16)
        if dtype is torch.bool and claim.key not in self.flags:
            _check_flags(*self.spans[claim.key], self.whole)
            self.flags.add(claim.key)
        return self._over(self.storages[claim.key], dtype, sizes, strides, begin // dtype.itemsize + first)

    def row(self, dtype: torch.dtype, sizes: tuple[int, ...], span: tuple[int, int]) -> torch.Tensor:
        """A contiguous tensor with a storage of its own; ``span`` has as many bytes as the sizes say."""
        strides = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
        if dtype is torch.bool:
            _check_flags(*span, self.whole)
        return self._over(self._storage(*span, align=dtype.itemsize), dtype, sizes, strides, 0)

    def _storage(self, start: int, stop: int, align: int) -> torch.UntypedStorage:
        piece = self.whole[start:stop]
        if self.mapped and start % align == 0 and stop > start:
            return piece
        self.allowance.spend(stop - start)
        return piece.clone()

    def _over(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        first: int,
    ) -> torch.Tensor:
        self.allowance.spend(_TENSOR)
        return torch.empty(0, dtype=dtype).set_(storage, first, sizes, strides)


def _check_flags(start: int, stop: int, whole: torch.UntypedStorage) -> None:
    # torch counts a flag of 2 as two, and the results of its searches then don't fit their memory.
    flags = torch.empty(0, dtype=torch.uint8).set_(whole, start, (stop - start,), (1,))
    if stop > start and int(flags.max()) > 1:
        raise odd("A flag in the file is neither true nor false.")


def dtype_of(code: Any, state: Any) -> np.dtype[Any]:
    """The numpy type of an array, if its elements are plain numbers or text of a fixed length.

    Args:
        code: e.g. ``f4``.
        state: (version, byte order, ...), or None for this machine's byte order.

    Raises:
        InputError: the elements are something else.
    """
    code = code.decode("latin-1") if type(code) is bytes else code
    order = "="
    if state is not None:
        if type(state) is not tuple or len(state) < 5 or state[1] not in ("<", ">", "=", "|"):
            raise odd("An array's type is damaged.")
        if any(part is not None for part in state[2:5]):
            raise InputError("An array in the file is a table with columns.", fix=RESAVE)
        order = "=" if state[1] == "|" else state[1]
    if type(code) is str and re.fullmatch(r"b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,5}", code, re.ASCII):
        return np.dtype(order + code)
    if type(code) is str and code.startswith("O"):
        raise InputError("An array in the file holds Python objects.", fix=RESAVE)
    raise InputError(f"An array in the file has elements of type {shown(code)}.", fix=RESAVE)


def plain_array(
    sizes: tuple[int, ...],
    dtype: np.dtype[Any],
    fortran: bool,
    raw: bytes | bytearray | memoryview,
    allowance: Allowance,
) -> np.ndarray[Any, Any]:
    """An array of its own, in this machine's byte order; it lies in ``raw`` if that is a bytearray.

    Raises:
        InputError: the bytes are not as many as the sizes say.
    """
    if len(raw) != math.prod(sizes) * dtype.itemsize:
        raise odd("An array's data is not as long as its shape says.")
    allowance.spend(_TENSOR + len(raw))
    native = dtype.newbyteorder("=")
    if not raw:
        return np.zeros(sizes, native)
    flat = np.frombuffer(raw, dtype)
    if dtype.kind == "b" and flat.view(np.uint8).max() > 1:
        raise odd("A flag in the file is neither true nor false.")
    if dtype.kind == "U" and flat.view(np.dtype("u4").newbyteorder(dtype.byteorder)).max() > sys.maxunicode:
        raise odd("A text in the file has a character that is no letter.")
    shaped = flat.reshape(sizes, order="F" if fortran else "C")
    return np.asarray(shaped, native) if type(raw) is bytearray else np.array(shaped, native, order="K")
