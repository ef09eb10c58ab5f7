"""New processes in the places of members that are gone, here as further workers of this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import PeerLost, RpcBackendOptions, RpcUsageError, Worker
from aiorpc.errors import RendezvousError, UnknownWorker
from aiorpc.events import WorkerLost, WorkerReplaced
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime.calls.declared import pack
from aiorpc.runtime.group import group as handlers
from aiorpc.runtime.group.joining import JoiningMembers
from aiorpc.runtime.meeting.key_value import KeyValueClient
from aiorpc.runtime.meeting.membership import Member, Proof
from aiorpc.runtime.meeting.rendezvous import MeetingOptions, Rendezvous
from aiorpc.runtime.meeting.returning import PlacesInStore
from aiorpc.testing import cluster
from tests.runtime.inside import set_bounds
from tests.runtime.test_rendezvous import ELSEWHERE, PATIENCE, make_record, together
from tests.runtime.waiting import until

LONG = 10.0
SIZE = 3


class Count:
    """A value to refer to."""

    def __init__(self, start: Any = 0) -> None:
        self.value = start

    def add(self, by: int) -> Any:
        self.value += by
        return self.value


async def for_ever() -> None:
    await asyncio.Event().wait()


def who_calls() -> tuple[str, int]:
    caller = aiorpc.caller()
    return caller.name, caller.id


class Place:
    """Where a group meets, and those who have come back to it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.returned: list[Worker] = []

    async def come_back(self, rank: int, name: str = "", **options: Any) -> Worker:
        chosen = RpcBackendOptions(**options)
        worker = Worker(name or f"worker{rank}", rank=rank, world_size=SIZE, store=self.store, options=chosen)
        await asyncio.wait_for(worker.start(), LONG)
        self.returned.append(worker)
        return worker


@contextlib.asynccontextmanager
async def place(**options: Any) -> AsyncIterator[tuple[list[Worker], Place]]:
    """A group, and its place; at the end all that live leave together."""
    here = Place(HashStore())
    async with cluster(SIZE, store=here.store, options=RpcBackendOptions(**options)) as workers:
        yield workers, here
        alive = [each for each in (*workers, *here.returned) if not each.closed]
        reports = await asyncio.wait_for(asyncio.gather(*(each.shutdown() for each in alive)), LONG)
        assert not any(report.timed_out for report in reports)


async def lose(worker: Worker, *others: Worker) -> None:
    """It dies, and the others know: by their connections, as the process lives on."""
    for each in others:
        assert await each.call(worker.name, abs, -3) == 3
    await worker._drop()
    await until(lambda: all(each._node.group.is_gone(worker._node.engine.record) for each in others))


async def test_no_peer_is_left_of_a_worker_that_was_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """However often that happens, and at those who came later, too; what refers to the first one ends with its loss."""
    async with place() as (workers, here):
        ref = workers[0].remote("worker2", Count)
        await ref
        first = last = workers[2]
        for _ in range(3):
            await lose(last, *workers[:2])
            last = await here.come_back(2)
        for each in (*workers[:2], last):
            assert await each.call("worker2", abs, -3) == 3
            assert sorted(peer.name for peer in each._node.peers.all()) == ["worker0", "worker1", "worker2"]
            assert each._node.peers.describe(2) == "worker2"
            assert isinstance(each._node.peers.of(first._node.engine.record).gone, PeerLost)
            with pytest.raises(PeerLost, match=r"worker2 \(rank 2, pid \d+ .* was lost"):
                await each._node.peers.by_id(2).call(abs, (-3,), None, LONG)
        with pytest.raises(PeerLost, match=r"worker2 \(rank 2, pid \d+ .* was lost"):
            await ref.to_here()  # type: ignore[misc]
        assert ref.owner() == first.info
        del ref
    assert "worker worker0 shut down; lost on the way: worker2 (3 times)" in caplog.text


@pytest.mark.parametrize("rank", [2, 0])
async def test_a_new_worker_takes_the_place_of_a_lost_one(rank: int) -> None:
    """A member's or the leader's: all call it by name and rank, it calls all, and the others are told."""
    async with place() as (workers, here):
        dead, *others = workers[rank], *(each for each in workers if each.id != rank)
        news = [each.events() for each in others]
        await lose(dead, *others)
        new = await here.come_back(rank)
        assert (new.info, new._node.engine.id) == (dead.info, SIZE)
        for each, heard in zip(others, news, strict=True):
            assert await each.call(new.name, abs, -3) == await each.call(rank, abs, -3) == 3
            assert await new.call(each.name, who_calls) == (new.name, rank)
            assert each.worker_infos() == new.worker_infos() == [worker.info for worker in workers]
            events = [await asyncio.wait_for(anext(heard), LONG) for _ in range(2)]
            assert isinstance(events[0], WorkerLost) and events[1] == WorkerReplaced(new.info)
            with pytest.raises(UnknownWorker):
                each.call(SIZE, abs, -3)
            await heard.aclose()


async def test_what_belonged_to_the_lost_one_stays_lost() -> None:
    """References to its values raise PeerLost for ever; those to values of the new one can be used by all."""
    async with place() as (workers, here):
        a, b, dead = workers
        old = a.remote("worker2", Count, 5)
        assert await old.rpc_async().add(1) == 6
        pending = a.call("worker2", for_ever)
        handle = a.peer("worker2")
        await lose(dead, a, b)
        with pytest.raises(PeerLost):
            await pending
        new = await here.come_back(2)
        assert await handle.call(abs, -3) == 3  # a handle stands for the name
        fresh = a.remote("worker2", Count, 1)
        assert await fresh.rpc_async().add(1) == 2 and fresh.owner() == new.info
        with pytest.raises(PeerLost, match="worker2"):
            await old.rpc_async().add(1)
        with pytest.raises(PeerLost, match="worker2"):
            await old
        assert await a.call("worker2", use_reference, fresh) == 12
        del old, fresh


async def test_who_has_come_back_uses_what_it_creates_before_that_has_arrived() -> None:
    """As any member: a method that overtakes the creation, whose arguments are long, waits for it at the owner."""
    async with place() as (workers, here):
        await lose(workers[2], *workers[:2])
        for worker in (workers[1], await here.come_back(2)):
            for _ in range(5):
                made = worker.remote("worker0", Count, torch.ones(1 << 22))
                assert (await made.rpc_async().add(1)).sum() == 1 << 23
                del made


async def use_reference(rref: Any) -> int:
    return int(await rref.rpc_async().add(10))


async def test_a_place_can_be_taken_again_and_again() -> None:
    """Twice in a row, and by whoever has just come back; then two places at once, that of the leader among them."""
    async with place() as (workers, here):
        a, b, c = workers
        await lose(c, a, b)
        first = await here.come_back(2)
        await lose(first, a, b)
        second = await here.come_back(2)
        assert await b.call("worker2", abs, -3) == 3
        await lose(a, b, second)
        await lose(second, b)
        assert b._node.group.leads
        new, third = await asyncio.gather(here.come_back(0), here.come_back(2))
        for each in (b, new, third):
            for name in ("worker0", "worker1", "worker2"):
                assert await each.call(name, abs, -3) == 3
        assert [each._node.group.leads for each in (b, new, third)] == [True, False, False]


async def where_unless(number: int) -> int:
    """The id of the worker that runs this; never from that one."""
    here = aiorpc.current()._node.engine.id
    if here == number:
        await for_ever()
    return here


@pytest.mark.parametrize("idempotent", [False, True])
async def test_a_call_with_retries_goes_on_to_who_has_taken_the_place(idempotent: bool) -> None:
    """It was under way when the member died; each try looks up who has the name, while the place is vacant in vain."""
    async with place() as (workers, here):
        a, b, c = workers
        peer = a.peer("worker2", timeout=60, retries=1000, backoff=(0.01, 0.05), idempotent=idempotent)
        assert await peer.call(where_unless, -1) == 2
        call = peer.call(where_unless, 2)
        await lose(c, a, b)
        await until(lambda: a.statistics().calls_retried >= 3)
        assert not call.done()
        new = await here.come_back(2)
        assert await asyncio.wait_for(call, LONG) == new._node.engine.id == SIZE
        assert await peer.call(where_unless, 2) == SIZE


@pytest.mark.parametrize("known", [True, False], ids=["known to all", "to the leader alone"])
@pytest.mark.parametrize("rank", [2, 0])
async def test_a_new_worker_takes_the_place_of_one_that_left_in_order(rank: int, known: bool) -> None:
    """As after a death: calls by name and rank go to it, and nobody is lost; the leader's place, too."""
    async with place() as (workers, here):
        leaver, *others = workers[rank], *(each for each in workers if each.id != rank)
        if known:
            for each in others:
                assert await each.call(leaver.name, abs, -3) == 3
        await leaver.shutdown(graceful=False)
        await until(lambda: others[0]._node.group.is_gone(leaver._node.engine.record))
        new = await here.come_back(rank)
        assert (new.info, new._node.engine.id) == (leaver.info, SIZE)
        for each in others:
            assert await each.call(new.name, abs, -3) == await each.call(rank, abs, -3) == 3
            assert await new.call(each.name, who_calls) == (new.name, rank)
            assert each._node.group.lost == {} and len(each._node.peers.all()) == SIZE
        await lose(others[1], others[0], new)  # who leads now looks after the others
        assert await here.come_back(others[1].id)


async def test_places_are_given_back_one_after_the_other() -> None:
    """A rolling restart of all, the leader first; at the end they are the group that they were."""
    async with place() as (workers, here):
        alive = list(workers)
        for rank in range(SIZE):
            await alive[rank].shutdown(graceful=False)
            alive[rank] = await here.come_back(rank)
        for each in alive:
            for other in alive:
                assert await each.call(other.name, abs, -3) == 3
            assert each._node.rendezvous.generation == 1 and each._node.group.lost == {}


async def test_who_may_not_have_the_place_of_one_that_left_is_told_by_whom_and_why() -> None:
    """At once, and not once its time is up."""
    async with place() as (workers, here):
        await workers[2].shutdown(graceful=False)
        with pytest.raises(
            RendezvousError, match=r"has left, says worker0 .*rank 2 is the place of 'worker2', and not"
        ):
            await here.come_back(2, name="x")
        await here.come_back(2)


async def test_all_that_left_together_form_the_next_generation_under_other_names() -> None:
    """Whoever is back first wants no place in the old one, which nobody leads any more."""
    async with place() as (workers, here):
        await asyncio.gather(*(each.shutdown() for each in workers))
        again = [Worker(f"new{rank}", rank=rank, world_size=SIZE, store=here.store) for rank in range(SIZE)]
        await asyncio.wait_for(asyncio.gather(*(each.start() for each in again)), LONG)
        assert again[0]._node.rendezvous.generation == 2
        await asyncio.gather(*(each.shutdown() for each in again))


async def test_those_who_have_come_back_go_on_alone() -> None:
    """When all that were there at first have died, the first of those who came leads, and lets others in."""
    async with place() as (workers, here):
        await lose(workers[2], *workers[:2])
        second = await here.come_back(2)
        await lose(workers[0], workers[1], second)
        await lose(workers[1], second)
        assert second._node.group.leads
        zero, one = await asyncio.gather(here.come_back(0), here.come_back(1))
        assert await zero.call("worker1", abs, -3) == await one.call("worker2", abs, -3) == 3


async def test_the_place_of_one_that_lives_is_refused() -> None:
    """By name, with who says so, and in a short time; nobody is harmed."""
    async with place() as (workers, here):
        with pytest.raises(RendezvousError, match=r"worker1 \(rank 1.*lives: process \d+ of this host runs"):
            await here.come_back(1)
        await lose(workers[2], *workers[:2])
        with pytest.raises(
            RendezvousError,
            match=r"says worker0 .*rank 2 is the place of 'worker2', and not of 'x'",
        ):
            await here.come_back(2, "x")
        await here.come_back(2)
        assert await workers[0].call("worker1", abs, -3) == 3


def on_host(rank: int, host: str, port: int) -> WorkerRecord:
    """A record that says that the worker listens there."""
    return replace(make_record(f"w{rank}", rank, host=host), tcp_port=port)


@pytest.mark.parametrize("said", [b"", b"220 mail.example ready\r\n"], ids=["hangs up", "speaks first"])
def test_another_program_at_the_port_of_the_lost_is_no_sign_of_life(said: bytes) -> None:
    """A worker waits for the first word of whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.sendall(said)

        before, newcomer = on_host(0, ELSEWHERE, port), on_host(0, "", port + 1)
        places = PlacesInStore(KeyValueClient(HashStore(), "here"), 1, 2, Proof())
        answering = threading.Thread(target=answer)
        answering.start()
        assert places.sign_of_life(before, newcomer) == ""
        answering.join()
        assert places.sign_of_life(before, newcomer) == f"it takes connections at 127.0.0.1:{port}"


def test_a_listener_of_ones_own_is_no_sign_of_life() -> None:
    """Behind a reboot, or in a new container, a newcomer listens where the one before did; somebody else is a sign."""
    places = PlacesInStore(KeyValueClient(HashStore(), "here"), 1, 2, Proof(None, False, False))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        before = on_host(0, ELSEWHERE, port)
        assert places.sign_of_life(before, on_host(0, "", port)) == ""
        assert places.sign_of_life(before, on_host(0, "", port + 1)) == f"it takes connections at 127.0.0.1:{port}"
        here = replace(on_host(0, "", port), tcp_host="other-address")
        assert places.sign_of_life(before, here) == f"it takes connections at 127.0.0.1:{port}"


def test_after_a_reboot_of_all_hosts_the_next_generation_forms() -> None:
    """With the same addresses and ports as before, and a store that was elsewhere."""
    store = HashStore()
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [each.getsockname()[1] for each in listeners]

        def join(rank: int, host: str) -> int:
            opened = Rendezvous.open(
                "env://",
                rank=rank,
                world_size=2,
                timeout=PATIENCE,
                store=store,
                options=MeetingOptions(require_secret=False),
            )
            with contextlib.closing(opened):
                opened.join(lambda number: on_host(number, host, ports[rank]))
                return opened.generation

        for host, generation in ((ELSEWHERE, 1), ("", 2)):  # those of the first generation have not left
            assert together(*(partial(join, rank, host) for rank in range(2))) == [generation] * 2


async def test_a_newcomer_that_is_given_up_as_it_is_let_in_leaves_its_place_to_the_next() -> None:
    """Although its process lives: the claim is taken back, whatever had been found at the store by then."""
    async with place() as (workers, here):
        await lose(workers[2], *workers[:2])
        opened = Rendezvous.open("env://", rank=2, world_size=SIZE, timeout=PATIENCE, store=here.store)
        with contextlib.closing(opened):
            await asyncio.to_thread(opened.join, lambda number: make_record("worker2", number))
            assert opened.returned is not None
            opened.abandon()
        new = await here.come_back(2)
        assert await workers[0].call("worker2", abs, -3) == await new.call("worker0", abs, -3) == 3


async def test_who_was_replaced_is_waited_for_as_any_member() -> None:
    """Those that have entered their shutdown before serve the new one, until it leaves with them."""
    async with place() as (workers, here):
        a, b, c = workers
        leaving = asyncio.ensure_future(b.shutdown())
        await until(lambda: b.leaving)
        await lose(c, a, b)
        new = await here.come_back(2)
        leaving_too = asyncio.ensure_future(a.shutdown())
        await until(lambda: a.id in a._node.group.departure.entered)
        assert await new.call("worker0", abs, -3) == await new.call("worker1", abs, -3) == 3
        assert not leaving.done() and not leaving_too.done()
        await asyncio.wait_for(asyncio.gather(new.shutdown(), leaving, leaving_too), LONG)


async def test_the_group_can_be_formed_anew_after_a_replacement() -> None:
    """All leave together and come again, at the same store: they are the next generation."""
    async with place() as (workers, here):
        await lose(workers[2], *workers[:2])
        await here.come_back(2)
        await asyncio.gather(*(each.shutdown() for each in (*workers[:2], here.returned[0])))
        again = [Worker(f"worker{rank}", rank=rank, world_size=SIZE, store=here.store) for rank in range(SIZE)]
        await asyncio.wait_for(asyncio.gather(*(each.start() for each in again)), LONG)
        assert again[0]._node.rendezvous.generation == 2
        assert await again[0].call("worker2", abs, -3) == 3
        await asyncio.gather(*(each.shutdown() for each in again))


async def test_with_a_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims and answers bear seals; what somebody without the secret writes there lets nobody in."""
    monkeypatch.setenv("AIORPC_SECRET", "long enough, and random")
    async with place() as (workers, here):
        await lose(workers[2], *workers[:2])
        forged = Member(workers[2]._node.engine.record).to_json()
        here.store.set("aiorpc/1/slot/2/1", json.dumps(forged))
        new = await here.come_back(2)
        assert await workers[1].call("worker2", abs, -3) == 3
        assert new._node.engine.id == SIZE


async def test_only_the_leader_introduces_a_newcomer() -> None:
    """Nobody takes another member's word for it, and not the leader's where the one before says that it is there."""
    async with place() as (workers, _):
        a, b, c = workers
        set_bounds(b, vouch=0.1)
        liar = replace(a._node.engine.record, id=SIZE, incarnation="ab")
        with pytest.raises(RpcUsageError, match="takes the word of its leader alone"):
            await c.call("worker1", handlers.introduce, pack(liar.to_wire()))  # type: ignore[call-overload]
        looked, look = list[int](), JoiningMembers._look_whether_it_leads

        async def seen(newcomers: JoiningMembers, leader: int) -> None:
            looked.append(leader)
            await look(newcomers, leader)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(JoiningMembers, "_look_whether_it_leads", seen)
            flood = [c.call("worker1", handlers.introduce, pack(liar.to_wire())) for _ in range(50)]  # type: ignore[call-overload]
            refused = await asyncio.gather(*flood, return_exceptions=True)
        assert {*map(type, refused)} == {RpcUsageError} and looked == [c._node.engine.id]  # one task for all of them
        set_bounds(b)
        taken = replace(c._node.engine.record, id=SIZE, incarnation="ab")
        with pytest.raises(RpcUsageError, match=r"worker2 .* is there, as it says itself, and has that place"):
            await a.call("worker1", handlers.introduce, pack(taken.to_wire()))  # type: ignore[call-overload]
        with pytest.raises(RpcUsageError, match="it was not admitted"):
            await c.call("worker0", handlers.arrive, pack(c._node.engine.record.to_wire()))  # type: ignore[call-overload]
        for each in workers:
            assert await each.call("worker2", abs, -3) == 3 and each._node.group.lost == {}


async def die(worker: Worker) -> None:
    """The leader dies, and does not answer what it is asked by then."""
    await worker._drop()
    await for_ever()


@pytest.mark.parametrize("heard", [False, True])
async def test_a_newcomer_whose_leader_dies_in_the_midst_begins_anew(
    monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Its init goes on with the next leader, under another id; that one may have heard of the first id, or not."""
    async with place() as (workers, here):
        a, b, c = workers
        news = b.events()
        await lose(c, a, b)
        set_bounds(b, refused=0.05)
        joining = b._node.group.joining
        introduce = joining.introduce

        async def die_meanwhile(leader: int, newcomer: Any) -> None:
            if heard:
                await introduce(leader, newcomer)
            await die(a)

        monkeypatch.setattr(joining, "introduce", die_meanwhile)
        new = await here.come_back(2)
        monkeypatch.undo()
        assert new._node.engine.id == SIZE + 1 and b._node.group.leads
        assert await new.call("worker1", abs, -3) == await b.call("worker2", abs, -3) == 3
        await here.come_back(0)
        assert await b.call("worker0", abs, -3) == await new.call("worker0", abs, -3) == 3
        told = [type(await asyncio.wait_for(anext(news), LONG)) for _ in range(6 if heard else 4)]
        assert told.count(WorkerLost) == told.count(WorkerReplaced)
        await news.aclose()
