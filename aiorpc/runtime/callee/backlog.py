"""Back-pressure: the unsent answers of one connection, and the calls that wait until its caller reads.

A caller that does not read must not fill the memory of the callee. The count has all unsent bytes: the frames in the
queue of the connection, the buffers for the second connection, and the answers that a background thread is about to
copy. The arena counts and bounds the bytes in shared memory.

    past half of max_unsent_bytes   calls are parked instead of started, and no more are read from the caller. Streams
                                    make no further items.
    past max_unsent_bytes           results of calls that had begun before are dropped, and Overloaded is answered
    past twice that                 nothing more is read from the caller

Reading also pauses while the caller's calls of the runtime's own exceed `max_call_rate` (`hold_off`). These calls are
never refused for that, because they are sent once; they are neither parked nor counted. So the limit is exceeded by one
result for each handler that answers at that moment, and by errors. All goes on as soon as the caller has read enough.

Why no wait is endless. The caller of a connection always reads, also while it has much to send: the loop gives answers
to their Futures. Only the callee stops reading, until the caller has read. So two workers that call each other may both
have stopped reading calls, and still both read answers, for which alone they wait. The callee needs two messages of the
caller meanwhile. The first is that there will be no second connection, so it reads until there is one. The second, over
TCP, is how much the caller has received, so a connection with as many unacknowledged bytes as it may keep is read.
Calls that come meanwhile are parked, and refused past max_queued_bytes. A caller that makes more than max_queued_calls
of them and receives nothing loses the connection. All other messages behind a call in the socket (CANCEL, credit,
reference counts, a goodbye) are of the same caller, and wait for its reading alone. The end of an unread connection
shows by the dead process or by a failing write.
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

# Parked calls started at once: the size of their answers is not known yet.
_AT_ONCE = 64
# Seconds between two looks whether there is room: the first pause, and the longest.
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05


class Backlog:
    """See the module. On the loop; `crowded`, `when_room`, `park` and `stop_calls` from any thread.

    limit, half, most: in bytes. queue, bulk, held: the counted bytes; the path of a call reads them directly. parked:
    the calls that wait for their start.
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
        self._unstopped = 0  # calls past `most` since reading was last stopped

    def start(self, resume: Callable[[ServedCall], None]) -> None:
        """resume: starts a parked call."""
        self._resume = resume

    @property
    def waiting(self) -> int:
        """Unsent bytes."""
        return self.queue.size + self.bulk.unsent + self.held

    def crowded(self) -> bool:
        """Whether too much is unsent to begin more calls."""
        return self.waiting > self.half

    def overloaded(self, call: ServedCall) -> Overloaded:
        """The answer in place of a result without room."""
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
        """Stop reading: a call has come although `most` is exceeded."""
        self._engine.run_on_loop(self._stop_calls)

    def _stop_calls(self) -> None:
        self._unstopped += 1
        self._wait()

    def when_room(self, callback: Callable[[], object]) -> None:
        """Call back on the loop when there is room, or when the connection has ended."""
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
        # With an empty context: it starts calls of others.
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
        # Not before this look: calls that came at once may have unwritten answers. Only the first connection's queue
        # counts, because the second connection may not be open yet.
        if self._unstopped > self._engine.options.max_queued_calls and self.queue.size > self.most:
            self._connection.abort(
                ProtocolError(f"it makes calls, and takes none of the {self.waiting} bytes that wait for it here")
            )
            return
        if (self.parked or self._waiters or self.waiting > self.most) and not self._looking:
            self._looking = True
            self._look_later()

    def _stop_reading(self) -> None:
        """Start or stop reading from the caller."""
        pipe = self._link.pipe
        # Without a second connection, the caller may still say that there will be none.
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
        """The connection has ended. Starting the parked calls ends them."""
        self._closed = True
        waiters, self._waiters = self._waiters, []
        for callback in waiters:
            callback()
        while self.parked and self._resume is not None:
            self._resume(self.parked.popleft())
