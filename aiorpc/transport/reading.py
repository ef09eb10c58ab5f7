"""What arrives over a stream socket: read on the loop, or by a thread that waits for it.

    who         when                             what it does with it
    the loop    the socket has something         all of it: `on_frames`
    a waiter    the loop's turn is over, and     answers of calls, and what may come with them, if there is nothing
                nothing is half read             else; else it stores the bytes as they are for the loop, and has read
    a stander   the socket has something         one socketful: calls that are for threads (`on_stood`); other frames
                while it waits at its own epoll  it stores as they are for the loop

Invariants
1. All registrations with the loop happen on the loop's thread. Whoever reads holds `_reading`.
2. What a waiter has read and not used is in `_unread`, which the loop takes before it reads: no byte is lost, none
   overtakes another, even if a signal handler raises in the waiter (between any two instructions of the main thread).
   What a stander has read and not used is in `_left_frames`, for the same end; no signal handler runs in its thread.
3. Each byte that comes wakes somebody who reads it or has the loop told of it: the loop is told of what comes while no
   thread waits, and `_look_again` tells it of what a thread has been told of and left in the socket.
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

# Most that is read before other connections get a turn, in bytes. What has to be decrypted takes
# the loop's thread about four times as long, what is compared with its seal up to twice.
TURN_BYTES = 4 * 1024 * 1024
GUARDED_TURN_BYTES = 1024 * 1024
# Of messages without arguments a hundred thousand are no more bytes than that, and each of them takes its time.
TURN_FRAMES = 500
# Where one read has brought more than that, the next ones ask for so many bytes each, until they bring few messages.
PORTION_BYTES, FEW_FRAMES = 16 * 1024, 32
# A waiter reads so many bytes at most; an answer that is longer is the loop's.
READ_HERE = 128 * 1024
_DONT_WAIT = int(socket.MSG_DONTWAIT)
# Threads are told before the loop is, and one at a time.
_EXCLUSIVE = select.EPOLLIN | select.EPOLLEXCLUSIVE
_ANSWERS = (REPLY, ERROR, RELEASE)  # what comes with an answer among them
# Seconds that the loop waits at most for a thread that has read something and hands it out.
_STANDS_BY = 0.001
_ENDED = "the other side closed the connection"
# What a turn of a waiter has: for what the loop is told, how much to read, and where that is kept (`TlsLayer.look`).
_NOTHING, _LENGTH = (0,), (1,)
_RUN: Callable[[Callable[[], object]], object] = call  # as mypy understands it


class FrameReader:
    """See the module. decoder: of what comes. label: what the connection is called in the log.

    epoll: what the loop watches, once a thread has read for itself. reading: held by the thread that reads. source:
    what takes the bytes that come. unread, left: what a thread has left to the loop, and whether it has left anything
    there, in `left_frames` or in TLS.
    """

    def __init__(self, port: Port, writer: FrameWriter, decoder: FrameDecoder, label: str) -> None:
        self.label = label
        self.decoder = decoder
        self.source: FrameDecoder | Unsealer | TlsLayer = port.tls or decoder
        self.unsealer: Unsealer | None = None
        self.turn: int = TURN_BYTES if port.tls is None else GUARDED_TURN_BYTES  # bytes of one turn
        self.turn_frames: int = TURN_FRAMES
        self.reading: RLock = RLock()  # the loop may close the connection while it reads
        self.unread: deque[bytes] = deque()
        self.left = False
        self.left_frames: list[Frame] = []
        self.epoll: select.epoll | None = None
        self._port = port
        self._writer = writer
        self._portion = 0  # bytes that are read at once, 0 for all that there is room for
        self.sharing = False
        self._kept = False  # whether a thread has taken the socket out of the epoll for a moment

    def unseal(self, key: bytes) -> None:
        """Take nothing without a seal from now on. On the loop's thread. ProtocolError if there is something yet."""
        if not self.decoder.empty:
            raise ProtocolError("something without a seal came behind the handshake")
        self.source = self.unsealer = Unsealer(Seal(key), self.decoder)
        self.turn = GUARDED_TURN_BYTES

    def attend_to(self, tls: TlsLayer) -> None:
        """Send what TLS has to say, and tell when it is open. On the loop."""
        if tls.outgoing.pending and not self._writer.queue:
            self._writer.queue.wake_tls()
            self._writer.flush()
        if tls.open and self._port.on_open is not None:
            on_open, self._port.on_open = self._port.on_open, None
            on_open()

    def readable(self) -> None:
        """Read what has come, as much as one turn of the loop takes. On the loop."""
        # A waiter that reads tells us of what it leaves to us. A thread that stands by is done in microseconds; it
        # needs the interpreter for that, which a loop that is told again and again would take from it.
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
        """Read until the socket is empty, or others get a turn. Raises what the socket or the decoder raises."""
        port, tls = self._port, self._port.tls
        taken = many = 0
        while not (port.closed or port.paused):
            decoder = self.source  # now: it changes with a seal
            buffer = decoder.get_buffer()
            if port.patient and decoder.filling:
                count = port.sock.recv_into(buffer, min(len(buffer), TURN_BYTES), socket.MSG_WAITALL)
            else:
                count = port.sock.recv_into(buffer, min(self._portion, len(buffer)), _DONT_WAIT)
            if count == 0:
                raise ConnectionResetError(_ENDED)
            taken += count
            port.bytes_received += count  # now: what is told of an end below looks at it
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
        """The last word to somebody whose bytes this side cannot take, if it can be said in their words."""
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
        """Read in this thread until there are answers and nothing else, or until `enough()`: those answers.

        For a thread that has to wait for one anyway: two changes of threads less. None, and early, where the loop has
        to go on. Any thread but the loop's.
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
            if self.epoll is not epoll:  # it has no socket any more, or another one
                return answers
            list(map(epoll.modify, (self._port.fd,), map(turn.__getitem__, _NOTHING)))  # the loop sleeps on
            if self._writer.queue.frames:
                self._writer.write_here()  # rather than wait until the loop does
            self._read_answers(enough, turn, answers)
        except (TurnEnded, RuntimeError) as error:  # the latter for the lock of TLS, which was given back, too
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
        """This thread is about to block in the midst of reading: the loop goes on from there."""
        if self._port.tls is not None:
            release(self._port.tls.lock)
        self.read_on_loop()

    def _read_answers(self, enough: Callable[[], bool], turn: SocketTurn, answers: list[Frame]) -> None:
        """What is read stays in `unread`, or decrypted in `tls`, until it is used or the loop takes it."""
        unread, receive, tls = self.unread, self._port.sock.recv, self._port.tls
        if tls is not None and is_owned(tls.lock):  # ours already: this is a signal handler's call
            return
        data = b""
        while not self._port.closed:
            try:
                # Into the deque by one call: no signal handler runs before the bytes are there.
                unread.extend(map(receive, map(turn.__getitem__, _LENGTH), (_DONT_WAIT,)))
            except (BlockingIOError, InterruptedError):
                if enough():
                    return
                pause()
                continue
            except OSError as error:
                if error.errno is None:  # no word of the system's: a signal handler has raised it
                    raise
                return  # the loop will see for itself
            # At once: where the turn has ended the loop may have taken it.
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
                return  # garbage, a long one

    def _is_answer(self, frame: Frame) -> bool:
        """Whether a waiter may have it."""
        takes = self._port.takes
        return frame.kind in _ANSWERS or (frame.kind == PARCEL and takes is not None and bool(takes(frame)))

    def _look_through(self, data: bytes, arrived: int, turn: SocketTurn) -> tuple[bytes | None, int]:
        """What a waiter has read, without seals or decrypted, and of how many pieces; None: the loop goes on.

        data: all that it has read, of which the last `arrived` bytes are new. Nothing is taken by that.
        """
        tls = self._port.tls
        if tls is not None:
            try:
                clear = tls.look(self.unread, READ_HERE, turn)
            except (OSError, ProtocolError) as error:  # it is said once, so the loop would not hear of it
                if isinstance(error, TimeoutError):  # but that is a signal handler's: TLS itself waits for nothing
                    raise
                self._port.call_on_loop(self._broke, error, tls)
                return None, 0
            self._port.bytes_received += arrived
            return clear, 0
        if self.unsealer is None:
            return data, 0
        try:
            clear, pieces, missing = self.unsealer.look(data)
        except ProtocolError:  # the loop will see for itself
            return None, 0
        if missing:
            return (None if len(data) + missing > READ_HERE else b""), 0
        return clear, pieces

    def _take(self, frames: list[Frame], size: int, pieces: int, turn: SocketTurn, answers: list[Frame]) -> None:
        """These are the waiter's: all of it at once, or, if the turn has ended, nothing, as the loop has them then.

        size: bytes that were read for them. pieces: with seals, how many these were.
        """
        port, session = self._port, self._port.session
        steps: list[Callable[[], object]] = [partial(turn.__getitem__, 0), partial(answers.extend, frames)]
        if session is not None:
            steps.append(session.taking(len(frames)))
        if port.tls is not None:  # its bytes were counted when they came
            steps.append(port.tls.taking())
        else:
            steps += (self.unread.clear, partial(setattr, port, "bytes_received", port.bytes_received + size))
            if self.unsealer is not None:
                steps.append(self.unsealer.taking(pieces))
        list(map(_RUN, steps))
        if session is not None and port.bytes_received - session.said_at >= ACK_BYTES and port.owner is not None:
            port.call_on_loop(port.owner.look)

    def _broke(self, error: Exception, tls: TlsLayer | None = None) -> None:
        """A thread could not read on. tls: with which it has read."""
        if not self._port.closed and tls is self._port.tls:
            self._fail_for(error)

    def read_on_loop(self) -> None:
        """This thread reads no more here. Idempotent."""
        if is_owned(self.reading):
            if not self._port.closed and self.epoll is not None:
                self.epoll.modify(self._port.fd, select.EPOLLIN)
            release(self.reading)
        if self.unread or (
            self._port.tls is not None and self._port.tls.left
        ):  # only now: the loop does not wait for us
            self.left = True
            self._port.call_on_loop(self.readable)

    @property
    def threads_may_read(self) -> bool:
        """Whether threads may stand by for it (`attach`): with TLS or a session, who reads may have to write."""
        return self._port.tls is None and self._port.session is None

    def attach(self, epoll: select.epoll) -> bool:
        """From now on a thread that waits at this epoll of its own is told of what comes, and says `read_once`; False
        if that cannot be, or not yet. The loop is told only while the thread does not wait. Any thread.

        No system call is needed for each change: of several epolls in which a socket is exclusively, Linux wakes the
        first one that is waited at, in the order in which they were added (EPOLLEXCLUSIVE).
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
        """Have the loop told of what is in the socket, and put it behind all threads. By whoever holds `_reading`."""
        assert self.epoll is not None, "else only the loop reads"
        try:
            if self._kept:
                self._kept = False
            else:
                self.epoll.unregister(self._port.fd)
            self.epoll.register(self._port.fd, _EXCLUSIVE)
        except OSError as error:  # the loop hears of nothing any more
            self._port.call_on_loop(self._broke, error)

    def keep_from_loop(self) -> bool:
        """The loop is told of nothing until `leave_to_loop` or `read_once`; False if that cannot be now.

        For a thread that has attached an epoll, and looks at it without sleeping: nobody else is to be woken meanwhile.
        """
        if not self.reading.acquire(False):
            return False
        try:
            if self._kept or self.left or self._port.closed or self._port.closing or self.epoll is None:
                return False
            self.epoll.unregister(self._port.fd)
            self._kept = True
            return True
        except OSError as error:  # it could not be given back before
            self._port.call_on_loop(self._broke, error)
            return False
        finally:
            self.reading.release()
            if self.left:  # as in `read_once`
                self._port.call_on_loop(self.readable)

    def leave_to_loop(self, patience: float = 0.0) -> None:
        """The loop is told again of what comes while the thread does not wait. Idempotent.

        patience: seconds to wait for whoever reads. After that the loop sees to it; no thread waits for its turn.
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
        """A thread, none in which signal handlers run, was told that there is something, and the loop was not."""
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
            if self.left:  # by whomever: the loop does not wait for the lock, and may have come in vain
                self._port.call_on_loop(self.readable)

    def _read_all(self) -> bool:
        """Read one socketful for whoever stands by; False if there may be more, or this is the end."""
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
        """From now on waiters can read while the loop sleeps: it watches the socket through an epoll of ours."""
        if self._port.closed or self._port.closing or self.epoll is not None:  # two threads may have asked for it
            return
        if self._port.fd < 0:
            self.sharing = False
            return
        try:
            epoll = select.epoll()
            epoll.register(self._port.fd, select.EPOLLIN)
        except OSError:  # there are no more descriptors: the loop reads on, and the next waiter asks again
            self.sharing = False
            return
        self._port.loop.remove_reader(self._port.fd)
        if not self._port.paused:
            self._port.loop.add_reader(epoll.fileno(), self.readable)
        self.epoll = epoll

    def go_on(self, other: FrameReader) -> None:
        """Take what comes over the socket of another reader from now on, as that did. By the holder of `reading`."""
        self.epoll, self.sharing = None, False
        self.decoder, self.source, self.unsealer, self.turn = other.decoder, other.source, other.unsealer, other.turn

    def forget_socket(self) -> None:
        """Have the loop look at the socket no more."""
        if self._port.fd >= 0:
            self._port.loop.remove_reader(self.looked_at())
            self._port.loop.remove_writer(self._port.fd)

    def looked_at(self) -> int:
        """The descriptor by which the loop is told of what comes."""
        return self._port.fd if self.epoll is None else self.epoll.fileno()
