"""What is public, and which of it has a docstring. Without Sphinx, so that a test can ask, too."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

MODULES = (
    "aiorpc",
    "aiorpc.types",
    "aiorpc.events",
    "aiorpc.errors",
    "aiorpc.autograd",
    "aiorpc.functions",
    "aiorpc.nn",
    "aiorpc.optim",
    "aiorpc.testing",
    "aiorpc.launch.ray",
    "aiorpc.opentelemetry",
)


def public() -> Iterator[tuple[str, Any]]:
    """The full name of each public object that is no module, and the object; some are there under several names."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                yield f"{module.__name__}.{name}", value


def names_of(value: Any) -> tuple[str, ...]:
    """Under which full name the object is defined, which signatures have."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return (f"{module}.{name}",) if module and name else ()


def members(value: Any) -> Iterator[str]:
    """The public members that a class of ours defines or inherits from one of ours."""
    if inspect.isclass(value):
        for name, member in inspect.getmembers_static(value):
            owner = next((each for each in value.__mro__ if name in vars(each)), object)
            made_here = owner.__module__.partition(".")[0] == "aiorpc"
            refused = "<locals>" in getattr(member, "__qualname__", "")
            if made_here and not (refused or name.startswith("_") or _is_value(member)):
                yield name


def _is_value(member: Any) -> bool:
    """Whether it is a plain value, such as the default of a field, and so described where the class is."""
    return not (callable(member) or isinstance(member, property | classmethod | staticmethod))


def undocumented(name: str, value: Any) -> Iterator[str]:
    """The names without a docstring: of the object, its public members, and its fields, which the class describes."""
    text = getattr(value, "__doc__", None) or ""
    if not text.strip() or (dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}(")):
        yield name
    for member in members(value):
        if not (inspect.getdoc(getattr(value, member, None)) or "").strip():
            yield f"{name}.{member}"
    ours = [each for each in getattr(value, "__mro__", ()) if each.__module__.startswith("aiorpc")]
    texts = "\n".join(each.__doc__ or "" for each in ours)
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        # One that says its kind has its row in a table of the reference, which a test compares.
        described = "kind" in field.metadata or re.search(rf"\b{field.name}(, \w+)*:\s", texts)
        if not field.name.startswith("_") and not described:
            yield f"{name}.{field.name}"
