"""References to workers that do not exist, and to values that nobody will make: they end, and cost little."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from aiorpc import Overloaded, RpcBackendOptions, RpcError, Worker
from aiorpc.errors import UnknownWorker
from aiorpc.protocol.frames import Kind, encode_frame
from aiorpc.protocol.messages import Fetch, Method
from aiorpc.protocol.packing import pack
from aiorpc.protocol.reference_messages import (
    MESSAGES,
    Abandon,
    Add,
    Del,
    PassedReference,
    ReferenceId,
    fork_of_creator,
)
from aiorpc.runtime.references.rref import RRef
from aiorpc.testing import cluster
from tests.runtime.bad_member import call_of, calling, say, serving
from tests.runtime.waiting import LIMIT, until

COUNT = 300


def receive(worker: Worker, owner: int, number: int) -> RRef[object]:
    """What arrives when worker 1 passes on a reference, invented or not, to a value of that owner."""
    passed = PassedReference(ReferenceId(owner, number), owner, ReferenceId(1, 1_000_000 + number), None)
    (handle,) = worker._node.references.load([passed], 1)
    return handle


async def test_references_to_workers_that_do_not_exist_fail_at_once() -> None:
    """In a group of fixed size it is known who there is: nobody looks for them, and nothing of them is kept."""
    async with cluster(2) as workers:
        known = len(workers[0]._node.peers.all())
        ghosts = [receive(workers[0], 100 + number, number) for number in range(COUNT)]
        for ghost in ghosts[:5]:
            with pytest.raises(UnknownWorker, match=r"no worker 10\d in the group"):
                await ghost
        assert len(workers[0]._node.peers.all()) == known
        assert not workers[0]._node.references.counts().pending
        ghosts.clear()
        del ghost
        await until(lambda: gc.collect() < 0 or not workers[0]._node.references.counts().users)
        assert await workers[1].call("worker0", len, "abc") == 3


async def test_references_to_workers_that_have_not_been_heard_of_share_a_look() -> None:
    """In a free group all are looked for together, once; those that are not there fail, and are kept no longer."""
    async with cluster(2, dynamic=True) as workers:
        ghosts = [receive(workers[0], 100 + number, number) for number in range(COUNT)]
        await until(lambda: not workers[0]._node.references.counts().pending)
        await until(lambda: not [peer for peer in workers[0]._node.peers.all() if peer.name.startswith("#")])
        for ghost in ghosts[:5]:
            with pytest.raises(RpcError, match=r"no worker 10\d in the group"):
                await ghost
        assert await workers[1].call("worker0", len, "abc") == 3


async def test_values_that_are_waited_for_by_their_creator_go_with_it() -> None:
    """Whoever asks for values of his own references before they are made, and leaves, leaves nothing behind."""
    async with cluster(2) as workers:
        owner = workers[0]._node.references
        peer = workers[1]._node.peers.find("worker0")
        calls = [peer.call(Fetch(1, 1_000_000 + number, 0), (), None, 0.0) for number in range(50)]
        await until(lambda: workers[0].statistics().calls_running == 50)
        for call in calls:
            call.cancel()
        values = [owner.value(1, 1_000_000 + number, 0, 1) for number in range(50)]
        await workers[1].shutdown(graceful=False)
        for value in values:
            with pytest.raises(RpcError, match="never created"):
                await asyncio.wait_for(value, LIMIT)


async def test_references_of_one_peer_have_a_limit() -> None:
    """One that makes more than that loses its connection, with the reason; the worker and the others are well."""
    options = [RpcBackendOptions(max_references=20), RpcBackendOptions(), RpcBackendOptions()]
    async with cluster(3, options=options) as workers:
        held = [await workers[1].remote("worker0", int, number) for number in range(3)]
        for _ in range(100):  # dropped again: they count no longer
            assert await workers[1].remote("worker0", int, 3) == 3
        kept = []
        with contextlib.suppress(RpcError):
            for number in range(40):
                kept.append(workers[1].remote("worker0", int, number))
                await asyncio.wait_for(kept[-1], LIMIT)
        assert len(kept) <= 21
        await until(lambda: [info.name for info in workers[0].worker_infos()] == ["worker0", "worker2"])
        assert await workers[2].call("worker0", len, "abc") == 3
        del held


async def test_values_that_one_peer_waits_for_have_a_limit() -> None:
    """The same for those that he asks for before he has them made: these calls are answered Overloaded."""
    options = [RpcBackendOptions(max_references=5), RpcBackendOptions()]
    async with cluster(2, options=options) as workers:
        peer = workers[1]._node.peers.find("worker0")
        calls = [peer.call(Fetch(1, 1_000_000 + number, 0), (), None, 0.0) for number in range(8)]
        for call in calls[5:]:
            with pytest.raises(Overloaded, match="max_references"):
                await asyncio.wait_for(call, LIMIT)
        for call in calls:
            call.cancel()


async def test_values_that_their_creator_gave_up_are_waited_for_no_more() -> None:
    """One that was asked for before its creation came, and then never was made, counts for that limit no longer."""
    async with cluster(2, options=RpcBackendOptions(max_references=2)) as workers:
        owner = workers[0]._node.references
        for number in range(5):
            rref = ReferenceId(1, 1_000_000 + number, 1)
            waiting = owner.value(*rref, asker=1)
            assert not waiting.done()
            owner.on_message(1, Abandon(rref, fork_of_creator(rref), False, "given up"))
            owner.on_message(1, Del(rref, fork_of_creator(rref)))
            with pytest.raises(RpcError, match="never created: given up"):
                await asyncio.wait_for(waiting, LIMIT)


async def test_a_reference_beside_a_known_one_cannot_be_named() -> None:
    """Whoever has one reference to a value of a worker fetches no other, and calls no method of it."""
    async with cluster(2) as (owner, guesser):
        handles = [owner._node.references.refer_to(value) for value in ("known", "other")]
        known, other = (handle._rref for handle in handles)
        peer = guesser._node.peers.find("worker0")
        assert await peer.call(Fetch(*known), (), None, 10.0) == "known"
        for guess in (known._replace(number=other.number), other._replace(key=known.key), other._replace(key=0)):
            for function in (Fetch(*guess), Method(guess.worker, guess.number, guess.key, "upper")):
                with pytest.raises(RpcError, match=rf"reference \(0, {other.number}\) names no value") as caught:
                    await peer.call(function, (), None, 10.0)
                assert str(other.key) not in str(caught.value)
        assert await peer.call(Fetch(*other), (), None, 10.0) == "other"


async def test_who_takes_no_messages_about_references_sends_no_more() -> None:
    """Each of them may have an answer, which goes over another connection: one that is not read would grow for ever."""
    options = RpcBackendOptions(max_references=500, max_pending_calls=500)
    async with cluster(3, options=options) as workers:
        for one, other in ((0, 2), (2, 0)):
            assert await workers[one].call(f"worker{other}", len, "abc") == 3
        answers = calling(workers[0], "worker2")
        serving(workers[2], "worker0").pause()
        connection, most = calling(workers[2], "worker0"), 0
        for number in range(100_000):
            add = Add(ReferenceId(0, 1 << 40, 1), ReferenceId(2, (1 << 40) + number, 0))
            connection.send(encode_frame(Kind.REFERENCE, 0, pack(MESSAGES.write(add))))
            if number % 200 == 0:
                await asyncio.sleep(0)
                most = max(most, answers.unsent)
                if answers.ended:
                    break
        await until(lambda: [info.name for info in workers[0].worker_infos()] == ["worker0", "worker1"])
        assert most < 20_000
        assert await workers[1].call("worker0", len, "abc") == 3


async def test_references_of_a_call_that_is_not_run_are_its_own_trouble(caplog: pytest.LogCaptureFixture) -> None:
    """Those that cannot be, in a call of a module that is not there: it is answered, and nothing is logged."""
    loop, faults = asyncio.get_running_loop(), list[object]()
    async with cluster(2) as workers:
        loop.set_exception_handler(lambda _, context: faults.append(context))
        assert await workers[1].call("worker0", len, "abc") == 3
        passed = PassedReference(ReferenceId(0, 1, 1), 0, ReferenceId(7, 7, 0), None)
        call = call_of("no.such.module:function")
        before = workers[0].statistics().calls_failed
        call.payload.references = [passed]
        say(calling(workers[1], "worker0"), "CALL", 1 << 40, call)
        await until(lambda: workers[0].statistics().calls_failed > before)
        assert await workers[1].call("worker0", len, "abc") == 3
    loop.set_exception_handler(None)
    assert not faults
