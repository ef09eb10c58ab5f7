"""Families of messages: what the two ends of one thing, a channel say, tell each other inside of an envelope.

A family declares its messages as NamedTuples and gives each of them a word. On the wire a message is the list of its
word and its fields, in their order. `write` makes such a list, and `read` makes the message of one again: it compares
the number of the fields, and the type of each with its annotation, all the way down, and raises ProtocolError for what
does not fit. An annotation is one of the types that msgpack brings back as themselves, object, None, a NamedTuple, a
list of these, `dict[str, object]`, or a union.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ProtocolError
from .packing import kind_shown

M = TypeVar("M", bound=tuple[object, ...])
T = TypeVar("T")
# Gives a value as its annotation has it, or raises TypeError.
_Reader = Callable[[object], object]
# Annotations that are compared with the type of a value itself.
_EXACT = frozenset((bool, int, float, str, bytes, type(None)))
_LISTS = frozenset([list])
_new: Any = tuple.__new__  # what a class of a message does, without its call into Python


class Family(Generic[M]):
    """See the module. name: what the messages are about, for errors and documents."""

    def __init__(self, name: str, classes: Mapping[str, type[M]]) -> None:
        self.name = name
        self.classes: dict[str, type[M]] = dict(classes)
        self._words = {declared: word for word, declared in classes.items()}
        self._readers = {word: reader_of(declared) for word, declared in classes.items()}

    def word(self, message: M) -> str:
        """What that message is called on the wire."""
        return self._words[type(message)]

    def write(self, message: M) -> list[object]:
        """The fields of an envelope."""
        return [self._words[type(message)], *message]

    def read(self, fields: Any) -> M:
        """The message that these fields are. Raises ProtocolError."""
        try:
            word, *rest = fields
            reader = self._readers.get(word) if type(word) is str else None
            if reader is None:
                raise TypeError(f"{kind_shown(word)} is none of its words")
            message: M = reader(rest)
        except (TypeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message about {self.name} that is none: {error!s:.200}") from None
        return message


def reader_of(declared: type[T]) -> Callable[[object], T]:
    """What makes a NamedTuple of a list of its fields; raises TypeError for any other value."""
    kinds = [*get_type_hints(declared).values()]
    if _EXACT.issuperset(kinds):  # as below, without a function for each field

        def read_exact(value: object) -> T:
            if type(value) is not list or [*map(type, value)] != kinds:
                raise TypeError(f"{kind_shown(value)} for {declared.__name__}")
            exact: T = _new(declared, value)
            return exact

        return read_exact
    plain = [(place, kind) for place, kind in enumerate(kinds) if kind in _EXACT]  # compared here, as above
    others = [(place, _of(kind)) for place, kind in enumerate(kinds) if kind not in _EXACT]

    def read(value: object) -> T:
        if type(value) is not list or len(value) != len(kinds):
            raise TypeError(f"{kind_shown(value)} for {declared.__name__}")
        for place, kind in plain:
            if type(value[place]) is not kind:
                raise TypeError(f"{kind_shown(value[place])} for {kind.__name__}")
        fields = [*value]
        for place, reader in others:
            fields[place] = reader(value[place])
        made: T = _new(declared, fields)
        return made

    return read


def _of(annotation: Any) -> _Reader:
    origin = get_origin(annotation)
    if annotation is object:
        return lambda value: value
    if origin in (Union, types.UnionType):
        options = get_args(annotation)
        return _of_exactly(*options) if _EXACT.issuperset(options) else _of_any_of([_of(each) for each in options])
    if origin is list:
        return _of_list(*get_args(annotation))
    if hasattr(annotation, "_fields"):
        return reader_of(annotation)
    return _of_exactly(origin or annotation)


def _of_exactly(*kinds: type) -> _Reader:
    def read(value: object) -> object:
        if type(value) not in kinds:
            raise TypeError(f"{kind_shown(value)} for {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    return read


def _of_list(annotation: object) -> _Reader:
    if annotation is object:
        return _of_exactly(list)
    rows = get_origin(annotation) is list
    kinds = frozenset(get_args(annotation) if rows else [annotation])
    if kinds <= _EXACT:

        def read_exact(value: object) -> object:
            if type(value) is not list or (rows and not _LISTS.issuperset(map(type, value))):
                raise TypeError(f"{kind_shown(value)} for a list{' of lists' if rows else ''}")
            if not kinds.issuperset(map(type, chain.from_iterable(value) if rows else value)):
                raise TypeError(f"{kind_shown(value)} for a list of {' or '.join(kind.__name__ for kind in kinds)}")
            return value

        return read_exact
    reader = _of(annotation)

    def read(value: object) -> object:
        if type(value) is not list:
            raise TypeError(f"{kind_shown(value)} for a list")
        return [reader(part) for part in value]

    return read


def _of_any_of(readers: list[_Reader]) -> _Reader:
    def read(value: object) -> object:
        for reader in readers[:-1]:
            try:
                return reader(value)
            except TypeError:
                continue
        return readers[-1](value)

    return read
