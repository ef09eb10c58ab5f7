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

import asyncio
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
from ..protocol.session import ACK_BYTES, Session
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


class FrameReader(FrameWriter):
    """See the module: the reading half of a connection, which begins and ends it (`connection`).

    on_frames: called on the loop with the frames that arrived; an error it raises closes the connection.
    takes: gives something if a waiter may have a PARCEL, as an answer. Any thread.
    on_stood: called with the frames that a thread which stands by has read; whether it takes them. They are for the
    loop otherwise, and nothing was done with them. An error it raises closes the connection.
    on_heard: called on the loop when it has read something, once for each time.
    on_open: with TLS, called once on the loop when the other side has shown its certificate; nothing may be sent before
    that. An error it raises closes the connection.
    bytes_received: from the socket. label: what it is called in the log.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        decoder: FrameDecoder,
        *,
        label: str,
        tls: TlsLayer | None = None,
    ) -> None:
        super().__init__(loop, sock, tls)
        self.label = label
        self.decoder = decoder
        self._source: FrameDecoder | Unsealer | TlsLayer = tls or decoder  # what takes the bytes that arrive
        self._turn = TURN_BYTES if tls is None else GUARDED_TURN_BYTES
        self._turn_frames = TURN_FRAMES
        self._portion = 0  # bytes that are read at once, 0 for all that there is room for
        self._unsealer: Unsealer | None = None
        self.on_frames: Callable[[list[Frame]], None] | None = None
        self.takes: Callable[[Frame], object] | None = None
        self.on_stood: Callable[[list[Frame]], bool] | None = None
        self.on_heard: Callable[[], None] | None = None
        self.on_open: Callable[[], None] | None = None
        self.bytes_received: int = 0
        self._paused = False
        self._reading = RLock()  # the loop may close the connection while it reads
        self._unread: deque[bytes] = deque()
        self._left_frames: list[Frame] = []
        self._left = False  # whether a thread has left something to the loop, there or in `tls`
        self._epoll: select.epoll | None = None  # what the loop watches, once a thread has read for itself
        self._sharing = False
        self._kept = False  # whether a thread has taken the socket out of that for a moment

    def unseal(self, key: bytes) -> None:
        """Take nothing without a seal from now on. On the loop's thread. ProtocolError if there is something yet."""
        if not self.decoder.empty:
            raise ProtocolError("something without a seal came behind the handshake")
        self._source = self._unsealer = Unsealer(Seal(key), self.decoder)
        self._turn = GUARDED_TURN_BYTES

    def _attend_to(self, tls: TlsLayer) -> None:
        """Send what TLS has to say, and tell when it is open. On the loop."""
        if tls.outgoing.pending and not self.queue:
            self.queue.wake_tls()
            self._flush()
        if tls.open and self.on_open is not None:
            on_open, self.on_open = self.on_open, None
            on_open()

    def _readable(self) -> None:
        # A waiter that reads tells us of what it leaves to us. A thread that stands by is done in microseconds; it
        # needs the interpreter for that, which a loop that is told again and again would take from it.
        if not self._reading.acquire(True, 0 if self.on_stood is None else _STANDS_BY):
            return
        taken = many = 0
        try:
            if self._unread or self._left:
                self._take_unread()
            tls = self.tls
            while not (self._closed or self._paused):
                decoder = self._source  # now: it changes with a seal
                buffer = decoder.get_buffer()
                if self._patient and decoder.filling:
                    count = self._sock.recv_into(buffer, min(len(buffer), TURN_BYTES), socket.MSG_WAITALL)
                else:
                    count = self._sock.recv_into(buffer, min(self._portion, len(buffer)), _DONT_WAIT)
                if count == 0:
                    raise ConnectionResetError(_ENDED)
                taken += count
                self.bytes_received += count  # now: whoever is told of an end below looks at it
                frames = decoder.received(count)
                many += len(frames)
                if len(frames) > TURN_FRAMES:
                    self._portion = PORTION_BYTES
                elif len(frames) < FEW_FRAMES:
                    self._portion = 0
                if tls is not None and (self.on_open is not None or tls.outgoing.pending):
                    self._attend_to(tls)
                if frames and self.lasting is not None:
                    frames = self._counted(frames, self.lasting)
                if frames and self.on_frames is not None:
                    self.on_frames(frames)
                if taken > self._turn or many > self._turn_frames or (count < len(buffer) and not decoder.filling):
                    return
        except (BlockingIOError, InterruptedError):
            pass
        except Exception as error:
            self._fail_for(error)
        finally:
            self._reading.release()
            if taken and self.on_heard is not None:
                self.on_heard()

    def _fail_for(self, error: Exception) -> None:
        """What has arrived could not be read, or not be handled."""
        if isinstance(error, (OSError, ProtocolError)):
            self._say_why(error)
        else:
            log_error(logger, logging.ERROR, error, "%s: a frame could not be handled", self.label)
        self._fail(error)

    def _say_why(self, error: Exception) -> None:
        """The last word to somebody whose bytes this side cannot take, if it can be said in their words."""
        if self.tls is not None:
            data = self.tls.last_words()
        else:
            data = b"".join(refusal(str(error))) if self.decoder.saw_tls else b""
        if data and not self._closed:
            with self._lock, contextlib.suppress(OSError):
                self._sock.send(data, _DONT_WAIT)

    def _take_unread(self) -> None:
        self._left = False
        if self._left_frames:
            frames, self._left_frames = self._left_frames, []
            self.hand_on(frames)
        if self.tls is not None:
            self.hand_on(self.tls.feed())
        while self._unread and not self._closed:
            data = self._unread.popleft()
            if not data:
                raise ConnectionResetError(_ENDED)
            self.bytes_received += len(data)
            self.hand_on(self._source.feed(data))

    def hand_on(self, frames: list[Frame]) -> None:
        """Hand out frames that have come over this connection. On the loop's thread."""
        if frames and self.lasting is not None:
            frames = self._counted(frames, self.lasting)
        if frames and self.on_frames is not None:
            self.on_frames(frames)

    def _counted(self, frames: list[Frame], session: Session) -> list[Frame]:
        """Frames that have come, to be handed on now: without those that are for the session. On the loop."""
        raise NotImplementedError  # only `LastingConnection` has a session

    def look(self) -> None:
        """Acknowledge what threads have read, which the loop does not count. On the loop."""
        raise NotImplementedError  # as above

    def read_here(self, enough: Callable[[], bool]) -> Sequence[Frame]:
        """Read in this thread until there are answers and nothing else, or until `enough()`: those answers.

        For a thread that has to wait for one anyway: two changes of threads less. None, and early, where the loop has
        to go on. Any thread but the loop's.
        """
        answers: list[Frame] = []
        epoll = self._epoll
        if epoll is None:
            self._ask_to_share()
            return answers
        if self._closed or is_owned(self._reading):
            return answers
        turn = SocketTurn(self._give_reading_back, 0, READ_HERE, self._unread)
        begin(turn)
        try:
            if not self._reading.acquire(False) or self._unread or self._closed or not self._source.empty:
                return answers
            if self._epoll is not epoll:  # it has no socket any more, or another one
                return answers
            list(map(epoll.modify, (self._fd,), map(turn.__getitem__, _NOTHING)))  # the loop sleeps on
            if self.queue.frames:
                self._write_here()  # rather than wait until the loop does
            self._read_answers(enough, turn, answers)
        except (TurnEnded, RuntimeError) as error:  # the latter for the lock of TLS, which was given back, too
            if not turn.has_raised(error):
                self._interrupted()
                raise
        except BaseException:
            self._interrupted()  # by a signal handler
            raise
        finally:
            self.read_on_loop()
            leave(turn)
        return answers

    def _give_reading_back(self) -> None:
        """This thread is about to block in the midst of reading: the loop goes on from there."""
        if self.tls is not None:
            release(self.tls.lock)
        self.read_on_loop()

    def _read_answers(self, enough: Callable[[], bool], turn: SocketTurn, answers: list[Frame]) -> None:
        """What is read stays in `_unread`, or decrypted in `tls`, until it is used or the loop takes it."""
        part = turn.__getitem__
        unread, receive, unsealer, tls = self._unread, self._sock.recv, self._unsealer, self.tls
        if tls is not None and is_owned(tls.lock):  # ours already: this is a signal handler's call
            return
        data = b""
        pieces = 0
        while not self._closed:
            try:
                # Into the deque by one call: no signal handler runs before the bytes are there.
                unread.extend(map(receive, map(part, _LENGTH), (_DONT_WAIT,)))
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
            if tls is not None:
                try:
                    clear = tls.look(unread, READ_HERE, turn)
                except (OSError, ProtocolError) as error:  # it is said once, so the loop would not hear of it
                    if isinstance(error, TimeoutError):  # but that is a signal handler's: TLS itself waits for nothing
                        raise
                    self._call_on_loop(self._broke, error, tls)
                    return
                size = len(arrived)
                self.bytes_received += size
            else:
                clear = data = data + arrived if data else arrived
                if unsealer is not None:
                    try:
                        clear, pieces, missing = unsealer.look(data)
                    except ProtocolError:  # the loop will see for itself
                        return
                    if missing:
                        if len(data) + missing > READ_HERE:
                            return
                        continue
            frames, length = whole_frames(clear)
            for frame in frames:
                if frame.kind not in _ANSWERS and not (frame.kind == PARCEL and self.takes and self.takes(frame)):
                    return
            if frames and length == len(clear):
                session = self.lasting
                # All of it at once, or, if the turn has ended, nothing: what the loop has is not counted here as well.
                steps: list[Callable[[], object]] = [partial(part, 0), partial(answers.extend, frames)]
                if session is not None:
                    steps.append(session.taking(len(frames)))
                if tls is not None:  # its bytes were counted as they came
                    steps.append(tls.taking())
                else:
                    steps += (unread.clear, partial(setattr, self, "bytes_received", self.bytes_received + len(data)))
                    if unsealer is not None:
                        steps.append(unsealer.taking(pieces))
                list(map(_RUN, steps))
                if session is not None and self.bytes_received - session.said_at >= ACK_BYTES:
                    self._call_on_loop(self.look)
                return
            if not len(clear) - length < least_length(clear, length) <= READ_HERE - length:
                return  # garbage, a long one

    def _broke(self, error: Exception, tls: TlsLayer | None = None) -> None:
        """A thread could not read on. tls: with which it has read."""
        if not self._closed and tls is self.tls:
            self._fail_for(error)

    def read_on_loop(self) -> None:
        """This thread reads no more here. Idempotent."""
        if is_owned(self._reading):
            if not self._closed and self._epoll is not None:
                self._epoll.modify(self._fd, select.EPOLLIN)
            release(self._reading)
        if self._unread or (self.tls is not None and self.tls.left):  # only now: the loop does not wait for us
            self._left = True
            self._call_on_loop(self._readable)

    @property
    def threads_may_read(self) -> bool:
        """Whether threads may stand by for it (`attach`): with TLS or a session, who reads may have to write."""
        return self.tls is None and self.lasting is None

    def attach(self, epoll: select.epoll) -> bool:
        """From now on a thread that waits at this epoll of its own is told of what comes, and says `read_once`; False
        if that cannot be, or not yet. The loop is told only while the thread does not wait. Any thread.

        No system call is needed for each change: of several epolls in which a socket is exclusively, Linux wakes the
        first one that is waited at, in the order in which they were added (EPOLLEXCLUSIVE).
        """
        if not self.threads_may_read:
            return False
        if self._epoll is None:
            self._ask_to_share()
            return False
        with self._reading:
            attached = not (self._closed or self._closing)
            if attached:
                epoll.register(self._fd, _EXCLUSIVE)
                self._look_again()
        if self._left:  # as in `read_once`
            self._call_on_loop(self._readable)
        return attached

    def _look_again(self) -> None:
        """Have the loop told of what is in the socket, and put it behind all threads. By whoever holds `_reading`."""
        assert self._epoll is not None, "else only the loop reads"
        try:
            if self._kept:
                self._kept = False
            else:
                self._epoll.unregister(self._fd)
            self._epoll.register(self._fd, _EXCLUSIVE)
        except OSError as error:  # the loop hears of nothing any more
            self._call_on_loop(self._broke, error)

    def keep_from_loop(self) -> bool:
        """The loop is told of nothing until `leave_to_loop` or `read_once`; False if that cannot be now.

        For a thread that has attached an epoll, and looks at it without sleeping: nobody else is to be woken meanwhile.
        """
        if not self._reading.acquire(False):
            return False
        try:
            if self._kept or self._left or self._closed or self._closing or self._epoll is None:
                return False
            self._epoll.unregister(self._fd)
            self._kept = True
            return True
        except OSError as error:  # it could not be given back before
            self._call_on_loop(self._broke, error)
            return False
        finally:
            self._reading.release()
            if self._left:  # as in `read_once`
                self._call_on_loop(self._readable)

    def leave_to_loop(self, patience: float = 0.0) -> None:
        """The loop is told again of what comes while the thread does not wait. Idempotent.

        patience: seconds to wait for whoever reads. After that the loop sees to it; no thread waits for its turn.
        """
        if self._kept:
            if not self._reading.acquire(True, patience):
                self._call_on_loop(self.leave_to_loop, _STANDS_BY)
                return
            try:
                if self._kept and not self._closed:
                    self._look_again()
            finally:
                self._reading.release()
            if self._left:  # as in `read_once`
                self._call_on_loop(self._readable)

    def read_once(self) -> None:
        """A thread, none in which signal handlers run, was told that there is something, and the loop was not."""
        if not self._reading.acquire(False):  # the loop has its turn, which may take a while
            self._left = True
            self._call_on_loop(self._readable)
            return
        try:
            if not self._closed and (self._left or self._closing or self._paused or not self._read_all()):
                self._look_again()
        except (BlockingIOError, InterruptedError):
            pass
        except Exception as error:
            self._call_on_loop(self._broke, error)
        finally:
            self._reading.release()
            if self._left:  # by whomever: the loop does not wait for the lock, and may have come in vain
                self._call_on_loop(self._readable)

    def _read_all(self) -> bool:
        """Read one socketful for whoever stands by; False if there may be more, or this is the end."""
        decoder = self._source
        buffer = decoder.get_buffer()
        count = self._sock.recv_into(buffer, 0, _DONT_WAIT)
        if not count:
            return False
        self.bytes_received += count
        all_ = count < len(buffer)
        frames = decoder.received(count)
        if frames and (self.on_stood is None or not self.on_stood(frames)):
            self._left_frames += frames
            self._left = True
        return all_

    def _ask_to_share(self) -> None:
        if not self._sharing:
            self._sharing = True
            self._call_on_loop(self._share_reading)

    def _share_reading(self) -> None:
        """From now on waiters can read while the loop sleeps: it watches the socket through an epoll of ours."""
        if self._closed or self._closing or self._epoll is not None:  # two threads may have asked for it
            return
        try:
            epoll = select.epoll()
            epoll.register(self._fd, select.EPOLLIN)
        except OSError:  # there are no more descriptors: the loop reads on, and the next waiter asks again
            self._sharing = False
            return
        self._loop.remove_reader(self._fd)
        if not self._paused:
            self._loop.add_reader(epoll.fileno(), self._readable)
        self._epoll = epoll

    def _fail(self, error: BaseException) -> None:
        raise NotImplementedError  # `Connection` ends
