"""Answers and items of streams at the caller, from the frame to the Future.

An answer goes down once, from its bytes to its message and its values, and up once, to its Future. On the loop; answers
also in a waiting thread that reads the connection.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ... import foreign
from ...channels.accelerator import DeviceBuffer
from ...errors import PeerLeft, ProtocolError, RpcError
from ...interrupts import is_interrupt
from ...logs import logger
from ...protocol.codec import Past
from ...protocol.frames import ERROR, REPLY, Frame
from ...protocol.messages import Error, Recorded, Values, read_error, read_values
from ...protocol.reference_messages import PassedReference
from ...protocol.states import CallOutcome
from ..calls.current import CommonHome, current_node
from ..calls.failures import decode_error, without_frames
from ..calls.values import LARGE_PICKLE, Results, decode
from ..links.links import Links
from ..links.reassembly import Message
from .future import PeerOfCall
from .pending import MadeCall, PendingCalls

_VALUE, _ERROR, _REFUSED = CallOutcome.VALUE, CallOutcome.ERROR, CallOutcome.REFUSED


class NotArrived(RpcError):
    """The answer of a call has come, but its buffers have not; its cause says why."""


class PeerForArriving(PeerOfCall, Protocol):
    """The worker that answers (`Peer`). drains: whether it takes no more calls."""

    drains: bool

    def load_references(self, passed: Sequence[PassedReference]) -> Sequence[object]:
        """Handles of the references in a message from the peer."""

    def track(self, said: Recorded, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Past | None]:
        """The tensors of a message from the peer, placed in the autograd graph. said: the message's entries about
        them."""


class ArrivingContext(CommonHome, Protocol):
    """The calling worker, as answers need it."""

    links: Links

    def read_error(self, function: str, error: BaseException) -> BaseException:
        """The error for the caller of that function, made of the error that has arrived."""


class Arriving:
    """See the module: the answers of one peer."""

    def __init__(self, home: ArrivingContext, pending: PendingCalls, peer: PeerForArriving) -> None:
        self._home = home
        self._engine = home.engine
        self._accelerators = home.links.accelerators
        self._devices = home.links.accelerators.accelerator is not None
        self._pending = pending
        self._peer = peer

    def on_answer(self, frame: Frame) -> None:
        """An answer has arrived. On the loop, or in the thread that has read it."""
        pending, call_id = self._pending, frame.call_id
        call, now = pending.calls.get(call_id), time.monotonic()
        if (
            call is not None
            and frame.kind != ERROR
            and (call._deadline is None or now <= call._deadline)
            and pending.end(call_id, _VALUE, now, self._size(frame) if self._engine.call_observers else 0) is not None
        ):
            self._on_reply(call, frame)
        else:
            self._on_other(call, frame, now)

    def _on_other(self, call: MadeCall | None, frame: Frame, now: float) -> None:
        """An answer has arrived that is an error, or comes late."""
        in_time = call is None or call._deadline is None or now <= call._deadline
        if call is not None and in_time and frame.kind == ERROR:
            self._on_error(call, frame, now)
            return
        if not in_time:
            self._pending.expire(frame.call_id)
        self._late(frame)

    @staticmethod
    def _size(frame: Frame) -> int:
        return len(frame.body) + sum(map(len, frame.segments))

    def _on_reply(self, call: MadeCall, frame: Frame) -> None:
        """A call of ours has ended with this value."""
        entry = call.entry
        if not entry.confirmed and entry.number >= 0:
            entry.confirmed = True  # from now on only the number is sent
        try:
            result = read_values(frame.body)
            if entry.declaration is not None:
                entry.declaration.check_answer(result)
        except Exception as error:
            self._unreadable(call, error)
        else:
            values = result.values
            if len(values) == 1 and not (result.table or result.pickled or result.references):
                call._settle(values[0])
            else:
                self._take(call, frame, result)

    def _take(self, call: MadeCall, frame: Frame, result: Values) -> None:
        """Make a value that is not plain: here, or in a background thread if that takes long."""
        if len(result.pickled or b"") <= LARGE_PICKLE or call.entry.declaration is not None:
            self._decode(call, frame, result)
            return
        if not call.system:
            self._pending.decoding.add(call.call_id)
        try:
            self._engine.background.submit(self._decode, call, frame, result)
        except Exception as error:
            self._pending.decoding.discard(call.call_id)
            self._unreadable(call, error)

    def _decode(self, call: MadeCall, frame: Frame, result: Values) -> None:
        """Make the value and settle the call. On the loop, in a reading thread, or in a background thread."""
        peer, segments, safe = self._peer, frame.segments, self._engine.safe
        landing = frame.landing if type(frame) is Message else None
        landing = landing or (self._devices and self._accelerators.landing()) or None
        token = current_node.set(self._home)  # unpickled code may ask for its worker
        try:
            if landing is None:
                values = decode(result, segments, peer.load_references, peer.track, None, safe)
            elif landing.streams and _is_lone(result, segments):
                values = decode(result, segments, peer.load_references, None, landing, safe)
                call._arrival = landing.arrival()
            else:
                with landing.entered():
                    values = decode(result, segments, peer.load_references, peer.track, landing, safe)
                    call._arrival = landing.arrival()
            value = values[0] if len(values) < 2 else Results(values)
        except BaseException as error:  # any error, SystemExit too, is of that call alone
            self._pending.decoding.discard(call.call_id)  # before the caller gets the answer
            self._unreadable(call, error)
            if is_interrupt(error):
                raise
        else:
            self._pending.decoding.discard(call.call_id)
            call._settle(value)
        finally:
            current_node.reset(token)

    def _unreadable(self, call: MadeCall, error: BaseException) -> None:
        failure = RpcError(f"the result of {call._describe()} cannot be read here: {foreign.said(error)}")
        failure.__cause__ = without_frames(error)
        call._settle(None, failure)

    # --- errors -------------------------------------------------------------------------------------------------------

    def _on_error(self, call: MadeCall, frame: Frame, now: float) -> None:
        """An Error has come for that call."""
        told: Error | None = None
        error: BaseException | None = None
        try:
            told = read_error(frame.body)
            call.again = told.again
        except ProtocolError as broken:
            error = RpcError(f"{call._describe()} failed, and its error cannot be read: {foreign.said(broken)}")
        outcome = _REFUSED if told is not None and told.again else _ERROR
        if self._pending.end(frame.call_id, outcome, now, self._size(frame)) is not None:
            call._settle(None, error if told is None else self._error_of(call, told))

    def _error_of(self, call: MadeCall, told: Error) -> BaseException:
        safe = self._engine.safe or call.entry.declaration is not None
        try:
            error = self._home.read_error(call.function, decode_error(told, call.function, safe))
            if not foreign.is_a(error, BaseException):
                raise TypeError("read_error gave something that is no exception")
        except BaseException as broken:
            return RpcError(f"{call._describe()} failed, and its error cannot be read: {foreign.said(broken)}")
        if told.again and type(error) is PeerLeft:  # in place of a goodbye; nothing ran there
            foreign.set_cause(error, None)
            self._peer.drains = True
        return error

    # --- answers without a call ---------------------------------------------------------------------------------------

    def _late(self, frame: Frame) -> None:
        self._engine.counters.late_answers += 1
        self._discard(frame)

    def _discard(self, frame: Frame) -> None:
        """Drop an answer or an item that no call waits for. Its references still have to be taken."""
        if frame.kind == ERROR:
            return
        try:
            references = read_values(frame.body).references
            if references:
                self._peer.load_references(references)
        except Exception:
            logger.debug("a late answer of %s cannot be read", self._peer.name, exc_info=True)

    def on_failed(self, frame: Frame, error: Exception) -> None:
        """The buffers of an answer or an item did not arrive: end the call with an error."""
        call = self._pending.end(frame.call_id, _ERROR)
        self._discard(frame)
        if call is None:
            return
        if call.streamed and frame.kind != REPLY:  # an item is missing, so later ones are not wanted
            self._peer.call_off(frame.call_id)
        failure = NotArrived(f"the result of {call._describe()} did not arrive: {error}")
        failure.__cause__ = error
        call._settle(None, failure)

    def on_item(self, frame: Frame) -> None:
        """An item of a stream has arrived."""
        stream: Any = self._pending.streams.get(frame.call_id)
        if stream is None:
            self._discard(frame)
        else:
            stream._on_item(read_values(frame.body), frame.segments, frame.landing if type(frame) is Message else None)


def _is_lone(result: Values, segments: Sequence[object]) -> bool:
    """Whether a result is one tensor that has arrived on a device: reading it is no work for a CUDA stream."""
    table = result.table
    return (
        not (result.opaque_at or result.pickled or result.references or result.gradients)
        and table is not None
        and len(segments) == len(table) == 1
        and type(segments[0]) is DeviceBuffer
    )
