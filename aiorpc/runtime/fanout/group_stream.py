"""The streams of several workers as one: items as they come, each with the name of the worker that made it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..caller.stream import Stream
from ..calls.failures import came_from_afar
from ..engine.blocking import BlockingIterator
from ..engine.engine import Engine
from .outcomes import Outcome, Outcomes
from .turns import News, Turns, start


class GroupStream(BlockingIterator[tuple[str, Any]]):
    """``async for name, item in stream``, or ``for`` in a thread that may block.

    Leaving the loop early stops the producers; ``async with`` and ``with`` do so at once. Each producer stops while the
    consumer does, by the credit of its own stream. One consumer: on any running loop, or in a thread.
    """

    def __init__(self, engine: Engine, function: str, streams: Sequence[tuple[str, Stream]]) -> None:
        super().__init__(engine)
        self._streams = streams
        self._turns: Turns[tuple[str, Any]] = Turns(partial(_merged, engine.kept, function, streams), "this stream")

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


class _Item(NamedTuple):
    """What one stream has brought. ended: that was the last of it, with an error or without."""

    place: int
    value: Any
    ended: bool = False
    error: BaseException | None = None


async def _merged(
    kept: set[object], function: str, streams: Sequence[tuple[str, Stream]], news: News
) -> AsyncGenerator[tuple[str, Any] | News]:
    came: asyncio.Queue[_Item] = asyncio.Queue(len(streams))
    outcomes: list[Outcome | None] = [None] * len(streams)
    tasks = [start(kept, _read(place, stream, came, news), news) for place, (_, stream) in enumerate(streams)]
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
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        await came.put(_Item(place, None, True, error))
    else:
        await came.put(_Item(place, None, True))
