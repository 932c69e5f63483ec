"""Pickles read as notes: what a pickle wants called is written down, and nothing is ever called.

A pickle is a program for a small stack machine. Python's own machine imports modules and calls what it
finds there while it reads. This one has no way to do so: a name becomes a ``Name``, a call becomes a
``Call`` that holds the name and the arguments, a reference to data outside becomes a ``Stored``.
``zoo.weights.inert`` makes values of the few calls it knows. So all names are known before anything is
built, whatever tricks the program plays, and the notes can't take more memory than was allowed.

The instructions are those of protocols 0 to 5 (Python's ``pickletools`` describes each of them).
"""

from __future__ import annotations

import pickle
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from .notes import AGAIN, Allowance, Buffer, Call, Members, Name, Pairs, Stored, Text, shown, unquoted

__all__ = ["Pickle", "read_pickle"]

_LONG_BYTES = 1 << 12  # bytes up to this length are copied, longer ones stay where they are in the file
_LONG_TEXT = 1 << 14  # text up to this length is decoded at once, longer text only when it is needed
_LONG_NUMBER = 64  # bytes of a whole number: random generators have states of 16 or 32
_LONG_LINE = 1000  # letters of a name, digits of a number
_MARK = 64
# What one instruction can take, in bytes: the object and its place on the stack or in the memo.
_USUAL = 40
_COSTS = {
    **dict.fromkeys([pickle.MARK, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET], _MARK + 40),
    **dict.fromkeys([pickle.LIST, pickle.DICT, pickle.FROZENSET, pickle.TUPLE], 64),
    **dict.fromkeys([pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.SETITEM], 80),
    **dict.fromkeys([pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE], 110),
    **dict.fromkeys([pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.OBJ, pickle.INST], 250),
    **dict.fromkeys([pickle.BUILD, pickle.PERSID, pickle.BINPERSID], 160),
}


@dataclass(frozen=True)
class Pickle:
    """One pickle that was read.

    Args:
        value: plain values, lists, tuples and notes.
        end: where in the buffer it ends.
        stored: the key of every reference to something outside.
    """

    value: Any
    end: int
    stored: list[Any]


def read_pickle(data: Buffer, start: int, stop: int, names: dict[str, Name], allowance: Allowance) -> Pickle:
    """Read one pickle from a buffer, up to its STOP.

    Args:
        data: the whole file.
        start: where the pickle begins.
        stop: where it must have ended.
        names: receives every name that the pickle mentions, also if reading fails later.
        allowance: what the notes may take.

    Raises:
        InputError: this is no whole pickle, or it takes too much.
    """
    machine = _Machine(data, start, stop, names, allowance)
    try:
        value = machine.run()
    except (IndexError, KeyError):
        raise _damaged("an instruction asks for a value that is not there") from None
    except (ValueError, OverflowError) as error:
        raise _damaged(str(error)) from None
    return Pickle(value, machine.at, machine.stored)


def _damaged(why: str) -> InputError:
    return InputError(f"The pickle in the file is damaged ({shown(why)}).", fix=AGAIN)


class _Machine:
    """The stack machine. ``marked`` holds the stacks below each open mark."""

    def __init__(
        self, data: Buffer, start: int, stop: int, names: dict[str, Name], allowance: Allowance
    ) -> None:
        self.data, self.view = data, memoryview(data)
        self.at, self.stop = start, stop
        self.names = names
        self.allowance = allowance
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.stored: list[Any] = []

    def run(self) -> Any:
        while self.at < self.stop:
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            if code not in _TABLE:
                raise ValueError(f"unknown instruction 0x{code:02x}")
            do, cost = _TABLE[code]
            self.allowance.spend(cost)
            do(self)
        raise ValueError("it ends in the middle")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    # Reading

    def take(self, count: int) -> memoryview:
        end = self.at + count
        if count < 0 or end > self.stop:
            raise ValueError("it ends in the middle")
        piece = self.view[self.at : end]
        self.at = end
        return piece

    def unpack(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> memoryview:
        end = self.data.find(b"\n", self.at, self.stop)
        piece = self.take(end - self.at)  # no line end: -1, which is refused
        self.at += 1
        return piece

    def short_line(self) -> str:
        line = self.line()
        if len(line) > _LONG_LINE:
            raise ValueError("a line is too long")
        return str(line, "utf-8")

    # Values

    def text(self, raw: memoryview, encoding: str) -> None:
        if len(raw) > _LONG_TEXT:
            self.push(Text(raw, encoding))
            return
        text = str(raw, encoding, "surrogatepass")
        self.allowance.spend(sys.getsizeof(text))
        self.push(text)

    def data_of(self, raw: memoryview) -> None:
        short = len(raw) <= _LONG_BYTES
        self.allowance.spend(len(raw) if short else 200)
        self.push(bytes(raw) if short else raw)

    def string(self, raw: memoryview) -> None:
        """Python 2's byte strings are text or data, nobody knows."""
        if len(raw) <= _LONG_TEXT and bytes(raw).isascii():
            self.text(raw, "ascii")
        else:
            self.data_of(raw)

    def quoted(self) -> None:
        raw = self.line()
        if len(raw) > _LONG_TEXT:
            self.push(Text(raw, "string-escape"))
            return
        self.allowance.spend(len(raw))
        self.string(memoryview(unquoted(raw)))

    def long(self, count: int) -> None:
        if count > _LONG_NUMBER:
            raise ValueError("a number is too long")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def decimal(self) -> None:
        line = self.short_line()
        self.push(line == "01" if line in ("00", "01") else _integer(line))

    # The stack and the memo

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marked.pop()
        self.allowance.left += _MARK
        return items

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def get(self, place: int) -> None:
        self.push(self.memo[place])

    def put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    # Containers

    def fill(self, kind: str, holder: type[Any], items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Call:
            target.steps.append((kind, items))
        elif type(target) is not holder:
            raise ValueError("it fills something that can't be filled")
        else:
            target.extend(self.pairs(items) if holder is Pairs else items)

    def pairs(self, items: list[Any]) -> Pairs:
        self.allowance.spend(40 * len(items))
        return Pairs(zip(items[::2], items[1::2], strict=True))

    # Names and calls

    def name(self, full: str) -> Name:
        if len(full) > _LONG_LINE:
            raise ValueError("a name is too long")
        if full not in self.names:
            self.allowance.spend(200 + 4 * len(full))
            self.names[full] = Name(full)
        return self.names[full]

    def global_(self) -> None:
        module, name = self.short_line(), self.short_line()
        self.push(self.name(f"{module}.{name}"))

    def stack_global(self) -> None:
        module, name = self.last(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is no text")
        self.push(self.name(f"{module}.{name}"))

    def extension(self, layout: str) -> None:
        self.push(self.name(f"(extension {self.unpack(layout)} of copyreg)"))

    def call(self, target: Any, args: Any, keywords: Any = None) -> None:
        if type(args) is not tuple:
            raise ValueError("the arguments of a call are no tuple")
        # Whoever calls what a call returned is up to no good; as a name it is refused like any other.
        name = target if type(target) is Name else self.name("(a function that the pickle computes)")
        self.push(Call(name, args, [("keywords", [keywords])] if keywords else []))

    def reduce(self) -> None:
        self.call(*self.last(2))

    def instance(self) -> None:
        self.global_()
        name = self.stack.pop()
        self.call(name, tuple(self.pop_mark()))

    def object_(self) -> None:
        target, *args = self.pop_mark()  # without a target: ValueError
        self.call(target, tuple(args))

    def refer(self, key: Any) -> None:
        self.stored.append(key)
        self.push(Stored(key))

    # Framing

    def protocol(self) -> None:
        if self.unpack("<B") > pickle.HIGHEST_PROTOCOL:
            raise ValueError("its protocol is unknown")

    def frame(self) -> None:
        if self.unpack("<Q") > self.stop - self.at:
            raise ValueError("it ends in the middle")


def _integer(line: str) -> int:
    if not re.fullmatch(r"-?\d{1,150}L?", line, re.ASCII):
        raise ValueError("a number is damaged")
    return int(line.removesuffix("L"))


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    pickle.PROTO: _Machine.protocol,
    pickle.FRAME: _Machine.frame,
    # Values
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.INT: _Machine.decimal,
    pickle.LONG: lambda m: m.push(_integer(m.short_line())),
    pickle.FLOAT: lambda m: m.push(float(m.short_line())),
    pickle.BININT: lambda m: m.push(m.unpack("<i")),
    pickle.BININT1: lambda m: m.push(m.unpack("<B")),
    pickle.BININT2: lambda m: m.push(m.unpack("<H")),
    pickle.BINFLOAT: lambda m: m.push(m.unpack(">d")),
    pickle.LONG1: lambda m: m.long(m.unpack("<B")),
    pickle.LONG4: lambda m: m.long(m.unpack("<i")),
    pickle.STRING: _Machine.quoted,
    pickle.BINSTRING: lambda m: m.string(m.take(m.unpack("<i"))),
    pickle.SHORT_BINSTRING: lambda m: m.string(m.take(m.unpack("<B"))),
    pickle.UNICODE: lambda m: m.text(m.line(), "raw-unicode-escape"),
    pickle.BINUNICODE: lambda m: m.text(m.take(m.unpack("<I")), "utf-8"),
    pickle.SHORT_BINUNICODE: lambda m: m.text(m.take(m.unpack("<B")), "utf-8"),
    pickle.BINUNICODE8: lambda m: m.text(m.take(m.unpack("<Q")), "utf-8"),
    pickle.BINBYTES: lambda m: m.data_of(m.take(m.unpack("<I"))),
    pickle.SHORT_BINBYTES: lambda m: m.data_of(m.take(m.unpack("<B"))),
    pickle.BINBYTES8: lambda m: m.data_of(m.take(m.unpack("<Q"))),
    pickle.BYTEARRAY8: lambda m: m.data_of(m.take(m.unpack("<Q"))),
    # The stack and the memo
    pickle.MARK: _Machine.mark,
    pickle.POP: _Machine.pop,
    pickle.POP_MARK: lambda m: m.pop_mark().clear(),
    pickle.DUP: lambda m: m.push(m.stack[-1]),
    pickle.GET: lambda m: m.get(_integer(m.short_line())),
    pickle.BINGET: lambda m: m.get(m.unpack("<B")),
    pickle.LONG_BINGET: lambda m: m.get(m.unpack("<I")),
    pickle.PUT: lambda m: m.put(_integer(m.short_line())),
    pickle.BINPUT: lambda m: m.put(m.unpack("<B")),
    pickle.LONG_BINPUT: lambda m: m.put(m.unpack("<I")),
    pickle.MEMOIZE: lambda m: m.put(len(m.memo)),
    # Containers
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.EMPTY_DICT: lambda m: m.push(Pairs()),
    pickle.EMPTY_SET: lambda m: m.push(Members()),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_mark())),
    pickle.TUPLE1: lambda m: m.push(tuple(m.last(1))),
    pickle.TUPLE2: lambda m: m.push(tuple(m.last(2))),
    pickle.TUPLE3: lambda m: m.push(tuple(m.last(3))),
    pickle.LIST: lambda m: m.push(m.pop_mark()),
    pickle.DICT: lambda m: m.push(m.pairs(m.pop_mark())),
    pickle.FROZENSET: lambda m: m.push(Members(m.pop_mark())),
    pickle.APPEND: lambda m: m.fill("members", list, m.last(1)),
    pickle.APPENDS: lambda m: m.fill("members", list, m.pop_mark()),
    pickle.ADDITEMS: lambda m: m.fill("members", Members, m.pop_mark()),
    pickle.SETITEM: lambda m: m.fill("items", Pairs, m.last(2)),
    pickle.SETITEMS: lambda m: m.fill("items", Pairs, m.pop_mark()),
    # Names and calls
    pickle.GLOBAL: _Machine.global_,
    pickle.STACK_GLOBAL: _Machine.stack_global,
    pickle.EXT1: lambda m: m.extension("<B"),
    pickle.EXT2: lambda m: m.extension("<H"),
    pickle.EXT4: lambda m: m.extension("<i"),
    pickle.REDUCE: _Machine.reduce,
    pickle.NEWOBJ: _Machine.reduce,
    pickle.NEWOBJ_EX: lambda m: m.call(*m.last(3)),
    pickle.INST: _Machine.instance,
    pickle.OBJ: _Machine.object_,
    pickle.BUILD: lambda m: m.fill("state", Call, m.last(1)),
    pickle.PERSID: lambda m: m.refer(m.short_line()),
    pickle.BINPERSID: lambda m: m.refer(m.stack.pop()),
}
_TABLE = {code[0]: (do, _COSTS.get(code, _USUAL)) for code, do in _INSTRUCTIONS.items()}
_STOP = pickle.STOP[0]
