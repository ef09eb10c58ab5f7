"""A framed connection over one stream socket: read on the loop, written from any thread.

Writing. `send` appends a frame to the queue; then exactly one thread at a time drains it.

    who         when                                               how
    the caller  `urgent`: nothing else is under way, so one hop    tries the write lock, writes itself
                through the loop would only cost time
    the loop    everything else, and when the socket was full      once per loop turn, joining what has gathered

Invariants
1. One FIFO: frames leave in the order in which they were appended, whoever writes (a cancel never overtakes its call).
2. Whoever fails to get the write lock may go: its holder looks at the queue again after it let go of the lock.
3. `_scheduled` is cleared before the queue is drained, so a frame appended later schedules a new drain.
4. `on_closed` runs once, on the loop, after the last frame was handed out.
5. All of the reading, and all registrations with the loop, happen on the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import ProtocolError
from ..protocol.frames import Buffer, Frame, FrameDecoder

logger = logging.getLogger("aiorpc")

# Joining below this costs less than another entry in a scatter-gather list; above it the copy costs more.
JOIN_SIZE = 16 * 1024
BATCH_SIZE = 256 * 1024
MAX_BUFFERS = 256
# So many small frames are not held back for more to come: the other side starts to work on them while we make the rest.
BATCH_FRAMES = 32
# Room for a large buffer in the socket, in bytes, so that its writer is done before its reader has to be waited for: a
# third of the time for 1 MB. The system caps it (net.core.wmem_max); memory is taken only while something is under way.
SEND_BUFFER = 4 * 1024 * 1024
# Most that is read before other connections get a turn, in bytes.
TURN_BYTES = 4 * 1024 * 1024
# On this host, while a large buffer is under way its other end is at work on the same socket, and a turn of the loop
# for each socketful costs more than the copy: wait for it where we stand, in the one system call that takes all of it,
# in seconds. Not between hosts, where what comes next may take its time.
PATIENCE = 0.002
_DONT_WAIT = int(socket.MSG_DONTWAIT)


class Connection:
    """See the module.

    on_frames: called on the loop with the frames that arrived; an error it raises closes the connection.
    on_closed: called once on the loop with the cause, None when `close` was called here.
    on_drained: called on the loop when it has written all that was queued.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        decoder: FrameDecoder,
        *,
        label: str,
    ) -> None:
        self._patient = sock.family == socket.AF_UNIX
        # Blocking, as far as the system knows: each system call says for itself whether it waits.
        sock.setblocking(True)
        if self._patient:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # TCP sizes its buffers by itself
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, int(PATIENCE * 1e6)))
        self.label = label
        self.decoder = decoder
        self.on_frames: Callable[[list[Frame]], None] | None = None
        self.on_closed: Callable[[BaseException | None], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        self.bytes_sent = 0
        self.bytes_received = 0
        self._loop = loop
        self._thread = threading.get_ident()
        self._sock = sock
        self._fd = sock.fileno()
        self._queue: deque[Sequence[Buffer]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False
        self._blocked = False  # the socket was full; the loop waits until it takes more
        self._closing = False
        self._closed = False

    def start(self) -> None:
        """Begin to read. On the loop's thread, with `on_frames` and `on_closed` set."""
        self._loop.add_reader(self._fd, self._readable)

    @property
    def local(self) -> bool:
        """Whether the other end is on this host for sure: a unix socket."""
        return self._patient

    @property
    def ended(self) -> bool:
        """Whether its socket is closed."""
        return self._closed

    @property
    def closed(self) -> bool:
        return self._closed or self._closing

    @property
    def unsent(self) -> int:
        """Frames appended and not yet written."""
        return len(self._queue)

    # --- writing ------------------------------------------------------------------------------------------------------

    def send(self, frame: Sequence[Buffer], *, urgent: bool = False, more: bool = False) -> None:
        """Queue one frame, from any thread; never blocks. After close the frame is dropped.

        urgent: nothing else is under way, so write at once. more: the caller sends another one right after this.
        """
        if self._closed:
            return
        self._queue.append(frame)
        if more:
            return
        if not self._blocked and (len(self._queue) >= BATCH_FRAMES or (urgent and not self._scheduled)):
            self._write()
        elif not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._flush)
            return
        try:
            self._loop.call_soon_threadsafe(self._flush)
        except RuntimeError:  # the loop is closed: so is this connection, or about to be
            self._queue.clear()

    def _flush(self) -> None:
        self._scheduled = False
        self._write()
        if self.on_drained is not None and not self._queue:
            self.on_drained()

    def _write(self) -> None:
        # Not once closed: a frame appended during that is never taken, and this loop would spin for ever.
        while self._queue and not self._blocked and not self._closed:
            if not self._lock.acquire(False):
                return
            try:
                self._drain()
            except OSError as error:
                self._call_on_loop(self._write_failed, error)
                return
            finally:
                self._lock.release()

    def _drain(self) -> None:
        queue = self._queue
        flags = _DONT_WAIT
        while queue and not self._closed:
            first = queue.popleft()
            if not queue and len(first) == 1:
                buffers, size = first, len(first[0])
            elif not queue and len(first) == 2:  # head and one segment
                buffers, size = first, len(first[0]) + len(first[1])
            else:
                buffers, size = self._gather(first)
            try:
                single = len(buffers) == 1
                sent = self._sock.send(buffers[0], flags) if single else self._sock.sendmsg(buffers, (), flags)
            except (BlockingIOError, InterruptedError):
                sent = 0
            self.bytes_sent += sent
            if sent == size:
                flags = _DONT_WAIT
                continue
            queue.appendleft(_rest(buffers, sent))
            if self._patient and flags and sent:
                flags = 0  # once more, and this time wait a little
                continue
            self._blocked = True
            self._call_on_loop(self._wait_writable)
            return

    def _gather(self, first: Sequence[Buffer]) -> tuple[Sequence[Buffer], int]:
        """That frame and more off the queue: small buffers joined, large ones as they are."""
        queue = self._queue
        buffers: list[Buffer] = []
        small: list[Buffer] = []
        size = 0
        frame: Sequence[Buffer] = first
        while True:
            for buffer in frame:
                size += len(buffer)
                if len(buffer) <= JOIN_SIZE:
                    small.append(buffer)
                    continue
                if small:
                    buffers.append(b"".join(small))
                    small = []
                buffers.append(buffer)
            if size >= BATCH_SIZE or len(buffers) >= MAX_BUFFERS or not queue:
                break
            frame = queue.popleft()
        if small:
            buffers.append(b"".join(small))
        if len(buffers) > 2 * MAX_BUFFERS:  # one frame of very many tensors: the rest waits its turn, in order
            queue.appendleft(buffers[MAX_BUFFERS:])
            buffers = buffers[:MAX_BUFFERS]
            size = sum(map(len, buffers))
        return buffers, size

    def _wait_writable(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        self._loop.remove_writer(self._fd)
        self._blocked = False
        self._flush()
        if self._closing and not self._queue:
            self._finish(None)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        decoder = self.decoder
        taken = 0
        try:
            while True:
                buffer = decoder.get_buffer()
                if self._patient and decoder.filling:
                    count = self._sock.recv_into(buffer, min(len(buffer), TURN_BYTES), socket.MSG_WAITALL)
                else:
                    count = self._sock.recv_into(buffer, 0, _DONT_WAIT)
                if count == 0:
                    self._fail(ConnectionResetError("the other side closed the connection"))
                    return
                taken += count
                self.bytes_received += count  # now: whoever is told of an end below looks at it
                frames = decoder.received(count)
                if frames and self.on_frames is not None:
                    self.on_frames(frames)
                if self._closed or taken > TURN_BYTES or (count < len(buffer) and not decoder.filling):
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ProtocolError) as error:
            self._fail(error)
        except Exception as error:
            logger.exception("%s: a frame could not be handled", self.label)
            self._fail(error)

    # --- ending -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is queued, as far as the socket takes it, then close. On the loop's thread."""
        if self.closed:
            return
        self._closing = True
        self._write()
        with self._lock:  # another thread may be writing; what it could not write is in the queue afterwards
            unsent = bool(self._queue)
        if unsent and not self._closed:
            # A peer that does not read must not keep us from leaving.
            self._loop.call_later(1.0, self._finish, None)
        else:
            self._finish(None)

    def abort(self, cause: BaseException | None = None) -> None:
        """Close at once; what is queued is dropped. On the loop's thread."""
        self._finish(cause)

    def close_in_child(self) -> None:
        """After a fork: let go of the descriptor without a word to the peer or the loop, which are the parent's."""
        self._closed = True
        self._queue.clear()
        if self._sock.fileno() >= 0:
            os.close(self._sock.detach())

    def _write_failed(self, error: BaseException) -> None:
        # What the other side said before it went may still be unread, and a goodbye makes all the difference.
        if not self._closed:
            self._readable()
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._finish(None if self._closing else error)

    def _finish(self, cause: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        # A thread in the middle of a write holds the lock; closing under it could write into another descriptor.
        with self._lock:
            self._queue.clear()
            self._sock.close()
        if self.on_closed is not None:
            self.on_closed(cause)

    def _call_on_loop(self, callback: Callable[..., None], *args: object) -> None:
        if threading.get_ident() == self._thread:
            self._loop.call_soon(callback, *args)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: so is this connection
                self._loop.call_soon_threadsafe(callback, *args)


def _rest(buffers: Sequence[Buffer], sent: int) -> list[Buffer]:
    """What remains of some buffers after `sent` bytes were written."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return []
