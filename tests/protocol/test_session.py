"""Sessions without sockets: each frame is handed on once and in order, whatever is cut, and whenever."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from aiorpc.errors import ProtocolError
from aiorpc.protocol.frames import ACK, Buffer, Frame, FrameDecoder, Kind, encode_frame
from aiorpc.protocol.session import ACK_BYTES, ACK_FRAMES, Session
from aiorpc.protocol.states import IllegalTransition, SessionEvent, SessionState
from tests.tiers import examples

LIMIT = 1000


def frame(number: int, size: int = 0) -> list[Buffer]:
    return encode_frame(Kind.CALL, number, bytes(size))


def read(buffers: Sequence[Buffer]) -> Frame:
    (found,) = FrameDecoder(max_body=1 << 20).feed(b"".join(buffers))
    return found


class Side:
    """One end: it sends frames with rising numbers, and remembers those that it was given."""

    def __init__(self) -> None:
        self.session = Session(LIMIT)
        self.waiting: deque[list[Buffer]] = deque()
        self.way: deque[list[Buffer]] = deque()  # to the other end
        self.sent = 0
        self.given: list[int] = []
        self.bytes = 0

    def send(self, size: int) -> None:
        self.waiting.append(frame(self.sent, size))
        self.sent += 1

    def write(self) -> bool:
        """Hand one frame to the socket, as `Connection` does; False if none may be."""
        session = self.session
        if session.suspended:
            return False
        if session.due:
            ack = session.ack()
            session.told(ack)
            self.waiting.appendleft(ack)
        elif session.size >= session.limit or not self.waiting:
            return False
        whole = self.waiting.popleft()
        session.kept.append(whole)
        session.size += sum(map(len, whole))
        self.way.append(whole)
        return True

    def take(self, other: Side) -> bool:
        """Read one frame of what the other end has written."""
        if self.session.suspended or not other.way:
            return False
        data = other.way.popleft()
        self.bytes += sum(map(len, data))
        self.given += [each.call_id for each in self.session.arrived([read(data)], self.bytes)]
        return True

    def cut(self) -> None:
        if not self.session.suspended:
            self.session.enter(SessionEvent.BROKEN)

    def resume(self, received: int) -> None:
        self.waiting.extendleft(reversed([list(each) for each in self.session.resume(received)]))


def mend(opener: Side, acceptor: Side, rng: random.Random) -> None:
    """The handshake of a new socket, which may be cut before the opener hears its end; what was under way is gone."""
    while opener.session.suspended:
        acceptor.cut()  # it may not have noticed
        opener.way.clear()
        acceptor.way.clear()
        said = acceptor.session.received
        acceptor.resume(opener.session.received)
        for _ in range(rng.randrange(3)):
            acceptor.write()
        if rng.random() < 0.7:
            opener.resume(said)


@pytest.mark.random
@pytest.mark.parametrize("seed", range(examples(40)))
def test_every_frame_is_handed_on_once_and_in_order(seed: int) -> None:
    """Cuts at any moment, seen by either side first, in the handshake as well; and never is more kept than allowed."""
    rng = random.Random(seed)
    opener, acceptor = sides = Side(), Side()
    for _ in range(3000):
        near, far = rng.sample(sides, 2)
        what = rng.random()
        if what < 0.3:
            near.send(rng.choice((0, 10, 300)))
        elif what < 0.6:
            near.write()
        elif what < 0.9:
            near.take(far)
        elif what < 0.93:
            near.session.due = near.session.fresh  # the look, once in a while
        elif what < 0.95:
            opener.cut()
            mend(opener, acceptor, rng)
        assert near.session.size <= LIMIT + 400
        for one, other in ((opener, acceptor), (acceptor, opener)):
            assert other.given == list(range(len(other.given)))
            assert len(other.given) <= one.sent
    mend(opener, acceptor, rng)
    quiet = 0
    while quiet < 2:
        moved = any([side.write() for side in sides]) | any([opener.take(acceptor), acceptor.take(opener)])
        quiet = 0 if moved else quiet + 1
        for side in sides:
            side.session.due = side.session.due or side.session.fresh
    for one, other in ((opener, acceptor), (acceptor, opener)):
        assert other.given == list(range(one.sent))
        assert {read(each).kind for each in one.session.kept} <= {ACK}  # which have no ACKs of their own
        assert len(one.session.kept) < ACK_FRAMES


def test_many_frames_or_bytes_are_acknowledged_at_once() -> None:
    """Fewer are when somebody looks; and an ACK is no reason for another one, until they are many."""
    session = Session(LIMIT)
    for _ in range(ACK_FRAMES - 1):
        session.arrived([read(frame(1))], 100)
    assert (session.due, session.fresh) == (False, True)
    session.arrived([read(frame(1))], 100)
    ack = session.ack()
    assert (session.due, read(ack).kind, read(ack).call_id) == (True, ACK, ACK_FRAMES)
    session.told(ack)
    assert (session.due, session.fresh) == (False, False)
    session.arrived([read(frame(1))], 100 + ACK_BYTES)
    assert (session.due, session.fresh) == (True, True)


def test_an_acknowledgement_lets_go_of_what_it_names() -> None:
    """An old one, which was sent again, changes nothing."""
    session = Session(LIMIT)
    session.kept.extend(frame(number, 100) for number in range(3))
    session.size = 3 * 118
    session.arrived([Frame(ACK, 2, b"")], 0)
    assert [read(each).call_id for each in session.kept] == [2]
    assert session.size == 118
    session.arrived([Frame(ACK, 1, b"")], 0)
    assert len(session.kept) == 1


def test_what_was_not_sent_cannot_be_acknowledged() -> None:
    """Nor can a session go on behind it, or before what was acknowledged."""
    session = Session(LIMIT)
    session.kept.append(frame(0))
    with pytest.raises(ProtocolError, match="acknowledgement of 3 frames, of which 3 were not sent"):
        session.arrived([Frame(ACK, 3, b"")], 0, begun=1)
    session.arrived([Frame(ACK, 1, b"")], 0)
    session.enter(SessionEvent.BROKEN)
    for received in (0, 2):
        with pytest.raises(ProtocolError, match="has received"):
            session.resume(received)
    assert session.resume(1) == []


def test_what_was_begun_is_sent_again_unless_it_has_arrived() -> None:
    """The socket took some of it, and nobody knows how much came through."""
    session = Session(LIMIT)
    session.kept.append(frame(0))
    session.enter(SessionEvent.BROKEN)
    assert [read(each).call_id for each in session.resume(2, [frame(1), frame(2)])] == [2]


def test_a_session_that_has_ended_keeps_nothing() -> None:
    """And does not go on."""
    session = Session(LIMIT)
    session.kept.append(frame(0))
    session.end()
    session.end()
    assert session.state is SessionState.ENDED and not session.kept
    with pytest.raises(IllegalTransition):
        session.enter(SessionEvent.BROKEN)
