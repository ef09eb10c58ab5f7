"""Messages for a peer that wait until there is a link to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ...channels import AnyBuffer
from ...errors import SerializationError
from ...protocol.codec import Outgoing
from ...protocol.frames import CALL, Buffer
from .future import CallFuture
from .member_call import MemberCall


class Form(NamedTuple):
    """A message encoded for one kind of receiver. out: for `unsend` if it is not sent."""

    body: bytes
    buffers: Sequence[AnyBuffer]
    out: Outgoing | None

    @property
    def size(self) -> int:
        """Bytes of the body and of the buffers."""
        return len(self.body) + sum(map(len, self.buffers))


class WaitingCall(NamedTuple):
    """A call before its link: it has buffers, or its worker was not known yet.

    out: for `unsend` if it is not sent. passed: whether observers have let it pass. otherwise: its form for a worker
    with another main module, or the error in place of one; None if it is the same.
    """

    call: CallFuture | MemberCall
    body: bytes
    buffers: Sequence[AnyBuffer]
    out: Outgoing | None
    passed: bool = False
    otherwise: Form | SerializationError | None = None

    @property
    def call_id(self) -> int:
        return self.call.call_id


class WaitingFrame(NamedTuple):
    """A message without a link, complete in its frame. call: of the message. passed: as above."""

    kind: int
    call_id: int
    frame: Sequence[Buffer]
    call: CallFuture | MemberCall | None = None
    passed: bool = False


class WaitingMessages:
    """The messages that wait for the link of one peer, in their order. The lock of the peer guards it.

    ``len`` needs no lock.
    """

    def __init__(self) -> None:
        # By the number of the call. Other messages have numbers below 0: a CANCEL must not replace its call.
        self._messages: dict[int, WaitingCall | WaitingFrame] = {}
        self._others = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: WaitingCall | WaitingFrame) -> None:
        """Add a message behind the others."""
        is_call = isinstance(message, WaitingCall) or message.kind == CALL
        self._messages[message.call_id if is_call else next(self._others)] = message

    def take_back(self, call_id: int) -> bool:
        """Forget that call; whether it was waiting."""
        return self._messages.pop(call_id, None) is not None

    def take_all(self) -> list[WaitingCall | WaitingFrame]:
        """Take all messages out."""
        messages, self._messages = self._messages, {}
        return list(messages.values())


def nothing() -> None:
    """A `drop` that has nothing to undo."""
