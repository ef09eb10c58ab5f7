"""The Futures of `put` and `get`, and their requests to the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from ..callbacks import Executor
from ..errors import RpcCancelled
from ..futures import ERROR, Future
from ..locks import RLock
from ..runtime.caller.future import CallFuture
from ..runtime.caller.peer import Peer
from ..runtime.caller.unawaited import Unawaited
from ..runtime.calls.current import is_nested
from ..runtime.engine.call_tracing import Exchange, MadeSpan
from ..runtime.node import Node
from ..undoing import on_error
from .items import Item, Taken


class ClientForWaiting(Protocol):
    """What a Future needs of one worker's side of a queue (`Client`)."""

    node: Node
    waits: set[Any]

    def describe(self) -> str:
        """The queue, for errors."""

    def given_up(self, waiting: Any) -> None:
        """A Future is not waited for any more. On the loop."""

    def put_back(self, items: Sequence[Taken]) -> None:
        """Give unwanted items back to the owner. On the loop."""

    def span(self, exchange: Exchange) -> MadeSpan | None:
        """The span of a put or a get that begins now; None if the worker is not traced."""


class State(Enum):
    """The state of a request. `Request` has the table of transitions."""

    UNDER_WAY = auto()
    WITHDRAWN = auto()
    ENDED = auto()


class Request:
    """A call to the owner that puts or takes items for some Futures.

    from       event                                                 to
    UNDER_WAY  the answer comes, or the call fails                   ENDED; `then` gets that
    UNDER_WAY  no Future waits for it, and it was not sent           ENDED; the call is taken back
    UNDER_WAY  no Future waits for it, and it was sent               WITHDRAWN; the owner ends it, if it waits there
    WITHDRAWN  the answer comes, or the call fails                   ENDED; `then` gets that, and puts items back

    A put begins once more, from ENDED, when the owner has joined (`Client._put_items`).

    number: unique among the calls of this worker. waits: whether it waits at the owner for an item or for room.
    """

    __slots__ = ("call", "futures", "number", "peer", "state", "waits")

    def __init__(self, number: int, futures: Sequence[WaitingFuture]) -> None:
        self.number: int = number
        self.futures: Sequence[WaitingFuture] = futures
        self.waits: bool = False
        self.state: State = State.ENDED
        self.peer: Peer | None = None
        self.call: CallFuture | None = None


class WaitingFuture(Unawaited, Future[Any]):
    """The Future of a `put` or a `get`.

    timer: of its timeout, on the loop. request: its own request under way; None if there is none, and for a `get` that
    shares a request. at_once: whether the owner answers at once. began: when it began to wait, by ``time.monotonic``.
    nested: whether it is part of a call that is served here. span: if it is traced.
    """

    _executor: Executor | None
    _home_thread: int | None
    _loop: asyncio.AbstractEventLoop | None

    timer: asyncio.TimerHandle | None = None
    request: Request | None = None
    at_once: bool = False
    began: float = 0.0
    span: MadeSpan | None = None

    def __init__(self, client: ClientForWaiting, verb: str) -> None:
        super().__init__()
        engine = client.node.engine
        self._subject: str = f"{verb}() on {client.describe()}"
        self._loop, self._home_thread, self._executor = engine.loop, engine.thread, engine.pool
        self.nested: bool = is_nested(client.node)
        self._client = client

    def begin_on_loop(self, begin: Callable[[Any], object]) -> None:
        """Call `begin` with it on the loop. Any thread."""
        engine = self._client.node.engine
        engine.run_on_loop(begin, self)
        if engine.closed:  # the loop may have stopped meanwhile, and nothing would settle it
            self._settle(None, engine.lifetime.why_closed())

    def stop_waiting(self) -> None:
        """Stop its timer, and end its span. On the loop."""
        if self.span is not None:
            self.span.ended(None, self)
        self._client.waits.discard(self)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def finish(self, value: object, error: BaseException | None = None) -> bool:
        """Settle it, unless it is settled. On the loop."""
        self.stop_waiting()
        return self._settle(value, error)

    def _end_overdue(self, now: float) -> float:
        """See `Future`. Raises WorkerClosed in a forked child, where nothing settles it."""
        self._client.node.engine.lifetime.check_not_forked()
        return super()._end_overdue(now)

    def _on_cancel(self) -> None:
        self._client.node.engine.call_on_loop(self._client.given_up, self)


class PutFuture(WaitingFuture):
    """The Future of a `put`. item: the packed item, until the Future has settled."""

    def __init__(self, client: ClientForWaiting, item: Item) -> None:
        super().__init__(client, "put")
        self.item: Item = item

    def finish(self, value: Any, error: BaseException | None = None) -> bool:
        """Settle it, and let go of the item."""
        self.item = None
        return super().finish(value, error)


class GetFuture(WaitingFuture):
    """The Future of up to `count` items. many: as a list. items: the given items, until they are taken.

    It begins when it is waited for, like the coroutine of ``asyncio.Queue.get``; otherwise a dropped Future could get
    an item. producers: by id, the names of workers that have yet to hand over given items.

    Its items are taken once: by the first waiter that gets the value, or by a callback. When the last waiter leaves
    without the value (its task may be cancelled just when the value comes), the items go back, and the Future has no
    value any more. `_lock` guards this, because several threads may wait.
    """

    def __init__(self, client: ClientForWaiting, count: int, many: bool, begin: Callable[[GetFuture], object]) -> None:
        """begin: asks the owner for items. On the loop."""
        super().__init__(client, "get_many" if many else "get")
        self.count = count
        self.many = many
        self.items: Sequence[Taken] = ()
        self.producers: dict[int, str] = {}
        self._begin: Callable[[GetFuture], object] | None = begin
        self._lock = RLock()  # reentrant: the garbage collector may end a waiting task within, which runs `_leave`
        self._waiting: set[object] = set()  # one for each task and thread inside of `__await__` or `wait`
        self._taken = False  # whether the value was taken, or a callback will take it

    def begin(self) -> None:
        """Begin at the first wait. Any thread. Raises WorkerClosed if the worker has shut down."""
        begin, self._begin = self._begin, None
        if begin is not None:
            self._client.node.engine.lifetime.check_begin(begun=self.nested)
            self.span: MadeSpan | None = self._client.span("get")
            self.begin_on_loop(begin)

    def _when_settled(self, callback: Callable[[Future[Any]], None]) -> None:
        """See `Future`."""
        with self._lock:
            self._taken = True
        super()._when_settled(callback)
        self.begin()

    def add_done_callback(self, callback: Callable[[Future[Any]], Any]) -> None:
        """See `Future`."""
        super().add_done_callback(callback)
        self.begin()

    def value(self) -> Any:
        """See `Future`."""
        with self._lock:
            value = super().value()
            self._taken = True
        return value

    def __await__(self) -> Generator[Any, None, Any]:
        waiter = object()
        self._waiting.add(waiter)
        try:
            with on_error(self._leave, waiter):
                self.begin()
                value = yield from super().__await__()
                self._take(waiter)
            return value
        finally:
            del self  # the traceback of its error holds this frame, see `Future`

    def wait(self, timeout: float | None = None) -> Any:
        """See `Future.wait`. When the last waiter leaves without a value, the Future is cancelled and takes no item."""
        waiter = object()
        self._waiting.add(waiter)
        try:
            with on_error(self._wait_no_more, waiter):
                self.begin()
                value = super().wait(timeout)
                self._take(waiter)
            return value
        finally:
            del self

    def _wait_no_more(self, waiter: object) -> None:
        if self._waiting <= {waiter} and not self._waiters:
            self.cancel()
        self._leave(waiter)

    def _take(self, waiter: object) -> None:
        """A waiter has the value."""
        with self._lock:
            self._taken = True
            self._waiting.discard(waiter)
            self.items = ()

    def _leave(self, waiter: object) -> None:
        """A waiter leaves without the value."""
        with self._lock:
            self._waiting.discard(waiter)
            items = self._left()
        if items:
            self._client.node.engine.call_on_loop(self._client.put_back, items)

    def finish_with(self, value: Any, items: Sequence[Taken]) -> bool:
        """Settle it with items. False if it is not waited for any more. On the loop."""
        with self._lock:  # a waiter that has the value already waits until `items` is set
            self.items = items
            if not self.finish(value):
                self.items = ()
                return False
            return not self._left()

    def _left(self) -> Sequence[Taken]:
        """Remove and return the given items if no waiter will take them. Under the lock."""
        if self._waiting or self._taken or not self.items:
            return ()
        items, self.items = self.items, ()
        text = f"{self._describe()} was cancelled as its value came, which went back into the queue"
        self._error = RpcCancelled(text)
        self._value = None
        self._state = ERROR
        self._set_unwrap_func(partial(_raise_cancelled, text))  # torch's half keeps the value
        return items


def _raise_cancelled(text: str, _: object) -> None:
    raise RpcCancelled(text)
