"""One call for each of many items, of which a bounded number is under way; results in the order of the items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any

from ...errors import RpcUsageError
from ...futures import Future


async def map_items(
    call: Callable[[Any], Future[Any]], items: Iterable[Any] | AsyncIterable[Any], ahead: Callable[[], int]
) -> AsyncGenerator[Any]:
    """The results of ``call(item)``, in the order of items; what getting an item or its result raises, in its place.

    ahead: how many may be under way, or wait to be taken, at a time. What is under way at the end is cancelled.
    """
    if not isinstance(items, (Iterable, AsyncIterable)):
        raise RpcUsageError(f"map() takes an iterable of items, not {type(items).__qualname__}")
    begun: deque[Future[Any] | BaseException | None] = deque()  # None behind the last one
    news, room = asyncio.Event(), asyncio.Event()

    async def begin() -> None:
        try:
            async for item in _asynchronous(items):
                while len(begun) >= ahead():
                    room.clear()
                    await room.wait()
                begun.append(call(item))
                news.set()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            begun.append(error)
        else:
            begun.append(None)
        news.set()

    task = asyncio.ensure_future(begin())
    try:
        while True:
            while not begun:
                news.clear()
                await news.wait()
            first = begun[0]
            if first is None:
                return
            if isinstance(first, BaseException):
                raise first
            result = await first
            begun.popleft()
            room.set()
            yield result
    finally:
        task.cancel()
        for each in begun:
            if isinstance(each, Future):
                each.cancel()
                each.mark_seen()
        await asyncio.wait((task,))


async def _asynchronous(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    for item in items:
        yield item
