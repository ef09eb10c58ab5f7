"""A published value as bytes, and back: the body of a message, and its buffers one after the other.

Tensors on devices are copied to the host once, into page-locked memory. A reader may have all tensors moved to a device
of its own; those that share a storage share one there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ... import foreign
from ...channels import AnyBuffer, layout
from ...channels.accelerator import Accelerator, DeviceBuffer, Event
from ...channels.arena import Span, lay_out
from ...channels.routes import Route
from ...errors import NotAllowed, ProtocolError, SerializationError
from ...protocol.codec import Incoming, decode_values
from ...protocol.frames import Buffer
from ...protocol.messages import Reply, Values, read_values, write
from ...protocol.plain import names_nothing
from ...protocol.reference_messages import PassedReference
from ...protocol.trace_context import TraceContext
from ..calls.values import decode, encode
from ..engine.engine import Engine

# The most bytes of an answer with a version, apart from the bodies: most of them name the existing slots. And the bytes
# for the place of one buffer.
_ROOM, _ROOM_FOR_BUFFER = 512, 19


@dataclass(frozen=True)
class _AnyReader:
    """Stands for any reader in `encode`."""

    safe: bool
    max_body: int
    max_segment: int
    same_main: bool = True
    other_python: str = ""  # a reader sees which Python version made its code


class Content(NamedTuple):
    """A value that was taken apart.

    bodies: the message for readers that run our main module, and a second one for other readers if it differs. If the
    second has buffers of its own, it says how many of the first ones are not its own; its own are the last.
    buffers: the bytes of the tensors, borrowed from them. spans, size: where the buffers will lie, and the bytes of
    all.
    marks: events of devices that copy into the buffers; wait for them before reading. trace: the trace context in which
    it is published.
    """

    bodies: tuple[bytes, ...]
    buffers: Sequence[Buffer]
    spans: list[Span]
    size: int
    marks: Sequence[Event] = ()
    trace: TraceContext | None = None


def take_apart(name: str, value: object, engine: Engine, driver: Accelerator | None = None) -> Content:
    """The content of a value for publication under `name`. Raises SerializationError.

    driver: of the devices that tensors may lie on. Their tensors are copied on the current streams of this thread.
    """
    options = engine.options
    route = None if driver is None else _to_host(driver)
    reader = _AnyReader(engine.safe, options.max_frame_bytes, options.max_tensor_bytes)
    what = f"the value published as {name!r}"
    try:
        body, found = _encode(value, reader, route, other_main=False)
        other_body = body
        if b"load_main" in body:  # as the codec names what the main module defines
            other_body, others = _encode(value, reader, route, other_main=True)
            if len(others) != len(found):  # a class that goes by value may bring tensors of its own
                other_body = write(Reply(Values([other_body, len(found)])))
                found = [*found, *others]
    except SerializationError as error:
        raise SerializationError(f"{what} {error}") from error.__cause__
    spans, size = lay_out(map(len, found))
    bodies = (body,) if other_body == body else (body, other_body)
    # Each reader gets both forms, in one message with the places of the bytes.
    room = _ROOM + len(engine.record.main) + _ROOM_FOR_BUFFER * len(spans)
    needs = sum(map(len, bodies)) + room
    if needs > options.max_frame_bytes:
        raise SerializationError(
            f"{what} is too large: for a reader the message takes up to {needs} bytes, tensors and arrays apart, and "
            f"the limit is {options.max_frame_bytes} (max_frame_bytes). Publish large data as tensors or arrays"
        )
    if size > options.max_tensor_bytes:
        raise SerializationError(
            f"{what} takes {size} bytes; the limit is {options.max_tensor_bytes} (max_tensor_bytes)"
        )
    buffers, marks = (found, ()) if driver is None else _bring_to_host(driver, found)
    return Content(bodies, buffers, spans, size, marks)


def _to_host(driver: Accelerator) -> Route:
    """From every device to the host."""
    devices = [torch.device(driver.kind, index) for index in range(driver.count())]
    return Route(driver, dict.fromkeys(devices, torch.device("cpu")), "that subscribes", "publish tensor.cpu()")


def _bring_to_host(driver: Accelerator, found: Sequence[AnyBuffer]) -> tuple[Sequence[Buffer], Sequence[Event]]:
    """The buffers with those on devices on their way to the host, and what to wait for before these are read."""
    buffers: list[Buffer] = []
    streams: dict[int, object] = {}
    for buffer in found:
        if isinstance(buffer, DeviceBuffer):
            stream = streams.setdefault(buffer.index, driver.current(buffer.index))
            pinned = driver.pinned(len(buffer))
            driver.move(pinned, buffer.carrier, stream)
            buffers.append(pinned.numpy().data)
        else:
            buffers.append(buffer)
    return buffers, [driver.mark(stream) for stream in streams.values()]


def _encode(value: object, reader: _AnyReader, route: Route | None, *, other_main: bool) -> tuple[bytes, Sequence[Any]]:
    body, buffers, out = encode(Reply(Values([value])), reader, route, other_main=other_main)
    if out is not None:  # it has a reference, which would have to be counted
        out.unsend()
        raise SerializationError("holds a remote reference, which is sent to one worker and not published")
    return body, buffers


def choose(bodies: Sequence[object], main: str, engine: Engine) -> object:
    """The body in the form for this worker. A single body serves both kinds of readers.

    main: the main module of the publisher.
    """
    return bodies[-1] if main != engine.record.main else bodies[0]


def put_together(
    body: object,
    data: Buffer,
    spans: Sequence[Sequence[int]],
    engine: Engine,
    *,
    plain: bool,
    device: torch.device | None = None,
) -> Any:
    """The value, over the bytes of its buffers. device: where its tensors are moved to; None: they stay.

    plain: whether the rights of a worker that published or handed on the value exclude pickles that name classes or
    functions; such a pickle raises NotAllowed. Also raises the errors of unpickling, and ProtocolError for invalid
    bytes.
    """
    if type(body) is not bytes:
        raise ProtocolError("a version without what it says of its value")
    message = read_values(body)
    if len(message.values) == 2:
        body, others = message.values
        if type(body) is not bytes or type(others) is not int or not 0 <= others <= len(spans):
            raise ProtocolError("a version in an invalid form")
        message, spans = read_values(body), spans[others:]
    if plain and not engine.safe and not names_nothing(message.pickled):
        raise NotAllowed(
            f"worker {engine.name!r} has a rule in its option allow for the role of a worker that published this, or "
            "handed it on, and reads no pickle of that role that names a class or a function, as the pickle of a dict "
            "of tensors does; publish each tensor by itself, or set serialization='safe'"
        )
    view = memoryview(data)
    segments = [view[start : start + length] for start, length in spans]
    if device is None:
        values = decode(message, segments, _no_references, safe=engine.safe)
    else:
        values = _decode_on(device, message, segments, engine.safe)
    if len(values) != 1:
        raise ProtocolError(f"a version with {len(values)} values")
    return values[0]


def _decode_on(device: torch.device, said: Values, segments: Sequence[Buffer], safe: bool) -> list[object]:
    """As `decode`, with the tensors on a device."""
    if said.references or not 0 <= said.buffers <= len(segments):
        raise ProtocolError("a published value with remote references, or with more buffers than came")
    tensors = _moved(layout.rebuild(said.table or (), segments), device)
    return decode_values(said, Incoming(tensors, (), None, safe), segments[len(segments) - said.buffers :])


def _moved(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors on a device. A shared storage is moved once, and is shared there."""
    storages: dict[int, torch.UntypedStorage] = {}
    moved: list[torch.Tensor] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        there = storages.get(storage._cdata)
        if there is None:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            there = storages[storage._cdata] = flat.to(device).untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        made = torch.empty(0, dtype=tensor.dtype, device=device).set_(there, *place)
        made = made.conj() if tensor.is_conj() else made
        made = torch._neg_view(made) if tensor.is_neg() else made
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        moved.append(made if made.requires_grad or not tensor.requires_grad else made.requires_grad_())
    return moved


def _no_references(passed: Sequence[PassedReference]) -> Sequence[object]:
    raise ProtocolError("a published value with remote references")


def unreadable(name: str, version: int, error: BaseException) -> str:
    """The error text for a version whose value cannot be read."""
    return f"version {version} of {name!r} cannot be read here: {foreign.said(error)}"
