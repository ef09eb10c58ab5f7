"""When calls have waited long enough: one heap and one timer for all pending calls of a worker."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

_SOON = 0.0005  # a timer is not set for less than this, in seconds


class Deadlines:
    """Calls `expire(owner, call_id)` on the loop once a deadline has passed.

    `add` may be called from any thread. An answered call stays in the heap until it is due or the heap is cleaned, which
    happens when less than half of it can still be pending: a removal would cost more than it saves.

    `_armed` is the time that the timer is set for. The loop sets it to infinity before it looks at the heap, so an adder
    that comes too late for that look sees infinity and asks for another.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_pending: Callable[[Any, int], bool]) -> None:
        self.expire: Callable[[Any, int], None] = lambda owner, call_id: None
        self._loop = loop
        self._is_pending = is_pending
        # deadline, a number that no other entry has (it ends every comparison), call id, owner
        self._heap: list[tuple[float, int, int, Any]] = []
        self._numbers = itertools.count()
        self._clean_at = 1024
        self._lock = threading.Lock()
        self._armed = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, deadline: float, call_id: int, owner: Any) -> None:
        """Watch one call of `owner` until `deadline` (``time.monotonic()`` seconds)."""
        with self._lock:
            heapq.heappush(self._heap, (deadline, next(self._numbers), call_id, owner))
            if len(self._heap) > self._clean_at:
                self._clean()
        if deadline < self._armed and not self._closed:
            self._loop.call_soon_threadsafe(self._rearm)

    def close(self) -> None:
        """Stop watching; on the loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()

    def _clean(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_pending(entry[3], entry[2])]
        heapq.heapify(self._heap)
        self._clean_at = max(1024, 2 * len(self._heap))

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        self._armed = float("inf")
        with self._lock:
            while self._heap and not self._is_pending(self._heap[0][3], self._heap[0][2]):
                heapq.heappop(self._heap)
            first = self._heap[0][0] if self._heap else None
        if first is not None:
            self._armed = first
            self._timer = self._loop.call_later(max(_SOON, first - time.monotonic()), self._fire)

    def _fire(self) -> None:
        now = time.monotonic()
        due: list[tuple[Any, int]] = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                _, _, call_id, owner = heapq.heappop(self._heap)
                due.append((owner, call_id))
        for owner, call_id in due:
            self.expire(owner, call_id)
        self._rearm()

