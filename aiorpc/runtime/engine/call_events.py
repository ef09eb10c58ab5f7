"""Call events: what observers see as a call begins, waits, runs and ends.

At each step the runtime calls the observers one after the other, in the thread that takes the step. Without observers a
step costs the test whether `Engine.call_observers` is empty.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from ... import foreign
from ...errors import RpcUsageError
from ...logs import logger
from ...protocol.states import CallOutcome
from ...sites import spates

CallKind = Literal["call", "stream", "remote", "fetch"]


@dataclass(frozen=True, slots=True)
class CallEvent:
    """One step of one call, as an observer of its caller, or of the worker that serves it, is shown it.

    side: "made" at the caller, "served" at the worker that serves it.
    caller, worker: the names of the two workers.
    call_id: its number among the calls from that caller to that worker; the same on both sides.
    function: its name; "?" as long as the worker that serves it does not know it.
    kind: "call"; "stream" of a generator, whose end is that of the call; "remote" of a call that makes the value of a
        reference; "fetch" of a call that brings the value of a reference.
    own: whether it is a call of the runtime's own: membership, references, published values, and what a queue or a
        backward pass says beside the program's calls.
    parent: at the caller: of the call whose handler has made this one, its caller and its number; None for a call that
        the program has made.
    part_of: what it is one of several calls of: ("group", number) of a group call, ("retries", number) of the tries of
        one call, ("queue", name) of what a queue does, ("published", name) of a published value, ("context", number) of
        an autograd context and its backward pass, ("batch", number) from when its batch runs. None for a call that
        stands alone.
    started: when it began on this side, and time: when this step was, in seconds of ``time.monotonic()``.
    deadline: when its time is up, in the same seconds; None if it has no limit.
    request_bytes, answer_bytes: of the message with its buffers, tensors among them; 0 as long as there is none.
    """

    side: Literal["made", "served"]
    caller: str
    worker: str
    call_id: int
    function: str
    kind: CallKind
    own: bool
    parent: tuple[str, int] | None
    part_of: tuple[str, int | str] | None
    started: float
    time: float
    deadline: float | None
    request_bytes: int
    answer_bytes: int


class CallObserver(Protocol):
    """Sees each step of each call of a worker, on both sides: see `aiorpc.Worker.observe_calls`.

    A call is `started` once and has `ended` once. Between these it may be `queued`, and `running`, once each as a rule;
    a call that waits twice is queued twice. The methods are called in the thread that takes the step, several at a
    time, also on the worker's loop: they return at once, and wait for nothing. What they raise is logged, and changes
    nothing for the call.
    """

    def started(self, call: CallEvent) -> None:
        """The call was written here, or has come."""

    def queued(self, call: CallEvent) -> None:
        """It waits: for a connection to its worker; or, where it is served, for a thread, a batch, or room."""

    def running(self, call: CallEvent) -> None:
        """It was handed to the connection; or, where it is served, its handler is called now."""

    def ended(self, call: CallEvent, outcome: CallOutcome) -> None:
        """It has ended on this side: at the caller with or without an answer, at the callee when the answer is on its
        way."""


_METHODS = ("started", "queued", "running", "ended")


def check_observer(observer: object) -> None:
    """Raise RpcUsageError if it is no `CallObserver`."""
    missing = [name for name in _METHODS if not callable(getattr(observer, name, None))]
    if missing:
        raise RpcUsageError(
            f"an observer of calls has the methods {', '.join(_METHODS)}; {observer!r:.80} lacks {missing}"
        )


CallObservers = tuple[CallObserver, ...]
Step = Literal["started", "queued", "running"]


def tell_step(observers: Sequence[CallObserver], step: Step, event: CallEvent) -> None:
    """Call the observers for any step but the last one."""
    for observer in observers:
        try:
            getattr(observer, step)(event)
        except Exception as error:
            _log(observer, step, error)


def tell_end(observers: Sequence[CallObserver], event: CallEvent, outcome: CallOutcome) -> None:
    """Call the observers for the end of a call."""
    for observer in observers:
        try:
            observer.ended(event, outcome)
        except Exception as error:
            _log(observer, "ended", error)


def _log(observer: CallObserver, step: str, error: Exception) -> None:
    name = f"{type(observer).__qualname__}.{step}"
    more = spates.line(f"{name} raised")
    if more is not None:
        foreign.log_error(logger, logging.ERROR, error, "the observer of calls %s raised%s", name, more)


class Observation:
    """Shows calls to an observer until `close`, or until the end of a ``with`` block. Any thread."""

    def __init__(self, engine: ObservedEngine, observer: CallObserver) -> None:
        self._engine = engine
        self._observer = observer
        with engine.observing:
            engine.call_observers = (*engine.call_observers, observer)

    def close(self) -> None:
        """End the observation. Idempotent. The observer may still see steps that are under way in other threads."""
        with self._engine.observing:
            self._engine.call_observers = tuple(
                each for each in self._engine.call_observers if each is not self._observer
            )

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ObservedEngine(Protocol):
    """The engine whose calls are observed. call_observers: read without a lock, so it is replaced as a whole.

    observing: for changes of it.
    """

    call_observers: CallObservers

    @property
    def observing(self) -> AbstractContextManager[bool]: ...
