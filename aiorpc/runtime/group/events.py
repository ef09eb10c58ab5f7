"""Membership events for the user: workers that joined, left or were lost. Listeners may be on any loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NoReturn

from ...errors import RpcUsageError
from ...locks import Lock
from ...logs import logger
from ...protocol.identity import WorkerInfo

# Events kept for a listener that does not take them.
_MOST_EVENTS = 65_536
# Events kept for those who look at the worker from outside.
_RECENT = 256


@dataclass(frozen=True)
class WorkerJoined:
    """A worker joined the group. worker: its name and id."""

    worker: WorkerInfo


@dataclass(frozen=True)
class WorkerLeft:
    """A worker left in good order. worker: its name and id."""

    worker: WorkerInfo


@dataclass(frozen=True)
class WorkerLost:
    """A worker died or cannot be reached any more. worker: its name and id. cause: what was seen."""

    worker: WorkerInfo
    cause: str


@dataclass(frozen=True)
class WorkerReplaced:
    """In a fixed group a new process has taken the name and rank of a worker that was lost or has left.

    Calls by name and rank go to it from now on. References to values of the old process raise `PeerLost`.

    worker: its name and id.
    """

    worker: WorkerInfo


@dataclass(frozen=True)
class WorkerSuspended:
    """The connection to a worker broke, and the worker may live. `WorkerResumed` follows, or `WorkerLost`.

    worker: its name and id. cause: what was seen.
    """

    worker: WorkerInfo
    cause: str


@dataclass(frozen=True)
class WorkerResumed:
    """The connection to a worker is back. All goes on where it was: no call was lost, and none ran twice.

    worker: its name and id.
    """

    worker: WorkerInfo


Event = WorkerJoined | WorkerLeft | WorkerLost | WorkerReplaced | WorkerSuspended | WorkerResumed


class Events:
    """The listeners of one worker. Any thread. recent: the last events, each with its time (``time.time()``)."""

    def __init__(self) -> None:
        self.recent: deque[tuple[float, Event]] = deque(maxlen=_RECENT)
        self._ended = False
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        # asyncio holds waiting tasks weakly. Their listeners, which lead to the tasks, are held here for the program.
        self._awaited: set[Listener] = set()
        self._lock = Lock()

    @property
    def listeners(self) -> int:
        """How many listeners there are now."""
        return len(self._listeners)

    def listen(self) -> Listener:
        """Events from now on, until `end`."""
        with self._lock:
            listener = Listener(self._drop, self._awaited)
            if self._ended:
                listener._put(None)
            else:
                self._listeners.add(listener)
        return listener

    def _drop(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def publish(self, event: Event) -> None:
        """Tell all listeners."""
        with self._lock:
            self.recent.append((time.time(), event))
            for listener in list(self._listeners):
                listener._put(event)

    def end(self) -> None:
        """There are no more events: the iterations of all listeners end."""
        with self._lock:
            self._ended = True
            for listener in list(self._listeners):
                listener._put(None)


class Listener(AsyncIterator[Event]):
    """What `Worker.events` returns: an asynchronous iterator of events. On any loop, for one task at a time.

    It has each event once, in order. Of events that nothing takes the latest 65,536 are kept; dropping the older ones
    is logged.
    """

    def __init__(self, on_close: Callable[[Listener], None], awaited: set[Listener]) -> None:
        """on_close: called when it is closed. awaited: contains it while a task waits for it."""
        self._on_close = on_close
        self._awaited = awaited
        self._events: deque[Event | None] = deque(maxlen=_MOST_EVENTS)
        self._dropped = 0  # since the last event taken
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def _put(self, event: Event | None) -> None:
        """Add the next event; None ends the iteration."""
        if len(self._events) == self._events.maxlen:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning(
                    "a listener to the group does not take its events, of which %d wait: the oldest ones are dropped "
                    "from now on. Iterate over what events() gives, or close it",
                    len(self._events),
                )
        self._events.append(event)
        if self._waiting is not None:
            loop, arrived = self._waiting
            with contextlib.suppress(RuntimeError):  # that loop is closed, and its task gone
                loop.call_soon_threadsafe(arrived.set)

    async def __anext__(self) -> Event:
        arrived = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), arrived  # before the look: an event that comes now wakes this task
        while not self._events:  # a wake-up may come after its event was taken
            arrived.clear()
            self._awaited.add(self)
            try:
                await arrived.wait()
            finally:
                self._awaited.discard(self)
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            logger.warning(
                "%d events of the group were dropped, the oldest first, because they were not taken in time", dropped
            )
        event = self._events.popleft()
        if event is None:
            self._events.appendleft(event)  # every later turn ends, too
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Listen no more."""
        self._on_close(self)
        self._events.clear()
        self._put(None)

    def __reduce__(self) -> NoReturn:
        """A listener is bound to this worker."""
        raise RpcUsageError("what events() gives cannot be copied, pickled or sent; take the events, and send those")
