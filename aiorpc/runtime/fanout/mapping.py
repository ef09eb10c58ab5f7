"""One call for each of many items, of which a bounded number is under way; results in the order of the items."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from functools import partial
from typing import NoReturn

from ..._typing import T
from ...errors import RpcUsageError
from ...futures import Future
from ..engine.engine import Engine
from .turns import News, Turns, start

_Call = Callable[[object], Future[T]]
_Items = Iterable[object] | AsyncIterable[object]
_Ahead = Callable[[], int]


class GroupMap(AsyncIterator[T], Iterator[T]):
    """The results of ``call(item)``, in the order of items: ``async for``, or ``for`` in a thread that may block.

    What getting an item or its result raises is raised in its place, and ends it. Leaving the loop early, `close`,
    ``with`` and ``async with`` call off what is under way. One task or thread takes results, in one of the two ways.
    """

    def __init__(self, engine: Engine, call: _Call[T], items: _Items, ahead: _Ahead) -> None:
        """ahead: how many may be under way, or wait to be taken, at a time. RpcUsageError for what has no items."""
        if not isinstance(items, (Iterable, AsyncIterable)):
            raise RpcUsageError(f"map() takes an iterable of items, not {type(items).__qualname__}")
        self._engine = engine
        self._call, self._items, self._ahead = call, items, ahead
        self._awaited: Turns[T] | None = None
        self._blocking: Generator[T] | None = None

    def __aiter__(self) -> GroupMap[T]:
        return self

    async def __anext__(self) -> T:
        """The next result. Cancellation takes none: the next call returns it."""
        if self._awaited is None:
            if self._blocking is not None:
                raise RpcUsageError("results of this map() are taken by `for` already")
            self._awaited = self._turns(self._items)
        self._engine.refuse_idle_loop("to await a result of map()", "async for")
        return await self._awaited.next()

    def __iter__(self) -> GroupMap[T]:
        self._engine.refuse_on_loop("iterating over map()", "async for")
        return self

    def __next__(self) -> T:
        """The next result. Not on the worker's loop: WouldBlockLoop, with nothing sent."""
        self._engine.refuse_on_loop("iterating over map()", "async for")
        if self._blocking is None:
            if self._awaited is not None:
                raise RpcUsageError("results of this map() are taken by `async for` already")
            if not isinstance(self._items, Iterable):
                raise RpcUsageError("map() with items that come by `async for` gives its results by `async for`, too")
            self._blocking = _blocking(self._call, self._items, self._ahead)
        return next(self._blocking)

    async def aclose(self) -> None:
        """Call off what is under way, and give no more results. Idempotent."""
        if self._awaited is None:
            self._awaited = self._turns(())
        await self._awaited.aclose()

    def _turns(self, items: _Items) -> Turns[T]:
        return Turns(partial(_awaited, self._engine.kept, self._call, items, self._ahead), "this map()")

    def close(self) -> None:
        """The same where results are taken by ``for``."""
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
        """It makes calls of this worker, for one who takes their results."""
        raise RpcUsageError("what map() gives cannot be copied, pickled or sent; take its results, and send those")


def _blocking(call: _Call[T], items: Iterable[object], ahead: _Ahead) -> Generator[T]:
    """In the thread that takes the results: items are got there as well."""
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
            # An item for each result: whoever has given one is not to wait until all others are taken.
            try:
                begun.append(call(next(source)))
            except StopIteration:
                break
            except Exception as error:  # in its place: those before it come first
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


async def _awaited(
    kept: set[object], call: _Call[T], items: _Items, ahead: _Ahead, news: News
) -> AsyncGenerator[T | News]:
    begun: deque[Future[T] | BaseException | None] = deque()  # None behind the last one
    room = asyncio.Event()
    tell = partial(_tell, asyncio.get_running_loop(), news)

    async def begin() -> None:
        try:
            async for item in _asynchronous(items):
                while len(begun) >= ahead():
                    room.clear()
                    await room.wait()
                begun.append(call(item))
                news.set()
        except Exception as error:
            begun.append(error)
        else:
            begun.append(None)

    task = start(kept, begin(), news)
    told: Future[T] | None = None  # the last one that was asked to tell when it is done
    failure: BaseException | None = None
    try:
        while True:
            while not begun or (isinstance(begun[0], Future) and not begun[0].done()):
                news.clear()  # first: it may be done by now, and tells at once
                if begun and isinstance(begun[0], Future) and begun[0] is not told:
                    told = begun[0]
                    told._when_settled(tell)
                yield news
            first = begun[0]
            if first is None:
                break
            try:
                if not isinstance(first, Future):
                    raise first
                result = first.value()
            except BaseException as error:
                failure = error
                break
            begun.popleft()
            room.set()
            yield result
        _stop(task, begun)
        while not task.done():
            news.clear()
            yield news
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback refers to this frame
        _stop(task, begun)
        if not task.done():
            await asyncio.wait((task,))
        begun.clear()  # the traceback of an error in it refers to it


def _stop(task: asyncio.Task[None], begun: Iterable[Future[T] | BaseException | None]) -> None:
    task.cancel()
    for each in begun:
        if isinstance(each, Future):
            each.cancel()
            each._mark_seen()


def _tell(loop: asyncio.AbstractEventLoop, news: News, _: Future[object]) -> None:
    if asyncio._get_running_loop() is loop:
        news.set()
    else:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(news.set)


async def _asynchronous(items: _Items) -> AsyncIterator[object]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    for item in items:
        yield item
