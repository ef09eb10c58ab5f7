"""Groups without a world size: workers join and leave at any time."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore, Store

import aiorpc
from aiorpc import PeerLeft, PeerLost, RpcBackendOptions, RpcTimeout, RpcUsageError, Worker
from aiorpc.errors import RendezvousError, UnknownWorker
from aiorpc.protocol import leaving
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime.caller.peers import UNMET
from aiorpc.runtime.calls.declared import pack
from aiorpc.runtime.group import group as handlers
from aiorpc.runtime.group.group import Group
from aiorpc.testing import cluster
from tests.limits import busy
from tests.runtime.inside import set_bounds
from tests.runtime.joining import unheard_of
from tests.runtime.stores import ROSTER, WatchedStore
from tests.runtime.waiting import LIMIT, until


def where() -> str:
    return aiorpc.current().name


async def pair() -> AsyncIterator[int]:
    yield 1
    yield 2


async def for_ever() -> None:
    await asyncio.Event().wait()


def names(worker: Worker) -> list[str]:
    return [info.name for info in worker.worker_infos()]


@pytest.fixture
def store() -> Store:
    return HashStore()


async def test_workers_come_and_go(store: Store) -> None:
    """Each newcomer reaches all and is reached by all, in any order of joining and leaving."""
    first = await aiorpc.init("first", store=store)
    second = await aiorpc.init("second", store=store)
    assert await first.call("second", where) == "second" and await second.call("first", where) == "first"
    await first.shutdown()
    third = await aiorpc.init("third", store=store)
    assert await third.call("second", where) == "second" and await second.call("third", where) == "third"
    assert len({first.id, second.id, third.id}) == 3
    await second.shutdown()
    await third.shutdown()


def connected(worker: Worker) -> set[str]:
    """The members with which a worker has a connection."""
    node = worker._node
    called = {peer.name for peer in node.peers.all() if peer.connection is not None}
    return called | {service.record.name for service in node.services}


@pytest.fixture
async def unconnected(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    """Four workers, the first of which watches; the others have no connection to each other."""
    monkeypatch.setattr(leaving, "WATCHERS", 1)
    workers = [await Worker(f"w{number}", store=store) for number in range(4)]
    await until(lambda: all(len(names(worker)) == 4 for worker in workers))
    await until(lambda: connected(workers[0]) == {"w1", "w2", "w3"})
    yield workers
    for worker in reversed(workers):
        await worker.shutdown()


async def test_a_member_is_known_without_a_connection(unconnected: list[Worker]) -> None:
    """A connection opens with the first call; a call to all reaches all."""
    assert [connected(worker) for worker in unconnected[1:]] == [{"w0"}] * 3
    assert await unconnected[1].call("w2", where) == "w2"
    assert [connected(worker) for worker in unconnected[1:]] == [{"w0", "w2"}, {"w0", "w1"}, {"w0"}]
    answers = await unconnected[3].group(["w0", "w1", "w2"]).call(where)
    assert list(answers.values()) == ["w0", "w1", "w2"]


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "leaves"])
async def test_the_end_of_a_member_is_heard_of_without_a_connection(unconnected: list[Worker], dies: bool) -> None:
    """By the list of the group: as a loss or as a goodbye, once, with an event."""
    events = unconnected[1].events()
    await (unconnected[3]._drop() if dies else unconnected[3].shutdown())
    async with asyncio.timeout(LIMIT):
        event = await anext(events)
    assert type(event) is (aiorpc.events.WorkerLost if dies else aiorpc.events.WorkerLeft) and event.worker.name == "w3"
    assert connected(unconnected[1]) == {"w0"} and names(unconnected[1]) == ["w0", "w1", "w2"]
    with pytest.raises(PeerLost if dies else PeerLeft):
        await unconnected[1].call("w3", where)


async def test_a_call_to_a_dead_member_fails_before_its_death_is_known(unconnected: list[Worker]) -> None:
    """Without a connection, and without the list: its address refuses."""
    await asyncio.gather(unconnected[3]._drop(), *(fails_with_loss(worker) for worker in unconnected[1:3]))


async def fails_with_loss(worker: Worker) -> None:
    while True:
        try:
            await worker.call("w3", where)
        except PeerLost:
            return


async def test_the_next_member_watches_when_the_watcher_dies(unconnected: list[Worker]) -> None:
    """The others turn to it, and hear of a death as before."""
    await unconnected[0]._drop()
    await until(lambda: connected(unconnected[1]) == {"w2", "w3"})
    await unconnected[3]._drop()
    await until(lambda: names(unconnected[2]) == ["w1", "w2"])


async def test_a_newcomer_hears_of_a_death_before_its_first_look(unconnected: list[Worker], store: Store) -> None:
    """The list had that member when the newcomer joined, and has it no more when it looks."""
    newcomer = await Worker("w4", store=store)
    try:
        await unconnected[2]._drop()
        await until(lambda: names(newcomer) == ["w0", "w1", "w3", "w4"])
    finally:
        await newcomer.shutdown()


async def test_a_member_that_dies_before_it_meets_a_watcher_is_lost(
    unconnected: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest member turns to a newcomer that does not turn to it."""
    monkeypatch.setattr(unconnected[0]._node.group, "watch", lambda record: False)  # they have one process
    with monkeypatch.context() as patch:
        patch.setattr(Group, "start", lambda group: None)
        newcomer = await Worker("w4", store=store)
    await newcomer._drop()
    await until(lambda: "w4" in names(unconnected[1]))
    await until(lambda: "w4" not in names(unconnected[1]))


async def test_a_member_that_was_struck_off_and_lives_stays(unconnected: list[Worker]) -> None:
    """The list is no proof: another member is asked before it counts as lost."""
    victim = unconnected[2]._node
    unconnected[0]._node.rendezvous.leave(victim.engine.record)
    await until(lambda: "w2" in connected(unconnected[1]))
    set_bounds(unconnected[2], absence=0.0)
    await until(lambda: len(unconnected[3]._node.rendezvous.members()) == 4)
    assert [names(worker) for worker in unconnected] == [["w0", "w1", "w2", "w3"]] * 4


async def test_a_call_to_a_name_not_there_yet_waits_for_it(store: Store) -> None:
    """The call is made when the worker has joined; so are those behind it, in order."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        calls = [worker.call("late", where) for _ in range(3)]
        assert worker.pending_calls()[0].worker == "late"
        async with aiorpc.init("late", store=store):
            assert await asyncio.gather(*calls) == ["late"] * 3


async def test_it_waits_within_its_deadline(store: Store) -> None:
    """RpcTimeout says that there was no connection yet; a later call to the name still works."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        start = time.monotonic()
        with pytest.raises(RpcTimeout, match=r"'late'.*no connection"):
            await worker.peer("late", timeout=0.1).call(where)
        assert time.monotonic() - start < 5 * busy()
        async with aiorpc.init("late", store=store):
            assert await worker.call("late", where) == "late"


async def test_a_worker_that_comes_back_under_its_name_is_another(store: Store) -> None:
    """Calls to the old one fail, calls after its end go to the new one."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        old = await aiorpc.init("phoenix", store=store)
        pending = worker.call("phoenix", for_ever)
        assert await worker.call("phoenix", where) == "phoenix"
        await old.shutdown(graceful=False)
        with pytest.raises(PeerLeft, match="phoenix"):
            await pending
        with pytest.raises(PeerLeft, match=r"phoenix .* shut down. That was .* s ago, and no other .* joined"):
            await worker.call("phoenix", where)
        call = worker.peer("phoenix", wait=True).call(where)
        async with aiorpc.init("phoenix", store=store) as new:
            assert await call == "phoenix" and new.id != old.id


async def test_a_newcomer_has_no_other_role_than_it_connected_with(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one was compared with its certificate, where there is one. Another one that it gives later is refused."""
    honest, said = Group._tell, []

    def tell(group: Group, to: WorkerRecord, function: Any, *args: Any) -> None:
        if function is handlers.attend and group._engine.name == "liar":
            lie = replace(group._engine.record, role="learner").to_wire()
            said.append(group._context.peers.of(to).call(function, (pack(lie),), None, LIMIT, system=True))
        honest(group, to, function, *args)

    monkeypatch.setattr(Group, "_tell", tell)
    async with cluster(1, dynamic=True, store=store) as (worker,), aiorpc.init("liar", store=store, role="actor"):
        with pytest.raises(RpcUsageError, match="has sent another record of itself"):
            await said[0]
        await until(lambda: names(worker) == ["worker0", "liar"])
        assert [info.name for info in worker.group(role="actor").members] == ["liar"]
        with pytest.raises(UnknownWorker, match="learner"):
            worker.group(role="learner").call(where)


async def test_a_name_that_was_lost_is_told_at_once(store: Store) -> None:
    """By all verbs, with who it was; a newcomer of that name is reached as soon as it came."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        old = await aiorpc.init("phoenix", store=store)
        ref: aiorpc.RRef[dict[str, int]] = worker.remote("phoenix", dict)
        assert await ref == {}
        await old._drop()
        await until(lambda: names(worker) == ["worker0"])
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"phoenix \(rank 1, pid \d+.*\) was lost.*Nothing was sent") as caught:
                await asyncio.wait_for(worker.peer("phoenix", timeout=0).call(where), LIMIT)
            assert (caught.value.worker, caught.value.rank, caught.value.pid) == ("phoenix", 1, os.getpid())
        with pytest.raises(PeerLost, match="phoenix"):
            await asyncio.wait_for(anext(worker.peer("phoenix", timeout=0).stream(pair)), LIMIT)
        with pytest.raises(PeerLost, match="phoenix"):
            worker.remote("phoenix", where)
        arguments: list[Any] = [ref, [ref], worker.remote("worker0", dict)]
        for argument in arguments:
            call = worker.call("phoenix", len, argument)  # a reference needs the id of whom it is for
            with pytest.raises(PeerLost, match=r"phoenix \(rank 1.* was lost.*Nothing was sent.*call of builtins:len"):
                await asyncio.wait_for(call, LIMIT)
        with pytest.raises(
            RpcTimeout, match=r"^worker 'phoenix' has not joined within 0.1 s; of.*phoenix \(.* was lost"
        ):
            await worker.wait_for("phoenix", timeout=0.1)
        waiting = worker.wait_for("phoenix")
        stream = worker.peer("phoenix", wait=True).stream(pair)
        async with aiorpc.init("phoenix", store=store) as new:
            assert await waiting == new.info
            assert await worker.call("phoenix", where) == "phoenix"
            assert [item async for item in stream] == [1, 2]


async def test_a_name_that_was_never_seen_is_waited_for_once(store: Store) -> None:
    """For `newcomer_grace` seconds from the first call on; the error says who is there. Others may go on waiting."""
    options = RpcBackendOptions(newcomer_grace=0.2)
    async with cluster(2, dynamic=True, store=store, options=options) as (worker, _):
        waiting = worker.wait_for("late", timeout=0)
        for _ in range(2):
            with pytest.raises(UnknownWorker, match=r"no worker 'late' .* has worker0, worker1; .* 0.2 s"):
                await asyncio.wait_for(worker.peer("late", timeout=0).call(where), LIMIT)
        assert not waiting.done()
        async with aiorpc.init("late", store=store) as late:
            assert await waiting == late.info
            assert await worker.call("late", where) == "late"


async def test_names_that_nobody_bears_leave_nothing_behind(store: Store) -> None:
    """However many are called, waited for or asked for: of the latest something is kept, and of the others nothing."""
    async with cluster(1, dynamic=True, store=store, options=RpcBackendOptions(newcomer_grace=0.05)) as (worker,):
        peers = worker._node.peers
        for name in (f"nobody{number}" for number in range(UNMET)):
            worker.peer(name)
        calls: list[asyncio.Future[Any]] = []
        for number in range(2 * UNMET):
            calls.append(asyncio.ensure_future(worker.peer(f"called{number}", timeout=0).call(where)))
            calls.append(asyncio.ensure_future(worker.wait_for(f"awaited{number}", timeout=0.05)))
            with pytest.raises(UnknownWorker):
                worker.get_worker_info(f"asked{number}")
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 3 * LIMIT)
        assert {type(each) for each in outcomes} == {UnknownWorker, RpcTimeout}
        calls.clear()
        outcomes.clear()  # a Future has its peer, and so have the frames of an error

        def left() -> int:
            gc.collect()
            return len(peers.all())

        await until(lambda: left() <= UNMET + 1)
        for late in ("nobody0", "called0", "awaited0", f"called{2 * UNMET - 1}"):
            async with aiorpc.init(late, store=store) as newcomer:
                assert await worker.wait_for(late, timeout=LIMIT) == newcomer.info
                assert await worker.call(late, where) == late


async def test_names_of_a_store_that_does_not_answer_leave_nothing_behind() -> None:
    """Each of the calls ends with an error of its own, and so does the peer that it was made to."""
    store = WatchedStore()
    async with cluster(1, dynamic=True, store=store) as (worker,):

        def refuse(operation: str, keys: tuple[str, ...]) -> None:
            if ROSTER in keys:
                raise RuntimeError("no answer")

        store.look = refuse
        calls = [worker.call(f"nobody{number}", where) for number in range(2 * UNMET)]
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), LIMIT)
        assert {type(each) for each in outcomes} == {RendezvousError}
        store.look = lambda operation, keys: None
        calls.clear()
        outcomes.clear()

        def left() -> int:
            gc.collect()
            return len(worker._node.peers.all())

        await until(lambda: left() <= UNMET + 1)


async def test_waiting_for_a_worker_that_is_there_or_cannot_come() -> None:
    """Whoever is there is told at once, in a thread too; a group of fixed size has whom it has."""
    async with cluster(2) as workers:
        assert await workers[0].wait_for("worker1") == workers[1].info
        assert await asyncio.to_thread(workers[0].wait_for(1).wait) == workers[1].info
        assert await workers[0].call("worker0", waits) == workers[1].info
        with pytest.raises(UnknownWorker, match="could not find destination worker 'typo'; the group has worker0"):
            workers[0].wait_for("typo")
        assert workers[0].statistics().calls_made == 1


async def waits() -> aiorpc.WorkerInfo:
    return await aiorpc.wait_for("worker1", timeout=5)


async def test_a_rank_is_used_once(store: Store) -> None:
    """Those who knew its last holder take the rank for gone: it is refused, a number of the group's own is new."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        old = await aiorpc.init("phoenix", rank=5, store=store)
        await old.shutdown()
        with pytest.raises(RendezvousError, match="rank 5 belonged to a worker that has left"):
            await aiorpc.init("phoenix", rank=5, store=store)
        async with aiorpc.init("phoenix", store=store) as new:
            assert new.id not in (worker.id, old.id)
            assert await worker.call("phoenix", where) == "phoenix"
            assert await worker.remote("phoenix", where) == "phoenix"


async def test_a_name_that_is_taken_is_refused(store: Store) -> None:
    """The second worker of a name cannot join; the first goes on."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        with pytest.raises(RendezvousError, match="'worker0' is not unique"):
            await aiorpc.init("worker0", store=store)
        assert await worker.call("worker0", where) == "worker0"


async def test_ranks_that_nobody_has_are_unknown(store: Store) -> None:
    """Only names are waited for: a rank that is not there is an error at once."""
    async with cluster(1, dynamic=True, store=store) as (worker,):
        with pytest.raises(UnknownWorker, match="99"):
            worker.call(99, where)


async def test_who_left_is_no_longer_listed(store: Store) -> None:
    """worker_infos has those that are there."""
    async with cluster(2, dynamic=True, store=store) as workers:
        async with aiorpc.init("guest", store=store):
            await until(lambda: all("guest" in names(worker) for worker in workers))
        await until(lambda: all(names(worker) == ["worker0", "worker1"] for worker in workers))


async def test_leaving_finishes_what_is_under_way(store: Store) -> None:
    """A graceful shutdown serves the calls that others made, and waits for its own."""
    go_on = _go_on["it"] = asyncio.Event()
    async with cluster(1, dynamic=True, store=store) as (worker,):
        guest = await aiorpc.init("guest", store=store)
        theirs, ours = worker.call("guest", once_told), guest.call("worker0", once_told)
        await until(lambda: guest.statistics().calls_running == worker.statistics().calls_running == 1)
        leaving = asyncio.ensure_future(guest.shutdown())
        await asyncio.wait([leaving], timeout=0.05)
        assert not leaving.done()
        go_on.set()
        await leaving
        assert [await theirs, await ours] == ["done", "done"]


async def test_what_leaving_waits_for_is_told(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Once, after a while: a call without an end keeps a worker for as long as nothing bounds its leaving."""
    go_on = _go_on["it"] = asyncio.Event()
    async with cluster(1, dynamic=True, store=store) as (worker,):
        guest = await aiorpc.init("guest", store=store)
        set_bounds(guest, told=0.05)
        theirs, ours = worker.call("guest", once_told), guest.call("worker0", once_told)
        await until(lambda: guest.statistics().calls_running == worker.statistics().calls_running == 1)
        leaving = asyncio.ensure_future(guest.shutdown())
        await until(lambda: "worker guest leaves once these have ended" in caplog.text)
        assert "once_told for worker0" in caplog.text and "once_told on worker0" in caplog.text
        go_on.set()
        await leaving
        assert [await theirs, await ours] == ["done", "done"]
    assert caplog.text.count("leaves once these have ended") == 1


def text(size: int) -> str:
    return "x" * size


_go_on: dict[str, asyncio.Event] = {}


async def once_told() -> str:
    await _go_on["it"].wait()
    return "done"


async def test_leaving_alone_does_not_wait_for_others(store: Store) -> None:
    """Others' work among themselves keeps nobody."""
    async with cluster(2, dynamic=True, store=store) as workers:
        busy = workers[0].call("worker1", for_ever)
        guest = await aiorpc.init("guest", store=store)
        await asyncio.wait_for(guest.shutdown(), LIMIT)
        busy.cancel()


async def test_a_call_that_ends_for_want_of_its_worker_keeps_no_reference(store: Store) -> None:
    """Its error has no frames, whose values would stay until the garbage collector comes."""
    async with aiorpc.init("one", store=store) as one:
        async with aiorpc.init("other", store=store):
            await one.call("other", abs, -3)
        await until(lambda: "other" not in names(one))
        reference: Any = one.remote("one", where)
        await reference
        held = weakref.ref(reference)
        gc.collect()
        gc.disable()
        try:
            call = one.call("other", len, reference)
            await until(call.done)
            error = call.exception()
            del reference
            assert isinstance(error, PeerLeft) and held() is None
        finally:
            gc.enable()


async def test_a_call_with_a_reference_is_refused_for_who_has_not_joined(store: Store) -> None:
    """However long it were to wait: a reference names who has it. As `remote`, in the same words."""
    async with Worker("here", store=store) as worker:
        reference = worker.remote("here", list, [1])
        assert await reference == [1]
        await until(lambda: worker.statistics().calls_pending == 0)  # its owner has the value before it has the answer
        calls: list[Callable[[], object]] = [
            lambda: worker.call("there", len, reference),  # type: ignore[call-overload]
            lambda: worker.peer("there", wait=True).call(len, [reference]),
            lambda: worker.peer("there", wait=True, retries=3, timeout=LIMIT).call(len, reference),  # type: ignore[call-overload]
            lambda: worker.remote("there", list),
        ]
        for call in calls:
            with pytest.raises(UnknownWorker, match=r"'there' has not joined yet.*Nothing was sent; wait first"):
                call()
        assert worker.statistics().calls_pending == 0


async def test_references_to_workers_that_joined_later(store: Store) -> None:
    """An RRef passed to a worker that its owner has not met is registered all the same."""
    async with cluster(2, dynamic=True, store=store) as workers, aiorpc.init("late", store=store):
        rref = workers[0].remote("worker1", dict, a=1)
        assert await workers[0].call("late", fetch, rref) == {"a": 1}
        del rref
        await until(lambda: workers[1]._node.references.counts().owned == 0)


async def test_a_worker_of_which_a_reference_alone_was_heard_is_called_and_passed_the_reference(store: Store) -> None:
    """Its name is learnt on the way; the reference has its id, and the store knows the rest."""
    async with cluster(2, dynamic=True, store=store) as workers, unheard_of("late", store):
        rref = await workers[1].call("worker0", make_at, "late")
        assert names(workers[1]) == ["worker0", "worker1"]
        assert await workers[1].call(rref.owner(), fetch, rref) == {"a": 1}
        assert rref.owner_name() == "late"
        del rref


async def test_a_worker_that_the_store_could_not_say_anything_of_is_looked_for_again() -> None:
    """A call to it fails while the store does not answer, and the next one does not fail for that."""
    store = WatchedStore()
    async with cluster(2, dynamic=True, store=store) as workers, unheard_of("late", store):

        def refuse(operation: str, keys: tuple[str, ...]) -> None:
            if ROSTER in keys and threading.current_thread().name == "aiorpc-worker1-rendezvous":
                raise RuntimeError("no answer")

        store.look = refuse
        rref = await workers[1].call("worker0", make_at, "late")
        with pytest.raises(RendezvousError, match="no answer"):
            await rref
        store.look = lambda operation, keys: None
        assert await rref == {"a": 1}
        del rref


def make_at(name: str) -> aiorpc.RRef[dict[str, int]]:
    return aiorpc.current().remote(name, dict, a=1)


async def fetch(rref: aiorpc.RRef[dict[str, int]]) -> dict[str, int]:
    return await rref


async def test_a_dozen_join_and_leave_at_once(store: Store) -> None:
    """All at the same time; each reaches its neighbour."""

    async def member(number: int) -> str:
        async with aiorpc.init(f"m{number}", store=store) as worker:
            result: str = await worker.call(f"m{(number + 1) % 12}", where)
            ready.release()
            await everybody.wait()
            return result

    ready, everybody = asyncio.Semaphore(0), asyncio.Event()
    tasks = [asyncio.ensure_future(member(number)) for number in range(12)]
    for _ in range(12):
        await asyncio.wait_for(ready.acquire(), LIMIT)
    everybody.set()
    assert await asyncio.gather(*tasks) == [f"m{(number + 1) % 12}" for number in range(12)]
