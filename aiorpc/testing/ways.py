"""Where faults on purpose meet the messages of one worker: in front of methods of its peers and services.

    peer.call      says which call the frame is about that the same thread sends next
    peer.send, peer._send_buffers, connection.send, link.post    where a frame or parcel meets the rules (`faults`)

Frames of one call, and the messages of reference counting, keep their order: what comes behind a delayed one waits with
it. Calls may overtake each other, as they may when their buffers are large.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import RpcError
from ..protocol.codec import unpack
from ..protocol.frames import CALL, ERROR, HEAD, ITEM, PARCEL, REPLY, Buffer, Kind
from ..protocol.reference_messages import Tag
from ..runtime.callee.resolver import FETCH
from ..runtime.calls.functions import describe, find_name
from ..runtime.engine.current import CallContext

if TYPE_CHECKING:
    from ..runtime.callee.service import Service
    from ..runtime.caller.future import CallFuture
    from ..runtime.caller.peer import Peer
    from ..runtime.links.link import Parcel
    from .faults import Faults

_AUTOGRAD = "aiorpc.autograd"
# Parcels of the device channel have numbers from here on.
_NOT_CALLS = 1 << 63


class MessageKind(StrEnum):
    """What a message is, as rules name it."""

    CALL = "call"  # of a function, or of a method of a reference's value
    REMOTE = "remote"  # a call that creates the value of a reference
    FETCH = "fetch"  # the value of a reference is asked for
    CANCEL = "cancel"  # the caller has given up, or its time is over
    REPLY = "reply"  # the result or error of any call that is not the runtime's own
    ITEM = "item"  # of a stream
    REFERENCE = "reference"  # counting of references
    GRADIENT = "gradient"  # a step of a backward pass
    CONTEXT = "context"  # an autograd context has ended


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that is about to be sent.

    worker: the receiver's name. name: of the function, as ``module:qualname``, or the method's name; of a message of
    reference counting its tag (ADD, ADDED, DEL ...). function: the function itself, for calls. reference: the id of the
    reference that is created, fetched or whose method is called.
    """

    kind: MessageKind
    worker: str
    name: str = ""
    function: Any = None
    reference: tuple[int, int] | None = None

    def is_of(self, function: object) -> bool:
        """Whether it is about that function, or one of that name (``qualname`` alone, or with its module)."""
        if isinstance(function, str):
            return self.name == function or self.name.partition(":")[2] == function
        return self.function is function or self.name == find_name(function, same_main=True)


def _nothing() -> None:
    """Where there is nothing to undo."""


class Way:
    """The messages from here to one place: they are sent, or go by a rule, in order for each lane."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._worker = faults.worker
        self._lanes: dict[object, deque[tuple[float, Callable[[], None]]]] = {}
        self._lock = threading.Lock()

    def go(
        self,
        message: SentMessage | None,
        lane: object,
        send: Callable[[], None],
        *,
        lost: Callable[[], object] = _nothing,
        refuse: Callable[[RpcError], None] = lambda error: None,
    ) -> None:
        """A message wants to leave. lost: called if it does not. refuse: told why it cannot be sent."""
        fault = self.faults.find(message) if message is not None else None
        if fault is None:
            if not self._follow(lane, send):
                send()
        elif fault.action == "delay":
            self._hold(lane, fault.delay, send)
        else:
            lost()
            if fault.action == "fail":
                assert message is not None, "a rule has hit it"
                refuse(fault.error or RpcError(f"a message to {message.worker!r} could not be sent (on purpose)"))

    @property
    def waiting(self) -> bool:
        """Whether a message has been delayed and not sent yet."""
        return bool(self._lanes)

    def _follow(self, lane: object, send: Callable[[], None]) -> bool:
        with self._lock:
            waiting = self._lanes.get(lane)
            if waiting is not None:
                waiting.append((0.0, send))
            return waiting is not None

    def _hold(self, lane: object, delay: float, send: Callable[[], None]) -> None:
        with self._lock:
            waiting = self._lanes.setdefault(lane, deque())
            waiting.append((time.monotonic() + delay, send))
            first = len(waiting) == 1
        if first:
            self._look_later(lane, delay)

    def _look_later(self, lane: object, delay: float) -> None:
        self._worker.call_on_loop(self._worker.loop.call_later, delay, self._release, lane)

    def _release(self, lane: object) -> None:
        """Send what is due of that lane, in order; on the loop."""
        while True:
            with self._lock:
                waiting = self._lanes.get(lane)
                if waiting is None:
                    return
                if not waiting:
                    del self._lanes[lane]
                    return
                due, send = waiting[0]
                left = due - time.monotonic()
                if left > 0:
                    break
            send()
            with self._lock:
                waiting.popleft()
        self._look_later(lane, left)

    def flush(self) -> None:
        """Send all that waits, at once."""
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for waiting in lanes.values():
            for _, send in waiting:
                send()


class Calls(Way):
    """What a worker sends as a caller: in front of three methods of a peer."""

    def __init__(self, faults: Faults, peer: Peer) -> None:
        super().__init__(faults)
        self._peer = peer
        self._call = peer.call
        self._send = peer.send
        self._send_buffers = peer._send_buffers
        self._local = threading.local()  # message: of the call that this thread is sending
        faults.put(peer, "call", self.call)
        faults.put(peer, "send", self.send)
        faults.put(peer, "_send_buffers", self.send_buffers)

    def call(
        self, function: Any, *args: Any, extra: Any = None, system: bool = False, depth: int = 2, **kwargs: Any
    ) -> CallFuture:
        before = getattr(self._local, "message", None)
        self._local.message = None if system else self._describe(function, extra)
        try:
            return self._call(function, *args, extra=extra, system=system, depth=depth + 1, **kwargs)
        finally:
            self._local.message = before

    def _describe(self, function: Any, extra: Any) -> SentMessage:
        kind, worker = MessageKind.CALL, self._peer.name
        reference = tuple(extra[:2]) if type(extra) is list else None
        if type(function) is list:
            kind = MessageKind.FETCH if function[0] == FETCH else kind
            reference, name, function = reference or tuple(function[1:3]), str(function[-1]), None
        else:
            name = find_name(function, same_main=True) or describe(function)
        if type(extra) is list:
            kind = MessageKind.REMOTE
        elif name.startswith((_AUTOGRAD + ".", _AUTOGRAD + ":")):
            kind = MessageKind.CONTEXT if name.endswith(":forget") else MessageKind.GRADIENT
        return SentMessage(kind, worker, name, function, reference)

    def send(self, frame: Sequence[Buffer], *, urgent: bool = False, later: bool = False, call_id: int = 0) -> None:
        # later: not heeded, as a delayed message might miss what it should leave with.
        number, kind, body = _read(frame)
        message: SentMessage | None = None
        lane: object = number
        if kind == CALL:
            message = getattr(self._local, "message", None)
        elif kind == Kind.CANCEL:
            message = SentMessage(MessageKind.CANCEL, self._peer.name)
        elif kind == Kind.REFERENCE:
            lane = MessageKind.REFERENCE
            message = SentMessage(MessageKind.REFERENCE, self._peer.name, Tag(unpack(body)[0]).name)
        send = partial(self._send, frame, urgent=urgent, call_id=call_id)
        self.go(message, lane, send, refuse=partial(self._refuse, number))

    def send_buffers(self, buffered: Any) -> None:
        message: SentMessage | None = getattr(self._local, "message", None)
        self.go(
            message,
            buffered.call_id,
            partial(self._send_buffers, buffered),
            lost=buffered.out.unsend if buffered.out is not None else _nothing,
            refuse=partial(self._refuse, buffered.call_id),
        )

    def _refuse(self, call_id: int, error: RpcError) -> None:
        self._peer._settle(call_id, error)


class Answers(Way):
    """What a worker sends to one that called it: in front of methods of a service, its connection and its link."""

    def __init__(self, faults: Faults, service: Service) -> None:
        super().__init__(faults)
        self._service = service
        self._take = service._take
        self._send = service.connection.send
        self._post = service.link.post
        self._local = threading.local()  # context: of the call that this thread has taken to answer it
        faults.put(service, "_take", self.take)
        faults.put(service.connection, "send", self.send)
        faults.put(service.link, "post", self.post)

    def take(self, call_id: int) -> CallContext | None:
        context = self._local.context = self._take(call_id)
        return context

    def _describe(self, kind: int, call_id: int) -> SentMessage | None:
        """None for what the runtime says for itself, and for answers that nobody waits for any more."""
        last = getattr(self._local, "context", None)
        context = self._service.calls.get(call_id) if kind == ITEM else last
        if context is None or context.call_id != call_id or context.system:
            return None
        what = MessageKind.ITEM if kind == ITEM else MessageKind.REPLY
        return SentMessage(what, self._service.peer.name, context.function)

    def send(self, frame: Sequence[Buffer], *, urgent: bool = False, more: bool = False) -> None:
        call_id, kind, _ = _read(frame)
        if kind in (REPLY, ERROR, ITEM):
            self.go(self._describe(kind, call_id), call_id, partial(self._send, frame, urgent=urgent))
        else:
            self._send(frame, urgent=urgent, more=more)

    def post(self, parcel: Parcel, *, urgent: bool = False) -> None:
        call_id, kind, body = _read(parcel.frame)
        if kind != PARCEL or call_id >= _NOT_CALLS:
            self._post(parcel, urgent=urgent)  # which comes to `send`
            return
        message = self._describe(int(unpack(body)[0]), call_id)
        lost = partial(self._service.link.withdraw, parcel)
        self.go(message, call_id, partial(self._post, parcel, urgent=urgent), lost=lost)


def _read(frame: Sequence[Buffer]) -> tuple[int, int, bytes]:
    """Call id, kind and body of a frame."""
    call_id, length, count, kind, _ = HEAD.unpack_from(frame[0])
    start = HEAD.size + 8 * count
    return call_id, kind, bytes(frame[0][start : start + length])
