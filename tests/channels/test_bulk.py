"""The bulk channel's own: turns, order, limits, and transfers that end in the middle."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from aiorpc.channels.bulk import FEW_TRANSFERS, TRANSFER_COST, Bulk
from aiorpc.channels.inline import allocate
from aiorpc.errors import ProtocolError, RpcCancelled
from aiorpc.protocol.frames import HEAD, Buffer, Frame, Kind
from aiorpc.protocol.states import TRANSFER, TransferEvent, TransferState
from tests.channels.ends import borrowed, pattern

CHUNK = 1000
LIMIT = 1 << 20
PLACE = struct.Struct("<QQ")
GIB = 1 << 30


def make(*, ready: bool = True, **options: Any) -> Bulk:
    channel = Bulk(**{"limit": LIMIT, "wake": lambda: None, "least": 1, "chunk": CHUNK, **options})
    channel.ready = ready
    return channel


class Piece:
    """One frame that a sender gave, taken apart."""

    def __init__(self, frame: list[Buffer]) -> None:
        data = b"".join(frame)
        self.number, body, count, kind, _ = HEAD.unpack_from(data)
        assert kind == Kind.CHUNK and body == PLACE.size and count <= 1
        at = HEAD.size + 8 * count
        self.body = data[at : at + body]
        self.data = data[at + body :]
        self.offset, self.size = PLACE.unpack(self.body)

    def give(self, receiver: Bulk) -> None:
        """As a decoder does: its place, its bytes, then the frame."""
        segments: list[memoryview] = []
        if self.data:
            place = receiver.place(self.number, self.body, len(self.data))
            place[:] = self.data
            segments = [place]
        receiver.on_frame(Frame(Kind.CHUNK, self.number, self.body, segments))


def next_piece(sender: Bulk) -> Piece | None:
    frame = sender.next_frame()
    return None if frame is None else Piece(frame)


def pieces(sender: Bulk) -> list[Piece]:
    """All that it has to write."""
    found = []
    while (piece := next_piece(sender)) is not None:
        found.append(piece)
    return found


class Sink:
    """What `arrived` was called with."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[int, Any]] = []

    def __call__(self, index: int, outcome: Buffer | Exception) -> None:
        self.outcomes.append((index, outcome))


def send(sender: Bulk, *sizes: int) -> list[Any]:
    return sender.send([borrowed(pattern(seed, size)) for seed, size in enumerate(sizes)], [])


def chunk(receiver: Bulk, number: int, offset: int, size: int, length: int) -> memoryview:
    return receiver.place(number, PLACE.pack(offset, size), length)


# --- what is sent, and when -------------------------------------------------------------------------------------------


def test_transfers_take_turns() -> None:
    """A chunk each: a short one behind a long one is done after two turns, a late one waits for nobody's end."""
    sender = make()
    send(sender, 50 * CHUNK, 2 * CHUNK)
    order = [next_piece(sender) for _ in range(4)]
    send(sender, CHUNK, 3 * CHUNK)
    order += pieces(sender)
    numbers = [piece.number for piece in order if piece is not None]
    assert numbers[:4] == [1, 2, 1, 2]
    assert numbers[4:11] == [1, 3, 4, 1, 4, 1, 4] and set(numbers[11:]) == {1}
    assert len(numbers) == 56 and sender.sending == 0


# --- what is received -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named_at", range(5))
def test_the_message_may_come_at_any_point(named_at: int) -> None:
    """Before, between and behind the chunks; the bytes are read into the buffer that the receiver gets."""
    sender, receiver, sink = make(), make(), Sink()
    wires = send(sender, 3 * CHUNK + 1)
    found: list[Any] = []
    places = []
    for number, piece in enumerate([*pieces(sender), None]):
        if number == named_at:
            found = receiver.receive(wires, [], sink)
        if piece is not None:
            place = receiver.place(piece.number, piece.body, len(piece.data))
            place[:] = piece.data
            places.append(place)
            receiver.on_frame(Frame(Kind.CHUNK, piece.number, piece.body, [place]))
    if named_at == 4:
        assert sink.outcomes == []
        (value,) = found
    else:
        assert found == [None]
        ((_, value),) = sink.outcomes
    assert bytes(value) == pattern(0, 3 * CHUNK + 1) and not value.readonly
    assert all(place.obj is value.obj for place in places)  # no copy on the way
    assert receiver.receiving == 0
    assert (receiver.traffic.received, receiver.traffic.bytes_received) == (1, 3 * CHUNK + 1)


@pytest.mark.parametrize(
    ("offset", "size", "length"),
    [
        pytest.param(0, 2000, 500, id="again"),
        pytest.param(400, 2000, 500, id="before"),
        pytest.param(1000, 2000, 500, id="gap"),
        pytest.param(500, 1999, 500, id="shorter"),
        pytest.param(500, 2001, 500, id="longer"),
        pytest.param(500, 2000, 1501, id="too much"),
        pytest.param(500, 2000, 0, id="nothing"),
    ],
)
def test_chunks_at_another_place_are_refused(offset: int, size: int, length: int) -> None:
    """Twice, with a gap, of another size, beyond the end: no byte of it is taken, and the right one still is."""
    receiver = make()
    receiver.on_frame(Frame(Kind.CHUNK, 1, PLACE.pack(0, 2000), [chunk(receiver, 1, 0, 2000, 500)]))
    with pytest.raises(ProtocolError):
        chunk(receiver, 1, offset, size, length)
    assert len(chunk(receiver, 1, 500, 2000, 1500)) == 1500


@pytest.mark.parametrize("size", [0, LIMIT + 1, (1 << 64) - 1])
def test_sizes_are_compared_with_the_limit_before_memory_is_taken(size: int) -> None:
    """Whether a chunk or the message says them."""
    taken: list[int] = []
    receiver = make(allocate=taken.append)
    with pytest.raises(ProtocolError):
        chunk(receiver, 1, 0, size, 1)
    with pytest.raises(ProtocolError):
        receiver.receive([[1, size]], [], Sink())
    assert taken == [] and receiver.receiving == 0


@pytest.mark.parametrize("body", [b"", b"x" * 15, b"x" * 17])
def test_chunks_that_do_not_say_where_they_belong_are_refused(body: bytes) -> None:
    """Before their bytes are read, or without any."""
    receiver = make()
    with pytest.raises(ProtocolError, match="where it belongs"):
        receiver.place(1, body, 10)
    with pytest.raises(ProtocolError, match="where it belongs"):
        receiver.on_frame(Frame(Kind.CHUNK, 1, body))
    with pytest.raises(ProtocolError, match="without bytes"):
        receiver.on_frame(Frame(Kind.CHUNK, 1, PLACE.pack(0, 10)))
    assert receiver.receiving == 0


@pytest.mark.parametrize("whole", [0, 1])
def test_a_chunk_that_came_in_part_comes_again(whole: int) -> None:
    """At the same place; those before it were handed on."""
    sender, receiver = make(), make()
    data = bytes(range(250)) * (3 * CHUNK // 250)
    wires = [wire for wire in sender.send([data], []) if wire is not None]
    parts = pieces(sender)
    for piece in parts[:whole]:
        piece.give(receiver)
    receiver.place(parts[whole].number, parts[whole].body, CHUNK)
    receiver.displace(parts[whole].number, CHUNK)
    for piece in parts[whole:]:
        piece.give(receiver)
    (arrived,) = receiver.receive(wires, [], lambda index, buffer: None)
    assert arrived == data


def test_two_messages_for_one_transfer_are_refused() -> None:
    """And one of another size than its chunks say; the first goes on."""
    sender, receiver, sink = make(), make(), Sink()
    (wire,) = send(sender, 2 * CHUNK)
    assert receiver.receive([wire], [], sink) == [None]
    with pytest.raises(ProtocolError, match="that is named"):
        receiver.receive([wire], [], sink)
    for piece in pieces(sender):
        piece.give(receiver)
    assert bytes(sink.outcomes[0][1]) == pattern(0, 2 * CHUNK) and receiver.receiving == 0
    chunk(receiver, 7, 0, 100, 10)
    with pytest.raises(ProtocolError, match="100 bytes, and its message says 101"):
        receiver.receive([[7, 101]], [], sink)


def test_a_transfer_without_memory_needs_none_for_its_chunks() -> None:
    """Where a whole buffer is not to be had a chunk of it may not be either: its bytes are read and dropped even so."""
    full = True

    def short(size: int) -> memoryview:
        if full:
            raise MemoryError("no room at all")
        return allocate(size)

    sender, receiver, sink, well = make(), make(allocate=short), Sink(), Sink()
    (bad,) = send(sender, 3 * CHUNK - 1)
    assert receiver.receive([bad], [], sink) == [None]
    for piece in pieces(sender):
        piece.give(receiver)
    ((_, error),) = sink.outcomes
    assert isinstance(error, MemoryError) and receiver.receiving == 0
    full = False
    (good,) = send(sender, 2 * CHUNK)
    assert receiver.receive([good], [], well) == [None]
    for piece in pieces(sender):
        piece.give(receiver)
    assert bytes(well.outcomes[0][1]) == pattern(0, 2 * CHUNK)


def test_sizes_beyond_32_bits_are_counted_right() -> None:
    """Places, sizes and limits of more than 4 GiB, on both sides, without the memory."""

    class Huge:
        """As long as it says, with nothing in it."""

        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, part: slice) -> Any:
            start, stop, _ = part.indices(self.size)
            return Huge(stop - start)

    receiver, sink = make(limit=9 * GIB, allocate=Huge), Sink()
    size, part = 9 * GIB, 3 * GIB
    receiver.receive([[1, size]], [], sink)
    for offset in (0, part, 2 * part):
        assert sink.outcomes == []
        place: Any = chunk(receiver, 1, offset, size, part)
        assert len(place) == part
        receiver.on_frame(Frame(Kind.CHUNK, 1, PLACE.pack(offset, size), [place]))
    assert len(sink.outcomes[0][1]) == size and receiver.traffic.bytes_received == size
    with pytest.raises(ProtocolError):
        chunk(receiver, 2, 0, size + 1, part)


# --- given up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named_at", [*range(6), None])
@pytest.mark.parametrize("written", range(5))
def test_transfers_given_up_anywhere_leave_nothing(written: int, named_at: int | None) -> None:
    """After so many of its 4 chunks, its message coming at any point or never: an error or the bytes, once."""
    sender, receiver, sink = make(), make(), Sink()
    (wire,) = send(sender, 4 * CHUNK)
    steps: list[Piece] = []
    for _ in range(written):
        piece = next_piece(sender)
        assert piece is not None
        steps.append(piece)
    sender.withdraw([wire], named=named_at is not None)
    steps += pieces(sender)
    found: list[Any] = []
    for number in range(6):
        if number == named_at:
            found = receiver.receive([wire], [], sink)
        if number < len(steps):
            steps[number].give(receiver)
    assert len(steps) <= 5 and sender.sending == 0 and receiver.receiving == 0
    if named_at is None:
        assert found == [] and sink.outcomes == []
        return
    outcomes = [value for value in found if value is not None] + [value for _, value in sink.outcomes]
    assert len(outcomes) == 1
    if written == 4:
        assert bytes(outcomes[0]) == pattern(0, 4 * CHUNK)
    else:
        assert isinstance(outcomes[0], RpcCancelled)


def test_transfers_without_bytes_are_bounded() -> None:
    """Each takes some memory here: of those that their sender gives up, and of those that only a message names."""
    receiver, total = make(total=2 * FEW_TRANSFERS * TRANSFER_COST), 2 * FEW_TRANSFERS
    body = PLACE.pack((1 << 64) - 1, 1)
    for number in range(total):
        receiver.on_frame(Frame(Kind.CHUNK, number + 1, body, ()))
    with pytest.raises(ProtocolError, match=f"more than {total} transfers"):
        receiver.on_frame(Frame(Kind.CHUNK, total + 1, body, ()))
    with pytest.raises(ProtocolError, match="max_incoming_bytes"):
        receiver.receive([[total + 1, 1]], [], Sink())
    receiver.receive([[1, CHUNK]], [], Sink())  # its message has come after all
    receiver.on_frame(Frame(Kind.CHUNK, total + 1, body, ()))
    assert receiver.receiving == total


# --- its states -------------------------------------------------------------------------------------------------------

# How each state is reached. Transfer 1 has three chunks.
WAYS: dict[TransferState, list[TransferEvent]] = {
    TransferState.UNKNOWN: [],
    TransferState.ARRIVING: [TransferEvent.CHUNK],
    TransferState.NAMED: [TransferEvent.CHUNK, TransferEvent.MESSAGE],
    TransferState.WHOLE: [TransferEvent.CHUNK, TransferEvent.CHUNK, TransferEvent.LAST_CHUNK],
    TransferState.GONE: [TransferEvent.CHUNK, TransferEvent.GIVEN_UP_POSTED],
}


class Incoming:
    """The end to which a transfer comes, and what its sender does."""

    def __init__(self) -> None:
        self.receiver, self.sink, self.found = make(), Sink(), list[Any]()
        self._at = 0

    def tell(self, event: TransferEvent) -> None:
        """That happens."""
        match event:
            case TransferEvent.CHUNK:
                self._chunk(1)
            case TransferEvent.LAST_CHUNK if not self._at:  # the last one, and no chunk has begun to come
                self.receiver.on_frame(Frame(Kind.CHUNK, 1, b"", [memoryview(bytearray(CHUNK))]))
            case TransferEvent.LAST_CHUNK:
                self._chunk(3 - self._at)
            case TransferEvent.MESSAGE:
                self.found += self.receiver.receive([[1, 3 * CHUNK]], [], self.sink)
            case TransferEvent.CLOSED:
                self.receiver.close()
            case _:
                body = PLACE.pack((1 << 64) - 1, event is TransferEvent.GIVEN_UP_POSTED)
                self.receiver.on_frame(Frame(Kind.CHUNK, 1, body, []))

    def _chunk(self, count: int) -> None:
        place = chunk(self.receiver, 1, self._at * CHUNK, 3 * CHUNK, count * CHUNK)
        self._at += count
        self.receiver.on_frame(Frame(Kind.CHUNK, 1, b"", [place]))

    @property
    def outcomes(self) -> int:
        """How often the message got the buffer, or the reason why there is none."""
        return sum(value is not None for value in self.found) + len(self.sink.outcomes)


@pytest.mark.parametrize("event", TransferEvent)
@pytest.mark.parametrize("state", WAYS)
def test_each_state_takes_what_its_table_says(state: TransferState, event: TransferEvent) -> None:
    """And refuses all else: what is kept, and what the message gets, is as the table has it."""
    incoming = Incoming()
    for step in WAYS[state]:
        incoming.tell(step)
    assert incoming.receiver.receiving == (state is not TransferState.UNKNOWN) and incoming.outcomes == 0
    if event is TransferEvent.CLOSED:
        incoming.tell(event)
        assert incoming.receiver.receiving == incoming.outcomes == 0
        return
    if TRANSFER.after(state, event) is None:
        with pytest.raises(ProtocolError):
            incoming.tell(event)
        return
    incoming.tell(event)
    after = TRANSFER.next(state, event)
    assert incoming.receiver.receiving == (after not in TRANSFER.final)
    assert incoming.outcomes == (after is TransferState.HANDED_OVER)


# --- the end ----------------------------------------------------------------------------------------------------------
