"""One worker's side of a queue: what it puts and gets there, gathered into few calls.

A handle has at most one call under way that puts items, and one that takes some. What is put or wanted meanwhile goes
together in the next one. The calls have no deadline (`calls`); who waits here has one of its own (`waiting`). When
nobody waits any more for what a call is for, it is to end, and items that come all the same are put back to the front.

No reference can be written for an owner that has not joined yet. So before items that stay here are put, it is asked
whether the queue is there, by a call that puts nothing: that waits for the owner, and fails, as a put of small ones.

All of it is on the loop of the worker, but where a method says otherwise.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from .. import foreign
from ..errors import (
    ItemLost,
    Overloaded,
    PeerLeft,
    PeerLost,
    PeerRefused,
    ProtocolError,
    QueueEmpty,
    QueueFull,
    QueueShutDown,
    RendezvousError,
    RpcCancelled,
    RpcError,
    RpcTimeout,
    SerializationError,
    UnknownWorker,
    WorkerClosed,
)
from ..futures import Future
from ..protocol.states import PeerState
from ..runtime.caller.arriving import NotArrived
from ..runtime.caller.peer import Peer
from ..runtime.calls.failures import without_frames
from ..runtime.calls.values import Results
from ..runtime.node import Node
from ..sites import call_site
from .calls import Calls
from .items import (
    KEPT_BYTES,
    KEPT_ITEMS,
    Item,
    Kept,
    KeptItem,
    KeptItems,
    Taken,
    from_wire,
    gone_with,
    to_named,
    to_wire,
)
from .packing import TOGETHER, pack, unpack
from .served import HERE, MOST, SHUT
from .tickets import TICKET, split_tickets
from .waiting import GetFuture, PutFuture

_ITEMS_AT_ONCE = 256
# What the items that come with an answer are: `items.Item`.
_ITEMS = frozenset((Kept, bytes, str))
_BOOLS = frozenset((bool,))
# With these a producer may have, and hand over later, what it did not hand over now.
_PASSING = (Overloaded, RpcTimeout, RpcCancelled, WorkerClosed, RendezvousError)
# And with these it is gone, and what it has kept with it. Others say of an item that it cannot be had.
_GONE = (PeerLost, PeerLeft, PeerRefused, UnknownWorker)
# After one of these nothing reaches the owner of the queue, whoever puts it.
_AWAY = (*_GONE, RendezvousError)


class _Fetching(NamedTuple):
    """Items on their way to one who waits. left: calls that are under way, by the worker that they are made to.

    fetched: what has come of each item that its producer has kept: whether it is packed, and that; or an error.
    """

    get: GetFuture
    items: Sequence[Taken]
    left: dict[int, int]
    fetched: dict[Kept, object]


class Client:
    """What one handle of a queue puts and gets. See the module."""

    def __init__(self, node: Node, name: str, owner: str) -> None:
        self.node = node
        self._name = name
        self._owner = owner
        self._described = f"queue {name!r} of worker {owner!r}"
        self._here = node.peers.by_id(node.engine.id)
        self._calls = Calls(node, name, owner)
        self._numbers = secrets.randbits(42) << 20  # other handles of this worker have others
        self._puts: deque[PutFuture] = deque()
        self._putting: Sequence[PutFuture] = ()
        self._put_number = 0
        self._asking: set[PutFuture] = set()  # those of `put_nowait` that wait to hear that the owner is there
        self._most = _ITEMS_AT_ONCE  # items in the next call that puts
        self._gets: deque[GetFuture] = deque()
        self._get_number = 0  # of the call that takes items; 0: none is under way
        self.waits: set[PutFuture | GetFuture] = set()  # those that somebody waits for
        self._lost: deque[ItemLost] = deque()
        self._scheduled = False
        self._most_bytes = min(TOGETHER, node.engine.options.max_frame_bytes // 2)
        node.engine.call_on_loop(node.engine.waits.add, self)

    def describe(self) -> str:
        """The queue, for errors."""
        return self._described

    # --- from any thread ----------------------------------------------------------------------------------------------

    def put(self, item: object, copy: bool, timeout: float) -> PutFuture:
        """See `QueueHandle.put`."""
        put = PutFuture(self, self._packed(item, copy))
        put._site = call_site(sys._getframe(2))
        put.begin_on_loop(partial(self._begin, timeout))
        return put

    def get(self, count: int, many: bool, timeout: float) -> GetFuture:
        """See `QueueHandle.get` and `get_many`."""
        self.node.engine.lifetime.check_begin()
        return GetFuture(self, count, many, partial(self._begin, timeout))

    def put_nowait(self, item: object, copy: bool, timeout: float) -> PutFuture:
        """See `QueueHandle.put_nowait`. timeout: seconds for the owner, which answers at once unless it is stopped."""
        put = PutFuture(self, self._packed(item, copy))
        put._site = call_site(sys._getframe(2))
        put.begin_on_loop(partial(self._put_now, timeout))
        return put

    def get_nowait(self, timeout: float) -> GetFuture:
        """See `QueueHandle.get_nowait`. timeout: as of `put_nowait`."""
        self.node.engine.lifetime.check_begin()
        return GetFuture(self, 1, False, partial(self._get_now, timeout))

    def ask(self, method: str, *args: object, timeout: float | None = None, depth: int = 2) -> Future[object]:
        """A call of a method of the queue. timeout: seconds, None for the worker's own. depth: how many stack frames up
        the user's code is."""
        seconds = self.node.engine.default_timeout if timeout is None else timeout
        return self._calls.ask(method, args, seconds, call_site(sys._getframe(depth)))

    def join(self, timeout: float, unfinished: Callable[[], int | None]) -> Future[None]:
        """Wait until all items are finished, for so many seconds, 0 for no limit.

        unfinished: how many are not, where this worker can see that; None where it cannot.
        """

        def late(peer: Peer, cause: RpcTimeout) -> RpcTimeout:
            time = f"{cause.seconds:g} s"
            text = self._why_silent(peer, time)
            if text is None:
                count = unfinished()
                what = "some of the items" if count is None else "1 item" if count == 1 else f"{count} items"
                verb = "is" if count == 1 else "are"
                text = (
                    f"{what} of {self.describe()} {verb} not done after {time}: not got yet, or got and not finished "
                    f"(`task_done`){self._or_busy()}"
                )
            if cause.late:
                text += f". {cause.late}"
            return RpcTimeout(text, worker=self._owner, function=f"{self._name}.join", seconds=cause.seconds)

        return self._calls.join(secrets.randbits(62) + 1, timeout, call_site(sys._getframe(2)), late)

    def _packed(self, item: object, copy: bool) -> Item:
        self.node.engine.lifetime.check_begin()
        try:
            owner, keep = self.node.peers.find(self._owner), self.node.memory.keep
            packed = pack(item, self._here, owner, self._may_be_read_by_others, copy, keep)
        except SerializationError as error:
            raise SerializationError(f"an item for {self.describe()} {error}") from error.__cause__
        if type(packed) is not KeptItem or packed.size < KEPT_BYTES:
            return packed
        (item,) = self._kept([packed])  # alone; and here, as tensors in it are on this thread's streams
        return item

    def _may_be_read_by_others(self) -> bool:
        """Whether a worker that runs another main module may get an item. To a free group one may come at any time."""
        main = self.node.engine.record.main
        return self.node.rendezvous.dynamic or any(record.main != main for record in self.node.group.live())

    # --- putting ------------------------------------------------------------------------------------------------------

    def _begin(self, timeout: float, waiting: PutFuture | GetFuture) -> None:
        if waiting.done():  # given up before it has begun
            return
        if isinstance(waiting, PutFuture):
            self._puts.append(waiting)
        elif self._lost:
            self._tell_loss(waiting)
            return
        else:
            self._gets.append(waiting)
        self._start_timer(waiting, timeout)
        if not self._scheduled:  # what comes in this turn of the loop goes together
            self._scheduled = True
            self.node.engine.loop.call_soon(self._send)

    def _start_timer(self, waiting: PutFuture | GetFuture, timeout: float) -> None:
        waiting.began = time.monotonic()
        self.waits.add(waiting)
        if timeout:
            waiting.timer = self.node.engine.loop.call_later(timeout, self._late, waiting, timeout)

    def _send(self) -> None:
        self._scheduled = False
        self._send_puts()
        self._send_gets()

    def _send_puts(self) -> None:
        if self._putting or not self._puts:
            return
        batch: list[PutFuture] = []
        size = 0
        refers = False
        while self._puts and len(batch) < self._most and size <= self._most_bytes:
            put = self._puts.popleft()
            if not put.done():
                batch.append(put)
                if type(put.item) is bytes:
                    size += len(put.item)
                else:
                    refers = True
        if batch:
            self._putting = batch
            self._put_number = self._next_number()
            if refers and not self._calls.knows_owner():  # all of them wait: they keep their order
                self._calls.call("put_items", False, self._put_number, (), self._on_there)
                return
            self._refer_to(batch)
            items = to_wire([put.item for put in batch])
            self._calls.call("put_items", True, self._put_number, items, self._on_put)

    def _refer_to(self, batch: Sequence[PutFuture]) -> None:
        """Items that are to be kept here: make references to them, each for as many as it may have."""
        groups: list[list[PutFuture]] = []
        size = KEPT_BYTES
        for put in [put for put in batch if type(put.item) is KeptItem]:
            size += put.item.size
            if size > KEPT_BYTES or len(groups[-1]) == KEPT_ITEMS:
                groups.append([])
                size = put.item.size
            groups[-1].append(put)
        for puts in groups:
            for put, item in zip(puts, self._kept([put.item for put in puts]), strict=True):
                put.item = item

    def _kept(self, items: Sequence[KeptItem]) -> list[Kept]:
        """These items, with a reference to all of them. Any thread."""
        reference = self.node.references.refer_to(KeptItems(items))
        return [Kept(reference, place) for place in range(len(items))]

    def _on_there(self, answer: object, error: BaseException | None) -> None:
        if error is not None or type(answer) is not int or answer:  # as if they had been put
            self._on_put(answer, error)
            return
        self._puts.extendleft(reversed(self._putting))
        self._putting = ()
        self._put_number = 0
        self._send_puts()

    def _on_put(self, put: Any, error: BaseException | None) -> None:
        batch, self._putting = self._putting, ()
        self._put_number = 0
        if error is None and (type(put) is not int or not -1 - len(batch) <= put <= len(batch)):
            error = ProtocolError(f"{self.describe()} does not say how many of {len(batch)} items it has taken")
        if error is not None:
            # Those behind them would hear the same, but one lot after the other, each when its own search has ended.
            if self.node.engine.closed or isinstance(error, _AWAY):
                batch, self._puts = [*batch, *self._puts], deque()
            for each in batch:
                each.finish(None, error)
        else:
            count = put if put >= 0 else -1 - put
            for each in batch[:count]:
                each.finish(None)
            if put < 0:
                for each in batch[count:]:
                    each.finish(None, QueueShutDown(f"{self.describe()} was shut down: it takes no more items"))
            else:
                self._puts.extendleft(reversed(batch[count:]))
            # Those that there was no room for come again: with a full queue as few at a time as it takes.
            self._most = min(_ITEMS_AT_ONCE, 2 * self._most) if count == len(batch) else max(1, count)
        self._send_puts()

    def _put_now(self, timeout: float, put: PutFuture) -> None:
        if put.done():  # given up by now
            return
        put.number = self._next_number()
        self._start_timer(put, timeout)
        # Also behind one that waits to hear that the owner is there: they keep their order.
        if self._asking or (type(put.item) is not bytes and not self._calls.knows_owner()):
            self._asking.add(put)
            self._calls.call("put_items", False, put.number, (), partial(self._on_there_now, put))
        else:
            self._send_now(put)

    def _on_there_now(self, put: PutFuture, answer: object, error: BaseException | None) -> None:
        self._asking.discard(put)
        if error is not None or type(answer) is not int or answer:
            self._on_put_now(put, answer, error)
        elif not put.done():
            self._send_now(put)

    def _send_now(self, put: PutFuture) -> None:
        self._refer_to([put])
        self._calls.call("put_items", False, put.number, to_wire([put.item]), partial(self._on_put_now, put))

    def _on_put_now(self, future: PutFuture, put: object, error: BaseException | None) -> None:
        if error is None and (type(put) is not int or not -2 <= put <= 1):
            error = ProtocolError(f"{self.describe()} does not say whether it has taken an item")
        elif error is None and put == 0:
            error = QueueFull(f"{self.describe()} is full")
        elif error is None and put != 1:
            error = QueueShutDown(f"{self.describe()} was shut down: it takes no more items")
        future.finish(None, error)

    # --- getting ------------------------------------------------------------------------------------------------------

    def _send_gets(self) -> None:
        while self._gets and self._gets[0].done():
            self._gets.popleft()
        if self._get_number or not self._gets:
            return
        wanted = sum(get.count for get in self._gets if not get.done())
        self._get_number = self._next_number()
        self._calls.call("take_items", True, self._get_number, (min(wanted, MOST), *self._apart()), self._on_got)

    def _on_got(self, got: object, error: BaseException | None) -> None:
        self._get_number = 0
        items, error = self._items(got, error)
        if error is not None:
            gets, self._gets = self._gets, deque()
            for each in gets:
                each.finish(None, error)
            return
        place = 0
        while self._gets and place < len(items):
            get = self._gets.popleft()
            if not get.done():
                taken = items[place : place + get.count]
                place += len(taken)
                self._fetch(get, taken)
        self.put_back(items[place:])
        self._send_gets()

    def _get_now(self, timeout: float, get: GetFuture) -> None:
        get.number = self._next_number()
        self._start_timer(get, timeout)
        self._calls.call("take_items", False, get.number, (1, *self._apart()), partial(self._on_got_now, get))

    def _apart(self) -> list[int]:
        """The ids of those that this worker has lost, the last ones: it cannot fetch what they have kept."""
        lost = self.node.group.lost
        return [*lost][-MOST:] if lost else []

    def _on_got_now(self, get: GetFuture, got: object, error: BaseException | None) -> None:
        items, error = self._items(got, error)
        if error is None and not items:
            error = QueueEmpty(f"{self.describe()} is empty")
        if error is not None:
            get.finish(None, error)
        else:
            self._fetch(get, items)

    def _items(self, got: object, error: BaseException | None) -> tuple[list[Taken], BaseException | None]:
        """The items of an answer, or why there are none."""
        if error is not None:
            return [], error
        head, *rest = got if type(got) is Results else (got,)
        if type(head) is not int or head not in (HERE, SHUT):
            return [], ProtocolError(f"{self.describe()} answers with what are no items")
        if head == SHUT:
            return [], QueueShutDown(f"{self.describe()} was shut down, and has no more items")
        tickets, said, *values = rest if len(rest) >= 2 else (None, None)
        items: list[Item] | None = None
        with contextlib.suppress(ValueError):
            items = from_wire(values, said if type(said) is dict else {})
        if (
            items is None
            or not _ITEMS.issuperset(map(type, items))
            or type(tickets) is not bytes
            or len(tickets) != TICKET * len(items)
        ):
            return [], ProtocolError(f"{self.describe()} gives items that are none")
        return [*map(Taken, split_tickets(tickets), items)], None

    def _fetch(self, get: GetFuture, items: Sequence[Taken]) -> None:
        """Have the items that their producers have kept; then give all to the one who waits."""
        kept: dict[int, list[Kept]] = {}
        for _, item in items:
            if isinstance(item, Kept):
                kept.setdefault(item.reference._owner, []).append(item)
        if not kept:
            self._give(get, items, {})
            return
        get.producers = {worker: wanted[0].producer for worker, wanted in kept.items()}
        fetching = _Fetching(get, items, dict.fromkeys(kept, 0), {})
        for worker, wanted in kept.items():
            self._ask_producer(fetching, worker, [wanted])

    def _ask_producer(self, fetching: _Fetching, worker: int, lots: Sequence[list[Kept]]) -> None:
        fetching.left[worker] += len(lots)  # first: a call may end at once
        for wanted in lots:
            self._calls.fetch(worker, to_named(wanted), partial(self._arrived, fetching, worker, wanted))

    def _arrived(
        self, fetching: _Fetching, worker: int, wanted: list[Kept], answer: object, error: BaseException | None
    ) -> None:
        get, items, left, fetched = fetching
        left[worker] -= 1
        if error is not None and len(wanted) > 1 and not isinstance(error, (*_PASSING, *_GONE)):
            # It may be one of them alone that cannot be handed over, or read here, and the others with it.
            self._ask_producer(fetching, worker, [[each] for each in wanted])
            return
        if not left[worker]:
            del left[worker]
            get.producers.pop(worker, None)
        if isinstance(error, RpcTimeout):  # it names a function that nobody has called
            error = self._not_handed_over(wanted[0].producer, error)
        given = list(answer)[1:] if type(answer) is Results else []
        if error is None and (len(given) != 2 * len(wanted) or not _BOOLS.issuperset(map(type, given[::2]))):
            error = ProtocolError("a producer gives something else than its items")
        for number, each in enumerate(wanted):
            fetched[each] = error if error is not None else (given[2 * number], given[2 * number + 1])
        if not left:
            self._give(get, items, fetched)

    def _give(self, get: GetFuture, items: Sequence[Taken], fetched: dict[Kept, object]) -> None:
        if get.done():  # nobody waits any more
            self.put_back(items)
            return
        values: list[object] = []
        there: list[Taken] = []
        withheld: list[Taken] = []
        failure: BaseException | None = None
        gone: dict[str, list[BaseException | None]] = {}
        finished = 0
        for taken in items:
            item = taken.item
            found: object = fetched[item] if isinstance(item, Kept) else item
            try:
                if isinstance(found, BaseException):
                    if isinstance(found, _PASSING):
                        withheld.append(taken)
                        failure = found
                        continue
                    gone.setdefault(item.producer, []).append(found)
                elif isinstance(found, str):
                    gone.setdefault(found, []).append(None)
                    finished -= 1  # the owner has seen to that
                else:
                    values.append(self._opened(found))
                    there.append(taken)
                    continue
            except ItemLost as error:
                self._lost.append(cast(ItemLost, without_frames(error)))  # they have all that has come
            finished += 1
        self._lose(gone, finished)
        if withheld:  # whoever gets them next may be luckier
            self.put_back(withheld)
        if not values:
            if self._lost:
                self._tell_loss(get)
            else:
                get.finish(None, failure)
            return
        if any(
            type(each) is tuple and not each[0] for each in fetched.values()
        ):  # not packed: there may be devices in it
            try:
                get._arrival = self.node.accelerators.arrival(values)
            except Exception as broken:  # the device's
                self.put_back(there)
                text = f"items of {self.describe()} cannot be used here, and went back into it: {foreign.said(broken)}"
                failure = RpcError(text)
                failure.__cause__ = without_frames(broken)
                get.finish(None, failure)
                return
        if not get.finish_with(values if get.many else values[0], there):
            self.put_back(there)

    def _opened(self, found: Any) -> Any:
        """An item as it was put. found: its bytes, or what its producer has given for it: whether packed, and that."""
        try:
            packed, content = (True, found) if isinstance(found, bytes) else found
            return unpack(content, self.node.engine.safe, self.node.engine.record.main) if packed else content
        except BaseException as broken:
            raise ItemLost(
                f"an item of {self.describe()} cannot be read here, and is gone: {foreign.said(broken)}",
                queue=self._name,
                worker=self.node.engine.name,
                count=1,
            ) from broken

    def _lose(self, gone: dict[str, list[BaseException | None]], finished: int) -> None:
        """Tell of items that are gone, by the workers that had them. finished: how many the owner waits for in vain."""
        self._lost.extend(self._loss(worker, causes) for worker, causes in gone.items())
        if finished:
            self._calls.tell("finish_items", finished)

    def _tell_loss(self, get: GetFuture) -> None:
        """Raise the first loss that nobody was told of at that one; the next one hears it if that waits no longer."""
        if get.finish(None, self._lost[0]):
            self._lost.popleft()

    def not_told(self, loss: ItemLost) -> None:
        """Whoever was to hear of that loss waits no longer: the next one does."""
        self._lost.appendleft(loss)

    def _loss(self, worker: str, causes: Sequence[BaseException | None]) -> ItemLost:
        count, cause = len(causes), causes[0]
        noun, them, are = ("an item", "it", "is") if count == 1 else (f"{count} items", "them", "are")
        why = f": {foreign.text_of(cause)}" if cause is not None else ""
        if cause is None or isinstance(cause, _GONE):
            text = (
                f"{noun} of {self.describe()} went with worker {worker!r}, which had put and kept {them}{why}. The "
                "queue goes on. A worker has to stay until what it has put was got, as `await q.join()` does"
            )
        elif isinstance(cause, NotArrived):
            here = self.node.engine.name
            text = (
                f"{noun} of {self.describe()} {are} lost: worker {worker!r} has handed {them} over, and worker "
                f"{here!r} cannot take {them}: {foreign.said(cause.__cause__ or cause)}. The queue goes on"
            )
        else:
            text = (
                f"{noun} of {self.describe()} {are} lost, as worker {worker!r}, which has put and kept {them}, cannot "
                f"hand {them} over{why}. The queue goes on"
            )
        error = ItemLost(text, queue=self._name, worker=worker, count=count)
        error.__cause__ = cause
        return error

    def put_back(self, items: Sequence[Taken]) -> None:
        """Items that nobody here wants: others get them. What is gone meanwhile is told here."""
        gone: dict[str, list[BaseException | None]] = {}
        finished = 0
        there: list[Taken] = []
        for taken in items:
            item = taken.item
            if isinstance(item, str):
                gone.setdefault(item, []).append(None)  # the owner has seen to that
            elif not isinstance(item, Kept) or gone_with(item) is None:
                there.append(taken)
            else:
                gone.setdefault(item.producer, []).append(None)
                finished += 1
        if there:
            tickets, unwanted = zip(*there, strict=True)
            self._calls.tell("return_items", b"".join(tickets), *to_wire(unwanted))
        self._lose(gone, finished)

    # --- giving up ----------------------------------------------------------------------------------------------------

    def _late(self, waiting: PutFuture | GetFuture, timeout: float) -> None:
        text, worker = self._why_late(waiting, f"{timeout:g} s")
        verb = "put" if isinstance(waiting, PutFuture) else "get"
        waiting.finish(None, RpcTimeout(text, worker=worker, function=f"{self._name}.{verb}", seconds=timeout))
        self.given_up(waiting)

    def _why_late(self, waiting: PutFuture | GetFuture, time: str) -> tuple[str, str]:
        """What somebody has waited for all that time in vain, and the name of the worker that it depended on."""
        if isinstance(waiting, GetFuture) and waiting.producers:
            names = sorted(waiting.producers.values())
            return self._keeps_back(names, time), names[0]
        peer, queue = self._calls.peer, self.describe()
        silent = None if peer is None else self._why_silent(peer, time)
        if silent is not None:
            return silent, self._owner
        if waiting.number:  # it was to be told at once whether there is room, or an item
            return (
                f"{queue} has not answered for {time}: worker {self._owner!r} is busy, stopped or cut off",
                self._owner,
            )
        text = f"{queue} has {'been full' if isinstance(waiting, PutFuture) else 'had no item'} for {time}"
        return text + self._or_busy(), self._owner

    def _or_busy(self) -> str:
        """What else may be behind it that the owner has nothing to say: one that is silent looks the same."""
        if self._owner == self.node.engine.name:
            return ""
        return (
            f", or worker {self._owner!r} is busy or stopped, as it is connected and has not answered. Which of "
            f"them it is, `await rpc.queue({self._name!r}, owner={self._owner!r}).qsize()` tells: a queue answers "
            "that at once"
        )

    def _why_silent(self, peer: Peer, time: str) -> str | None:
        """What is said of a queue whose owner cannot have been asked; None if it was."""
        if peer.state is not PeerState.CONNECTING and peer.state is not PeerState.SUSPENDED:
            return None
        former = peer.former  # first: it is forgotten before there is a record
        why = "no worker of that name has joined"
        if peer.record is not None:
            why = f"the connection to it is {peer.state.value}"
        elif former is not None and former.gone is not None:
            why = f"{former.gone}. Whether another one of that name has joined since is not known yet"
        return f"{self.describe()} has not answered for {time}: {why}"

    def _keeps_back(self, workers: Sequence[str], time: str) -> str:
        noun = "worker" if len(workers) == 1 else "workers"
        return (
            f"{noun} {', '.join(map(repr, workers))} did not hand over within {time} what was taken from "
            f"{self.describe()}, so that it goes back there: busy or stopped. A later `get` finds it"
        )

    def _not_handed_over(self, worker: str, cause: RpcTimeout) -> RpcTimeout:
        """That worker keeps items, and has not answered. cause: the timeout of the call for them."""
        text = self._keeps_back([worker], f"{cause.seconds:g} s (rpc_timeout)")
        error = RpcTimeout(text, worker=worker, function=f"{self._name}.get", seconds=cause.seconds)
        error.__cause__ = without_frames(cause)
        return error

    def given_up(self, waiting: PutFuture | GetFuture) -> None:
        """Somebody waits no longer: if nobody else waits for the call that is under way, it is to end."""
        waiting.stop_waiting()
        if waiting.number:
            if self._calls.take_back(waiting.number) and isinstance(waiting, PutFuture):
                self._asking.discard(waiting)
        elif isinstance(waiting, PutFuture):
            if waiting not in self._putting:
                with contextlib.suppress(ValueError):  # it has been put
                    self._puts.remove(waiting)
            elif self._calls.withdraw(self._put_number):
                self._on_put(0, None)
        else:
            with contextlib.suppress(ValueError):  # it was given something
                self._gets.remove(waiting)
            if not self._get_number or not all(get.done() for get in self._gets):
                return
            self._gets.clear()
            if self._calls.withdraw(self._get_number):
                self._get_number = 0

    def end_waits(self, why: Callable[[str], WorkerClosed]) -> list[str]:
        """See `engine.Waits`."""
        ended = []
        for waiting in [each for each in self.waits if not each.nested]:
            if waiting.finish(None, why(waiting._describe())):
                ended.append(f"{waiting._subject}, since {time.monotonic() - waiting.began:.1f} s")
                self.given_up(waiting)
        return ended

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers
