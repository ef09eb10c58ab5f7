"""Reference counting: each guarantee of docs/inside/counting.md by itself, then all of them under any interleaving."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from aiorpc.errors import ProtocolError, RpcUsageError
from aiorpc.protocol.families import reader_of
from aiorpc.protocol.messages import read_values
from aiorpc.protocol.packing import pack, unpack
from aiorpc.protocol.reference_messages import (
    FREED,
    MESSAGES,
    REASON_LIMIT,
    UNSENT,
    Abandon,
    Add,
    Added,
    Ask,
    Broken,
    ChildOk,
    Confirmed,
    Counts,
    Del,
    Free,
    Gone,
    Message,
    Never,
    Outputs,
    PassedReference,
    ReferenceId,
    Role,
    Send,
    fork_of_creator,
    read,
)
from aiorpc.protocol.references import ReferenceTable
from tests.tiers import examples

MakeTable = Callable[[int], ReferenceTable]

EMPTY = Counts(owned=0, users=0, pending=0, forks=0, pins=0, placeholders=0, tombstones=0)


class Violation(AssertionError):
    """A guarantee was broken."""


def require(condition: bool, *what: object) -> None:
    if not condition:
        raise Violation(*what)


# -- a small world: workers, connections, what a runtime does with a table, and an oracle that knows everything --------


@dataclass(eq=False)
class Fork:
    """What the oracle knows of one fork. kind: creator, own, granted (passed by the owner) or passed.

    doomed: its owner made it after the value had been freed, while it asked the creator whether that is still to come.
    """

    rref: ReferenceId
    fork: ReferenceId
    owner: int
    holder: int
    kind: str
    parent: Fork | None = None
    state: str = "pending"
    handle: bool = True  # a handle lives at the holder, or is under way to it
    decoded: bool = True
    call: str = ""  # creators: unsent, sent
    doomed: bool = False


@dataclass
class Frame:
    """What travels. kind: message, create, reply, wire or lost."""

    kind: str
    body: object = None
    fork: Fork | None = None
    ok: bool = True


def again(fields: object) -> Any:
    """What msgpack brings back."""
    return msgpack.unpackb(msgpack.packb(fields))


class World:
    """Tables joined by one FIFO queue per ordered pair of workers.

    bulk: frames that may carry tensors (create, wire) can be overtaken, as when their tensors use another connection.
    """

    def __init__(self, size: int, table: MakeTable = ReferenceTable, *, bulk: bool = False) -> None:
        self.tables = [table(number) for number in range(size)]
        self.alive = set(range(size))
        self.bulk = bulk
        self.queues: dict[tuple[int, int], deque[Frame]] = {}
        self.unsent: list[tuple[int, int, Frame]] = []
        self.forks: dict[ReferenceId, Fork] = {}
        self.created: set[ReferenceId] = set()  # the owner took the CREATE
        self.freed: set[ReferenceId] = set()  # freed after that
        self.refused: set[ReferenceId] = set()  # freed before that
        self.failed: set[ReferenceId] = set()  # given up by the creator
        self.departed: list[set[int]] = [set() for _ in range(size)]  # as each worker has heard

    # what the user and the runtime do

    def create(self, creator: int, owner: int, *, ok: bool = True, send: bool = True) -> Fork:
        rref, name = self.tables[creator].create(owner)
        fork = self._know(Fork(rref, name, owner, creator, "creator", call="unsent"))
        self._put(creator, owner, Frame("create", fork=fork, ok=ok), send)
        return fork

    def own(self, worker: int, like: Fork | None = None) -> Fork:
        rref, name = self.tables[worker].own(like.rref if like else None)
        if like is None:
            self.created.add(rref)
        doomed = rref in self.freed
        return self._know(Fork(rref, name, worker, worker, "own", state="confirmed", doomed=doomed))

    def encode(self, fork: Fork, to: int, *, send: bool = True) -> Fork:
        passed, outputs = self.tables[fork.holder].encode(fork.rref, fork.fork, to)
        kind = "granted" if fork.holder == fork.owner else "passed"
        doomed = kind == "granted" and fork.rref in self.freed
        child = Fork(fork.rref, passed.fork, fork.owner, to, kind, parent=fork, decoded=False, doomed=doomed)
        self._know(child)
        self.apply(fork.holder, outputs)
        self._put(fork.holder, to, Frame("wire", passed, child), send)
        return child

    def send(self, index: int = 0) -> None:
        """Send a frame that was held back; to a worker that is not there any more it cannot be sent."""
        source, to, frame = self.unsent[index]
        if to not in self.alive:
            self.unsend(index)
        else:
            del self.unsent[index]
            self._put(source, to, frame, True)

    def unsend(self, index: int = 0) -> None:
        source, _to, frame = self.unsent.pop(index)
        assert frame.fork is not None
        if frame.kind == "create":
            self.failed.add(frame.fork.rref)
            self.apply(source, self.tables[source].create_failed_to_send(frame.fork.rref, frame.fork.fork))
        else:
            frame.fork.handle = False
            self.apply(source, self.tables[source].unsend(frame.fork.fork))

    def give_up(self, fork: Fork) -> None:
        self.failed.add(fork.rref)
        outputs = self.tables[fork.holder].creation_failed(fork.rref, fork.fork, "timeout", answered=False)
        self.apply(fork.holder, outputs)

    def drop(self, fork: Fork) -> None:
        fork.handle = False
        self.apply(fork.holder, self.tables[fork.holder].drop(fork.rref, fork.fork))

    def kill(self, worker: int, keep: Callable[[int], int] = lambda length: length) -> None:
        """The worker dies. keep: of what it sent to each other worker, how many frames still arrive."""
        self.alive.discard(worker)
        self.unsent = [entry for entry in self.unsent if entry[0] != worker]
        for fork in self.forks.values():
            fork.handle = fork.handle and fork.holder != worker
        for other in range(len(self.tables)):
            self.queues.pop((other, worker), None)
            queue = self.queues.pop((worker, other), deque())
            if other in self.alive:
                arriving = deque(list(queue)[: keep(len(queue))])
                self._bury(queue, arriving)
                arriving.append(Frame("lost"))
                self.queues[worker, other] = arriving

    def deliver(self, source: int, to: int, index: int = 0) -> None:
        queue = self.queues[source, to]
        frame = queue[index]
        del queue[index]
        if not queue:
            del self.queues[source, to]
        getattr(self, "_take_" + frame.kind)(source, to, frame)

    def deliverable(self) -> list[tuple[int, int, int]]:
        """Every frame that can be the next: the first of each queue, and what may overtake it."""
        found = []
        for (source, to), queue in self.queues.items():
            for index, frame in enumerate(queue):
                if index == 0 or frame.kind != "lost":
                    found.append((source, to, index))
                if not self.bulk or frame.kind not in ("create", "wire"):
                    break
        return found

    def drain(self) -> None:
        """Let everything arrive, each queue in order."""
        for _ in range(100_000):
            if not self.queues:
                return
            self.deliver(*next(iter(self.queues)))
        raise Violation("messages without end")

    # frames arriving

    def _take_message(self, source: int, to: int, frame: Frame) -> None:
        message: Any = frame.body
        self.apply(to, self.tables[to].on_message(source, read(again(MESSAGES.write(message)))))

    def _take_create(self, source: int, to: int, frame: Frame) -> None:
        fork = frame.fork
        assert fork is not None
        outputs = self.tables[to].on_create(fork.rref, fork.fork, source)
        self.created.add(fork.rref)
        self.apply(to, outputs)
        if source in self.alive:
            self._put(to, source, Frame("reply", fork=fork, ok=frame.ok), True)

    def _take_reply(self, source: int, to: int, frame: Frame) -> None:
        fork = frame.fork
        assert fork is not None
        table = self.tables[to]
        if frame.ok:
            self.apply(to, table.created(fork.rref, fork.fork))
        else:
            self.failed.add(fork.rref)
            self.apply(to, table.creation_failed(fork.rref, fork.fork, "ValueError: construction failed"))

    def _take_wire(self, source: int, to: int, frame: Frame) -> None:
        assert frame.fork is not None
        passed = reader_of(PassedReference)(again(frame.body))
        outputs = self.tables[to].decode(passed, source)
        sent = PassedReference(frame.fork.rref, frame.fork.owner, frame.fork.fork)
        require(passed == sent, "another reference")
        frame.fork.decoded = True
        self.apply(to, outputs)

    def _take_lost(self, source: int, to: int, frame: Frame) -> None:
        table = self.tables[to]
        self.departed[to].add(source)
        self.apply(to, table.lost(source) if source % 2 else table.left(source))

    # plumbing

    def _know(self, fork: Fork) -> Fork:
        require(fork.fork not in self.forks, "an id was used twice", fork)
        self.forks[fork.fork] = fork
        return fork

    def _put(self, source: int, to: int, frame: Frame, send: bool) -> None:
        if not send:
            self.unsent.append((source, to, frame))
            return
        if frame.kind == "create":
            assert frame.fork is not None
            frame.fork.call = "sent"
        if to in self.alive:
            self.queues.setdefault((source, to), deque()).append(frame)
        elif frame.kind == "wire":
            assert frame.fork is not None
            frame.fork.handle = False

    def _bury(self, queue: deque[Frame], arriving: deque[Frame]) -> None:
        for frame in list(queue)[len(arriving) :]:
            if frame.kind == "wire" and frame.fork is not None:
                frame.fork.handle = False

    def apply(self, worker: int, outputs: Outputs) -> None:
        for output in outputs:
            if isinstance(output, Send):
                require(output.to != worker, "a message to oneself", output)
                self._put(worker, output.to, Frame("message", output.message), True)
            elif isinstance(output, Free):
                self._check_free(worker, output.rref)
            elif isinstance(output, Confirmed):
                self._check_confirmed(self.forks[output.fork])
            else:
                self._check_broken(self.forks[output.fork])

    # the oracle

    def protected(self, fork: Fork) -> bool:
        """Whether the owner, or a chain of live workers that ends at it, answers for this fork."""
        if fork.holder not in self.alive or fork.doomed:
            return False
        if fork.kind == "granted":
            return fork.rref not in self.refused
        if fork.kind != "passed" or fork.state == "confirmed":
            return True
        assert fork.parent is not None
        return fork.state == "pending" and self.protected(fork.parent)

    def _check_free(self, owner: int, rref: ReferenceId) -> None:
        if rref not in self.created:
            self.refused.add(rref)
            return
        self.freed.add(rref)  # said again when somebody waited for a value that proved to be freed
        for fork in self.forks.values():
            if fork.rref == rref and fork.owner == owner and fork.handle and fork.state != "broken":
                require(not self.protected(fork), "G1: freed while in use", fork)

    def _check_confirmed(self, fork: Fork) -> None:
        require(fork.state == "pending", "decided twice", fork)
        fork.state = "confirmed"
        if fork.owner in self.alive and not fork.doomed and not (fork.kind == "granted" and fork.rref in self.refused):
            require(fork.rref not in self.freed, "G1: confirmed after it was freed", fork)

    def _check_broken(self, fork: Fork) -> None:
        require(fork.state != "broken", "broken twice", fork)
        if fork.owner in self.alive and fork.rref not in self.failed:
            creator_lost = fork.rref.worker not in self.alive and fork.rref not in self.created
            require(creator_lost or not self.protected(fork), "G5: broken without cause", fork)
        fork.state = "broken"

    def usable(self) -> list[Fork]:
        """Forks with a live handle at a live worker."""
        return [f for f in self.forks.values() if f.handle and f.decoded and f.holder in self.alive]

    def finish(self) -> None:
        """Everything arrives; then all handles die: nobody may be left waiting, and nothing may remain."""
        while self.unsent:
            self.send() if len(self.unsent) % 2 else self.unsend()
        self.drain()
        for fork in self.usable():
            self._check_settled(fork)
        for fork in self.usable():
            self.drop(fork)
        self.drain()
        for number in self.alive:
            table = self.tables[number]
            require(table.counts() == EMPTY, "G16: left over", number, table.counts(), table.live())
            require(table.live() == [], "G16: left over", number)
        left = [rref for rref in self.created - self.freed if self._owner(rref) in self.alive]
        require(not left, "G16: never freed", left)

    def _check_settled(self, fork: Fork) -> None:
        require(fork.state != "pending", "G6: waits forever", fork)
        if fork.state == "confirmed" and fork.owner in self.alive:
            # A refusal can overtake the frame with a fork the owner granted (G11): then only the use itself fails.
            refused = fork.doomed or fork.rref in self.refused
            exempt = fork.kind == "granted" and refused and fork.holder != fork.owner
            require(exempt or self.tables[fork.owner].holds(fork.rref), "G1: in use, but not kept", fork)

    def _owner(self, rref: ReferenceId) -> int:
        return next(fork.owner for fork in self.forks.values() if fork.rref == rref)


def messages(world: World, source: int, to: int) -> list[type[object]]:
    """What the reference messages are that are on their way."""
    return [type(frame.body) for frame in world.queues.get((source, to), ()) if frame.kind == "message"]


OWNER, A, B, C = 0, 1, 2, 3


@pytest.fixture
def world() -> Iterator[World]:
    """Four workers; at the end nobody may wait and nothing may be left."""
    world = World(4)
    yield world
    world.finish()


def made(world: World, creator: int = A) -> Fork:
    """A value at OWNER, created by `creator` and confirmed."""
    fork = world.create(creator, OWNER)
    world.drain()
    return fork


# -- guarantee by guarantee --------------------------------------------------------------------------------------------


def test_keys_have_64_bits_and_are_not_in_sequence() -> None:
    """Of many tables none has a key of another, each bit is as often set as not, and none is shown."""
    tables = [ReferenceTable(7) for _ in range(4)]
    keys = [table.own()[0].key for table in tables for _ in range(600)]
    assert len({*keys}) == len(keys) and 1 << 60 < max(keys) < 1 << 64
    for bit in range(64):
        assert 0.4 < sum(key >> bit & 1 for key in keys) / len(keys) < 0.6
    assert not any(b - a in (0, 1) for a, b in itertools.pairwise(keys))
    rref, fork = tables[0].create(3)
    assert str(rref.key) not in f"{rref!r} {rref} {[rref]}" and fork.key == 0


@pytest.mark.parametrize("off", [-1, 1, 1 << 63])
def test_a_reference_beside_a_known_one_is_none(off: int) -> None:
    """Whoever has one reference of a worker cannot name another: it is answered, and reaches nothing."""
    owner, guesser = ReferenceTable(OWNER), A
    known, _ = owner.own()
    secret, _ = owner.own()
    before = owner.counts()
    for guess in (known._replace(number=secret.number), secret._replace(key=(secret.key + off) % (1 << 64))):
        fork = ReferenceId(guesser, 5)
        assert owner.on_message(guesser, Add(guess, fork)) == [Send(guesser, Gone(guess, fork, FREED))]
        assert owner.on_message(guesser, Del(guess, fork)) == []
        assert owner.on_message(guesser, Ask(guess)) == [Send(guesser, Never(guess))]
        assert not owner.holds(guess)
    assert owner.counts() == before and owner.holds(secret)


def test_g1_the_value_is_freed_when_the_last_of_several_forks_is_dropped(world: World) -> None:
    """G1: two forks, two deletions; only the second frees."""
    first = made(world)
    second = world.encode(first, B)
    world.drain()
    world.drop(first)
    world.drain()
    assert world.freed == set()
    world.drop(second)
    world.drain()
    assert world.freed == {first.rref}


def test_g2_a_parent_dropped_before_the_childs_add_stays_counted(world: World) -> None:
    """G2: A passes its fork to B and drops it; the deletion waits until B is counted."""
    parent = made(world)
    child = world.encode(parent, B)
    world.drop(parent)
    assert messages(world, A, OWNER) == []
    world.deliver(A, B)
    world.deliver(B, OWNER)
    world.deliver(OWNER, B)
    assert child.state == "confirmed"
    assert messages(world, B, A) == [ChildOk]
    world.deliver(B, A)
    assert messages(world, A, OWNER) == [Del]
    world.drain()
    assert world.freed == set()


def test_g2_a_chain_of_four_keeps_every_link_until_the_next_is_counted() -> None:
    """G2: A to B to C to D, every parent dropped at once, and no ADD delivered until the end."""
    world = World(5)
    links = [made(world)]
    for to in (B, C, 4):
        links.append(world.encode(links[-1], to))
        world.drop(links[-2])
        world.deliver(to - 1, to)
    world.drain()
    assert [link.state for link in links[1:]] == ["pending", "pending", "confirmed"]  # dropped handles hear no more
    assert world.freed == set()
    assert [world.tables[n].counts() for n in (A, B, C)] == [EMPTY] * 3
    world.finish()


def test_g3_a_creator_that_drops_at_once_says_del_only_after_created(world: World) -> None:
    """G3: the fork of a call that is still under way is not deleted before it is counted."""
    fork = world.create(A, OWNER)
    world.drop(fork)
    assert messages(world, A, OWNER) == []
    world.drain()
    assert world.freed == {fork.rref}
    assert fork.state == "pending"  # a dead handle is told nothing


def test_g3_a_fork_may_be_passed_on_before_it_is_confirmed(world: World) -> None:
    """G3: A passes a reference on whose creation has not even been sent."""
    parent = world.create(A, OWNER, send=False)
    child = world.encode(parent, B)
    world.deliver(A, B)
    grandchild = world.encode(child, C)
    world.deliver(B, C)
    world.drop(parent)
    world.drop(child)
    world.send()
    world.drain()
    assert grandchild.state == "confirmed"
    assert world.freed == set()


def test_g4_an_add_that_comes_before_create_is_answered_when_create_comes(world: World) -> None:
    """G4: B's ADD overtakes A's CREATE on another connection; it is neither refused nor forgotten."""
    parent = world.create(A, OWNER)
    child = world.encode(parent, B)
    world.deliver(A, B)
    world.deliver(B, OWNER)
    assert messages(world, OWNER, B) == []
    assert messages(world, OWNER, A) == [Ask]
    assert world.tables[OWNER].counts().placeholders == 1
    assert [record.role for record in world.tables[OWNER].live()] == [Role.WAITING]
    world.deliver(OWNER, A)  # the creator knows that CREATE is under way, and says nothing
    assert messages(world, A, OWNER) == []
    world.deliver(A, OWNER)
    assert messages(world, OWNER, B) == [Added]
    world.drain()
    assert child.state == "confirmed"


def test_g5_an_add_after_the_value_was_freed_is_refused_once_the_creator_was_asked(world: World) -> None:
    """G5: the owner cannot tell a freed value from one not created yet; the creator can."""
    first = made(world)
    parent = world.encode(first, B)
    world.drain()
    child = world.encode(parent, C)
    world.drop(first)
    world.deliver(A, OWNER)
    world.kill(B)
    world.deliver(B, OWNER)
    assert world.freed == {first.rref}
    world.deliver(B, C)
    world.deliver(C, OWNER)
    assert messages(world, OWNER, A) == [Ask]
    world.deliver(OWNER, A)
    assert messages(world, A, OWNER) == [Never]
    world.deliver(A, OWNER)
    assert messages(world, OWNER, C) == [Gone]
    world.drain()
    assert child.state == "broken"


def test_g6_a_parent_lost_before_the_childs_add_breaks_the_child(world: World) -> None:
    """G6: creator and only holder A dies after passing to B; B is told, and does not wait."""
    parent = made(world)
    child = world.encode(parent, B)
    world.kill(A)
    world.deliver(A, OWNER)
    world.drain()
    assert world.freed == {parent.rref}
    assert child.state == "broken"


def test_g6_a_lost_owner_breaks_every_fork_and_releases_every_parent(world: World) -> None:
    """G6: confirmed, pending and creating holders all hear of it, and name the worker."""
    confirmed = made(world)
    creating = world.create(A, OWNER)
    pending = world.encode(confirmed, B)
    world.deliver(A, B)
    world.kill(OWNER, keep=lambda length: 0)
    outputs = [world.tables[n].lost(OWNER) for n in (A, B)]
    broken = [output for group in outputs for output in group if isinstance(output, Broken)]
    assert {output.fork for output in broken} == {confirmed.fork, creating.fork, pending.fork}
    assert all("worker 0" in output.reason and "lost" in output.reason for output in broken)
    for number, group in zip((A, B), outputs, strict=True):
        world.apply(number, group)
    assert world.tables[A].counts().pins == 0


def test_g7_an_unsent_creation_breaks_every_user_and_leaves_nothing(world: World) -> None:
    """G7: the call never left; B waits at the owner, C has not asked yet, and both are refused."""
    parent = world.create(A, OWNER, send=False)
    early, late = world.encode(parent, B), world.encode(parent, C)
    world.deliver(A, B)
    world.deliver(B, OWNER)
    world.unsend()
    world.drop(parent)
    assert parent.state == "broken"
    world.deliver(A, OWNER)
    assert world.tables[OWNER].counts().tombstones == 1
    assert [record.role for record in world.tables[OWNER].live()] == [Role.TOMBSTONE]
    assert world.tables[OWNER].refusal(parent.rref) == UNSENT
    world.drain()
    assert world.tables[OWNER].refusal(parent.rref) is None
    assert (early.state, late.state) == ("broken", "broken")
    assert world.tables[OWNER].counts() == EMPTY


def test_g7_a_creation_given_up_before_create_arrived_is_freed_on_arrival() -> None:
    """G7: ABANDON and DEL overtake the CREATE, whose tensors took another connection; the tombstone waits for it."""
    world = World(4, bulk=True)
    fork = world.create(A, OWNER)
    world.give_up(fork)
    world.drop(fork)
    world.deliver(A, OWNER, 1)
    world.deliver(A, OWNER, 1)
    assert world.tables[OWNER].counts() == Counts(0, 0, 0, 0, 0, 0, tombstones=1)
    assert not world.tables[OWNER].holds(fork.rref)
    world.deliver(A, OWNER)
    assert world.freed == {fork.rref}
    assert world.tables[OWNER].counts() == EMPTY
    world.finish()


def test_g8_the_forks_of_a_lost_worker_are_dropped(world: World) -> None:
    """G8: the only holder dies without a word, and the value is freed."""
    fork = made(world)
    world.kill(A, keep=lambda length: 0)
    world.drain()
    assert world.freed == {fork.rref}


def test_g8_pins_for_a_lost_worker_are_released(world: World) -> None:
    """G8: the receiver dies before it registered; the parent's deletion does not wait for it."""
    parent = made(world)
    world.encode(parent, B)
    world.drop(parent)
    world.kill(B)
    world.drain()
    assert world.freed == {parent.rref}


@pytest.mark.parametrize("holder", [A, OWNER])
def test_g9_a_frame_that_is_not_sent_gives_its_fork_back(world: World, holder: int) -> None:
    """G9: encoding failed half way; the parent, or the owner's count, is as before, and once is enough."""
    fork = made(world) if holder == A else world.own(OWNER)
    child = world.encode(fork, B, send=False)
    world.drop(fork)
    assert world.freed == set()
    world.unsend()
    assert world.tables[holder].unsend(child.fork) == []
    world.drain()
    assert world.freed == {fork.rref}


def test_g10_saying_a_thing_twice_changes_nothing(world: World) -> None:
    """G10: DEL, CHILD_OK, drop, lost and GONE of what is over are ignored."""
    parent = made(world)
    child = world.encode(parent, B)
    world.drain()
    owner, holder = world.tables[OWNER], world.tables[A]
    assert holder.on_message(B, ChildOk(child.fork)) == []
    world.drop(parent)
    world.drain()
    assert holder.drop(parent.rref, parent.fork) == []
    assert owner.on_message(A, Del(parent.rref, parent.fork)) == []
    world.drop(child)
    world.drain()
    assert owner.on_message(B, Del(child.rref, child.fork)) == []
    assert world.tables[B].on_message(OWNER, Gone(child.rref, child.fork, "late")) == []
    assert owner.lost(C) == owner.lost(C) == owner.left(C) == []


def test_g11_a_fork_passed_by_the_owner_is_counted_before_the_frame_leaves(world: World) -> None:
    """G11: the owner drops its own handle while the frame is under way; the receiver asks nobody."""
    mine = world.own(OWNER)
    child = world.encode(mine, A)
    world.drop(mine)
    assert world.freed == set()
    assert [(r.role, r.holder) for r in world.tables[OWNER].live()] == [(Role.FORK, A)]
    world.deliver(OWNER, A)
    assert child.state == "confirmed"
    assert not world.queues


def test_g12_passing_back_to_the_owner_gives_a_local_handle_and_releases_the_parent(world: World) -> None:
    """G12: the owner confirms its own handle at once, without a message to itself."""
    parent = made(world)
    back = world.encode(parent, OWNER)
    world.drop(parent)
    world.deliver(A, OWNER)
    assert back.state == "confirmed"
    assert messages(world, OWNER, A) == [ChildOk]
    world.drain()
    assert world.freed == set()
    assert [(r.role, r.confirmed) for r in world.tables[OWNER].live()] == [(Role.OWNER, True)]


def test_g13_a_worker_may_create_on_itself_and_pass_to_itself(world: World) -> None:
    """G13: creation, passing and dropping among one worker's own handles need no message."""
    first = world.create(A, A)
    world.drain()
    second = world.encode(first, A)
    world.drop(first)
    world.drain()
    assert (first.state, second.state) == ("confirmed", "confirmed")
    assert world.freed == set()
    world.drop(second)
    assert world.freed == {first.rref}


def test_g14_the_same_handle_passed_twice_gives_two_forks(world: World) -> None:
    """G14: each passing is counted by itself; dropping one leaves the other."""
    parent = made(world)
    one, two = world.encode(parent, B), world.encode(parent, B)
    world.drop(parent)
    world.drain()
    world.drop(one)
    world.drain()
    assert two.state == "confirmed"
    assert world.freed == set()


MALFORMED: list[object] = [
    None,
    [],
    b"\x01",
    [0],
    ["NOTHING", [1, 2]],
    [True, [1, 0], [1, 1]],
    [1, [1, 0], [1, 1]],
    ["ADD", A, 0, A, 1],
    ["ADD", [A, 0]],
    ["ADD", [A, 0], [A]],
    ["ADD", [A, 0], [A, 1], 1],
    ["ADD", [A, 0], [A, -1]],
    ["ADD", [A, 0], [-1, 1]],
    ["ADD", [A, 0], [A, 1 << 63]],
    ["ADD", [A, 0], [A, True]],
    ["GONE", [A, 0], [A, 1], 5],
    ["ABANDON", [A, 0], [A, 1], 1, "text"],
]


def settled_pair() -> tuple[ReferenceTable, ReferenceTable, ReferenceId, ReferenceId]:
    """A value at OWNER that A created, both tables knowing it."""
    owner, user = ReferenceTable(OWNER), ReferenceTable(A, keys=itertools.repeat(0))
    rref, fork = user.create(OWNER)
    owner.on_create(rref, fork, A)
    user.created(rref, fork)
    return owner, user, rref, fork


@pytest.mark.parametrize("fields", MALFORMED, ids=repr)
def test_g15_a_malformed_message_is_refused(fields: list[object]) -> None:
    """G15: wrong length, type or range is a ProtocolError; no table sees it."""
    with pytest.raises(ProtocolError):
        read(fields)


RREF, FORK = ReferenceId(A, 0), ReferenceId(A, 1)
IMPOSSIBLE: dict[str, tuple[int, Message]] = {
    "counted fork added again": (A, Add(RREF, FORK)),
    "fork the owner named": (B, Add(RREF, ReferenceId(OWNER, 0))),
    "fork of another worker deleted": (B, Del(RREF, FORK)),
    "answer nobody asked for": (A, Added(RREF, FORK)),
    "never from a stranger": (B, Never(RREF)),
    "question about another's value": (B, Ask(RREF)),
    "abandoned by a stranger": (B, Abandon(RREF, FORK, False, "no")),
    "message from itself": (OWNER, Del(RREF, FORK)),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_g15_an_impossible_message_is_refused_and_changes_nothing(case: str) -> None:
    """G15: what no correct worker can send is a ProtocolError."""
    sender, message = IMPOSSIBLE[case]
    owner, *_ = settled_pair()
    before = owner.live(), owner.counts()
    with pytest.raises(ProtocolError):
        owner.on_message(sender, message)
    assert (owner.live(), owner.counts()) == before


def test_g15_answers_from_the_wrong_worker_are_refused() -> None:
    """G15: GONE and CHILD_OK count only from the owner, and from the worker the child was passed to."""
    _owner, user, rref, fork = settled_pair()
    passed, _ = user.encode(rref, fork, B)
    before = user.live()
    with pytest.raises(ProtocolError):
        user.on_message(B, Gone(rref, fork, "no"))
    with pytest.raises(ProtocolError):
        user.on_message(C, ChildOk(passed.fork))
    assert user.live() == before


@pytest.mark.parametrize(
    "fields",
    [
        "x",
        [A, 0, OWNER, A, 2, None],
        [[A, 0], OWNER, [A]],
        [[A, 0], OWNER, [A, -1], None],
        [[A, 0], -1, [A, 2], None],
        [[A, 0], OWNER, [A, 2], "0"],
    ],
)
def test_g15_a_malformed_reference_in_a_frame_is_refused(fields: object) -> None:
    """G15: wrong shape, type or range."""
    with pytest.raises(ProtocolError):
        read_values(pack([[[None], [], [], [], None, 0, None, [fields]]]))


@pytest.mark.parametrize(
    "passed",
    [PassedReference(RREF, OWNER, ReferenceId(C, 2)), PassedReference(ReferenceId(B, 3), A, ReferenceId(A, 2))],
)
def test_g15_an_impossible_reference_in_a_frame_is_refused(passed: PassedReference) -> None:
    """G15: a fork the sender cannot have named, a value of the sender that we never named."""
    table = ReferenceTable(B)
    with pytest.raises(ProtocolError):
        table.decode(passed, A)
    assert table.counts() == EMPTY


BAD, NOBODY = 3, 4


class Deceived:
    """Three workers that say what they are told to say, a fourth that invents references, and an id that nobody has."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        # Keys would keep the fourth from naming anything that is there: it has been told all.
        self.tables = [ReferenceTable(number, keys=itertools.repeat(0)) for number in range(3)]
        self.under_way: deque[tuple[int, int, Message]] = deque()
        self.held: list[tuple[int, ReferenceId, ReferenceId]] = []  # by whom, and of what
        self.refused = 0  # what the fourth said itself, and was caught at

    def number(self) -> int:
        return self.chance.randrange(12)

    def invent(self) -> None:
        """The fourth passes on what may name anything, true values and forks of others among it."""
        rref = ReferenceId(self.chance.choice((0, 1, 2, BAD, NOBODY)), self.number())
        owner = self.chance.choice((0, 1, 2, BAD, NOBODY))
        fork = ReferenceId(BAD, self.chance.randrange(1 << 20) if self.chance.random() < 0.8 else self.number())
        try:
            self.give(PassedReference(rref, owner, fork), BAD, self.chance.randrange(3))
        except ProtocolError:
            self.refused += 1

    def pass_on(self) -> None:
        """One of the three passes a reference on, in good faith: nobody may hold that against it."""
        if not self.held:
            return
        sender, rref, fork = self.chance.choice(self.held)
        to = self.chance.choice((0, 1, 2, BAD))
        try:
            passed, outputs = self.tables[sender].encode(rref, fork, to)
        except RpcUsageError:  # it has been told that the reference is none
            return
        self.carry_out(sender, outputs)
        if to != BAD:
            self.give(passed, sender, to)

    def make(self) -> None:
        """One of the three makes a value of its own, or a reference to a value of another one."""
        maker, owner = self.chance.randrange(3), self.chance.randrange(3)
        table = self.tables[maker]
        if maker == owner:
            self.held.append((maker, *table.own()))
            return
        rref, fork = table.create(owner)
        self.held.append((maker, rref, fork))
        self.carry_out(owner, self.tables[owner].on_create(rref, fork, maker))
        self.carry_out(maker, table.created(rref, fork))

    def drop(self) -> None:
        if self.held:
            holder, rref, fork = self.held.pop(self.chance.randrange(len(self.held)))
            self.carry_out(holder, self.tables[holder].drop(rref, fork))

    def give(self, passed: PassedReference, sender: int, to: int) -> None:
        outputs = self.tables[to].decode(passed, sender)
        self.held.append((to, passed.rref, passed.fork))
        self.carry_out(to, outputs)

    def carry_out(self, worker: int, outputs: Outputs) -> None:
        self.under_way += [(worker, each.to, each.message) for each in outputs if isinstance(each, Send)]

    def deliver(self) -> None:
        """All that the three have to say to each other arrives; none of it is a fault of whoever says it."""
        while self.under_way:
            sender, to, message = self.under_way.popleft()
            if to < 3:
                self.carry_out(to, self.tables[to].on_message(sender, message))


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_g17_invented_references_harm_nobody_who_passes_them_on(count: int) -> None:
    """G17: of any number of them, none ends a connection of two honest workers; with their inventor all is gone."""
    world = Deceived(count)
    for _ in range(count):
        world.invent()
        for step in (world.pass_on, world.make, world.drop, world.drop):
            if world.chance.random() < 0.5:
                step()
        if world.chance.random() < 0.7:
            world.deliver()
    assert world.refused < count / 2  # most were believed, and passed on
    for table in world.tables:
        for lost in (BAD, NOBODY):
            world.carry_out(table.worker_id, table.lost(lost))
    world.deliver()
    while world.held:
        world.drop()
    world.deliver()
    assert [table.counts() for table in world.tables] == [EMPTY] * 3


def awaited(world: World, creator: int) -> tuple[Fork, Fork]:
    """The fork of a creation that is not sent yet, and one at the owner of what will be the value."""
    first = world.create(creator, OWNER, send=False)
    if creator != OWNER:  # the owner knows of it by the ADD of a third worker, and by a handle that came home
        world.encode(first, B)
        world.encode(first, OWNER)
        world.deliver(creator, B)
        world.deliver(B, OWNER)
    return first, world.own(OWNER, like=first)


@pytest.mark.parametrize("creator", [OWNER, A])
def test_g18_an_owner_counts_what_it_was_lent_before_the_value_is_there(world: World, creator: int) -> None:
    """G18: the value that comes is kept for it alone, and for whom it was passed to meanwhile."""
    first, lent = awaited(world, creator)
    child = world.encode(lent, C)
    world.drop(first)
    world.drain()
    assert child.state == "confirmed"
    world.send()
    world.drain()
    for fork in [fork for fork in world.usable() if fork not in (lent, child)]:
        world.drop(fork)
    world.drain()
    assert world.tables[OWNER].counts() == Counts(1, 0, 0, forks=2, pins=0, placeholders=0, tombstones=0, granted=1)
    world.drop(lent)
    assert world.freed == set()
    world.drop(child)
    world.drain()
    assert world.freed == {first.rref}


@pytest.mark.parametrize("creator", [OWNER, A])
def test_g18_what_was_lent_breaks_with_a_creation_that_fails(world: World, creator: int) -> None:
    """G18: the handle, and those it was passed on to, hear that the call was never sent."""
    first, lent = awaited(world, creator)
    child = world.encode(lent, C)
    world.drain()
    world.unsend()
    world.drain()
    assert [fork.state for fork in (first, lent, child)] == ["broken"] * 3
    with pytest.raises(RpcUsageError, match="was never sent"):
        world.tables[OWNER].encode(lent.rref, lent.fork, B)
    with pytest.raises(RpcUsageError, match="does not exist"):
        world.tables[OWNER].own(first.rref)


def test_g18_what_is_lent_when_the_value_was_freed_breaks_once_the_creator_was_asked(world: World) -> None:
    """G18: a late ADD looks as if the value were still to come; who lends it has given up its call meanwhile."""
    first = made(world)
    parent = world.encode(first, B)
    world.drain()
    world.encode(parent, C)
    world.drop(first)
    world.deliver(A, OWNER)
    world.kill(B)
    world.deliver(B, OWNER)
    world.deliver(B, C)
    world.deliver(C, OWNER)
    lent = world.own(OWNER, like=first)
    child = world.encode(lent, C)
    world.drain()
    assert (lent.state, child.state) == ("broken", "broken")


# -- any interleaving --------------------------------------------------------------------------------------------------


class Actions:
    """What may happen in a world, each choice made by a number; a choice that is not there does nothing."""

    def __init__(self, world: World, most_deaths: int = 2) -> None:
        self.world = world
        self.deaths = most_deaths

    def _worker(self, n: int) -> int:
        alive = sorted(self.world.alive)
        return alive[n % len(alive)]

    def _fork(self, n: int) -> Fork | None:
        forks = [fork for fork in self.world.usable()]
        return forks[n % len(forks)] if forks else None

    def create(self, n: int, m: int) -> None:
        """To any worker, also one that is dead without the creator knowing it; one in eight fails to construct."""
        to = (n // 7) % len(self.world.tables)
        creator = self._worker(n)
        if to in self.world.departed[creator]:
            return  # the runtime refuses it before it has a reference
        self.world.create(creator, to, ok=m % 8 != 0, send=m % 3 != 0)

    def own(self, n: int, m: int) -> None:
        self.world.own(self._worker(n))

    def own_again(self, n: int, m: int) -> None:
        """The owner counts a reference to its value that it was lent; the value may be still to come."""
        fork = self._fork(n)
        if fork is not None and fork.owner in self.world.alive and self.world.tables[fork.owner].holds(fork.rref):
            self.world.own(fork.owner, like=fork)

    def encode(self, n: int, m: int) -> None:
        fork = self._fork(n)
        if fork is not None and fork.state != "broken":
            self.world.encode(fork, m % len(self.world.tables), send=(m // 5) % 4 != 0)

    def send(self, n: int, m: int) -> None:
        if self.world.unsent:
            self.world.send(n % len(self.world.unsent))

    def unsend(self, n: int, m: int) -> None:
        if self.world.unsent:
            self.world.unsend(n % len(self.world.unsent))

    def drop(self, n: int, m: int) -> None:
        fork = self._fork(n)
        if fork is not None:
            self.world.drop(fork)

    def deliver(self, n: int, m: int) -> None:
        frames = self.world.deliverable()
        if frames:
            self.world.deliver(*frames[n % len(frames)])

    def give_up(self, n: int, m: int) -> None:
        calls = [f for f in self.world.usable() if f.call == "sent" and f.state == "pending"]
        if calls:
            self.world.give_up(calls[n % len(calls)])

    def kill(self, n: int, m: int) -> None:
        if self.deaths and len(self.world.alive) > 2:
            self.deaths -= 1
            self.world.kill(self._worker(n), keep=lambda length: m % (length + 1))


WEIGHTS = {
    "create": 3,
    "own": 1,
    "own_again": 1,
    "encode": 7,
    "send": 3,
    "unsend": 1,
    "drop": 6,
    "deliver": 16,
    "give_up": 1,
    "kill": 1,
}


SEEDS = 2000


def run_seed(seed: int, table: MakeTable = ReferenceTable, steps: int = 100) -> World:
    """A random program on three or four workers, to its end. Raises Violation when a guarantee breaks."""
    source = random.Random(seed)
    world = World(3 + seed % 2, table, bulk=seed % 4 >= 2)
    actions = Actions(world, most_deaths=seed % 3)
    names = source.choices(list(WEIGHTS), weights=list(WEIGHTS.values()), k=steps)
    for name in names:
        getattr(actions, name)(source.randrange(1 << 16), source.randrange(1 << 16))
    world.finish()
    return world


@pytest.mark.random
def test_every_guarantee_holds_in_random_programs() -> None:
    """G1 to G16: many seeded programs with overtaken frames, unsent frames and dying workers."""
    count = examples(SEEDS)
    worlds = [run_seed(seed) for seed in range(count)]
    states = [fork.state for world in worlds for fork in world.forks.values() if fork.kind == "passed"]
    assert min(states.count("confirmed"), states.count("broken")) > count // 4  # both ends are reached
    assert sum(len(world.freed) for world in worlds) > 2 * count


def test_a_reason_is_kept_in_part() -> None:
    """There may be one for each reference, told to all who hold it: whatever its sender makes of it, it is short."""
    rref = ReferenceId(2, 1, 1)
    for message in (Abandon(rref, fork_of_creator(rref), False, 10**6 * "x"), Gone(rref, rref, 10**6 * "x")):
        taken = read(unpack(pack(MESSAGES.write(message))))
        assert taken == message._replace(reason=REASON_LIMIT * "x")
