"""A queue at its owner: its packed items, and the calls that wait for an item or for room.

States of a queue: OPEN, then SHUT (it takes no more items; those that it has can be got). States of a call that waits
(`_Waiter`): WAITING, then GIVEN (its items were taken from the queue or put into it), or WITHDRAWN (none were). All of
it changes on the owner's loop alone.

Invariants
1. An item is in the queue, or with one getter, or gone for good: only `_match` takes one out.
2. No call waits for an item while there is one, or for room while there is some.
3. Items of a getter whose call ends before its answer is made go back to the front; after an immediate shutdown they
   are dropped. An owner that drains takes items of its own handlers alone, and waits until the queue is empty.
4. `_unfinished` counts the items that were put, less those that were finished or are gone for good.
5. `_given` counts no more items than were got and are not finished, whichever worker finished them.
6. An item comes back at most once, from the worker that got it, unchanged: each given item has a ticket (`tickets`), a
   message authentication code of the owner. So the owner keeps nothing of items that were given.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from ..errors import ItemLost, Overloaded, PeerLeft, QueueShutDown, RpcError, RpcUsageError
from ..futures import Future
from ..logs import logger
from ..protocol.identity import WorkerInfo
from ..protocol.trace_context import TraceContext
from ..runtime.calls.current import caller, current_call, permits
from ..runtime.calls.declared import pack
from ..runtime.calls.functions import by_right, resource, system
from ..runtime.calls.values import Results
from ..runtime.group.events import Listener, WorkerLeft, WorkerLost
from ..runtime.node import serving
from ..runtime.references.rref import RRef
from .items import (
    MOST,
    PACKED,
    GoneItem,
    Item,
    Items,
    Kept,
    KeptItem,
    KeptItems,
    Put,
    PutItems,
    Shut,
    Taken,
    from_wire,
    gone_with,
    to_named,
    to_wire,
)
from .packing import TOGETHER, hand_over
from .tickets import TICKET, Tickets, split_tickets

# How many calls of one worker that were withdrawn before they arrived the owner remembers.
_MOST_WITHDRAWN = 1000
MOST_TOLD = 100  # how many lost workers that had items `join` reports; the last ones
_SHUT = pack(Shut())

#: The number of a call of one worker, for `withdraw`; 0 if the call cannot be withdrawn.
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Waiter:
    """A call that takes `count` items, or puts `items`. future: of the items (None: shut down), or of a `Put`."""

    __slots__ = ("count", "future", "items", "of_owner")

    def __init__(self, count: int, items: Sequence[Item], *, of_owner: bool = False) -> None:
        """of_owner: whether the worker that owns the queue makes the call."""
        self.count = count
        self.items = items
        self.of_owner = of_owner
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def give(self, value: Any) -> None:
        """End the wait."""
        if not self.future.done():
            self.future.set_result(value)


class QueueCounts(NamedTuple):
    """A queue at one moment: its items, the calls that wait for one or for room, and the items that were got and are
    not finished."""

    items: int
    getters: int
    putters: int
    given: int


@resource("queue")
class ServedQueue:
    """The object that the owner serves for a queue; handles of the queue call it. On the owner's loop.

    The calls that put, take, return and finish items are system calls: a limit of users' calls that dropped one of
    their answers would lose or duplicate items. `join_items` is one, too; otherwise an owner that leaves a free group
    would wait for it. Instead, the number of waiting calls of each worker is limited here (`most_waits`). A role that
    may put or get (option ``allow``) may also call the methods that end it. maxsize: 0 for no limit.
    """

    def __init__(self, name: str, maxsize: int, worker: str, max_frame: int, most_waits: int = 1 << 62) -> None:
        """worker: the owner's name. max_frame: the most bytes of its messages. most_waits: how many calls of one worker
        may wait here.
        """
        self.name = name
        self.maxsize = maxsize
        self._worker = worker
        self._most_bytes = min(TOGETHER, max_frame // 2)
        self._items: deque[Item] = deque()
        self._untaken = 0.0  # when an item was taken last, or came into the empty queue: `time.monotonic()`
        self._getters: deque[_Waiter] = deque()
        self._putters: deque[_Waiter] = deque()
        self._waiting: dict[tuple[int, int], _Waiter] = {}  # by worker and by the number of its call
        self._most_waits = most_waits
        self._waits: dict[int, int] = {}  # calls of each worker that wait
        # Numbers of calls that were withdrawn before they arrived, by worker: one worker's never push out another's.
        self._withdrawn: dict[int, dict[int, None]] = {}
        self._shut = False
        self._parting = False  # its worker leaves: it takes no more items of others
        self._emptied = False  # shut down at once: its items, and those that come back, are dropped
        self._ended = False
        self._unfinished = 0
        self._given: dict[int, int] = {}  # items that each worker has got and not finished
        self._tickets = Tickets()
        self._taken_along: dict[str, int] = {}  # items that went with lost workers, by their names
        self._joiners: list[asyncio.Future[bool]] = []  # True: all is finished; False: the queue was closed

    def counts(self) -> QueueCounts:
        """What is in it, and what waits. Any thread."""
        return QueueCounts(len(self._items), len(self._getters), len(self._putters), sum(list(self._given.values())))

    # --- putting and getting ------------------------------------------------------------------------------------------

    @system
    @by_right("put")
    async def put_items(self, wait: bool, number: Number, items: PutItems, *references: RRef[KeptItems]) -> bytes:
        """Put items in their order, while there is room. The reply is a `Put`.

        wait: wait until there is room for one, or until the caller withdraws the call of that number. Without items and
        wait, the reply only tells that the queue is there, and whether it is shut. Raises RpcUsageError for an item
        that the caller does not keep itself; PeerLeft if this worker leaves by itself.
        """
        if not items and not wait:
            return pack(Put(0, self._shut))
        put = self._read(items, references)
        if not put or not all(type(each) is bytes or _is_kept_by_caller(each) for each in put):
            raise RpcUsageError(f"queue {self.name!r} takes items as `rpc.queue` puts them, and got something else")
        if wait and self._was_withdrawn(number):
            return pack(Put(0))
        putter = _Waiter(0, put, of_owner=caller().name == self._worker)
        if self._parting and not putter.of_owner:
            raise self._takes_no_more()
        self._putters.append(putter)
        self._match()
        if not putter.future.done() and not wait:
            self._putters.pop()  # it is still the last one
            putter.give(Put(0))
        return pack(await self._settled(putter, number, self._putters))

    @system
    @by_right("get")
    async def take_items(
        self,
        wait: bool,
        number: Number,
        count: Annotated[int, Meta(ge=1, le=MOST)],
        apart: Annotated[list[int], Meta(max_length=MOST)],
    ) -> Results:
        """Take up to `count` items. The reply is `Items` followed by references, or `Shut`.

        wait: wait until there is an item, or until the caller withdraws the call of that number. apart: ids of workers
        that the caller has lost; this worker fetches what they keep, if they live.
        """
        if wait and self._was_withdrawn(number):
            return Results((pack(Items(b"", {}, [])),))
        getter = _Waiter(count, ())
        self._getters.append(getter)
        self._match()
        if not getter.future.done() and not wait:
            self._getters.pop()  # as above
            getter.give([])
        items: list[Item] | None = await self._settled(getter, number, self._getters)
        if items is None:
            return Results((_SHUT,))
        if apart:
            await self._take_in(items, apart)
        who = caller().id
        self._given[who] = self._given.get(who, 0) + len(items)
        producers: dict[int, str] = {}
        for place, item in enumerate(items):
            if type(item) is not Kept:
                continue
            # Checked without an await before the answer is made: a reference to a gone worker could not be sent.
            gone = gone_with(item)
            if gone is not None:
                items[place] = GoneItem(gone)
                self._finish(1, who)
            elif item.reference._owner not in producers:
                producers[item.reference._owner] = item.reference.owner_name()
        sent, references = to_wire(items)
        tickets = self._tickets.issue(_id_of_caller(), items)
        return Results((pack(Items(tickets, producers, sent)), *references))

    async def _take_in(self, items: list[Item], apart: Sequence[int]) -> None:
        """Fetch the items whose producers the getter has lost, and keep them here.

        Such a producer may live if only the network between the two is broken. An item that cannot be fetched stays
        there.
        """
        node = serving()[0]
        far: list[int] = []
        calls: list[Future[Any]] = []
        for place, item in enumerate(items):
            if type(item) is Kept and item.reference._owner in apart and gone_with(item) is None:
                peer, patience = node.peers.by_id(item.reference._owner), node.engine.default_timeout
                with contextlib.suppress(RpcError):  # nothing was sent
                    calls.append(peer.call(hand_over, (pack(to_named([item])),), None, patience, system=True))
                    far.append(place)
        try:
            answers = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:  # the getter is gone
            self._put_back(items)
            raise
        for place, answer in zip(far, answers, strict=True):
            if type(answer) is Results and len(answer) == 2:
                packed, content = answer
                (said,) = PACKED.decode(packed)
                trace = said if isinstance(said, TraceContext) else None
                kept = KeptItem(content) if said is True else KeptItem(None, content, trace=trace)
                items[place] = Kept(node.references.refer_to(KeptItems((kept,))), 0)

    async def _settled(self, waiter: _Waiter, number: int, among: deque[_Waiter]) -> Any:
        """Wait for the waiter's result. If the call is cancelled, its items go back."""
        who = caller().id
        key = who, number
        waits = not waiter.future.done()
        if waits:
            try:
                self._waits_here(who)
            except Overloaded:
                among.pop()  # it is still the last one
                raise
            self._waiting[key] = waiter
        try:
            return await waiter.future
        except asyncio.CancelledError:  # the caller is gone
            if waiter.future.cancelled() or not waiter.future.done():
                with contextlib.suppress(ValueError):  # `_match` may have come across it
                    among.remove(waiter)
            elif among is self._getters and waiter.future.result():
                self._put_back(waiter.future.result())
            raise
        finally:
            if self._waiting.get(key) is waiter:
                del self._waiting[key]
            if waits:
                self._waits_no_more(who)

    def _waits_here(self, who: int) -> None:
        """Count one more waiting call of a worker. Raises Overloaded if too many wait."""
        count = self._waits.get(who, 0)
        if count >= self._most_waits:
            raise Overloaded(
                f"{count} calls of worker {caller().name!r} wait at queue {self.name!r} of worker {self._worker!r} "
                "(max_queued_calls); this one does not"
            )
        self._waits[who] = count + 1

    def _waits_no_more(self, who: int) -> None:
        self._waits[who] -= 1
        if not self._waits[who]:
            del self._waits[who]

    def _match(self) -> None:
        """Give items and room to the calls that wait for them, in their order."""
        while True:
            while self._putters and (self._shut or self._room()):
                self._put(self._putters.popleft())
            if not (self._getters and (self._items or self._shut)):
                return
            getter = self._getters.popleft()
            if not getter.future.done():
                getter.give(self._take(getter.count) or None)

    def _take(self, count: int) -> list[Item]:
        taken: list[Item] = []
        size = 0
        self._untaken = time.monotonic()
        while self._items and len(taken) < count and size <= self._most_bytes:
            item = self._items.popleft()
            size += len(item) if type(item) is bytes else 0
            taken.append(item)
        return taken

    def _put(self, putter: _Waiter) -> None:
        if putter.future.done():
            return
        if self._shut:
            putter.give(Put(0, True))
            return
        items = putter.items[: self._room()]
        if not self._items:
            self._untaken = time.monotonic()
        self._items.extend(items)
        self._unfinished += len(items)
        putter.give(Put(len(items)))

    def _room(self) -> int:
        return max(0, self.maxsize - len(self._items)) if self.maxsize else MOST

    @system
    @by_right("get")
    async def return_items(self, tickets: bytes, items: PutItems, *references: RRef[KeptItems]) -> None:
        """Put items back to the front that the caller got and does not want.

        tickets: those that came with the items. Raises RpcUsageError for an item that the caller did not get, or has
        finished.
        """
        back, who = self._read(items, references), caller().id
        if not back or len(tickets) != TICKET * len(back):
            raise RpcUsageError(f"what was not taken from queue {self.name!r} cannot be put back")
        given = self._given.get(who, 0)
        if len(back) > given:
            raise RpcUsageError(
                f"{len(back)} items are put back, and worker {caller().name!r} has {given} of {self.name!r}"
            )
        if not self._tickets.redeem(_id_of_caller(), who, [*map(Taken, split_tickets(tickets), back)]):
            raise RpcUsageError(
                f"what is put back into queue {self.name!r} was not given to worker {caller().name!r}, or is back "
                "already"
            )
        self._take_share(who, len(back))
        self._put_back(back)

    def _read(self, items: PutItems, references: Sequence[RRef[Any]]) -> list[Item]:
        try:
            return from_wire(items, references)
        except ValueError as error:
            raise RpcUsageError(f"queue {self.name!r} got invalid items: {error}") from None

    def _put_back(self, items: Sequence[Item]) -> None:
        if self._emptied:
            self._unfinished -= len(items)
            self._look_at_joiners()
            return
        self._items.extendleft(reversed(items))
        self._match()

    @by_right("put", "get")
    async def withdraw(self, number: Number) -> None:
        """End the wait of the caller's call of that number.

        If no such call waits, its answer is under way; or it arrives after this one, because its items are large.
        """
        key = caller().id, number
        waiter = self._waiting.get(key)
        if waiter is None:
            withdrawn = self._withdrawn.setdefault(key[0], {})
            withdrawn[number] = None
            if len(withdrawn) > _MOST_WITHDRAWN:
                del withdrawn[next(iter(withdrawn))]
        elif not waiter.future.done():
            getter = waiter in self._getters
            (self._getters if getter else self._putters).remove(waiter)
            waiter.give([] if getter else Put(0))

    def _was_withdrawn(self, number: int) -> bool:
        withdrawn = self._withdrawn.get(caller().id)
        return withdrawn is not None and withdrawn.pop(number, True) is None

    # --- finishing ----------------------------------------------------------------------------------------------------

    @system
    @by_right("get")
    async def finish_items(self, count: Annotated[int, Meta(ge=1)]) -> None:
        """Count items that were got as finished. ValueError if there are fewer.

        A caller that may shut the queue down can also finish items that other workers have got.
        """
        if count > self._unfinished:
            raise ValueError("task_done() called too many times")
        who, limits = caller(), permits()
        given = self._given.get(who.id, 0)
        if count > given and limits is not None and not limits.may("queue", self.name, "shutdown"):
            raise ValueError(
                f"task_done() called too many times: worker {who.name!r} has got {given} items of queue {self.name!r} "
                f"that are not finished, and may not finish those of others (queue/{self.name}:shutdown)"
            )
        self._finish(count, who.id)

    def _finish(self, count: int, worker: int) -> None:
        """Count items as finished by a worker: first the ones it has got, then others' in the order of their getting.

        Items that stayed counted for the worker that got them would be reported as lost when it leaves.
        """
        rest = self._take_share(worker, count)
        while rest and self._given:
            rest = self._take_share(next(iter(self._given)), rest)
        self._unfinished -= count
        self._look_at_joiners()

    def _take_share(self, worker: int, count: int) -> int:
        """Subtract items from what a worker has got. Returns how many it had too few."""
        left = self._given.get(worker, 0) - count
        if left > 0:
            self._given[worker] = left
            return 0
        self._given.pop(worker, None)
        return -left

    def _look_at_joiners(self) -> None:
        if self._unfinished <= 0 or self._ended:
            joiners, self._joiners = self._joiners, []
            for each in joiners:
                if not each.done():
                    each.set_result(self._unfinished <= 0)

    def _end(self) -> None:
        self._shut_down(True)
        self._ended = True
        self._look_at_joiners()

    @property
    def unfinished(self) -> int:
        """How many items were put and are not finished. Any thread."""
        return self._unfinished

    @system
    @by_right("put", "get")
    async def join_items(self) -> None:
        """Wait until all items are finished. Raises QueueShutDown if the queue is closed before.

        Raises ItemLost, once for each lost worker, if items went with it.
        """
        finished = self._unfinished <= 0
        if not finished and not self._ended:
            who = caller().id
            self._waits_here(who)
            joined: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._joiners.append(joined)
            try:
                finished = await joined
            finally:
                self._waits_no_more(who)
                if joined in self._joiners:
                    self._joiners.remove(joined)
        if not finished:
            raise QueueShutDown(
                f"queue {self.name!r} of worker {self._worker!r} was closed before all was finished that was put into "
                f"it: {self._unfinished} of its items were got, and are not"
            )
        if self._taken_along:
            worker, count = self._taken_along.popitem()
            raise ItemLost(
                f"{count} items of queue {self.name!r} on worker {self._worker!r} were got by worker {worker!r}, which "
                "has gone without finishing them; all others are finished",
                queue=self.name,
                worker=worker,
                count=count,
            )

    def _on_gone(self, worker: WorkerInfo) -> None:
        self._withdrawn.pop(worker.id, None)
        self._tickets.forget(worker.id)
        count = min(self._given.pop(worker.id, 0), self._unfinished - len(self._items))
        if count > 0:
            logger.warning(
                "%d items of queue %r on worker %s went with worker %s, which had not finished them",
                count,
                self.name,
                self._worker,
                worker.name,
            )
            self._taken_along[worker.name] = self._taken_along.pop(worker.name, 0) + count
            if len(self._taken_along) > MOST_TOLD:  # no call joins
                del self._taken_along[next(iter(self._taken_along))]
            self._unfinished -= count
            self._look_at_joiners()

    # --- looking, ending ----------------------------------------------------------------------------------------------

    def part(self) -> None:
        """See `Leftover`: handlers of this worker may still put items, as they finish what they have begun."""
        self._parting = True
        for putter in [each for each in self._putters if not each.of_owner]:
            if not putter.future.done():
                putter.future.set_exception(self._takes_no_more())

    def left(self) -> str:
        """See `Leftover`."""
        return f"{_items(len(self._items))} in queue {self.name!r}" if self._items else ""

    def _takes_no_more(self) -> PeerLeft:
        return PeerLeft(
            f"worker {self._worker!r}, the owner of queue {self.name!r}, is draining: its queue takes no more items"
        )

    @by_right("look")
    async def qsize(self) -> int:
        """How many items there are."""
        return len(self._items)

    @by_right("look")
    async def empty(self) -> bool:
        """Whether there is none."""
        return not self._items

    @by_right("look")
    async def full(self) -> bool:
        """Whether there are as many as there may be."""
        return 0 < self.maxsize <= len(self._items)

    @by_right("shutdown")
    async def shut_down(self, immediate: bool) -> None:
        """See `QueueHandle.shutdown`."""
        self._shut_down(immediate)

    def _shut_down(self, immediate: bool) -> None:
        self._shut = True
        if immediate:
            self._emptied = True
            self._unfinished -= len(self._items)
            self._items.clear()
            self._look_at_joiners()
        self._match()


def _id_of_caller() -> int:
    """The caller's unique id in the group. The id of `caller()` is its place, which a later worker may take."""
    call = current_call.get()
    assert call is not None, "this is asked in a handler"
    return call.caller_id


def _is_kept_by_caller(item: Kept) -> bool:
    """Whether the caller is the producer of an item. Only a producer may put its items."""
    owner: int = item.reference._owner
    return owner == _id_of_caller()


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


async def watch(queue: ServedQueue, events: Listener) -> None:
    """Forget the items of lost workers until the worker ends; then drop the items of the queue."""
    try:
        async for event in events:
            if isinstance(event, (WorkerLost, WorkerLeft)):
                queue._on_gone(event.worker)
    finally:
        queue._items.clear()


def end(queue: ServedQueue) -> None:
    """End all waits at a closed queue."""
    queue._end()
