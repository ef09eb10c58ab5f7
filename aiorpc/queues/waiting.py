"""Who waits for room in a queue, or for items of it: the Futures of `put` and `get`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from ..futures import Future
from ..runtime.node import Node
from .items import Item


class ClientForWaiting(Protocol):
    """What a Future needs of one worker's side of a queue (`Client`)."""

    node: Node

    def describe(self) -> str:
        """The queue, for errors."""

    def given_up(self, waiting: Any) -> None:
        """Nobody waits for it any more. On the loop."""

    def put_back(self, items: Sequence[Item]) -> None:
        """Nobody here wants those items. On the loop."""


class WaitingFuture(Future[Any]):
    """The Future of a `put` or a `get`. timer: of its timeout, on the loop."""

    timer: asyncio.TimerHandle | None = None

    def __init__(self, client: ClientForWaiting, verb: str) -> None:
        super().__init__()
        engine = client.node.engine
        self.subject, self.loop, self.executor = f"{verb}() on {client.describe()}", engine.loop, engine.pool
        self._client = client

    def stop_timer(self) -> None:
        """Its time does not matter any more. On the loop."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def finish(self, value: Any, error: BaseException | None = None) -> bool:
        """Settle it, unless somebody has. On the loop."""
        self.stop_timer()
        return self.settle(value, error)

    def _on_cancel(self) -> None:
        self._client.node.engine.call_on_loop(self._client.given_up, self)


class PutFuture(WaitingFuture):
    """One item that is put. item: packed, until it has settled."""

    def __init__(self, client: ClientForWaiting, item: Item) -> None:
        super().__init__(client, "put")
        self.item = item

    def finish(self, value: Any, error: BaseException | None = None) -> bool:
        """As of all; and the item is not kept any longer for its sake."""
        self.item = None
        return super().finish(value, error)


class GetFuture(WaitingFuture):
    """Up to `count` items that somebody wants; many: as a list. items: those that it was given, until they are taken.

    It begins when somebody waits for it, as the coroutine of ``asyncio.Queue.get`` does. Else an item could be given to
    a Future that nobody has any more, as that of a task that was cancelled before it ran.
    """

    def __init__(self, client: ClientForWaiting, count: int, many: bool, begin: Callable[[GetFuture], object]) -> None:
        """begin: has it given items."""
        super().__init__(client, "get_many" if many else "get")
        self.count = count
        self.many = many
        self.items: Sequence[Item] = ()
        self._begin: Callable[[GetFuture], object] | None = begin

    def begin(self) -> None:
        """Somebody waits for it. Any thread. WorkerClosed if the worker has shut down."""
        begin, self._begin = self._begin, None
        if begin is not None:
            self._client.node.engine.lifetime.check_open()
            self._client.node.engine.run_on_loop(begin, self)

    def when_settled(self, callback: Callable[[Future[Any]], None]) -> None:
        """As of any Future."""
        super().when_settled(callback)
        self.begin()

    def add_done_callback(self, callback: Callable[[Future[Any]], Any]) -> None:
        """As of any Future."""
        super().add_done_callback(callback)
        self.begin()

    def __await__(self) -> Generator[Any, None, Any]:
        self.begin()
        try:
            value = yield from super().__await__()
        except (asyncio.CancelledError, GeneratorExit):
            # The items may have come in the turn of the loop in which the task was cancelled.
            if not self.waiters:
                self._put_back()
            raise
        else:
            self.items = ()
            return value
        finally:
            del self  # the traceback of its error holds this frame, see `Future`

    def wait(self, timeout: float | None = None) -> Any:
        """As of any Future; but one that has been waited for in vain is given up, so that it takes no item with it."""
        self.begin()
        try:
            value = super().wait(timeout)
        except BaseException:
            self.cancel()
            self._put_back()
            raise
        else:
            self.items = ()
            return value
        finally:
            del self

    def _put_back(self) -> None:
        items, self.items = self.items, ()
        if items:
            self._client.node.engine.call_on_loop(self._client.put_back, items)

    def finish_with(self, value: Any, items: Sequence[Item]) -> bool:
        """Give it those items; False if nobody waits for them any more. On the loop."""
        self.items = items
        if self.finish(value):
            return True
        self.items = ()
        return False
