"""The producer's end of a stream: sends a generator's items within the consumer's credit.

The consumer grants credit with the call, and more when it takes items (`caller.stream`). With any credit, no item is
made while too many bytes are unsent (`backlog`). A generator runs in a thread of the pool, an async generator as a
task. CANCEL, or the end of the connection, closes the generator.
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
    """The credit of an async generator. On the loop. count: items that the consumer still wants."""

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
        """The consumer is gone. `Runner` also cancels the task, but its generator may swallow that."""
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
    """The credit of a generator in a thread. count: items that the consumer still wants."""

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

        The pool lets another thread run during the wait.
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
    """In a pool thread: send the items of a generator, until it or its consumer ends."""
    credits = call.credits = ThreadCredits(credit, room)
    if call.cancelled:  # cancelled before `Service.cancel` saw the credits
        credits.stop()
    try:
        # Credit first: a producer does no work beyond it.
        while credits.take() and not call.cancelled:
            try:
                item = next(generator)
            except StopIteration:
                return
            sender.send_item(call, item)
    finally:
        if hasattr(generator, "close"):  # a wrapper may return another iterator
            generator.close()


async def serve_async_generator(
    sender: Answers, call: ServedCall, generator: AsyncIterator[object], credit: int, room: Backlog
) -> None:
    """On the loop: send the items of an async generator. Cancelled when the consumer has ended."""
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
