"""The inline channel's own: it takes everything, in the frame, and refuses numbers that name no rider."""

from __future__ import annotations

from typing import Any

import pytest

from aiorpc.channels import Traffic
from aiorpc.channels.inline import Inline
from aiorpc.errors import ProtocolError


def unexpected(index: int, outcome: object) -> None:
    raise AssertionError("what rides along is there at once")


def test_riders_go_behind_those_of_others() -> None:
    """The wire of each is its place among all riders, not among its own."""
    channel = Inline()
    riders: list[Any] = [b"another channel's"]
    wires = channel.send([b"ab", b"", memoryview(b"cde")], riders)
    assert wires == [[1], [2], [3]] and [bytes(rider) for rider in riders[1:]] == [b"ab", b"", b"cde"]
    assert channel.send([], riders) == [] and len(riders) == 4
    assert channel.receive([[3], [1]], riders, unexpected) == [b"cde", b"ab"]


def test_nothing_is_copied() -> None:
    """Neither on the way out nor on the way in."""
    channel = Inline()
    data = bytearray(100)
    riders: list[Any] = []
    channel.send([data], riders)
    assert riders[0] is data
    assert channel.receive([[0]], riders, unexpected)[0] is data


@pytest.mark.parametrize(
    "wires",
    [[[2]], [[-1]], [[]], [[0, 1]], [None], [["0"]], [[None]], [[0.5]], [[[]]], [5], ["0"], [[0], [7]], [[1 << 64]]],
)
def test_numbers_that_name_no_rider_are_refused(wires: list[Any]) -> None:
    """ProtocolError, and nothing is counted as received."""
    channel = Inline()
    with pytest.raises(ProtocolError, match="a message of 2 segments"):
        channel.receive(wires, [bytearray(1), bytearray(2)], unexpected)
    assert channel.traffic == Traffic()
