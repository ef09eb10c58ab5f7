"""The calls that one handle of a queue makes: to the owner of the queue, and to those who have kept items of it.

The calls that put and take items have no deadline, and nobody cancels them once they were sent: an answer that brings
items must not be dropped. When nobody waits any more for what one is for, the owner is asked to end it (`withdraw`); or
it is taken back, if it was not sent, as the owner has not joined. Else whoever leaves would wait for a call that was
given up.

All of it is on the loop of the worker, but where a method says otherwise.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

from .. import foreign
from ..callbacks import Again
from ..errors import Overloaded, RpcError, RpcTimeout, UnknownObject, UnknownWorker
from ..futures import Future
from ..protocol.messages import ObjectMethod
from ..protocol.states import PeerState
from ..runtime.caller.arriving import NotArrived
from ..runtime.caller.future import CallFuture
from ..runtime.caller.peer import Peer
from ..runtime.caller.reworded import RewordedFuture
from ..runtime.calls.failures import without_frames
from ..runtime.calls.options import CallOptions
from ..runtime.node import Node
from ..sites import CallSite
from .packing import hand_over
from .waiting import JoinFuture

_PAUSE = 0.1  # seconds until the owner is told again what it did not take

#: What is called with the value of a call, or with its error. The loop's current streams have waited for the value.
Then = Callable[[Any, BaseException | None], None]
#: What is asked for the error of somebody whose time was up, with the peer that has not answered.
Late = Callable[[Peer, RpcTimeout], RpcTimeout]


class Calls:
    """See the module. peer: the owner, when it was last asked for room or for items; None before that."""

    def __init__(self, node: Node, queue: str, owner: str) -> None:
        self.peer: Peer | None = None
        self._node = node
        self._queue = queue
        self._owner = owner
        self._context = contextvars.Context()  # no call and no context of autograd: whoever puts next has another one
        self._under_way: dict[int, tuple[Peer, CallFuture]] = {}  # those that can be taken back, by their numbers

    def call(self, method: str, wait: bool, number: int, args: Sequence[Any], then: Then) -> None:
        """Call a method of the queue that puts or takes items, for as long as that takes.

        wait: whether it is to wait at the owner until `withdraw`. number: no other call of this worker has it.
        """

        def call() -> Future[Any]:
            peer = self.peer = self._node.peers.find(self._owner)
            # What does not wait there cannot be withdrawn there, so that its number does not matter.
            said = (wait, number if wait else 0, *args)
            future = peer.call(ObjectMethod(self._queue, method), said, None, 0.0, options=self._options(None))
            self._under_way[number] = peer, future
            return future

        self._begin(call, then, number)

    def ask(self, method: str, args: Sequence[object], timeout: float, site: CallSite) -> Future[Any]:
        """Call a method of the queue for whoever has called that of the handle, as part of the call that it is in.

        timeout: seconds, 0 for no limit. site: where that was. Any thread. Raises what `Peer.call` raises.
        """
        return RewordedFuture(self._call(method, args, timeout, site)[1], self._advised)

    def join(self, number: int, timeout: float, site: CallSite, late: Late) -> Future[Any]:
        """As `ask`, for a `join`. number: no other call has it. late: gives the error for when the time is over."""
        peer, call = self._call("join_items", (number,), timeout, site)
        call.parked = True

        def advised(error: BaseException | None) -> BaseException | None:
            return late(peer, error) if isinstance(error, RpcTimeout) else self._advised(error)

        def not_heard() -> None:
            if peer.state is not PeerState.CONNECTING and not self._node.engine.closed:  # else nothing was sent
                self._node.engine.run_on_loop(self.tell, "tell_again", number)

        return JoinFuture(call, advised, not_heard=not_heard)

    def _call(self, method: str, args: Sequence[Any], timeout: float, site: CallSite) -> tuple[Peer, CallFuture]:
        peer = self._node.peers.find(self._owner)
        return peer, peer.call(ObjectMethod(self._queue, method), args, None, timeout, options=self._options(site))

    def _options(self, site: CallSite | None) -> CallOptions:
        """site: where the call was made; None for one that puts and takes for several callers."""
        return CallOptions(site=site, begun=site is None, part_of=("queue", self._queue))

    def knows_owner(self) -> bool:
        """Whether it is known which worker the owner is. Also true where the group cannot have it: a call says that."""
        try:
            return self._node.peers.find(self._owner).record is not None
        except RpcError:
            return True

    def take_back(self, number: int) -> bool:
        """Nobody wants that call any more. True if it was not sent and is over by that; its `then` is not called."""
        found = self._under_way.get(number)
        if found is None:
            return False
        peer, future = found
        if not peer.take_back(future.call_id):
            peer.pending.give_up(future.call_id)
            return False
        del self._under_way[number]
        return True

    def withdraw(self, number: int) -> bool:
        """As `take_back`; if the call was sent, the owner is asked to end it."""
        if self.take_back(number):
            return True
        if number in self._under_way:  # else its answer is there
            self.tell("withdraw", number)
        return False

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the queue whose answer does not matter: if the owner is gone, so is the queue.

        An owner that takes no further calls now is told again: items would be lost by that, too.
        """

        def call() -> Future[Any]:
            peer = self._node.peers.find(self._owner)
            # The runtime's own: it is not refused where users' calls are too many, as items would be lost by that.
            return peer.call(
                ObjectMethod(self._queue, method), args, None, 0.0, system=True, options=self._options(None)
            )

        def told(_: object, error: BaseException | None) -> None:
            if isinstance(error, Overloaded):
                self._node.engine.loop.call_later(_PAUSE, self.tell, method, *args)

        self._begin(call, told)

    def fetch(self, worker: int, named: Sequence[object], then: Then) -> None:
        """Have items that the worker of that id has kept. named: as `items.to_named` gives them."""

        def call() -> Future[Any]:
            peer = self._node.peers.by_id(worker)
            # The runtime's own, as in `tell`.
            return peer.call(hand_over, named, None, self._node.engine.default_timeout, system=True)

        self._begin(call, then)

    def _begin(self, call: Callable[[], Future[Any]], then: Then, number: int = 0) -> None:
        try:
            future = self._context.run(call)
        except Exception as error:
            # Its frames lead to who waits, and who waits to the error: nothing would ever free what they have.
            failure = error.with_traceback(None) if isinstance(error, UnknownWorker) else without_frames(error)
            if self._node.engine.closed:  # the loop may stop soon
                then(None, failure)
            else:
                self._node.engine.loop.call_soon(then, None, failure)
            return
        future._when_settled(Again(self._ended, [then], number))

    def _ended(self, once: list[Then], number: int, future: Future[Any]) -> None:
        """once: whom to tell, taken out on the loop. Whoever brings the answer may be interrupted in this, and does it
        again. Any thread."""
        self._under_way.pop(number, None)
        future._mark_seen()
        # Not raised: it may be the error of a peer, which outlives this call; its traceback would keep these frames.
        value, error, arrival = future._value, self._advised(future._error), future._arrival
        if self._node.engine.loop.is_closed():
            return

        def tell() -> None:
            if not once:
                return
            then = once.pop()
            try:
                if arrival is not None:
                    arrival.join()
            except Exception as failure:  # the device's
                refused = NotArrived(f"an answer about queue {self._queue!r} cannot be used: {foreign.said(failure)}")
                refused.__cause__ = without_frames(failure)
                then(None, refused)
            else:
                then(value, error)

        self._node.engine.run_on_loop(tell)

    def _advised(self, error: BaseException | None) -> BaseException | None:
        """What a call has ended with, in words of queues. Any thread."""
        if not isinstance(error, UnknownObject):
            return error
        known = f"; it serves {', '.join(map(repr, error.names))}" if error.names else ""
        return UnknownObject(
            f"worker {self._owner!r} has no queue {self._queue!r}{known}. There it has to be made: "
            f"rpc.Queue({self._queue!r})",
            worker=self._owner,
            name=self._queue,
            names=error.names,
        )
