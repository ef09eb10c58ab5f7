"""Streams of a device that does not exist: queues, and one thread that works through them in an order of its own."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

Range = tuple[int, int]  # address, bytes
POLL = 0.0005  # seconds between looks at what another process has to do
STARVED, STARVED_FOR = 0.1, 6  # how often an operation is held up, and how many times the usual lag at most
LATEST_FIRST = 0.7  # how often the stream that was given work last goes first


class Stream:
    """A queue of one device. Nobody but `Machine` looks inside."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.queue: deque[Operation] = deque()

    def __repr__(self) -> str:
        return f"<{self.name} of device {self.index}>"


class Operation:
    """One entry of a queue."""

    def __init__(
        self,
        name: str,
        run: Callable[[], None] | None,
        ready: Callable[[], bool] | None,
        ranges: tuple[Range, ...],
        number: int,
    ) -> None:
        self.name = name
        self.run = run
        self.ready = ready
        self.ranges = ranges
        self.number = number
        self.due: float | None = None
        self.patience: float | None = None  # until when it waits for what others do

    def touches(self, address: int, size: int) -> bool:
        """Whether it reads or writes there."""
        return any(start < address + size and address < start + length for start, length in self.ranges)


class Mark:
    """An event of this process, recorded once."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.done = False

    def __repr__(self) -> str:
        return f"<event on {self.stream}>"


class Machine:
    """Does what the streams of one process are given: in order within one, in any order between them.

    lag: seconds between which each operation on memory is late. patience: seconds that a stream waits for an event at
    most. policy: "adversarial", or "fair" for the order in which the operations were given. report: takes violations.
    """

    def __init__(
        self, *, seed: int, lag: tuple[float, float], patience: float, policy: str, report: Callable[[str], None]
    ) -> None:
        if policy not in ("adversarial", "fair"):
            raise ValueError(f"policy {policy!r}")
        self.lock = threading.Condition(threading.RLock())
        self.housekeeping: list[Callable[[], None]] = []  # called with the lock, before anything is enqueued or done
        self._random = random.Random(seed)
        self._lag = lag
        self._patience = patience
        self._fair = policy == "fair"
        self._report = report
        self._busy: dict[Stream, None] = {}
        self._latest: Stream | None = None
        self._number = 0
        self._thread: threading.Thread | None = None
        self._abandoned = False
        self.closed = False

    def enqueue(
        self,
        stream: Stream,
        name: str,
        run: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
        ranges: Iterable[Range] = (),
    ) -> None:
        """Give a stream work. ready: asked until it says yes. Raises RuntimeError after `close`."""
        with self.lock:
            for task in self.housekeeping:
                task()
            self.enqueue_now(stream, name, run, ready, ranges)

    def enqueue_now(
        self,
        stream: Stream,
        name: str,
        run: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
        ranges: Iterable[Range] = (),
    ) -> None:
        """`enqueue` for the housekeeping itself; with the lock."""
        if self.closed:
            raise RuntimeError(f"{name}: the fake device is closed")
        self._number += 1
        stream.queue.append(Operation(name, run, ready, tuple(ranges), self._number))
        self._busy[stream] = None
        self._latest = stream
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fake-device", daemon=True)
            self._thread.start()
        self.lock.notify_all()

    def mark(self, stream: Stream) -> Mark:
        """An event that has recorded the stream."""
        mark = Mark(stream)
        self.enqueue(stream, "record", lambda: setattr(mark, "done", True))
        return mark

    def mark_now(self, stream: Stream) -> Mark:
        """`mark` for the housekeeping; with the lock. Done at once if the stream has nothing to do."""
        mark = Mark(stream)
        if stream.queue:
            self.enqueue_now(stream, "record", lambda: setattr(mark, "done", True))
        else:
            mark.done = True
        return mark

    def wait(self, mark: Mark, stream: Stream) -> None:
        """Hold up a stream until the event is done."""
        self.enqueue(stream, f"wait for {mark}", ready=lambda: mark.done)

    def synchronize(self, mark: Mark) -> None:
        """Block this thread until the event is done. RuntimeError when that takes too long."""
        if not self.wait_until(lambda: mark.done, self._patience + 5):
            self._report(f"synchronize: {mark} was not done within {self._patience + 5:g} s")
            raise RuntimeError(f"{mark} is not done")

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Block this thread until something holds; whether it did in time."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the device cannot wait for itself")
        with self.lock:
            return self.lock.wait_for(lambda: condition() or self.closed, timeout) and condition()

    def pending(self, address: int, size: int) -> Iterator[tuple[Stream, Operation]]:
        """What was given and is not done, and reads or writes there; with the lock."""
        for stream in self._busy:
            for operation in stream.queue:
                if operation.touches(address, size):
                    yield stream, operation

    def settle(self, index: int) -> bool:
        """Block this thread until a device has done all that it was given until now; whether that was in time."""
        with self.lock:
            marks = [self.mark_now(stream) for stream in list(self._busy) if stream.index == index]
        return self.wait_until(lambda: all(mark.done for mark in marks), self._patience + 5)

    def drain(self, timeout: float) -> bool:
        """Block this thread until all is done; whether that was in time."""
        return self.wait_until(lambda: not self._busy, timeout)

    def abandon(self) -> None:
        """Wait for nothing any more: those streams go on that wait for what will not come."""
        with self.lock:
            self._abandoned = True
            self.lock.notify_all()

    def close(self, timeout: float) -> bool:
        """Finish what was given, within seconds, and stop. Whether all was done."""
        drained = self.drain(timeout)
        if not drained:
            self.abandon()
            self.drain(timeout)
        with self.lock:
            self.closed = True
            self.lock.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        return drained

    def _work(self) -> None:
        while True:
            with self.lock:
                stream = self._next()
                if stream is None:
                    return
                operation = stream.queue[0]
            self._do(stream, operation)
            with self.lock:
                stream.queue.popleft()  # only now: until here it is pending
                if not stream.queue:
                    del self._busy[stream]
                self.lock.notify_all()

    def _do(self, stream: Stream, operation: Operation) -> None:
        if operation.run is None:
            return
        try:
            operation.run()
        except Exception as error:
            self._report(f"{operation.name} on {stream}: {type(error).__name__}: {error}")
        finally:
            operation.run = None  # what it refers to ends here, not when the queue is looked at again

    def _next(self) -> Stream | None:
        """The stream whose turn it is, when there is one; None when closed."""
        while not self.closed:
            for task in self.housekeeping:
                task()
            now = time.monotonic()
            runnable, pause = self._survey(now)
            if runnable:
                return self._choose(runnable)
            self.lock.wait(pause)
        return None

    def _survey(self, now: float) -> tuple[list[Stream], float | None]:
        """The streams whose next operation can be done, and after how many seconds to look again if there is none."""
        runnable: list[Stream] = []
        pause: float | None = None
        for stream in self._busy:
            operation = stream.queue[0]
            if operation.due is None:
                operation.due = now + self._draw_lag(operation)
            if operation.due > now:
                wanted = operation.due - now
            elif self._blocked(stream, operation, now):
                wanted = POLL
            else:
                runnable.append(stream)
                continue
            pause = wanted if pause is None else min(pause, wanted)
        return runnable, pause

    def _blocked(self, stream: Stream, operation: Operation, now: float) -> bool:
        if operation.ready is None or self._abandoned:
            return False
        try:
            if operation.ready():
                return False
        except RuntimeError as error:
            self._report(f"{operation.name} on {stream}: {error}")
            return False
        if operation.patience is None:
            operation.patience = now + self._patience
        if now < operation.patience:
            return True
        self._report(f"{operation.name} on {stream}: gave up after {self._patience:g} s")
        return False

    def _draw_lag(self, operation: Operation) -> float:
        if not operation.ranges:  # to record or wait a moment later changes nothing that anybody sees
            return 0.0
        lag = self._random.uniform(*self._lag)
        if not self._fair and self._random.random() < STARVED:
            lag *= self._random.uniform(1, STARVED_FOR)
        return lag

    def _choose(self, runnable: list[Stream]) -> Stream:
        if self._fair:
            return min(runnable, key=lambda stream: stream.queue[0].number)
        if self._latest in runnable and self._random.random() < LATEST_FIRST:
            return self._latest
        return self._random.choice(runnable)
