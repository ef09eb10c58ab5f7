"""What may be named in trees, and what may not be registered."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from aiorpc.errors import RpcUsageError, SerializationError
from aiorpc.protocol.registered import Registered


class Plain:
    """A class of a program."""


def shout(text: str) -> str:
    return text.upper()


@pytest.fixture
def registry() -> Registered:
    """A registry of the test's own."""
    return Registered()


@pytest.fixture
def other() -> Iterator[Any]:
    """A module that defines a class, twice if need be."""
    made: Any = types.ModuleType("aiorpc_test_registered")
    sys.modules[made.__name__] = made
    try:
        yield made
    finally:
        del sys.modules[made.__name__]


def define(module: Any) -> type:
    return type("Thing", (), {"__module__": module.__name__, "__qualname__": "Thing"})


def test_what_is_registered_is_found_under_its_one_name(registry: Registered) -> None:
    """Exactly that object, by exactly that name."""
    registry.add(Plain)
    registry.add(shout)
    name = f"{__name__}:Plain"
    assert (registry.name(Plain), registry.find(name), registry.find_class(name)) == (name, Plain, Plain)
    assert registry.find(f"{__name__}:shout") is shout


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        f"{__name__}:Plain.__init__",
        f"{__name__}:Plain.__class__",
        f"{__name__}:Plain.__init__.__globals__",
        f"{__name__}.Plain",
        f"{__name__}:",
        ":Plain",
        "",
        None,
        7,
        b"os:system",
        ("os", "system"),
    ],
)
def test_no_other_name_is_found(registry: Registered, name: object) -> None:
    """No attribute is walked from what is registered, and nothing is imported."""
    registry.add(Plain)
    before = set(sys.modules)
    with pytest.raises(SerializationError, match="not registered"):
        registry.find(name)
    with pytest.raises(SerializationError, match="not registered"):
        registry.find("antigravity:fly")
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "thing",
    [
        type,
        types.FunctionType,
        types.CodeType,
        types.MethodType,
        types.ModuleType,
        functools.partial,
        functools.partialmethod,
        operator.attrgetter,
        operator.methodcaller,
        type("Meta", (type,), {}),
        lambda: 1,
        functools.partial(shout, "a"),
        Plain(),
        "os.system",
        None,
        sys,
    ],
)
def test_what_could_name_anything_is_refused(registry: Registered, thing: Any) -> None:
    """Also instances, and what no other worker could find."""
    with pytest.raises(RpcUsageError):
        registry.add(thing)


def test_two_classes_of_one_name_are_refused(registry: Registered, other: Any) -> None:
    """The error names both."""
    other.Thing = first = define(other)
    registry.add(first)
    with pytest.raises(RpcUsageError, match="registered twice"):
        registry.add(define(other))
    assert registry.find(f"{other.__name__}:Thing") is first


def test_a_module_that_is_loaded_again_registers_its_new_class(registry: Registered, other: Any) -> None:
    """The old one has gone from the module; objects of it do not travel any more."""
    other.Thing = old = define(other)
    registry.add(old)
    other.Thing = new = define(other)
    registry.add(new)
    assert registry.find(f"{other.__name__}:Thing") is new
