"""Describes messages for fault injection, and keeps the order of delayed messages.

Frames of one call keep their order, and so do messages of reference counting: later ones wait for a delayed one. Calls
may overtake each other, as with large buffers. Nothing overtakes a message of reference counting to the same worker,
because a call may use the reference (docs/inside/counting.md).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..locks import RLock
from ..protocol import reference_messages
from ..protocol.frames import CALL, ERROR, ITEM, REPLY, Kind
from ..protocol.messages import Call, Fetch, Method, ObjectMethod
from ..protocol.packing import unpack
from ..runtime.caller.future import CallFuture
from ..runtime.caller.known import FunctionEntry
from ..runtime.caller.member_call import MemberCall
from ..runtime.calls.current import ServedCall
from ..runtime.calls.functions import find_name, resolve
from ..runtime.engine.engine import Engine
from ..runtime.engine.observing import Passage

#: Of messages to one worker, by its incarnation: what they are, and of which call.
Lane = tuple[str, str, int]

_AUTOGRAD = "aiorpc.autograd"
_OF_CALLERS = frozenset((CALL, int(Kind.CANCEL), int(Kind.CREDIT)))
_OF_CALLEES = frozenset((REPLY, ERROR, ITEM))


class MessageKind(StrEnum):
    """What a message is, as rules name it.

    CALL: a call of a function, or of a method of a reference's value. REMOTE: a call that creates the value of a
    reference. FETCH: the value of a reference is asked for. CANCEL: the caller has given up, or its time is over.
    REPLY: the result or error of a call. ITEM: of a stream. REFERENCE: counting of references. GRADIENT: a step of a
    backward pass. CONTEXT: an autograd context has ended.
    """

    CALL = "call"
    REMOTE = "remote"
    FETCH = "fetch"
    CANCEL = "cancel"
    REPLY = "reply"
    ITEM = "item"
    REFERENCE = "reference"
    GRADIENT = "gradient"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that is about to be sent.

    kind: what it is. worker: the name of the receiver. name: of the function, as ``module:qualname``, or the
    method; of a message of reference counting its tag (ADD, ADDED, DEL ...). function: the function itself, for calls.
    reference: the id of the reference that is created, fetched or whose method is called. autograd: the id of the
    autograd context that a call is made in.
    """

    kind: MessageKind
    worker: str
    name: str = ""
    function: Any = None
    reference: tuple[int, int] | None = None
    autograd: int | None = None

    def is_of(self, function: object) -> bool:
        """Whether it concerns a function, given by itself or by its name (``qualname`` alone, or with its module)."""
        if isinstance(function, str):
            return self.name == function or self.name.partition(":")[2] == function
        return self.function is function or self.name == find_name(function, same_main=True)


def describe(passage: Passage) -> SentMessage | None:
    """The description of a message for rules; None for the runtime's own messages, and for calls that were given up."""
    kind, call, worker = passage.kind, passage.call, passage.record.name
    if kind == Kind.CANCEL:
        return SentMessage(MessageKind.CANCEL, worker)
    if kind == Kind.REFERENCE:
        message = reference_messages.read(unpack(passage.body))
        return SentMessage(MessageKind.REFERENCE, worker, reference_messages.MESSAGES.word(message))
    if kind == CALL and isinstance(call, CallFuture | MemberCall) and (_of_autograd(call.entry) or not call.system):
        return _describe_call(passage.message(), call.entry, worker)
    if kind in _OF_CALLEES and isinstance(call, ServedCall) and not (call.system or call.cancelled):
        return SentMessage(MessageKind.ITEM if kind == ITEM else MessageKind.REPLY, worker, call.function)
    return None


def _of_autograd(entry: FunctionEntry) -> bool:
    """Whether a call is a step of a backward pass, or the end of a context: runtime calls that users cause."""
    return entry.name.startswith((_AUTOGRAD + ".", _AUTOGRAD + ":"))


def _describe_call(message: Call, entry: FunctionEntry, worker: str) -> SentMessage:
    kind, function, reference = MessageKind.CALL, None, None
    match message.function:
        case Fetch(owner, number, _):
            kind, reference = MessageKind.FETCH, (owner, number)
        case Method(owner, number, _, _):
            reference = (owner, number)
        case ObjectMethod():
            pass
        case _:
            function = entry.function if entry.number < 0 else resolve(entry.name).function
    if message.creates is not None:
        owner, number, _ = message.creates
        kind, reference = MessageKind.REMOTE, (owner, number)
    elif _of_autograd(entry):
        kind = MessageKind.CONTEXT if entry.name.endswith(":forget") else MessageKind.GRADIENT
    return SentMessage(kind, worker, entry.name, function, reference, message.autograd)


def lane_of(passage: Passage) -> Lane | None:
    """The lane of a message, which keeps its order; None for a message of no call and no reference counting."""
    peer, kind = passage.record.incarnation, passage.kind
    if kind in _OF_CALLERS:
        return peer, "caller", passage.call_id
    if kind in _OF_CALLEES:
        return peer, "callee", passage.call_id
    return _counting(peer) if kind == Kind.REFERENCE else None


def _counting(peer: str) -> Lane:
    return peer, "references", 0


class Lanes:
    """Waiting messages, each lane in its order. Any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[Lane, deque[tuple[float, Callable[[], None]]]] = {}
        # Held while messages are sent: a concurrent flush of the lane sends later ones after them, and none twice.
        self._lock = RLock()

    @property
    def waiting(self) -> bool:
        """Whether a message has been delayed and not sent yet."""
        return bool(self._lanes)

    def follow(self, lane: Lane, send: Callable[[], None]) -> bool:
        """Queue it after waiting messages of its lane or of reference counting; False if there are none."""
        with self._lock:
            waiting = self._lanes.get(self._lane_behind(lane))
            if waiting is not None:
                waiting.append((0.0, send))
            return waiting is not None

    def hold(self, lane: Lane, delay: float, send: Callable[[], None]) -> None:
        """Send it later by some seconds."""
        with self._lock:
            lane = self._lane_behind(lane)
            waiting = self._lanes.setdefault(lane, deque())
            waiting.append((time.monotonic() + delay, send))
            first = len(waiting) == 1
        if first:
            self._look_later(lane, delay)

    def _lane_behind(self, lane: Lane) -> Lane:
        counting = _counting(lane[0])
        return counting if lane not in self._lanes and counting in self._lanes else lane

    def _look_later(self, lane: Lane, delay: float) -> None:
        self._engine.call_on_loop(self._engine.loop.call_later, delay, self._release, lane)

    def _release(self, lane: Lane) -> None:
        """Send the due messages of a lane, in order; on the loop."""
        with self._lock:
            waiting = self._lanes.get(lane)
            while waiting:
                due, send = waiting[0]
                left = due - time.monotonic()
                if left > 0:
                    self._look_later(lane, left)
                    return
                waiting.popleft()
                send()
            self._lanes.pop(lane, None)

    def flush(self) -> None:
        """Send all waiting messages at once."""
        with self._lock:
            lanes, self._lanes = self._lanes, {}
            for waiting in lanes.values():
                while waiting:
                    waiting.popleft()[1]()
