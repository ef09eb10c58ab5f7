"""Calls with retries: one Future for all tries, which are made one after the other.

Another try follows if the worker was lost, has left, or could not be reached; if a queue was full, here or there; if
the worker serves no object of that name, which its replacement may do soon; or if a group is empty just now. The
function's own error is its answer, and so is a final refusal of the callee: an Error says whether the call may be sent
again.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import NamedTuple, Protocol

from ... import foreign
from ...callbacks import Executor, current_autograd
from ...errors import (
    Overloaded,
    PeerLeft,
    PeerLost,
    PeerRefused,
    RpcTimeout,
    RpcUsageError,
    UnknownObject,
    UnknownWorker,
    WorkerClosed,
)
from ...futures import GRACE, ArrivalForFuture, Future
from ...locks import Lock
from ...protocol.identity import WorkerInfo
from ...protocol.messages import ObjectMethod
from ...protocol.retries import Backoff, Tries
from ...protocol.states import RetriedEvent
from ...protocol.trace_context import TraceContext
from ...sites import CallSite, describe_site
from ...undoing import on_error
from ..calls import tracing
from ..calls.current import CommonHome, current_call, is_nested
from ..calls.functions import describe, name_of
from ..calls.options import CallOptions
from ..calls.pending import PendingCall
from ..engine.call_tracing import MadeSpan
from ..engine.engine import Engine
from ..gradients.contexts import Gradients
from .future import CallFuture
from .peer import Peer
from .peers import Peers, To
from .unawaited import Unawaited

_PASSING = (PeerLost, PeerLeft, PeerRefused, Overloaded)
# Errors of a callee that permits another try. PeerLeft may come from a callee before its goodbye.
_REFUSALS = (Overloaded, UnknownObject, PeerLeft)


class RetryOptions(NamedTuple):
    """The retries of calls.

    idempotent: whether one worker runs each of them once at most. wait: whether each try waits for the worker to join.
    """

    retries: int
    backoff: Backoff
    idempotent: bool
    wait: bool


class RetryContext(CommonHome, Protocol):
    """The calling worker, as calls with retries need it."""

    gradients: Gradients
    peers: Peers


class Retries:
    """The calls with retries of one worker. Any thread.

    random: for the length of pauses; tests seed it. calls: the calls that have not ended; between two tries, in a pause
    or while the arguments are pickled, no other table has them. paused: the calls that wait for their next try.
    """

    def __init__(self, home: RetryContext) -> None:
        self.random: Random = Random()
        self.calls: set[RetriedFuture] = set()
        self.paused: set[RetriedFuture] = set()
        self._home = home
        self._numbers = itertools.count(1)
        self._closed = False

    def call(
        self,
        to: To | Callable[[], To],
        function: Callable[..., object] | ObjectMethod,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        timeout: float,
        options: RetryOptions,
        site: CallSite,
        *,
        met: bool = False,
    ) -> Future[object]:
        """Make a call with retries. timeout: seconds for all tries, 0 for no limit.

        to: the worker, or a function that chooses one for each try. met: whether there was a worker to choose before:
        then UnknownWorker is a failed try, as it always is after the first. Raises what `Peer.call` raises, but for
        Overloaded; RpcUsageError in a context of autograd.
        """
        # `current_autograd` may still name an ended context: in a task that began in it, or in a closed generator.
        if self._home.gradients.find(current_autograd.get() or 0) is not None:
            raise RpcUsageError(
                f"{describe(function)} is called with retries in an autograd context, and nothing was sent: the first "
                "try has its place in the graph, so a second one cannot take it; call it without retries"
            )
        engine = self._home.engine
        now = time.monotonic()
        deadline = now + timeout if timeout else None
        serving = current_call.get()
        if serving is not None and not serving.replied and serving.node is self._home and serving.deadline is not None:
            deadline = serving.deadline if deadline is None else min(deadline, serving.deadline)
        allowed = None if deadline is None else deadline - now
        tries = Tries(options.retries, options.backoff, deadline, self.random)
        number = next(self._numbers) if options.idempotent else None
        worker = None if callable(to) else to
        future = RetriedFuture(self, engine, tries, describe(function), worker, site, allowed)
        future.nested = is_nested(self._home)
        future.trace = tracing.current()
        if engine.tracer is not None:
            # Tries may go to several workers.
            future.span = engine.tracer.made(name_of(function) or future.function, None)
        future.begin(partial(self._make, to, function, args, kwargs, tries, number, options.wait, future), met)
        return future

    def _make(
        self,
        to: To | Callable[[], To],
        function: Callable[..., object] | ObjectMethod,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        tries: Tries,
        number: int | None,
        wait: bool,
        future: RetriedFuture,
    ) -> CallFuture:
        """One try. future: of the whole call."""
        seconds = 0.0 if tries.deadline is None else max(tries.deadline - time.monotonic(), 0.001)
        peer = self._home.peers.find(to() if callable(to) else to)
        once = None if number is None else (number, future.reached.count(peer))
        part_of = "retries", future.number
        site, span = future._site, future.span
        options = CallOptions(wait, site=site, once=once, allowed=future.allowed, part_of=part_of, span=span)
        with tracing.using(future.trace):  # a later try runs in another context
            return peer.call(function, args, kwargs, seconds, options=options)

    def pause(self, future: RetriedFuture, seconds: float) -> None:
        """A call begins to wait for its next try."""
        self.paused.add(future)
        if self._closed:  # read after the addition: `close` sees the call, or this thread sees `_closed`
            future.close()
        else:
            self._home.engine.call_on_loop(self._home.engine.loop.call_later, seconds, future.pause_over)

    def pending_calls(self) -> list[PendingCall]:
        """The calls between two tries; a running try is a pending call of its peer."""
        return [each.pending_call() for each in list(self.calls) if each.tried]

    def end_waits(self) -> list[str]:
        """The worker leaves: end paused calls of its program; their descriptions. On the loop."""
        own = [future for future in self.paused if not future.nested]
        for future in own:
            future.close()
        return [f"the next try of {future._subject}" for future in own]

    def close(self) -> None:
        """This worker leaves: no more tries. On the loop."""
        self._closed = True
        for future in list(self.paused):
            future.close()


class RetriedFuture(Unawaited, Future[object]):
    """The Future of a call with retries. Its states are the table `protocol.states.RETRIED`.

    reached: the peers of earlier tries that may have been sent, one entry for each try; a callee knows which of them it
    has run (`Remembered`). function: its name. to: the worker, None for one of a group. allowed: seconds of all tries
    together, None for no limit. tried: between two tries, the worker of the last one, for people; "" during a try.
    """

    allowed: float | None
    _deadline: float | None
    function: str
    to: To | None
    _executor: Executor | None
    _home_thread: int | None
    _loop: asyncio.AbstractEventLoop | None
    _sources: Sequence[Future[object]]
    _arrival: ArrivalForFuture | None

    _apart = True
    tried: str = ""
    nested = False  # whether a handler made it
    trace: TraceContext | None = None  # its trace context
    span: MadeSpan | None = None  # of all tries

    def __init__(
        self,
        retries: Retries,
        engine: Engine,
        tries: Tries,
        function: str,
        to: To | None,
        site: CallSite,
        allowed: float | None,
    ) -> None:
        super().__init__()
        self.number: int = next(engine.numbers)
        self._deadline, self.allowed = tries.deadline, allowed
        self.function, self.to = function, to
        self._subject: str = f"the call of {function} on {'one of a group' if to is None else f'worker {to!r}'}"
        self._site: CallSite | None = site
        self._loop, self._home_thread, self._executor = engine.loop, engine.thread, engine.pool
        self.reached: list[Peer] = []
        self._retries = retries
        self._engine = engine
        self._tries = tries
        self._began = time.monotonic()
        self._context = contextvars.copy_context()  # each try belongs to the handler's call that makes this one
        self._make: Callable[[], CallFuture] | None = None
        self._call: CallFuture | None = None
        self._lock = Lock()  # for `_tries`, `_call` and `_make`

    def begin(self, make: Callable[[], CallFuture], met: bool) -> None:
        """Make the first try. make: makes a try. met: as of `Retries.call`. Raises the errors of `Peer.call` but
        Overloaded."""
        self._make = make
        self._retries.calls.add(self)
        with on_error(self.cancel):  # the program does not get this Future
            try:
                self._follow(make())
            except (Overloaded, UnknownWorker) as error:
                if isinstance(error, UnknownWorker) and not met:
                    raise
                self._failed(error)

    def _follow(self, call: CallFuture) -> None:
        """A try is under way."""
        with self._lock:
            self._call, self.tried = call, ""
            over = self._make is None
        if over:  # given up meanwhile
            call.cancel()
        self._sources = (call,)
        call._when_settled(self._on_settled)

    def _on_settled(self, call: Future[object]) -> None:
        """A try has ended."""
        assert type(call) is CallFuture, "it was made by `Peer.call`"
        call._mark_seen()
        error = call._error
        if error is None:
            self._arrival = call._arrival
            self._end(RetriedEvent.ANSWERED, call._value, None)
        elif foreign.is_a(error, _REFUSALS if call.again else () if call.again is False else _PASSING):
            peer = call.peer
            assert isinstance(peer, Peer), "it was made by `Peer.call`"
            # Nothing is sent to an unknown worker, and a worker that is gone remembers no try.
            if peer.record is not None and peer.gone is None:
                self.reached.append(peer)
            self._failed(error)
        else:
            self._end(RetriedEvent.ANSWERED, None, error)

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            if self._make is None:
                return
            call, self._call = self._call, None
            self.tried = self._name_of(call)
            seconds = self._tries.failed(time.monotonic())
        if seconds is None:
            self._end(RetriedEvent.USED_UP, None, error)
        else:
            self._engine.counters.retried += 1
            if self.span is not None:
                self.span.failed_in_part("retry", self.tried, error)
            self._retries.pause(self, seconds)

    def _name_of(self, call: CallFuture | None) -> str:
        if call is not None and isinstance(call.peer, Peer):
            return call.peer.name
        to = self.to  # nothing was sent
        return "one of a group" if to is None else to.name if isinstance(to, WorkerInfo) else str(to)

    def pending_call(self) -> PendingCall:
        """Its entry in `Worker.pending_calls`. Any thread."""
        now, deadline = time.monotonic(), self._deadline
        left = None if deadline is None else deadline - now
        return PendingCall("made", self.tried, self.function, now - self._began, left, describe_site(self._site))

    def pause_over(self) -> None:
        """On the loop."""
        self._retries.paused.discard(self)
        with self._lock:
            if self._tries.again():
                # In the background: pickling arguments may take long and runs their code. In a copy of the context: the
                # try before may still be running in it.
                self._engine.in_background(self._context.copy().run, self._try_again)

    def _try_again(self) -> None:
        make = self._make
        if make is None:
            return
        try:
            call = make()
        except (Overloaded, UnknownWorker) as error:  # UnknownWorker: the group is empty now
            self._failed(error)
        except BaseException as error:
            self._end(RetriedEvent.ANSWERED, None, error)
        else:
            self._follow(call)

    def _end(self, event: RetriedEvent, value: object, error: BaseException | None) -> None:
        with self._lock:
            make, self._make = self._make, None  # kept to the end: freeing arguments runs code of users
            if make is None:
                return
            self._tries.end(event)
        self._retries.calls.discard(self)
        if error is not None and self._tries.made > 1:
            seconds = time.monotonic() - self._began
            foreign.add_note(error, f"it was tried {self._tries.made} times in {seconds:.3g} s")
        self._settle(value, error)
        self._end_span()

    def _end_overdue(self, now: float) -> float:
        """As of any Future. Between two tries there is no call to end, but a pause of the loop's."""
        due, deadline = super()._end_overdue(now), self._deadline
        if deadline is None or self._call is not None or self.done():
            return due
        if now < deadline + GRACE:
            return min(due, deadline)
        seconds = max(0.0, round(self.allowed or 0.0, 6))
        late = self._engine.why_late(now - deadline)
        what = self._describe()
        text = f"RPC ran for more than set timeout ({seconds:g} s): the next try of {what} was not made. {late}"
        worker = self.to if isinstance(self.to, str) else ""
        if self._settle(None, RpcTimeout(text, worker=worker, function=self.function, seconds=seconds)):
            self._on_cancel()
        return due

    def _on_cancel(self) -> None:
        with self._lock:
            make, self._make, call = self._make, None, self._call
            self._tries.end(RetriedEvent.GIVEN_UP)
        del make  # outside of the lock: see `_end`
        self._retries.paused.discard(self)
        self._retries.calls.discard(self)
        if call is not None:
            call.cancel()
        self._end_span()

    def _end_span(self) -> None:
        if self.span is not None:
            self.span.ended(None, self)

    def close(self) -> None:
        """The worker leaves."""
        self._retries.paused.discard(self)
        name = self._engine.name
        error = WorkerClosed(f"worker {name!r} shut down before the next try of {self._describe()}")
        self._end(RetriedEvent.CLOSED, None, error)
