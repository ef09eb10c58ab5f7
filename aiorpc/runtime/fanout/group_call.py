"""A call to several workers: it collects their outcomes until all have come, or its quorum is decided.

The table has its states. `_came` has the outcomes in the order in which they came, with `_OVER` after the last one that
counts. The thread that enters an outcome checks whether it was the last one needed.

    from    event                                                to
    OPEN    a member answers, or will not; others are left       OPEN
    OPEN    the last one does, without a quorum                  settled with Outcomes
    OPEN    the quorum of values is reached                      settled with Outcomes; the rest is cancelled: missing
    OPEN    the quorum cannot be reached any more                settled with GroupError; the rest is cancelled
    OPEN    cancel                                               settled with RpcCancelled; the rest is cancelled

Invariants
1. Each member has one outcome, the first that comes. Outcomes after the end change nothing.
2. When it settles, no call of it is under way: calls under way are cancelled, and their callees hear that.
3. Once it is over, it does not refer to its calls, nor do ended calls refer to it: their values are freed with the
   outcomes, without the garbage collector.
4. It ends by itself: each of its calls has a deadline, the timeout of the group, and ends with its worker.
5. Several threads may bring outcomes at once, without a lock: each step is atomic, and changes nothing when repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from typing import Generic

from ... import foreign
from ..._typing import T
from ...callbacks import Executor
from ...errors import RpcCancelled
from ...futures import ArrivalForFuture, Future, wake
from ...overseeing import Watched, oversee
from ...progress import Bar
from ...sites import CallSite
from ..caller.member_call import MemberCall
from ..caller.unawaited import Unawaited
from ..calls.failures import came_from_afar
from ..engine.call_tracing import MadeSpan
from ..engine.engine import Engine
from .outcomes import Outcome, Outcomes

#: Stands in `_came`, in place of a member, after the last outcome that counts.
_OVER = -1


class GroupCall(Unawaited, Future[Outcomes[T]], Generic[T]):
    """The Future of a call to several workers: its `Outcomes`, in the order of members.

    ``async for name, outcome in call`` gives them as they come; `Outcome.result` has the value or raises the error.
    Leaving the loop early, or cancelling the waiting task, cancels the calls under way.
    """

    _executor: Executor | None
    _home_thread: int | None
    _loop: asyncio.AbstractEventLoop | None
    _arrival: ArrivalForFuture | None

    _apart = True
    _twins = True
    _span: MadeSpan | None = None  # if calls are traced

    def __init__(self, engine: Engine, function: str, names: Sequence[str], quorum: int | None, site: CallSite) -> None:
        """quorum: how many values are enough; None waits for an outcome of each member.

        over: whether to send nothing more, because it is decided or cancelled. calls: of the members, entered by the
        sending thread.
        """
        super().__init__()
        self._number: int = next(engine.numbers)
        self._subject: str = f"the call of {function} on {len(names)} workers"
        self._site: CallSite | None = site
        self._loop, self._home_thread, self._executor = engine.loop, engine.thread, engine.pool
        self._function = function
        self._names = names
        self._quorum = quorum
        self._over: bool = False
        self._calls: dict[int, Future[object] | MemberCall] = {}
        self._came: dict[int, Outcome[T] | None] = {}
        self._arrivals: dict[int, ArrivalForFuture] = {}
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._bar: Bar | None = None

    def _show(self, bar: Bar) -> None:
        """Show how many outcomes have come, until it settles."""
        self._bar = bar
        bar.show(0, len(self._names))
        self._when_settled(lambda _: bar.close())

    # --- what comes -----------------------------------------------------------------------------------------------

    def _follow(self, place: int, call: Future[object]) -> None:
        """Follow the Future of a member's call."""
        call._when_settled(partial(self._take_from, place))

    def _take_from(self, place: int, call: Future[object]) -> None:
        """A member's call has settled. Any thread."""
        call._mark_seen()
        if call._arrival is not None:
            self._arrivals[place] = call._arrival
        self._take(place, call._value, call._error)

    def _refused(self, place: int, error: BaseException) -> None:
        """Enter an error in place of a call to a member: nothing is sent to it."""
        # Without its frames, which hold the arguments and this call.
        self._take(place, None, foreign.with_traceback(error, None))

    def _take(self, place: int, value: object, error: BaseException | None) -> None:
        """Enter the outcome of a member. Any thread; the first outcome counts."""
        came = self._came
        if _OVER not in came:
            answered = error is None or came_from_afar(error)
            came.setdefault(place, Outcome(self._names[place], value, error, answered))  # type: ignore[arg-type]  # a T
            if len(came) >= len(self._names) or self._decided():
                self._end()
        if self._listeners:
            self._wake()
        if self._bar is not None:
            self._bar.show(min(len(came), len(self._names)), len(self._names))

    def _decided(self) -> bool:
        """Whether the quorum is reached, or cannot be reached any more."""
        quorum, members = self._quorum, len(self._names)
        if quorum is None or len(self._came) < min(quorum, members - quorum + 1):
            return False
        counted = self._counted()
        values = len([1 for outcome in counted.values() if outcome.error is None])
        return values >= quorum or len(counted) - values > members - quorum

    def _counted(self) -> dict[int, Outcome[T]]:
        """The outcomes that count so far, by the places of the members, in the order in which they came."""
        counted: dict[int, Outcome[T]] = {}
        for place, outcome in self._came.copy().items():
            if outcome is None:
                break
            counted[place] = outcome
        return counted

    def _end(self) -> None:
        """Settle it. May run more than once, also in several threads at once: all find the same outcomes."""
        self._came.setdefault(_OVER, None)
        outcomes = Outcomes(self._call_off(), self._function)
        if self._arrivals:
            self._arrival = _Arrivals([*self._arrivals.values()])
        values = len([1 for outcome in outcomes._all if outcome.error is None])
        if self._quorum is not None and values < self._quorum:
            self._settle(
                None, outcomes._failure(f"of {len(outcomes)} members, where {self._quorum} values are wanted,")
            )
            self._end_span(outcomes)
            return
        try:
            if self._quorum is None and values < len(outcomes):  # a quorum says how many may fail
                outcomes._watch(self._describe())
            self._settle(outcomes)
        finally:
            self._end_span(outcomes)
            if self._value is not outcomes:  # another thread settles it
                outcomes._mark_seen()

    def _end_span(self, outcomes: Iterable[Outcome[T]]) -> None:
        """End its span. outcomes: of its members."""
        span, self._span = self._span, None
        if span is not None:
            for outcome in outcomes:
                if outcome.error is not None:
                    span.failed_in_part("member_failed", outcome.name, outcome.error)
            span.ended(None, self)

    def _twin(self, value: Outcomes[T]) -> Outcomes[T]:
        return value._twin()

    def _call_off(self, why: str = "") -> list[Outcome[T]]:
        """Cancel the calls under way and forget all calls. Returns the outcomes, in the order of members.

        why: the reason; by default whether the quorum is reached or failed.
        """
        self._over = True  # set first: `send_all` checks it after it enters a call
        counted = self._counted()
        if not why:
            values = len([1 for outcome in counted.values() if outcome.error is None])
            enough = self._quorum is None or values >= self._quorum
            why = "enough others had answered" if enough else "too many others had failed for its quorum"
        outcomes = []
        for place, name in enumerate(self._names):
            outcome = counted.get(place)
            if outcome is None:
                error = RpcCancelled(f"{self._function} on worker {name!r} was called off: {why}")
                outcome = Outcome(name, None, error, False)
                call = self._calls.get(place)
                if call is not None:
                    call.cancel()
            outcomes.append(outcome)
        self._calls.clear()
        return outcomes

    def _on_cancel(self) -> None:
        self._came.setdefault(_OVER, None)
        self._call_off("it was cancelled")
        self._end_span(())
        self._wake()

    def _end_overdue(self, now: float) -> float:
        """See `Future`."""
        return min((call._end_overdue(now) for call in list(self._calls.values())), default=float("inf"))

    @property
    def _waiters(self) -> int:
        """How many wait for it now, or for its next outcome."""
        return super()._waiters + len(self._listeners)

    # --- as they come -------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncGenerator[tuple[str, Outcome[T]]]:
        """Name and outcome of each member, as they come; then what awaiting the call would raise. On any loop."""
        given = 0
        try:
            while True:
                over = self.done()  # read first: no outcome comes after it
                for place, outcome in list(self._counted().items())[given:]:
                    given += 1
                    arrival = self._arrivals.get(place)
                    if arrival is not None:
                        arrival.join()
                    yield outcome.name, outcome
                if over:
                    self.value()
                    return
                await self._more(given)
        finally:
            if not self.done() and not self._waiters:
                self.cancel()
            elif self._error is None and self._value is not None:
                self._value._mark_seen()

    async def _more(self, given: int) -> None:
        """Wait until more than `given` outcomes have come, or it is settled."""
        loop = asyncio.get_running_loop()
        listener = loop, loop.create_future()
        self._listeners.append(listener)
        watched: Watched | None = None
        try:
            if len(self._counted()) == given and not self.done():  # checked after entering the listener
                if loop is not self._loop:
                    watched = oversee(self, *listener)
                await listener[1]
        finally:
            self._listeners.remove(listener)
            if watched is not None:
                del watched[listener[1]]

    def _wake(self) -> None:
        for loop, waiter in list(self._listeners):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wake, waiter)


class _Arrivals:
    """Tensors of several answers that streams of devices still make."""

    def __init__(self, arrivals: Sequence[ArrivalForFuture]) -> None:
        self._arrivals = arrivals

    def join(self) -> None:
        """Make the current streams of this thread wait for all of them."""
        for arrival in self._arrivals:
            arrival.join()
