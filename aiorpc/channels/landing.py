"""The streams on which the tensors of a message arrive, and how the streams of their users wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

from .accelerator import Accelerator, Event, Stream, Tensor

# A device gets so many streams before a busy one is used again.
ENOUGH = 8

# The landing of the `async def` handler that the running task belongs to.
current_landing: ContextVar[Landing | None] = ContextVar("aiorpc_landing", default=None)


class Arrival:
    """Values that are being made on some streams: a user on other streams joins first. Any thread."""

    __slots__ = ("_accelerator", "_carriers", "_events")

    def __init__(
        self, accelerator: Accelerator, events: Sequence[tuple[int, Event]], carriers: Sequence[tuple[int, Tensor]]
    ) -> None:
        """events, carriers: each with its device; carriers are the memory that joining streams will use."""
        self._accelerator = accelerator
        self._events = events
        self._carriers = carriers

    def join(self) -> None:
        """Make the current streams of this thread wait for the values. No thread of the host waits.

        In a task that a handler has started (as `asyncio.gather` does), the handler's streams wait, too: the handler
        goes on with the value.
        """
        self._join()
        landing = current_landing.get()
        if landing is not None and not landing.is_entered():
            with landing.entered():
                self._join()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """The current streams of this thread, which have joined, will use these tensors."""
        driver = self._accelerator
        for tensor in filter(driver.holds, tensors):
            driver.keep(driver.carrier(tensor), driver.current(tensor.device.index))

    def _join(self) -> None:
        driver, streams = self._accelerator, dict[int, Stream]()
        for index, event in self._events:
            stream = streams[index] = driver.current(index)
            driver.wait(event, stream)
        for index, carrier in self._carriers:
            driver.keep(carrier, streams[index] if index in streams else driver.current(index))


class StreamPool:
    """Streams for messages that arrive: as few as are needed at once. Any thread.

    torch reserves freed memory for the stream that it was made for. With another of 32 streams for each message, a
    worker that receives tensors of a gigabyte would keep 32 gigabytes. One more stream is therefore taken only up to
    `ENOUGH`; if all of them are busy, a message waits behind others.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: dict[int, deque[Stream]] = {}
        self._known: dict[int, set[int]] = {}  # all streams that are lent or free, by their ids

    def take(self, indices: Sequence[int], lent: list[tuple[int, Stream]]) -> dict[int, Stream]:
        """One stream for each of these devices. Exclusive ones are added to `lent`, for `give`; if all of torch's
        streams are lent, two takers share one."""
        return {index: self._take(index, lent) for index in indices}

    def _take(self, index: int, lent: list[tuple[int, Stream]]) -> Stream:
        free = self._free.setdefault(index, deque())
        for _ in range(_LOOKS):
            try:
                stream = free.pop()  # the one given back last
            except IndexError:
                break
            if self._is_idle(stream):
                lent.append((index, stream))
                return stream
            free.appendleft(stream)  # busy
        known = self._known.setdefault(index, set())
        if len(known) >= ENOUGH:
            with suppress(IndexError):  # all are lent
                stream = free.pop()
                lent.append((index, stream))
                return stream
        for _ in range(_STREAMS):
            stream = self._accelerator.fresh(index)
            if id(stream) not in known:
                known.add(id(stream))
                lent.append((index, stream))
                break
        return stream

    def _is_idle(self, stream: Stream) -> bool:
        try:
            return self._accelerator.is_idle(stream)
        except RuntimeError:  # an error of the device: the stream's next user gets it, too
            return False

    def give(self, lent: list[tuple[int, Stream]]) -> None:
        """Free these streams, which may still be busy. Called from `__del__`, at any moment: each step is atomic."""
        for index, stream in lent:
            self._free[index].append(stream)


_LOOKS = 4  # at free streams, in search of an idle one
_STREAMS = 32  # in torch's pool


class Landing:
    """Where the tensors of one message arrive. pool, devices: take their streams; None: use the current ones."""

    __slots__ = ("_lent", "_pool", "accelerator", "carriers", "streams")

    def __init__(self, accelerator: Accelerator, pool: StreamPool | None = None, devices: Sequence[int] = ()) -> None:
        self.accelerator: Accelerator = accelerator
        self.carriers: list[tuple[int, Tensor]] = []  # of the tensors made so far, each with its device
        self._pool = pool
        self._lent: list[tuple[int, Stream]] = []
        self.streams: dict[int, Stream] = {} if pool is None else pool.take(devices, self._lent)  # by device

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.give(self._lent)

    def entered(self) -> AbstractContextManager[object]:
        """A context in which its streams are the current ones of this thread."""
        return self.accelerator.entered(list(self.streams.values())) if self.streams else nullcontext()

    def is_entered(self) -> bool:
        """Whether its streams are the current ones of this thread."""
        return all(self.accelerator.current(index) == stream for index, stream in self.streams.items())

    def remember(self) -> None:
        """From now on enter the streams that are current now."""
        for index in self.streams:
            self.streams[index] = self.accelerator.current(index)

    def arrival(self) -> Arrival | None:
        """What the users of the tensors wait for. Called with its streams current."""
        if not self.carriers:
            return None
        driver, events = self.accelerator, list[tuple[int, Event]]()
        for index in dict(self.carriers):  # once each
            stream = self.streams.get(index)
            events.append((index, driver.mark(driver.current(index) if stream is None else stream)))
        return Arrival(driver, events, self.carriers)


class LandedCoroutine:
    """A coroutine whose every step runs with the streams of a landing current; awaited once.

    Current streams belong to the thread: without this they would be those of all tasks of the loop across an
    ``await``. A stream that the coroutine itself makes current is current again when it goes on.
    """

    def __init__(self, coroutine: Coroutine[object, object, None], landing: Landing) -> None:
        self._coroutine = coroutine
        self._landing = landing

    def __await__(self) -> Generator[Any, Any, None]:
        iterator = self._coroutine.__await__()
        step, sent = iterator.send, None
        while True:
            with self._landing.entered():
                try:
                    yielded = step(sent)
                except StopIteration:
                    return
                self._landing.remember()
            try:
                sent = yield yielded
                step = iterator.send
            except GeneratorExit:
                with self._landing.entered():
                    iterator.close()
                raise
            except BaseException as error:
                step, sent = iterator.throw, error
