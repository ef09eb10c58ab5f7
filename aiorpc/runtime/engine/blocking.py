"""Iterating in a thread that may block over what comes on the loop of a worker."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Self, TypeVar

from ...errors import WorkerClosed
from .engine import Engine
from .loops import block_for

T = TypeVar("T")
_END = object()


class BlockingIterator(AsyncIterator[T], Iterator[T]):
    """An asynchronous iterator that ``for`` and ``with`` take as well, in threads that may block.

    engine: of the worker, on whose loop a turn is waited for then.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of what is under way. Idempotent."""

    def __aiter__(self) -> Self:
        return self

    def __iter__(self) -> Self:
        self._refuse_on_loop()
        return self

    def __next__(self) -> T:
        """As `__anext__`. Not on the worker's loop: WouldBlockLoop. Ctrl-C closes it."""
        try:
            item = self._block_for(self._next())
        except KeyboardInterrupt:
            self.close()
            raise
        if item is _END:
            raise StopIteration
        found: T = item
        return found

    def close(self) -> None:
        """As `aclose`, for threads. Not on the worker's loop: WouldBlockLoop."""
        with contextlib.suppress(WorkerClosed):  # then nothing is left that one could stop
            self._block_for(self.aclose())

    async def _next(self) -> Any:
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            return _END

    def _refuse_on_loop(self) -> None:
        self._engine.refuse_on_loop("iterating over a stream", "async for")

    def _block_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it on the worker's loop, where items arrive, and block for what it gives."""
        engine = self._engine
        ended = f"the loop of worker {engine.name!r} has ended"
        try:
            self._refuse_on_loop()
            future = asyncio.run_coroutine_threadsafe(coroutine, engine.loop)
        except BaseException as error:
            coroutine.close()
            if engine.loop.is_closed():
                raise WorkerClosed(ended) from error
            raise
        try:
            return block_for(future, engine.loop, ended)
        finally:
            del future  # see `block_for`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()
