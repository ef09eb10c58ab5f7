"""One worker's side of a queue: its puts and gets, gathered into few requests.

A handle has at most one request under way to put items, and one to take items. Items put or wanted meanwhile go
together in the next request. Requests have no deadline (`calls`); each Future has its own (`waiting`). A request that
no Future waits for ends; items that still arrive are put back.

No reference can be written for an owner that has not joined yet. So before a put of items that stay here, a request
without items (a probe) waits for the owner.

All of it runs on the worker's loop, except where a method says otherwise.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from msgspec import MsgspecError
from msgspec.msgpack import Decoder

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
from ..logs import logger
from ..protocol.states import CallOutcome, PeerState
from ..protocol.trace_context import TraceContext, valid
from ..runtime.caller.arriving import NotArrived
from ..runtime.caller.peer import Peer
from ..runtime.caller.reworded import Words
from ..runtime.calls import declared
from ..runtime.calls.failures import without_frames
from ..runtime.calls.values import Results
from ..runtime.engine.call_tracing import Exchange, MadeSpan, Raised
from ..runtime.node import Node
from ..runtime.references.references import References
from ..runtime.references.rref import RRef
from ..sites import call_site
from .calls import Calls
from .items import (
    KEPT_BYTES,
    KEPT_ITEMS,
    MOST,
    PACKED,
    PUT,
    TAKEN,
    GoneItem,
    Item,
    Kept,
    KeptItem,
    KeptItems,
    Put,
    Shut,
    Taken,
    from_wire,
    gone_with,
    to_named,
    to_wire,
)
from .packing import TOGETHER, pack, unpack
from .tickets import split_tickets
from .waiting import GetFuture, PutFuture, Request

R = TypeVar("R")

_ITEMS_AT_ONCE = 256
_NO_ITEMS = declared.pack([])
# After one of these errors of a producer a later try may succeed: the item goes back into the queue.
_PASSING = (Overloaded, RpcTimeout, RpcCancelled, WorkerClosed, RendezvousError)
# After one of these the producer is gone with the items that it kept. Other errors concern one item alone.
_GONE = (PeerLost, PeerLeft, PeerRefused, UnknownWorker)
# After one of these no put reaches the owner of the queue.
_AWAY = (*_GONE, RendezvousError)


class _Fetching(NamedTuple):
    """Items on their way to a `get`. left: number of calls under way to each producer, by its id.

    fetched: for each item that a producer keeps, whether it is packed and its content; or an error.
    """

    get: GetFuture
    items: Sequence[Taken]
    left: dict[int, int]
    fetched: dict[Kept, object]


@dataclass(frozen=True)
class _KeptHere:
    """The items that this worker keeps for the queues of others, until they are got: see `Leftover`."""

    references: References

    def part(self) -> None:
        """Its program puts no more."""

    def left(self) -> str:
        """See `Leftover`. Items that were put together are counted as one."""
        count = self.references.values_of(KeptItems)
        return f"large items in queues: {count}" if count else ""


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
        self._put: Request | None = None  # puts, and waits for room
        self._probing: set[Request] = set()  # probes: puts that first wait for the owner
        self._most = _ITEMS_AT_ONCE  # items in the next request that puts
        self._gets: deque[GetFuture] = deque()
        self._get: Request | None = None  # takes items, and waits for them
        self.waits: set[PutFuture | GetFuture] = set()  # Futures that have begun and have not settled
        self._lost: deque[ItemLost] = deque()  # for the next gets
        self._scheduled = False
        self._most_bytes = min(TOGETHER, node.engine.options.max_frame_bytes // 2)
        node.engine.call_on_loop(self._enter)

    def _enter(self) -> None:
        engine = self.node.engine
        engine.waits.add(self)
        engine.leftovers.add(_KeptHere(self.node.references))

    def describe(self) -> str:
        """The queue, for errors."""
        return self._described

    # --- from any thread ----------------------------------------------------------------------------------------------

    def put(self, item: object, copy: bool, timeout: float) -> PutFuture:
        """See `QueueHandle.put`."""
        put = self._new_put(item, copy)
        put._site = call_site(sys._getframe(2))
        put.begin_on_loop(partial(self._begin, timeout))
        return put

    def get(self, count: int, many: bool, timeout: float) -> GetFuture:
        """See `QueueHandle.get` and `get_many`."""
        self.node.engine.lifetime.check_begin()
        return GetFuture(self, count, many, partial(self._begin, timeout))

    def put_nowait(self, item: object, copy: bool, timeout: float) -> PutFuture:
        """See `QueueHandle.put_nowait`. timeout: seconds for the owner, which answers at once unless it is stopped."""
        put = self._new_put(item, copy)
        put._site = call_site(sys._getframe(2))
        put.begin_on_loop(partial(self._put_now, timeout))
        return put

    def get_nowait(self, timeout: float) -> GetFuture:
        """See `QueueHandle.get_nowait`. timeout: as of `put_nowait`."""
        self.node.engine.lifetime.check_begin()
        return GetFuture(self, 1, False, partial(self._get_now, timeout))

    def ask(self, method: str, *args: object, timeout: float | None = None, depth: int = 2) -> Future[object]:
        """Call a method of the queue. timeout: seconds, None for the worker's own. depth: how many stack frames up the
        user's code is.
        """
        seconds = self.node.engine.default_timeout if timeout is None else timeout
        return self._calls.ask(method, args, seconds, call_site(sys._getframe(depth)))

    def join(self, timeout: float, unfinished: Callable[[], int | None]) -> Future[None]:
        """Wait until all items are finished. timeout: seconds, 0 for no limit.

        unfinished: returns how many are not finished; None if this worker cannot see that.
        """

        def words(owner: Peer) -> Words:
            def late(error: BaseException | None) -> BaseException | None:
                if not isinstance(error, RpcTimeout):
                    return error
                time = f"{error.seconds:g} s"
                text = self._why_silent(owner, time)
                if text is None:
                    count = unfinished()
                    what = "some of the items" if count is None else "1 item" if count == 1 else f"{count} items"
                    verb = "is" if count == 1 else "are"
                    text = (
                        f"{what} of {self.describe()} {verb} not done after {time}: not got yet, or got and not "
                        f"finished (`task_done`){self._or_busy()}"
                    )
                if error.late:
                    text += f". {error.late}"
                return RpcTimeout(text, worker=self._owner, function=f"{self._name}.join", seconds=error.seconds)

            return late

        return self._calls.join(timeout, call_site(sys._getframe(2)), words)

    def span(self, exchange: Exchange) -> MadeSpan | None:
        """See `ClientForWaiting`."""
        tracer = self.node.engine.tracer
        return None if tracer is None else tracer.exchanged(exchange, self._name)

    def _new_put(self, item: object, copy: bool) -> PutFuture:
        span = self.span("put")
        if span is None:
            return PutFuture(self, self._packed(item, copy, None))
        try:
            put = PutFuture(self, self._packed(item, copy, span.context))
        except Exception as error:
            span.ended(CallOutcome.REFUSED, Raised(error))
            raise
        put.span = span
        return put

    def _packed(self, item: object, copy: bool, trace: TraceContext | None) -> Item:
        self.node.engine.lifetime.check_begin()
        try:
            owner, keep = self.node.peers.find(self._owner), self.node.memory.keep
            packed = pack(item, self._here, owner, self._may_be_read_by_others, copy, keep, trace)
        except SerializationError as error:
            raise SerializationError(f"an item for {self.describe()} {error}") from error.__cause__
        if type(packed) is not KeptItem or packed.size < KEPT_BYTES:
            return packed
        (item,) = self._kept([packed])  # in this thread, because tensors in it are on its streams
        return item

    def _may_be_read_by_others(self) -> bool:
        """Whether a worker that runs another main module may get an item. In a free group one may join at any time."""
        main = self.node.engine.record.main
        return self.node.rendezvous.dynamic or any(record.main != main for record in self.node.group.live())

    # --- putting ------------------------------------------------------------------------------------------------------

    def _begin(self, timeout: float, waiting: PutFuture | GetFuture) -> None:
        if waiting.done():  # given up before it began
            return
        if isinstance(waiting, PutFuture):
            self._puts.append(waiting)
        elif self._lost:
            self._raise_loss(waiting)
            return
        else:
            self._gets.append(waiting)
        self._start_timer(waiting, timeout)
        if not self._scheduled:  # items of this turn of the loop go together
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
        if self._put is not None or not self._puts:
            return
        batch: list[PutFuture] = []
        size = 0
        while self._puts and len(batch) < self._most and size <= self._most_bytes:
            put = self._puts.popleft()
            if not put.done():
                batch.append(put)
                size += len(put.item) if type(put.item) is bytes else 0
        if batch:
            self._put = self._request(batch)
            self._put_items(self._put, True, self._on_put)

    def _request(self, puts: Sequence[PutFuture]) -> Request:
        request = Request(self._next_number(), puts)
        for put in puts:
            put.request = request
        return request

    def _put_items(self, request: Request, wait: bool, then: Callable[[Request, Put | BaseException], None]) -> None:
        """Put the items of a request once the owner has joined. then: takes the reply, or the error."""

        def on_there(answer: object, error: BaseException | None) -> None:
            self._probing.discard(request)
            there = self._read(PUT, answer, error)
            if not isinstance(there, Put) or there.shut or all(put.done() for put in request.futures):
                then(request, there)
            else:
                send()

        def send() -> None:
            puts = cast(Sequence[PutFuture], request.futures)
            self._refer_to(puts)
            # Futures that were given up meanwhile have no item any more.
            items, references = to_wire([put.item for put in puts if not put.done()])
            self._calls.begin(request, "put_items", wait, (declared.pack(items), *references), on_put)

        def on_put(answer: object, error: BaseException | None) -> None:
            put = self._read(PUT, answer, error)
            if isinstance(put, Put) and put.count > len(request.futures):
                put = ProtocolError(f"{self.describe()} has taken {put.count} of {len(request.futures)} items")
            then(request, put)

        kept = any(type(put.item) is KeptItem for put in cast(Sequence[PutFuture], request.futures))
        # While one put probes, all probe: they keep their order.
        if self._probing or (kept and not self._calls.knows_owner()):
            self._probing.add(request)
            self._calls.begin(request, "put_items", False, (_NO_ITEMS,), on_there)
        else:
            send()

    def _read(self, decoder: Decoder[R], answer: Any, error: BaseException | None) -> R | BaseException:
        """The owner's reply; or the error of the call; or a ProtocolError if the answer is not a reply."""
        if error is not None:
            return error
        try:
            return decoder.decode(answer)
        except (MsgspecError, TypeError, ValueError, RecursionError):
            return ProtocolError(f"{self.describe()} has not answered with a reply of a queue")

    def _refer_to(self, batch: Sequence[PutFuture]) -> None:
        """Make references to the items that stay here, each for as many items as a reference may have."""
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
        """The items behind one reference to all of them. Any thread."""
        reference = self.node.references.refer_to(KeptItems(items))
        return [Kept(reference, place) for place in range(len(items))]

    def _on_put(self, request: Request, put: Put | BaseException) -> None:
        self._put = None
        batch = cast(Sequence[PutFuture], request.futures)
        for each in batch:
            each.request = None
        if not isinstance(put, Put):
            # The queued puts would fail the same way, but one lot after the other: fail all of them now.
            if self.node.engine.closed or isinstance(put, _AWAY):
                batch, self._puts = [*batch, *self._puts], deque()
            for each in batch:
                each.finish(None, put)
        else:
            for each in batch[: put.count]:
                each.finish(None)
            rest = batch[put.count :]
            if put.shut:
                for each in rest:
                    each.finish(None, self._was_shut())
            else:
                self._puts.extendleft(reversed(rest))
            # The rest is sent again; while the queue is full, in requests of the size that it accepts.
            self._most = max(1, put.count) if rest else min(_ITEMS_AT_ONCE, 2 * self._most)
        self._send_puts()

    def _put_now(self, timeout: float, put: PutFuture) -> None:
        if not put.done():
            put.at_once = True
            self._start_timer(put, timeout)
            self._put_items(self._request([put]), False, self._on_put_now)

    def _on_put_now(self, request: Request, put: Put | BaseException) -> None:
        (future,) = request.futures
        future.request = None
        if not isinstance(put, Put):
            future.finish(None, put)
        elif put.shut:
            future.finish(None, self._was_shut())
        elif put.count:
            future.finish(None)
        else:
            future.finish(None, QueueFull(f"{self.describe()} is full"))

    def _was_shut(self) -> QueueShutDown:
        return QueueShutDown(f"{self.describe()} was shut down: it takes no more items")

    # --- getting ------------------------------------------------------------------------------------------------------

    def _send_gets(self) -> None:
        while self._gets and self._gets[0].done():
            self._gets.popleft()
        if self._get is not None or not self._gets:
            return
        wanted = sum(get.count for get in self._gets if not get.done())
        self._get = Request(self._next_number(), ())
        self._take(self._get, True, min(wanted, MOST), self._on_got)

    def _take(
        self, request: Request, wait: bool, count: int, then: Callable[[list[Taken] | BaseException], None]
    ) -> None:
        """Take items from the owner. The call names the workers that this one lost last: the owner fetches what they
        keep, because this worker cannot.
        """
        lost = self.node.group.lost
        apart = declared.pack([*lost][-MOST:]) if lost else _NO_ITEMS
        self._calls.begin(
            request, "take_items", wait, (count, apart), lambda answer, error: then(self._items(answer, error))
        )

    def _on_got(self, items: list[Taken] | BaseException) -> None:
        self._get = None
        if isinstance(items, BaseException):
            gets, self._gets = self._gets, deque()
            for each in gets:
                each.finish(None, items)
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
        get.at_once = True
        get.request = Request(self._next_number(), (get,))
        self._start_timer(get, timeout)

        def on_got(items: list[Taken] | BaseException) -> None:
            get.request = None
            if isinstance(items, BaseException):
                get.finish(None, items)
            elif not items:
                get.finish(None, QueueEmpty(f"{self.describe()} is empty"))
            else:
                self._fetch(get, items)

        self._take(get.request, False, 1, on_got)

    def _items(self, answer: Any, error: BaseException | None) -> list[Taken] | BaseException:
        """The items of an answer, or why there are none."""
        head, *references = answer if type(answer) is Results else (answer,)
        reply = self._read(TAKEN, head, error)
        if isinstance(reply, BaseException):
            return reply
        if isinstance(reply, Shut):
            return QueueShutDown(f"{self.describe()} was shut down, and has no more items")
        tickets = split_tickets(reply.tickets)
        try:
            if not all(isinstance(each, RRef) for each in references):
                raise ValueError("values that are not references")
            items = from_wire(reply.items, references, reply.producers)
            return [Taken(ticket, item) for ticket, item in zip(tickets, items, strict=True)]
        except ValueError as refused:
            return ProtocolError(f"{self.describe()} has given invalid items: {refused}")

    def _fetch(self, get: GetFuture, items: Sequence[Taken]) -> None:
        """Fetch the items that their producers keep; then give all of them to the `get`."""
        kept: dict[int, list[Kept]] = {}
        for _, item in items:
            if type(item) is Kept:
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
            # Perhaps a single item cannot be handed over or read: ask for each alone.
            self._ask_producer(fetching, worker, [[each] for each in wanted])
            return
        if not left[worker]:
            del left[worker]
            get.producers.pop(worker, None)
        if isinstance(error, RpcTimeout):  # its text names a function that the program did not call
            error = self._not_handed_over(wanted[0].producer, error)
        head, *values = answer if type(answer) is Results else (answer,)
        packed = self._read(PACKED, head, error)
        if isinstance(packed, list) and not len(packed) == len(values) == len(wanted):
            packed = ProtocolError("a producer gives something else than its items")
        for place, each in enumerate(wanted):
            fetched[each] = packed if isinstance(packed, BaseException) else (packed[place], values[place])
        if not left:
            self._give(get, items, fetched)

    def _give(self, get: GetFuture, items: Sequence[Taken], fetched: dict[Kept, object]) -> None:
        if get.done():  # it was given up
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
                elif type(found) is GoneItem:
                    gone.setdefault(found.worker, []).append(None)
                    finished -= 1  # the owner has counted it as finished
                else:
                    values.append(self._opened(found, get.span))
                    there.append(taken)
                    continue
            except ItemLost as error:
                self._lost.append(cast(ItemLost, without_frames(error)))  # the frames hold all fetched items
            finished += 1
        self._lose(gone, finished)
        if withheld:
            self.put_back(withheld)
        if not values:
            if self._lost:
                self._raise_loss(get)
            else:
                get.finish(None, failure)
            return
        if any(
            type(each) is tuple and each[0] is not True for each in fetched.values()
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

    def _opened(self, found: Any, span: MadeSpan | None) -> Any:
        """An item as the program put it. found: its bytes, or whether it is packed (`PACKED`), and its content.

        span: of the `get`, which is linked to that of the `put`.
        """
        linked = None if span is None else span.linked
        try:
            packed, content = (True, found) if isinstance(found, bytes) else found
            if packed is True:
                return unpack(content, self.node.engine.safe, self.node.engine.record.main, linked)
            if packed and linked is not None:
                linked(valid(packed))
            return content
        except BaseException as broken:
            raise ItemLost(
                f"an item of {self.describe()} cannot be read here, and is gone: {foreign.said(broken)}",
                queue=self._name,
                worker=self.node.engine.name,
                count=1,
            ) from broken

    def _lose(self, gone: dict[str, list[BaseException | None]], finished: int) -> None:
        """Report items that went with their workers. finished: how many of them the owner does not count as finished
        yet.
        """
        for worker, causes in gone.items():
            loss = self._loss(worker, causes)
            self._lost.append(loss)
            # Its text alone: handlers of logs keep records, and its traceback has the item.
            logger.warning("worker %s: %s", self.node.engine.name, foreign.text_of(loss))
        if finished:
            self._calls.tell("finish_items", finished)

    def _raise_loss(self, get: GetFuture) -> None:
        """Raise the first loss at a `get`. If that was given up, the loss waits for the next one."""
        if get.finish(None, self._lost[0]):
            self._lost.popleft()

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
        """Give unwanted items back to the owner. Items whose producer is gone meanwhile are losses here."""
        gone: dict[str, list[BaseException | None]] = {}
        finished = 0
        there: list[Taken] = []
        for taken in items:
            item = taken.item
            if type(item) is GoneItem:
                gone.setdefault(item.worker, []).append(None)  # the owner has counted it as finished
            elif type(item) is not Kept or gone_with(item) is None:
                there.append(taken)
            else:
                gone.setdefault(item.producer, []).append(None)
                finished += 1
        if there:
            tickets, unwanted = zip(*there, strict=True)
            sent, references = to_wire(unwanted)
            self._calls.tell("return_items", b"".join(tickets), declared.pack(sent), *references)
        self._lose(gone, finished)

    # --- giving up ----------------------------------------------------------------------------------------------------

    def _late(self, waiting: PutFuture | GetFuture, timeout: float) -> None:
        text, worker = self._why_late(waiting, f"{timeout:g} s")
        verb = "put" if isinstance(waiting, PutFuture) else "get"
        waiting.finish(None, RpcTimeout(text, worker=worker, function=f"{self._name}.{verb}", seconds=timeout))
        self.given_up(waiting)

    def _why_late(self, waiting: PutFuture | GetFuture, time: str) -> tuple[str, str]:
        """Why a `put` or `get` timed out, and the name of the worker that it waited for."""
        if isinstance(waiting, GetFuture) and waiting.producers:
            names = sorted(waiting.producers.values())
            return self._keeps_back(names, time), names[0]
        peer, queue = self._calls.peer, self.describe()
        silent = None if peer is None else self._why_silent(peer, time)
        if silent is not None:
            return silent, self._owner
        if waiting.at_once:
            return (
                f"{queue} has not answered for {time}: worker {self._owner!r} is busy, stopped or cut off",
                self._owner,
            )
        text = f"{queue} has {'been full' if isinstance(waiting, PutFuture) else 'had no item'} for {time}"
        return text + self._or_busy(), self._owner

    def _or_busy(self) -> str:
        """The rest of an error text: an owner that is busy or stopped looks the same as a full or empty queue."""
        if self._owner == self.node.engine.name:
            return ""
        return (
            f", or worker {self._owner!r} is busy or stopped, as it is connected and has not answered. Which of "
            f"them it is, `await rpc.queue({self._name!r}, owner={self._owner!r}).qsize()` tells: a queue answers "
            "that at once"
        )

    def _why_silent(self, peer: Peer, time: str) -> str | None:
        """Why the owner cannot have received the call; None if it can have."""
        if peer.state is not PeerState.CONNECTING and peer.state is not PeerState.SUSPENDED:
            return None
        former = peer.former  # read before `record`: it is forgotten before there is a record
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
        """The error for a producer that did not hand over its items. cause: the timeout of the call for them."""
        text = self._keeps_back([worker], f"{cause.seconds:g} s (rpc_timeout)")
        error = RpcTimeout(text, worker=worker, function=f"{self._name}.get", seconds=cause.seconds)
        error.__cause__ = without_frames(cause)
        return error

    def given_up(self, waiting: PutFuture | GetFuture) -> None:
        """A Future is not waited for any more: end its request, unless other Futures share it."""
        waiting.stop_waiting()
        request = waiting.request
        if request is not None:
            if self._calls.end(request):
                self._probing.discard(request)
                if request is self._put:
                    self._on_put(request, Put(0))
        elif isinstance(waiting, PutFuture):
            with contextlib.suppress(ValueError):  # it has been put
                self._puts.remove(waiting)
        else:
            with contextlib.suppress(ValueError):  # it was given items
                self._gets.remove(waiting)
            if self._get is not None and all(get.done() for get in self._gets):
                self._gets.clear()
                if self._calls.end(self._get):
                    self._get = None

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
