"""Faults on purpose (`aiorpc.testing.Faults`): what a rule hits, what it does, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import RpcBackendOptions, autograd
from aiorpc.testing import Fault, Faults, MessageKind, SentMessage, cluster

from .runtime.waiting import until
from .scripts import make_current

Workers = list[aiorpc.Worker]
SHORT = 0.2


def add(a: int, b: int = 1) -> int:
    return a + b


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def count(limit: int) -> Iterator[int]:
    yield from range(limit)


class Counter:
    """A remote object."""

    def __init__(self) -> None:
        self.value = 0

    def step(self) -> int:
        self.value += 1
        return self.value


class Log:
    """What handlers were called with, in their order."""

    seen: list[int] = []  # noqa: RUF012  # handlers have no other place in common with their test


def note(number: int) -> None:
    Log.seen.append(number)


async def forever() -> None:
    await asyncio.sleep(60)


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    Log.seen.clear()
    async with cluster(3) as workers:
        assert await workers[0].call("worker1", add, 1) == 2  # to connect is no matter of the timeouts below
        yield workers


async def test_a_dropped_call_never_runs(workers: Workers) -> None:
    """The callee hears nothing, the caller's timeout passes; the next call goes through."""
    with Faults(workers[0]) as faults:
        rule = faults.drop("call", times=1)
        with pytest.raises(aiorpc.RpcTimeout):
            await workers[0].peer("worker1", timeout=SHORT).call(note, 1)
        await workers[0].call("worker1", note, 2)
        assert rule.count == 1
    assert Log.seen == [2]


async def test_a_dropped_reply_is_a_timeout(workers: Workers) -> None:
    """The call has run; what is lost is its answer."""
    with Faults(workers[1]) as faults:
        rule = faults.drop("reply", function=note)
        await time_out(workers[0], rule, note, 1)
        assert await workers[0].call("worker1", add, 1) == 2
    assert set(Log.seen) == {1}


async def time_out(worker: aiorpc.Worker, rule: Fault, *call: Any) -> None:
    """Make the call until its answer is hit: on a busy machine its time may be up before there is one."""
    while not rule.count:
        with pytest.raises(aiorpc.RpcTimeout):
            await worker.peer("worker1", timeout=SHORT).call(*call)


async def test_a_delayed_call_comes_late_and_others_overtake_it(workers: Workers) -> None:
    """Only the messages that are hit wait."""
    with Faults(workers[0]) as faults:
        faults.delay(SHORT, "call", times=1)
        started = time.monotonic()
        first, second = (workers[0].call("worker1", note, number) for number in (1, 2))
        await second
        assert Log.seen == [2]
        await first
        assert time.monotonic() - started >= SHORT
    assert Log.seen == [2, 1]


async def test_a_cancel_stays_behind_its_delayed_call(workers: Workers) -> None:
    """Messages of one call keep their order: the callee sees the call begin, and then its cancellation."""
    with Faults(workers[0]) as faults:
        rule = faults.delay(SHORT, "call", times=1)
        call = workers[0].call("worker1", forever)
        call.cancel()
        assert rule.count == 1
        await until(lambda: workers[1].statistics().calls_cancelled == 1)


async def test_what_waits_is_sent_when_the_faults_end(workers: Workers) -> None:
    """Leaving the block sends what was delayed, at once."""
    with Faults(workers[0]) as faults:
        faults.delay(60.0, "call")
        call = workers[0].call("worker1", add, 1)
    assert await call == 2


async def test_a_call_that_fails_tells_its_caller_at_once(workers: Workers) -> None:
    """Its Future gets the error, of whatever kind the test asked for."""
    with Faults(workers[0]) as faults:
        faults.fail("call", times=1)
        with pytest.raises(aiorpc.RpcError, match="could not be sent"):
            await workers[0].call("worker1", note, 1)
        faults.fail("call", times=1, error=aiorpc.PeerLost("gone", worker="worker1"))
        with pytest.raises(aiorpc.PeerLost, match="gone") as caught:
            await workers[0].call("worker1", note, 2)
        assert caught.value.worker == "worker1"
        await workers[0].call("worker1", note, 3)
    assert Log.seen == [3]


async def test_rules_choose_by_receiver_function_and_order(workers: Workers) -> None:
    """`to`, `function`, `when`, `after` and `times` together say which messages are hit."""
    with Faults(workers[0]) as faults:
        rule = faults.fail("call", to="worker2", function=add, when=lambda message: True, after=1, times=2)
        outcomes = []
        for name in ("worker1", *["worker2"] * 4):
            outcomes.append(await _succeeds(workers[0].call(name, add, 1)))
        await workers[0].call("worker2", note, 1)
        assert outcomes == [True, True, False, False, True]
        assert [(message.kind, message.worker) for message in rule.messages] == [("call", "worker2")] * 2


async def _succeeds(call: aiorpc.Future[int]) -> bool:
    with contextlib.suppress(aiorpc.RpcError):
        await call
        return True
    return False


async def test_the_first_rule_that_hits_decides(workers: Workers) -> None:
    """Rules are asked in the order in which they were made; one that has ended hits nothing."""
    with Faults(workers[0]) as faults:
        first, second = faults.delay(0.0, "call"), faults.fail("call")
        assert await workers[0].call("worker1", add, 1) == 2
        assert (first.count, second.count) == (1, 0)
        first.end()
        with pytest.raises(aiorpc.RpcError, match="could not be sent"):
            await workers[0].call("worker1", add, 1)


async def test_creating_and_fetching_references_are_kinds_of_their_own(workers: Workers) -> None:
    """ "remote", "fetch" and "call" of a method each hit that message, which names its reference."""
    with Faults(workers[0]) as faults:
        hit = {kind: faults.delay(0.0, kind) for kind in ("remote", "fetch", "call")}
        rref = workers[0].remote("worker1", Counter)
        assert await rref.rpc_async().step() == 1
        assert (await rref).value == 1
        names = {kind: [message.name.rpartition(":")[2] for message in rule.messages] for kind, rule in hit.items()}
        assert names == {"remote": ["Counter"], "fetch": ["to_here"], "call": ["step"]}
        assert len({rule.messages[0].reference for rule in hit.values()}) == 1


async def test_a_creation_that_fails_breaks_its_reference(workers: Workers) -> None:
    """Every use of the reference raises, and nothing of it stays at the owner."""
    with Faults(workers[0]) as faults:
        faults.fail("remote")
        rref = workers[0].remote("worker1", Counter)
        with pytest.raises(aiorpc.RpcError, match="could not be sent"):
            await rref
    del rref


@pytest.mark.parametrize("size", [8, 100_000, 1_000_000])
async def test_large_messages_are_hit_like_small_ones(workers: Workers, size: int) -> None:
    """Tensors in the frame and tensors that go by a channel: the call or its answer is lost, and others are right."""
    tensor = torch.ones(size)
    await workers[0].call("worker1", double, tensor)
    for sender, kind in ((workers[0], "call"), (workers[1], "reply")):
        with Faults(sender) as faults:
            rule = faults.drop(kind, times=1)
            await time_out(workers[0], rule, double, tensor)
            faults.delay(0.01, kind, times=1)
            assert torch.equal(await workers[0].call("worker1", double, tensor), tensor * 2)
            assert rule.count == 1


async def test_nothing_overtakes_a_message_of_reference_counting(workers: Workers) -> None:
    """The owner hears that there is a reference before its value is asked for, as it does without faults."""
    with Faults(workers[0]) as creating, Faults(workers[2]) as faults:
        creating.delay(0.1, "remote")
        rule = faults.delay(0.2, "reference", when=lambda message: message.name == "ADD")
        rref = workers[0].remote("worker1", add, 1)
        assert await workers[0].call("worker2", fetch, rref) == 2
        assert rule.count == 1


async def fetch(rref: aiorpc.RRef[int]) -> int:
    return await rref


async def test_steps_of_backward_and_the_end_of_contexts_are_kinds(workers: Workers) -> None:
    """Delayed gradients and farewells arrive all the same."""
    with Faults(workers[0]) as faults:
        gradient, context = faults.delay(0.01, "gradient"), faults.delay(0.01, "context")
        leaf = torch.ones(3, requires_grad=True)
        make_current(workers[0])
        async with autograd.context() as scope:
            loss = (await workers[0].call("worker1", double, leaf)).sum()
            await scope.backward([loss])
            assert torch.equal(scope.gradients()[leaf], torch.full((3,), 2.0))
        assert gradient.count >= 1
        assert context.count == 1


async def test_the_runtimes_own_calls_are_never_hit() -> None:
    """With everything dropped in every direction, workers still leave together."""
    kinds = list(MessageKind)
    async with cluster(2) as workers:
        assert await workers[0].call("worker1", add, 1) == 2
        faults = [Faults(worker).__enter__() for worker in workers]
        for each in faults:
            each.drop(*kinds)
    assert all(worker.closed for worker in workers)
    for each in faults:
        each.__exit__(None, None, None)


async def test_leaving_waits_for_what_is_delayed() -> None:
    """A delayed message counts as under way: the group leaves in good order once it has arrived."""
    async with cluster(2, options=RpcBackendOptions(rpc_timeout=30.0)) as workers:
        with Faults(workers[0]) as faults:
            rref = workers[0].remote("worker1", add, 1)
            assert await rref == 2
            rule = faults.delay(SHORT, "reference", when=lambda message: message.name == "DEL")
            del rref
            await until(lambda: rule.count == 1)
            reports = await asyncio.gather(*(worker.shutdown() for worker in workers))
    assert [report.references for report in reports] == [(), ()]


async def test_a_peer_that_comes_later_is_covered() -> None:
    """In a group that is joined freely rules hold for newcomers, in both directions."""
    store = HashStore()
    async with cluster(1, dynamic=True, store=store) as (first,):
        with Faults(first) as faults:
            faults.fail("call", to="late")
            reply = faults.delay(0.0, "reply")
            async with aiorpc.init("late", store=store) as late:
                assert await late.call("worker0", add, 1) == 2
                with pytest.raises(aiorpc.RpcError, match="could not be sent"):
                    await first.call("late", add, 1)
            assert reply.count == 1


async def test_what_a_choice_raises_is_raised_to_the_test(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    """Not where the message is sent, whose answer would never come: it passes, and so do all that follow."""

    def choose(message: SentMessage) -> bool:
        raise ZeroDivisionError(message.kind)

    with pytest.raises(ZeroDivisionError, match="reply"), Faults(workers[1]) as faults:
        rule = faults.drop("reply", when=choose)
        assert await workers[0].call("worker1", add, 1) == 2
        assert await workers[0].call("worker1", asyncio.sleep, 0, 3) == 3
    assert rule.count == 0
    assert [record.message for record in caplog.records] == [
        "the function `when` of a fault raised, which hits no more"
    ]
    with pytest.raises(KeyError), Faults(workers[1]) as faults:
        faults.drop("reply", when=choose)
        assert await workers[0].call("worker1", add, 1) == 2
        raise KeyError("the block's own error goes before")


async def test_nothing_is_left_behind(workers: Workers) -> None:
    """Afterwards nobody is asked about messages, and the worker may have faults again."""
    engine = workers[0]._node.engine
    for _ in range(2):
        with Faults(workers[0]) as faults:
            faults.fail("call")
            assert [*engine.observers] == [faults._at_work]
            with pytest.raises(aiorpc.RpcUsageError, match="has faults already"), Faults(workers[0]):
                pass
        assert not engine.observers
        assert await workers[0].call("worker1", add, 1) == 2


async def test_what_cannot_be_is_refused(workers: Workers) -> None:
    """Kinds that do not exist, failures that nobody would hear of, times that are none, workers that are closed."""
    with Faults(workers[0]) as faults:
        with pytest.raises(aiorpc.RpcUsageError, match="messages of the kinds call, remote"):
            faults.drop("cal")
        with pytest.raises(aiorpc.RpcUsageError, match="no caller hears that these cannot be sent: reply"):
            faults.fail("reply")
        with pytest.raises((aiorpc.RpcUsageError, ValueError)):
            faults.delay(-1.0)
        wrong: list[tuple[Any, str]] = [
            ({"to": 1}, "to is the name of a worker, not 1"),
            ({"when": 3}, "when is a function of a SentMessage, not 3"),
            ({"function": 7}, "function is a function, or the name of one, not 7"),
            ({"times": "x"}, "times is a number of messages, not 'x'"),
            ({"times": -1}, "times is a number of messages, not -1"),
            ({"after": 0.5}, "after is a number of messages, not 0.5"),
        ]
        for chosen, text in wrong:
            with pytest.raises(aiorpc.RpcUsageError, match=text):
                faults.drop("call", **chosen)
        error: Any = ValueError("x")
        with pytest.raises(aiorpc.RpcUsageError, match="error must be an RpcError"):
            faults.fail("call", error=error)
    await workers[0].shutdown(graceful=False)
    with pytest.raises(aiorpc.WorkerClosed), Faults(workers[0]):
        pass


async def test_a_killed_worker_is_lost(workers: Workers) -> None:
    """Calls to it fail with PeerLost, on all others; it says no goodbye. The rest of the group goes on."""
    call = workers[0].call("worker1", forever)
    with Faults(workers[0]) as faults:
        await faults.kill("worker1")
    with pytest.raises(aiorpc.PeerLost):
        await call
    with pytest.raises(aiorpc.PeerLost):
        await workers[2].call("worker1", add, 1)
    assert [info.name for info in workers[2]._node.group.lost.values()] == ["worker1"]
    assert workers[1].closed
    assert await workers[0].call("worker2", add, 1) == 2


PROGRAM = """
import sys, aiorpc
aiorpc.init_rpc("other", rank=1, world_size=2, rpc_backend_options=aiorpc.RpcBackendOptions(init_method=sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_in_another_process_can_be_killed(tmp_path: object) -> None:
    """Its process ends by SIGKILL, and callers learn of it."""
    where = f"file://{tmp_path}/store"
    command = [sys.executable, "-c", PROGRAM, where]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            aiorpc.init_rpc("me", rank=0, world_size=2, rpc_backend_options=RpcBackendOptions(init_method=where))
            try:
                with Faults(aiorpc.current()) as faults:
                    asyncio.run(faults.kill("other"))
                with pytest.raises(aiorpc.PeerLost):
                    aiorpc.rpc_sync("other", os.getpid)
                assert process.wait(30) == -signal.SIGKILL
            finally:
                aiorpc.shutdown(graceful=False)
        finally:
            process.kill()
