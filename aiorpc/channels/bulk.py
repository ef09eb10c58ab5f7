"""The bulk channel: large buffers in chunks, on a connection that small messages do not have to wait for.

A transfer is one buffer. Its chunks carry its number, and where they belong in a buffer of what size, so that the
receiver reads each of them straight into its place, and does not care whether they or the message that names the
transfer come first. Transfers under way take turns, a chunk each: a short one is not held up by a long one.

    an incoming transfer   is left when
    BEGUN                  a chunk or the message names it first; now its memory is there, or the reason why not
    WHOLE                  the last chunk is in place; it waits for its message, if that has not come
    GONE                   its sender has given it up; it waits for its message, if that was sent

Invariants
1. A number names one transfer for ever; chunks come in order, without gaps.
2. Memory for it is taken once, after its size was compared with the limit.
3. What is kept for a transfer goes as soon as both the message and the end of the transfer have come.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import ProtocolError, RpcCancelled
from ..options import BULK_SIZE
from ..protocol.frames import CHUNK, Buffer, Frame, encode_frame
from . import Arrived, Traffic, Wire
from .inline import allocate

CHUNK_SIZE = 1024 * 1024
# While there is no connection for chunks: to make one takes longer than to send so many bytes in a frame.
HASTY_SIZE = 4 * 1024 * 1024
_PLACE = struct.Struct("<QQ")  # of a chunk: where it begins, and the size of the whole
_GIVEN_UP = (1 << 64) - 1  # in place of where it begins: no more will come


class _Outgoing:
    __slots__ = ("at", "data", "given_up", "named", "number")

    def __init__(self, number: int, data: memoryview) -> None:
        self.number = number
        self.data = data
        self.at = 0
        self.given_up = False
        self.named = False


class _Incoming:
    __slots__ = ("arrived", "buffer", "failure", "filled", "placed", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.filled = 0
        self.placed = 0  # several chunks may be read before any is handed on
        self.buffer: memoryview | None = None
        self.failure: Exception | None = None
        self.arrived: Callable[[Buffer | Exception], None] | None = None

    @property
    def whole(self) -> bool:
        return self.filled == self.size


class Bulk:
    """One end. What it has to write, `next_frame` gives; what the other end wrote goes to `place` and `on_frame`.

    limit: bytes of the longest buffer taken. wake: called from any thread when `next_frame` has something.
    least, chunk: bytes of the shortest buffer sent this way, and of its pieces.
    """

    name = "bulk"

    def __init__(
        self, *, limit: int, wake: Callable[[], None], least: int = BULK_SIZE, chunk: int = CHUNK_SIZE
    ) -> None:
        self.traffic = Traffic()
        self.ready = False  # whether chunks can be written at once
        self._limit = limit
        self._wake = wake
        self._least = least
        self._chunk = chunk
        self._numbers = itertools.count(1)
        self._outgoing: dict[int, _Outgoing] = {}
        self._turns: deque[_Outgoing] = deque()
        self._incoming: dict[int, _Incoming] = {}
        self._closed = False
        self._lock = threading.Lock()  # over what is sent

    @property
    def sending(self) -> int:
        """How many transfers are not written yet."""
        return len(self._outgoing)

    @property
    def receiving(self) -> int:
        """How many transfers have begun to arrive, or wait for their message."""
        return len(self._incoming)

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Buffer], riders: list[Buffer]) -> list[Wire | None]:
        """Queue the long ones. wire: number of the transfer, bytes."""
        wires: list[Wire | None] = [None] * len(buffers)
        least = self._least if self.ready else max(self._least, HASTY_SIZE)
        for index, buffer in enumerate(buffers):
            if len(buffer) >= least:
                wires[index] = self._queue(memoryview(buffer))
            elif len(buffer) >= self._least:
                self._wake()
        if self._turns:
            self._wake()
        return wires

    def _queue(self, data: memoryview) -> Wire | None:
        with self._lock:
            if self._closed:
                return None
            transfer = _Outgoing(next(self._numbers), data)
            self._outgoing[transfer.number] = transfer
            self._turns.append(transfer)
        self.traffic.count_sent(len(data))
        return [transfer.number, len(data)]

    def withdraw(self, wires: Sequence[Wire], *, named: bool) -> None:
        """Send no more of these; the other end is told, behind what was sent of them."""
        with self._lock:
            if self._closed:
                return
            for number, size in wires:
                transfer = self._outgoing.pop(number, None)
                if transfer is None:  # all of it is there, or on its way
                    if named:  # and so is the message, which will take it
                        continue
                    transfer = _Outgoing(number, memoryview(b""))
                    transfer.at = size
                    self._turns.append(transfer)
                transfer.given_up = True
                transfer.named = named
        self._wake()

    def next_frame(self) -> list[Buffer] | None:
        """The next piece to write, of each transfer in turn; None when there is nothing to write. On the loop."""
        with self._lock:
            while self._turns:
                transfer = self._turns.popleft()
                number, at = transfer.number, transfer.at
                if transfer.given_up:
                    if at or transfer.named:
                        return encode_frame(CHUNK, number, _PLACE.pack(_GIVEN_UP, transfer.named))
                    continue
                size = len(transfer.data)
                piece = transfer.data[at : at + self._chunk]
                transfer.at += len(piece)
                if transfer.at < size:
                    self._turns.append(transfer)
                else:
                    del self._outgoing[number]
                return encode_frame(CHUNK, number, _PLACE.pack(at, size), (piece,))
        return None

    # --- receiving, on the loop ---------------------------------------------------------------------------------------

    def receive(self, wires: Sequence[Wire], riders: Sequence[Buffer], arrived: Arrived) -> list[Buffer | None]:
        """Those that are whole; the others when they are."""
        return [self._receive(wire, partial(arrived, index)) for index, wire in enumerate(wires)]

    def _receive(self, wire: Wire, arrived: Callable[[Buffer | Exception], None]) -> Buffer | None:
        try:
            number, size = wire
            incoming = self._incoming.get(number) or self._begin(number, size)
        except (TypeError, ValueError):
            raise ProtocolError(f"a message that names the transfer {wire!r:.100}") from None
        if incoming.arrived is not None or (incoming.size != size and incoming.failure is None):
            raise ProtocolError(f"two messages for transfer {number}, or of two sizes")
        if not incoming.whole:
            incoming.arrived = arrived
            return None
        del self._incoming[number]
        if incoming.buffer is None:
            assert incoming.failure is not None, "without memory there is a reason"
            arrived(incoming.failure)
        return incoming.buffer

    def _begin(self, number: int, size: int) -> _Incoming:
        if type(number) is not int or type(size) is not int or number <= 0 or size <= 0:
            raise ProtocolError(f"transfer {number!r:.20} of {size!r:.20} bytes")
        if size > self._limit:
            raise ProtocolError(f"a transfer announces {size} bytes; the limit is {self._limit} (max_tensor_bytes)")
        incoming = self._incoming[number] = _Incoming(size)
        try:
            incoming.buffer = allocate(size)
        except MemoryError as error:  # that message's trouble; the others are well
            incoming.failure = error
        return incoming

    def place(self, number: int, body: bytes, length: int) -> memoryview:
        """Where the chunk belongs that is about to be read. Raises ProtocolError."""
        offset, size = _unpack_place(body)
        incoming = self._incoming.get(number) or self._begin(number, size)
        if size != incoming.size or offset != incoming.placed or not 0 < length <= size - offset:
            raise ProtocolError(f"bytes {offset} to {offset + length} of transfer {number}, which is at another place")
        incoming.placed += length
        if incoming.buffer is None:
            return allocate(length)
        return incoming.buffer[offset : offset + length]

    def on_frame(self, frame: Frame) -> None:
        """A chunk is in its place, or a transfer will not be finished. Raises ProtocolError."""
        number = frame.call_id
        if not frame.segments:
            place, named = _unpack_place(frame.body)
            if place != _GIVEN_UP:
                raise ProtocolError(f"{frame}, a chunk without bytes")
            self._given_up(number, bool(named))
            return
        incoming = self._incoming.get(number)
        if incoming is None:
            raise ProtocolError(f"{frame} of a transfer that was given up")
        incoming.filled += len(frame.segments[0])
        if incoming.whole:
            if incoming.buffer is not None:
                self.traffic.count_received(incoming.size)
            if incoming.arrived is not None:
                self._end(number, incoming)

    def _given_up(self, number: int, named: bool) -> None:
        incoming = self._incoming.get(number)
        if incoming is None or incoming.arrived is None:
            self._incoming.pop(number, None)
            if not named:
                return
            incoming = self._incoming[number] = _Incoming(0)
        incoming.buffer = None
        incoming.failure = RpcCancelled("its sender has given up sending it")
        if incoming.arrived is not None:
            self._end(number, incoming)

    def _end(self, number: int, incoming: _Incoming) -> None:
        del self._incoming[number]
        assert incoming.arrived is not None
        outcome = incoming.buffer if incoming.buffer is not None else incoming.failure
        assert outcome is not None
        incoming.arrived(outcome)

    def on_message(self, fields: list[object]) -> None:
        """All that it says goes with its chunks."""
        raise ProtocolError("a message for the bulk channel, which takes none")

    def close(self) -> None:
        """Forget all transfers."""
        with self._lock:
            self._closed = True
            self._outgoing.clear()
            self._turns.clear()
        self._incoming.clear()


def _unpack_place(body: bytes) -> tuple[int, int]:
    try:
        offset, size = _PLACE.unpack(body)
    except struct.error:
        raise ProtocolError("a chunk that does not say where it belongs") from None
    return offset, size
