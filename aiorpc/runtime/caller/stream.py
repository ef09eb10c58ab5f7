"""The consumer's end of a stream: a generator on one worker, ``async for`` on another, and credit between them.

The consumer grants `window` items with the call. The producer sends an item for each credit and then waits; the
consumer grants more as it takes items, half a window at a time. Items and the end travel on one connection, so the end
(REPLY, or ERROR with the generator's exception) comes after the last item. CANCEL closes the producer's generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from ... import foreign
from ..._typing import Args, Function, Kwargs, T_co
from ...channels.landing import Landing
from ...errors import ProtocolError, RpcError, RpcTimeout, RpcUsageError
from ...futures import Future
from ...protocol.frames import Buffer, Kind
from ...protocol.messages import Credit, Method, ObjectMethod, Values, write
from ..calls.options import CallOptions
from ..calls.values import decode
from ..engine.blocking import BlockingIterator
from .future import CallFuture
from .peer import Peer

_Item = tuple[Values, Sequence[Buffer], Landing | None]
_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Stream(BlockingIterator[T_co]):
    """``async for item in stream``, or ``for`` in a thread that may block. Leaving the loop early stops the producer.

    One consumer at a time, on any running loop, or in a thread. `aclose` ends it, or `close` in a thread; so does
    dropping the last reference to it, and the end of an ``async with`` or ``with``, for consumers that may fail. The
    timeout bounds the wait for each item, in seconds.
    """

    # Defaults for a half-made stream, which `__del__` may meet.
    _end: CallFuture | None = None
    _function = "?"

    def __init__(self, peer: Peer, window: int, timeout: float) -> None:
        super().__init__(peer.engine)
        self._peer = peer
        self._window = window
        self._timeout = timeout
        self._items: deque[_Item] = deque()
        self._taken = 0
        self._waiter: _Waiter | None = None
        self._since: float | None = None  # when a wait for several streams began
        self._finished = False

    def _start(self, end: CallFuture) -> None:
        """The call is on its way. end: its Future, which settles when the producer has ended."""
        self._end, self._function = end, end.function
        myself = weakref.ref(self)

        def wake(_: Future[object]) -> None:
            stream = myself()
            if stream is not None:
                stream._wake()

        end._when_settled(wake)

    def _on_item(self, item: Values, segments: Sequence[Buffer], landing: Landing | None) -> None:
        """An item arrived; on the worker's loop. Raises ProtocolError for an item beyond the credit."""
        if len(self._items) + self._taken >= self._window:  # such a producer would fill the memory
            raise ProtocolError(f"an item of {self._describe()} beyond the {self._window} that were asked for")
        self._items.append((item, segments, landing))
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None:
            return
        loop, future = waiter
        if loop.is_closed():  # its task is gone
            self._peer.engine.kept.discard(self)
        else:
            loop.call_soon_threadsafe(_finish, future)

    async def __anext__(self) -> T_co:
        """The next item. Raises the producer's error in its place, RpcTimeout when none came in time.

        Cancellation takes no item: the next call returns it.
        """
        if self._came:
            return self._came.popleft()
        if not self._items and not self._finished:
            await self._wait()
        if not self._items:
            return self._conclude()
        item, self._since = self._items.popleft(), None
        self._taken += 1
        if self._taken >= max(1, self._window // 2):
            self._grant()
        try:
            return self._decode(*item)
        except BaseException as error:
            await self.aclose()
            raise RpcError(f"an item of {self._describe()} cannot be read here: {foreign.said(error)}") from error

    def _decode(self, item: Values, segments: Sequence[Buffer], landing: Landing | None) -> T_co:
        peer = self._peer
        landing = landing or (peer.devices and peer.accelerators.landing()) or None
        if landing is None:
            here: T_co = decode(item, segments, peer.load_references, peer.track, None, peer.safe)[0]
            return here
        with landing.entered():
            value: T_co = decode(item, segments, peer.load_references, peer.track, landing, peer.safe)[0]
            arrival = landing.arrival()
        if arrival is not None:
            arrival.join()
        return value

    def _grant(self) -> None:
        assert self._end is not None
        taken, self._taken = self._taken, 0  # first: the items may come before `send` returns
        if not self._end.done():
            self._peer.send(Kind.CREDIT, self._end.call_id, write(Credit(taken)), urgent=True)

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RpcUsageError(f"two tasks wait for items of {self._describe()}; a stream has one consumer")
        assert self._end is not None
        self._peer.engine.refuse_idle_loop(f"to await an item of {self._describe()}", "async for")
        loop = asyncio.get_running_loop()
        while not self._items and not self._end.done():
            future = loop.create_future()
            self._attend((loop, future))
            try:
                if self._items or self._end.done():  # it came before the registration
                    return
                async with asyncio.timeout(self._timeout or None):
                    await future
            except TimeoutError:
                raise self._too_late() from None
            finally:
                self._attend(None)

    # --- for waits for several streams at once ------------------------------------------------------------------------

    @property
    def _ready(self) -> bool:
        """Whether the next turn need not wait: there is an item, or the end."""
        end = self._end
        return bool(self._items) or self._finished or end is None or end.done()

    def _attend(self, waiter: _Waiter | None) -> None:
        """Settle that future, on its loop, when an item or the end comes; None: the wait is over."""
        self._waiter = waiter
        if waiter is None:
            self._peer.engine.kept.discard(self)
        else:
            self._peer.engine.kept.add(self)

    def _patience(self) -> float:
        """Seconds left for the next item, counted from the first call of this."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return self._since + self._timeout - now if self._timeout else math.inf

    def _too_late(self) -> RpcTimeout:
        """The error for an item that did not come in time, which ends the stream."""
        self._came.clear()
        self._stop()
        return RpcTimeout(
            f"no item of {self._describe()} within {self._timeout:g} s",
            worker=self._peer.name,
            function=self._function,
            seconds=self._timeout,
        )

    def _conclude(self) -> NoReturn:
        if not self._finished:
            self._finished = True
            # The traceback of its error gets frames with this stream, and the cycle would never be freed.
            end, self._end = self._end, None
            assert end is not None
            error = end.exception()
            if error is not None:
                try:
                    raise error
                finally:
                    del end, error
        raise StopAsyncIteration

    def _describe(self) -> str:
        return f"the stream of {self._function} from worker {self._peer.name!r}"

    async def aclose(self) -> None:
        """Stop the producer and drop the items that have arrived. Idempotent; does not wait for the producer."""
        self._came.clear()
        self._stop()

    def _stop(self) -> None:
        self._finished = True
        end = self._end
        if end is not None:
            _abandon(self._peer, self._items, end)

    def __reduce__(self) -> NoReturn:
        """No copies, either: the first copy that was dropped would stop the producer."""
        raise RpcUsageError(
            f"{self._describe()} has one consumer, and cannot be copied, pickled or sent; open one for each, or send "
            "the items"
        )

    def __del__(self) -> None:
        # It may run under a lock or in the garbage collector: it only wakes the loop.
        end = self._end
        if end is not None:
            end._mark_seen()
            if self._items or not end.done():
                self._peer.engine.call_on_loop(_abandon, self._peer, self._items, end)


def _abandon(peer: Peer, items: deque[_Item], end: CallFuture) -> None:
    """Stop the producer; references in left items still have to be taken."""
    end.cancel()
    end._mark_seen()
    while items:
        item, _, _ = items.popleft()
        if item.references:
            with contextlib.suppress(ProtocolError):  # invalid references need no taking
                peer.load_references(item.references)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def open_stream(
    peer: Peer,
    function: Function | Method | ObjectMethod,
    args: Args,
    kwargs: Kwargs,
    timeout: float,
    *,
    wait: bool = False,
    depth: int = 2,
    keeps: object = None,
) -> Stream[Any]:
    """Open a stream from a peer. timeout: seconds for each item, 0 for no limit. wait: for the worker to join.

    function: as of `Peer.call`. keeps: as of `CallOptions`. depth: how many stack frames up the user's code is.
    """
    window = peer.engine.options.stream_window
    stream: Stream[object] = Stream(peer, window, timeout)
    options = CallOptions(wait, credit=window, stream=stream, keeps=keeps)
    end = peer.call(function, args, kwargs, 0.0, depth=depth + 1, options=options)
    stream._start(end)
    return stream
