"""Who waits for a queue: the Futures of `put` and `get`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol

from ..errors import RpcCancelled
from ..futures import ERROR, Future
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
    """The Future of a `put` or a `get`.

    timer: of its timeout, on the loop. number: of its call, if it has one for itself; else 0.
    """

    timer: asyncio.TimerHandle | None = None
    number = 0

    def __init__(self, client: ClientForWaiting, verb: str) -> None:
        super().__init__()
        engine = client.node.engine
        self.subject, self.loop, self.executor = f"{verb}() on {client.describe()}", engine.loop, engine.pool
        self._client = client

    def begin_on_loop(self, begin: Callable[[Any], object]) -> None:
        """Have it begun on the loop. Any thread."""
        engine = self._client.node.engine
        engine.run_on_loop(begin, self)
        if engine.closed:  # meanwhile: the loop may have stopped, and nobody would settle it
            self.settle(None, engine.lifetime.why_closed())

    def stop_timer(self) -> None:
        """Its time does not matter any more. On the loop."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def finish(self, value: Any, error: BaseException | None = None) -> bool:
        """Settle it, unless somebody has. On the loop."""
        self.stop_timer()
        return self.settle(value, error)

    def end_overdue(self, now: float) -> float:
        """As of any Future. WorkerClosed in a forked child, where nobody settles it."""
        self._client.node.engine.lifetime.check_not_forked()
        return super().end_overdue(now)

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
    a Future that nobody has any more, as that of a task that was cancelled before it ran. producers: the names of those
    who have yet to hand over items that it was given, by their ids.

    Its items are taken once: by the first who gets its value, or by a callback, which is sure to run. If the last one
    who waits leaves without the value, which may come in the turn of the loop in which its task was cancelled, they go
    back, and the Future has no value any more. All this is decided under `_lock`, as several threads may wait.
    """

    def __init__(self, client: ClientForWaiting, count: int, many: bool, begin: Callable[[GetFuture], object]) -> None:
        """begin: has it given items."""
        super().__init__(client, "get_many" if many else "get")
        self.count = count
        self.many = many
        self.items: Sequence[Item] = ()
        self.producers: dict[int, str] = {}
        self._begin: Callable[[GetFuture], object] | None = begin
        self._lock = threading.RLock()  # the garbage collector may end a task that waits here, and run `_leave` within
        self._waiting = 0  # tasks and threads that are inside of `__await__` and `wait`
        self._taken = False

    def begin(self) -> None:
        """Somebody waits for it. Any thread. WorkerClosed if the worker has shut down."""
        begin, self._begin = self._begin, None
        if begin is not None:
            self._client.node.engine.lifetime.check_open()
            self.begin_on_loop(begin)

    def when_settled(self, callback: Callable[[Future[Any]], None]) -> None:
        """As of any Future."""
        with self._lock:
            self._taken = True
        super().when_settled(callback)
        self.begin()

    def add_done_callback(self, callback: Callable[[Future[Any]], Any]) -> None:
        """As of any Future."""
        super().add_done_callback(callback)
        self.begin()

    def value(self) -> Any:
        """As of any Future."""
        with self._lock:
            value = super().value()
            self._taken = True
        return value

    def __await__(self) -> Generator[Any, None, Any]:
        self._enter()
        taken = False
        try:
            self.begin()
            value = yield from super().__await__()
            taken = True
            return value
        finally:
            self._leave(taken)
            del self  # the traceback of its error holds this frame, see `Future`

    def wait(self, timeout: float | None = None) -> Any:
        """As of any Future; but one that all have waited for in vain is given up, so that it takes no item with it."""
        self._enter()
        taken = False
        try:
            self.begin()
            value = super().wait(timeout)
            taken = True
            return value
        except BaseException:
            if self._waiting == 1 and not self.waiters:
                self.cancel()
            raise
        finally:
            self._leave(taken)
            del self

    def _enter(self) -> None:
        with self._lock:
            self._waiting += 1

    def _leave(self, taken: bool) -> None:
        with self._lock:
            self._waiting -= 1
            self._taken = self._taken or taken
            items = self._left()
        if items:
            self._client.node.engine.call_on_loop(self._client.put_back, items)

    def finish_with(self, value: Any, items: Sequence[Item]) -> bool:
        """Give it those items; False if nobody waits for them any more. On the loop."""
        if not self.finish(value):
            return False
        with self._lock:
            self.items = items
            return not self._left()

    def _left(self) -> Sequence[Item]:
        """The items that it was given, once nobody will take them; it forgets them. Under the lock."""
        if self._waiting and not self._taken:
            return ()
        items, self.items = self.items, ()
        if self._taken or not items:
            return ()
        text = f"{self.describe()} was cancelled as its value came, which went back into the queue"
        self._error = RpcCancelled(text)
        self._value = None
        self._state = ERROR
        self._set_unwrap_func(partial(_raise_cancelled, text))  # torch's half keeps the value
        return items


def _raise_cancelled(text: str, _: object) -> None:
    raise RpcCancelled(text)
