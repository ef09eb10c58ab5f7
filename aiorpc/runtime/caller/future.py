"""A call at its caller: the Future of it, the function that it names, and the words for what went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ... import foreign
from ...errors import RpcCancelled, RpcError
from ...futures import PENDING, Executor, Future, Marks

if TYPE_CHECKING:
    from .peer import Peer

_CFuture = torch._C.Future


class CallFuture(Future[Any]):
    """The Future of one call."""

    # Slots: one is made for each call, and a dict that grows to a dozen entries costs more than the rest of it.
    __slots__ = (
        "_call_id",
        "_callbacks",
        "_deadline",
        "_entry",
        "_error",
        "_peer",
        "_site",
        "_started",
        "_state",
        "_streamed",
        "_system",
        "_unclaimed",
        "_value",
    )

    _apart = True

    def __init__(self, peer: Peer, system: bool) -> None:
        _CFuture.__init__(self, [])
        self._unclaimed = [True]
        self._state = PENDING
        self._callbacks = None
        self._error = None
        self._value = None
        self._site = None
        self._peer: Peer = peer
        self._system: bool = system
        self._streamed = False
        self._call_id: int = -1
        self._entry: FunctionEntry
        self._deadline: float | None
        self._started: float

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:  # type: ignore[override]  # an attribute there; here it is the peer's
        return self._peer.worker.loop

    @property
    def _executor(self) -> Executor:  # type: ignore[override]  # an attribute there; here it is the peer's
        return self._peer.worker.pool

    @property
    def _marks(self) -> Marks | None:  # type: ignore[override]  # an attribute there; here it is the peer's
        return self._peer.worker.accelerators.arrival if self._peer.devices else None

    @property
    def _function(self) -> str:
        return self._entry.name

    def _subject(self) -> str:
        return f"the call of {self._function} on worker {self._peer.name!r}"

    def _look_out(self, enough: Callable[[], bool]) -> None:
        peer = self._peer
        connection, link = peer.connection, peer.link
        # What is held, of a stream or for a device is the loop's.
        if connection is None or link is None or link.held or self._streamed or peer.devices:
            return
        loop = peer.worker.call_on_loop
        current: CallFuture | None = None
        try:
            while self._state == PENDING:
                frames = connection.read_here(enough)
                if not frames:
                    return
                for frame in frames:
                    current = peer.pending.get(frame.call_id)
                    if link.held or (current is not None and current._streamed):
                        loop(peer.on_frames, [frame])
                    else:
                        peer.on_answer(frame)
                        _raise_interrupt(current)
        except BaseException:  # a signal handler's
            for frame in connection.answers:
                if frame.call_id in peer.pending:
                    loop(peer.on_frames, [frame])
            connection.read_on_loop()
            if current is not None and current._call_id not in peer.pending:  # it was about to settle
                current._settle(None, RpcCancelled(f"{current.describe()} was interrupted as its answer was read"))
            raise

    def _on_cancel(self) -> None:
        self._peer.cancel(self._call_id)


def _raise_interrupt(future: CallFuture | None) -> None:
    """Ctrl-C came while its answer was unpickled, in a thread that may wait for another one."""
    if future is None or future._error is None:
        return
    cause = foreign.field(future._error, "__cause__")
    if foreign.is_a(cause, KeyboardInterrupt):
        raise cause


class FunctionEntry:
    """A function as this peer knows it. number: -1 where it has none: it travels by value or belongs to a reference."""

    __slots__ = ("confirmed", "name", "number")

    def __init__(self, name: str, number: int = -1) -> None:
        self.number = number
        self.name = name
        self.confirmed = False


def copy_for(error: RpcError, future: CallFuture) -> RpcError:
    """Each call gets an error of its own: raising one object at many places mixes up their tracebacks."""
    copy = type(error)(f"{foreign.text_of(error)}; {future.describe()} got no answer")
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def name_argument(position: int, function_first: bool, count: int, names: list[str] | None, future: CallFuture) -> str:
    """The value at that position of a message, as errors call it. function_first: the function went by value."""
    where = f"of {future._function} for worker {future._peer.name!r}"
    if function_first:
        if position == 0:
            return f"the function {future._function}"
        position -= 1
    if names is not None and position >= count:
        return f"argument {names[position - count]!r} {where}"
    return f"argument {position} {where}"
