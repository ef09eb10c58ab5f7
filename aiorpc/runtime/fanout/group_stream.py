"""The streams of several workers as one: items as they come, each with the name of the worker that made it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, NamedTuple

from ..caller.stream import Stream
from ..calls.failures import came_from_afar
from .outcomes import Outcome, Outcomes


class GroupStream(AsyncIterator[tuple[str, Any]]):
    """``async for name, item in stream``. Leaving the loop early stops the producers; ``async with`` does so at once.

    Each producer stops while the consumer does, by the credit of its own stream. One consumer, on any running loop.
    """

    def __init__(self, function: str, streams: Sequence[tuple[str, Stream]]) -> None:
        self._streams = streams
        self._items = _merged(function, streams)

    def __aiter__(self) -> GroupStream:
        return self

    async def __anext__(self) -> tuple[str, Any]:
        """The next item of any member. GroupError behind the last one, with the errors of those that failed."""
        return await anext(self._items)

    async def aclose(self) -> None:
        """Stop all producers and drop what has arrived. Idempotent; does not wait for the producers."""
        await self._items.aclose()
        for _, stream in self._streams:
            await stream.aclose()

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


async def _merged(function: str, streams: Sequence[tuple[str, Stream]]) -> AsyncGenerator[tuple[str, Any]]:
    came: asyncio.Queue[_Item] = asyncio.Queue(len(streams))
    outcomes: list[Outcome | None] = [None] * len(streams)
    tasks = [asyncio.ensure_future(_read(place, stream, came)) for place, (_, stream) in enumerate(streams)]
    try:
        while None in outcomes:
            place, value, ended, error = await came.get()
            name = streams[place][0]
            if ended:
                outcomes[place] = Outcome(name, None, error, error is None or came_from_afar(error))
            else:
                yield name, value
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for _, stream in streams:
            await stream.aclose()
    ends = Outcomes([outcome for outcome in outcomes if outcome is not None], function)
    if ends.errors:
        raise ends.failure(f"of {len(ends)} streams")


async def _read(place: int, stream: Stream, came: asyncio.Queue[_Item]) -> None:
    try:
        async for item in stream:
            await came.put(_Item(place, item))
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        await came.put(_Item(place, None, True, error))
    else:
        await came.put(_Item(place, None, True))
