"""Message bodies as msgpack: plain values and lists of them to bytes, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import msgpack

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
#: What may be plain, by its type alone.
FLAT = PLAIN | CONTAINERS
#: Containers with more items than this are left to the general pickler.
SIMPLE_SIZE = 64
#: Bytes. A packer keeps room for twice the longest body that it has made, so one that has made a longer one is let go.
MOST_KEPT = 256 * 1024
# Making a packer costs as much as packing a call, so packers are kept here. `pop` and `append` of a deque are atomic: a
# packer is taken out, used by one thread, and put back. If packing raises, the packer is not put back, as it may hold
# half a message.
packers: deque[msgpack.Packer] = deque(maxlen=32)
new_packer: partial[msgpack.Packer] = partial(msgpack.Packer, autoreset=True)


def pack(fields: Sequence[object]) -> bytes:
    """A message body from fields that are plain values, or lists or tuples of them."""
    try:
        packer = packers.pop()
    except IndexError:
        packer = new_packer()
    body: bytes = packer.pack(fields)
    if len(body) <= MOST_KEPT:
        packers.append(packer)
    return body


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
    """The fields of a message body. Raises ProtocolError if it is none."""
    try:
        if len(body) > LONG:
            look_through(body)
        fields = msgpack.unpackb(body, ext_hook=no_extension)  # keys of maps: text or bytes
    except Exception as error:
        raise ProtocolError(f"a message body that is no msgpack: {type(error).__name__}: {error}") from None
    if type(fields) is not list:
        raise ProtocolError("a message body that is no list")
    return fields
