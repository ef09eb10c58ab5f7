"""`aiorpc.Queue` and the handles of queues that other workers own: the methods of ``asyncio.Queue``, from any worker.

Each method returns a Future: ``await`` it, or ``wait()`` for it where blocking is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self

from .._typing import T
from ..errors import RpcUsageError
from ..futures import Future
from ..options import seconds
from ..protocol.identity import check_name, check_object_name
from ..protocol.registered import register_safe
from ..runtime.callee.objects import NameTaken, ServedObject
from ..runtime.calls.current import within_call
from ..runtime.node import Node, registry
from .client import Client
from .items import MOST
from .served import ServedQueue, end, watch


@register_safe
class QueueHandle(Generic[T]):
    """A queue of some worker: see `aiorpc.queue`. All methods may be called from any thread, and return at once.

    Each returns a Future, to await or to wait for; so write ``if await q.empty()``. In a handler, a method waits no
    longer than the handler's caller. A handle can be an argument of a call, or be inside of one; it is a handle at the
    receiver, too.

    Raised by the Futures: UnknownObject if the owner has no queue of that name; PeerLost or PeerLeft if the owner is
    gone; NotAllowed if the owner does not allow this worker the method; RpcTimeout.
    """

    def __init__(self, name: str, owner: str, timeout: float | None = None) -> None:
        """timeout: seconds that each method has; None for the worker's ``rpc_timeout``.

        0 means no limit for `put`, `get`, `get_many` and `join`; the other methods, which the owner answers at once,
        then have ``rpc_timeout``.
        """
        self.name: str = check_object_name(name)
        self.owner: str = check_name(owner)
        self._timeout = None if timeout is None else seconds(timeout, "timeout")
        self._made: Client | None = None

    def _client(self) -> Client:
        made = self._made
        if made is None or made.node.engine.closed:
            node: Node = registry.get()
            made = self._made = Client(node, self.name, self.owner)
        return made

    def _seconds(self, client: Client, timeout: float | None) -> float:
        engine = client.node.engine
        own = engine.default_timeout if self._timeout is None else self._timeout
        return within_call(engine, own if timeout is None else seconds(timeout, "timeout"))

    def _patience(self, client: Client) -> float:
        """Seconds for methods that the owner answers at once; 0 for no limit."""
        return within_call(client.node.engine, self._timeout or client.node.engine.default_timeout)

    # --- putting ------------------------------------------------------------------------------------------------------

    def put(self, item: T, *, copy: bool = True, timeout: float | None = None) -> Future[None]:
        """Put an item, in its present state. The Future settles when the item is in the queue, and waits for room.

        Items that one handle puts keep their order. Cancelling gives up; the item is in the queue if it arrived before
        that. An item of more than 32 KiB stays with this worker until it is got, so the worker has to stay until then.
        Classes and functions of this ``__main__`` go by value, so any worker can read them.

        timeout: seconds to wait for room, 0 for no limit; None for the handle's.
        copy: whether an item that stays here is copied. If not, do not change it until it is got.

        Raised here, with nothing sent: SerializationError, NotInitialized, WorkerClosed.

        Raised by the Future: RpcTimeout, after which the item is in the queue if it arrived before that; QueueShutDown
        after `shutdown`.
        """
        client = self._client()
        return client.put(item, copy, self._seconds(client, timeout))

    def put_nowait(self, item: T, *, copy: bool = True) -> Future[None]:
        """Put an item if there is room now, as `put` does; QueueFull if there is none.

        RpcTimeout if the owner does not answer within the handle's timeout; the item may still be put later.
        """
        client = self._client()
        return client.put_nowait(item, copy, self._patience(client))

    # --- getting ------------------------------------------------------------------------------------------------------

    def get(self, *, timeout: float | None = None) -> Future[T]:
        """The next item; the Future waits while there is none. Each item is given to one `get` of one worker.

        An item that comes after the timeout, or after the Future was cancelled, stays at the front of the queue. A
        worker that dies takes the items with it that it was given.

        timeout: seconds, 0 for no limit; None for that of the handle.

        Raised by the Future: RpcTimeout; QueueShutDown once the queue is shut down and empty; ItemLost if the worker
        that kept the item is gone; the next `get` goes on with the next item. If that worker lives but does not hand
        the item over now, the item stays in the queue, and the Future raises the reason (RpcTimeout, Overloaded).
        """
        client = self._client()
        return client.get(1, False, self._seconds(client, timeout))

    def get_many(self, count: int, *, timeout: float | None = None) -> Future[list[T]]:
        """A list of the next items: as many as there are, up to `count`, and at least one. Otherwise as `get`.

        It has at most 1,024 items, and at most 256 KiB of items that are at the owner. If items were lost, the next
        `get` of this handle raises ItemLost.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise RpcUsageError(f"get_many() takes how many items there may be, from 1, and not {count!r:.40}")
        client = self._client()
        return client.get(min(count, MOST), True, self._seconds(client, timeout))

    def get_nowait(self) -> Future[T]:
        """The next item if there is one now; QueueEmpty if there is none. Otherwise as `get`.

        RpcTimeout if the owner does not answer within the handle's timeout; the item stays in the queue then.
        """
        client = self._client()
        return client.get_nowait(self._patience(client))

    # --- finishing ----------------------------------------------------------------------------------------------------

    def task_done(self, count: int = 1) -> Future[None]:
        """Finish items that were got, for `join`. From any worker. count: how many.

        A count above what this worker has got itself finishes items of other workers; the earliest getters come first.
        A worker that may not shut the queue down (option ``allow``) finishes its own items alone.

        Raised by the Future: ValueError if fewer items are unfinished.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise RpcUsageError(
                f"task_done() takes the number of items that are finished, from 1, and not {count!r:.40}"
            )
        return self._ask("finish_items", count)

    def join(self, *, timeout: float | None = None) -> Future[None]:
        """Wait until every item that was put has been got and finished (`task_done`).

        Items that are dropped, by ``shutdown(immediate=True)`` or as the queue is closed, count as finished, too.

        timeout: seconds, 0 for no limit; None for that of the handle.

        Raised by the Future: RpcTimeout; ItemLost, once for each lost worker, if items went with a worker that had got
        them and had not finished them, which count as finished; QueueShutDown if the queue is closed while items were
        got and are not finished.
        """
        client = self._client()
        return client.join(self._seconds(client, timeout), self._unfinished)

    def _unfinished(self) -> int | None:
        """How many items are not finished; None if this worker cannot see that."""
        return None

    # --- looking, ending ----------------------------------------------------------------------------------------------

    def qsize(self) -> Future[int]:
        """How many items there are at the owner. The number may have changed when it arrives here."""
        return self._ask("qsize")

    def empty(self) -> Future[bool]:
        """Whether there is no item now."""
        return self._ask("empty")

    def full(self) -> Future[bool]:
        """Whether there are ``maxsize`` items now."""
        return self._ask("full")

    def shutdown(self, immediate: bool = False) -> Future[None]:
        """Take no more items. `put` raises QueueShutDown, also while it waits; so does `get` once the queue is empty.

        immediate: whether the items in the queue are dropped.

        From any worker that may (option ``allow``).
        """
        return self._ask("shut_down", bool(immediate))

    def _ask(self, method: str, *args: object) -> Future[Any]:
        client = self._client()
        return client.ask(method, *args, timeout=self._patience(client), depth=3)

    def _bind(self, node: Node) -> Self:
        """Act for the worker of `node`, not for the current worker at the first use."""
        self._made = Client(node, self.name, self.owner)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return QueueHandle, (self.name, self.owner, self._timeout)

    def _take_apart(self) -> dict[str, object]:
        """The same without pickle (`protocol.trees`)."""
        return {"name": self.name, "owner": self.owner, "timeout": self._timeout}

    @classmethod
    def _put_together(cls, parts: dict[str, Any]) -> QueueHandle[Any]:
        """A handle from the parts of `_take_apart`. Raises RpcUsageError for invalid parts."""
        return QueueHandle(parts.get("name", ""), parts.get("owner", ""), parts.get("timeout"))

    def __repr__(self) -> str:
        return f"<aiorpc.queue {self.name!r} of worker {self.owner!r}>"


@register_safe
class Queue(QueueHandle[T]):
    """A queue of this worker, with the methods of ``asyncio.Queue``; other workers reach it by `aiorpc.queue`.

    It is served until `close`, or until the worker ends; the items in it are gone then. Items of more than 32 KiB stay
    with the worker that put them until they are got.
    """

    def __init__(self, name: str, maxsize: int = 0, *, timeout: float | None = None) -> None:
        """name: as of `aiorpc.serve`; queues and objects share their names. maxsize: items, 0 for no limit.

        timeout: seconds that its methods have here; None for the worker's ``rpc_timeout``. Raises RpcUsageError for a
        name that is invalid or taken, and for a maxsize below 0; NotInitialized, WorkerClosed. Any thread.
        """
        self._host(registry.get, name, maxsize, timeout)

    @classmethod
    def _of(cls, node: Node, name: str, maxsize: int, timeout: float | None) -> Self:
        """A queue of the worker of `node`, whichever worker is current."""
        made = cls.__new__(cls)
        made._host(lambda: node, name, maxsize, timeout)
        return made

    def _host(self, find: Callable[[], Node], name: str, maxsize: int, timeout: float | None) -> None:
        if isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 0:
            raise RpcUsageError(f"maxsize of queue {name!r:.130} is a number of items, or 0 for no limit: {maxsize!r}")
        node = find()
        QueueHandle.__init__(self, name, node.engine.name, timeout)
        self.maxsize = maxsize
        options = node.engine.options
        self._served = ServedQueue(self.name, maxsize, self.owner, options.max_frame_bytes, options.max_queued_calls)
        try:
            self._object: ServedObject = node.worker.serve(self.name, self._served)
        except NameTaken:
            raise RpcUsageError(
                f"worker {self.owner!r} has a queue, or serves an object, of the name {name!r} already: give this one "
                f"another name, or close() the other one. rpc.queue({name!r}, owner={self.owner!r}) uses a queue that "
                "is there"
            ) from None
        self._own = Client(node, self.name, self.owner)
        self._node = node
        self._events = node.events.listen()
        node.engine.run_on_loop(self._begin)

    def close(self) -> None:
        """Stop serving the queue: calls that wait at it raise QueueShutDown. Idempotent. Any thread."""
        self._object.close()
        self._node.engine.run_on_loop(self._end)

    def _begin(self) -> None:
        engine = self._node.engine
        engine.tasks.spawn(watch(self._served, self._events))
        engine.leftovers.add(self._served)
        if engine.lifetime.parting:
            self._served.part()

    def _client(self) -> Client:
        return self._own  # never that of a later worker of this process, which may have another queue of the name

    def _unfinished(self) -> int | None:
        return self._served.unfinished

    def _end(self) -> None:
        end(self._served)
        self._node.engine.leftovers.discard(self._served)
        self._node.engine.tasks.spawn(self._events.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        limit = f", maxsize {self.maxsize}" if self.maxsize else ""
        return f"<aiorpc.Queue {self.name!r} of worker {self.owner!r}{limit}>"
