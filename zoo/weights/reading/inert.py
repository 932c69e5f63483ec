"""Plain values from the notes of a pickle: a short list of inert things, and nothing else.

Each name that may occur has a function here that makes the value; torch's and numpy's own never run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...errors import InputError
from .dense import DTYPES, STORAGES, Memory, dtype_of, plain_array
from .notes import RESAVE, Allowance, Call, Members, Name, Pairs, Text, natural, odd, shown

__all__ = ["INERT", "Values"]

_DEEPEST = 64  # containers in one another; what walks the content later is recursive
_MOST = 10_000_000  # values, counted where they are used: a small file can use one list a billion times
_MOST_ODD_KEYS = 1000  # tuples in a dict; their hashes can be made to collide
_NAMED_DTYPES = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}


class Values:
    """Makes values of notes, each note once: what was shared in the file is shared again.

    Args:
        memory: the file's storages.
        allowance: what copies may take.
    """

    def __init__(self, memory: Memory, allowance: Allowance) -> None:
        self.memory = memory
        self.allowance = allowance
        self.made: dict[int, tuple[Any, int, int]] = {}  # id of a note -> value, values in it, its depth
        self.open: set[int] = set()
        self.count = 0
        self.deepest = 0

    def value(self, note: Any, depth: int = 0) -> Any:
        """The value of a note.

        Args:
            note: what ``read_pickle`` gave, or a part of it (notes are known by their identity).
            depth: containers around it.

        Raises:
            InputError: it is no plain value.
        """
        self._reach(depth, 1)
        if note is None or type(note) in (str, bytes, bool, int, float):
            return note
        place = id(note)
        if place in self.made:
            value, count, levels = self.made[place]
            self._reach(depth + levels, count)
            return value
        if place in self.open:
            raise InputError("A container in the file contains itself.", fix=RESAVE)
        self.open.add(place)
        outer, before, self.deepest = self.deepest, self.count, depth
        value = self._build(note, depth)
        self.made[place] = value, self.count - before, self.deepest - depth
        self.deepest = max(outer, self.deepest)
        self.open.remove(place)
        return value

    def _reach(self, depth: int, count: int) -> None:
        self.count += count
        self.deepest = max(self.deepest, depth)
        if depth > _DEEPEST:
            raise InputError(f"The content is nested more than {_DEEPEST} deep.", fix=RESAVE)
        if self.count > _MOST:
            raise InputError(f"The content unfolds into more than {_MOST} values.", fix=RESAVE)

    def _build(self, note: Any, depth: int) -> Any:
        if isinstance(note, Pairs):
            return self.mapping(note, depth)
        if isinstance(note, Members):
            return self.members(note, depth)
        if isinstance(note, list):
            return [self.value(item, depth + 1) for item in note]
        if isinstance(note, tuple):
            return tuple([self.value(item, depth + 1) for item in note])
        if isinstance(note, Text | memoryview):
            try:
                value = note.read() if isinstance(note, Text) else bytes(note)
            except ValueError:
                raise odd("A text in the file can't be decoded.") from None
            self.allowance.spend(sys.getsizeof(value))
            return value
        if isinstance(note, Call) and note.name in _MAKERS:
            return _MAKERS[note.name](self, note, depth)
        if isinstance(note, Name) and note in _NAMED_DTYPES:
            return _NAMED_DTYPES[note]
        raise InputError("The file holds a class or a bare storage where a value belongs.", fix=RESAVE)

    def mapping(self, pairs: list[tuple[Any, Any]], depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self.allowance.spend(100 * len(pairs))
        for number, (key, value) in enumerate(pairs):
            made[self._key(key, depth + 1, number)] = self.value(value, depth + 1)
        return made

    def members(self, members: list[Any], depth: int) -> set[Any]:
        self.allowance.spend(100 * len(members))
        return {self._key(item, depth + 1, number) for number, item in enumerate(members)}

    def _key(self, note: Any, depth: int, number: int) -> Any:
        """A key, if many of its kind can't have the same hash."""
        key = self.value(note, depth)
        for part in key if type(key) is tuple and number < _MOST_ODD_KEYS else (key,):
            small = isinstance(part, int) and abs(part) < 2**63
            if part is not None and not small and not isinstance(part, str | bytes | float | np.integer):
                raise InputError("A key or member of a set in the file is no text or number.", fix=RESAVE)
        return key


_Maker = Callable[[Values, Call, int], Any]


def _args(call: Call, *counts: int) -> tuple[Any, ...]:
    """The arguments of a call that has that many, and whose result is left alone."""
    if call.steps:
        raise odd(f"What the file does to the result of {shown(call.name)} makes no sense.")
    if len(call.args) not in counts:
        raise odd(f"The file calls {shown(call.name)} with {len(call.args)} arguments.")
    return call.args


def _naturals(note: Any) -> tuple[int, ...]:
    if isinstance(note, Call) and note.name == "torch.Size":
        (note,) = _args(note, 1)
    if not isinstance(note, list | tuple) or len(note) > 32 or not all(map(natural, note)):
        raise odd("A shape or stride in the file is no short row of whole numbers.")
    return tuple(note)


# Containers and small values


def _dict(values: Values, call: Call, depth: int) -> dict[Any, Any]:
    """An OrderedDict or Counter. Its attributes (torch: _metadata, versions of modules) are left out."""
    pairs: list[Any] = []
    for given in call.args:
        if not isinstance(given, list | tuple):
            raise odd(f"The file fills {shown(call.name)} with something that is no pairs.")
        pairs.extend(given)
    for kind, items in call.steps:
        if kind == "items" and len(items) % 2 == 0:
            pairs.extend(zip(items[::2], items[1::2], strict=True))
        elif kind != "state":
            raise odd(f"What the file does to the result of {shown(call.name)} makes no sense.")
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise odd(f"The file fills {shown(call.name)} with something that is no pairs.")
    return values.mapping(pairs, depth)


def _namespace(values: Values, call: Call, depth: int) -> argparse.Namespace:
    made = argparse.Namespace()
    for kind, state in call.steps:
        fields = values.value(state[0], depth + 1) if kind == "state" and not call.args else None
        if type(fields) is not dict or not all(type(key) is str for key in fields):
            raise odd("The fields of a Namespace in the file are damaged.")
        vars(made).update(fields)
    return made


def _set(values: Values, call: Call, depth: int) -> Any:
    members = (*_args(call, 0, 1), [])[0]
    if not isinstance(members, list | tuple):
        raise odd("The file makes a set of something that is no list.")
    return values.members(list(members), depth)


def _complex(values: Values, call: Call, depth: int) -> complex:
    real, imag = _args(call, 2)
    if type(real) not in (int, float) or type(imag) not in (int, float):
        raise odd("A complex number in the file is made of something else.")
    return complex(real, imag)


def _size(values: Values, call: Call, depth: int) -> tuple[int, ...]:
    return _naturals(call)


def _device(values: Values, call: Call, depth: int) -> torch.device | str:
    kind, index = (*_args(call, 1, 2), None)[:2]
    if type(kind) is not str or (index is not None and not natural(index)):
        raise odd("The name of a device in the file is damaged.")
    name = kind if index is None else f"{kind}:{index}"
    try:
        return torch.device(name)
    except RuntimeError:  # this torch doesn't know it
        return name


def _bytes(values: Values, call: Call, depth: int) -> bytes | memoryview:
    raw = _raw(call)
    values.allowance.spend(len(raw))
    return bytes(raw)


def _raw(note: Any) -> bytes | bytearray | memoryview:
    """Bytes, however a protocol writes them: 0 to 2 have no instruction for them.

    There is bytes() for none, _codecs.encode(text, "latin1") for some, and bytearray(bytes).
    """
    if isinstance(note, Call) and note.name in _BYTES:
        args = _args(note, 0, 1, 2)
        if args[1:] not in ((), ("latin1",), ("latin-1",)):
            raise odd("The file encodes a text as something else than Latin-1.")
        note = _raw(args[0]) if args else b""
    try:
        if isinstance(note, Text):
            return note.latin1()
        if isinstance(note, str):
            return note.encode("latin-1")
    except ValueError:
        raise odd("The file encodes a text as Latin-1 that is none.") from None
    if not isinstance(note, bytes | bytearray | memoryview):
        raise odd("The data of an array in the file is no row of bytes.")
    return note


# Tensors: requires_grad, hooks and attributes are left out


def _tensor(values: Values, call: Call, depth: int) -> torch.Tensor:
    """_rebuild_tensor(storage, first, size, stride); _v2 adds (requires_grad, hooks[, metadata])."""
    return _over_storage(values, _args(call, 4, 6, 7), None, call.args[6:])


def _tensor_v3(values: Values, call: Call, depth: int) -> torch.Tensor:
    """As _v2, with a dtype before the metadata: for types that have no storage class."""
    args = _args(call, 7, 8)
    return _over_storage(values, args, values.value(args[6], depth + 1), args[7:])


def _over_storage(values: Values, args: tuple[Any, ...], dtype: Any, metadata: Any) -> torch.Tensor:
    stored, first, size, stride = args[:4]
    if any(metadata):
        raise InputError("A tensor in the file is conjugated or negated in name only.", fix=RESAVE)
    if not natural(first) or not isinstance(dtype, torch.dtype | None):
        raise odd("A tensor in the file is damaged.")
    return values.memory.tensor(stored, first, _naturals(size), _naturals(stride), dtype)


def _parameter(values: Values, call: Call, depth: int) -> torch.Tensor:
    """_rebuild_parameter(tensor, requires_grad, hooks[, attributes])."""
    return _tensor_of(values, _args(call, 3, 4)[0], depth)


def _typed(values: Values, call: Call, depth: int) -> torch.Tensor:
    """_rebuild_from_type_v2(function, class, arguments, attributes): a tensor with attributes."""
    function, kind, args, _ = _args(call, 4)
    if kind not in ("torch.Tensor", "torch.nn.parameter.Parameter") or type(args) is not tuple:
        raise InputError("A tensor in the file is of a special class.", fix=RESAVE)
    return _tensor_of(values, Call(function, args), depth)


def _tensor_of(values: Values, note: Any, depth: int) -> torch.Tensor:
    if not isinstance(note, Call) or note.name not in _TENSORS or depth > _DEEPEST:
        raise InputError("A tensor in the file is of a special class.", fix=RESAVE)
    return _TENSORS[note.name](values, note, depth + 1)


# Arrays


def _dtype(note: Any) -> np.dtype[Any]:
    if not isinstance(note, Call) or note.name != "numpy.dtype" or not note.args or len(note.steps) > 1:
        raise odd("The type of an array in the file is none of numpy's.")
    return dtype_of(note.args[0], note.steps[0][1][0] if note.steps else None)


def _filled(values: Values, shape: Any, dtype: Any, fortran: bool, data: Any) -> np.ndarray[Any, Any]:
    lent = len(data.raw) if isinstance(data, Text) else 0  # while it is decoded
    values.allowance.spend(lent)
    made = plain_array(_naturals(shape), _dtype(dtype), fortran, _raw(data), values.allowance)
    values.allowance.left += lent
    return made


def _array(values: Values, call: Call, depth: int) -> np.ndarray[Any, Any]:
    """_reconstruct(ndarray, (0,), b"b") with the state ([version,] shape, dtype, is Fortran, data)."""
    kind = call.args[0] if call.args else None
    if kind != "numpy.ndarray" or len(call.steps) != 1 or call.steps[0][0] != "state":
        raise InputError("An array in the file is of a special class.", fix=RESAVE)
    state = call.steps[0][1][0]
    if type(state) is not tuple or len(state) not in (4, 5):
        raise odd("An array in the file is damaged.")
    shape, dtype, fortran, data = state[-4:]
    return _filled(values, shape, dtype, fortran is True or fortran == 1, data)


def _array_of_buffer(values: Values, call: Call, depth: int) -> np.ndarray[Any, Any]:
    """_frombuffer(data, dtype, shape, order[, order of the axes]), protocol 5."""
    data, dtype, shape, order, axes = (*_args(call, 4, 5), None)[:5]
    made = _filled(values, shape, dtype, order == "F", data)
    return made if axes is None else made.transpose(_naturals(axes))


def _scalar(values: Values, call: Call, depth: int) -> Any:
    dtype, data = _args(call, 2)
    return _filled(values, (), dtype, False, data)[()]


_BUILTINS = ("builtins", "__builtin__")  # protocols 0 to 2 have Python 2's name
_CORES = ("core", "_core")  # numpy before and since 2
_BYTES = {"_codecs.encode", *(f"{module}.{kind}" for module in _BUILTINS for kind in ("bytes", "bytearray"))}
_TENSORS: dict[str, _Maker] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _typed,
}
_MAKERS: dict[str, _Maker] = {
    **_TENSORS,
    **dict.fromkeys(_BYTES, _bytes),
    "argparse.Namespace": _namespace,
    "collections.Counter": _dict,
    "collections.OrderedDict": _dict,
    "torch.Size": _size,
    "torch.device": _device,
    **{f"{module}.{kind}": _set for module in _BUILTINS for kind in ("set", "frozenset")},
    **{f"{module}.complex": _complex for module in _BUILTINS},
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in _CORES},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in _CORES},
    **{f"numpy.{core}.numeric._frombuffer": _array_of_buffer for core in _CORES},
}
_ARGUMENTS = {"numpy.dtype", "numpy.ndarray", "torch.Tensor", "torch.nn.parameter.Parameter"}

INERT = frozenset({*_MAKERS, *_NAMED_DTYPES, *STORAGES, *_ARGUMENTS})
"""The names that a pickle may mention: here they can only become values."""
