"""What is fuzzed: everything that reads bytes of others, each as a function of one input.

A target says which errors are documented for what it reads. It returns for an input that it accepts and raises one of
these for an input that it refuses; whatever else it raises is a finding. So are a hang, a crash, memory that grows, and
unpickling (`trap`). The targets of a live worker stand on `live`.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import numpy
import torch
from msgspec import Struct
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from aiorpc.channels import bulk, layout, shared_messages
from aiorpc.channels.arena import Arena
from aiorpc.channels.device import messages as device_messages
from aiorpc.channels.inline import allocate
from aiorpc.channels.keeping import Keeper
from aiorpc.channels.shared import SharedMemory
from aiorpc.errors import PeerRefused, ProtocolError, RendezvousError, SerializationError
from aiorpc.protocol import messages, publication, reference_messages
from aiorpc.protocol.families import Family, reader_of
from aiorpc.protocol.frames import Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.handshake import MAX_BODY, Handshake
from aiorpc.protocol.messages import (
    ByName,
    Call,
    ChannelMessage,
    Chunk,
    Credit,
    Error,
    Fetch,
    Item,
    Method,
    Parcel,
    Reply,
    TensorEntry,
    Values,
    write,
    write_chunk,
)
from aiorpc.protocol.packing import pack, unpack
from aiorpc.protocol.plain import names_nothing
from aiorpc.protocol.reference_messages import PassedReference, ReferenceId
from aiorpc.protocol.references import ReferenceTable
from aiorpc.protocol.seal import HEAD, OVERHEAD, TAG_SIZE, Seal, Unsealer
from aiorpc.protocol.trace_context import TraceContext
from aiorpc.queues import packing
from aiorpc.runtime.calls.values import decode, encode
from aiorpc.runtime.links import messages as link_messages
from tests.fuzz import declared, encrypted, live, parts, recordings, stored, trees
from tests.fuzz.stored import RECORD, SECRET
from tests.fuzz.trap import PAYLOAD, nothing_unpickled
from tests.fuzz.trees import ELEMENTS

Taste = Callable[[bytes], None]

MAX_SEGMENT = 1 << 16


@dataclass(frozen=True)
class Target:
    """One of them. name: of its files, too. about: what it feeds. allowed: the errors that are documented for it.

    open: makes what takes inputs, and ends it. seeds: inputs to begin with, some of which are accepted. proved: whether
    inputs come from a member, whose calls run code by design. share: of a campaign, in thousandths: 10 at least, so
    that one of ten million has 100,000 inputs of each. longest: bytes.
    """

    name: str
    about: str
    allowed: tuple[type[Exception], ...]
    open: Callable[[], AbstractContextManager[Taste]]
    seeds: Callable[[], list[bytes]]
    proved: bool = False
    share: int = 10
    longest: int = 4096

    def taste(self, taste: Taste, data: bytes) -> bool:
        """Whether the input is accepted, else it is refused as documented. Raises whatever else there is."""
        try:
            taste(data)
        except self.allowed:
            return False
        return True


def simple(taste: Taste) -> Callable[[], AbstractContextManager[Taste]]:
    """The `open` of a target that keeps nothing. Nothing is unpickled inside."""

    @contextmanager
    def opened() -> Iterator[Taste]:
        with nothing_unpickled():
            yield taste

    return opened


def written(kind: int, number: int, body: bytes, segments: Sequence[bytes] = ()) -> bytes:
    """A frame, as it goes over the wire."""
    return b"".join(bytes(part) for part in encode_frame(kind, number, body, segments))


# --- frames and seals -------------------------------------------------------------------------------------------------


def small(size: int) -> bytearray | memoryview:
    """Memory for a segment; whoever asks has compared the size with the limit."""
    assert size <= MAX_SEGMENT, size
    return allocate(size)


def fed(decoder: FrameDecoder | Unsealer, data: bytes, most: int) -> list[Any]:
    """The frames that come of the data in pieces, as plain values, and the error at last if there is one."""
    made: list[Any] = []
    rest = memoryview(data)
    try:
        while rest:
            buffer = decoder.get_buffer()
            assert len(buffer), "no room for what comes next"
            count = min(len(buffer), len(rest), most)
            buffer[:count] = rest[:count]
            made += [
                (frame.kind, frame.call_id, frame.body, [bytes(part) for part in frame.segments])
                for frame in decoder.received(count)
            ]
            rest = rest[count:]
    except ProtocolError as error:
        made.append(str(error))
    return made


def taste_frames(data: bytes) -> None:
    """Both ways give the same; an error in the middle of a read loses the frames before it, which in pieces were out.

    Lengths of reads are part of the input: its first byte.
    """
    most, data = (data[0] % 61 + 1, data[1:]) if data else (1, b"")
    outcomes: list[list[Any]] = []
    for length in (len(data) or 1, most):
        decoder = FrameDecoder(max_body=1 << 14, max_segment=MAX_SEGMENT, allocate=small)
        decoder.place = lambda number, body, size: memoryview(small(size))
        outcomes.append(fed(decoder, data, length))
    whole, pieces = outcomes
    refused = bool(whole) and isinstance(whole[-1], str)
    assert whole == pieces or (refused and pieces and whole[-1] == pieces[-1]), (whole, pieces)
    if refused:
        raise ProtocolError(whole[-1])


def seeds_of_frames() -> list[bytes]:
    """Frames of each kind, in a row, and announced ones."""
    streams = [b"".join(written(kind, 1, body) for kind, body in bodies()[start : start + 3]) for start in range(9)]
    streams += [written(Kind.CALL, 7, b"body", [b"abc", b"", b"x" * 300]), written(Kind.CHUNK, 1, bytes(16), [b"abc"])]
    streams += [written(Kind.CALL, 7, b"", [bytes(5000)]), bytes(40), written(Kind.CALL, 7, bytes(1 << 15))[:99]]
    return [b"\x06" + stream for stream in streams]


def taste_seals(data: bytes) -> None:
    """As strangers send them; or, if the first byte is not 0, sealed by whoever has the key and changed on the way."""
    if len(data) < 4:
        return
    how, place, change, most = data[:4]
    data = data[4:]
    seal = Seal(SECRET)
    if how:
        pieces = [data[at : at + how] for at in range(0, len(data), how)]
        stream = bytearray(b"".join(b"".join(seal.piece(at, [piece], len(piece))) for at, piece in enumerate(pieces)))
        if stream:
            stream[(place * 257) % len(stream)] ^= change
        changed = bool(stream and change)
        data = bytes(stream)
    else:
        changed = True
    outcome = fed(Unsealer(seal, FrameDecoder(max_body=1 << 14, max_segment=MAX_SEGMENT)), data, most + 1)
    refused = bool(outcome) and isinstance(outcome[-1], str)
    if how and changed:
        # A longer length may wait for what never comes; nothing behind the change gets through.
        before = (place * 257) % len(stream) // (how + OVERHEAD) * how
        size = sum(len(written(*made)) for made in outcome if not isinstance(made, str))
        assert size <= before, "a frame came through that does not bear the seal"
    if refused:
        raise ProtocolError(outcome[-1])


def seeds_of_seals() -> list[bytes]:
    """Sealed streams, whole and with a byte changed, and what is no seal."""
    stream = b"".join(written(kind, 1, body) for kind, body in bodies()[:4])
    large = bytes((200, 0, 0, 150)) + written(Kind.CALL, 7, b"body", [b"s" * 5000]) + stream
    raw = b"\0\0\0\x40" + HEAD.pack(5) + b"12345" + bytes(TAG_SIZE)
    return [bytes((40, 0, 0, 30)) + stream, bytes((200, 1, 4, 3)) + stream, bytes((7, 2, 1, 99)) + stream, large, raw]


def seeds_of_encrypted() -> list[bytes]:
    """The same frames behind TLS."""
    return encrypted.seeds_of_behind(b"".join(written(kind, 1, body) for kind, body in bodies()[:4]))


# --- the handshake ----------------------------------------------------------------------------------------------------


def taste_handshake(data: bytes, opener: bool) -> None:
    """The bytes of the other side, from the first on. Nobody is known who has not the secret."""
    shaking = Handshake(RECORD, os.urandom(32), expect=RECORD if opener else None)
    if opener:
        shaking.start()
    for frame in FrameDecoder(max_body=MAX_BODY).feed(data):
        try:
            shaking.feed(frame)
        finally:
            assert shaking.peer is None, "known without the secret"


def seeds_of_handshake() -> list[bytes]:
    """What each side says, in its order and out of it."""
    opener = Handshake(RECORD, SECRET, expect=RECORD)
    acceptor = Handshake(RECORD, SECRET)
    decoder = FrameDecoder(max_body=MAX_BODY)
    said: list[bytes] = []
    frames = opener.start()
    for side in (acceptor, opener, acceptor, opener):
        said.append(b"".join(bytes(part) for part in frames))
        (frame,) = decoder.feed(said[-1])
        frames = side.feed(frame)
    bare = written(Kind.HELLO, 0, msgpack.packb([PAYLOAD, PAYLOAD]))
    refused = written(Kind.REFUSED, 0, b"no")
    return [
        *said,
        said[0] * 2,
        said[1] * 2,
        said[0] + said[2],
        said[1] + said[3],
        bare,
        refused,
        written(Kind.CALL, 1, PAYLOAD),
    ]


# --- messages ---------------------------------------------------------------------------------------------------------


def bodies() -> list[tuple[int, bytes]]:
    """Messages of each kind."""
    plain = Values([1, "text", b"bytes", None, 1.5, True, -(1 << 63)])
    opaque = Values([None, 2], opaque_at=[0], pickled=PAYLOAD)
    passed = PassedReference(ReferenceId(1, 2), 1, ReferenceId(3, 4), 0)
    referring = Values([None], references=[passed], table=None)
    table = [TensorEntry(-2, b"abcdefgh", 6, [2], None, 0, None)]
    tensors = Values([None], tensors_at=[0], table=table, gradients=messages.Recorded(1, 2, [0], [None]))
    functions: list[messages.Function] = [ByName(1, "operator:add"), 1, Method(0, 1, 2, "f"), Fetch(0, 1, 2), None]
    calls: list[Any] = [
        Call(function, values)
        for function, values in zip(functions, (plain, opaque, referring, tensors, opaque), strict=True)
    ]
    calls.append(Call(messages.ObjectMethod("box", "put"), plain))
    calls.append(
        Call(ByName(1, "operator:add"), plain, ["b"], 1.5, (7, 7), TraceContext("p", "s"), 8, 9, ReferenceId(0, 1, 2))
    )
    calls.append(Call(ByName(1, "operator:add"), plain, None, 1.5, once=(3, 1)))
    made: list[tuple[Kind, Any]] = [(Kind.CALL, call) for call in calls]
    made += [(Kind.REPLY, Reply(values)) for values in (plain, opaque, referring, tensors)]
    made += [
        (Kind.ITEM, Item(tensors)),
        (Kind.ERROR, Error("ValueError", "text", "traceback", "w0", PAYLOAD, True)),
        (Kind.CREDIT, Credit(3)),
        (Kind.CANCEL, messages.Cancel(False)),
        (Kind.GOODBYE, messages.Goodbye("KeyError")),
        (Kind.RELEASE, messages.Release([(0, 4096, 64, 1)])),
        (Kind.PARTING, messages.Parting()),
        (Kind.PARCEL, Parcel(int(Kind.CALL), [(3, []), (1, [0, 4096, 64, 1, 0])], write(calls[0]))),
    ]
    made += [(Kind.CHANNEL, ChannelMessage(channel, fields)) for channel, fields in channel_messages()]
    encoded = [(int(kind), write(message)) for kind, message in made]
    return [
        *encoded,
        (int(Kind.CHUNK), write_chunk(Chunk(0, 300))),
        (int(Kind.WELCOME), bytes(32)),
        *((int(Kind.REFERENCE), pack(fields)) for fields in reference_fields()),
    ]


FAMILIES: list[Family[Any]] = [
    link_messages.MESSAGES,
    shared_messages.MESSAGES,
    device_messages.MESSAGES,
    reference_messages.MESSAGES,
]


def channel_messages() -> list[tuple[int, list[Any]]]:
    """Some for each channel."""
    shared, device = shared_messages, device_messages
    told: list[tuple[int, Family[Any], Any]] = [
        (link_messages.LINK, FAMILIES[0], link_messages.Introduce({"shared memory": {"user": 0, "processes": "x"}})),
        (link_messages.LINK, FAMILIES[0], link_messages.Pipe("")),
        (link_messages.LINK, FAMILIES[0], link_messages.Attach()),
        (link_messages.SHARED, FAMILIES[1], shared.SegmentOffer(0, 9, 1 << 20, bytes(16))),
        (link_messages.SHARED, FAMILIES[1], shared.Mapped(0)),
        (link_messages.SHARED, FAMILIES[1], shared.SegmentRefused(0, "why")),
        (link_messages.SHARED, FAMILIES[1], shared.Warm(0, 4096, 4096)),
        (link_messages.DEVICE, FAMILIES[2], device.Got(1)),
        (link_messages.DEVICE, FAMILIES[2], device.Stop(1, "why")),
        (link_messages.DEVICE, FAMILIES[2], device.BoxOffer(1, "uuid", 0, b"h", [b"e"], [], bytes(16))),
        (link_messages.DEVICE, FAMILIES[2], device.FilledSlots(1, [])),
    ]
    return [(channel, family.write(message)) for channel, family, message in told]


def reference_fields() -> list[list[Any]]:
    """One of each word."""
    rref, fork = ReferenceId(3, 1), ReferenceId(5, 2)
    said: list[reference_messages.Message] = [
        reference_messages.Add(rref, fork),
        reference_messages.Added(rref, fork),
        reference_messages.Gone(rref, fork, "why"),
        reference_messages.ChildOk(fork),
        reference_messages.Del(rref, fork),
        reference_messages.Ask(rref),
        reference_messages.Never(rref),
        reference_messages.Abandon(rref, fork, True, "why"),
    ]
    return [reference_messages.MESSAGES.write(each) for each in said]


def taste_messages(data: bytes) -> None:
    """The first byte is the kind, the rest the body."""
    if data:
        messages.read(data[0], data[1:])


def seeds_of_messages() -> list[bytes]:
    """Bodies of each kind."""
    return [bytes((kind,)) + body for kind, body in bodies()] + [bytes((99,))]


def taste_families(data: bytes) -> None:
    """The first byte says for whom the message is, the rest is its fields."""
    if not data:
        return
    fields = unpack(data[1:])
    if data[0] % 5 == 3:
        reference_messages.read(fields)
    elif data[0] % 5 == 4:
        try:
            device_messages.read_transfer(fields)
        except TypeError as error:  # documented for it; whoever calls it makes a ProtocolError of it
            raise ProtocolError(str(error)) from None
    else:
        FAMILIES[data[0] % 5].read(fields)


PUBLISHED: list[Struct] = [
    publication.Lease("policy", 1, 3, "learner", 1),
    publication.Unpublished("policy", 1),
    publication.LatestWanted("policy"),
    publication.Latest("policy", 4, 3),
    publication.Want("policy", 1, 2, True, [1], False),
    publication.LeaveWanted("policy"),
    publication.DigestWanted("policy", 4),
    publication.AskLeader("policy", 2, 4),
    publication.PieceWanted("policy", 4, 0, 64),
    publication.VersionArrived("policy", 1, 4),
    publication.StillFetching("policy"),
    publication.VersionsReleased("policy", 1, [1, 2]),
    publication.SubscriptionClosed("policy", 1, [3]),
    publication.Edition(4, 3, "learner", 128, [[0, 64], [64, 64]], None, False, [], "file:a", 3, [""]),
    publication.Edition(
        5,
        3,
        "learner",
        64,
        [[0, 64]],
        publication.SlotOffer(1, 9, 8192, bytes(16)),
        True,
        [1, 2],
        "file:a",
        None,
        ["a"],
    ),
]


def taste_published(data: bytes) -> None:
    """What workers say of published values, as arguments and results of calls."""
    outcome: ProtocolError | None = None
    for decoder in map(Decoder, publication.MESSAGES):
        try:
            publication.read(decoder, data)
            return
        except ProtocolError as error:
            outcome = error
    assert outcome is not None
    raise outcome


def taste_queued(data: bytes) -> None:
    """An item of a queue, as far as it is read before its values are."""
    body, _ = packing.split(memoryview(data))
    messages.read_values(body)


def seeds_of_queued() -> list[bytes]:
    found = []
    for buffers in ([], [b"abcdefgh"], [b"x" * 100, b"", b"y"]):
        for kind, body in bodies():
            if kind == Kind.REPLY:
                layout = packing.layout_of(len(body), [len(each) for each in buffers])
                item = bytearray(layout.size)
                packing.join(body, buffers, layout, numpy.frombuffer(item, numpy.uint8))
                found.append(bytes(item))
    return [*found, found[-1][:-1]]


def seeds_of_families() -> list[bytes]:
    """Messages of each family."""
    places = {link_messages.LINK: 0, link_messages.SHARED: 1, link_messages.DEVICE: 2}
    made = [bytes((places[channel],)) + pack(fields) for channel, fields in channel_messages()]
    made += [b"\3" + pack(fields) for fields in reference_fields()]
    return [
        *made,
        b"\4" + pack([1, "cuda:1", 3, [[1, 2, 3, 4]]]),
        b"\4" + pack([1, "cpu", 3, 7]),
        b"\1" + pack(["gone"]),
    ]


# --- plain pickles ----------------------------------------------------------------------------------------------------


class NamesAre(pickle.Unpickler):
    """Finds nothing: whoever reads pickles of plain values looks for nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise AssertionError(f"{module}.{name} is looked for")


@contextmanager
def plain() -> Iterator[Taste]:
    """What passes is unpickled, and walked through as often as it is referred to, within what its length allows."""

    def taste(data: bytes) -> None:
        if not names_nothing(data):
            raise ProtocolError("not plain")
        value = NamesAre(io.BytesIO(data)).load()
        with suppress(ValueError):  # of a number that is too long for decimals
            assert len(repr(value)) <= 400 * len(data) + (1 << 22), "it refers to more than it has"

    yield taste


def seeds_of_plain() -> list[bytes]:
    """Pickles of each plain type, and of what they share."""
    shared: list[Any] = [1, 2.5, "text", b"bytes"]
    values: list[Any] = [
        [None, True, False, 1, 300, -70_000, 1 << 40, 1 << 2100, 1.5, "text", "t" * 300, b"b", b"b" * 300],
        [bytearray(b"abc"), {}, [], (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {1, 2}, frozenset((1, "a"))],
        {"a": shared, "b": [shared, shared], (1, 2): {"c": shared}},
        [{"observation": 1.5, "reward": number} for number in range(20)],
        [shared] * 20,
    ]
    return [pickle.dumps(value, 5) for value in values] + [pickle.dumps(len, 5), pickle.dumps(values, 0)]


# --- values and tensors -----------------------------------------------------------------------------------------------


class To:
    """A receiver, as far as encoding asks."""

    same_main = True
    other_python = ""
    max_body = 1 << 24
    max_segment = 1 << 40
    safe = False


def messages_with_tensors() -> list[tuple[bytes, list[bytes]]]:
    """Bodies of replies, and their segments."""
    large = torch.arange(200.0)
    samples: list[list[Any]] = [
        [],
        [1, "text", b"bytes", None, 1.5, True],
        [torch.ones(2, 2)],
        [torch.empty(0, 3), torch.ones(1).bool(), torch.ones(2, dtype=torch.bfloat16)],
        [large, large[3:7], large.view(10, 20).t()],
        [torch.nn.Parameter(torch.ones(3)), torch.ones(2, requires_grad=True)],
        [[1, {"a": torch.ones(2)}]],
    ]
    made = [encode(Reply(Values(values)), To())[:2] for values in samples]
    return [(body, [bytes(part) for part in parts]) for body, parts in made]


def read_through(tensors: Sequence[object]) -> None:
    """Read every element: none may lie outside of its memory."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.numel() <= ELEMENTS:
            # Of some types torch copies no tensors, or says that it can do little with them.
            with suppress(NotImplementedError), warnings.catch_warnings(action="ignore"):
                tensor.clone()


def taste_values(data: bytes) -> None:
    """A body and the lengths of its segments. Its pickle is left out, which only a member can have sent."""
    try:
        body, lengths = msgpack.unpackb(data, strict_map_key=False)
        segments = [bytearray(int(length) % MAX_SEGMENT) for length in lengths[:4]]
    except Exception as error:
        raise ProtocolError("not an input") from error
    if type(body) is not bytes:
        raise ProtocolError("not an input")
    said = messages.read_values(body)
    read_through(decode(replace(said, pickled=None), segments, lambda passed: [object()] * len(passed)))


def seeds_of_values() -> list[bytes]:
    """Bodies and the lengths of their segments."""
    return [msgpack.packb([body, [*map(len, parts)]]) for body, parts in messages_with_tensors()]


def taste_tensors(data: bytes) -> None:
    """A table, and the lengths of the buffers."""
    try:
        table, lengths = msgpack.unpackb(data, strict_map_key=False)
        buffers = [bytearray(int(length) % MAX_SEGMENT) for length in lengths[:4]]
    except Exception as error:
        raise ProtocolError("not an input") from error
    if type(table) is not list:  # as readers of messages have seen to
        raise ProtocolError("not an input")
    read_through(layout.rebuild(table, buffers))


def seeds_of_tensors() -> list[bytes]:
    """Tables and the lengths of their buffers."""
    found = [(messages.read_values(body).table, parts) for body, parts in messages_with_tensors()]
    return [msgpack.packb([table, [*map(len, parts)]]) for table, parts in found if table]


# --- channels ---------------------------------------------------------------------------------------------------------


def keep(outcomes: list[Any], index: int, outcome: Any) -> None:
    """A channel has one more buffer, or the reason why there is none."""
    outcomes.append(outcome)


class Here:
    """What a channel of shared memory needs around it: all of it at once, in this thread."""

    record: Any = None
    opener = local = True

    def __init__(self) -> None:
        self.posted: list[list[Any]] = []

    def post(self, fields: list[Any], *, more: bool = False) -> None:
        """Keep what would be sent."""
        self.posted.append(fields)

    def post_buffer(self, fields: list[Any], buffer: Any) -> None:
        """Shared memory sends none."""

    def give_back(self, released: Sequence[Sequence[int]], *, more: bool) -> None:
        """Nobody needs them."""

    def in_background(self, function: Callable[..., None], *args: Any) -> None:
        """At once."""
        function(*args)

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """At once."""
        function(*args)

    def on_loop(self, function: Callable[..., object], *args: Any) -> None:
        """At once."""
        function(*args)

    def watch(self) -> None:
        """It is flushed at the end of each input."""

    def on_refused(self, reason: str) -> None:
        """Nobody asks."""

    def on_closed(self, channel: SharedMemory) -> None:
        """Nobody asks."""

    def on_cold(self, size: int) -> None:
        """Nobody grows."""

    def may_wait(self) -> bool:
        """Nobody waits."""
        return False

    def wait(self, wait: Callable[[float], object]) -> None:
        """Nobody does."""


@contextmanager
def blocks() -> Iterator[Taste]:
    """One end of shared memory whose segment the other one has mapped: lists of what it is sent, blocks and messages.

    What is sent: ``[0, fields]``, a message of the channel; ``[1, wires]``, the blocks of a message; ``[2, blocks]``,
    what is given back.
    """
    arena, theirs = Arena(1 << 20, segment_size=1 << 20), Arena(1 << 20, segment_size=1 << 20)

    def taste(data: bytes) -> None:
        parts = unpack(data)
        around = Here()
        end = SharedMemory(arena, os.getpid(), around, keeper=Keeper(arena, lambda: None, lambda size: None))
        try:
            segment = theirs.segments[0]
            end.on_message(["offer", 0, segment.fd, segment.size, segment.nonce])
            taken: list[Any] = []
            end.lender.lend(b"x" * 64)
            for part in parts[:8]:
                if type(part) is not list or len(part) != 2:
                    raise ProtocolError("not an input")
                if part[0] == 0:
                    end.on_message(part[1])
                elif part[0] == 2:
                    end.on_release(messages.read_release(pack([part[1]])).blocks)
                elif type(part[1]) is list:
                    try:
                        taken += end.receive(part[1], [], partial(keep, taken))
                    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
                        raise ProtocolError(str(error)) from None  # as `Reassembly.open` does
            for buffer in taken:
                if buffer is not None and not isinstance(buffer, Exception):
                    bytes(buffer)
        finally:
            taken = []
            closed(end.flush)
            closed(end.lender.reclaim)
            closed(end.close)
            assert not arena.blocks, "a block is left"

    try:
        for each in (arena, theirs):
            each.grow(1 << 18)
        with nothing_unpickled():
            yield taste
    finally:
        arena.close()
        theirs.close()


def seeds_of_blocks() -> list[bytes]:
    """Blocks, parts of blocks, and each message of the channel."""
    said = [[0, fields] for channel, fields in channel_messages() if channel == link_messages.SHARED]
    lent, part = [0, 4096, 64, 1, 0], [0, 8192, 4096, 2, 0, 64, 100]
    return [
        pack([[1, [lent]], [1, [lent]]]),
        pack([[1, [[0, 4096, 64, 1, 1], part, part]]]),
        pack([[2, [[0, 4096, 64, 1]]]]),
        *(pack([each]) for each in said),
        pack(said),
    ]


def taste_bulk(data: bytes) -> None:
    """A stream of frames: chunks as they come on a second connection, and parcels that name transfers."""
    channel = bulk.Bulk(limit=MAX_SEGMENT, wake=lambda: None, allocate=lambda size: memoryview(bytearray(size)))
    decoder = FrameDecoder(max_body=1 << 14, max_segment=MAX_SEGMENT, allocate=small)
    decoder.place = channel.place
    outcomes: list[Any] = []
    try:
        for frame in decoder.feed(data):
            if frame.kind == Kind.CHUNK:
                channel.on_frame(frame)
            elif frame.kind == Kind.PARCEL:
                wires = [wire for _, wire in messages.read_parcel(frame.body).wires]
                outcomes += channel.receive(wires, [], partial(keep, outcomes))
    finally:
        closed(channel.close)
        assert not channel.receiving, "a transfer is left"


def closed(close: Callable[[], None]) -> None:
    """Close something, which no input may hinder."""
    try:
        close()
    except Exception as error:
        raise AssertionError(f"closing raised {type(error).__name__}: {error}") from error


def seeds_of_bulk() -> list[bytes]:
    """Transfers whose message comes first, last, and never."""
    parcel = written(Kind.PARCEL, 1, write(Parcel(int(Kind.REPLY), [(link_messages.BULK, [1, 300])], b"\x90")))
    first = written(Kind.CHUNK, 1, write_chunk(Chunk(0, 300)), [bytes(200)])
    second = written(Kind.CHUNK, 1, write_chunk(Chunk(200, 300)), [bytes(100)])
    given_up = [written(Kind.CHUNK, 1, write_chunk(Chunk((1 << 64) - 1, named))) for named in (0, 1)]
    return [
        parcel + first + second,
        first + second + parcel,
        first + given_up[0],
        parcel + given_up[1],
        given_up[1] + parcel,
        first + given_up[1] + parcel,
    ]


# --- references -------------------------------------------------------------------------------------------------------


read_passed = reader_of(PassedReference)


def taste_references(data: bytes) -> None:
    """Messages of two other workers, and references that they pass, to a table that holds some and has passed some on.

    What is refused changes nothing.
    """
    table = ReferenceTable(3, keys=itertools.repeat(0))  # which whoever says all this has been told
    mine = table.own()
    created = table.create(5)
    table.created(*created)
    table.encode(*mine, to=5)
    table.encode(*created, to=7)
    waiting = table.create(5)
    for part in unpack(data)[:16]:
        match part:
            case [int(sender), list(fields)] if sender in (5, 7):
                before = table.counts()
                try:
                    if fields and type(fields[0]) is str:
                        table.on_message(sender, reference_messages.read(fields))
                    else:
                        table.decode(read_passed(fields), sender)
                except TypeError as error:
                    raise ProtocolError(str(error)) from None
                except ProtocolError:
                    assert table.counts() == before, "what was refused has changed something"
                    raise
            case _:
                raise ProtocolError("not an input")
    table.created(*waiting)
    table.lost(5)
    table.lost(7)
    table.live()


def seeds_of_references() -> list[bytes]:
    """A message of each word, and references."""
    said = [[5, fields] for fields in reference_fields()]
    passed = [[7, [[9, 1, 2], 9, [7, 1, 0], None]], [5, [[5, 1, 2], 5, [5, 9, 0], 0]]]
    passed.append([5, [[3, 0, 0], 3, [5, 3, 0], None]])
    return [pack([each]) for each in said + passed] + [pack(said), pack(passed)]


# --- a live worker ----------------------------------------------------------------------------------------------------


def alive(proved: bool) -> Callable[[], AbstractContextManager[Taste]]:
    """The `open` of a target that is a worker behind its socket."""

    @contextmanager
    def opened() -> Iterator[Taste]:
        victim = live.Victim(proved)
        try:
            yield victim.shoot
        finally:
            victim.close()

    return opened


def seeds_of_members() -> list[bytes]:
    """Frames of each kind, alone and in a row."""
    frames = [Frame(kind, 1 + at % 3, body) for at, (kind, body) in enumerate(bodies())]
    call = next(frame for frame in frames if frame.kind == Kind.CALL)
    cancel = Frame(int(Kind.CANCEL), call.call_id, write(messages.Cancel(True)))
    chunk = Frame(int(Kind.CHUNK), 1, write_chunk(Chunk(0, 300)), (bytearray(300),))
    inline = Parcel(int(Kind.CALL), [(link_messages.INLINE, [])], call.body)
    return [
        *(live.input_of([frame]) for frame in frames),
        live.input_of([chunk, Frame(int(Kind.PARCEL), 1, write(inline), (bytearray(64),))]),
        live.input_of([call, cancel, Frame(int(Kind.GOODBYE), 0, b"")]),
        b"\0" + written(Kind.CALL, 1, call.body)[:-3],
    ]


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "frames",
            "the decoder of frames, whole and in pieces",
            (ProtocolError,),
            simple(taste_frames),
            seeds_of_frames,
            longest=512,
        ),
        Target(
            "seals",
            "the seals behind a handshake",
            (ProtocolError,),
            simple(taste_seals),
            seeds_of_seals,
            longest=512,
        ),
        Target(
            "acceptor",
            "a handshake, as the acceptor",
            (ProtocolError, PeerRefused),
            simple(lambda data: taste_handshake(data, False)),
            seeds_of_handshake,
            share=25,
        ),
        Target(
            "opener",
            "a handshake, as the opener",
            (ProtocolError, PeerRefused),
            simple(lambda data: taste_handshake(data, True)),
            seeds_of_handshake,
            share=25,
        ),
        Target(
            "messages",
            "bodies of messages of each kind",
            (ProtocolError,),
            simple(taste_messages),
            seeds_of_messages,
            share=280,
        ),
        Target(
            "families",
            "messages of links, channels and references",
            (ProtocolError,),
            simple(taste_families),
            seeds_of_families,
            share=190,
        ),
        Target(
            "published",
            "what workers say of published values",
            (ProtocolError,),
            simple(taste_published),
            lambda: [publication.write(message) for message in PUBLISHED],
        ),
        Target(
            "declared",
            "arguments of the runtime's own handlers",
            (ProtocolError,),
            simple(declared.taste),
            declared.seeds,
        ),
        Target(
            "recordings",
            "what workers send of a recording, and the trace of it",
            (ProtocolError,),
            simple(recordings.taste),
            recordings.seeds,
        ),
        Target("queued", "packed items of queues", (ProtocolError,), simple(taste_queued), seeds_of_queued),
        Target(
            "values", "values with their segments", (ProtocolError,), simple(taste_values), seeds_of_values, share=100
        ),
        Target("tensors", "tables of tensors", (ProtocolError,), simple(taste_tensors), seeds_of_tensors, share=60),
        Target(
            "blocks",
            "a channel of shared memory: blocks, offers, releases",
            (ProtocolError,),
            blocks,
            seeds_of_blocks,
        ),
        Target(
            "bulk",
            "chunks and the transfers they belong to",
            (ProtocolError,),
            simple(taste_bulk),
            seeds_of_bulk,
        ),
        Target(
            "references",
            "reference counting: a table, and what two others tell it",
            (ProtocolError,),
            simple(taste_references),
            seeds_of_references,
            share=20,
        ),
        Target(
            "records",
            "what stands in the rendezvous store where a member ought to be",
            (RendezvousError,),
            simple(stored.taste_records),
            stored.seeds_of_records,
            share=30,
        ),
        Target(
            "lives",
            "a worker at a rendezvous store where somebody has written: rosters, verdicts, offers, counters",
            (RendezvousError,),
            stored.lives,
            stored.seeds_of_lives,
        ),
        Target(
            "trees",
            "values without pickle",
            (ProtocolError, SerializationError),
            simple(trees.taste),
            trees.seeds,
            share=60,
        ),
        Target(
            "parts",
            "tensors of all kinds, of whatever parts",
            (ProtocolError, SerializationError),
            simple(parts.taste),
            parts.seeds,
        ),
        Target(
            "plain",
            "pickles of plain values, and what they cost",
            (ProtocolError,),
            plain,
            seeds_of_plain,
        ),
        Target(
            "tls",
            "TLS, before a certificate was shown",
            (ProtocolError, PeerRefused, ConnectionResetError),
            encrypted.before,
            encrypted.seeds_of_before,
        ),
        Target(
            "encrypted",
            "TLS behind its handshake: what was changed on the way, and rubbish",
            (ProtocolError, PeerRefused, ConnectionResetError),
            encrypted.behind,
            seeds_of_encrypted,
            longest=512,
        ),
        Target(
            "strangers",
            "a live worker behind its socket, before the proof",
            (),
            alive(False),
            seeds_of_handshake,
        ),
        Target(
            "members",
            "a live worker behind its socket, after the proof",
            (),
            alive(True),
            seeds_of_members,
            proved=True,
        ),
    )
}
