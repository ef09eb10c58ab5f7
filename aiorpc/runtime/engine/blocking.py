"""Iterators for threads, over items that arrive on the loop of a worker."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, Self

from ..._typing import Coro, T_co
from ...errors import WorkerClosed
from .engine import Engine
from .loops import Handed


class BlockingIterator(AsyncIterator[T_co], Iterator[T_co]):
    """An asynchronous iterator that also supports ``for`` and ``with``, in threads that may block.

    engine: of the worker on whose loop the items arrive.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._came: deque[T_co] = deque()  # an interrupted thread's item, for its next turn

    @abstractmethod
    async def aclose(self) -> None:
        """End the iteration, and release its resources. Idempotent."""

    if not TYPE_CHECKING:  # type checkers shall not see it

        def __await__(self) -> NoReturn:
            raise TypeError(
                f"a {type(self).__name__} gives items one by one, and is not awaited: `async for item in ...`, or "
                "`await anext(...)` for one of them; what gives one result is called by `await rpc.call(...)`"
            )

    def __aiter__(self) -> Self:
        return self

    def __iter__(self) -> Self:
        self._refuse_on_loop()
        return self

    def __next__(self) -> T_co:
        """As `__anext__`. Not on the worker's loop: WouldBlockLoop.

        Ctrl-C closes it. What another signal handler raises here loses no item: the next call returns it.
        """
        try:
            came = self._came
            if not came:
                self._block_for(self._bring)
            if not came:
                raise StopIteration
            return came.popleft()
        except KeyboardInterrupt:
            self.close()
            raise

    def close(self) -> None:
        """As `aclose`, for threads. Not on the worker's loop: WouldBlockLoop."""
        self._came.clear()
        with contextlib.suppress(WorkerClosed):  # then nothing is left to stop
            self._block_for(self.aclose)

    async def _bring(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            self._came.append(await self.__anext__())

    def _refuse_on_loop(self) -> None:
        self._engine.refuse_on_loop("iterating over a stream", "async for")

    def _block_for(self, step: Callable[[], Coro[None]]) -> None:
        """Run a coroutine on the worker's loop, and block for its end."""
        self._refuse_on_loop()
        self._engine.lifetime.check_not_forked()
        Handed(step, self._engine.loop).wait(f"the loop of worker {self._engine.name!r} has ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()
