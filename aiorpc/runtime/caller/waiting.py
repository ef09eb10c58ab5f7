"""Messages for a peer that wait until there is a link to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...channels import AnyBuffer
from ...protocol.codec import Outgoing
from ...protocol.frames import CALL, Buffer
from .future import CallFuture


class WaitingCall(NamedTuple):
    """A call with buffers that has not been handed to a link yet. out: what to `unsend` if it never is.

    passed: whether observers have been asked about it, and have let it go.
    """

    call: CallFuture
    body: bytes
    buffers: Sequence[AnyBuffer]
    out: Outgoing | None
    passed: bool = False

    @property
    def call_id(self) -> int:
        return self.call.call_id


class WaitingFrame(NamedTuple):
    """A message that waits for a link and is complete in its frame. call: that it belongs to. passed: as above."""

    kind: int
    call_id: int
    frame: Sequence[Buffer]
    call: CallFuture | None = None
    passed: bool = False


def is_call(waiting: WaitingCall | WaitingFrame) -> bool:
    """Whether a message that waits for a link is a call, which can be taken back under its number."""
    return type(waiting) is WaitingCall or waiting.kind == CALL  # type: ignore[union-attr]  # a WaitingFrame otherwise


def nothing() -> None:
    """Where there is nothing to take back."""
