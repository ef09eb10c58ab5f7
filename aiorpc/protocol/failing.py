"""Finds the part of a value that cannot be serialised. Used only after serialising has failed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType

from ..foreign import said
from .packing import PLAIN

# Parts that are tried at most, and seconds: a long list may have its bad item at the end.
_MOST, _SECONDS = 10_000, 0.5
_SAYS_HOW = ("__reduce__", "__reduce_ex__", "__getstate__")  # a class with one of these does not pickle its attributes
_KEY = 40  # letters of a key that are shown


def find_failing(value: object, write: Callable[[object], object], error: Exception) -> tuple[str, object]:
    """The path to the innermost part of a value that `write` raises for, such as ``['a'][3].lock``, and that part.

    error: what it raises for the value; a part for which it raises another error is not to blame. The path is empty if
    the value itself is to blame, or no part is found.
    """
    path, left, until = "", _MOST, time.monotonic() + _SECONDS
    seen = {id(value)}
    while True:
        for step, part in _parts(value):
            left -= 1
            if left < 0 or time.monotonic() > until:
                return path, value
            if type(part) in PLAIN or id(part) in seen or not _fails(part, write, error):
                continue
            seen.add(id(part))
            path, value = path + step, part
            break
        else:
            return path, value


def _fails(part: object, write: Callable[[object], object], error: Exception) -> bool:
    try:
        write(part)
    except Exception as other:
        return said(other) == said(error)
    return False


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """The parts of a container, an object or a function, each with its step of the path."""
    if isinstance(value, dict):
        for key, part in list(value.items()):
            yield f"[{_shown(key)}]", part
    elif isinstance(value, tuple) and isinstance(getattr(type(value), "_fields", None), tuple):
        for name, part in zip(type(value)._fields, value, strict=False):  # type: ignore[attr-defined]  # asked above
            yield f".{name}", part
    elif isinstance(value, (list, tuple, deque)):
        for number, part in enumerate(list(value)):
            yield f"[{number}]", part
    elif isinstance(value, FunctionType):
        yield from _variables(value)
    elif not any(name in kind.__dict__ for name in _SAYS_HOW for kind in type(value).__mro__[:-1]):
        for name, part in list(getattr(value, "__dict__", {}).items()):
            yield f".{name}", part
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _variables(function: FunctionType) -> Iterator[tuple[str, object]]:
    """The values that a function that goes by value takes along."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".<{name}>", cell.cell_contents
        except ValueError:  # it is empty
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f".<{name}>", function.__globals__[name]
    for number, part in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{number}]", part


def _shown(key: object) -> str:
    shown = repr(key) if type(key) in PLAIN else f"<a {type(key).__qualname__}>"
    return shown if len(shown) <= _KEY else f"{shown[:_KEY]}..."
