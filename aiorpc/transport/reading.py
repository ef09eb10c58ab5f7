"""What arrives over a stream socket: read on the loop, or by a thread that waits for it.

    reader      when                             what it does with it
    the loop    the socket has something         all of it: `on_frames`
    a waiter    the loop's turn is over, and     takes answers of calls, and what may come with them, if nothing more
                nothing is half read             has come; otherwise it stores the bytes for the loop, and has read
    a stander   the socket has something         reads one socketful, takes calls that are for threads (`on_stood`), and
                while it waits at its own epoll  stores other frames for the loop

Invariants
1. All registrations with the loop happen on the loop's thread. The reader holds `reading`.
2. What a waiter has read and not used is in `unread`, which the loop takes before it reads: no byte is lost, none
   overtakes another, even if a signal handler raises in the waiter (between any two instructions of the main thread).
   What a stander has read and not used is in `left_frames`, for the same purpose; no signal handler runs in its thread.
3. Each byte that comes wakes a reader or the loop: the loop is woken for what comes while no thread waits, and
   `_look_again` wakes it for what a thread was woken for and has left in the socket.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call

from ..errors import ProtocolError
from ..foreign import log_error
from ..interrupts import SocketTurn, TurnEnded, begin, leave, pause
from ..locks import RLock, is_owned, release
from ..logs import logger
from ..protocol.frames import ERROR, PARCEL, RELEASE, REPLY, Frame, FrameDecoder, least_length, whole_frames
from ..protocol.handshake import refusal
from ..protocol.seal import Seal, Unsealer
from ..protocol.session import ACK_BYTES
from .port import Port
from .tls import TlsLayer
from .writing import FrameWriter

# Bytes that are read before other connections get a turn, at most. Decrypting takes the loop's thread about four times
# as long as reading, comparing MACs up to twice.
TURN_BYTES = 4 * 1024 * 1024
GUARDED_TURN_BYTES = 1024 * 1024
# Frames of a turn, at most: a hundred thousand messages without arguments are fewer bytes than that, but take longer.
TURN_FRAMES = 500
# After a read with more frames than that, the next ones ask for so many bytes each, until they bring few messages.
PORTION_BYTES, FEW_FRAMES = 16 * 1024, 32
# A waiter reads so many bytes at most; the loop reads a longer answer.
READ_HERE = 128 * 1024
_DONT_WAIT = int(socket.MSG_DONTWAIT)
# Threads are woken before the loop, and one at a time.
_EXCLUSIVE = select.EPOLLIN | select.EPOLLEXCLUSIVE
_ANSWERS = (REPLY, ERROR, RELEASE)  # the messages that a waiter may take
# Seconds that the loop waits at most for a thread that is handing out frames.
_STANDS_BY = 0.001
_ENDED = "the other side closed the connection"
# Items of a waiter's turn: the epoll's events meanwhile, the bytes to read, and where these are kept (`TlsLayer.look`).
_NOTHING, _LENGTH = (0,), (1,)
_RUN: Callable[[Callable[[], object]], object] = call  # typed for mypy


class FrameReader:
    """See the module. decoder: decodes what comes. label: the connection's name in the log.

    epoll: watched by the loop instead of the socket once a thread has read here. reading: held by the thread that
    reads. source: takes the bytes that come. unread, left: what a thread has left to the loop, and whether it has left
    anything there, in `left_frames` or in TLS.
    """

    def __init__(self, port: Port, writer: FrameWriter, decoder: FrameDecoder, label: str) -> None:
        self.label = label
        self.decoder: FrameDecoder = decoder
        self.source: FrameDecoder | Unsealer | TlsLayer = port.tls or decoder
        self.unsealer: Unsealer | None = None
        self.turn: int = TURN_BYTES if port.tls is None else GUARDED_TURN_BYTES  # bytes of one turn
        self.turn_frames: int = TURN_FRAMES
        self.reading: RLock = RLock()  # the loop may close the connection while it reads
        self.unread: deque[bytes] = deque()
        self.left: bool = False
        self.left_frames: list[Frame] = []
        self.epoll: select.epoll | None = None
        self._port = port
        self._writer = writer
        self._portion = 0  # bytes of one read; 0: as many as there is room for
        self.sharing: bool = False
        self._kept = False  # whether a thread has taken the socket out of the epoll for a while

    def unseal(self, key: bytes) -> None:
        """Accept only bytes with a MAC from now on. On the loop's thread. ProtocolError if others have come already."""
        if not self.decoder.empty:
            raise ProtocolError("bytes without a seal came after the handshake")
        self.source = self.unsealer = Unsealer(Seal(key), self.decoder)
        self.turn = GUARDED_TURN_BYTES

    def attend_to(self, tls: TlsLayer) -> None:
        """Send what TLS itself has to send, and report when it is open. On the loop."""
        if tls.outgoing.pending and not self._writer.queue:
            self._writer.queue.wake_tls()
            self._writer.flush()
        if tls.open and self._port.on_open is not None:
            on_open, self._port.on_open = self._port.on_open, None
            on_open()

    def readable(self) -> None:
        """Read what has come, as much as one turn of the loop takes. On the loop."""
        # A waiter that reads calls us for what it leaves. A stander is done in microseconds, for which it needs the
        # interpreter: waiting here is better than being woken again and again.
        port = self._port
        if not self.reading.acquire(True, 0 if port.on_stood is None else _STANDS_BY):
            return
        before = port.bytes_received
        try:
            if self.unread or self.left:
                self._take_unread()
            self._read_turn()
        except Exception as error:
            self._fail_for(error)
        finally:
            self.reading.release()
            if port.bytes_received != before and port.on_heard is not None:
                port.on_heard()

    def _read_turn(self) -> None:
        """Read until the socket is empty, or others get a turn. Raises the errors of the socket and the decoder."""
        port, tls = self._port, self._port.tls
        taken = many = 0
        while not (port.closed or port.paused):
            decoder = self.source  # read each time: it changes with the first MAC
            buffer = decoder.get_buffer()
            if port.patient and decoder.filling:
                count = port.sock.recv_into(buffer, min(len(buffer), TURN_BYTES), socket.MSG_WAITALL)
            else:
                count = port.sock.recv_into(buffer, min(self._portion, len(buffer)), _DONT_WAIT)
            if count == 0:
                raise ConnectionResetError(_ENDED)
            taken += count
            port.bytes_received += count  # first: `write_failed` looks at it
            frames = decoder.received(count)
            many += len(frames)
            self._portion = PORTION_BYTES if len(frames) > TURN_FRAMES else self._portion
            self._portion = 0 if len(frames) < FEW_FRAMES else self._portion
            if tls is not None and (port.on_open is not None or tls.outgoing.pending):
                self.attend_to(tls)
            self.hand_on(frames)
            if taken > self.turn or many > self.turn_frames or (count < len(buffer) and not decoder.filling):
                return

    def _fail_for(self, error: Exception) -> None:
        """There is nothing (more) to read, or what has arrived could not be read, or not be handled."""
        if isinstance(error, (BlockingIOError, InterruptedError)):
            return
        if isinstance(error, (OSError, ProtocolError)):
            self._say_why(error)
        else:
            log_error(logger, logging.ERROR, error, "%s: a frame could not be handled", self.label)
        if self._port.owner is not None:
            self._port.owner.fail(error)

    def _say_why(self, error: Exception) -> None:
        """Tell the reason to a peer whose bytes cannot be read, in its own protocol if possible."""
        if self._port.tls is not None:
            data = self._port.tls.last_words()
        else:
            data = b"".join(refusal(str(error))) if self.decoder.saw_tls else b""
        if data and not self._port.closed:
            with self._writer.lock, contextlib.suppress(OSError):
                self._port.sock.send(data, _DONT_WAIT)

    def _take_unread(self) -> None:
        self.left = False
        if self.left_frames:
            frames, self.left_frames = self.left_frames, []
            self.hand_on(frames)
        if self._port.tls is not None:
            self.hand_on(self._port.tls.feed())
        while self.unread and not self._port.closed:
            data = self.unread.popleft()
            if not data:
                raise ConnectionResetError(_ENDED)
            self._port.bytes_received += len(data)
            self.hand_on(self.source.feed(data))

    def hand_on(self, frames: list[Frame]) -> None:
        """Hand out frames that have come over this connection. On the loop's thread."""
        port = self._port
        if frames and port.session is not None and port.owner is not None:
            frames = port.owner.counted(frames, port.session)
        if frames and port.on_frames is not None:
            port.on_frames(frames)

    def read_here(self, enough: Callable[[], bool]) -> Sequence[Frame]:
        """Read in this thread until there are answers and nothing more, or until `enough()`; returns these answers.

        For a thread that has to wait for an answer: two thread switches less. Returns none, and early, if the loop has
        to go on. Any thread except the loop's.
        """
        answers: list[Frame] = []
        epoll = self.epoll
        if epoll is None:
            self._ask_to_share()
            return answers
        if self._port.closed or is_owned(self.reading):
            return answers
        turn = SocketTurn(self._give_reading_back, 0, READ_HERE, self.unread)
        begin(turn)
        try:
            if not self.reading.acquire(False) or self.unread or self._port.closed or not self.source.empty:
                return answers
            if self.epoll is not epoll:  # it is suspended, or has another socket
                return answers
            list(map(epoll.modify, (self._port.fd,), map(turn.__getitem__, _NOTHING)))  # do not wake the loop
            if self._writer.queue.frames:
                self._writer.write_here()  # do not wait for the loop to write
            self._read_answers(enough, turn, answers)
        except (TurnEnded, RuntimeError) as error:  # RuntimeError: the lock of TLS was given back with the turn
            if not turn.has_raised(error):
                self._writer.interrupted()
                raise
        except BaseException:
            self._writer.interrupted()  # by a signal handler
            raise
        finally:
            self.read_on_loop()
            leave(turn)
        return answers

    def _give_reading_back(self) -> None:
        """This thread will block in the middle of reading: the loop goes on from there."""
        if self._port.tls is not None:
            release(self._port.tls.lock)
        self.read_on_loop()

    def _read_answers(self, enough: Callable[[], bool], turn: SocketTurn, answers: list[Frame]) -> None:
        """What is read stays in `unread`, or decrypted in `tls`, until the waiter or the loop uses it."""
        unread, receive, tls = self.unread, self._port.sock.recv, self._port.tls
        if tls is not None and is_owned(tls.lock):  # held by this thread already: a signal handler makes this call
            return
        data = b""
        while not self._port.closed:
            try:
                # By one call of C into the deque: no signal handler runs before the bytes are there.
                unread.extend(map(receive, map(turn.__getitem__, _LENGTH), (_DONT_WAIT,)))
            except (BlockingIOError, InterruptedError):
                if enough():
                    return
                pause()
                continue
            except OSError as error:
                if error.errno is None:  # not from the system: a signal handler has raised it
                    raise
                return  # the loop will get the same error
            # Right away: if the turn has ended the loop may have taken it.
            arrived = unread[-1]
            if not arrived:  # the end
                return
            data += arrived
            clear, pieces = self._look_through(data, len(arrived), turn)
            if clear is None:
                return
            frames, length = whole_frames(clear)
            if not all(map(self._is_answer, frames)):
                return
            if frames and length == len(clear):
                self._take(frames, len(data), pieces, turn, answers)
                return
            missing = least_length(clear, length) if clear else 0
            if clear and not len(clear) - length < missing <= READ_HERE - length:
                return  # garbage, or a long frame

    def _is_answer(self, frame: Frame) -> bool:
        """Whether a waiter may take it."""
        takes = self._port.takes
        return frame.kind in _ANSWERS or (frame.kind == PARCEL and takes is not None and bool(takes(frame)))

    def _look_through(self, data: bytes, arrived: int, turn: SocketTurn) -> tuple[bytes | None, int]:
        """What a waiter has read, without MACs or decrypted, and of how many pieces; None: the loop goes on.

        data: all that it has read, of which the last `arrived` bytes are new. This takes nothing.
        """
        tls = self._port.tls
        if tls is not None:
            try:
                clear = tls.look(self.unread, READ_HERE, turn)
            except (OSError, ProtocolError) as error:  # TLS raises it once: pass it to the loop
                if isinstance(error, TimeoutError):  # from a signal handler: TLS itself waits for nothing
                    raise
                self._port.call_on_loop(self._broke, error, tls)
                return None, 0
            self._port.bytes_received += arrived
            return clear, 0
        if self.unsealer is None:
            return data, 0
        try:
            clear, pieces, missing = self.unsealer.look(data)
        except ProtocolError:  # the loop will get the same error
            return None, 0
        if missing:
            return (None if len(data) + missing > READ_HERE else b""), 0
        return clear, pieces

    def _take(self, frames: list[Frame], size: int, pieces: int, turn: SocketTurn, answers: list[Frame]) -> None:
        """The waiter takes these frames: all of them in one step, or none if the turn has ended and the loop has them.

        size: bytes that were read for them. pieces: with MACs, how many these were.
        """
        port, session = self._port, self._port.session
        steps: list[Callable[[], object]] = [partial(turn.__getitem__, 0), partial(answers.extend, frames)]
        if session is not None:
            steps.append(session.taking(len(frames)))
        if port.tls is not None:  # its bytes were counted when they were read
            steps.append(port.tls.taking())
        else:
            steps += (self.unread.clear, partial(setattr, port, "bytes_received", port.bytes_received + size))
            if self.unsealer is not None:
                steps.append(self.unsealer.taking(pieces))
        list(map(_RUN, steps))
        if session is not None and port.bytes_received - session.said_at >= ACK_BYTES and port.owner is not None:
            port.call_on_loop(port.owner.look)

    def _broke(self, error: Exception, tls: TlsLayer | None = None) -> None:
        """A thread could not read on. tls: the layer that it read with."""
        if not self._port.closed and tls is self._port.tls:
            self._fail_for(error)

    def read_on_loop(self) -> None:
        """This thread stops reading here. Idempotent."""
        if is_owned(self.reading):
            if not self._port.closed and self.epoll is not None:
                self.epoll.modify(self._port.fd, select.EPOLLIN)
            release(self.reading)
        if self.unread or (
            self._port.tls is not None and self._port.tls.left
        ):  # after the release: the loop does not wait for it
            self.left = True
            self._port.call_on_loop(self.readable)

    @property
    def threads_may_read(self) -> bool:
        """Whether threads may stand by for it (`attach`). Not with TLS or a session: their reader may have to write."""
        return self._port.tls is None and self._port.session is None

    def attach(self, epoll: select.epoll) -> bool:
        """From now on a thread that waits at this epoll of its own is woken for what comes, and calls `read_once`. The
        loop is woken only while the thread does not wait. False if that is impossible, or not possible yet. Any thread.

        Standing by costs no system call: of several epolls with the same socket under EPOLLEXCLUSIVE, Linux wakes the
        first that is waited at, in the order in which they were added.
        """
        if not self.threads_may_read:
            return False
        if self.epoll is None:
            self._ask_to_share()
            return False
        with self.reading:
            attached = not (self._port.closed or self._port.closing)
            if attached:
                epoll.register(self._port.fd, _EXCLUSIVE)
                self._look_again()
        if self.left:  # as in `read_once`
            self._port.call_on_loop(self.readable)
        return attached

    def _look_again(self) -> None:
        """Wake the loop for what is in the socket, and put it behind all threads. By the holder of `reading`."""
        assert self.epoll is not None, "without an epoll only the loop reads"
        try:
            if self._kept:
                self._kept = False
            else:
                self.epoll.unregister(self._port.fd)
            self.epoll.register(self._port.fd, _EXCLUSIVE)
        except OSError as error:  # the loop would not be woken any more
            self._port.call_on_loop(self._broke, error)

    def keep_from_loop(self) -> bool:
        """The loop is not woken until `leave_to_loop` or `read_once`; False if that is not possible now.

        For a thread that has attached an epoll, and polls it without sleeping: nothing needs to be woken meanwhile.
        """
        if not self.reading.acquire(False):
            return False
        try:
            if self._kept or self.left or self._port.closed or self._port.closing or self.epoll is None:
                return False
            self.epoll.unregister(self._port.fd)
            self._kept = True
            return True
        except OSError as error:  # `_look_again` failed before
            self._port.call_on_loop(self._broke, error)
            return False
        finally:
            self.reading.release()
            if self.left:  # as in `read_once`
                self._port.call_on_loop(self.readable)

    def leave_to_loop(self, patience: float = 0.0) -> None:
        """The loop is woken again for what comes while the thread does not wait. Idempotent.

        patience: seconds to wait for the current reader. After that the loop does it; no thread waits for its turn.
        """
        if self._kept:
            if not self.reading.acquire(True, patience):
                self._port.call_on_loop(self.leave_to_loop, _STANDS_BY)
                return
            try:
                if self._kept and not self._port.closed:
                    self._look_again()
            finally:
                self.reading.release()
            if self.left:  # as in `read_once`
                self._port.call_on_loop(self.readable)

    def read_once(self) -> None:
        """Called by a thread without signal handlers that was woken for the socket in place of the loop."""
        if not self.reading.acquire(False):  # the loop has its turn, which may take a while
            self.left = True
            self._port.call_on_loop(self.readable)
            return
        try:
            if not self._port.closed and (self.left or self._port.closing or self._port.paused or not self._read_all()):
                self._look_again()
        except (BlockingIOError, InterruptedError):
            pass
        except Exception as error:
            self._port.call_on_loop(self._broke, error)
        finally:
            self.reading.release()
            if self.left:  # by any thread: the loop may have tried the lock in vain
                self._port.call_on_loop(self.readable)

    def _read_all(self) -> bool:
        """Read one socketful for a stander; False if there may be more, or this is the end."""
        decoder = self.source
        buffer = decoder.get_buffer()
        count = self._port.sock.recv_into(buffer, 0, _DONT_WAIT)
        if not count:
            return False
        self._port.bytes_received += count
        all_ = count < len(buffer)
        frames = decoder.received(count)
        if frames and (self._port.on_stood is None or not self._port.on_stood(frames)):
            self.left_frames += frames
            self.left = True
        return all_

    def _ask_to_share(self) -> None:
        if not self.sharing:
            self.sharing = True
            self._port.call_on_loop(self.share_reading)

    def share_reading(self) -> None:
        """From now on waiters can read while the loop sleeps: the loop watches the socket through an epoll of ours."""
        if self._port.closed or self._port.closing or self.epoll is not None:  # two threads may have asked for it
            return
        if self._port.fd < 0:
            self.sharing = False
            return
        try:
            epoll = select.epoll()
            epoll.register(self._port.fd, select.EPOLLIN)
        except OSError:  # there are no more descriptors: the loop reads, and the next waiter asks again
            self.sharing = False
            return
        self._port.loop.remove_reader(self._port.fd)
        if not self._port.paused:
            self._port.loop.add_reader(epoll.fileno(), self.readable)
        self.epoll = epoll

    def go_on(self, other: FrameReader) -> None:
        """Take over the socket of another reader, with its decoder and guards. By the holder of `reading`."""
        self.epoll, self.sharing = None, False
        self.decoder, self.source, self.unsealer, self.turn = other.decoder, other.source, other.unsealer, other.turn

    def forget_socket(self) -> None:
        """Stop the loop from watching the socket."""
        if self._port.fd >= 0:
            self._port.loop.remove_reader(self.looked_at())
            self._port.loop.remove_writer(self._port.fd)

    def looked_at(self) -> int:
        """The descriptor that the loop watches."""
        return self._port.fd if self.epoll is None else self.epoll.fileno()
