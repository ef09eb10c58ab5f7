"""The producer's end of a stream: the items of a generator are sent, as many as the consumer has asked for.

The consumer grants credit with the call, and grants more as it takes items (`caller.stream`). However much that is, no
item is made while too many bytes wait to be sent to the consumer (`backlog`). A generator runs in a thread of the pool,
an async generator as a task. CANCEL, or the end of the connection, closes the generator.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

from ...callbacks import block_observer
from ..calls.current import ServedCall
from .answers import Answers
from .backlog import Backlog


class AsyncCredits:
    """How many items an async generator may still send. On the loop. count: as far as the consumer is concerned."""

    def __init__(self, count: int, room: Backlog) -> None:
        self.count: int = count
        self._room = room
        self._stopped = False
        self._more = asyncio.Event()

    def add(self, count: int) -> None:
        """The consumer took items."""
        self.count += count
        self._more.set()

    def stop(self) -> None:
        """The consumer is gone. The task is cancelled, too (`Runner`), but its generator may swallow that."""
        self._stopped = True
        self._more.set()

    async def take(self) -> bool:
        """Wait until one item may be sent; False once the consumer wants no more."""
        while not self._stopped and (self.count <= 0 or self._room.crowded()):
            self._more.clear()
            if self.count > 0:
                self._room.when_room(self._more.set)
            await self._more.wait()
        self.count -= 1
        return not self._stopped


class ThreadCredits:
    """How many items a generator in a thread may still send. count: as far as the consumer is concerned."""

    def __init__(self, count: int, room: Backlog) -> None:
        self.count: int = count
        self._room = room
        self._stopped = False
        self._changed = threading.Condition()

    def add(self, count: int) -> None:
        """The consumer took items; on the loop."""
        with self._changed:
            self.count += count
            self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _wait(self) -> None:
        with self._changed:
            while True:
                if self._stopped or (self.count > 0 and not self._room.crowded()):
                    break
                if self.count > 0:
                    self._room.when_room(self._wake)
                self._changed.wait()

    def stop(self) -> None:
        """The consumer is gone; on the loop."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def take(self) -> bool:
        """Block until one item may be sent; False once the consumer wants no more.

        The pool is told that this thread waits, so that another thread may run meanwhile.
        """
        if self.count <= 0 or self._room.crowded():
            observer = block_observer.get()
            if observer is not None:
                observer.enter_blocked()
            try:
                self._wait()
            finally:
                if observer is not None:
                    observer.exit_blocked()
        with self._changed:
            self.count -= 1
            return not self._stopped


def serve_generator(sender: Answers, call: ServedCall, generator: Iterator[object], credit: int, room: Backlog) -> None:
    """In a pool thread: send what a generator yields, until it or its consumer ends."""
    credits = call.credits = ThreadCredits(credit, room)
    if call.cancelled:  # before there was anything that `Service.cancel` could stop
        credits.stop()
    try:
        # Credit first: a producer does no work that its consumer did not ask for.
        while credits.take() and not call.cancelled:
            try:
                item = next(generator)
            except StopIteration:
                return
            sender.send_item(call, item)
    finally:
        if hasattr(generator, "close"):  # what a wrapper gives may be another iterator
            generator.close()


async def serve_async_generator(
    sender: Answers, call: ServedCall, generator: AsyncIterator[object], credit: int, room: Backlog
) -> None:
    """On the loop: send what an async generator yields. Cancelled when the consumer has ended."""
    credits = call.credits = AsyncCredits(credit, room)
    try:
        while await credits.take():
            try:
                item = await anext(generator)
            except StopAsyncIteration:
                return
            sender.send_item(call, item)
    finally:
        if hasattr(generator, "aclose"):  # as above
            await generator.aclose()
