"""News of the group for the user: workers that joined, left or were lost. Whoever listens may do so on any loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NoReturn

from ...errors import RpcUsageError
from ...locks import Lock
from ...logs import logger
from ...protocol.identity import WorkerInfo

# Events that wait for a listener to take them.
_MOST_EVENTS = 65_536


@dataclass(frozen=True)
class WorkerJoined:
    """A worker joined the group."""

    worker: WorkerInfo


@dataclass(frozen=True)
class WorkerLeft:
    """A worker left in good order."""

    worker: WorkerInfo


@dataclass(frozen=True)
class WorkerLost:
    """A worker died or cannot be reached any more. cause: what was seen."""

    worker: WorkerInfo
    cause: str


@dataclass(frozen=True)
class WorkerReplaced:
    """In a group of fixed size a new process has taken the place of a worker that was lost: its name and its rank.

    Calls by name and rank go to it from now on; references to values of the one before raise `PeerLost` for ever.
    """

    worker: WorkerInfo


@dataclass(frozen=True)
class WorkerSuspended:
    """The network to a worker has broken; it may live. WorkerResumed follows, or WorkerLost. cause: what was seen."""

    worker: WorkerInfo
    cause: str


@dataclass(frozen=True)
class WorkerResumed:
    """The network to a worker is back, and all goes on where it was: no call was lost, and none was run twice."""

    worker: WorkerInfo


Event = WorkerJoined | WorkerLeft | WorkerLost | WorkerReplaced | WorkerSuspended | WorkerResumed


class Events:
    """The listeners of one worker. Any thread."""

    def __init__(self) -> None:
        self._ended = False
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        # Of a task that waits asyncio itself holds no more than a weak reference. What it waits for is held here: it
        # leads to the task, so that a program need not keep the task for the news to come.
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
            for listener in list(self._listeners):
                listener._put(event)

    def end(self) -> None:
        """There will be no more news: the iterations of all listeners end."""
        with self._lock:
            self._ended = True
            for listener in list(self._listeners):
                listener._put(None)


class Listener(AsyncIterator[Event]):
    """Gets each event once, in order. `put` from any thread; iterated on any loop, by one task at a time.

    So many as wait at most (`_MOST_EVENTS`) are kept; of more the oldest are dropped, which is logged as it begins, and
    with how many there were at the next turn.
    """

    def __init__(self, on_close: Callable[[Listener], None], awaited: set[Listener]) -> None:
        """on_close: is called when it is to hear no more. awaited: it is in there while somebody waits for it."""
        self._on_close = on_close
        self._awaited = awaited
        self._events: deque[Event | None] = deque(maxlen=_MOST_EVENTS)
        self._dropped = 0  # since the last turn
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def _put(self, event: Event | None) -> None:
        """Add the next event; None ends the iteration."""
        if len(self._events) == self._events.maxlen:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning(
                    "nobody takes the events of a listener to the group, of which %d wait: the oldest ones are dropped "
                    "from now on. Iterate over what events() gives, or close it",
                    len(self._events),
                )
        self._events.append(event)
        if self._waiting is not None:
            loop, arrived = self._waiting
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits any more
                loop.call_soon_threadsafe(arrived.set)

    async def __anext__(self) -> Event:
        arrived = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), arrived  # before the look: what comes now wakes us
        while not self._events:  # the thread that has put the last one may wake us only now that it was taken
            arrived.clear()
            self._awaited.add(self)
            try:
                await arrived.wait()
            finally:
                self._awaited.discard(self)
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            logger.warning(
                "%d events of the group were dropped, the oldest first, as nobody took them in time", dropped
            )
        event = self._events.popleft()
        if event is None:
            self._events.appendleft(event)  # so is each turn from here on
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Listen no more."""
        self._on_close(self)
        self._events.clear()
        self._put(None)

    def __reduce__(self) -> NoReturn:
        """It hears what this worker hears."""
        raise RpcUsageError("what events() gives cannot be copied, pickled or sent; take the events, and send those")
