"""What is to be written to a stream socket: appended from any thread, written by one at a time.

`send` appends a frame to the queue; then exactly one thread at a time drains it.

    who         when                                               how
    the caller  `urgent`: little else is under way, so one hop     tries the write lock, writes itself
                through the loop would only cost time
    the loop    everything else, and when the socket was full      once per loop turn, joining what has gathered

Invariants
1. One FIFO: frames leave in the order in which they were appended, whoever writes (a cancel never overtakes its call).
2. Whoever fails to get the write lock may go: its holder looks at the queue again after it let go of the lock.
3. `_scheduled` is cleared before the queue is drained, so a frame appended later schedules a new drain.
4. Once the queue is empty `on_drained` runs: after a drain on the loop at once, after any other one soon.
5. A thread that blocks in the midst of a write, in a signal handler say, has given the write back to the loop (turns).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextvars import Context

from ..interrupts import SocketTurn, TurnEnded, begin, leave
from ..locks import RLock, is_owned, release
from ..protocol.frames import Buffer
from ..protocol.session import Session
from ..threads import waits_in_main_thread
from .send_queue import FRAME_COST, SendQueue, Unsent
from .tls import TlsLayer

# So many small frames are not held back for more to come: the other side starts to work on them while we make the rest.
BATCH_FRAMES = 32
# Room for a large buffer in the socket, in bytes, so that its writer is done before its reader has to be waited for: a
# third of the time for 1 MB. The system caps it (net.core.wmem_max); memory is taken only while something is under way.
SEND_BUFFER = 4 * 1024 * 1024
# On this host, while a large buffer is under way its other end is at work on the same socket, and a turn of the loop
# for each socketful costs more than the copy: wait for it where we stand, in the one system call that takes all of it,
# in seconds. Not between hosts, where what comes next may take its time.
PATIENCE = 0.002
_DONT_WAIT = int(socket.MSG_DONTWAIT)


class FrameWriter:
    """See the module: the writing half of a connection, which reads and ends it (`connection`).

    tls: of the connection; it has its say in what is written. lasting: what outlives the socket; see
    `lasting.LastingConnection`. on_drained: called on the loop when all that was queued has been written, by whomever.
    queue: what waits to be written; to be looked at by whoever is about to send more. bytes_sent: to the socket.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, tls: TlsLayer | None) -> None:
        self._patient = sock.family == socket.AF_UNIX
        # Blocking, as far as the system knows: each system call says for itself whether it waits.
        sock.setblocking(True)
        if self._patient:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # TCP sizes its buffers by itself
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, int(PATIENCE * 1e6)))
        self.tls = tls
        self.lasting: Session | None = None
        self.on_drained: Callable[[], None] | None = None
        self.bytes_sent: int = 0
        self.queue: SendQueue = SendQueue()
        if tls is not None:
            self.queue.use_tls(tls)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._lock = RLock()  # reentrant as it knows its owner; nobody enters it twice
        # Whether the loop is going to flush; the thread that is about to have it do so, until it was asked.
        self._scheduled: bool | int = False
        self._blocked = False  # the socket was full; the loop waits until it takes more
        self._closing = False
        self._closed = False

    @property
    def unsent(self) -> int:
        """Frames appended and not yet written."""
        return len(self.queue)

    def send(
        self, frame: Sequence[Buffer], *, urgent: bool = False, more: bool = False, unsent: Unsent | None = None
    ) -> None:
        """Queue one frame, from any thread; never blocks. After close the frame is dropped.

        urgent: nothing else is under way, so write at once. more: the caller sends another one right after this, or
        says `push`. unsent: see `SendQueue.append`.
        """
        if self._closed:
            return
        queue = self.queue
        try:
            if unsent is not None:
                queue.append(frame, unsent)
            elif len(frame) == 1:  # as `append` does, with one function less for most frames
                size = len(frame[0]) + FRAME_COST
                queue.size += size
                queue.frames.append(frame)
            else:
                queue.append(frame)
            if more:
                return
            if not self._blocked and (len(queue.frames) >= BATCH_FRAMES or (urgent and not self._scheduled)):
                self._write()
                if self.on_drained is not None:  # as in `_write_here`
                    self._call_on_loop(self._drained)
            elif self._scheduled is not True and (not self._scheduled or self._scheduled == threading.get_ident()):
                self._schedule()
        except BaseException:
            self._interrupted()
            raise

    def push(self) -> None:
        """Write what is queued, unless the loop will; from any thread, never blocks."""
        if self.queue and not self._blocked and not self._scheduled:
            self._write_here()

    def flush(self) -> None:
        """Write what is queued. On the loop's thread."""
        if self.queue:
            self._flush()

    def _schedule(self) -> None:
        self._scheduled = threading.get_ident()  # what interrupts us asks itself
        self._call_on_loop(self._flush)
        # In one step, without a call: it may have flushed.
        self._scheduled = True if self._scheduled else False  # noqa: SIM210

    def _flush(self) -> None:
        self._scheduled = False
        self._write()
        self._drained()

    def _drained(self) -> None:
        if self.on_drained is not None and not self.queue and not self._closed:
            self.on_drained()

    def _write_here(self) -> None:
        self._write()
        if self.on_drained is not None:  # the loop may have left its frames to this thread
            self._call_on_loop(self._drained)

    def _write(self) -> None:
        """Write what is queued, as far as the socket takes it, unless another thread does."""
        lock, queue = self._lock, self.queue
        frames = queue.frames  # but not `begun`, of which a turn that ends has others use a copy
        # Not once closed: a frame appended during that is never taken, and this loop would spin for ever.
        while (frames or queue.begun or queue.miscounted) and not self._blocked and not self._closed:
            # Ours already: a signal handler sends something in the midst of our own writing.
            if lock._is_owned():  # type: ignore[attr-defined]  # see `is_owned`
                return
            turn = SocketTurn(self._give_writing_back, frames, _DONT_WAIT)
            begin(turn)
            try:
                if not lock.acquire(False):
                    return
                session = self.lasting
                if queue.miscounted:
                    queue.recount(turn)
                while (frames or queue.begun) and not self._closed:
                    if (
                        session is not None
                        and (session.due or session.size >= session.limit)
                        and not self._may_begin(session, turn)
                    ):
                        break
                    try:
                        sent, whole = queue.write(self._sock, turn)
                    except (BlockingIOError, InterruptedError):
                        sent, whole = 0, False
                    self.bytes_sent += sent
                    if whole:
                        turn[1] = _DONT_WAIT
                    elif self._patient and turn[1] and sent and not waits_in_main_thread():
                        turn[1] = 0  # once more, and this time wait a little; no signal handler runs in that
                    else:
                        self._blocked = True
                        self._call_on_loop(self._wait_writable)
                        break
            except OSError as error:
                if error.errno is None:  # a signal handler has raised it, a TimeoutError say: the socket is as it was
                    self._interrupted()
                    raise
                self._call_on_loop(self._write_failed, error, self._sock)
                return
            except (TurnEnded, RuntimeError) as error:  # the latter for the lock of TLS, which was given back, too
                self._interrupted()  # what has ended the turn may have been interrupted in that
                if not turn.has_raised(error):
                    raise
                return
            except BaseException:
                self._interrupted()  # as long as the lock is its own
                raise
            finally:
                release(lock)
                leave(turn)

    def _give_writing_back(self) -> None:
        """This thread is about to block in the midst of a write: the loop goes on from there."""
        self._interrupted()

    def _interrupted(self) -> None:
        """A signal handler has raised in the midst of a write, or is about to block: the loop goes on from there."""
        if is_owned(self._lock):  # else nothing of the queue was being changed, or it is another thread that writes
            self.queue.end_turn(self._lock)
        if self.tls is not None:
            release(self.tls.lock)
        self._blocked = self._fd < 0  # else maybe before the loop was asked to wait for the socket
        self._call_on_loop(self._flush)

    def _may_begin(self, session: Session, turn: SocketTurn) -> bool:
        """Whether something may be written, as an ACK is due or much was not acknowledged. By the writer, in turn."""
        raise NotImplementedError  # only `LastingConnection` has a session

    def _wait_writable(self) -> None:
        if not self._closed and self._fd >= 0:
            try:
                self._loop.add_writer(self._fd, self._writable)
            except RuntimeError:  # uvloop has seen an error of the socket, and looks at it no more: we find it, too
                self._readable()

    def _writable(self) -> None:
        self._loop.remove_writer(self._fd)
        self._blocked = False
        self._flush()
        if self._closing and not self.queue:
            self._stop_writing()

    def _write_failed(self, error: BaseException, sock: socket.socket) -> None:
        """That socket takes nothing more. On the loop."""
        raise NotImplementedError  # it is ended by the `Connection`

    def _stop_writing(self) -> None:
        """All that was to be said before the connection is closed is written. On the loop."""
        raise NotImplementedError  # as above

    def _readable(self) -> None:
        """Read what has come. On the loop."""
        raise NotImplementedError  # as above

    def _call_on_loop(self, callback: Callable[..., None], *args: object) -> None:
        # Not with the context variables of whoever writes: what is read in that turn is none of his.
        here = asyncio._get_running_loop() is self._loop
        call = self._loop.call_soon if here else self._loop.call_soon_threadsafe
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is this connection, or it will be soon
            call(callback, *args, context=Context())
