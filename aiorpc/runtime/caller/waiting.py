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
    """A message as it is written for one kind of receiver. out: what to `unsend` if it is not sent."""

    body: bytes
    buffers: Sequence[AnyBuffer]
    out: Outgoing | None

    @property
    def size(self) -> int:
        """Bytes of the body and of the buffers."""
        return len(self.body) + sum(map(len, self.buffers))


class WaitingCall(NamedTuple):
    """A call that has not been handed to a link yet: with buffers, or made before it was known whom it goes to.

    out: what to `unsend` if it never is. passed: whether observers have been asked about it, and have let it go.
    otherwise: the form that it has if the worker turns out to run another main module, or why it has none; None if it
    is the same.
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
    """A message that waits for a link and is complete in its frame. call: that it belongs to. passed: as above."""

    kind: int
    call_id: int
    frame: Sequence[Buffer]
    call: CallFuture | MemberCall | None = None
    passed: bool = False


class WaitingMessages:
    """The messages that wait for the link of one peer, in their order. The lock of the peer guards it.

    How many they are may be asked without the lock.
    """

    def __init__(self) -> None:
        # By the number of the call; numbers below 0 are for messages that are no calls: another message about a call
        # (CANCEL) must not take the place of the call itself.
        self._messages: dict[int, WaitingCall | WaitingFrame] = {}
        self._others = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: WaitingCall | WaitingFrame) -> None:
        """That message has to wait, behind those that are there."""
        is_call = isinstance(message, WaitingCall) or message.kind == CALL
        self._messages[message.call_id if is_call else next(self._others)] = message

    def take_back(self, call_id: int) -> bool:
        """Forget that call; whether it was waiting."""
        return self._messages.pop(call_id, None) is not None

    def take_all(self) -> list[WaitingCall | WaitingFrame]:
        """The messages, which wait no longer."""
        messages, self._messages = self._messages, {}
        return list(messages.values())


def nothing() -> None:
    """Where there is nothing to take back."""
