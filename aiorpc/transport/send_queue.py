"""Frames on their way into a socket, and how far that has got.

    frames      appended by any thread, not begun
    begun       handed to the socket, in part or as a whole; one writer at a time
    sent        what each system call took of those that are begun, in bytes

Invariants
1. What is still to be written is `begun` without its first `sum(sent)` bytes, and then `frames`.
2. Frames go from `frames` to `begun` by one call of C, and so does what a system call took into `sent`: if a signal
   handler raises, between any two instructions of a writer on the main thread, no frame is broken or lost.
3. Once it seals (protocol/seal.py), `begun` holds the pieces that are being written; frames leave `frames` with
   the piece that has their last byte. One call of C does that, and notes the number and where the next piece begins.
   With TLS (tls.py) several pieces are encrypted before they are written: `_announced` says beforehand what will be in
   each, and goes when the frames were taken. Whoever writes next after an interruption sees by what is in `begun`, and
   by what waits in TLS, how many of them were made; the others are made again.
4. With a session (protocol/session.py) a frame is in one of `frames`, `begun` and `Session.kept`, whatever is raised.
   It goes to `kept` when it was written as a whole; with pieces, when its last byte is in one.
5. A writer whose turn has ended (turns.py) changes nothing that others see: `end_turn` has them go on with copies of
   `begun`, `sent` and what is announced, and every other step fails without the turn.
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
# With TLS so much is encrypted, and with seals copied and sealed, before it is written, at most: the other end is woken
# once for all of it, and finds work while the next is made. It begins with one piece, so that the other end of a single
# message need not wait long.
ENCRYPTED_RUN = 4 * PIECE
SEALED_RUN = 4 * MAX_PAYLOAD
# So many frames are looked at to join them for one system call.
MAX_FRAMES = 2048
# What a frame takes in memory beside its bytes, about.
FRAME_COST = 128
# By so many of its first bytes a frame is told from others, beside its place in memory.
_TELLING = 64
_WAKE: Sequence[Buffer] = (b"",)  # stands for what TLS has to say; no frame
_RUN: Callable[[Callable[[], object]], object] = call  # as mypy understands it
_READ: Callable[[Callable[[], bytes]], bytes] = call
_LAST: Callable[[tuple[object, ...]], tuple[bytes]] = itemgetter(slice(-1, None))
# What a turn has for `SendQueue.write`: the frames that wait, and the flags for the socket.
_FRAMES, _FLAGS = (0,), (1,)
# What a writer whose turn has ended leaves to the next one, and that this one has to count anew.
_SHARED = ("begun", "_sent", "_announced", "miscounted")

#: Has something in it until its frame is among those that wait: so whoever is interrupted can tell.
Unsent = list[Any]

#: How many frames end in a piece, how much of the next one is in it, and its size.
_Piece = tuple[int, int, int]


class SendQueue:
    """See the module. `frames`, `begun` and `size` are there to be looked at: a call costs more than the look.

    size: bytes that it takes up; a piece with a seal, or encrypted, counts as written when it is begun. Counted without
    a lock, in steps that no other thread gets between: none has a call in it. miscounted: whether it is to be set anew.
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
        # Number of the next piece, and how much of the first frame is in those before.
        self._next_piece = deque(((0, 0),), maxlen=1)
        self._tls: TlsLayer | None = None
        self._run = PIECE  # how much is encrypted or sealed next, about
        self._announced: deque[Sequence[_Piece]] = deque(maxlen=1)  # to be encrypted, one after the other

    def __len__(self) -> int:
        """Frames that are not written as a whole; one of very many buffers counts as several."""
        return len(self.frames) + len(self.begun)

    def append(self, frame: Sequence[Buffer], unsent: Unsent | None = None) -> None:
        """Any thread. unsent: has something in it; it is emptied by the call of C that appends the frame."""
        if len(frame) == 1 and unsent is None:  # most frames
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
        else:  # in one call, so that nobody's gets between them
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
        """From now on what is written bears seals. Nothing may be under way, and no other thread may append.

        piece_size: bytes of the stream that one seal covers, at most; the other side takes no more than MAX_PAYLOAD.
        """
        self._seal, self._piece_size, self._in_pieces = seal, piece_size, True
        self._run = piece_size

    def use_tls(self, tls: TlsLayer) -> None:
        """From now on what is written is encrypted, and TLS itself may say something. Nothing may be under way."""
        self._tls, self._in_pieces = tls, True

    # --- sessions -----------------------------------------------------------------------------------------------------

    def keep(self, session: Session) -> None:
        """From now on frames that were written are kept there. Nothing may be under way."""
        self._session = session

    @property
    def between(self) -> bool:
        """Whether nothing is begun: another frame may come before those that wait. By the writer."""
        return not self.begun and not self._next_piece[0][1] and not self._announced

    @property
    def begun_frames(self) -> int:
        """How many frames are neither waiting nor kept."""
        return 0 if self._in_pieces else len(self.begun)

    def prepend(self, frame: Sequence[Buffer], turn: SocketTurn) -> None:
        """Append it before all that waits. By the writer, `between` frames, in its turn."""
        size = sum(map(len, frame)) + FRAME_COST
        steps: list[Callable[[], object]] = [partial(turn.__getitem__, 0), partial(self.frames.appendleft, frame)]
        self.size += size if turn else 0  # in one step with the next, see `recount`
        list(map(_RUN, steps))

    def go_on(self, other: SendQueue, received: int) -> None:
        """Begin again behind the frames that the other side has received, over the connection of another queue.

        Its seals or TLS go on here. No writer may be at work. Raises ProtocolError if that number cannot be.
        """
        assert self._session is not None, "what is kept is kept there"
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
        """What tells the first frame that waits, ACKs aside, from others, without keeping it; None if none waits.

        By the writer, `between` frames.
        """
        for at in range(len(self.frames)):  # by number: other threads append meanwhile
            frame = self.frames[at]
            if frame is not _WAKE and HEAD.unpack_from(frame[0])[3] != ACK:
                return id(frame), bytes(frame[0][:_TELLING])
        return None

    def wake_tls(self) -> None:
        """TLS has something to say. Any thread."""
        self.append(_WAKE)

    def clear(self) -> None:
        """Forget all of them. No writer may be at work."""
        self.frames.clear()
        self.begun.clear()
        self.size = 0
        if self._session is not None:
            self._session.end()

    def recount(self, turn: Sized) -> None:
        """Set `size` anew: a writer was interrupted before it had changed that. By the writer, in its turn.

        Others append meanwhile, and acknowledge: what they count is theirs, as each of them does both in one step, and
        so each size is read here in one step with what it is the size of.
        """
        self.miscounted = False if turn else True  # noqa: SIM211  # no call: the turn may end in one
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
        """The turn of the writer ends in the midst of what it does: others go on from there. By its thread.

        lock: its own, which is let go of in the same step. So nothing is done if a signal handler, which interrupts
        this, has ended the turn: others are at work then.
        """
        begun, sent, announced = self.begun.copy(), self._sent.copy(), self._announced.copy()
        steps: list[Callable[[], object]] = [lock.release]
        steps += map(partial, repeat(setattr), repeat(self), _SHARED, (begun, sent, announced, True))
        with contextlib.suppress(RuntimeError):  # it is not its own any more
            list(map(_RUN, steps))

    def write(self, sock: socket.socket, turn: SocketTurn) -> tuple[int, bool]:
        """One system call, with something to write: bytes that it took, and whether that was all it was given.

        turn: with `frames` and the flags for the socket. Raises what the socket raises; nothing is written
        then. TurnEnded if the turn has ended meanwhile.
        """
        begun, sent = self.begun, self._sent
        if not turn:  # before it has looked, or in the midst of that; from here on these are its own if it ends
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
        # The look at the turn is one step with what it allows; who ends a turn counts anew.
        if turn and not self._in_pieces: self.size -= count  # fmt: skip  # noqa: E701
        if count == left:
            self._end_begun(turn)
        return count, count == size

    def _rest_of_begun(self) -> tuple[Sequence[Buffer], int, int]:
        """Buffers for one system call of what is begun and not written, their size, and that of all the rest."""
        rest = _rest(list(chain.from_iterable(self.begun)), sum(self._sent))
        buffers, size, _ = _joined([rest])
        return buffers, size, sum(map(len, rest))

    def _begin(self, turn: SocketTurn) -> tuple[Sequence[Buffer], int]:
        """Begin with as many frames as are good for one system call: their buffers, and the size of these."""
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
        """As `_begin`, of what bears seals or is encrypted."""
        if self._seal is not None:
            return self._begin_pieces(self._seal, self.begun, turn)
        assert self._tls is not None, "what is written in pieces is guarded"
        return self._begin_records(self._tls, self.begun, turn)

    def _end_begun(self, turn: SocketTurn) -> None:
        """All that was begun is written; with a session it is kept."""
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
        # The loop may take from it meanwhile.
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
        """The next piece, or as many as may leave at once. The head of a large buffer leaves with the first of it."""
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
        # Whatever TLS is asked for, in one call with a look at the turn.
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
            # Else it is what an interrupted writer has encrypted; or TLS itself has something to say, before all else.
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
        """Steps that take so many frames from those that wait, as the piece of so many bytes is made that ends them."""
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
    """Buffers for one system call, of as many frames as are good for one, their size, and how many frames these are.

    Small buffers are joined, large ones stay as they are. Of a frame that is too much the rest is left out.
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
    """A piece of frames of so many bytes at most, the first of them from `start` on, as parts.

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
    """By their numbers: other threads append meanwhile, which no iterator would outlive."""
    return list(map(queued.__getitem__, range(min(len(queued), most))))


def _cut_run(queued: Sequence[Sequence[Buffer]], start: int, most: int) -> tuple[list[_Piece], list[Buffer]]:
    """What is encrypted next, piece by piece, until it is `most` bytes: what is in each, and its bytes."""
    frames = _first_of(queued, MAX_BUFFERS)
    pieces: list[_Piece] = []
    data: list[Buffer] = []
    at = size = 0
    while at < len(frames) and size < most:
        parts, length, taken, start = _cut_records(frames[at:], start)
        if not length:  # nothing but _WAKE, which has been said
            return pieces or [(taken, 0, 0)], data
        pieces.append((taken, start, length))
        data.append(parts[0] if len(parts) == 1 else b"".join(parts))
        at += taken
        size += length
    return pieces, data


def _cut_apart(frames: Sequence[Sequence[Buffer]], start: int, most: int) -> tuple[Sequence[Buffer], int, int, int]:
    """`_cut`, but of a large buffer with a head, which is what a chunk is, the head is a piece of its own.

    So the reader knows where the data belong before they come, and finds their pieces as long as they may be.
    """
    first = frames[0]
    if len(first) == 2 and len(first[1]) >= most and not start and 0 < len(first[0]) <= most:
        return (first[0],), len(first[0]), 0, len(first[0])
    return _cut(frames, start, most)


def _cut_records(frames: Sequence[Sequence[Buffer]], start: int) -> tuple[Sequence[Buffer], int, int, int]:
    """`_cut` for TLS: no record will have a single byte, as readers could not tell whether they had read that one.

    Of a large buffer with a head, which is what a chunk is, the head is a piece of its own. So nothing has to be copied
    to stand beside it, and the reader knows where the data belongs before it decrypts them, in records that are full.
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
