"""The calls that a peer owes us: those that it has not answered, and what may end each of them.

A call ends with its answer, when its time is up, when its caller gives up, or when it cannot be sent or the peer is
gone. A call is in `OwedCalls.pending` from before its frame is queued until somebody takes it out. `dict.pop` decides
who that is, and whoever took it out settles its Future.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from msgspec.structs import replace

from ... import foreign
from ...channels.accelerator import DeviceBuffer
from ...channels.landing import Landing
from ...errors import PeerLeft, RpcError, RpcTimeout, WorkerClosed
from ...futures import GRACE
from ...logs import logger
from ...protocol.codec import Past
from ...protocol.frames import ERROR, REPLY, Buffer, Frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import Recorded, Values, read_error, read_values
from ...protocol.reference_messages import PassedReference, ReferenceId
from ...protocol.states import PeerState
from ...sites import describe_site
from ...undoing import on_error
from ..calls.current import CommonHome, current_node
from ..calls.failures import decode_error, without_frames
from ..calls.pending import PendingCall
from ..calls.values import LARGE_PICKLE, Results, decode
from ..engine.deadlines import Deadlines
from ..links.links import Links
from ..links.reassembly import Message
from .future import CallFuture, copy_for
from .member_call import MemberCall

#: What stands for a call in `OwedCalls.pending`: its Future, or a part of the call of a group.
OwedCall = CallFuture | MemberCall


def _is_lone(result: Values, segments: Sequence[object]) -> bool:
    """Whether a result is one tensor that has arrived on a device: to read it is no work for any stream."""
    return (
        not (result.opaque_at or result.pickled or result.references or result.gradients)
        and result.table is not None
        and len(segments) == len(result.table) == 1
        and type(segments[0]) is DeviceBuffer
    )


class NotArrived(RpcError):
    """The answer of a call has come, and what belongs to it cannot be had here; its cause says why."""


class ItemSink(Protocol):
    """The consumer of a stream (`Stream`)."""

    def _on_item(self, item: Values, segments: Sequence[Buffer], landing: Landing | None) -> None:
        """An item arrived; on the worker's loop. Raises ProtocolError for one that was not asked for."""


class PeerForOwed(Protocol):
    """The worker that owes the calls (`Peer`)."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> PeerState: ...

    @property
    def record(self) -> WorkerRecord | None: ...

    @property
    def trouble(self) -> str:
        """What has been in the way of a connection to it last; empty if that is not known."""

    def call_off(self, call_id: int, expired: bool = False) -> None:
        """That call has ended here: take it back, or tell the callee. expired: its time is up."""

    def load_references(self, passed: Sequence[PassedReference]) -> Sequence[object]:
        """Handles of the references in a message from the peer."""

    def track(self, said: Recorded, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Past | None]:
        """The tensors of a message from the peer, placed in the autograd graph. said: what the message says of them."""


class Home(CommonHome, Protocol):
    """What the calls need of the worker that has made them."""

    links: Links

    def read_error(self, function: str, error: BaseException) -> BaseException:
        """The error that the caller of that function is to get for the one that has arrived."""


class OwedCalls:
    """See the module. Methods belong to the loop where they do not say otherwise.

    ids: gives each call its number. pending: the Futures of the calls, by number. streams: who takes the items of those
    that are streams. lent: the references that those have lent to the callee, or whose values they call, by number:
    they end no sooner than the call. system: how many are calls of the runtime; one of them (ENTER) lasts as long as we
    wait to leave. decoding: the numbers of calls of users whose answers have come, and are being unpickled in the
    background.
    """

    def __init__(self, home: Home, deadlines: Deadlines, peer: PeerForOwed) -> None:
        self.ids: itertools.count[int] = itertools.count(1)
        self.pending: dict[int, OwedCall] = {}
        # Weak: a consumer that breaks out of its loop drops the stream, and that is what stops the producer.
        self.streams: WeakValueDictionary[int, ItemSink] = WeakValueDictionary()
        self.lent: dict[int, list[Any]] = {}
        self.system: int = 0
        self.decoding: set[int] = set()
        self._given_up: dict[int, float] = {}
        self._home = home
        self._engine = home.engine
        self._counters = home.engine.counters
        self._accelerators = home.links.accelerators
        self._devices = home.links.accelerators.accelerator is not None
        self._deadlines = deadlines
        self._peer = peer

    def enter(self, future: OwedCall, stream: ItemSink | None) -> None:
        """A call is about to be sent. stream: who takes its items. Any thread."""
        call_id, deadline = future.call_id, future._deadline
        self.pending[call_id] = future
        if future.system:
            self.system += 1
        else:
            self._counters.made += 1
        if stream is not None:
            self.streams[call_id] = stream
            future.streamed = True
        if deadline is not None and deadline < self._deadlines.next:
            self._deadlines.add(deadline)

    # --- ends without an answer ---------------------------------------------------------------------------------------

    def take(self, call_id: int) -> OwedCall | None:
        """Take a call out of `pending`, which ends it; None if somebody else has ended it before. Any thread."""
        if self.lent:  # first: who is interrupted between the two has not ended the call
            self.lent.pop(call_id, None)
        future = self.pending.pop(call_id, None)
        if future is not None and future.system:
            self.system -= 1
        return future

    def scan_deadlines(self, now: float) -> float:
        """End the calls whose deadline has passed; the earliest deadline of the rest, or infinity. On the loop."""
        following = float("inf")
        due = []
        # Not items(): making its pairs can start the garbage collector, and with it other threads, in mid-iteration.
        for future in list(self.pending.values()):
            deadline = future._deadline
            if deadline is None:
                continue
            if deadline <= now:
                due.append(future.call_id)
            elif deadline < following:
                following = deadline
        for call_id in due:
            self._expire(call_id)
        return following

    def _expire(self, call_id: int) -> None:
        future = self.take(call_id)
        if future is None:
            return
        self.streams.pop(call_id, None)
        self._time_out(future)
        self._peer.call_off(call_id, True)

    def end_overdue(self, call_id: int, now: float) -> float:
        """Whoever waits for that call ends it if its time was up a while ago, as the loop has not done so. Any thread.

        Returns its deadline if that is still to come, else infinity: nothing is to be done for it again. WorkerClosed
        in a forked child, which gets no answers.
        """
        self._engine.lifetime.check_not_forked()
        future = self.pending.get(call_id)
        if future is None or future._deadline is None:
            return float("inf")
        if now < future._deadline + GRACE:
            return future._deadline
        if self.take(call_id) is not None:
            self.streams.pop(call_id, None)
            self._time_out(future, now - future._deadline)
            self._peer.call_off(call_id, True)
        return float("inf")

    def _time_out(self, future: OwedCall, late: float = 0.0) -> None:
        """late: so many seconds after its deadline another thread says so than that of the loop, which has not."""
        assert future._deadline is not None
        if not future.system:
            self._counters.timed_out += 1
        logger.debug("the time of %s is up; worker %r is %s", future._subject, self._peer.name, self._peer.state.value)
        given = future._deadline - future.started if future.allowed is None else future.allowed
        seconds = round(given, 6)  # what was asked for, not 0.09999999999854481
        had = f"{seconds:g} s"
        if given < 0:  # it has inherited one that had passed
            seconds, had = 0.0, "0 s, as the time of the call that it is part of was over before it was made"
        state = self._peer.state
        outcome = ". It was told to stop, and may or may not have run."
        if state is PeerState.CONNECTING:
            nobody = self._peer.record is None
            trouble = self._peer.trouble
            stands = "no worker of that name has joined" if nobody else state.value + (trouble and f": {trouble}")
            outcome = f"; there is no connection to it yet ({stands}). Nothing was sent."
        elif late:  # the word to stop waits for the loop, too
            outcome = ". It may or may not have run."
        why = self._engine.why_late(late) if late else ""
        error = RpcTimeout(
            f"RPC ran for more than set timeout ({had}): {future._describe()} got no answer{outcome}{why and ' '}{why}",
            worker=self._peer.name,
            function=future.function,
            seconds=seconds,
        )
        error.late = why
        future._settle(None, error)

    def cancel(self, call_id: int) -> None:
        """The caller of that call has given up: forget it and tell the callee. Any thread."""
        self.streams.pop(call_id, None)
        if self.take(call_id) is not None:
            self._peer.call_off(call_id)

    def settle(self, call_id: int, error: RpcError) -> None:
        """A call ends with that error: it cannot be sent, or the peer is gone. Any thread."""
        future = self.take(call_id)
        self.streams.pop(call_id, None)
        if future is not None:
            future._settle(None, copy_for(error, future))

    def fail_calls_of(self, rref: ReferenceId, error: RpcError) -> None:
        """The value of that reference will not be: the calls of its methods, and for itself, end. Any thread."""
        for call_id, kept in list(self.lent.items()):
            future = self.take(call_id) if any(each._rref == rref for each in kept) else None
            if future is not None:
                self.streams.pop(call_id, None)
                text = f"{future._describe()} got no answer, as the value was never created: {foreign.text_of(error)}"
                failure = type(error)(text)
                failure.__dict__.update(error.__dict__)
                future._settle(None, failure)
                self._peer.call_off(call_id)

    def end_waits(self, why: Callable[[str], WorkerClosed], *, calls: bool) -> list[str]:
        """This worker leaves: what its program waits for ends, but not what its handlers wait for.

        why: the error, for each. calls: also calls of users' functions, and not streams and what is `parked` alone.
        Returns what has ended, for people. What is put into queues and taken from them has no site, and ends there. On
        the loop.
        """
        ended, now = [], time.monotonic()
        for future in list(self.pending.values()):
            if future.nested or (not future.parked and (future.system or future._site is None)):
                continue
            if not (calls or future.streamed or future.parked) or self.take(future.call_id) is None:
                continue
            self.streams.pop(future.call_id, None)
            what = (
                f"the stream of {future.function} on worker {self._peer.name!r}" if future.streamed else future._subject
            )
            ended.append(f"{what}, since {now - future.started:.1f} s")
            future._settle(None, why(future._describe()))
            self._peer.call_off(future.call_id)
        return ended

    def fail(self, error: RpcError) -> None:
        """The peer is gone: all calls end with that error."""
        for call_id in list(self.pending):
            self.settle(call_id, error)

    # --- messages from the callee, on the loop; on_answer also in a thread that waits for it --------------------------

    def on_failed(self, frame: Frame, error: Exception) -> None:
        """The buffers of an answer or of an item of a stream cannot be had: the call ends with an error."""
        future = self.take(frame.call_id)
        self._discard(frame)
        if self.streams.pop(frame.call_id, None) is not None:  # an item is missing, so those behind it are not wanted
            self._peer.call_off(frame.call_id)
        if future is not None:
            failure = NotArrived(f"the result of {future._describe()} did not arrive: {error}")
            failure.__cause__ = error
            future._settle(None, failure)

    def on_item(self, frame: Frame) -> None:
        """An item of a stream has arrived."""
        stream = self.streams.get(frame.call_id)
        if stream is None:
            self._discard(frame)
        else:
            stream._on_item(read_values(frame.body), frame.segments, frame.landing if type(frame) is Message else None)

    def on_answer(self, frame: Frame) -> None:
        """An answer has arrived. Called by whoever reads the connection: the loop, or a thread that waits."""
        if self.lent:  # as `take`
            self.lent.pop(frame.call_id, None)
        future = self.pending.pop(frame.call_id, None)
        if future is None:
            self._counters.late_answers += 1
            self._discard(frame)
            return
        if future.system:
            self.system -= 1
        now = time.monotonic()
        if future._deadline is not None and now > future._deadline:
            self._time_out(future)
            self._counters.late_answers += 1
            self._discard(frame)
            return
        if not future.system:  # those count among the calls that were made, and the runtime's own do not
            self._counters.latencies[int((now - future.started) * 1e6).bit_length()] += 1
        entry = future.entry
        # An error may have come before the callee looked at the function (Overloaded, no such module).
        if not entry.confirmed and entry.number >= 0 and frame.kind == REPLY:
            entry.confirmed = True  # from now on the number goes alone
        if future.streamed:
            self.streams.pop(frame.call_id, None)
        if frame.kind == ERROR:
            self._settle_error(future, frame)
            return
        landing = frame.landing if type(frame) is Message else None
        try:
            result = read_values(frame.body)
            values, pickled = result.values, result.pickled
            if entry.declaration is not None:
                entry.declaration.check_answer(result)
            elif pickled and len(pickled) > LARGE_PICKLE:
                self._decode_in_background(future, result, frame.segments, landing)
                return
        except Exception as error:
            self._unreadable(future, error)
            return
        if len(values) == 1 and not (result.table or pickled or result.references):
            future._settle(values[0])  # most answers that have to be quick are of this kind: there is nothing to decode
        else:
            self._settle_value(future, result, frame.segments, landing)

    def _decode_in_background(
        self, future: OwedCall, result: Values, segments: Sequence[Buffer], landing: Landing | None
    ) -> None:
        with on_error(self.decoding.discard, future.call_id):
            if not future.system:
                self.decoding.add(future.call_id)
            self._engine.background.submit(self._settle_value, future, result, segments, landing)

    def _settle_value(
        self, future: OwedCall, result: Values, segments: Sequence[Buffer], landing: Landing | None
    ) -> None:
        load = self._peer.load_references
        token = current_node.set(self._home)  # whoever reads it: what is unpickled may ask for its worker
        try:
            landing = landing or (self._devices and self._accelerators.landing()) or None
            if landing is None:
                values = decode(result, segments, load, self._peer.track, None, self._engine.safe)
            elif landing.streams and _is_lone(result, segments):
                values = decode(result, segments, load, None, landing, self._engine.safe)
                future._arrival = landing.arrival()
            else:
                with landing.entered():
                    values = decode(result, segments, load, self._peer.track, landing, self._engine.safe)
                    future._arrival = landing.arrival()
            value = values[0] if len(values) < 2 else Results(values)
        except BaseException as error:  # even SystemExit is that call's alone
            self.decoding.discard(future.call_id)  # first: whoever has the answer finds the worker idle
            self._unreadable(future, error)
        else:
            self.decoding.discard(future.call_id)
            future._settle(value)
        finally:
            current_node.reset(token)

    def _unreadable(self, future: OwedCall, error: BaseException) -> None:
        failure = RpcError(f"the result of {future._describe()} cannot be read here: {foreign.said(error)}")
        failure.__cause__ = without_frames(error)
        future._settle(None, failure)

    def _settle_error(self, future: OwedCall, frame: Frame) -> None:
        try:
            told = read_error(frame.body)
            future.again = told.again
            safe = self._engine.safe or future.entry.declaration is not None
            error = decode_error(replace(told, pickled=None), future.function, safe)
            error = self._home.read_error(future.function, error)
            if not foreign.is_a(error, BaseException):
                raise TypeError("read_error gave something that is no exception")
        except Exception as broken:
            error = RpcError(f"{future._describe()} failed, and its error cannot be read: {foreign.said(broken)}")
        else:
            if told.again and type(error) is PeerLeft:  # said in place of a goodbye: nothing was run there
                foreign.set_cause(error, None)
        future._settle(None, error)

    def _discard(self, frame: Frame) -> None:
        """Drop an answer or item that nobody waits for. References inside of it still have to be taken."""
        if frame.kind == ERROR:
            return
        try:
            references = read_values(frame.body).references
            if references:
                self._peer.load_references(references)
        except Exception:
            logger.debug("a late answer of %s cannot be read", self._peer.name, exc_info=True)

    # --- looking, from any thread -------------------------------------------------------------------------------------

    def pending_calls(self) -> list[PendingCall]:
        """The calls of users that this peer has not answered."""
        now = time.monotonic()
        return [
            PendingCall(
                "made",
                self._peer.name,
                future.function,
                now - future.started,
                None if future._deadline is None else future._deadline - now,
                describe_site(future._site),
            )
            for future in list(self.pending.values())
            if not future.system
        ]

    def give_up(self, call_id: int) -> None:
        """Nobody waits for that call any more, but its answer counts: who leaves waits for it a while, not for ever."""
        self._given_up = {each: since for each, since in self._given_up.items() if each in self.pending}
        if call_id in self.pending:
            self._given_up[call_id] = time.monotonic()

    def user_calls(self) -> int:
        """How many calls are users' and not the runtime's: those that are pending, and those that are being decoded.

        Without those that were given up a while ago: whoever does not answer them is stopped, or cut off.
        """
        given_up, late = self._given_up, time.monotonic() - self._engine.bounds.given_up
        pending = [future for future in list(self.pending.values()) if not future.system]
        return sum(given_up.get(future.call_id, late) >= late for future in pending) + len(self.decoding)
