"""Whether a pickle is made of plain values alone, and its cost is bounded by its length.

Python's unpickler runs any code that a pickle names, and a few bytes suffice for a key whose hash takes years, for room
for a billion objects, or for nesting that overflows the stack. A pickle is therefore read here first, and only the
opcodes that a pickler writes for plain values are allowed. A value counts each time that it is referred to, as code
that walks through the values visits it each time.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

from .tables import Tables

# Depth of nesting: recursive functions (a hash, a comparison) need a bit of stack for each level.
_DEEPEST = 512
# Values that may be referred to: for each byte, and in any case. A piece of text of 16 bytes counts as one value.
_MOST, _ANYWAY, _TEXT_PIECE = 16, 1 << 16, 16
_SCALARS = frozenset((type(None), bool, int, float, str, bytes, bytearray))


def names_nothing(data: bytes | None) -> bool:
    """Whether a pickle can run no code, as it names nothing, and is read in a time that depends on its length.

    True for None, and for what `pickle` writes with protocol 4 or 5 for None, bool, int, float, str, bytes and
    bytearray, and for lists, tuples, dicts, sets and frozensets of these, up to a depth of 512. A container may be
    referred to several times, but not contain itself.
    """
    if data is None:
        return True
    try:
        _PlainPickle(data).read()
    except Exception:
        return False
    return True


class _PlainPickle:
    """Reads one pickle. `_begun`: for each item of the stack, how many values had been counted before it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._frame = -1  # the end of the current frame
        self._count = 0
        self._most = _MOST * len(data) + _ANYWAY
        self._stack: list[object] = []
        self._begun: list[int] = []
        self._marks: list[int] = []
        self._memo: list[tuple[object, int]] = []  # each with its place on the stack
        # Of containers, by id: how many values are in them, once that is final, and how deeply they are nested.
        self._weights: dict[int, int] = {}
        self._depths: dict[int, int] = {}
        self._tables = Tables(len(data))

    def read(self) -> object:
        """The value. Raises an exception for anything that is no pickle of plain values."""
        data, codes = self._data, _CODES
        while True:
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                break
            codes[code](self)
        (value,) = self._stack
        if self._marks or self._at != len(data):
            raise ValueError("a pickle that does not end")
        return value

    # --- what is read -------------------------------------------------------------------------------------------------

    def _push(self, value: object, weight: int = 1) -> None:
        self._begun.append(self._count)
        self._stack.append(value)
        self._count += weight
        if self._count > self._most:
            raise ValueError("a pickle that refers to much more than it has")

    def _take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        if len(data) != size or self._at <= self._frame < self._at + size:  # no opcode goes beyond its frame
            raise EOFError
        self._at += size
        return data

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def proto(self) -> None:
        if self._take(1)[0] > pickle.HIGHEST_PROTOCOL:
            raise ValueError("a pickle of a later version")

    def frame(self) -> None:
        size = self._number(_U8)
        if self._at <= self._frame or size > len(self._data) - self._at:
            raise EOFError
        self._frame = self._at + size

    # --- containers ---------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def container(self, made: object) -> None:
        """Push an empty container."""
        self._weights.pop(id(made), None)  # of a former object with the same id
        self._depths[id(made)] = 1
        self._push(made)

    def joined(self, make: Callable[[list[object]], object], count: int | None = None) -> None:
        """Replace items by a container that is made of them: the items after the mark, or so many."""
        first = self._marks.pop() if count is None else len(self._stack) - count
        if first < (self._marks[-1] if self._marks else 0):
            raise ValueError("items that are not there")
        depth = self._settle(first) + 1
        begun = self._begun[first] if first < len(self._begun) else self._count
        made = make(self._stack[first:])
        del self._stack[first:], self._begun[first:]
        self._weights.pop(id(made), None)
        self._depths[id(made)] = depth
        self._push(made)
        self._begun[-1] = begun

    def filled(self, kind: type[Any], count: int | None = None) -> None:
        """Add items to the container under them."""
        first = self._marks.pop() if count is None else len(self._stack) - count
        if first - 1 < (self._marks[-1] if self._marks else 0):
            raise ValueError("a container that is not there")
        target: Any = self._stack[first - 1]
        items = self._stack[first:]
        if target.__class__ is not kind or id(target) in self._weights:
            raise ValueError("items for what takes none")
        self._depths[id(target)] = max(self._depths[id(target)], self._settle(first) + 1)
        del self._stack[first:], self._begun[first:]
        if kind is list:
            target += items
        elif kind is set:
            self._tables.add(target, items)
        else:
            self._tables.update(target, [*zip(items[::2], items[1::2], strict=True)])

    def frozen(self, items: list[object]) -> frozenset[object]:
        return frozenset(self._tables.members(items))

    def _settle(self, first: int) -> int:
        """Finish the values from that position of the stack on. Returns how deeply they are nested."""
        depth = 0
        if not _SCALARS.issuperset(map(type, self._stack[first:])):
            for place in range(first, len(self._stack)):
                if type(self._stack[place]) not in _SCALARS:
                    depth = max(depth, self._depths[self._final(place)])
        if depth >= _DEEPEST:
            raise ValueError("a pickle that is nested too deeply")
        return depth

    def _final(self, place: int) -> int:
        key = id(self._stack[place])
        end = self._begun[place + 1] if place + 1 < len(self._begun) else self._count
        self._weights.setdefault(key, end - self._begun[place])
        return key

    # --- what is referred to ------------------------------------------------------------------------------------------

    def memoize(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            raise ValueError("a mark that is referred to")
        self._memo.append((self._stack[-1], len(self._stack) - 1))

    def get(self, number: int) -> None:
        value, place = self._memo[number]
        if type(value) in _SCALARS:
            self._push(value, _weight_of(value))
            return
        if place < len(self._stack) and self._stack[place] is value:
            self._final(place)  # if items are added later, it contains itself, and `filled` refuses it
        self._push(value, self._weights[id(value)])

    # --- scalars ------------------------------------------------------------------------------------------------------

    def text(self, size: int) -> None:
        self._push(self._take(size).decode("utf-8", "surrogatepass"), 1 + size // _TEXT_PIECE)

    def data(self, size: int) -> None:
        self._push(self._take(size), 1 + size // _TEXT_PIECE)

    def whole(self, size: int) -> None:
        if size < 0:
            raise ValueError("a number without bytes")
        self._push(int.from_bytes(self._take(size), "little", signed=True), 1 + size // _TEXT_PIECE)


def _weight_of(value: Any) -> int:
    if type(value) is int:
        return 1 + value.bit_length() // (8 * _TEXT_PIECE)
    return 1 + len(value) // _TEXT_PIECE if type(value) in (str, bytes, bytearray) else 1


_U1, _U2, _I4, _U4, _U8, _F8 = map(struct.Struct, ("<B", "<H", "<i", "<I", "<Q", ">d"))
_STOP = ord(".")


def _pushes(value: object) -> Callable[[_PlainPickle], None]:
    return lambda reader: reader._push(value)


def _pushes_number(form: struct.Struct) -> Callable[[_PlainPickle], None]:
    return lambda reader: reader._push(reader._number(form))


def _sized(form: struct.Struct, read: Callable[[_PlainPickle, int], None]) -> Callable[[_PlainPickle], None]:
    return lambda reader: read(reader, reader._number(form))


# By opcode, as `pickletools` describes them.
_CODES: dict[int, Callable[[_PlainPickle], None]] = {
    0x80: _PlainPickle.proto,
    0x95: _PlainPickle.frame,
    ord("N"): _pushes(None),
    0x88: _pushes(True),
    0x89: _pushes(False),
    ord("K"): _pushes_number(_U1),
    ord("M"): _pushes_number(_U2),
    ord("J"): _pushes_number(_I4),
    ord("G"): _pushes_number(_F8),
    0x8A: _sized(_U1, _PlainPickle.whole),
    0x8B: _sized(_I4, _PlainPickle.whole),
    0x8C: _sized(_U1, _PlainPickle.text),
    ord("X"): _sized(_U4, _PlainPickle.text),
    0x8D: _sized(_U8, _PlainPickle.text),
    ord("C"): _sized(_U1, _PlainPickle.data),
    ord("B"): _sized(_U4, _PlainPickle.data),
    0x8E: _sized(_U8, _PlainPickle.data),
    0x96: _sized(_U8, lambda reader, size: reader._push(bytearray(reader._take(size)), 1 + size // _TEXT_PIECE)),
    ord("]"): lambda reader: reader.container([]),
    ord("}"): lambda reader: reader.container({}),
    0x8F: lambda reader: reader.container(set()),
    ord(")"): lambda reader: reader.joined(tuple, 0),
    0x85: lambda reader: reader.joined(tuple, 1),
    0x86: lambda reader: reader.joined(tuple, 2),
    0x87: lambda reader: reader.joined(tuple, 3),
    ord("t"): lambda reader: reader.joined(tuple),
    0x91: lambda reader: reader.joined(reader.frozen),
    ord("("): _PlainPickle.mark,
    ord("a"): lambda reader: reader.filled(list, 1),
    ord("e"): lambda reader: reader.filled(list),
    ord("s"): lambda reader: reader.filled(dict, 2),
    ord("u"): lambda reader: reader.filled(dict),
    0x90: lambda reader: reader.filled(set),
    0x94: _PlainPickle.memoize,
    ord("h"): _sized(_U1, _PlainPickle.get),
    ord("j"): _sized(_U4, _PlainPickle.get),
}
