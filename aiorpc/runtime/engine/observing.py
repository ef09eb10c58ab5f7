"""Observers of the messages of a worker: what they are shown, and what they may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...protocol.identity import WorkerRecord
from ...protocol.messages import read


@dataclass(frozen=True, slots=True)
class Passage:
    """A message that passes a link, on its way out or in.

    kind, call_id, body: of the message, as on the wire. If its buffers travel by channels, they are those of the
    message itself, not of the PARCEL. size: the bytes of the body and of all buffers, wherever they travel; the same
    at both ends. What goes over a connection besides, heads and seals, is in the counts of connections.
    call: what the runtime keeps of the call that the message belongs to: a `CallFuture` at the caller, a `ServedCall`
    at the callee. None if there is none, if it has ended, or where the message itself begins it, as a CALL does at its
    callee. record: of the worker at the other end. channels: for each buffer that does not go with the frame, the name
    of the channel by which it travels; on the way out none as long as there is no connection, since observers are asked
    when the message is made.
    """

    kind: int
    call_id: int
    body: bytes
    size: int
    call: Any
    record: WorkerRecord
    channels: Sequence[str] = ()

    def message(self) -> Any:
        """The message as an object of a class of `protocol.messages`. Raises ProtocolError if the body is none."""
        return read(self.kind, self.body)


class Observer(Protocol):
    """Sees each message of a worker as it passes the worker's end of a link.

    Its methods are called in whatever thread sends or reads the message, several at a time, and must not block.
    """

    def leaving(self, passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
        """A message is about to leave. Exactly one of `send` and `drop` has to be called, now or later, in any thread.

        `send` lets the message go. `drop` takes back what was prepared for it; its call is not told, and ends with its
        timeout, unless the observer refuses the call itself.
        """

    def holds(self) -> bool:
        """Whether it keeps messages that are about to leave: a worker that leaves in good order waits for them."""

    def arriving(self, passage: Passage) -> None:
        """A message has arrived, and is handed on right after this."""
