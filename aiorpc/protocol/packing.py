"""Message bodies as msgpack: plain values and lists of them to bytes, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgpack
import msgspec

from ..errors import ProtocolError
from .frames import Buffer

T = TypeVar("T")
#: Bytes. A longer body is checked before it is unpacked.
LONG = 1024
#: Exact types that msgpack brings back unchanged. No bool subclass exists; int subclasses (enums) are not exact.
PLAIN = frozenset((type(None), bool, int, float, str, bytes))
#: Those of them whose copies take no more room than references.
NUMBERS = frozenset((type(None), bool, int, float))
#: Exact types that msgpack brings back unchanged if they contain only `NUMBERS`, by keys that are str.
CONTAINERS = frozenset((list, dict))
#: Containers with more items than this are left to the general pickler.
SIMPLE_SIZE = 64
#: msgspec's errors for bytes that do not fit the declaration; its own errors and UnicodeDecodeError are ValueErrors.
MALFORMED = (ValueError, RecursionError, OverflowError)
# Characters of msgspec's error in ours.
_SHOWN = 200

#: A message body from plain values, declared messages, and lists or tuples of them. Any thread.
pack: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


def compiled(declared: type[T]) -> type[T]:
    """That type, once msgspec has compiled it. msgspec does so at the first use, and two threads whose first use is at
    the same time crash the process: two workers that join at once, each on a thread of its own."""
    msgspec.msgpack.Decoder(declared)
    return declared


def malformed(what: str, error: Exception) -> ProtocolError:
    """The error for invalid bytes. msgspec's text names types and places, and of the contents only tags."""
    text = "".join(each if each.isprintable() else "?" for each in str(error)[:_SHOWN])
    return ProtocolError(f"{what} is malformed: {text or type(error).__name__}")


def is_text(text: str) -> bool:
    """Whether msgpack can encode the text: not with lone surrogates, which are valid in str and JSON, but not in
    UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_shown(value: object) -> str:
    """A peer's value of the runtime's own, for errors: only its type."""
    return f"a {type(value).__name__}"


def shown(value: object) -> str:
    """A peer's value, for errors: a number, or the beginning of a text; for others only the type."""
    kind = type(value)
    if kind is str:
        return repr(str(value)[:60])
    if kind in NUMBERS and (type(value) is not int or -(1 << 64) < value < 1 << 64):
        return repr(value)
    return kind_shown(value)


def no_extension(code: int, data: bytes) -> NoReturn:
    """For `ext_hook`: bodies have none. Raises ValueError."""
    raise ValueError(f"an extension of type {code}")


def look_through(body: Buffer) -> None:
    """Check that all that is announced is there, before anything is made of it; raises msgpack's errors.

    msgpack lets a list announce as many items as there are bytes, and makes room for them at once; so does each list
    inside it. In a short body that is little, in a megabyte it would be gigabytes.
    """
    look = msgpack.Unpacker(max_buffer_size=len(body), strict_map_key=False)
    look.feed(body)
    look.skip()


def unpack(body: Buffer) -> list[Any]:
    """The fields of a body whose declaration depends on its first field. Raises ProtocolError if it is no list.

    msgpack allows maps only by text and bytes, whose hashes a sender cannot choose; msgspec would allow others.
    """
    try:
        if len(body) > LONG:
            look_through(body)
        fields = msgpack.unpackb(body, ext_hook=no_extension)
    except Exception as error:
        raise malformed("a message body", error) from None
    if type(fields) is not list:
        raise ProtocolError("a message body that is no list")
    return fields
