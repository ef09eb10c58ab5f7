"""One call for each of many items, a bounded number of them under way; results in the order of the items."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Generic, NoReturn

from ..._typing import T
from ...errors import RpcUsageError
from ...futures import Future, outcome
from ..engine.engine import Engine

_Call = Callable[[object], Future[T]]
_Items = Iterable[object] | AsyncIterable[object]
_Ahead = Callable[[], int]


class GroupMap(AsyncIterator[T], Iterator[T]):
    """The results of ``call(item)``, in the order of items: ``async for``, or ``for`` in a thread that may block.

    The error of an item or of its call is raised in its place, and ends the map. Leaving the loop early, `close`,
    ``with`` and ``async with`` cancel the calls under way. One task or thread takes results, in one of the two ways.
    """

    def __init__(self, engine: Engine, call: _Call[T], items: _Items, ahead: _Ahead) -> None:
        """ahead: returns how many calls may be under way or wait to be taken. Raises RpcUsageError."""
        if not isinstance(items, (Iterable, AsyncIterable)):
            raise RpcUsageError(f"map() takes an iterable of items, not {type(items).__qualname__}")
        self._engine = engine
        self._call, self._items, self._ahead = call, items, ahead
        self._window: _Window[T] | None = None  # of `async for`
        self._blocking: Generator[T] | None = None  # of `for`
        self._waits = self._closed = False

    def __aiter__(self) -> GroupMap[T]:
        return self

    async def __anext__(self) -> T:
        """The next result. Cancellation takes none: the next call returns it.

        RpcUsageError while another task waits for a result, and on another loop than the first turn's.
        """
        if self._blocking is not None:
            raise RpcUsageError("results of this map() are taken by `for` already")
        if self._waits:
            raise RpcUsageError("two tasks wait for items of this map(); it has one consumer")
        self._engine.refuse_idle_loop("to await a result of map()", "async for")
        if self._closed:
            raise StopAsyncIteration
        if self._window is None:
            self._window = _Window(self._call, self._items, self._ahead)
            self._window.start(self._engine.kept)
        elif self._window.loop is not asyncio.get_running_loop():
            raise RpcUsageError("items of this map() are taken on the loop where the first was, and not on another")
        self._waits = True
        try:
            return await self._window.next()
        finally:
            self._waits = False

    def __iter__(self) -> GroupMap[T]:
        self._engine.refuse_on_loop("iterating over map()", "async for")
        return self

    def __next__(self) -> T:
        """The next result. Not on the worker's loop: WouldBlockLoop, with nothing sent."""
        self._engine.refuse_on_loop("iterating over map()", "async for")
        if self._blocking is None:
            if self._window is not None:
                raise RpcUsageError("results of this map() are taken by `async for` already")
            if not isinstance(self._items, Iterable):
                raise RpcUsageError("map() with items that come by `async for` gives its results by `async for`, too")
            self._blocking = _blocking(self._call, self._items, self._ahead)
        return next(self._blocking)

    async def aclose(self) -> None:
        """Cancel the calls under way, and give no more results. Idempotent."""
        self._closed = True
        if self._window is not None:
            self._window.stop()
            await self._window.ended()

    def __del__(self) -> None:
        window = self.__dict__.get("_window")  # None if `__init__` has failed
        if window is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                window.loop.call_soon_threadsafe(window.stop)

    def close(self) -> None:
        """The same for a map whose results are taken by ``for``."""
        if self._blocking is None:
            self._blocking = _blocking(self._call, (), self._ahead)
        self._blocking.close()

    async def __aenter__(self) -> GroupMap[T]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __enter__(self) -> GroupMap[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Not supported: it makes calls of this worker."""
        raise RpcUsageError("what map() gives cannot be copied, pickled or sent; take its results, and send those")


def _blocking(call: _Call[T], items: Iterable[object], ahead: _Ahead) -> Generator[T]:
    """The results for a ``for`` loop. Items are taken in the same thread."""
    begun: deque[Future[T]] = deque()
    source: Iterator[object] | None = None
    failure: BaseException | None = None
    try:
        source = iter(items)
        while True:
            if begun and (begun[0].done() or len(begun) >= ahead()):
                yield begun.popleft().wait()
            if begun and len(begun) >= ahead():  # it may be less than before
                continue
            # One item for each result: a source of items that waits for results must not starve.
            try:
                begun.append(call(next(source)))
            except StopIteration:
                break
            except Exception as error:  # raised in its place: earlier results come first
                failure = error
                break
        while begun:
            yield begun.popleft().wait()
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback refers to this frame
        for each in begun:
            each.cancel()
            each._mark_seen()


class _Window(Generic[T]):
    """The calls of a map that are under way or wait to be taken, in the order of items. On one loop.

    A task of its own takes the items, so a cancelled turn disturbs neither items nor results. It holds this window and
    not the map: dropping the map ends both.
    """

    def __init__(self, call: _Call[T], items: _Items, ahead: _Ahead) -> None:
        self.loop = asyncio.get_running_loop()
        self._call, self._items, self._ahead = call, items, ahead
        self._begun: deque[Future[T]] = deque()
        self._watched: Future[T] | None = None  # has `_tell` as a callback
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._over = False  # whether no call follows
        self._failure: BaseException | None = None  # raised after the last result
        self._task: asyncio.Task[None] | None = None

    def start(self, kept: set[object]) -> None:
        """Begin to take items. kept: holds the task (`Engine.kept`)."""
        self._task = asyncio.ensure_future(self._fill())
        kept.add(self._task)
        self._task.add_done_callback(kept.discard)

    async def next(self) -> T:
        """The next result; after the last one, the error that ended the map."""
        while True:
            self._news.clear()  # first: a call may be done by now
            if self._begun:
                first = self._begun[0]
                if first.done():
                    result: T
                    result, error = outcome(first)
                    if error is not None:
                        self.stop()
                        self._failure = error
                        del error, first
                        continue
                    self._begun.popleft()
                    self._room.set()
                    return result
                if first is not self._watched:
                    self._watched = first
                    first._when_settled(self._tell)
            elif self._over:
                await self.ended()
                failure, self._failure = self._failure, None
                try:
                    raise StopAsyncIteration if failure is None else failure
                finally:
                    failure = None  # its traceback refers to this frame
            await self._news.wait()

    async def ended(self) -> None:
        """Wait until no more items are taken."""
        if self._task is not None and not self._task.done():
            await asyncio.wait((self._task,))

    def stop(self) -> None:
        """Cancel the calls under way."""
        self._over = True
        if self._task is not None:
            self._task.cancel()
        begun = [*self._begun]
        self._begun.clear()
        for each in begun:
            each.cancel()
            each._mark_seen()
        self._news.set()

    async def _fill(self) -> None:
        try:
            async for item in _asynchronous(self._items):
                while len(self._begun) >= self._ahead():
                    self._room.clear()
                    await self._room.wait()
                self._begun.append(self._call(item))
                self._news.set()
        except BaseException as error:
            if not self._over:  # if over, `stop` cancelled this
                self._failure = error
        self._over = True
        self._news.set()

    def _tell(self, _: Future[object]) -> None:
        """A call has settled. Any thread."""
        if asyncio._get_running_loop() is self.loop:
            self._news.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._news.set)


async def _asynchronous(items: _Items) -> AsyncIterator[object]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    for item in items:
        yield item
