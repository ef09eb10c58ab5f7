"""News of the group: workers that joined, left or were lost, told to whoever listens, on any loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ..protocol.identity import WorkerInfo


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


Event = WorkerJoined | WorkerLeft | WorkerLost


class Events:
    """The listeners of one worker."""

    def __init__(self) -> None:
        self._ended = False
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Event | None]]] = []

    @property
    def listeners(self) -> int:
        """How many listen now."""
        return len(self._listeners)

    async def listen(self) -> AsyncGenerator[Event, None]:
        """Events from now on, until `end`."""
        if self._ended:
            return
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        listener = (asyncio.get_running_loop(), queue)
        self._listeners.append(listener)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.remove(listener)

    def publish(self, event: Event) -> None:
        """Tell all who listen. Any thread."""
        self._put(event)

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._put(None)

    def _put(self, event: Event | None) -> None:
        for loop, queue in list(self._listeners):
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, event)
