"""What an asynchronous generator gives, turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from ...errors import RpcCancelled

T = TypeVar("T")


class Turns(Generic[T]):
    """A generator that does not look as if all had come where a cancelled turn has ended it. items: the generator."""

    def __init__(self, items: AsyncGenerator[T], what: str) -> None:
        """what: it is called in errors."""
        self.items = items
        self._what = what
        self._cut = False  # whether a turn was cancelled

    async def next(self) -> T:
        """The next item. StopAsyncIteration behind the last; RpcCancelled if some are missing before that."""
        try:
            return await anext(self.items)
        except asyncio.CancelledError:
            self._cut = True
            raise
        except StopAsyncIteration:
            if not self._cut:
                raise
            text = f"a turn of {self._what} was cancelled, which has ended it before its last item"
            raise RpcCancelled(text) from None
