"""Streams: a generator on one worker, an ``async for`` on another, and credit between them.

The consumer grants `window` items with the call. The producer sends an item for each credit and then waits; the
consumer grants more as it takes items, half a window at a time. Items and the end travel on one connection, so the end
(REPLY, or ERROR with the generator's exception) comes after the last item. CANCEL closes the producer's generator.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from ... import foreign
from ...channels.landing import Landing
from ...errors import RpcError, RpcTimeout, RpcUsageError
from ...futures import Future, block_observer
from ...protocol.codec import pack
from ...protocol.frames import Buffer, Kind, encode_frame
from ..calls import messages
from ..engine.current import CallContext

if TYPE_CHECKING:
    from ..callee.service import Service
    from .future import CallFuture
    from .peer import Peer


_Item = tuple[list[Any], Sequence[Buffer], Landing | None]


class Stream(AsyncIterator[Any]):
    """The consumer's side: ``async for item in stream``. Leaving the loop early stops the producer.

    One consumer at a time, on any running loop. `aclose` ends it; so does dropping the last reference to it. The
    timeout bounds the wait for each item, in seconds. Also an async context manager, for consumers that may fail.
    """

    def __init__(self, peer: Peer, window: int, timeout: float) -> None:
        self._peer = peer
        self._window = window
        self._timeout = timeout
        self._items: deque[_Item] = deque()
        self._taken = 0
        self._end: CallFuture | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._finished = False

    def start(self, end: CallFuture) -> None:
        """The call is on its way; `end` settles when the producer has ended."""
        self._end = end
        myself = weakref.ref(self)

        def wake(_: Future[Any]) -> None:
            stream = myself()
            if stream is not None:
                stream._wake()

        end._add_callback(wake)

    def on_item(self, fields: list[Any], segments: Sequence[Buffer], landing: Landing | None = None) -> None:
        """An item arrived; on the worker's loop."""
        self._items.append((fields, segments, landing))
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None:
            return
        loop, future = waiter
        if not loop.is_closed():
            loop.call_soon_threadsafe(_finish, future)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        """The next item. Raises the producer's error in its place, RpcTimeout when none came in time.

        Cancellation takes no item: the next call returns it.
        """
        if not self._items and not self._finished:
            await self._wait()
        if not self._items:
            return self._conclude()
        item = self._items.popleft()
        self._taken += 1
        if self._taken >= max(1, self._window // 2):
            self._grant()
        try:
            return self._decode(*item)
        except BaseException as error:
            await self.aclose()
            raise RpcError(f"an item of {self._describe()} cannot be read here: {foreign.said(error)}") from error

    def _decode(self, fields: list[Any], segments: Sequence[Buffer], landing: Landing | None) -> Any:
        landing = landing or (self._peer.devices and self._peer.worker.accelerators.landing()) or None
        if landing is None:
            return messages.decode(fields, segments, self._peer.load_references, self._peer.track)[0]
        with landing.entered():
            value = messages.decode(fields, segments, self._peer.load_references, self._peer.track, landing)[0]
            arrival = landing.arrival()
        if arrival is not None:
            arrival.join()
        return value

    def _grant(self) -> None:
        assert self._end is not None
        if not self._end.done():
            self._peer.send(encode_frame(Kind.CREDIT, self._end._call_id, pack([self._taken])), urgent=True)
        self._taken = 0

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RpcUsageError(f"two tasks wait for items of {self._describe()}; a stream has one consumer")
        assert self._end is not None
        loop = asyncio.get_running_loop()
        while not self._items and not self._end.done():
            future = loop.create_future()
            self._waiter = (loop, future)
            try:
                if self._items or self._end.done():  # it came between the look and the registration
                    return
                async with asyncio.timeout(self._timeout or None):
                    await future
            except TimeoutError:
                await self.aclose()
                raise RpcTimeout(
                    f"no item of {self._describe()} within {self._timeout:g} s",
                    worker=self._peer.name,
                    function=self._end._function,
                    seconds=self._timeout,
                ) from None
            finally:
                self._waiter = None

    def _conclude(self) -> Any:
        if not self._finished:
            self._finished = True
            assert self._end is not None
            error = self._end.exception()
            if error is not None:
                raise error
        raise StopAsyncIteration

    def _describe(self) -> str:
        return f"the stream of {self._end._function if self._end else '?'} from worker {self._peer.name!r}"

    async def aclose(self) -> None:
        """Stop the producer and drop what has arrived. Idempotent; does not wait for the producer."""
        self._stop()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._finished = True
        if self._end is not None:
            _abandon(self._peer, self._items, self._end)

    def __del__(self) -> None:
        # Runs anywhere, inside a lock or the garbage collector: only wakes the loop.
        end = self._end
        if end is not None:
            end._look()
            if self._items or not end.done():
                self._peer.worker.call_on_loop(_abandon, self._peer, self._items, end)


def _abandon(peer: Peer, items: deque[_Item], end: CallFuture) -> None:
    """Stop the producer; references in items that nobody took have to be taken all the same."""
    end.cancel()
    end._look()
    while items:
        fields, *_ = items.popleft()
        if len(fields) > 6 and fields[6]:
            peer.load_references(fields[6])


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncCredits:
    """How many items an async generator may still send. On the loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._more = asyncio.Event()

    def add(self, count: int) -> None:
        """The consumer took items."""
        self._count += count
        self._more.set()

    def stop(self) -> None:
        """The consumer is gone; the task is cancelled by others."""

    async def take(self) -> None:
        """Wait until one item may be sent."""
        while self._count <= 0:
            self._more.clear()
            await self._more.wait()
        self._count -= 1


class ThreadCredits:
    """How many items a generator in a thread may still send."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._stopped = False
        self._changed = threading.Condition()

    def add(self, count: int) -> None:
        """The consumer took items; on the loop."""
        with self._changed:
            self._count += count
            self._changed.notify()

    def stop(self) -> None:
        """The consumer is gone; on the loop."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def take(self) -> bool:
        """Block until one item may be sent; False when nobody wants any more. The pool makes up for the thread."""
        if self._count <= 0:
            observer = block_observer.get()
            if observer is not None:
                observer.enter_blocked()
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._count > 0 or self._stopped)
            finally:
                if observer is not None:
                    observer.exit_blocked()
        with self._changed:
            self._count -= 1
            return not self._stopped


def serve_generator(service: Service, context: CallContext, generator: Any, credit: int) -> None:
    """In a pool thread: send what a generator yields, until it ends or nobody listens."""
    credits = context.credits = ThreadCredits(credit)
    try:
        # Credit first: a producer does no work that its consumer did not ask for.
        while credits.take() and not context.cancelled:
            try:
                item = next(generator)
            except StopIteration:
                return
            service.send_item(context, item)
    finally:
        generator.close()


async def serve_async_generator(service: Service, context: CallContext, generator: Any, credit: int) -> None:
    """On the loop: send what an async generator yields. Cancelled when nobody listens any more."""
    credits = context.credits = AsyncCredits(credit)
    try:
        while True:
            await credits.take()
            try:
                item = await anext(generator)
            except StopAsyncIteration:
                return
            service.send_item(context, item)
    finally:
        await generator.aclose()
