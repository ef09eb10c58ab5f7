"""The calls that one handle of a queue makes: to the owner of the queue, and to the producers that keep items of it.

The calls that put and take items have no deadline and are never cancelled once they were sent: an answer that brings
items must not be dropped. When no Future waits for such a call any more, the handle asks the owner to end it
(`withdraw`). If the owner has not joined yet, the call was not sent and is taken back; otherwise a worker that leaves
would wait for it.

All of it runs on the worker's loop, except where a method says otherwise.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import foreign
from ..errors import Overloaded, RpcError, UnknownObject, UnknownWorker
from ..futures import Future
from ..protocol.messages import ObjectMethod
from ..runtime.caller.arriving import NotArrived
from ..runtime.caller.future import CallFuture
from ..runtime.caller.peer import Peer
from ..runtime.caller.reworded import RewordedFuture, Words
from ..runtime.calls.declared import pack
from ..runtime.calls.failures import without_frames
from ..runtime.calls.options import CallOptions
from ..runtime.node import Node
from ..sites import CallSite
from .items import Named
from .packing import hand_over
from .waiting import Request, State

_PAUSE = 0.1  # seconds until `tell` calls an overloaded owner again

#: Takes the value of a call, or its error. The current streams of the loop have waited for the value.
Then = Callable[[Any, BaseException | None], None]


class Calls:
    """The calls of one handle. peer: the owner as of the last request for room or items; None before the first."""

    def __init__(self, node: Node, queue: str, owner: str) -> None:
        self.peer: Peer | None = None
        self._node = node
        self._queue = queue
        self._owner = owner
        self._context = contextvars.Context()  # outside of any served call and any context of autograd

    def begin(self, request: Request, method: str, waits: bool, args: Sequence[Any], then: Then) -> None:
        """Call a method of the queue that puts or takes items, without a deadline.

        waits: whether it waits at the owner until it is withdrawn.
        """
        request.state, request.waits = State.UNDER_WAY, waits

        def call() -> Future[Any]:
            peer = request.peer = self.peer = self._node.peers.find(self._owner)
            sent = (waits, request.number if waits else 0, *args)
            request.call = peer.call(ObjectMethod(self._queue, method), sent, None, 0.0, options=self._options(None))
            return request.call

        def ended(value: Any, error: BaseException | None) -> None:
            request.state = State.ENDED
            then(value, error)

        self._begin(call, ended)

    def end(self, request: Request) -> bool:
        """End a request that no Future waits for. True if it was never sent; then its `then` is not called."""
        call, peer = request.call, request.peer
        if request.state is not State.UNDER_WAY or call is None or peer is None or call.done():
            return False  # it is over, or its answer is there
        if peer.take_back(call.call_id):
            request.state = State.ENDED
            return True
        request.state = State.WITHDRAWN
        peer.pending.give_up(call.call_id)
        if request.waits:
            self.tell("withdraw", request.number)
        return False

    def ask(self, method: str, args: Sequence[object], timeout: float, site: CallSite) -> Future[Any]:
        """Call a method of the queue for the caller of a method of the handle, as part of the call that it is in.

        timeout: seconds, 0 for no limit. site: of that caller. Any thread. Raises what `Peer.call` raises.
        """
        return RewordedFuture(self._call(method, args, timeout, site)[1], self._advised)

    def join(self, timeout: float, site: CallSite, words: Callable[[Peer], Words]) -> Future[Any]:
        """As `ask`, for a `join`. words: makes the translation of the call's errors, given the owner's peer."""
        peer, call = self._call("join_items", (), timeout, site)
        call.parked = True
        late = words(peer)
        return RewordedFuture(call, lambda error: late(self._advised(error)))

    def _call(self, method: str, args: Sequence[Any], timeout: float, site: CallSite) -> tuple[Peer, CallFuture]:
        peer = self._node.peers.find(self._owner)
        return peer, peer.call(ObjectMethod(self._queue, method), args, None, timeout, options=self._options(site))

    def _options(self, site: CallSite | None) -> CallOptions:
        """site: where the call was made; None for a call that puts or takes for several callers."""
        return CallOptions(site=site, begun=site is None, part_of=("queue", self._queue))

    def knows_owner(self) -> bool:
        """Whether the owner has a record here. Also true if the group cannot have such a worker: a call then fails."""
        try:
            return self._node.peers.find(self._owner).record is not None
        except RpcError:
            return True

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the queue whose answer does not matter: if the owner is gone, so is the queue.

        An overloaded owner gets the call again after a pause; otherwise items would be lost.
        """

        def call() -> Future[Any]:
            peer = self._node.peers.find(self._owner)
            # The runtime's own: a limit of users' calls that refused it would lose items.
            return peer.call(
                ObjectMethod(self._queue, method), args, None, 0.0, system=True, options=self._options(None)
            )

        def told(_: object, error: BaseException | None) -> None:
            if isinstance(error, Overloaded):
                self._node.engine.loop.call_later(_PAUSE, self.tell, method, *args)

        self._begin(call, told)

    def fetch(self, worker: int, named: Sequence[Named], then: Then) -> None:
        """Fetch items from the worker that keeps them. worker: its id."""

        def call() -> Future[Any]:
            peer = self._node.peers.by_id(worker)
            # The runtime's own, as in `tell`.
            return peer.call(hand_over, (pack(named),), None, self._node.engine.default_timeout, system=True)

        self._begin(call, then)

    def _begin(self, call: Callable[[], Future[Any]], then: Then) -> None:
        try:
            future = self._context.run(call)
        except Exception as error:
            # Its frames refer to the waiting Futures, and these to the error: a cycle that nothing would free.
            failure = error.with_traceback(None) if isinstance(error, UnknownWorker) else without_frames(error)
            if self._node.engine.closed:  # the loop may stop soon
                then(None, failure)
            else:
                self._node.engine.loop.call_soon(then, None, failure)
            return
        future._when_settled(partial(self._ended, then))

    def _ended(self, then: Then, future: Future[Any]) -> None:
        """Pass the outcome of a call to `then`, on the loop. Any thread."""
        future._mark_seen()
        # Not raised: the error may belong to a peer, which outlives this call, and a traceback would keep these frames.
        value, error, arrival = future._value, self._advised(future._error), future._arrival
        if self._node.engine.loop.is_closed():
            return

        def tell() -> None:
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
        """The error of a call, in words of queues. Any thread."""
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
