"""Frames on their way into a socket, and how far they have got.

    frames      appended by any thread, not begun
    begun       handed to the socket, in part or as a whole; one writer at a time
    sent        bytes of the begun frames that each system call took

Invariants
1. What is still to be written is `begun` without its first `sum(sent)` bytes, and then `frames`.
2. Frames go from `frames` to `begun` by one call of C, and so does what a system call took into `sent`: if a signal
   handler raises, between any two instructions of a writer on the main thread, no frame is broken or lost.
3. With MACs (protocol/seal.py), `begun` holds the pieces that are being written; frames leave `frames` with the piece
   that has their last byte. One call of C does that, and notes the number and where the next piece begins.
   With TLS (tls.py) several pieces are encrypted before they are written: `_announced` lists beforehand what will be in
   each, and is cleared when the frames were taken. After an interruption the next writer sees by `begun`, and by the
   bytes that wait in TLS, how many of them were made; it makes the others again.
4. With a session (protocol/session.py) a frame is in one of `frames`, `begun` and `Session.kept`, whatever is raised.
   It goes to `kept` when it was completely written; with pieces, when its last byte is in one.
5. A writer whose turn has ended (interrupts.py) changes nothing that others see: after `end_turn` they go on with
   copies of `begun`, `sent` and `_announced`, and every other step fails without the turn.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from itertools import chain, repeat
from operator import call, is_not, itemgetter
from typing import Any

from ..interrupts import SocketTurn, TurnEnded
from ..locks import RLock
from ..protocol.frames import ACK, HEAD, Buffer
from ..protocol.seal import MAX_PAYLOAD, Seal
from ..protocol.session import Session
from .tls import PIECE, RECORD, TlsLayer

# Joining below this costs less than another entry in a scatter-gather list; above it the copy costs more.
JOIN_SIZE = 16 * 1024
BATCH_SIZE = 256 * 1024
MAX_BUFFERS = 256
# Bytes that are encrypted, or get MACs, before they are written, at most: the other end is woken once for all of it,
# and has work while the next is made. The first run is one piece, so that the other end of a single message waits less.
ENCRYPTED_RUN = 4 * PIECE
SEALED_RUN = 4 * MAX_PAYLOAD
# Frames that are considered to be joined for one system call.
MAX_FRAMES = 2048
# Bytes of memory that a frame takes beside its contents, about.
FRAME_COST = 128
# First bytes of a frame that tell it from others, beside its address.
_TELLING = 64
_WAKE: Sequence[Buffer] = (b"",)  # no frame: TLS itself has something to send
_RUN: Callable[[Callable[[], object]], object] = call  # typed for mypy
_READ: Callable[[Callable[[], bytes]], bytes] = call
_LAST: Callable[[tuple[object, ...]], tuple[bytes]] = itemgetter(slice(-1, None))
# Items of a turn for `SendQueue.write`: the waiting frames, and the flags for the socket.
_FRAMES, _FLAGS = (0,), (1,)
# What a writer whose turn has ended leaves to the next one, which counts anew.
_SHARED = ("begun", "_sent", "_announced", "miscounted")

#: Not empty until its frame is queued: after an interruption its owner can tell.
Unsent = list[Any]

#: How many frames end in a piece, how much of the next one is in it, and its size.
_Piece = tuple[int, int, int]


class SendQueue:
    """See the module. `frames`, `begun` and `size` are public, because a look is cheaper than a call.

    size: bytes that it takes up; a piece with a MAC, or encrypted, counts as written when it is begun. Counted without
    a lock: no other thread gets between the bytecodes of a step, which contain no call. miscounted: `recount` is due.
    """

    def __init__(self) -> None:
        self.frames: deque[Sequence[Buffer]] = deque()
        self.begun: deque[Sequence[Buffer]] = deque()
        self.size: int = 0
        self.miscounted: bool = False
        self._sent: deque[int] = deque()
        self._session: Session | None = None
        self._seal: Seal | None = None
        self._in_pieces = False
        self._piece_size = MAX_PAYLOAD
        # Number of the next piece, and how much of the first frame is in earlier ones.
        self._next_piece = deque(((0, 0),), maxlen=1)
        self._tls: TlsLayer | None = None
        self._run = PIECE  # bytes that are encrypted or get MACs next, about
        self._announced: deque[Sequence[_Piece]] = deque(maxlen=1)  # to be encrypted, one after the other

    def __len__(self) -> int:
        """Frames that are not completely written; a frame of very many buffers counts as several."""
        return len(self.frames) + len(self.begun)

    def append(self, frame: Sequence[Buffer], unsent: Unsent | None = None) -> None:
        """Any thread. unsent: not empty; the call of C that appends the frame empties it."""
        if len(frame) == 1 and unsent is None:  # the common case
            size = len(frame[0]) + FRAME_COST
            self.size += size  # in one step with the next, see `recount`
            self.frames.append(frame)
        else:
            self._append_long(frame, unsent)

    def _append_long(self, frame: Sequence[Buffer], unsent: Unsent | None) -> None:
        size = sum(map(len, frame)) + FRAME_COST
        if len(frame) <= MAX_BUFFERS:
            entries = [frame]
        elif self._session is not None:  # which counts frames
            entries = [_merged(frame)]
        else:  # in one call: no other thread's frame gets between them
            entries = [frame[at : at + MAX_BUFFERS] for at in range(0, len(frame), MAX_BUFFERS)]
            size += FRAME_COST * (len(entries) - 1)
        if unsent is None:
            self.size += size  # in one step with the next, see `recount`
            self.frames.extend(entries)
        else:
            unsent[:] = entries
            taken = map(unsent.pop, repeat(0, len(entries)))
            self.size += size  # as above
            self.frames.extend(taken)

    def seal(self, seal: Seal, piece_size: int = MAX_PAYLOAD) -> None:
        """From now on what is written bears MACs. Nothing may be under way, and no other thread may append.

        piece_size: bytes of the stream under one MAC, at most; the other side accepts no more than MAX_PAYLOAD.
        """
        self._seal, self._piece_size, self._in_pieces = seal, piece_size, True
        self._run = piece_size

    def use_tls(self, tls: TlsLayer) -> None:
        """From now on what is written is encrypted, and TLS itself may send. Nothing may be under way."""
        self._tls, self._in_pieces = tls, True

    # --- sessions -----------------------------------------------------------------------------------------------------

    def keep(self, session: Session) -> None:
        """From now on written frames are kept in the session. Nothing may be under way."""
        self._session = session

    @property
    def between(self) -> bool:
        """Whether nothing is begun: another frame may go before the waiting ones. By the writer."""
        return not self.begun and not self._next_piece[0][1] and not self._announced

    @property
    def begun_frames(self) -> int:
        """How many frames are neither waiting nor kept in the session."""
        return 0 if self._in_pieces else len(self.begun)

    def prepend(self, frame: Sequence[Buffer], turn: SocketTurn) -> None:
        """Put it before all waiting frames. By the writer, `between` frames, in its turn."""
        size = sum(map(len, frame)) + FRAME_COST
        steps: list[Callable[[], object]] = [partial(turn.__getitem__, 0), partial(self.frames.appendleft, frame)]
        self.size += size if turn else 0  # in one step with the next, see `recount`
        list(map(_RUN, steps))

    def go_on(self, other: SendQueue, received: int) -> None:
        """Begin again after the frames that the other side has received, over the connection of another queue.

        Takes over its MACs or TLS. No writer may be at work. Raises ProtocolError if that number is impossible.
        """
        assert self._session is not None, "only a session keeps frames"
        again = self._session.resume(received, () if self._in_pieces else [*self.begun])
        self.frames.extendleft(reversed(again))
        self.begun.clear()
        self._sent.clear()
        self._announced.clear()
        self._seal, self._tls, self._in_pieces = other._seal, other._tls, other._in_pieces
        self._piece_size = other._piece_size
        self._next_piece.append(other._next_piece[0])
        self.recount((None,))

    def first(self) -> tuple[int, bytes] | None:
        """Identifies the first waiting frame, ACKs aside, without keeping it alive; None if none waits.

        By the writer, `between` frames.
        """
        for at in range(len(self.frames)):  # by number: other threads append meanwhile
            frame = self.frames[at]
            if frame is not _WAKE and HEAD.unpack_from(frame[0])[3] != ACK:
                return id(frame), bytes(frame[0][:_TELLING])
        return None

    def wake_tls(self) -> None:
        """TLS itself has something to send. Any thread."""
        self.append(_WAKE)

    def clear(self) -> None:
        """Drop all frames. No writer may be at work."""
        self.frames.clear()
        self.begun.clear()
        self.size = 0
        if self._session is not None:
            self._session.end()

    def recount(self, turn: Sized) -> None:
        """Set `size` anew after a writer was interrupted before it had changed it. By the writer, in its turn.

        Other threads append and acknowledge meanwhile, each with one step for the frames and the size: therefore each
        size is read here in one step with the frames that it counts.
        """
        self.miscounted = False if turn else True  # noqa: SIM211  # without a call: the turn may end in one
        before, frames = self.size, self.frames.copy()
        queued = [*frames, *(() if self._in_pieces else self.begun)]
        in_pieces = self._next_piece[0][1]
        written = in_pieces if self._in_pieces else sum(self._sent) if self.begun else 0  # of the first one
        wrong = sum(map(len, chain.from_iterable(queued))) + FRAME_COST * len(queued) - written - before
        self.size += wrong if turn else 0
        session = self._session
        if session is not None:
            before, kept = session.size, session.kept.copy()
            wrong = sum(map(len, chain.from_iterable(kept))) + in_pieces - before
            session.size += wrong if turn else 0

    def end_turn(self, lock: RLock) -> None:
        """The turn of the writer ends in the middle of a write: others go on from there. By its thread.

        lock: the writer's, which is released in the same step. If a signal handler that interrupts this has ended the
        turn, nothing happens: others are at work then.
        """
        begun, sent, announced = self.begun.copy(), self._sent.copy(), self._announced.copy()
        steps: list[Callable[[], object]] = [lock.release]
        steps += map(partial, repeat(setattr), repeat(self), _SHARED, (begun, sent, announced, True))
        with contextlib.suppress(RuntimeError):  # the lock is not this thread's any more
            list(map(_RUN, steps))

    def write(self, sock: socket.socket, turn: SocketTurn) -> tuple[int, bool]:
        """One system call, with something to write: bytes that it took, and whether these were all it was given.

        turn: has `frames` and the flags for the socket. Raises the socket's errors; nothing is written then. TurnEnded
        if the turn has ended meanwhile.
        """
        begun, sent = self.begun, self._sent
        if not turn:  # ended before or while these were read; if it ends later they belong to this writer
            raise TurnEnded
        if begun and not self._announced:
            buffers, size, left = self._rest_of_begun()
        else:
            sent.clear()
            buffers, size = self._begin_guarded(turn) if self._in_pieces else self._begin(turn)
            left = size
        part = turn.__getitem__
        if len(buffers) == 1:
            sent.extend(map(sock.send, buffers, map(part, _FLAGS)))
        else:
            sent.extend(map(sock.sendmsg, (buffers,), ((),), map(part, _FLAGS)))
        count = sent[-1]
        # The check of the turn is one step with the change; the thread that ends a turn counts anew.
        if turn and not self._in_pieces: self.size -= count  # fmt: skip  # noqa: E701
        if count == left:
            self._end_begun(turn)
        return count, count == size

    def _rest_of_begun(self) -> tuple[Sequence[Buffer], int, int]:
        """Buffers for one system call of what is begun and not written, their size, and the size of all the rest."""
        rest = _rest(list(chain.from_iterable(self.begun)), sum(self._sent))
        buffers, size, _ = _joined([rest])
        return buffers, size, sum(map(len, rest))

    def _begin(self, turn: SocketTurn) -> tuple[Sequence[Buffer], int]:
        """Begin as many frames as suit one system call: their buffers, and the size of these."""
        frames, part = self.frames, turn.__getitem__
        buffers: Sequence[Buffer]
        if len(frames) == 1 and len(frames[0]) <= 2:  # a small message, or a head and one segment
            buffers = frames[0]
            size = sum(map(len, buffers))
            self.begun.extend(map(deque.popleft, map(part, _FRAMES)))
        else:
            buffers, size, taken = _joined(_first_of(frames, MAX_FRAMES))
            self.begun.extend(map(deque.popleft, map(part, repeat(0, taken))))
        return buffers, size

    def _begin_guarded(self, turn: SocketTurn) -> tuple[Sequence[Buffer], int]:
        """`_begin` with MACs or TLS."""
        if self._seal is not None:
            return self._begin_pieces(self._seal, self.begun, turn)
        assert self._tls is not None, "what is written in pieces has MACs or TLS"
        return self._begin_records(self._tls, self.begun, turn)

    def _end_begun(self, turn: SocketTurn) -> None:
        """All that was begun is written; a session keeps it."""
        begun, session = self.begun, self._session
        cost = 0 if self._in_pieces else FRAME_COST * len(begun)
        self.size -= cost if turn else 0
        if session is None or self._in_pieces:
            begun.clear()
        else:
            self._keep_begun(session, turn)

    def _keep_begun(self, session: Session, turn: SocketTurn) -> None:
        begun = self.begun
        kept = sum(map(len, chain.from_iterable(begun)))
        # Added, not set: the loop may subtract from it meanwhile.
        session.size += kept if turn else 0
        steps: list[Callable[[], object]] = [
            partial(turn.__getitem__, 0),
            partial(session.kept.extend, begun),
            begun.clear,
        ]
        list(map(_RUN, steps))

    def _begin_pieces(
        self, seal: Seal, begun: deque[Sequence[Buffer]], turn: SocketTurn
    ) -> tuple[Sequence[Buffer], int]:
        """The next piece, or as many as may leave at once. The head of a large buffer leaves with the first part of
        it."""
        frames = self.frames
        number, start = self._next_piece[0]
        first = frames[0]
        if len(frames) == 1 == len(first) and not start and len(first[0]) <= self._piece_size:  # a message alone
            size, taken, rest = len(first[0]), 1, 0
            pieces = [seal.piece(number, first, size)]
        else:
            queued = _first_of(frames, MAX_BUFFERS)
            pieces = []
            size, taken, rest = 0, 0, start
            while taken < len(queued) and size < self._run:
                parts, length, ended, rest = _cut_apart(queued[taken:] if taken else queued, rest, self._piece_size)
                pieces.append(seal.piece(number + len(pieces), parts, length))
                size, taken = size + length, taken + ended
        steps = self._taking(taken, size, turn)
        steps += (partial(begun.extend, pieces), partial(self._next_piece.append, (number + len(pieces), rest)))
        list(map(_RUN, steps))
        self._run = min(2 * self._run, SEALED_RUN) if frames else self._piece_size
        written = size + FRAME_COST * taken
        self.size -= written if turn else 0
        buffers = pieces[0] if len(pieces) == 1 else [*chain.from_iterable(pieces)]
        return buffers, sum(map(len, buffers))

    def _begin_records(
        self, tls: TlsLayer, begun: deque[Sequence[Buffer]], turn: SocketTurn
    ) -> tuple[Sequence[Buffer], int]:
        frames, announced = self.frames, self._announced
        if not turn:  # as in `write`
            raise TurnEnded
        # Each call of TLS is one step with a check of the turn.
        allowed: Iterator[object] = map(turn.__getitem__, repeat(0))
        with tls.lock:
            if not begun and not tls.outgoing.pending:
                first = frames[0]
                if len(frames) == 1 == len(first) and 1 < len(first[0]) <= RECORD and not self._next_piece[0][1]:
                    announced.append([(1, 0, len(first[0]))])  # a short message alone
                    list(map(_RUN, (partial(turn.__getitem__, 0), partial(tls.encrypt, first[0]))))
                else:
                    pieces, parts = _cut_run(frames, self._next_piece[0][1], self._run)
                    announced.append(pieces)
                    read = map(_READ, repeat(tls.outgoing.read))
                    # Twice, as ssl looks for signals once it has encrypted.
                    made = zip(allowed, map(tls.encrypt, parts), allowed, read, strict=False)
                    begun.extend(map(_LAST, made) if parts else (_WAKE,))
            # Pending bytes are those that an interrupted writer has encrypted, or what TLS itself sends before all.
            if tls.outgoing.pending:
                begun.extend(map(_LAST, zip(allowed, map(_READ, (tls.outgoing.read,)), strict=False)))
            taken, rest, size = 0, self._next_piece[0][1], 0
            for ends, start, length in announced[0][: len(begun)] if announced else ():
                taken, rest, size = taken + ends, start, size + length
            steps = self._taking(taken, size, turn)
            steps += (partial(self._next_piece.append, (0, rest)), announced.clear)
            list(map(_RUN, steps))
        self._run = min(2 * self._run, ENCRYPTED_RUN) if frames else PIECE
        written = size + FRAME_COST * taken
        self.size -= written if turn else 0
        if len(begun) == 1:
            return begun[0], len(begun[0][0])
        buffers = list(chain.from_iterable(begun))
        return buffers, sum(map(len, buffers))

    def _taking(self, count: int, size: int, turn: SocketTurn) -> list[Callable[[], object]]:
        """Steps that take so many waiting frames, which end in the piece of so many bytes."""
        frames, session = self.frames, self._session
        allowed: Callable[[], object] = partial(turn.__getitem__, 0)
        if session is None:
            return [allowed, *[frames.popleft] * count]
        session.size += size if turn else 0
        taken = map(deque.popleft, repeat(frames, count))
        return [allowed, partial(session.kept.extend, filter(partial(is_not, _WAKE), taken))]


def _merged(frame: Sequence[Buffer]) -> list[Buffer]:
    """The same bytes in no more than MAX_BUFFERS buffers, copied."""
    each = -(-len(frame) // MAX_BUFFERS)
    return [b"".join(frame[at : at + each]) for at in range(0, len(frame), each)]


def _joined(frames: Sequence[Sequence[Buffer]]) -> tuple[list[Buffer], int, int]:
    """Buffers for one system call, from as many frames as suit one, their size, and how many frames these are.

    Joins small buffers, and leaves large ones as they are. Of a frame that is too much the rest is left out.
    """
    buffers: list[Buffer] = []
    small: list[Buffer] = []
    size = taken = 0
    for frame in frames:
        taken += 1
        for buffer in frame:
            if len(buffers) >= 2 * MAX_BUFFERS:
                break
            size += len(buffer)
            if len(buffer) <= JOIN_SIZE:
                small.append(buffer)
                continue
            if small:
                buffers.append(b"".join(small))
                small = []
            buffers.append(buffer)
        if size >= BATCH_SIZE or len(buffers) >= MAX_BUFFERS:
            break
    if small:
        buffers.append(b"".join(small))
    return buffers, size, taken


def _cut(frames: Sequence[Sequence[Buffer]], start: int, most: int) -> tuple[list[Buffer], int, int, int]:
    """A piece of frames, of at most so many bytes, beginning at `start` of the first frame, as parts.

    Also its size, how many frames end in it, and how much of the next one is in it.
    """
    parts: list[Buffer] = []
    room = most
    for taken, frame in enumerate(frames):
        done = start
        for buffer in frame:
            if start and start >= len(buffer):
                start -= len(buffer)
                continue
            part = memoryview(buffer)[start : start + room] if start or len(buffer) > room else buffer
            start = 0
            parts.append(part)
            done += len(part)
            room -= len(part)
            if not room:
                whole = done == sum(map(len, frame))
                return parts, most, taken + whole, 0 if whole else done
    return parts, most - room, len(frames), 0


def _first_of(queued: Sequence[Sequence[Buffer]], most: int) -> list[Sequence[Buffer]]:
    """The first frames. By index: other threads append meanwhile, which would break an iterator."""
    return list(map(queued.__getitem__, range(min(len(queued), most))))


def _cut_run(queued: Sequence[Sequence[Buffer]], start: int, most: int) -> tuple[list[_Piece], list[Buffer]]:
    """What is encrypted next, piece by piece, up to about `most` bytes: what is in each, and its bytes."""
    frames = _first_of(queued, MAX_BUFFERS)
    pieces: list[_Piece] = []
    data: list[Buffer] = []
    at = size = 0
    while at < len(frames) and size < most:
        parts, length, taken, start = _cut_records(frames[at:], start)
        if not length:  # only _WAKE
            return pieces or [(taken, 0, 0)], data
        pieces.append((taken, start, length))
        data.append(parts[0] if len(parts) == 1 else b"".join(parts))
        at += taken
        size += length
    return pieces, data


def _cut_apart(frames: Sequence[Sequence[Buffer]], start: int, most: int) -> tuple[Sequence[Buffer], int, int, int]:
    """`_cut`, but the head of a large buffer (a chunk) is a piece of its own.

    The reader then knows where the data belong before they come, and gets their pieces in full length.
    """
    first = frames[0]
    if len(first) == 2 and len(first[1]) >= most and not start and 0 < len(first[0]) <= most:
        return (first[0],), len(first[0]), 0, len(first[0])
    return _cut(frames, start, most)


def _cut_records(frames: Sequence[Sequence[Buffer]], start: int) -> tuple[Sequence[Buffer], int, int, int]:
    """`_cut` for TLS: no record has a single byte, as a reader could not tell whether it has read it.

    The head of a large buffer (a chunk) is a piece of its own: nothing has to be copied to stand beside it, and the
    reader knows where the data belong before it decrypts them, in full records.
    """
    first = frames[0]
    if len(first) == 2 and len(first[1]) >= PIECE:
        head, data = len(first[0]), memoryview(first[1])
        if not start and 1 < head <= RECORD:
            return (first[0],), head, 0, head
        at = start - head
        left = len(data) - at - PIECE
        if at >= 0 and left >= 0 and left != 1:
            return (data[at : at + PIECE],), PIECE, not left, left and start + PIECE
    parts, size, taken, rest = _cut(frames, start, PIECE)
    lone = rest and sum(map(len, frames[taken])) - rest == 1
    if lone or (size > 1 and size % RECORD == 1):
        return _cut(frames, start, size - 1)
    return parts, size, taken, rest


def _rest(buffers: Sequence[Buffer], sent: int) -> list[Buffer]:
    """What remains of some buffers after `sent` bytes were written."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return []
