"""What is to be written to a stream socket: appended from any thread, written by one at a time.

`send` appends a frame to the queue; then exactly one thread at a time drains it.

    writer      when                                               how
    the caller  `urgent`: little more is under way, so one hop     tries the write lock, writes itself
                through the loop would only cost time
    the loop    in all other cases, and when the socket was full   once per loop turn, joining what has gathered

Invariants
1. One FIFO: frames leave in the order in which they were appended, by any writer (a cancel never overtakes its call).
2. A thread that fails to get the write lock may go: the holder looks at the queue again after it has released the lock.
3. `_scheduled` is cleared before the queue is drained, so a frame appended later schedules a new drain.
4. Once the queue is empty `on_drained` runs: after a drain on the loop at once, after any other one soon.
5. A thread that blocks in the middle of a write, for example in a signal handler, has given the write back to the loop
   (`SocketTurn`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from ..interrupts import SocketTurn, TurnEnded, begin, leave
from ..locks import RLock, is_owned, release
from ..protocol.frames import Buffer
from ..protocol.session import Session
from ..threads import waits_in_main_thread
from ..undoing import on_error
from .port import Port
from .send_queue import SendQueue, Unsent

# So many small frames are written without waiting for more: the other side works on them while we make the rest.
BATCH_FRAMES = 32
_DONT_WAIT = int(socket.MSG_DONTWAIT)


class FrameWriter:
    """See the module. queue: what waits to be written; senders may read it. lock: held by the thread that writes."""

    def __init__(self, port: Port) -> None:
        self.queue: SendQueue = SendQueue()
        if port.tls is not None:
            self.queue.use_tls(port.tls)
        self.lock: RLock = RLock()  # reentrant because it knows its owner; no thread enters it twice
        self.blocked: bool = False  # the socket was full, and the loop waits for it; or a session or suspension blocks
        self._port = port
        # True: the loop is going to flush. An id: of the thread that is about to ask it.
        self._scheduled: bool | int = False

    def send(
        self, frame: Sequence[Buffer], *, urgent: bool = False, more: bool = False, unsent: Unsent | None = None
    ) -> None:
        """Queue one frame, from any thread; never blocks. After close the frame is dropped.

        urgent: little more is under way, so write at once. more: the caller sends another one right after this, or
        calls `push`. unsent: see `SendQueue.append`.
        """
        if self._port.closed:
            return
        queue = self.queue
        try:
            queue.append(frame, unsent)
            if more:
                return
            if not self.blocked and (len(queue.frames) >= BATCH_FRAMES or (urgent and not self._scheduled)):
                self.write_here()
            elif self._scheduled is not True:
                self._schedule()
        except BaseException:
            self.interrupted()
            raise

    def push(self) -> None:
        """Write what is queued, unless the loop will; from any thread, never blocks."""
        with on_error(self.interrupted):
            if self.queue and not self._scheduled:
                if not self.blocked:
                    self.write_here()
                elif self._port.on_wanted is not None:
                    self._schedule()

    def flush(self) -> None:
        """Write what is queued. On the loop's thread."""
        if self.queue:
            self.flush_all()

    def _schedule(self) -> None:
        here = threading.get_ident()
        if self._scheduled and self._scheduled != here:  # another thread is about to
            return
        self._scheduled = here  # what interrupts us asks itself
        self._port.call_on_loop(self.flush_all)
        # In one step, without a call: the loop may have flushed already.
        self._scheduled = True if self._scheduled else False  # noqa: SIM210

    def flush_all(self) -> None:
        self._scheduled = False
        if self._port.on_wanted is not None:
            self._port.on_wanted()
        self.write()
        self._drained()

    def _drained(self) -> None:
        if self._port.on_drained is not None and not self.queue and not self._port.closed:
            self._port.on_drained()

    def write_here(self) -> None:
        self.write()
        if self._port.on_drained is not None:  # the loop may have left its frames to this thread
            self._port.call_on_loop(self._drained)

    def write(self) -> None:
        """Write what is queued, as far as the socket takes it, unless another thread does."""
        lock, queue, port = self.lock, self.queue, self._port
        frames = queue.frames  # but not `begun`, of which a turn that ends has others use a copy
        # Not once closed: a frame appended during that is never taken, and this loop would spin for ever.
        # Nor while the lock is ours: a signal handler sends something in the midst of our own writing.
        while (
            (frames or queue.begun or queue.miscounted) and not (self.blocked or port.closed) and not lock._is_owned()  # type: ignore[attr-defined]  # see `is_owned`
        ):
            turn = SocketTurn(self.give_writing_back, frames, _DONT_WAIT)
            begin(turn)
            try:
                if not lock.acquire(False):
                    return
                self._write_in_turn(turn)
            except BaseException as error:
                if self._is_settled(error, turn):
                    return
                raise
            finally:
                release(lock)
                leave(turn)

    def _write_in_turn(self, turn: SocketTurn) -> None:
        queue, port, session = self.queue, self._port, self._port.session
        if queue.miscounted:
            queue.recount(turn)
        while (queue.frames or queue.begun) and not port.closed:
            if session is not None and not self._may_begin(session, turn):
                return
            try:
                sent, whole = queue.write(port.sock, turn)
            except (BlockingIOError, InterruptedError):
                sent, whole = 0, False
            port.bytes_sent += sent
            if whole:
                turn[1] = _DONT_WAIT
            elif not self._writes_on(sent, turn):
                return

    def _may_begin(self, session: Session, turn: SocketTurn) -> bool:
        """Whether something may be written: not if an ACK has to come first, or too much is unacknowledged."""
        if not session.due and session.size < session.limit:
            return True
        owner = self._port.owner
        return owner is not None and owner.may_begin(session, turn)

    def _writes_on(self, sent: int, turn: SocketTurn) -> bool:
        """The socket took only `sent` bytes. True: this thread waits a little and writes on. False: the loop does,
        once the socket takes more."""
        if self._port.patient and turn[1] and sent and not waits_in_main_thread():
            turn[1] = 0  # a blocking call; no signal handler runs in this thread
            return True
        self.blocked = True
        self._port.call_on_loop(self._wait_writable)
        return False

    def _is_settled(self, error: BaseException, turn: SocketTurn) -> bool:
        """Whether an exception in a turn is dealt with: the socket has broken, or the turn has ended."""
        if isinstance(error, OSError) and error.errno is not None:
            self._port.call_on_loop(self._failed, error, self._port.sock)
            return True
        self.interrupted()  # the end of the turn may itself have been interrupted
        # RuntimeError: the lock of TLS was given back with the turn.
        return isinstance(error, (TurnEnded, RuntimeError)) and turn.has_raised(error)

    def _failed(self, error: BaseException, sock: socket.socket) -> None:
        if self._port.owner is not None:
            self._port.owner.write_failed(error, sock)

    def give_writing_back(self) -> None:
        """This thread will block in the middle of a write: the loop goes on from there."""
        self.interrupted()

    def interrupted(self) -> None:
        """A signal handler has raised in the middle of a write, or will block: the loop goes on from there."""
        if is_owned(self.lock):  # this thread was changing the queue
            self.queue.end_turn(self.lock)
        if self._port.tls is not None:
            release(self._port.tls.lock)
        self.blocked = self._port.fd < 0  # the loop may not have been asked to wait for the socket
        self._port.call_on_loop(self.flush_all)

    def _wait_writable(self) -> None:
        if not self._port.closed and self._port.fd >= 0:
            try:
                self._port.loop.add_writer(self._port.fd, self._writable)
            except RuntimeError:  # uvloop has seen an error of the socket, and does not watch it any more: read it
                if self._port.owner is not None:
                    self._port.owner.readable()

    def _writable(self) -> None:
        self._port.loop.remove_writer(self._port.fd)
        self.blocked = False
        self.flush_all()
        if self._port.closing and not self.queue and self._port.owner is not None:
            self._port.owner.all_written()
