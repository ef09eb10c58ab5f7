"""Observers of the messages that a worker sends.

They inject faults (`aiorpc.testing`). Observers of calls are in `call_events`.
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
    """A message about to leave by a link.

    kind, call_id, body: of the message, as on the wire. If its buffers travel by channels, they are those of the
    message itself, not of the PARCEL. size: the bytes of the body and of all buffers, wherever they travel; the same at
    both ends. Heads and seals count with the connection's bytes only. call: of the message: a `CallFuture` at the
    caller, a `ServedCall` at the callee; None if there is none, or if it has ended. record: of the worker at the other
    end.
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
    """Sees each message of a worker before it leaves.

    Its methods are called in the thread that sends the message, several at a time, and must not block.
    """

    def leaving(self, passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
        """A message is about to leave. Exactly one of `send` and `drop` has to be called, now or later, in any thread.

        `send` lets the message go. `drop` releases what was prepared for it; its call ends with its timeout, unless the
        observer refuses the call itself.
        """

    def holds(self) -> bool:
        """Whether it holds messages back: a worker that leaves in good order waits for them."""


def ask(observers: Sequence[Observer], passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
    """Ask one observer after the other; the message is sent after all have let it pass."""
    if observers:
        following = partial(ask, observers[1:], passage, send, drop)
        observers[0].leaving(passage, following, drop)
    else:
        send()


def frame_passage(kind: int, call_id: int, frame: Sequence[Buffer], call: object, record: WorkerRecord) -> Passage:
    """The passage of a message that leaves whole in its frame."""
    _, length, count, _, _ = HEAD.unpack_from(frame[0])
    start = HEAD.size + 8 * count
    return Passage(kind, call_id, bytes(frame[0][start : start + length]), sum(map(len, frame)) - start, call, record)
