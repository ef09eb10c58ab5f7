"""Observers of the messages that a worker sends: what they are shown, what they may do, and how they are asked.

They are for faults on purpose (`aiorpc.testing`). Calls have observers of their own (`call_events`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ...protocol.frames import HEAD, Buffer
from ...protocol.identity import WorkerRecord
from ...protocol.messages import read


@dataclass(frozen=True, slots=True)
class Passage:
    """A message that is about to leave by a link.

    kind, call_id, body: of the message, as on the wire. If its buffers travel by channels, they are those of the
    message itself, not of the PARCEL. size: the bytes of the body and of all buffers, wherever they travel; the same
    at both ends. What goes over a connection besides, heads and seals, is in the counts of connections.
    call: what the runtime keeps of the call that the message belongs to: a `CallFuture` at the caller, a `ServedCall`
    at the callee; None if there is none, or if it has ended. record: of the worker at the other end.
    """

    kind: int
    call_id: int
    body: bytes
    size: int
    call: Any
    record: WorkerRecord

    def message(self) -> Any:
        """The message as an object of a class of `protocol.messages`. Raises ProtocolError if the body is none."""
        return read(self.kind, self.body)


class Observer(Protocol):
    """Sees each message of a worker as it leaves.

    Its methods are called in the thread that sends the message, several at a time, and must not block.
    """

    def leaving(self, passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
        """A message is about to leave. Exactly one of `send` and `drop` has to be called, now or later, in any thread.

        `send` lets the message go. `drop` takes back what was prepared for it; its call is not told, and ends with its
        timeout, unless the observer refuses the call itself.
        """

    def holds(self) -> bool:
        """Whether it keeps messages that are about to leave: a worker that leaves in good order waits for them."""


def ask(observers: Sequence[Observer], passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
    """Ask one observer after the other; the last one that lets the message pass has it sent."""
    if observers:
        following = partial(ask, observers[1:], passage, send, drop)
        observers[0].leaving(passage, following, drop)
    else:
        send()


def frame_passage(kind: int, call_id: int, frame: Sequence[Buffer], call: object, record: WorkerRecord) -> Passage:
    """A message that leaves whole in its frame."""
    _, length, count, _, _ = HEAD.unpack_from(frame[0])
    start = HEAD.size + 8 * count
    return Passage(kind, call_id, bytes(frame[0][start : start + length]), sum(map(len, frame)) - start, call, record)
