"""Message bodies as msgpack: plain values and lists of them to bytes, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack

from ..errors import ProtocolError
from .frames import Buffer

# Making a packer costs as much as packing a call, so packers are kept here. `pop` and `append` of a deque are atomic: a
# packer is taken out, used by one thread, and put back. If packing raises, the packer is not put back, as it may hold
# half a message.
_packers: deque[msgpack.Packer] = deque(maxlen=32)


def pack(fields: Sequence[object]) -> bytes:
    """A message body from fields that are plain values, or lists or tuples of them."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(autoreset=True)
    body: bytes = packer.pack(fields)
    _packers.append(packer)
    return body


def unpack(body: Buffer) -> list[Any]:
    """The fields of a message body. Raises ProtocolError if it is none."""
    try:
        fields = msgpack.unpackb(body, strict_map_key=False)
    except Exception as error:
        raise ProtocolError(f"a message body that is no msgpack: {type(error).__name__}: {error}") from None
    if type(fields) is not list:
        raise ProtocolError("a message body that is no list")
    return fields
