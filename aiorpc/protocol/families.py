"""Families of messages: what the two ends of, for example, a channel send to each other inside an envelope message.

A family declares its messages as NamedTuples and gives each of them a word. On the wire a message is the list of its
word and its fields, in their order. `write` makes such a list, and `read` makes the message from it: msgspec compares
the number of the fields, their types, ranges and lengths with the annotations, at all depths, and `read` raises
ProtocolError for a mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import ProtocolError
from .packing import MALFORMED, compiled, kind_shown, malformed

M = TypeVar("M", bound=tuple[object, ...])
T = TypeVar("T")
_BUILTIN = (bytes,)  # msgpack has a type for these; without this msgspec would read them from text


class Family(Generic[M]):
    """See the module. name: what the messages are about, for errors and documents."""

    def __init__(self, name: str, classes: Mapping[str, type[M]]) -> None:
        self.name = name
        self.classes: dict[str, type[M]] = {word: compiled(declared) for word, declared in classes.items()}
        self._words = {declared: word for word, declared in classes.items()}

    def word(self, message: M) -> str:
        """The message's word on the wire."""
        return self._words[type(message)]

    def write(self, message: M) -> list[object]:
        """The list of word and fields."""
        return [self._words[type(message)], *message]

    def read(self, fields: Any) -> M:
        """The message of such a list. Raises ProtocolError."""
        word = fields[0] if type(fields) is list and fields else None
        declared = self.classes.get(word) if type(word) is str else None
        if declared is None:
            raise ProtocolError(f"a message about {self.name} is malformed: {kind_shown(word)} is none of its words")
        try:
            return msgspec.convert(fields[1:], declared, builtin_types=_BUILTIN)
        except MALFORMED as error:
            raise malformed(f"a message about {self.name}", error) from None


def reader_of(declared: type[T]) -> Callable[[object], T]:
    """A function that makes a NamedTuple of a list of its fields; raises TypeError for any other value."""

    compiled(declared)

    def read(fields: object) -> T:
        try:
            return msgspec.convert(fields, declared, builtin_types=_BUILTIN)
        except MALFORMED as error:
            raise TypeError(str(malformed(f"a {declared.__name__}", error))) from None

    return read
