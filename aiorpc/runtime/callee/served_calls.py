"""The served calls of one caller: where a call begins at its callee, and where it ends.

A call enters `calls` in `ServedCalls.begin` only, and leaves it in `ServedCalls.end` only: by its answer, an error, its
caller, or the end of the connection. The table is `protocol.states.SERVED`.
"""

from __future__ import annotations

import time

from ...errors import ProtocolError
from ...protocol.states import CallOutcome
from ...rights import FETCH
from ..calls.current import ServedCall
from ..calls.functions import Handler
from ..calls.pending import PendingCall
from ..engine.call_events import CallEvent, CallKind, Step, tell_end, tell_step
from ..engine.engine import Engine


class ServedCalls:
    """See the module. Any thread, but for `begin`: on the loop, or in the thread of the pool that has read the call.

    calls: by number. queued: bytes of their messages on arrival. streams: how many of them are streams. system: how
    many are the runtime's own.
    """

    def __init__(self, engine: Engine, caller: str) -> None:
        """caller: the name of the calling worker."""
        self.calls: dict[int, ServedCall] = {}
        self.queued: int = 0
        self.streams: int = 0
        self.system: int = 0
        self._engine = engine
        self._counters = engine.counters
        self._caller = caller

    def begin(self, call: ServedCall) -> None:
        """Enter a call. ProtocolError if a call of that number is being served: nothing could end that one any more."""
        if call.call_id in self.calls:
            raise ProtocolError(f"call {call.call_id} has come, and the call of that number is being served")
        self.calls[call.call_id] = call
        self.queued += call.size
        if call.credit is not None:
            self.streams += 1
        if self._engine.call_observers:
            self.tell("started", call)

    def identify(self, call: ServedCall, handler: Handler) -> None:
        """Set the handler of a call."""
        call.handler = handler
        call.function = handler.name
        if handler.system:
            self._identify_system(call)
        else:
            self._counters.served += 1
            if self._engine.tracer is not None:
                call.span = self._engine.tracer.served(call)

    def fetch(self, call: ServedCall) -> None:
        """The call fetches the value of a reference, and runs nothing."""
        call.function = FETCH
        self._counters.served += 1
        if self._engine.tracer is not None:
            call.span = self._engine.tracer.served(call)

    def _identify_system(self, call: ServedCall) -> None:
        call.system = True
        if self.calls.get(call.call_id) is call:  # else it was cancelled while its module was imported
            self.system += 1

    def run(self, call: ServedCall) -> None:
        """Note that the handler of the call is called next."""
        call.begun = True
        if self._engine.call_observers:
            self.tell("running", call)

    def end(self, call: ServedCall, outcome: CallOutcome, size: int = 0) -> bool:
        """End a call: take it out of `calls`; False if another thread has ended it before. size: bytes of its answer.

        Its caller may have given it up and reused its number; the new call stays.
        """
        if self.calls.get(call.call_id) is not call or self.calls.pop(call.call_id, None) is None:
            return False
        self.queued -= call.size
        if call.credit is not None:
            self.streams -= 1
        if call.system:
            self.system -= 1
        else:
            self._counters.served_ended[outcome] += 1
            tally = self._engine.tally
            if tally is not None:
                now = time.monotonic()
                tally.served.add(call.function, outcome, now - call.started)
                if tally.pairs is not None:
                    tally.pairs.add("served", call.function, self._caller, outcome, call.started, now)
        if call.span is not None:
            call.span.ended(outcome)
        if self._engine.call_observers:
            tell_end(self._engine.call_observers, self._event(call, size), outcome)
        return True

    def tell(self, step: Step, call: ServedCall) -> None:
        """Call the observers for a step of a call."""
        tell_step(self._engine.call_observers, step, self._event(call))

    def _event(self, call: ServedCall, answer: int = 0) -> CallEvent:
        kind: CallKind = "call"
        if call.credit is not None:
            kind = "stream"
        elif call.creates is not None:
            kind = "remote"
        elif call.handler is None and call.function == FETCH:
            kind = "fetch"
        part_of: tuple[str, int | str] | None = None
        if call.batch:
            part_of = "batch", call.batch
        elif call.autograd is not None:
            part_of = "context", call.autograd
        return CallEvent(
            "served",
            self._caller,
            self._engine.name,
            call.call_id,
            call.function,
            kind,
            call.system,
            None,
            part_of,
            call.started,
            time.monotonic(),
            call.deadline,
            call.size,
            answer,
        )

    # --- looking ------------------------------------------------------------------------------------------------------

    def pending_calls(self) -> list[PendingCall]:
        """The served calls of users."""
        now = time.monotonic()
        return [
            PendingCall(
                "served",
                self._caller,
                call.function,
                now - call.started,
                None if call.deadline is None else call.deadline - now,
            )
            for call in list(self.calls.values())
            if not call.system
        ]

    def user_calls(self) -> int:
        """The number of served calls of users."""
        return sum(not call.system for call in list(self.calls.values()))
