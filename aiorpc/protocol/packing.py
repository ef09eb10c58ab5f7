"""Message bodies as msgpack: plain values and lists of them to bytes, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import msgpack
import msgspec

from ..errors import ProtocolError
from .frames import Buffer

#: Bytes. What is longer is looked through before it is unpacked.
LONG = 1024
#: Exact types that msgpack brings back as themselves. No bool subclass exists; int subclasses (enums) are not exact.
PLAIN = frozenset((type(None), bool, int, float, str, bytes))
#: Of them those of which many take no more room if one is written as often as it is named.
NUMBERS = frozenset((type(None), bool, int, float))
#: Exact types of which msgpack brings back as themselves what has only `NUMBERS` in it, under keys that are str.
CONTAINERS = frozenset((list, dict))
#: Containers with more items than this are left to the general pickler.
SIMPLE_SIZE = 64
#: What msgspec raises for bytes that are not what is declared: its own errors and UnicodeDecodeError are ValueErrors.
MALFORMED = (ValueError, RecursionError, OverflowError)
# Characters of what an error says of a body.
_SHOWN = 200

#: A message body from plain values, declared messages, and lists or tuples of them. Any thread.
pack: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


def malformed(what: str, error: Exception) -> ProtocolError:
    """The error for bytes that are no such thing. msgspec names types and places, and of what was sent only tags."""
    said = "".join(each if each.isprintable() else "?" for each in str(error)[:_SHOWN])
    return ProtocolError(f"{what} that is none: {said or type(error).__name__}")


def is_text(text: str) -> bool:
    """Whether msgpack can say it: not with halves of surrogates, which are valid in str and JSON, and not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_shown(value: object) -> str:
    """What an error may say of a value of the runtime's own that a peer sent: only what type it is of."""
    return f"a {type(value).__name__}"


def shown(value: object) -> str:
    """What an error may say of a value that a peer sent: a number, or how a text begins; of all else only its type."""
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
    """See that all that is announced is there, before anything is made of it; raises what msgpack raises.

    msgpack lets a list announce as many items as there are bytes, and makes room for them at once; one inside of it may
    do so again. That is nothing in what is short, and would be gigabytes in what has a megabyte.
    """
    look = msgpack.Unpacker(max_buffer_size=len(body), strict_map_key=False)
    look.feed(body)
    look.skip()


def unpack(body: Buffer) -> list[Any]:
    """The fields of a body whose declaration is looked up by its first field. Raises ProtocolError if it is no list.

    msgpack refuses maps by anything but text and bytes here, whose hashes a sender cannot choose; msgspec would not.
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
