"""Items on their way: packed and unpacked, and what is no item."""

from __future__ import annotations

import struct

import numpy
import pytest
import torch

from aiorpc.errors import ProtocolError
from aiorpc.protocol.messages import Reply, Values, write
from aiorpc.queues.packing import join, layout_of, split, unpack

BODY = write(Reply(Values([1])))
BUFFERS = [b"a" * 100, b"", b"bcd"]


def joined(body: bytes, buffers: list[bytes]) -> bytes:
    layout = layout_of(len(body), [len(each) for each in buffers])
    item = bytearray(layout.size)
    join(body, buffers, layout, numpy.frombuffer(item, numpy.uint8))
    return bytes(item)


@pytest.mark.parametrize("buffers", [[], BUFFERS])
def test_an_item_is_what_was_joined(buffers: list[bytes]) -> None:
    """Its body and its buffers, which are aligned; in memory of either kind."""
    item = joined(BODY, buffers)
    body, found = split(memoryview(item))
    assert (body, [bytes(each) for each in found]) == (BODY, buffers)
    for each in buffers:
        assert not each or item.index(each) % 64 == 0
    assert unpack(item, safe=True) == 1
    assert unpack(torch.frombuffer(bytearray(item), dtype=torch.uint8), safe=False) == 1


@pytest.mark.parametrize(
    "item",
    [
        b"",
        b"short",
        joined(BODY, BUFFERS)[:-1],
        joined(BODY, BUFFERS) + b"x",
        struct.pack("<QQ", 1 << 63, 0),
        struct.pack("<QQ", 0, 1 << 63),
        struct.pack("<QQQQ", 0, 2, 1 << 63, 1 << 63),
        joined(b"no body", []),
        joined(write(Reply(Values([1, 2]))), []),
        joined(write(Reply(Values([]))), []),
    ],
    ids=str,
)
def test_what_is_no_item_is_refused(item: bytes) -> None:
    """Before memory is taken for it."""
    with pytest.raises(ProtocolError):
        unpack(item, safe=False)


def test_a_tensor_that_is_no_bytes_is_refused() -> None:
    """A producer may give what it likes."""
    for found in (torch.ones(3), [1, 2], "text"):
        with pytest.raises(ProtocolError):
            unpack(found, safe=False)  # type: ignore[arg-type]  # on purpose
