"""A call at its caller: its Future, and the texts of its errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from ... import foreign
from ...callbacks import Executor
from ...errors import ProtocolError, RpcCancelled, RpcError, SerializationError
from ...futures import PENDING, UNCLAIMED, Future, Marks
from ...interrupts import has_ended_wait
from ...protocol.identity import WorkerRecord
from ...protocol.states import PeerState
from ...sites import CallSite
from ...transport.connection import Connection
from ..engine.call_events import CallKind
from ..engine.call_tracing import MadeSpan
from ..engine.engine import Engine
from ..links.link import Link
from .known import FunctionEntry
from .unawaited import ADVICE, Unawaited

_CFuture = torch._C.Future


class DescribedCall(Protocol):
    """A call that describes itself in errors."""

    def _describe(self) -> str: ...


class CallsOfPeer(Protocol):
    """The pending calls of one peer (`PendingCalls`), as a single call needs them."""

    @property
    def calls(self) -> Mapping[int, Any]: ...

    def cancel(self, call_id: int) -> None:
        """The caller of that call has given up."""

    def fail_one(self, call_id: int, error: RpcError) -> None:
        """End that call with that error."""

    def end_overdue(self, call_id: int, now: float) -> float:
        """End that call if its deadline passed a while ago; the deadline if it is still to come, otherwise infinity."""


class PeerOfCall(Protocol):
    """The called worker (`Peer`), as its calls need it."""

    engine: Engine
    name: str
    devices: bool
    connection: Connection | None
    link: Link | None
    record: WorkerRecord | None
    state: PeerState
    trouble: str

    @property
    def marks(self) -> Marks: ...

    @property
    def as_torch(self) -> bool: ...

    @property
    def pending(self) -> CallsOfPeer: ...

    def call_off(self, call_id: int, expired: bool = False) -> None:
        """That call has ended here: take it back, or send CANCEL. expired: its time is up."""


class CallFuture(Unawaited, Future[Any]):
    """The Future of one call.

    call_id: its number on the wire. entry: the function. started, deadline: ``time.monotonic()`` seconds; None: no
    limit. system: whether it is the runtime's own. again: whether its Error allows another try; None: no Error has
    come. streamed: whether it is the end of a stream. patient: whether it waits for a worker of that name to join,
    after any earlier one. allowed: seconds of all tries together, if it is tried again. unsent: whether sending it
    failed. parked: whether it waits at its callee for other workers, and runs no code of users. kind, parent, part_of,
    size: as in a `CallEvent`; size is set for observers. span: its own, if calls are traced.
    """

    # Defaults on the class, which few calls change.
    allowed: float | None = None
    unsent = parked = False
    kind: CallKind = "call"
    parent: tuple[str, int] | None = None
    part_of: tuple[str, int | str] | None = None
    size: int = 0
    span: MadeSpan | None = None

    # Slots: a dict that grows to a dozen entries would cost more than the rest of a Future.
    __slots__ = (
        "_callbacks",
        "_deadline",
        "_error",
        "_site",
        "_state",
        "_value",
        "again",
        "call_id",
        "entry",
        "patient",
        "peer",
        "started",
        "streamed",
        "system",
    )

    _apart = True

    def __init__(
        self,
        peer: PeerOfCall,
        entry: FunctionEntry,
        call_id: int,
        started: float,
        deadline: float | None,
        system: bool,
    ) -> None:
        _CFuture.__init__(self, [])
        self._state = PENDING
        self._callbacks = [UNCLAIMED]
        self._error = None
        self._value = None
        self._site: CallSite | None = None
        self.peer: PeerOfCall = peer
        self.entry: FunctionEntry = entry
        self.started: float = started
        self._deadline: float | None = deadline
        self.system: bool = system
        self.again: bool | None = None
        self.streamed: bool = False
        self.patient: bool = False
        self.call_id: int = call_id

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:  # type: ignore[override]  # an attribute there; here it is the peer's
        return self.peer.engine.loop

    @property
    def _executor(self) -> Executor:  # type: ignore[override]  # an attribute there; here it is the peer's
        return self.peer.engine.pool

    @property
    def _home_thread(self) -> int:  # type: ignore[override]  # an attribute there; here it is the peer's
        return self.peer.engine.thread

    @property
    def _marks(self) -> Marks | None:  # type: ignore[override]  # an attribute there; here it is the peer's
        return self.peer.marks if self.peer.devices else None

    @property
    def function(self) -> str:
        """The name of the function."""
        return self.entry.name

    @property
    def _subject(self) -> str:  # type: ignore[override]  # an attribute there; here it is made of the call's
        return f"the call of {self.entry.name} on worker {self.peer.name!r}"

    def _look_out(self, enough: Callable[[], bool]) -> None:
        """Read answers in this waiting thread, until this call has ended or `enough()`."""
        peer = self.peer
        connection, link = peer.connection, peer.link
        # Held messages, streams and devices need the order of messages: then only the loop reads.
        if connection is None or link is None or link.held or self.streamed or peer.devices:
            return
        calls, leave_to_loop = peer.pending.calls, peer.engine.call_on_loop
        call: Any = None
        try:
            while self._state == PENDING:
                frames = connection.read_here(enough)
                if not frames:
                    return
                for frame in frames:
                    call = calls.get(frame.call_id)
                    if link.held or (call is not None and call.streamed):
                        leave_to_loop(link.take_over, frame)
                        continue
                    try:
                        link.on_frames([frame])
                    except ProtocolError:  # the loop ends the connection for it
                        leave_to_loop(link.take_over, frame)
        except BaseException as error:
            if has_ended_wait(error):
                raise
            peer.engine.lifetime.break_down(error)
            # This thread had ended that call, so only it can settle it.
            if call is not None and call.call_id not in calls:
                with contextlib.suppress(AttributeError):  # a `MemberCall` that was settled has no group
                    call._settle(None, RpcCancelled(f"{call._describe()} was interrupted as its answer was read"))
            raise

    if not TYPE_CHECKING:  # for a checker there is nothing

        def __getattr__(self, name: str) -> NoReturn:
            """Raise: the attribute is the result's."""
            text = f"'Future' object has no attribute {name!r}"
            if not name.startswith("_"):
                text += (
                    f": this is {self._describe()}, {ADVICE}. "
                    "What wants a Future of asyncio (asyncio.wait) takes asyncio.ensure_future(...) of it"
                )
            raise AttributeError(text)

        def _is_true(self) -> bool:
            return self.peer.as_torch

    def _end_overdue(self, now: float) -> float:
        """As of any Future."""
        return self.peer.pending.end_overdue(self.call_id, now)

    def _on_cancel(self) -> None:
        self.peer.pending.cancel(self.call_id)

    def refuse(self, error: RpcError) -> None:
        """The call cannot be sent, and ends with that error. Any thread."""
        self.peer.pending.fail_one(self.call_id, error)


def copy_for(error: RpcError, call: DescribedCall) -> RpcError:
    """A copy of an error for one of several calls, which keeps their tracebacks apart."""
    copy = type(error)(f"{foreign.text_of(error)}; {call._describe()} got no answer")
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def cannot_send(
    error: SerializationError, function: str, target: str, function_first: bool, count: int, names: list[str] | None
) -> SerializationError:
    """The error of a call that cannot be written, with the argument and the receiver.

    target: the receiver, in words. function_first: whether the function is the first value. count, names: the number of
    positional arguments, and the names of the others.
    """
    if isinstance(error.__cause__, UnicodeEncodeError):
        for name in names or ():
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                return SerializationError(
                    f"argument {name!r} of {function} for {target} cannot be sent under that name, which is no text: a "
                    "lone surrogate in it, half of a character, cannot be written as UTF-8"
                )
    what = _name_argument(error.position, function_first, count, names, function)
    return SerializationError(f"{what} for {target} {error}")


def _name_argument(position: int, function_first: bool, count: int, names: list[str] | None, function: str) -> str:
    """The value at that position of a call, for errors."""
    if function_first:
        if position == 0:
            return f"the function {function}"
        position -= 1
    if names is not None and position >= count:
        return f"argument {names[position - count]!r} of {function}"
    return f"argument {position} of {function}"
