"""Streams and received tensors: on which streams a message arrives, and how others come to wait for it."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

from .accelerator import Accelerator, Event, Stream, Tensor

# Of the `async def` handler that the running task belongs to.
current_landing: ContextVar[Landing | None] = ContextVar("aiorpc_landing", default=None)


class Arrival:
    """Values that are being made on some streams: who uses them on others joins first. Any thread."""

    __slots__ = ("_accelerator", "_carriers", "_events")

    def __init__(
        self, accelerator: Accelerator, events: Sequence[tuple[int, Event]], carriers: Sequence[tuple[int, Tensor]]
    ) -> None:
        """events, carriers: each with the device it is of; carriers are the memory that joining streams will use."""
        self._accelerator = accelerator
        self._events = events
        self._carriers = carriers

    def join(self) -> None:
        """Make the current streams of this thread wait for them. Nothing on the host waits.

        In a task that a handler has started (`asyncio.gather` makes such), those of the handler, too: it is the handler
        that goes on with the value.
        """
        self._join()
        landing = current_landing.get()
        if landing is not None and not landing.is_entered():
            with landing.entered():
                self._join()

    def _join(self) -> None:
        driver = self._accelerator
        for index, event in self._events:
            driver.wait(event, driver.current(index))
        for index, carrier in self._carriers:
            driver.keep(carrier, driver.current(index))


class Landing:
    """Where the tensors of one message arrive. streams: by device; none: on those that are current."""

    __slots__ = ("_streams", "accelerator", "carriers")

    def __init__(self, accelerator: Accelerator, streams: Mapping[int, Stream] | None = None) -> None:
        self.accelerator = accelerator
        self.carriers: list[tuple[int, Tensor]] = []  # of the tensors that were made, each with its device
        self._streams = dict(streams or {})

    def entered(self) -> AbstractContextManager[object]:
        """Within it its streams are the current ones of this thread."""
        return self.accelerator.entered(list(self._streams.values())) if self._streams else nullcontext()

    def is_entered(self) -> bool:
        """Whether its streams are the current ones of this thread."""
        return all(self.accelerator.current(index) == stream for index, stream in self._streams.items())

    def remember(self) -> None:
        """The streams that are current now are the ones to enter from now on."""
        for index in self._streams:
            self._streams[index] = self.accelerator.current(index)

    def arrival(self) -> Arrival | None:
        """What the users of the tensors that were made wait for. With its streams current."""
        if not self.carriers:
            return None
        driver = self.accelerator
        events = [(index, driver.mark(driver.current(index))) for index in {index for index, _ in self.carriers}]
        return Arrival(driver, events, self.carriers)


class LandedCoroutine:
    """A coroutine whose every step runs with the streams of a landing current; awaited once.

    Current streams belong to the thread: left set across an ``await`` they would be those of all tasks of the loop.
    What the coroutine itself makes current, it finds so again when it goes on.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], landing: Landing) -> None:
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
