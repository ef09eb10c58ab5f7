"""Errors for a Future of a call that is used like its result, because the await was forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

#: The end of these errors.
ADVICE = "and not its result; await it first, or wait() where no loop runs"

_BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "matmul": "@",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "divmod": "divmod()",
    "pow": "**",
    "lshift": "<<",
    "rshift": ">>",
    "and": "&",
    "xor": "^",
    "or": "|",
}
_OTHERS = {
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "neg": "-",
    "pos": "+",
    "abs": "abs()",
    "invert": "~",
    "int": "int()",
    "float": "float()",
    "complex": "complex()",
    "index": "an index",
    "round": "round()",
    "len": "len()",
    "getitem": "[]",
    "setitem": "[] =",
    "delitem": "del []",
    "contains": "in",
}


class Unawaited:
    """A base of Futures of calls: operators raise an error that says to await it.

    A test of truth raises, too, because it would always be true. With the drop-in it is true: programs for torch test
    whether they have a Future.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # for a checker there is nothing

        def _forgotten(self, what: str) -> TypeError:
            return TypeError(f"{what} of 'Future': this is {self._describe()}, {ADVICE}")

        def _is_true(self) -> bool:
            return False

        def __bool__(self) -> bool:
            if self._is_true():
                return True
            raise self._forgotten("test of truth, as in `if`,")

        def __aiter__(self) -> NoReturn:
            raise TypeError(
                f"`async for` over a 'Future': this is {self._describe()}, which gives one result: await it; the items "
                "of a generator function come by `async for item in rpc.stream(...)`"
            )


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: object) -> NoReturn:
        raise self._forgotten(f"unsupported operand type(s) for {what}, one")

    return refuse


for _name, _sign in _BINARY.items():
    setattr(Unawaited, f"__{_name}__", _refusing(_sign))
    setattr(Unawaited, f"__r{_name}__", _refusing(_sign))
for _name, _sign in _OTHERS.items():
    setattr(Unawaited, f"__{_name}__", _refusing(_sign))
