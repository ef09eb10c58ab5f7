"""The functions of one peer's calls, and the numbers by which the peer knows them."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable

from ..._typing import Function
from ..calls.declared import Declaration
from ..calls.functions import answers_plainly, describe, find_name
from ..calls.values import Destination


class FunctionEntry:
    """A function of calls to a peer.

    number: its number on the wire; -1 if it has none, because it travels by value or is a method of a reference.
    confirmed: whether a reply has shown that the callee knows the number. function: the callable of an entry without a
    number, held weakly, for observers of messages; None if it cannot be held so. declaration: of a handler of the
    runtime's own whose answers have no values of users.
    """

    __slots__ = ("_function", "confirmed", "declaration", "name", "number")

    def __init__(self, name: str, number: int = -1, function: Function | None = None) -> None:
        self.number: int = number
        self.name: str = name
        self.confirmed: bool = False
        self.declaration: Declaration | None = None
        self._function: Callable[[], Function | None] | None = None
        if function is not None:
            with contextlib.suppress(TypeError):
                self._function = weakref.ref(function)

    @property
    def of_main(self) -> bool:
        """Whether it is a function of the main module that goes by name."""
        return self.number >= 0 and self.name.startswith("__main__:")

    @property
    def function(self) -> Function | None:
        return None if self._function is None else self._function()


class KnownFunctions(dict[object, FunctionEntry]):
    """The entries of functions that go by name, and live as long as their module.

    A look-up enters the function, with a number if it has a name. Any thread.
    """

    def __init__(self, peer: Destination) -> None:
        self._peer = peer
        self._numbers = itertools.count()

    def __missing__(self, function: Function) -> FunctionEntry:
        name = find_name(function, self._peer.same_main)
        if name is not None:
            entry = FunctionEntry(name, next(self._numbers))
            entry.declaration = answers_plainly(function)
            entry = self.setdefault(function, entry)
            if self._peer.same_main or not entry.of_main:
                return entry
            self.pop(function, None)  # `forget_main` ran meanwhile
        return FunctionEntry(describe(function), function=function)

    def forget_main(self) -> None:
        """The peer runs another main module: functions of ours do not go by name."""
        for function, entry in list(self.items()):
            if entry.of_main:
                self.pop(function, None)
