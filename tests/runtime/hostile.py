"""Exceptions and values whose own code raises wherever somebody touches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PLACES = (
    "__str__",
    "__repr__",
    "__reduce__",
    "__init__",
    "__setstate__",
    "__eq__",
    "__hash__",
    "__bool__",
    "__setattr__",
    "__getattribute__",
    "with_traceback",
    "add_note",
    "__slots__",
)
RAISED = (ValueError, SystemExit, KeyboardInterrupt, GeneratorExit)


class Hostile(Exception):
    """The base of all of them."""


def kind_of(place: str, raised: type[BaseException], base: type[BaseException] = Hostile) -> Any:
    """A class of exceptions, found by its name in this module, that raises in that method once `armed`."""
    return globals()[f"{base.__name__}_{place.strip('_')}_{raised.__name__}"]


def _make(place: str, raised: type[BaseException], base: type[BaseException]) -> type[BaseException]:
    name = f"{base.__name__}_{place.strip('_')}_{raised.__name__}"

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise raised(f"from {place}")

    def init(self: Any, *args: Any) -> None:  # raises when pickle or copy call it with what `args` has
        if args:
            raise raised("from __init__")

    def read(self: Any, name: str) -> Any:
        raise raised("from __getattribute__")

    def show(self: Any) -> str:  # what is in the slot does not travel
        return f"{self.missing}"

    space: dict[str, Any] = {"__module__": __name__, "__qualname__": name}
    if place == "__slots__":
        space |= {"__slots__": ("missing",), "__str__": show, "__init__": init}
    elif place == "__init__":
        space |= {"__init__": init, "__str__": broken}
    elif place == "__getattribute__":
        space |= {place: read}
    else:
        space |= {place: broken}
        if place == "__eq__":
            space["__hash__"] = base.__hash__
    return type(name, (base,), space)


class HostileExit(SystemExit):
    """An exit with such a class."""


class HostileInterrupt(KeyboardInterrupt):
    """An interrupt with such a class."""


for _place in PLACES:
    for _raised in RAISED:
        for _base in (Hostile, HostileExit, HostileInterrupt):
            _kind = _make(_place, _raised, _base)
            globals()[_kind.__name__] = _kind


def make(place: str, raised: type[BaseException], base: type[BaseException] = Hostile) -> BaseException:
    """One of that class, with arguments wherever that can be."""
    kind = kind_of(place, raised, base)
    error: BaseException = kind.__new__(kind, "told")
    return error


class Bomb:
    """A value whose pickling raises."""

    def __init__(self, raised: Callable[[str], BaseException], place: str = "__reduce_ex__") -> None:
        self.raised = raised
        self.place = place

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.place == "__reduce_ex__":
            raise self.raised("from pickling")
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> Any:
        raise self.raised("from pickling")


class Late:
    """A value whose unpickling raises."""

    def __init__(self, raised: Callable[[str], BaseException]) -> None:
        self.raised = raised

    def __reduce__(self) -> Any:
        return explode, (self.raised,)


def explode(raised: Callable[[str], BaseException]) -> None:
    raise raised("from unpickling")
