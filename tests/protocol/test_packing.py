"""What packing keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiorpc.protocol.frames import Kind
from aiorpc.protocol.messages import Reply, Values, write_plain, write_with
from aiorpc.protocol.packing import MOST_KEPT, pack, packers

WAYS: dict[str, Callable[[bytes], Any]] = {
    "pack": lambda data: pack([data]),
    "write_with": lambda data: write_with(Reply, (), Values([data])),
    "write_plain": lambda data: write_plain(Kind.REPLY, 1, (), [data], 1 << 30),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_room_of_a_long_body_is_not_kept(way: str) -> None:
    """A packer keeps what it needed for its longest body, so one that has made such a one goes with that."""
    packers.clear()
    WAYS[way](bytes(MOST_KEPT))
    assert not packers
    WAYS[way](b"short")
    assert len(packers) == 1
    WAYS[way](b"short")
    assert len(packers) == 1
