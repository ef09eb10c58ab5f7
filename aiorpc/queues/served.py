"""A queue at its owner: its items as they were packed, who waits for one, and who waits for room.

States of a queue: OPEN, then SHUT (nothing is put any more; what there is can be got). Of somebody who waits
(`_Waiter`): WAITING, then GIVEN (its items were taken from the queue or put into it), or WITHDRAWN (none of them were).
All of it changes on the loop of the owner alone.

Invariants
1. An item is in the queue, or with one getter, or gone for good: `_match` moves it, and nobody else takes one out.
2. Nobody waits for an item while there is one, or for room while there is some.
3. What was given to a getter whose call ends before its answer is made goes back to the front, or is dropped if the
   queue was shut down at once.
4. `_unfinished` is what was put, less what was finished or is gone for good.
5. `_given` has no more items than were got and are not finished, whoever has said of them that they are.
6. What is put back was got by the worker that says so, as it is and once: each item that is given has a ticket
   (`tickets`), which is the owner's own seal. So nothing has to be kept of items that were given.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..errors import ItemLost, Overloaded, QueueShutDown, RpcError, RpcUsageError
from ..futures import Future
from ..protocol.identity import WorkerInfo
from ..runtime.calls.current import caller, current_call, permits
from ..runtime.calls.functions import by_right, resource, system
from ..runtime.calls.values import Results
from ..runtime.group.events import Listener, WorkerLeft, WorkerLost
from ..runtime.node import serving
from .items import Item, Kept, KeptItem, KeptItems, Said, Taken, from_wire, gone_with, to_named, to_wire
from .packing import SMALL, TOGETHER, hand_over
from .tickets import TICKET, Tickets, split_tickets

#: How an answer to `take_items` begins: with the items, or with nothing, as the queue is shut down and has none.
HERE, SHUT = 0, 1
MOST = 1024  # items that one call puts or takes
# Words of one worker that end a call which is not there, the last ones; most calls have their answer by then.
_MOST_WITHDRAWN = 1000
MOST_TOLD = 100  # workers that took items along, the last ones, of which those who join are told


class _Waiter:
    """Somebody who waits: to take `count` items, or to put `items`. future: of the items, or of how many were put."""

    __slots__ = ("count", "future", "items")

    def __init__(self, count: int, items: Sequence[Item]) -> None:
        self.count = count
        self.items = items
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def give(self, value: Any) -> None:
        """It waits no longer."""
        if not self.future.done():
            self.future.set_result(value)


@resource("queue")
class ServedQueue:
    """What a worker serves for a queue of its own; handles of the queue call it. On the loop of its owner.

    What puts, takes, returns and finishes items is the runtime's own as far as its answers go: none is dropped because
    too much waits to be sent, as items would be lost by that, or be told of again and so be there twice. So is
    `join_items`, else an owner that leaves a group without a size would wait for whoever joins. So no limit of calls
    holds for them, but one of their own for those that wait. Who may put, or get, by the option ``allow``, may call
    what ends it, too: what a handle has given up would be put all the same, or be lost. maxsize: 0 for no limit.
    """

    def __init__(self, name: str, maxsize: int, worker: str, max_frame: int, most_waits: int = 1 << 62) -> None:
        """worker: the name of the owner. max_frame: bytes that a message of its may have. most_waits: calls of one
        worker that may wait here."""
        self.name = name
        self.maxsize = maxsize
        self._worker = worker
        self._most_bytes = min(TOGETHER, max_frame // 2)
        self._items: deque[Item] = deque()
        self._getters: deque[_Waiter] = deque()
        self._putters: deque[_Waiter] = deque()
        self._waiting: dict[tuple[int, int], _Waiter] = {}  # by worker and by the number of its call
        self._most_waits = most_waits
        self._waits: dict[int, int] = {}  # how many of each worker wait
        # What was to end when nobody waited under that number, by worker: one that says many drops none of others.
        self._withdrawn: dict[int, dict[int, None]] = {}
        self._shut = False
        self._emptied = False  # whether it was shut down at once: what there is, and what comes back, is dropped
        self._ended = False
        self._unfinished = 0
        self._given: dict[int, int] = {}  # items that each worker has got and not finished
        self._tickets = Tickets()
        self._taken_along: dict[str, int] = {}  # of those, what went with workers that are gone, by their names
        # Of which of them somebody was told who joined, the last ones, by that worker and the number of its call.
        self._told: dict[tuple[int, int], tuple[str, int]] = {}
        self._joiners: list[asyncio.Future[bool]] = []  # of whether all is finished; if not, the queue was closed

    # --- putting and getting ------------------------------------------------------------------------------------------

    @system
    @by_right("put")
    async def put_items(self, wait: bool, number: int, *said: Said) -> int:
        """Put those items (`items.to_wire`) in their order, as far as there is room; returns how many.

        wait: until there is room for one, or until that `number` is withdrawn. Negative once the queue is shut down: -1
        for none, -2 for one, and so on. RpcUsageError for what is no item, and for one that another worker keeps than
        the one that puts it. Without items, and where it is not to wait, it tells whether items can be put, and nothing
        is.
        """
        if not said and wait is False:
            return -1 if self._shut else 0
        items = _items(said)
        if items is None or not all(type(each) is bytes or _is_kept_by_caller(each) for each in items):
            raise RpcUsageError(f"queue {self.name!r} takes items as `rpc.queue` puts them, and got something else")
        _check(wait, number, len(items))
        if wait and self._was_withdrawn(number):
            return 0
        putter = _Waiter(0, items)
        self._putters.append(putter)
        self._match()
        if not putter.future.done() and not wait:
            self._putters.pop()  # it is still the last one
            putter.give(0)
        put: int = await self._settled(putter, number, self._putters)
        return put

    @system
    @by_right("get")
    async def take_items(self, wait: bool, number: int, count: int, *apart: int) -> Results:
        """Take up to so many items, but one at least; none if it is not to wait, or if that `number` is withdrawn.

        apart: the ids of workers that the caller has lost. What they have kept is fetched for it, if they live.

        The answer begins with `HERE` or `SHUT`. Behind `HERE` come the tickets of the items (`return_items`); the names
        of those who have kept some of them, by their ids, or None, as whoever gets the items may never have met them;
        then the items (`items.to_wire`), and for one that is gone the name of the worker that had it.
        """
        _check(wait, number, count)
        if len(apart) > MOST or not all(type(each) is int for each in apart):
            raise RpcUsageError(f"the workers that a getter has lost have ids, {MOST} at most")
        if wait and self._was_withdrawn(number):
            return Results((HERE, b"", None))
        getter = _Waiter(count, ())
        self._getters.append(getter)
        self._match()
        if not getter.future.done() and not wait:
            self._getters.pop()  # as above
            getter.give([])
        items: list[Item] | None = await self._settled(getter, number, self._getters)
        if items is None:
            return Results((SHUT,))
        if apart:
            await self._take_in(items, apart)
        who = caller().id
        self._given[who] = self._given.get(who, 0) + len(items)
        names: dict[int, str] = {}
        for place, item in enumerate(items):
            if type(item) is not Kept:
                continue
            # In the step in which the answer is made: a reference to a worker that is gone could not be sent.
            gone = gone_with(item)
            if gone is not None:
                items[place] = gone
                self._finish(1, who)
            elif item.reference._owner not in names:
                names[item.reference._owner] = item.reference.owner_name()
        return Results((HERE, self._tickets.issue(_id_of_caller(), items), names or None, *to_wire(items)))

    async def _take_in(self, items: list[Item], apart: Sequence[int]) -> None:
        """Have this worker keep those of the items that their getter cannot fetch, as it has lost who has kept them.

        That may live all the same, if the network between the two is broken. What cannot be had here stays as it is.
        """
        node = serving()[0]
        far: list[int] = []
        calls: list[Future[Any]] = []
        for place, item in enumerate(items):
            if type(item) is Kept and item.reference._owner in apart and gone_with(item) is None:
                peer, patience = node.peers.by_id(item.reference._owner), node.engine.default_timeout
                with contextlib.suppress(RpcError):  # nothing was sent
                    calls.append(peer.call(hand_over, to_named([item]), None, patience, system=True))
                    far.append(place)
        try:
            answers = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:  # the getter is gone
            self._put_back(items)
            raise
        for place, answer in zip(far, answers, strict=True):
            if type(answer) is Results and len(answer) == 3:
                _, packed, content = answer
                kept = KeptItem(content) if packed else KeptItem(None, content)
                items[place] = Kept(node.references.refer_to(KeptItems((kept,))), 0)

    async def _settled(self, waiter: _Waiter, number: int, among: deque[_Waiter]) -> Any:
        """What the waiter is given. If its caller gives up, nothing of it happens, as far as nothing has yet."""
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
        """One more call of that worker waits here. Raises Overloaded where too many do."""
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
        """Give items to those who wait for them, and room to those who wait for it, the first first."""
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
        while self._items and len(taken) < count and size <= self._most_bytes:
            item = self._items.popleft()
            size += len(item) if type(item) is bytes else 0
            taken.append(item)
        return taken

    def _put(self, putter: _Waiter) -> None:
        if putter.future.done():
            return
        if self._shut:
            putter.give(-1)
            return
        items = putter.items[: self._room()]
        self._items.extend(items)
        self._unfinished += len(items)
        putter.give(len(items))

    def _room(self) -> int:
        return max(0, self.maxsize - len(self._items)) if self.maxsize else MOST

    @system
    @by_right("get")
    async def return_items(self, tickets: bytes, *said: Said) -> None:
        """Put back to the front what the caller was given and does not want: as if it had not been taken.

        tickets: as they were given with the items. RpcUsageError if it was not given all of these, or if they are
        finished.
        """
        items, who = _items(said), caller().id
        if items is None or not 0 < len(items) <= MOST or len(tickets) != TICKET * len(items):
            raise RpcUsageError(f"what was not taken from queue {self.name!r} cannot be put back")
        given = self._given.get(who, 0)
        if len(items) > given:
            raise RpcUsageError(
                f"{len(items)} items are put back, and worker {caller().name!r} has {given} of {self.name!r}"
            )
        if not self._tickets.redeem(_id_of_caller(), who, [*map(Taken, split_tickets(tickets), items)]):
            raise RpcUsageError(
                f"what is put back into queue {self.name!r} was not given to worker {caller().name!r}, or is back "
                "already"
            )
        self._take_share(who, len(items))
        self._put_back(items)

    def _put_back(self, items: Sequence[Item]) -> None:
        if self._emptied:
            self._unfinished -= len(items)
            self._look_at_joiners()
            return
        self._items.extendleft(reversed(items))
        self._match()

    @by_right("put", "get")
    async def withdraw(self, number: int) -> None:
        """Whoever waits under that number, in a call of the same worker, is to wait no longer.

        Where nobody does, the answer is under way; or that call comes behind this one, as its items are long.
        """
        _check_number(number)
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
            waiter.give([] if getter else 0)

    def _was_withdrawn(self, number: int) -> bool:
        withdrawn = self._withdrawn.get(caller().id)
        return withdrawn is not None and withdrawn.pop(number, True) is None

    # --- finishing ----------------------------------------------------------------------------------------------------

    @system
    @by_right("get")
    async def finish_items(self, count: int) -> None:
        """So many items that were got are finished. ValueError if there are not so many.

        Those that other workers have got can be finished by a caller that could end the queue as well.
        """
        if type(count) is not int or count < 1:
            raise RpcUsageError("task_done() takes the number of items that are finished, from 1")
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
        """So many items are finished, says that worker: those that it has got, and beyond that those of others.

        Nobody knows whose; most likely of those who have had theirs the longest. If they stayed with whoever got them,
        they would be told as lost when it leaves.
        """
        rest = self._take_share(worker, count)
        while rest and self._given:
            rest = self._take_share(next(iter(self._given)), rest)
        self._unfinished -= count
        self._look_at_joiners()

    def _take_share(self, worker: int, count: int) -> int:
        """Of what that worker has got so many items count no longer; returns how many it had too few."""
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
    async def join_items(self, number: int = 0) -> None:
        """Wait until all items are finished. QueueShutDown if the queue is closed before that.

        ItemLost if some went with workers that had got them; once for each, as far as that was heard (`tell_again`).
        number: no other call of the same worker has it; 0 for one that hears what it is told.
        """
        if number:
            _check_number(number)
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
            if number:
                self._told[caller().id, number] = worker, count
                _keep_last(self._told)
            raise ItemLost(
                f"{count} items of queue {self.name!r} on worker {self._worker!r} were got by worker {worker!r}, which "
                "has gone without finishing them; all others are finished",
                queue=self.name,
                worker=worker,
                count=count,
            )

    @by_right("put", "get")
    async def tell_again(self, number: int) -> None:
        """Nobody has heard what a call of `join_items` of that number was told: if that was a loss, the next one is."""
        _check_number(number)
        told = self._told.pop((caller().id, number), None)
        if told is not None:
            self._lose(*told)

    def _on_gone(self, worker: WorkerInfo) -> None:
        self._withdrawn.pop(worker.id, None)
        self._tickets.forget(worker.id)
        count = min(self._given.pop(worker.id, 0), self._unfinished - len(self._items))
        if count > 0:
            self._lose(worker.name, count)
            self._unfinished -= count
            self._look_at_joiners()

    def _lose(self, worker: str, count: int) -> None:
        """Tell of so many items that went with that worker whoever joins next."""
        self._taken_along[worker] = self._taken_along.pop(worker, 0) + count
        _keep_last(self._taken_along)  # nobody joins, so nobody wants to know

    # --- looking, ending ----------------------------------------------------------------------------------------------

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
        self._shut_down(immediate is True)

    def _shut_down(self, immediate: bool) -> None:
        self._shut = True
        if immediate:
            self._emptied = True
            self._unfinished -= len(self._items)
            self._items.clear()
            self._look_at_joiners()
        self._match()


def _keep_last(told: dict[Any, Any]) -> None:
    if len(told) > MOST_TOLD:
        del told[next(iter(told))]


def _check_number(number: object) -> None:
    if type(number) is not int or not 0 < number < 1 << 63:
        raise RpcUsageError("the number of a call of a queue is a positive integer of 63 bits")


def _check(wait: object, number: object, count: object) -> None:
    if type(wait) is not bool or type(number) is not int or type(count) is not int or not 0 < count <= MOST:
        raise RpcUsageError(f"from 1 to {MOST} items of a queue go at a time")


def _id_of_caller() -> int:
    """The id that no other worker of the group has or had; that of `caller()` is its place in the group."""
    call = current_call.get()
    assert call is not None, "this is asked in a handler"
    return call.caller_id


def _is_kept_by_caller(item: Kept) -> bool:
    """Whether an item that stays with its producer is one of the caller's, which alone can say so."""
    owner: int = item.reference._owner
    return owner == _id_of_caller()


def _items(said: Sequence[Said]) -> list[Item] | None:
    """The items of a call; None for what cannot be one."""
    try:
        items = from_wire(said)
    except ValueError:
        return None
    return items if all(type(each) is Kept or (type(each) is bytes and len(each) <= SMALL) for each in items) else None


async def watch(queue: ServedQueue, news: Listener) -> None:
    """Until the worker ends: what other workers have got that are gone will not be finished.

    What is in the queue goes then, whoever keeps a handle of it: nobody can get it any more.
    """
    try:
        async for event in news:
            if isinstance(event, (WorkerLost, WorkerLeft)):
                queue._on_gone(event.worker)
    finally:
        queue._items.clear()


def end(queue: ServedQueue) -> None:
    """Nobody can reach the queue any more: whoever waits there waits no longer."""
    queue._end()
