"""The answers of one connection that its caller has not taken yet, and what waits until it has.

A caller that does not read must not fill the memory of the worker that serves it. Counted are the bytes that wait to be
sent to it: the frames in the queue of the connection, the buffers that wait for their turn on the second one, and the
answers that a background thread is about to copy. Bytes in shared memory are counted and bounded by the arena.

    past half of max_unsent_bytes   calls are parked instead of started, and no more are read from the caller. Streams
                                    make no further items.
    past max_unsent_bytes           results of calls that had begun before are dropped, and Overloaded is answered
    past twice that                 nothing more is read from the caller

Nor is anything read from a caller whose calls of the runtime's own exceed `max_call_rate`, until their time has come
(`hold_off`). They are never refused for that: what they say is said once. The runtime's own calls are neither parked
nor counted. So the limit is exceeded by one result for each handler that answers at that moment, and by the errors.
Everything goes on as soon as the caller has taken enough.

Why no wait lasts for ever. A connection belongs to the worker that makes the calls on it. Only its other end, which
serves them, ever stops reading, and begins again once the caller has read. The caller always reads, whatever it has to
send: the loop takes answers and gives them to Futures that have room for them. So of two workers that call each other,
both may have stopped reading calls, and yet both read answers, which is all that either waits for. Two things must be
heard from the caller meanwhile: that there will be no second connection, so there is reading until there is one; and
over TCP how much it has received, so a connection that has sent as much as it may keep is read until the caller says so
(calls that come meanwhile are parked, and refused past max_queued_bytes; a caller that makes more than max_queued_calls
of them and has received nothing meanwhile loses the connection). All else that stands behind a call in the socket (the
word that a call was given up, credit for a stream, counts of references, a goodbye) concerns the same caller, and waits
for nothing but its reading. The end of a connection that is not read shows all the same, by the process that is gone or
by the write that fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context

from ...channels.bulk import Bulk
from ...errors import Overloaded, ProtocolError
from ...transport.connection import Connection
from ...transport.send_queue import SendQueue
from ..calls.current import ServedCall
from ..engine.engine import Engine
from ..links.link import Link

# So many parked calls are begun at once: the size of their answers is not known yet.
_AT_ONCE = 64
# Seconds between two looks whether there is room: the first such pause, and the longest.
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05


class Backlog:
    """See the module. `crowded`, `when_room`, `park` and `stop_calls` from any thread, the rest on the loop.

    limit, half, most: in bytes. queue, bulk, held: what is counted, there to be looked at on the path of each call.
    parked: the calls that wait to be started.
    """

    def __init__(self, engine: Engine, link: Link, connection: Connection) -> None:
        self.limit: int = engine.options.max_unsent_bytes
        self.half: int = self.limit // 2
        self.most: int = 2 * self.limit
        self.queue: SendQueue = connection.queue
        self.bulk: Bulk = link.second.bulk
        self.held = 0
        self.parked: deque[ServedCall] = deque()
        self._engine = engine
        self._link = link
        self._connection = connection
        self._resume: Callable[[ServedCall], None] | None = None
        self._waiters: list[Callable[[], object]] = []
        self._pause = _FIRST_PAUSE
        self._looking = False
        self._closed = False
        self._held_off = False
        self._unstopped = 0  # calls that have come past `most` since reading could be stopped last

    def start(self, resume: Callable[[ServedCall], None]) -> None:
        """resume: starts a call that was parked."""
        self._resume = resume

    @property
    def waiting(self) -> int:
        """Bytes that wait to be sent."""
        return self.queue.size + self.bulk.unsent + self.held

    def crowded(self) -> bool:
        """Whether so much waits that nothing more should be begun."""
        return self.waiting > self.half

    def overloaded(self, call: ServedCall) -> Overloaded:
        """The answer in place of a result that there is no room for."""
        return Overloaded(
            f"the result of {call.function} was dropped: {self.waiting} bytes wait at worker {self._engine.name!r} "
            f"until {call.caller.name!r} reads them (max_unsent_bytes); make fewer calls at a time, or raise the option"
        )

    def park(self, call: ServedCall) -> None:
        """Start that call when there is room, and read no more until then."""
        self.parked.append(call)
        self._engine.run_on_loop(self._wait)

    def hold_off(self, seconds: float) -> None:
        """Read nothing from the caller for so many seconds."""
        self._engine.run_on_loop(self._hold_off, seconds)

    def _hold_off(self, seconds: float) -> None:
        if not self._held_off and not self._closed:
            self._held_off = True
            self._stop_reading()
            self._engine.loop.call_later(seconds, self._read_again, context=Context())

    def _read_again(self) -> None:
        self._held_off = False
        if not self._closed:
            self._stop_reading()

    def stop_calls(self) -> None:
        """A call has come, and there is more than `most` already: no more are read."""
        self._engine.run_on_loop(self._stop_calls)

    def _stop_calls(self) -> None:
        self._unstopped += 1
        self._wait()

    def when_room(self, callback: Callable[[], object]) -> None:
        """Have that called on the loop when there is room, or when the connection has ended."""
        self._waiters.append(callback)
        self._engine.run_on_loop(self._wait)

    def _wait(self) -> None:
        if self._closed:
            self.close()
            return
        self._stop_reading()
        if not self._looking:
            self._looking = True
            self._pause = _FIRST_PAUSE
            self._look_later()

    def _look_later(self) -> None:
        # Not with the context variables of who waits: the calls that are started then are others'.
        self._engine.loop.call_later(self._pause, self._look, context=Context())

    def _look(self) -> None:
        self._looking = False
        if self._closed:
            return
        if self.crowded():
            self._pause = min(2 * self._pause, _LAST_PAUSE)
        else:
            self._pause = _FIRST_PAUSE
            waiters, self._waiters = self._waiters, []
            for callback in waiters:
                callback()
            assert self._resume is not None, "it was given before the first call could come"
            for _ in range(min(_AT_ONCE, len(self.parked))):
                self._resume(self.parked.popleft())
        self._stop_reading()
        # Only here: all of them may have come at once, and what they were told may not have been written by then. And
        # only if that waits: what goes over the second connection may wait for that one, which takes its time.
        if self._unstopped > self._engine.options.max_queued_calls and self.queue.size > self.most:
            self._connection.abort(
                ProtocolError(f"it makes calls, and takes none of the {self.waiting} bytes that wait for it here")
            )
            return
        if (self.parked or self._waiters or self.waiting > self.most) and not self._looking:
            self._looking = True
            self._look_later()

    def _stop_reading(self) -> None:
        """Read from the caller, or do not, as it is right now."""
        pipe = self._link.pipe
        # Where there is no second connection yet, the caller may have to say that there will be none.
        full = self.waiting > self.most
        stop = (full or bool(self.parked) or self._held_off) and (pipe is not None or not self.bulk.unsent)
        if not full or (stop and not self._connection.must_hear):
            self._unstopped = 0
        for connection in (self._connection, pipe):
            if connection is None:
                continue
            if stop and not connection.must_hear:
                connection.pause()
            else:
                connection.resume()

    def close(self) -> None:
        """The connection has ended. The calls that were parked are over: their start finds that out."""
        self._closed = True
        waiters, self._waiters = self._waiters, []
        for callback in waiters:
            callback()
        while self.parked and self._resume is not None:
            self._resume(self.parked.popleft())
