"""A call to several workers, from when it is sent until all that is waited for has come.

Its states, and what leads from one to the next. `_lock` decides: whoever makes it over settles it.

    from    event                                                to
    OPEN    a member answers, or will not; others are left       OPEN
    OPEN    the last one does, without a quorum                  settled with Outcomes
    OPEN    so many have given a value as the quorum asks for    settled with Outcomes; the rest is called off, missing
    OPEN    too few are left for the quorum                      settled with GroupError; the rest is called off
    OPEN    cancel                                               settled with RpcCancelled; the rest is called off

Invariants
1. Each member has one outcome, the first that comes. What comes after it is over changes nothing.
2. When it is settled no call of it is under way: those that were are called off, and their callees told so.
3. Once it is over nothing leads from here to the calls, nor from those that have ended to here: what they have brought
   goes with the last who holds the outcomes, and not when the garbage collector comes by.
4. It ends by itself: each of its calls has a deadline, the timeout of the group, and ends with its worker.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from ... import foreign
from ...errors import RpcCancelled
from ...futures import ArrivalForFuture, Future
from ...sites import CallSite
from ..caller.member_call import MemberCall
from ..calls.failures import came_from_afar
from ..engine.engine import Engine
from .outcomes import Outcome, Outcomes

_new: Any = tuple.__new__  # what Outcome(...) does, without its call into Python


class GroupCall(Future[Outcomes]):
    """The Future of a call to several workers: its `Outcomes`, in the order of members.

    ``async for name, outcome in call`` gives them as they come; `Outcome.result` has the value or raises the error.
    Leaving the loop early, and cancelling the task that waits here, calls off what is under way.
    """

    _apart = True
    _twins = True

    def __init__(self, engine: Engine, function: str, names: Sequence[str], quorum: int | None, site: CallSite) -> None:
        """quorum: how many values are enough; None waits for all members, whatever they answer.

        over: whether nothing more is to be sent, as enough have answered, or it was cancelled. calls: those to the
        members, entered by whoever sends them.
        """
        super().__init__()
        self.subject = f"the call of {function} on {len(names)} workers"
        self.site = site
        self.loop, self.executor = engine.loop, engine.pool
        self._function = function
        self._names = names
        self._quorum = quorum
        self._lock = threading.Lock()
        self.over = False
        self.calls: dict[int, Future[Any] | MemberCall] = {}
        self._outcomes: list[Outcome | None] = [None] * len(names)
        self._order: list[int] = []  # places, as their outcomes came
        self._values = 0
        self._arrivals: dict[int, ArrivalForFuture] = {}
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    # --- what comes -----------------------------------------------------------------------------------------------

    def follow(self, place: int, call: Future[Any]) -> None:
        """The call to the member of that place is a Future of its own."""
        call.when_settled(partial(self._on_settled, place))

    def _on_settled(self, place: int, call: Future[Any]) -> None:
        call.mark_seen()
        if call.arrival is not None:
            self._arrivals[place] = call.arrival
        self.take(place, call._value, call._error)

    def refused(self, place: int, error: BaseException) -> None:
        """Nothing is sent to the member of that place, for that reason."""
        self.take(
            place, None, foreign.with_traceback(error, None)
        )  # its frames hold what was to be sent, and this call

    def take(self, place: int, value: Any, error: BaseException | None) -> None:
        """The member of that place has answered, or will not. Any thread; the first outcome counts."""
        answered = error is None or came_from_afar(error)
        with self._lock:
            if self.over or self._outcomes[place] is not None:
                return
            self._outcomes[place] = _new(Outcome, (self._names[place], value, error, answered))
            self._order.append(place)
            if error is None:
                self._values += 1
            left = len(self._names) - len(self._order)
            quorum = self._quorum
            enough = quorum is not None and (self._values >= quorum or self._values + left < quorum)
            self.over = over = not left or enough
        if over:
            self._end()
        if self._listeners:
            self._wake()

    def _end(self) -> None:
        self._call_off("enough others had answered")
        outcomes = Outcomes([outcome for outcome in self._outcomes if outcome is not None], self._function)
        if self._arrivals:
            self.arrival = _Arrivals([*self._arrivals.values()])
        if self._quorum is not None and self._values < self._quorum:
            self.settle(None, outcomes.failure(f"of {len(outcomes)} members, where {self._quorum} values are wanted,"))
        else:
            if self._quorum is None and self._values < len(outcomes):  # a quorum says how many may fail
                outcomes.watch(self.describe())
            self.settle(outcomes)

    def _twin(self, value: Outcomes) -> Outcomes:
        return value.twin()

    def _call_off(self, why: str) -> None:
        """Cancel the calls that are under way, if any are."""
        for place, outcome in enumerate(self._outcomes):
            if outcome is None:
                name = self._names[place]
                error = RpcCancelled(f"{self._function} on worker {name!r} was called off: {why}")
                self._outcomes[place] = Outcome(name, None, error, False)
                call = self.calls.get(place)
                if call is not None:
                    call.cancel()
        self.calls.clear()

    def _on_cancel(self) -> None:
        with self._lock:
            over, self.over = self.over, True
        if not over:
            self._call_off("it was cancelled")
        self._wake()

    @property
    def waiters(self) -> int:
        """Who waits for it now, those among them that wait for the next outcome."""
        return super().waiters + len(self._listeners)

    # --- as they come -------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncGenerator[tuple[str, Outcome]]:
        """Name and outcome of each member, as they come; then what awaiting the call would raise. On any loop."""
        given = 0
        try:
            while True:
                over = self.done()  # looked at first: no outcome comes after that
                while given < len(self._order):
                    place = self._order[given]
                    given += 1
                    outcome, arrival = self._outcomes[place], self._arrivals.get(place)
                    assert outcome is not None, "its place is entered after it"
                    if arrival is not None:
                        arrival.join()
                    yield outcome.name, outcome
                if over:
                    self.value()
                    return
                await self._more(given)
        finally:
            if not self.done() and not self.waiters:
                self.cancel()
            elif self._error is None and self._value is not None:
                self._value.mark_seen()

    async def _more(self, given: int) -> None:
        """Wait until more outcomes have come than these, or it is settled."""
        listener = asyncio.get_running_loop(), asyncio.Event()
        self._listeners.append(listener)
        try:
            if len(self._order) == given and not self.done():  # looked at after it was entered
                await listener[1].wait()
        finally:
            self._listeners.remove(listener)

    def _wake(self) -> None:
        for loop, event in list(self._listeners):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


class _Arrivals:
    """The tensors of several answers that are still being made on streams of devices."""

    def __init__(self, arrivals: Sequence[ArrivalForFuture]) -> None:
        self._arrivals = arrivals

    def join(self) -> None:
        """Make the current streams of this thread wait for all of them."""
        for arrival in self._arrivals:
            arrival.join()
