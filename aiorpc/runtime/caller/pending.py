"""The pending calls to one peer: where a call begins at its caller, and where it ends.

A call enters `calls` in `PendingCalls.begin` only, and leaves it in `PendingCalls.end` only: by its answer, its
deadline, its caller, a failure to send it, or the loss of the peer. The table is `protocol.states.MADE`. Each try of a
call with retries is a call of its own here, in the counters, and for observers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

from ... import foreign
from ...channels.landing import Landing
from ...errors import PeerLeft, PeerLost, RpcError, RpcTimeout, WorkerClosed
from ...futures import GRACE
from ...logs import logger
from ...protocol.frames import Buffer
from ...protocol.messages import Values
from ...protocol.reference_messages import ReferenceId
from ...protocol.states import CallOutcome, PeerState
from ...rights import FETCH
from ...sites import describe_site
from ..calls.pending import PendingCall
from ..engine.call_events import CallEvent, Step, tell_end, tell_step
from ..engine.deadlines import Deadlines
from ..engine.engine import Engine
from .future import CallFuture, PeerOfCall, copy_for
from .member_call import MemberCall

#: A call at its caller: its Future, or a part of the call of a group.
MadeCall = CallFuture | MemberCall

_LOST = (PeerLost, PeerLeft, WorkerClosed)


class ItemSink(Protocol):
    """The consumer of a stream (`Stream`)."""

    def _on_item(self, item: Values, segments: list[Buffer], landing: Landing | None) -> None:
        """An item arrived; on the worker's loop. Raises ProtocolError for an item beyond the credit."""


class PendingCalls:
    """See the module. Any thread, unless a method says otherwise.

    ids: gives each call its number. calls: the pending calls, by number. streams: the consumers of streams, by number.
    lent: references that a call has lent to the callee, or whose value it calls, by number: they live until it ends.
    system: how many are calls of the runtime. decoding: the numbers of calls of users whose answers a background thread
    is unpickling.
    """

    def __init__(self, engine: Engine, deadlines: Deadlines, peer: PeerOfCall) -> None:
        self.ids: itertools.count[int] = itertools.count(1)
        self.calls: dict[int, MadeCall] = {}
        # Weak: a consumer that breaks out of its loop drops the stream, which stops the producer.
        self.streams: WeakValueDictionary[int, ItemSink] = WeakValueDictionary()
        self.lent: dict[int, list[Any]] = {}
        self.system: int = 0
        self.decoding: set[int] = set()
        self._given_up: dict[int, float] = {}
        self._engine = engine
        self._counters = engine.counters
        self._deadlines = deadlines
        self._peer = peer

    def begin(self, call: MadeCall, size: int = 0) -> None:
        """Enter a call, before it is sent. size: bytes of its message."""
        call_id, deadline = call.call_id, call._deadline
        self.calls[call_id] = call
        if call.system:
            self.system += 1
        else:
            self._counters.made += 1
        if deadline is not None and deadline < self._deadlines.next:
            self._deadlines.add(deadline)
        if self._engine.call_observers:
            call.size = size
            self.tell("started", call)

    def end(self, call_id: int, outcome: CallOutcome, now: float = 0.0, size: int = 0) -> MadeCall | None:
        """End a call: take it out of `calls`; None if another thread has ended it before.

        The caller settles the returned call. now: ``time.monotonic()``, for an answer. size: bytes of the answer.
        """
        call = self.calls.pop(call_id, None)
        if call is None:
            return None
        if self.lent or call.streamed:
            self.lent.pop(call_id, None)
            self.streams.pop(call_id, None)
        if call.system:
            self.system -= 1
        else:
            self._counters.made_ended[outcome] += 1
            if now:
                self._counters.latencies[int((now - call.started) * 1e6).bit_length()] += 1
            tally = self._engine.tally
            if tally is not None:
                now = now or time.monotonic()
                tally.made.add(call.entry.name, outcome, now - call.started)
                if tally.pairs is not None:
                    tally.pairs.add("made", call.entry.name, self._peer.name, outcome, call.started, now)
        if call.span is not None:
            call.span.ended(outcome, call)
        if self._engine.call_observers:
            tell_end(self._engine.call_observers, self._event(call, size), outcome)
        return call

    def tell(self, step: Step, call: MadeCall) -> None:
        """Call the observers for a step of a call."""
        tell_step(self._engine.call_observers, step, self._event(call))

    def _event(self, call: MadeCall, answer: int = 0) -> CallEvent:
        return CallEvent(
            "made",
            self._engine.name,
            self._peer.name,
            call.call_id,
            call.function,
            "fetch" if call.entry.number < 0 and call.function == FETCH else call.kind,
            call.system,
            call.parent,
            call.part_of,
            call.started,
            time.monotonic(),
            call._deadline,
            call.size,
            answer,
        )

    # --- ends without an answer ---------------------------------------------------------------------------------------

    def fail_one(self, call_id: int, error: RpcError) -> None:
        """End a call with that error: it cannot be sent, or the peer is gone."""
        call = self.end(call_id, CallOutcome.LOST if isinstance(error, _LOST) else CallOutcome.REFUSED)
        if call is not None:
            call._settle(None, copy_for(error, call))

    def fail(self, error: RpcError) -> None:
        """The peer is gone: end all calls with that error."""
        for call_id in list(self.calls):
            self.fail_one(call_id, error)

    def cancel(self, call_id: int) -> None:
        """The caller of that call has given up: end it and send CANCEL."""
        if self.end(call_id, CallOutcome.CANCELLED) is not None:
            self._peer.call_off(call_id)

    def _stop(self, call_id: int, outcome: CallOutcome, error: Callable[[MadeCall], RpcError]) -> MadeCall | None:
        """End a call with an error and send CANCEL; None if it has ended before."""
        call = self.end(call_id, outcome)
        if call is not None:
            call._settle(None, error(call))
            self._peer.call_off(call_id, outcome is CallOutcome.TIMEOUT)
        return call

    def fail_calls_of(self, rref: ReferenceId, error: RpcError) -> None:
        """The value of that reference was not created: end the calls of its methods and its fetches."""

        def failure(call: MadeCall) -> RpcError:
            text = f"{call._describe()} got no answer, as the value was never created: {foreign.text_of(error)}"
            failed = type(error)(text)
            failed.__dict__.update(error.__dict__)
            return failed

        for call_id, kept in list(self.lent.items()):
            if any(each._rref == rref for each in kept):
                self._stop(call_id, CallOutcome.REFUSED, failure)

    def end_waits(self, why: Callable[[str], WorkerClosed], *, calls: bool) -> list[str]:
        """This worker leaves: end the waits of its program, but not those of its handlers.

        why: makes the error of each. calls: also end calls of users' functions, and not only streams and `parked`
        calls. Returns descriptions of the ended ones. Calls of queues have no site, and the queues end them. On the
        loop.
        """
        ended, now = [], time.monotonic()
        for call in list(self.calls.values()):
            if call.parent is not None or (not call.parked and (call.system or call._site is None)):
                continue
            if not (calls or call.streamed or call.parked):
                continue
            if self._stop(call.call_id, CallOutcome.LOST, lambda ending: why(ending._describe())) is None:
                continue
            stream = f"the stream of {call.function} on worker {self._peer.name!r}"
            ended.append(f"{stream if call.streamed else call._subject}, since {now - call.started:.1f} s")
        return ended

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def scan_deadlines(self, now: float) -> float:
        """End the calls whose deadline has passed; the earliest deadline of the rest, or infinity. On the loop."""
        following = float("inf")
        # Not items(): making pairs can start the garbage collector, and with it other threads, during the iteration.
        for call in list(self.calls.values()):
            deadline = call._deadline
            if deadline is None:
                continue
            if deadline <= now:
                self.expire(call.call_id)
            elif deadline < following:
                following = deadline
        return following

    def expire(self, call_id: int, late: float = 0.0) -> None:
        """The time of that call is up. late: since how many seconds, if the loop has not noticed."""
        self._stop(call_id, CallOutcome.TIMEOUT, lambda call: self._timed_out(call, late))

    def end_overdue(self, call_id: int, now: float) -> float:
        """For a waiting thread: end that call if its time was up a while ago and the loop has not ended it.

        Returns its deadline if it is still to come, otherwise infinity. WorkerClosed in a forked child, which gets no
        answers.
        """
        self._engine.lifetime.check_not_forked()
        call = self.calls.get(call_id)
        if call is None or call._deadline is None:
            return float("inf")
        if now < call._deadline + GRACE:
            return call._deadline
        self.expire(call_id, now - call._deadline)
        return float("inf")

    def _timed_out(self, call: MadeCall, late: float) -> RpcTimeout:
        assert call._deadline is not None
        peer, state = self._peer, self._peer.state
        logger.debug("the time of %s is up; worker %r is %s", call._subject, peer.name, state.value)
        given = call._deadline - call.started if call.allowed is None else call.allowed
        seconds = round(given, 6)  # the timeout of the program, not 0.09999999999854481
        had = f"{seconds:g} s"
        if given < 0:
            seconds, had = 0.0, "0 s, as the time of the call that it is part of was over before it was made"
        outcome = ". It was told to stop, and may or may not have run."
        if state is PeerState.CONNECTING:
            stands = state.value + (peer.trouble and f": {peer.trouble}")
            if peer.record is None:
                stands = "no worker of that name has joined"
            outcome = f"; there is no connection to it yet ({stands}). Nothing was sent."
        elif late:  # the loop would send CANCEL
            outcome = ". It may or may not have run."
        why = self._engine.why_late(late) if late else ""
        error = RpcTimeout(
            f"RPC ran for more than set timeout ({had}): {call._describe()} got no answer{outcome}{why and ' '}{why}",
            worker=peer.name,
            function=call.function,
            seconds=seconds,
        )
        error.late = why
        return error

    # --- looking ------------------------------------------------------------------------------------------------------

    def pending_calls(self) -> list[PendingCall]:
        """The calls of users that this peer has not answered."""
        now = time.monotonic()
        return [
            PendingCall(
                "made",
                self._peer.name,
                call.function,
                now - call.started,
                None if call._deadline is None else call._deadline - now,
                describe_site(call._site),
            )
            for call in list(self.calls.values())
            if not call.system
        ]

    def give_up(self, call_id: int) -> None:
        """The program no longer waits for that call, but its answer counts: a leaving worker waits `Bounds.given_up`
        for it."""
        self._given_up = {each: since for each, since in self._given_up.items() if each in self.calls}
        if call_id in self.calls:
            self._given_up[call_id] = time.monotonic()

    def user_calls(self) -> int:
        """How many calls of users are pending or being decoded.

        Without calls that were given up a while ago, whose callee is stopped or cut off.
        """
        given_up, late = self._given_up, time.monotonic() - self._engine.bounds.given_up
        pending = [call for call in list(self.calls.values()) if not call.system]
        return sum(given_up.get(call.call_id, late) >= late for call in pending) + len(self.decoding)
