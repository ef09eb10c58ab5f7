"""What an asynchronous generator gives, turn by turn, to a consumer whose turns may be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar, cast

from ..._typing import Coro
from ...errors import RpcUsageError

T = TypeVar("T")
News = asyncio.Event


def start(kept: set[object], work: Coro[None], news: News) -> asyncio.Task[None]:
    """Do what a generator waits for, as a task of its own that sets the Event once it is over.

    kept: what holds the task until then (`Engine.kept`).
    """

    def let_go(task: asyncio.Task[None]) -> None:
        kept.discard(task)
        news.set()

    task = asyncio.ensure_future(work)
    kept.add(task)
    task.add_done_callback(let_go)
    return task


class Turns(Generic[T]):
    """The items of a generator. A turn that is cancelled takes nothing away: the next one gives what it would have.

    A cancellation would end the generator if it awaited anything between two items. Where it has to wait it gives the
    Event that it was made with instead, and a turn waits for that outside of it. Only when it is closed it may await.
    One consumer, on one loop: what the generator waits for, and the generator itself, end with that. Dropping the last
    reference closes the generator, as of any other.
    """

    def __init__(self, make: Callable[[News], AsyncGenerator[T | News]], what: str) -> None:
        """make: makes the generator, given its Event. what: it is called in errors."""
        self._news = asyncio.Event()
        self._items = make(self._news)
        self._what = what
        self._waits = self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # of the first turn

    async def next(self) -> T:
        """The next item. StopAsyncIteration behind the last; RpcUsageError while another task waits for it, and on
        another loop than that of the first turn.
        """
        if self._waits:
            raise RpcUsageError(f"two tasks wait for items of {self._what}; it has one consumer")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif loop is not self._loop and not self._closed:
            raise RpcUsageError(f"items of {self._what} are taken on the loop where the first was, and not on another")
        self._waits = True
        try:
            while not self._closed:
                given = await anext(self._items)
                if given is not self._news:
                    return cast("T", given)
                await self._news.wait()
        finally:
            self._waits = False
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close the generator. Idempotent. A turn that waits meanwhile finds the end."""
        if not self._closed:
            self._closed = True
            self._news.set()
            await self._items.aclose()
