"""One member says whatever it likes: the others' work with each other goes on, and what they want of it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import RpcBackendOptions, Worker, autograd
from aiorpc.runtime.calls.declared import pack
from aiorpc.runtime.group.group import report_lost
from aiorpc.testing import cluster
from tests.runtime.bad_member import BadMember
from tests.runtime.inside import acting_as
from tests.runtime.waiting import LIMIT, until, until_no_references
from tests.tiers import examples

STEPS = 60
OPTIONS = RpcBackendOptions(
    rpc_timeout=LIMIT,
    shared_memory=32 << 20,
    max_frame_bytes=1 << 20,
    max_tensor_bytes=1 << 22,
    max_incoming_bytes=1 << 22,
    max_unsent_bytes=1 << 22,
    max_references=1000,
)


def double(value: Any) -> Any:
    return value * 2


async def count(limit: int) -> AsyncIterator[int]:
    for number in range(limit):
        yield number


def holds(ref: Any) -> Any:
    return ref.to_here() + 1


class Good:
    """The work of two right members with each other, each piece with its result."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.done = 0

    async def calls(self, one: Worker, other: Worker) -> None:
        assert await one.call(other.name, double, 21) == 42
        assert await one.call(other.name, double, [1, "a"]) == [1, "a", 1, "a"]

    async def tensors(self, one: Worker, other: Worker) -> None:
        tensor = torch.arange(60_000.0)
        assert torch.equal(await one.call(other.name, double, tensor), tensor * 2)

    async def streams(self, one: Worker, other: Worker) -> None:
        assert [item async for item in one.stream(other.name, count, 40)] == [*range(40)]

    async def references(self, one: Worker, other: Worker) -> None:
        ref = one.remote(other.name, double, 4)
        assert await ref == 8
        assert await one.call(other.name, holds, ref) == 9

    async def gradients(self, one: Worker, other: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with acting_as(one):
            async with autograd.context() as ctx:
                y = await one.call(other.name, double, x)
                await ctx.backward([y.sum()])
                assert ctx.gradients()[x].tolist() == [2.0] * 3

    async def queues(self, one: Worker, other: Worker) -> None:
        with acting_as(one):
            queue = aiorpc.queue("right", owner=other.name)
        await queue.put("item")
        assert await queue.get() == "item"
        await queue.task_done()
        assert await queue.qsize() == 0

    def all(self) -> list[Callable[[Worker, Worker], Awaitable[None]]]:
        return [self.calls, self.tensors, self.streams, self.references, self.gradients, self.queues]

    async def run(self, one: Worker, other: Worker, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for work in self.all():
                await asyncio.wait_for(work(one, other), LIMIT)
                self.done += 1


async def want(what: Callable[[], Awaitable[Any]], name: str) -> None:
    """What it wants of the bad one: anything may come of it, but it ends, and an error of the runtime names it."""
    try:
        await asyncio.wait_for(what(), LIMIT)
    except TimeoutError as error:
        if not isinstance(error, aiorpc.RpcTimeout):
            raise AssertionError(f"{what} has not ended") from error
        assert name in str(error)
    except aiorpc.RpcError as error:
        assert name in str(error) or isinstance(error, aiorpc.RemoteError), repr(error)
    except Exception as error:
        # It may answer with any exception there is; one that does not come out of it would be a mistake here.
        assert getattr(error, "__notes__", None) or isinstance(error, ValueError | KeyError), repr(error)


def wants(worker: Worker, bad: Worker) -> list[Awaitable[Any]]:
    """What a right member wants of the bad one meanwhile."""
    peer, name = worker.peer(bad.name, timeout=1.0), bad.name
    with acting_as(worker):
        queue = aiorpc.queue("open", owner=name, timeout=1.0)

    async def value_of_reference() -> Any:
        return await peer.remote(double, 1)

    async def all_items() -> None:
        async for _ in peer.stream(count, 1000):
            pass

    async def gradients() -> None:
        with acting_as(worker):
            async with autograd.context() as ctx:
                y = await peer.call(double, torch.ones(3, requires_grad=True))
                if isinstance(y, torch.Tensor) and y.requires_grad:
                    await ctx.backward([y.sum()])

    return [
        want(lambda: peer.call(double, 1), name),
        want(lambda: peer.call(double, torch.ones(60_000)), name),
        want(all_items, name),
        want(value_of_reference, name),
        want(lambda: queue.put(1), name),
        want(lambda: queue.get(), name),
        want(lambda: queue.put_nowait(torch.ones(60_000)), name),
        want(lambda: queue.get_nowait(), name),
        want(lambda: worker.group([worker.name, name], timeout=1.0).barrier(), name),
        want(gradients, name),
    ]


async def play(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    loop, faults = asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(
        lambda _, context: faults.append(f"{context.get('message')}: {context.get('exception')!r}")
    )
    async with cluster(3, options=OPTIONS) as workers:
        *right, bad = workers
        for worker in workers:
            with acting_as(worker):
                aiorpc.Queue("right"), aiorpc.Queue("open", 5)
        for one in workers:
            for other in workers:
                assert await one.call(other.name, double, 1) == 2
        good, stop = Good(right), asyncio.Event()
        work = [asyncio.ensure_future(good.run(one, other, stop)) for one, other in (right, right[::-1])]
        member = BadMember(bad, right, seed)
        waits = [asyncio.ensure_future(each) for worker in right for each in wants(worker, bad)]
        for _ in range(STEPS):
            member.step()
            await asyncio.sleep(member.chance.choice((0, 0, 0, 0.002)))
        stop.set()
        await asyncio.gather(*work)
        await bad.shutdown(graceful=False)
        await asyncio.gather(*waits)
        await until_no_references(right)
        for one, other in (right, right[::-1]):
            for each in good.all():
                await asyncio.wait_for(each(one, other), LIMIT)
    assert not faults, faults
    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not said, [record.getMessage() for record in said]
    assert len(caplog.records) < 100
    loop.set_exception_handler(None)


@pytest.mark.random
@pytest.mark.slow
async def test_the_work_of_the_others_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever one member sends, in whatever order."""
    for seed in range(examples(100)):
        try:
            await play(seed, caplog)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def test_what_a_member_says_of_a_loss_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It says why another one was lost, which is believed as that one is silent; nobody writes lines in our log."""
    async with cluster(3, options=RpcBackendOptions(transports=("tcp",), reconnect_grace=0.0)) as workers:
        reporter, believer, lost = workers
        record = lost._node.engine.record
        assert await reporter.call("worker2", double, 1) == 2  # so it sees for itself that this one dies
        words = "it died\nERROR all is \x1b[31mlost\n" + 9999 * "x"
        report = reporter.call("worker1", report_lost, pack(record.to_wire()), words)  # type: ignore[call-overload]
        await asyncio.gather(report, lost._drop())
        await until(lambda: believer._node.group.is_gone(record))
    said = [each.getMessage() for each in caplog.records if "was lost: " in each.getMessage()]
    assert any("it died?ERROR" in each for each in said)
    assert all(each.isprintable() and len(each) < 2000 for each in said)
