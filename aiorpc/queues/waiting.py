"""Who waits for a queue: the Futures of `put` and `get`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol

from ..callbacks import Executor
from ..errors import ItemLost, RpcCancelled, RpcTimeout
from ..futures import ERROR, Future
from ..locks import RLock
from ..runtime.caller.future import CallFuture
from ..runtime.caller.reworded import RewordedFuture, Words
from ..runtime.caller.unawaited import Unawaited
from ..runtime.calls.current import is_nested
from ..runtime.node import Node
from .items import Item, Taken


class ClientForWaiting(Protocol):
    """What a Future needs of one worker's side of a queue (`Client`)."""

    node: Node
    waits: set[Any]

    def describe(self) -> str:
        """The queue, for errors."""

    def given_up(self, waiting: Any) -> None:
        """Nobody waits for it any more. On the loop."""

    def put_back(self, items: Sequence[Taken]) -> None:
        """Nobody here wants those items. On the loop."""

    def not_told(self, loss: ItemLost) -> None:
        """Nobody here has heard of that loss. On the loop."""


class WaitingFuture(Unawaited, Future[Any]):
    """The Future of a `put` or a `get`.

    timer: of its timeout, on the loop. number: of its call, if it has one for itself; else 0. began: when that was, by
    ``time.monotonic``. nested: whether it is part of a call that is served here.
    """

    _executor: Executor | None
    _home_thread: int | None
    _loop: asyncio.AbstractEventLoop | None

    timer: asyncio.TimerHandle | None = None
    number = 0
    began: float = 0.0

    def __init__(self, client: ClientForWaiting, verb: str) -> None:
        super().__init__()
        engine = client.node.engine
        self._subject: str = f"{verb}() on {client.describe()}"
        self._loop, self._home_thread, self._executor = engine.loop, engine.thread, engine.pool
        self.nested: bool = is_nested(client.node)
        self._client = client

    def begin_on_loop(self, begin: Callable[[Any], object]) -> None:
        """Have it begun on the loop. Any thread."""
        engine = self._client.node.engine
        engine.run_on_loop(begin, self)
        if engine.closed:  # meanwhile: the loop may have stopped, and nobody would settle it
            self._settle(None, engine.lifetime.why_closed())

    def stop_waiting(self) -> None:
        """Nobody waits for it any more. On the loop."""
        self._client.waits.discard(self)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def finish(self, value: object, error: BaseException | None = None) -> bool:
        """Settle it, unless somebody has. On the loop."""
        self.stop_waiting()
        return self._settle(value, error)

    def _end_overdue(self, now: float) -> float:
        """As of any Future. WorkerClosed in a forked child, where nobody settles it."""
        self._client.node.engine.lifetime.check_not_forked()
        return super()._end_overdue(now)

    def _on_cancel(self) -> None:
        self._client.node.engine.call_on_loop(self._client.given_up, self)


class PutFuture(WaitingFuture):
    """One item that is put. item: packed, until it has settled."""

    def __init__(self, client: ClientForWaiting, item: Item) -> None:
        super().__init__(client, "put")
        self.item: Item = item

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

    A signal handler may raise at any instruction of a main thread that waits, also when it has the value already: then
    it leaves without. So the items are forgotten in the last step before the value is returned: until then they can go
    back.
    """

    def __init__(self, client: ClientForWaiting, count: int, many: bool, begin: Callable[[GetFuture], object]) -> None:
        """begin: has it given items."""
        super().__init__(client, "get_many" if many else "get")
        self.count = count
        self.many = many
        self.items: Sequence[Taken] = ()
        self.producers: dict[int, str] = {}
        self._begin: Callable[[GetFuture], object] | None = begin
        self._lock = RLock()  # the garbage collector may end a task that waits here, and run `_leave` within
        self._waiting: set[object] = set()  # one for each task and thread that is inside of `__await__` and `wait`
        self._takers: set[object] = set()  # those of them that have got the value; None for whoever else has it

    def begin(self) -> None:
        """Somebody waits for it. Any thread. WorkerClosed if the worker has shut down."""
        begin, self._begin = self._begin, None
        if begin is not None:
            self._client.node.engine.lifetime.check_begin(begun=self.nested)
            self.begin_on_loop(begin)

    def _when_settled(self, callback: Callable[[Future[Any]], None]) -> None:
        """As of any Future."""
        with self._lock:
            self._takers.add(None)
        super()._when_settled(callback)
        self.begin()

    def add_done_callback(self, callback: Callable[[Future[Any]], Any]) -> None:
        """As of any Future."""
        super().add_done_callback(callback)
        self.begin()

    def value(self) -> Any:
        """As of any Future."""
        with self._lock:
            value = super().value()
            self._takers.add(None)
        return value

    def __await__(self) -> Generator[Any, None, Any]:
        waiter = object()
        try:
            self._waiting.add(waiter)
            self.begin()
            value = yield from super().__await__()
            self._take(waiter)
            self.items = ()  # and no call from here on: a signal handler may raise in it
            return value
        except BaseException as error:
            self._leave(waiter, error)
            raise
        finally:
            del self  # the traceback of its error holds this frame, see `Future`

    def wait(self, timeout: float | None = None) -> Any:
        """As of any Future; but one that all have waited for in vain is given up, so that it takes no item with it."""
        waiter = object()
        try:
            self._waiting.add(waiter)
            self.begin()
            value = super().wait(timeout)
            self._take(waiter)
            self.items = ()  # as above
            return value
        except BaseException as error:
            if self._waiting <= {waiter} and not self._waiters:
                self.cancel()
            self._leave(waiter, error)
            raise
        finally:
            del self

    def _take(self, waiter: object) -> None:
        """That one has got the value."""
        with self._lock:
            self._takers.add(waiter)
            self._waiting.discard(waiter)

    def _leave(self, waiter: object, error: BaseException) -> None:
        """That one gets no value, also if it has taken it just now. error: is what it hears."""
        with self._lock:
            self._takers.discard(waiter)
            self._waiting.discard(waiter)
            items, loss = self._left(), self._error
            if error is loss:
                self._takers.add(None)  # of that
            elif isinstance(loss, ItemLost) and not (self._waiting or self._takers):
                self._forget("as a loss was told, of which the next one hears")
                self._client.node.engine.call_on_loop(self._client.not_told, loss)
        if items:
            self._client.node.engine.call_on_loop(self._client.put_back, items)

    def finish_with(self, value: Any, items: Sequence[Taken]) -> bool:
        """Give it those items; False if nobody waits for them any more. On the loop."""
        with self._lock:  # whoever has the value by then waits until its items are there, which it is to forget
            self.items = items
            if not self.finish(value):
                self.items = ()
                return False
            return not self._left()

    def _left(self) -> Sequence[Taken]:
        """The items that it was given, once nobody will take them; it forgets them. Under the lock."""
        if self._waiting or self._takers or not self.items:
            return ()
        items, self.items = self.items, ()
        self._forget("as its value came, which went back into the queue")
        return items

    def _forget(self, when: str) -> None:
        """It has not what it was given, as somebody else is to have that. when: it was cancelled."""
        text = f"{self._describe()} was cancelled {when}"
        self._error = RpcCancelled(text)
        self._value = None
        self._state = ERROR
        self._set_unwrap_func(partial(_raise_cancelled, text))  # torch's half keeps the value


class JoinFuture(RewordedFuture):
    """The Future of a `join`. A loss that comes as nobody waits any more is told to whoever joins next.

    not_heard: has the owner of the queue told so, if its answer was a loss.
    """

    def __init__(self, call: CallFuture, words: Words, not_heard: Callable[[], None]) -> None:
        self._not_heard = not_heard
        self._heard = False
        super().__init__(call, words)

    def _on_settled(self, call: Future[Any]) -> None:
        super()._on_settled(call)
        if isinstance(call._error, (RpcCancelled, RpcTimeout)) or (call._error is not None and self.cancelled()):
            self._not_heard()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from super().__await__())
        finally:
            self._leave(sys.exception())
            del self  # as of a GetFuture

    def wait(self, timeout: float | None = None) -> Any:
        """As of any Future."""
        try:
            return super().wait(timeout)
        finally:
            self._leave(sys.exception())
            del self

    def _leave(self, error: BaseException | None) -> None:
        """A wait has ended. error: what it raises."""
        if error is not None and error is self._error:
            self._heard = True
        elif isinstance(self._error, ItemLost) and not (self._heard or self._waiters):
            self._not_heard()


def _raise_cancelled(text: str, _: object) -> None:
    raise RpcCancelled(text)
