"""Functions and classes that go to another worker by value, with their annotations.

Python 3.14 evaluates annotations only on request, and they may name what does not exist when the program runs.
cloudpickle requests those of functions, and leaves out those of classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T")

#: How objects that represent annotations are pickled, by their exact types, as in `reductions.OTHERS`.
REFERENCES: dict[type, Callable[[Any, object], tuple[object, tuple[object, ...]]]] = {}

if sys.version_info >= (3, 14):
    from annotationlib import Format, ForwardRef, get_annotations

    def readable(function: FunctionType) -> FunctionType:
        """The function; or a copy with annotations as texts, if they cannot be evaluated."""
        if _looked_up(function) is not None:
            return function
        like = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        like.__kwdefaults__ = function.__kwdefaults__
        like.__qualname__ = function.__qualname__
        like.__module__ = function.__module__
        like.__doc__ = function.__doc__
        like.__dict__.update(function.__dict__)
        like.__annotations__ = get_annotations(function, format=Format.STRING)
        return like

    def with_annotations(kind: type, reduced: T) -> T:
        """cloudpickle's result for a class, with annotations if it goes by value: as texts, if they cannot be
        evaluated."""
        if isinstance(reduced, tuple) and len(reduced) > 2:  # a state: it goes by value
            annotations: Mapping[str, object] | None = _looked_up(kind)
            if annotations is None:
                annotations = get_annotations(kind, format=Format.STRING)
            if annotations:
                reduced[2][0]["__annotations__"] = annotations
        return reduced

    def _looked_up(annotated: object) -> dict[str, object] | None:
        try:
            return get_annotations(annotated)
        except Exception:
            return None

    def _reduce_reference(reference: ForwardRef, route: object) -> tuple[object, tuple[object, ...]]:
        # A dataclass has these in place of types that do not exist. They hold all names of their module.
        return ForwardRef, (reference.evaluate(format=Format.STRING),)

    REFERENCES[ForwardRef] = _reduce_reference

else:

    def readable(function: FunctionType) -> FunctionType:
        """The function: its annotations were evaluated when it was defined."""
        return function

    def with_annotations(kind: type, reduced: T) -> T:
        """cloudpickle's result for a class, which has its annotations."""
        return reduced
