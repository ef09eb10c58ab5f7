"""The streams of several workers as one: items as they come, each with the name of the worker that made it.

A turn takes an item of one stream, or waits for all of them at once if none has an item. No task runs between turns, so
each turn may be on another loop, and a cancelled turn has taken nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from ..._typing import T_co
from ...errors import RpcUsageError
from ..caller.stream import Stream
from ..calls.failures import came_from_afar
from ..engine.blocking import BlockingIterator
from ..engine.engine import Engine
from .outcomes import Outcome, Outcomes


class GroupStream(BlockingIterator[tuple[str, T_co]]):
    """``async for name, item in stream``, or ``for`` in a thread that may block.

    Leaving the loop early stops the producers; ``async with`` and ``with`` do so at once. Each producer stops while the
    consumer does, because its own stream limits the items under way. One consumer at a time: on any running loop, or in
    a thread.
    """

    def __init__(self, engine: Engine, function: str, streams: Sequence[tuple[str, Stream[T_co]]]) -> None:
        super().__init__(engine)
        self._function = function
        self._streams = streams
        self._left = deque(range(len(streams)))  # places of streams that have not ended; the next turn's first
        self._outcomes: dict[int, Outcome[T_co]] = {}  # of streams that have ended
        self._waits = self._over = False

    async def __anext__(self) -> tuple[str, T_co]:
        """The next item of any member. Raises GroupError after the last one, with the errors of failed members.

        Cancellation takes no item: the next call returns it.
        """
        if self._came:
            return self._came.popleft()
        if self._waits:
            raise RpcUsageError("two tasks wait for items of this stream; it has one consumer")
        self._waits = True
        try:
            while self._left and not self._over:
                for _ in range(len(self._left)):
                    place = self._left[0]
                    name, stream = self._streams[place]
                    if stream._ready:
                        taken = await _take(stream)
                        if not taken.ended:
                            self._left.rotate(-1)
                            return name, taken.value
                        self._end(place, taken.error)
                    else:
                        self._left.rotate(-1)
                if self._left and not self._over:
                    await self._wait()
        finally:
            self._waits = False
        return self._conclude()

    def _end(self, place: int, error: BaseException | None) -> None:
        self._left.remove(place)
        name = self._streams[place][0]
        self._outcomes[place] = Outcome(name, None, error, error is None or came_from_afar(error))

    async def _wait(self) -> None:
        """Wait until a stream has an item. A stream whose time is up ends."""
        self._engine.refuse_idle_loop("to await an item of this stream", "async for")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        streams = [(place, self._streams[place][1]) for place in self._left]
        try:
            for _, stream in streams:
                stream._attend((loop, future))
            if any(stream._ready for _, stream in streams):  # it came before the registration
                return
            patience = min(stream._patience() for _, stream in streams)
            async with asyncio.timeout(None if patience == float("inf") else patience):
                await future
        except TimeoutError:
            for place, stream in streams:
                if not stream._ready and stream._patience() <= 0:
                    self._end(place, stream._too_late())
        finally:
            for _, stream in streams:
                stream._attend(None)

    def _conclude(self) -> NoReturn:
        over, self._over = self._over, True
        outcomes, self._outcomes = self._outcomes, {}
        if not over:
            ends = Outcomes([outcomes[place] for place in range(len(self._streams))], self._function)
            if ends.errors:
                raise ends._failure(f"of {len(ends)} streams")
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop all producers and drop what has arrived. Idempotent; does not wait for the producers."""
        self._came.clear()
        self._over = True
        for _, stream in self._streams:  # ends a waiting turn
            await stream.aclose()

    def __reduce__(self) -> NoReturn:
        """Not supported, as for `Stream`."""
        raise RpcUsageError(
            "a stream of a group has one consumer, and cannot be copied, pickled or sent; open one for each, or send "
            "the items"
        )


class _Taken(NamedTuple):
    """The result of a turn of one stream. ended: the stream has ended, with an error or without."""

    value: Any = None
    ended: bool = False
    error: BaseException | None = None


async def _take(stream: Stream[object]) -> _Taken:
    """A turn of a ready stream. Not a method: the traceback of an error would hold the whole group."""
    try:
        return _Taken(await anext(stream))
    except StopAsyncIteration:
        return _Taken(ended=True)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:
        return _Taken(ended=True, error=error)
