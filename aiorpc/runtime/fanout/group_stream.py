"""The streams of several workers as one: items as they come, each with the name of the worker that made it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...errors import WorkerClosed
from ..caller.stream import Stream
from ..calls.failures import came_from_afar
from ..engine.engine import Engine
from ..engine.loops import block_for
from .outcomes import Outcome, Outcomes
from .turns import News, Turns

_END = object()


class GroupStream(AsyncIterator[tuple[str, Any]], Iterator[tuple[str, Any]]):
    """``async for name, item in stream``, or ``for`` in a thread that may block.

    Leaving the loop early stops the producers; ``async with`` and ``with`` do so at once. Each producer stops while the
    consumer does, by the credit of its own stream. One consumer: on any running loop, or in a thread.
    """

    def __init__(self, engine: Engine, function: str, streams: Sequence[tuple[str, Stream]]) -> None:
        self._engine = engine
        self._streams = streams
        self._turns: Turns[tuple[str, Any]] = Turns(partial(_merged, function, streams), "this stream")

    def __aiter__(self) -> GroupStream:
        return self

    async def __anext__(self) -> tuple[str, Any]:
        """The next item of any member. GroupError behind the last one, with the errors of those that failed.

        Cancellation takes no item: the next call returns it.
        """
        return await self._turns.next()

    async def aclose(self) -> None:
        """Stop all producers and drop what has arrived. Idempotent; does not wait for the producers."""
        await self._turns.aclose()
        for _, stream in self._streams:
            await stream.aclose()

    def __iter__(self) -> GroupStream:
        self._engine.refuse_on_loop("iterating over a stream", "async for")
        return self

    def __next__(self) -> tuple[str, Any]:
        """As `__anext__`. Not on the worker's loop: WouldBlockLoop. Ctrl-C stops the producers."""
        try:
            item = self._wait(self._next())
        except KeyboardInterrupt:
            self.close()
            raise
        if item is _END:
            raise StopIteration
        found: tuple[str, Any] = item
        return found

    def close(self) -> None:
        """As `aclose`, for threads. Not on the worker's loop: WouldBlockLoop."""
        with contextlib.suppress(WorkerClosed):  # then no producer is left that one could stop
            self._wait(self.aclose())

    async def _next(self) -> Any:
        try:
            return await self._turns.next()
        except StopAsyncIteration:
            return _END

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it on the worker's loop, where items arrive, and block for what it gives."""
        engine = self._engine
        ended = f"the loop of worker {engine.name!r} has ended"
        try:
            engine.refuse_on_loop("iterating over a stream", "async for")
            future = asyncio.run_coroutine_threadsafe(coroutine, engine.loop)
        except BaseException as error:
            coroutine.close()
            if engine.loop.is_closed():
                raise WorkerClosed(ended) from error
            raise
        return block_for(future, engine.loop, ended)

    def __enter__(self) -> GroupStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> GroupStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class _Item(NamedTuple):
    """What one stream has brought. ended: that was the last of it, with an error or without."""

    place: int
    value: Any
    ended: bool = False
    error: BaseException | None = None


async def _merged(
    function: str, streams: Sequence[tuple[str, Stream]], news: News
) -> AsyncGenerator[tuple[str, Any] | News]:
    came: asyncio.Queue[_Item] = asyncio.Queue(len(streams))
    outcomes: list[Outcome | None] = [None] * len(streams)
    tasks = [asyncio.ensure_future(_read(place, stream, came, news)) for place, (_, stream) in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(lambda _: news.set())
    try:
        while None in outcomes:
            while came.empty():
                news.clear()
                yield news
            place, value, ended, error = came.get_nowait()
            name = streams[place][0]
            if ended:
                outcomes[place] = Outcome(name, None, error, error is None or came_from_afar(error))
            else:
                yield name, value
        while not all(task.done() for task in tasks):
            news.clear()
            yield news
    finally:
        for task in tasks:
            task.cancel()
        for _, stream in streams:
            await stream.aclose()
        left = [task for task in tasks if not task.done()]
        if left:
            await asyncio.wait(left)
    ends = Outcomes([outcome for outcome in outcomes if outcome is not None], function)
    if ends.errors:
        raise ends.failure(f"of {len(ends)} streams")


async def _read(place: int, stream: Stream, came: asyncio.Queue[_Item], news: News) -> None:
    try:
        async for item in stream:
            await came.put(_Item(place, item))
            news.set()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        await came.put(_Item(place, None, True, error))
    else:
        await came.put(_Item(place, None, True))
