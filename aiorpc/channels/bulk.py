"""The bulk channel: large buffers in chunks on a connection of their own, which small messages do not wait for.

A transfer is one buffer. Each chunk has the number of its transfer, the size of the whole buffer, and its offset. The
receiver reads every chunk straight into its place, whether the chunks or the message that names the transfer come
first. Transfers take turns, a chunk each, so a long one does not delay a short one. The states of an incoming transfer
are the table `protocol.states.TRANSFER`.

Invariants
1. The number of a transfer is never reused. The chunks of a transfer come in order and without gaps.
2. Memory for a transfer is taken once, after its size was compared with the limits. The system allocates a page of it
   at the first write.
3. The entry of a transfer is dropped as soon as both its message and its end have come.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..errors import ProtocolError, RpcCancelled
from ..locks import Lock
from ..options import BULK_SIZE
from ..protocol.frames import CHUNK, Buffer, Frame, encode_frame, room
from ..protocol.messages import Chunk, read_chunk, write_chunk
from ..protocol.states import TRANSFER, TransferEvent, TransferState
from . import Arrived, Channel, Wire
from .inline import allocate

CHUNK_SIZE = 1024 * 1024
# While there is no connection for chunks, only buffers of so many bytes go this way: a shorter one is sent faster in a
# frame than the connection is made.
HASTY_SIZE = 4 * 1024 * 1024
# Bytes of memory that an incoming transfer takes beside its buffer, about. All entries together may take as much as
# max_incoming_bytes, and FEW_TRANSFERS are always allowed; this bounds transfers that are announced and never finished.
TRANSFER_COST, FEW_TRANSFERS = 512, 1024
_GIVEN_UP = (1 << 64) - 1  # in place of the offset of a chunk: no more chunks follow


class BulkTransfer(NamedTuple):
    """In an envelope: a buffer that comes in chunks."""

    #: The number of the transfer, which its CHUNKs have as their call id.
    transfer: int
    #: Its size in bytes.
    size: int


@dataclass(eq=False, slots=True)
class _Outgoing:
    number: int
    data: memoryview
    at: int = 0
    call: int = 0  # its number, once the message that names the transfer is posted
    given_up: bool = False
    named: bool = False


@dataclass(eq=False, slots=True)
class _Incoming:
    size: int
    state: TransferState = TRANSFER.initial
    filled: int = 0
    placed: int = 0  # bytes; several chunks may be read before any is handed on
    buffer: memoryview | None = None
    failure: Exception | None = None
    arrived: Callable[[Buffer | Exception], None] | None = None

    def enter(self, event: TransferEvent) -> None:
        """Apply an event that the sender reports. Raises ProtocolError if the state does not allow it."""
        following = TRANSFER.after(self.state, event)
        if following is None:
            raise ProtocolError(f"a transfer that is {self.state.value}, of which the sender says: {event.value}")
        self.state = following


class Bulk(Channel):
    """One end of the channel. `next_frame` returns what it has to write; `place` and `on_frame` take what has come.

    limit: bytes of the longest buffer taken. total: bytes that all incoming transfers may have at once. wake: called
    from any thread when `next_frame` has something.
    least, chunk: bytes of the shortest buffer sent this way, and of its pieces. allocate: makes the memory for an
    arriving buffer of so many bytes; MemoryError fails the message of the buffer, and no other.
    """

    name = "bulk"
    tracks = True

    def __init__(
        self,
        *,
        limit: int,
        total: int = 1 << 62,
        wake: Callable[[], None],
        least: int = BULK_SIZE,
        chunk: int = CHUNK_SIZE,
        allocate: Callable[[int], memoryview] = allocate,
    ) -> None:
        super().__init__()
        self.ready = False  # whether chunks can be written at once
        self.unsent: int = 0  # bytes that wait for `next_frame`
        self._limit = limit
        self._total = total
        self._most = max(total // TRANSFER_COST, FEW_TRANSFERS)
        self._announced = 0  # bytes of all transfers that are under way to here
        self._wake = wake
        self._least = least
        self._chunk = chunk
        self._allocate = allocate
        self._numbers = itertools.count(1)
        self._outgoing: dict[int, _Outgoing] = {}
        self._turns: deque[_Outgoing] = deque()
        self._incoming: dict[int, _Incoming] = {}
        self._nowhere: memoryview | None = None  # where the chunks of buffers without memory go; see `_begin`
        self._closed = False
        self._lock = Lock()  # guards what is sent

    @property
    def sending(self) -> int:
        """How many transfers are not written yet."""
        return len(self._outgoing)

    @property
    def receiving(self) -> int:
        """How many transfers have begun to arrive, or wait for their message."""
        return len(self._incoming)

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, buffers: Sequence[Buffer], riders: list[Buffer], copies: object = None) -> list[Wire | None]:
        """Queue the buffers that are long enough. The wire of each is the number of its transfer and its size."""
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
        transfer = _Outgoing(next(self._numbers), data)
        with self._lock:
            if self._closed:
                return None
            self._outgoing[transfer.number] = transfer
            self._turns.append(transfer)
            self.unsent += len(data)
        self.traffic._count_sent(len(data))
        return [*BulkTransfer(transfer.number, len(data))]

    def posted(self, wires: Sequence[Wire], call: int) -> None:
        """Transfers that are not written yet can be given up with their call."""
        for number, _ in wires:
            transfer = self._outgoing.get(number)
            if transfer is not None:
                transfer.call = call

    def give_up(self, call: int) -> None:
        """See `Channel`."""
        transfers = [transfer for transfer in list(self._outgoing.values()) if transfer.call == call]
        if transfers:
            self.withdraw([[transfer.number, len(transfer.data)] for transfer in transfers], named=True)

    @property
    def busy(self) -> bool:
        """Whether a transfer is not written yet."""
        return bool(self._outgoing)

    def withdraw(self, wires: Sequence[Wire], *, named: bool) -> None:
        """Send no more of these transfers. A chunk without bytes reports that to the other end."""
        with self._lock:
            if self._closed:
                return
            for number, size in wires:
                transfer = self._outgoing.pop(number, None)
                if transfer is None:  # all of it has been written
                    if named:  # the message has been written, too, and takes the buffer
                        continue
                    transfer = _Outgoing(number, memoryview(b""), size)
                    self._turns.append(transfer)
                self.unsent -= len(transfer.data[transfer.at :])
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
                        return encode_frame(CHUNK, number, write_chunk(Chunk(_GIVEN_UP, transfer.named)))
                    continue
                size = len(transfer.data)
                piece = transfer.data[at : at + self._chunk]
                transfer.at += len(piece)
                self.unsent -= len(piece)
                if transfer.at < size:
                    self._turns.append(transfer)
                else:
                    del self._outgoing[number]
                return encode_frame(CHUNK, number, write_chunk(Chunk(at, size)), (piece,))
        return None

    # --- receiving, on the loop ---------------------------------------------------------------------------------------

    def receive(self, wires: Sequence[Wire], riders: Sequence[Buffer], arrived: Arrived) -> list[Buffer | None]:
        """The buffers that are complete. `arrived` is called with each of the others when it is complete."""
        return [self._receive(wire, partial(arrived, index)) for index, wire in enumerate(wires)]

    def _receive(self, wire: Wire, arrived: Callable[[Buffer | Exception], None]) -> Buffer | None:
        try:
            number, size = BulkTransfer(*wire)
            incoming = self._incoming.get(number) or self._begin(number, size)
        except (TypeError, ValueError):
            raise ProtocolError(f"a message that names the transfer {wire!r:.100}") from None
        if incoming.size != size and incoming.state is not TransferState.GONE:
            raise ProtocolError(f"transfer {number} is of {incoming.size} bytes, and its message says {size}")
        incoming.enter(TransferEvent.MESSAGE)
        if incoming.state is TransferState.NAMED:
            incoming.arrived = arrived
            return None
        self._forget(number)
        if incoming.buffer is None:
            assert incoming.failure is not None, "without memory there is a reason"
            arrived(incoming.failure)
        return incoming.buffer

    def _begin(self, number: int, size: int) -> _Incoming:
        if type(number) is not int or type(size) is not int or number <= 0 or size <= 0:
            raise ProtocolError(f"transfer {number!r:.20} of {size!r:.20} bytes")
        if size > self._limit:
            raise ProtocolError(f"a transfer announces {size} bytes; the limit is {self._limit} (max_tensor_bytes)")
        if self._announced + size > self._total:
            raise ProtocolError(
                f"transfers of {self._announced + size} bytes are under way to here; the limit is {self._total} "
                "(max_incoming_bytes)"
            )
        incoming = self._remember(number, size)
        if self._nowhere is None:  # made now: if there is no memory for a buffer there may be none for a chunk of it
            with contextlib.suppress(ProtocolError):
                self._nowhere = memoryview(room(self._chunk))
        try:
            incoming.buffer = self._allocate(size)
        except MemoryError as error:
            incoming.failure = error
        return incoming

    def _remember(self, number: int, size: int) -> _Incoming:
        if len(self._incoming) >= self._most:
            raise ProtocolError(
                f"more than {self._most} transfers are under way to here; that is one for each {TRANSFER_COST} bytes "
                "of max_incoming_bytes"
            )
        self._announced += size
        incoming = self._incoming[number] = _Incoming(size)
        return incoming

    def _forget(self, number: int) -> None:
        incoming = self._incoming.pop(number)
        self._announced -= incoming.size  # in one step: a reading thread may add to it meanwhile

    def place(self, number: int, body: bytes, length: int) -> memoryview:
        """Where the chunk belongs that is read next. Raises ProtocolError."""
        offset, size = read_chunk(body)
        incoming = self._incoming.get(number)
        expected = (size, 0) if incoming is None else (incoming.size, incoming.placed)
        if (size, offset) != expected or not 0 < length <= size - offset:  # a wrong chunk begins no transfer
            raise ProtocolError(f"bytes {offset} to {offset + length} of transfer {number}, which is at another place")
        incoming = incoming or self._begin(number, size)
        incoming.enter(TransferEvent.CHUNK)
        incoming.placed += length
        if incoming.buffer is None:
            nowhere = self._nowhere
            return self._allocate(length) if nowhere is None or length > len(nowhere) else nowhere[:length]
        return incoming.buffer[offset : offset + length]

    def displace(self, number: int, length: int) -> None:
        """A placed chunk of so many bytes did not come whole, and will come again."""
        incoming = self._incoming.get(number)
        if incoming is not None:
            incoming.placed -= length

    def on_frame(self, frame: Frame) -> None:
        """A chunk is in its place, or its sender gives up the transfer. Raises ProtocolError."""
        number = frame.call_id
        if not frame.segments:
            place, named = read_chunk(frame.body)
            if place != _GIVEN_UP:
                raise ProtocolError(f"{frame}, a chunk without bytes")
            self._given_up(number, bool(named))
            return
        incoming = self._incoming.get(number)
        if incoming is None:
            raise ProtocolError(f"{frame} of a transfer that was given up")
        incoming.filled += len(frame.segments[0])
        if incoming.filled == incoming.size:
            incoming.enter(TransferEvent.LAST_CHUNK)
            if incoming.buffer is not None:
                self.traffic._count_received(incoming.size)
            self._end(number, incoming)

    def _given_up(self, number: int, named: bool) -> None:
        incoming = self._incoming.get(number) or self._remember(number, 0)
        incoming.enter(TransferEvent.GIVEN_UP_POSTED if named else TransferEvent.GIVEN_UP_UNPOSTED)
        incoming.buffer = None
        incoming.failure = RpcCancelled("its sender has given up sending it")
        self._end(number, incoming)

    def _end(self, number: int, incoming: _Incoming) -> None:
        """Drop a transfer in a final state, and give its message the buffer or the reason."""
        if incoming.state not in TRANSFER.final:
            return
        self._forget(number)
        if incoming.state is TransferState.FORGOTTEN:
            return
        assert incoming.arrived is not None, "a transfer is handed over to its message"
        outcome = incoming.buffer if incoming.buffer is not None else incoming.failure
        assert outcome is not None
        incoming.arrived(outcome)

    def close(self) -> None:
        """Forget all transfers."""
        with self._lock:
            self._closed = True
            self.unsent = 0
            self._outgoing.clear()
            self._turns.clear()
        for incoming in self._incoming.values():
            incoming.enter(TransferEvent.CLOSED)
        self._incoming.clear()
