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
from aiorpc.runtime.calls import values as calls_values
from aiorpc.runtime.calls.values import Results, decode, encode


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


def test_messages_with_all_kinds_of_values() -> None:
    """Plain values, containers, tensors alone and inside, arrays and sparse tensors in one message."""
    tensor, array = torch.randn(300, 300), numpy.arange(90_000)
    sent = [1, tensor, {"t": tensor[1], "a": array}, "text", torch.eye(2).to_sparse(), torch.empty(0)]
    number, whole, inside, text, sparse, empty = deliver(sent)
    assert (number, text, empty.shape) == (1, "text", (0,))
    assert torch.equal(whole, tensor)
    whole[1, 0] = 5
    assert inside["t"][0] == 5, "they shared a storage, so they still do"
    assert numpy.array_equal(inside["a"], array)
    assert torch.equal(sparse.to_dense(), torch.eye(2))


def test_module_arrives_with_its_parameters_and_buffers() -> None:
    """An nn.Module arrives ready to train: same outputs, parameters are Parameters, tied weights stay tied."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    module[2].weight = module[0].weight
    (arrived,) = deliver([module])
    assert arrived[2].weight is arrived[0].weight
    assert all(type(parameter) is torch.nn.Parameter for parameter in arrived.parameters())
    inputs = torch.randn(4, 3)
    assert torch.equal(arrived(inputs), module(inputs))
    arrived(inputs).sum().backward()
    assert arrived[0].weight.grad is not None


def test_state_dict_arrives() -> None:
    """A whole state_dict arrives in its order and type, and loads."""
    module = torch.nn.LSTM(4, 5, num_layers=2)
    state = module.state_dict()
    (arrived,) = deliver([state])
    assert type(arrived) is type(state)
    assert list(arrived) == list(state)
    other = torch.nn.LSTM(4, 5, num_layers=2)
    other.load_state_dict(arrived)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))


def test_optimizer_state_and_generator_arrive() -> None:
    """What training keeps besides parameters: an optimizer's state_dict and a generator's state."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    state, random = deliver([optimizer.state_dict(), torch.get_rng_state()])
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert torch.equal(random, torch.get_rng_state())


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


def test_message_of_more_tensors_than_a_frame_takes_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """More segments than the limit are refused before they are sent."""
    monkeypatch.setattr(calls_values, "MAX_SEGMENTS", 3)
    tensors = [torch.ones(EMBEDDED_SIZE) for _ in range(4)]
    with pytest.raises(SerializationError, match="has 4 tensors and arrays; the limit is 3"):
        encode(Reply(Values(tensors)), To())
    assert len(deliver(tensors[:3])) == 3


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


def test_several_results_travel_side_by_side() -> None:
    """Those of the runtime's own calls: no pickle, which a tuple would need."""
    body, segments, _ = encode(Reply(Values(list(Results((b"names", torch.ones(3)))))), To())
    said = read_values(body)
    assert not said.opaque_at
    names, tensor = decode(said, [bytearray(segment) for segment in segments], lambda wires: [])
    assert names == b"names" and tensor.eq(1).all()


@pytest.mark.parametrize("others", [[], [1 << 70]], ids=["quick", "general"])
def test_what_was_recorded_of_a_message_that_is_too_long_is_undone(others: list[Any]) -> None:
    """Nothing will ask for the gradient of a tensor that has not left."""

    class Recorder:
        def record(self, tensors: Any, on_unsent: list[Any]) -> Recorded:
            on_unsent.append(lambda: undone.append(len(tensors)))
            return Recorded(5, 1, [0], [[]])

    undone: list[int] = []
    with pytest.raises(SerializationError, match="too large"):
        encode(
            Reply(Values([torch.ones(2, requires_grad=True), "x" * 999, *others])), To(max_body=1000), None, Recorder()
        )
    assert undone == [1]


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


def test_failed_encoding_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever encoding did elsewhere is undone when the message cannot be sent."""
    undone: list[str] = []

    class Pinned:
        def __reduce__(self) -> tuple[Any, ...]:
            out = messages_outgoing()
            out.on_unsent.append(lambda: undone.append("pin"))
            return int, ()

    class Refuses:
        def __reduce__(self) -> tuple[Any, ...]:
            raise RuntimeError("not me")

    with pytest.raises(SerializationError, match="not me"):
        encode(Reply(Values([Pinned(), Refuses()])), To())
    assert undone
    undone.clear()
    with pytest.raises(SerializationError, match="too large"):
        encode(Reply(Values([Pinned(), "x" * 999])), To(max_body=1000))
    assert undone == ["pin"]


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


def messages_outgoing() -> Any:
    from aiorpc.protocol.codec import outgoing

    out = outgoing.get()
    assert out is not None
    return out


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
