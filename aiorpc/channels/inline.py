"""The inline channel: buffers travel in the frame of their message. It takes the buffers that other channels refuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from ..errors import ProtocolError
from ..protocol.frames import Buffer
from . import Arrived, Channel, Wire


class Inline(Channel):
    """One end of the inline channel; it keeps nothing but its counts."""

    name = "inline"

    def send(self, buffers: Sequence[Buffer], riders: list[Buffer], copies: object = None) -> list[Wire | None]:
        """All buffers go with the frame. The wire of each is its number among the segments of the frame."""
        first = len(riders)
        riders.extend(buffers)
        self.count(buffers)
        return [[number] for number in range(first, len(riders))]

    def count(self, buffers: Sequence[Buffer]) -> None:
        """Count buffers that go with a frame which says nothing about channels."""
        for buffer in buffers:
            size = len(buffer)
            self.traffic.sent += 1
            self.traffic.bytes_sent += size

    def withdraw(self, wires: Sequence[Wire], *, named: bool) -> None:
        """Does nothing: the buffers go with their frame, or not at all."""

    def receive(self, wires: Sequence[Wire], riders: Sequence[Buffer], arrived: Arrived) -> list[Buffer | None]:
        """The buffers have arrived with the frame of the message."""
        try:
            taken = [riders[number] for (number,) in wires if number >= 0]
        except (TypeError, ValueError, IndexError):
            taken = []
        if len(taken) != len(wires):
            raise ProtocolError(f"a message of {len(riders)} segments that names {wires!r:.100}")
        for buffer in taken:
            self.traffic._count_received(len(buffer))
        return list(taken)


def allocate(size: int) -> memoryview:
    """Memory for one large buffer. Not zeroed: it is overwritten anyway, and touching it twice costs more."""
    return numpy.empty(size, dtype=numpy.uint8).data
