"""The classes and functions of a program that messages without pickle may name (`trees`).

An entry is an exact object under its one name, ``module:qualname``. A name in a message is only looked up here: nothing
is imported for it, and no attribute is followed. The registry of ``torch.serialization.add_safe_globals`` does not
count: it lists names for files that the user has chosen to load, often added because an error message demanded it, and
may contain functions that build anything.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from ..errors import RpcUsageError, SerializationError
from .packing import shown

#: The names of the main module; spawned children use the second one.
MAIN_NAMES = ("__main__", "__mp_main__")

T = TypeVar("T", bound=Callable[..., object])

# Their instances are callables, classes or modules made from arguments: a sender could name anything with them.
_MAKE_ANYTHING = (
    type,
    types.FunctionType,
    types.CodeType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    functools.partialmethod,
    operator.attrgetter,
    operator.methodcaller,
)
#: Classes, and functions that are passed as values.
NAMEABLE = (type, types.FunctionType, types.BuiltinFunctionType)


class Registered:
    """A registry. Any thread may read it; entries are never removed."""

    def __init__(self) -> None:
        self._by_name: dict[str, object] = {}
        self._names: dict[object, str] = {}

    def add(self, thing: object) -> None:
        """Add a class or a function. Idempotent.

        RpcUsageError for other objects, for those with which a sender could name anything, for definitions inside a
        function, and if another object has that name, unless the module of that one has gone.
        """
        if not isinstance(thing, NAMEABLE):
            raise RpcUsageError(
                f"register_safe takes classes, and functions that are passed as values, not {type(thing).__qualname__}"
            )
        if isinstance(thing, type) and issubclass(thing, _MAKE_ANYTHING):
            raise RpcUsageError(
                f"{thing.__qualname__} cannot be registered: the sender of one could name anything with it"
            )
        name = name_of(thing)
        if name is None or "<" in name:
            raise RpcUsageError(
                f"{thing!r:.200} cannot be registered: it was defined inside of a function, or has no name, so that no "
                "other worker finds it; define it at the top of a module"
            )
        there = self._by_name.setdefault(name, thing)
        if there is not thing and _stands(name, there):
            raise RpcUsageError(
                f"{name} is registered twice, as {there!r:.200} and now as another object, {thing!r:.200}; give one of "
                "them another name, and register each class once"
            )
        self._by_name[name] = thing
        self._names[thing] = name

    def name(self, thing: object) -> str | None:
        """The name under which an object is entered; None if it is not."""
        try:
            return self._names.get(thing)
        except TypeError:  # not hashable, so it was never entered
            return None

    def find(self, name: object) -> object:
        """The entry under that name. SerializationError if there is none."""
        found = self._by_name.get(name) if type(name) is str else None
        if found is None:
            raise SerializationError(
                f"names {shown(name)}, which is not registered here. This worker reads safe serialization alone; if "
                "the other one may send that, call aiorpc.register_safe with it on both"
            )
        return found

    def find_class(self, name: object) -> type:
        """`find` for a class. SerializationError if the entry is a function."""
        found = self.find(name)
        if not isinstance(found, type):
            raise SerializationError(f"has an object of {shown(name)}, which is registered as a function")
        return found


def name_of(thing: object) -> str | None:
    """The name of a class or a function in messages; None if it has none."""
    module, qualname = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return None
    return f"{MAIN_NAMES[0] if module in MAIN_NAMES else module}:{qualname}"


def _stands(name: str, thing: object) -> bool:
    """Whether the defining module still has the object under its name."""
    module, _, qualname = name.partition(":")
    found: object = sys.modules.get(module) if module != MAIN_NAMES[0] else sys.modules.get(thing.__module__)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is thing


#: The registrations of this process; all workers in it share them, as they share Python's pickle registry.
registered: Registered = Registered()
registered.add(Counter)


def register_safe(thing: T, *others: Callable[..., object]) -> T:
    """Allow that messages name these classes and functions, in a group with ``serialization="safe"``.

    Returns the first, so it may be used as a decorator of a class. Any thread. All workers that receive such objects
    register them under the same name, before they arrive.

    Any member may then send objects of the class with any attributes: they are made by ``__new__`` without ``__init__``
    and filled by ``__setstate__``, or by calling the class if its own ``__reduce__`` asks for that. Therefore register
    only classes that hold data. The class itself may be passed as a value, too. A registered function may be passed as
    a value, and a message never makes it run.

    Raised here: RpcUsageError for objects that are neither class nor function, for a name that is taken, and for
    classes with which anything could be named.
    """
    for each in (thing, *others):
        registered.add(each)
    return thing
