"""Whole messages: from values through encode, frame and decoder back to values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch

from aiorpc.channels.inline import allocate
from aiorpc.channels.layout import EMBEDDED_SIZE
from aiorpc.errors import ProtocolError, SerializationError
from aiorpc.protocol.frames import DIRECT_SIZE, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.messages import Recorded, Reply, Values, read_values
from aiorpc.protocol.packing import pack
from aiorpc.protocol.reference_messages import PassedReference, ReferenceId
from aiorpc.runtime.calls.values import decode, encode


class To:
    """A worker that messages go to."""

    same_main = True
    other_python = ""

    def __init__(self, max_body: int = 1 << 20, max_segment: int = 1 << 40) -> None:
        self.max_body = max_body
        self.max_segment = max_segment
        self.safe = False


def deliver(values: list[Any], *, to: To | None = None) -> list[Any]:
    """Through encode, frame, decoder and decode: the whole way but for the socket."""
    body, segments, _ = encode(Reply(Values(values)), to or To())
    decoder = FrameDecoder(max_body=1 << 20, max_segment=1 << 30, allocate=allocate)
    frames = []
    for part in encode_frame(Kind.REPLY, 1, body, segments):
        rest = memoryview(part)
        while rest:
            buffer = decoder.get_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            frames += decoder.received(count)
            rest = rest[count:]
    (frame,) = frames
    return decode(read_values(frame.body), frame.segments, lambda wires: [])


@pytest.mark.parametrize(
    ("values", "position"),
    [
        (["x", b"y" * 2000, 3], 1),
        (["x" * 2000], 0),
        ([1, "x", ["long"] * 5 + ["y" * 2000]], 2),
        ([torch.ones(2), "x" * 2000], 1),
    ],
)
def test_message_longer_than_the_limit_is_refused_at_the_sender(values: list[Any], position: int) -> None:
    """A body that the peer would not take is refused here, naming the value; the connection never sees it."""
    with pytest.raises(SerializationError, match=r"limit is 1000 \(max_frame_bytes\)") as caught:
        encode(Reply(Values(values)), To(max_body=1000))
    assert caught.value.position == position
    large = torch.ones(5000)
    assert torch.equal(deliver([large], to=To(max_body=1000))[0], large), "tensors do not count"


@pytest.mark.parametrize("values", [[1, torch.ones(3000)], [{"t": torch.ones(3000)}], [numpy.ones(2000)]])
def test_tensor_longer_than_the_limit_is_refused_at_the_sender(values: list[Any]) -> None:
    """A tensor or array that the peer would close the connection over is refused here; one that just fits is not."""
    with pytest.raises(SerializationError, match=r"limit is 10000 \(max_tensor_bytes\)"):
        encode(Reply(Values(values)), To(max_segment=10_000))
    deliver(values, to=To(max_segment=16_000))


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [1],
        [None, []],
        [[None]],
        [[[None], [], [], None, 0, None, []]],
        [Values([None], buffers=2, pickled=b"N.")],
        [Values([None], buffers="x", pickled=b"N.")],  # type: ignore[arg-type]  # what a peer may send
        [Values([None], buffers=-1, pickled=b"N.")],
        [Values([None], tensors_at=[0], table=5)],  # type: ignore[arg-type]  # what a peer may send
        [Values([None], tensors_at=[0], table=[(9, 0, 0, [1], None, 0)])],  # type: ignore[list-item]  # the same
    ],
)
def test_fields_that_are_no_message(fields: list[Any]) -> None:
    """Fields that are too few, of other types, or do not belong together give ProtocolError."""
    with pytest.raises(ProtocolError):
        decode(read_values(pack(fields)), [bytearray(4)], lambda wires: [])


@pytest.mark.parametrize(
    "others", [[], [1 << 70], [torch.ones(3)], [torch.ones(3, requires_grad=True).to_sparse(), torch.ones(1)]], ids=str
)
def test_what_is_recorded_is_no_leaf_there(others: list[Any]) -> None:
    """Inside of an autograd context, by the quick way and by the general one; outside it arrives as a leaf."""
    values = [torch.ones(2, requires_grad=True), *others]

    class Recorder:
        def record(self, tensors: Any, on_unsent: list[Any]) -> Recorded:
            recorded.append(len(tensors))
            on_unsent.append(lambda: undone.append(len(tensors)))
            return Recorded(5, 1, [0], [[]])

    recorded: list[int] = []
    undone: list[int] = []
    arrived: list[Any] = []

    def track(said: Any, tensors: Any) -> Any:
        arrived.append(said)
        return tensors, None

    body, _, out = encode(Reply(Values(values)), To(), None, Recorder())
    assert not decode(read_values(body), [], lambda wires: [], track)[0].requires_grad
    assert arrived == [Recorded(5, 1, [0], [[]])]
    assert out is not None
    out.unsend()
    assert recorded == undone
    assert deliver(values)[0].requires_grad


def test_references_are_taken_even_when_the_values_cannot_be_read() -> None:
    """The senders of references wait for an answer that only taking them gives: they come before anything can fail."""
    taken: list[PassedReference] = []
    reference = PassedReference(ReferenceId(0, 1), 0, ReferenceId(1, 1))

    def load(passed: Sequence[PassedReference]) -> list[Any]:
        taken.extend(passed)
        return []

    broken = Values([None], opaque_at=[0], pickled=b"no pickle", references=[reference])
    with pytest.raises(Exception, match=r"pickle|load key|invalid"):
        decode(broken, [], load)
    assert taken == [reference]


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a dict"])
def test_what_is_too_long_is_refused_before_anything_is_written(nested: bool) -> None:
    """Text and bytes that no message can hold: nothing behind them is pickled, nor are they themselves."""
    pickled: list[str] = []

    class Tells:
        def __reduce__(self) -> tuple[Any, ...]:
            pickled.append("it")
            return int, ()

    long = bytes(3 << 20)
    values = [{"long": long, "behind": Tells()}] if nested else [long, Tells()]
    with pytest.raises(SerializationError, match=r"too large: .* more than|too large: .* at least 3145728") as caught:
        encode(Reply(Values(values)), To(max_body=2 << 20))
    assert not pickled and caught.value.position == 0
    body, _, _ = encode(Reply(Values(values)), To(max_body=4 << 20))
    assert pickled and len(body) > len(long)


@pytest.mark.parametrize("size", [1, EMBEDDED_SIZE // 4, EMBEDDED_SIZE // 4 + 1, DIRECT_SIZE // 4, DIRECT_SIZE])
def test_tensors_around_each_threshold(size: int) -> None:
    """Embedded, copied or lent, alone or beside others, a tensor arrives the same, and writable."""
    tensor = torch.arange(float(size))
    for values in ([tensor], [tensor, torch.ones(2)], [[tensor], tensor]):
        arrived = deliver(values)[0]
        arrived = arrived[0] if isinstance(arrived, list) else arrived
        assert torch.equal(arrived, tensor)
        arrived += 1
        assert tensor[0] == 0
