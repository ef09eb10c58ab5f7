"""Random graphs over one to four workers have the gradients of the same graphs in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import aiorpc
from aiorpc import RpcBackendOptions, Worker, autograd
from aiorpc.testing import cluster
from tests.autograd import parts
from tests.autograd.parts import check, expected, gradients_of, step, vector, weight_of
from tests.autograd.programs import WORKERS, Node, Program, compare, programs
from tests.runtime.waiting import until
from tests.scripts import make_current
from tests.tiers import examples

EXAMPLES = 60
LoopFactory = Callable[[], asyncio.AbstractEventLoop]
Run = Callable[[Coroutine[Any, Any, None]], None]

bounded = settings(
    max_examples=examples(EXAMPLES),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@contextlib.contextmanager
def running(loop_factory: LoopFactory) -> Iterator[tuple[list[Worker], Run]]:
    """Workers that live as long as the block, and what runs a coroutine beside them: one group for all examples."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        stack = contextlib.AsyncExitStack()

        async def start() -> list[Worker]:
            workers = await stack.enter_async_context(cluster(WORKERS))
            make_current(workers[0])
            return workers

        async def bound(coroutine: Coroutine[Any, Any, None]) -> None:
            async with asyncio.timeout(20):
                await coroutine

        workers = runner.run(start())
        try:
            yield workers, lambda coroutine: runner.run(bound(coroutine))

            async def dropped() -> None:
                await until(lambda: not any(len(worker._node.gradients) for worker in workers))

            runner.run(dropped())
        finally:
            runner.run(stack.aclose())


# A result that goes on to two workers, and comes back into what one of them kept.
KEPT = Program(
    (
        Node("linear", (0,), 0, 1, "remote"),
        Node("cube", (3,), 0, 2, "call"),
        Node("mul", (4, 3), 1, 1, "remote_async"),
        Node("mix", (5, 3), 0, 1, "call"),
        Node("stop", (6,), 0, 3, "call_async"),
        Node("add", (7, 8), 0, 3, "call"),
    ),
    ((9, 5), (7,)),
)


@pytest.fixture(params=[-1, 2, 512])
def most_behind(request: pytest.FixtureRequest) -> int:
    """How many tensors a message says to be behind one: none, so that passes always have to ask; some; as always."""
    return int(request.param)


def say_behind(workers: list[Worker], most: int) -> None:
    for worker in workers:
        worker._node.gradients.most_behind = most


@pytest.mark.random
@pytest.mark.time_limit(120)
def test_random_graphs(loop_factory: LoopFactory, most_behind: int) -> None:
    """One pass, or several over a retained graph."""
    with running(loop_factory) as (workers, run):
        say_behind(workers, most_behind)

        @bounded
        @given(program=programs(), passes=st.sampled_from([1, 1, 1, 2]))
        @example(program=KEPT, passes=1)
        @example(program=KEPT, passes=2)
        def check_one(program: Program, passes: int) -> None:
            run(compare(program, workers, passes=passes))

        check_one()


@pytest.mark.random
@pytest.mark.time_limit(120)
def test_random_graphs_side_by_side(loop_factory: LoopFactory, most_behind: int) -> None:
    """Several contexts and passes at once over the same parameters each have their own gradients."""
    with running(loop_factory) as (workers, run):
        say_behind(workers, most_behind)

        async def all_at_once(each: list[Program]) -> None:
            await asyncio.gather(*(compare(program, workers) for program in each))

        @settings(bounded, max_examples=examples(EXAMPLES // 4))
        @given(each=st.lists(programs(longest=6), min_size=2, max_size=4))
        def check_some(each: list[Program]) -> None:
            run(all_at_once(each))

        check_some()


@pytest.mark.parametrize("handler", [parts.layer, parts.layer_async])
async def test_a_chain_of_fifty_round_trips(four: list[Worker], handler: Any, most_behind: int) -> None:
    """Each result is the next argument; all of them are used in the loss."""
    say_behind(four, most_behind)
    x, ws = vector(), [weight_of(worker, 0) for worker in four[1:]]
    async with autograd.context() as ctx:
        y, total = x, x.sum()
        for n in range(50):
            y = await four[0].call(f"worker{1 + n % 3}", handler, y)
            total = total + y.sum()
        await ctx.backward([total])
        y, total = x, x.sum()
        for n in range(50):
            y = step(y, ws[n % 3])
            total = total + y.sum()
        of_x, *of_ws = expected(total, [x, *ws])
        check(gradients_of(four[0], ctx), [(x, of_x)])
        for worker, w, of_w in zip(four[1:], ws, of_ws, strict=True):
            check(gradients_of(worker, ctx), [(w, of_w)])


async def test_more_passes_than_threads(most_behind: int) -> None:
    """Workers that all go backward at once, with few threads each, do not wait for each other's."""
    async with cluster(2, options=RpcBackendOptions(num_worker_threads=2)) as workers, asyncio.timeout(30):
        say_behind(workers, most_behind)

        async def one(number: int) -> None:
            here, there = workers[number % 2], workers[1 - number % 2]
            make_current(here)
            x, w = vector(number), weight_of(there, 0)
            async with autograd.context() as ctx:
                y = x
                for _ in range(3):
                    y = await here.call(there.name, parts.layer, y) + x
                await ctx.backward([y.sum()])
                y = x
                for _ in range(3):
                    y = step(y, w) + x
                of_x, of_w = expected(y.sum(), [x, w])
                check(gradients_of(here, ctx), [(x, of_x)])
                check(gradients_of(there, ctx), [(w, of_w)])

        await asyncio.gather(*(one(number) for number in range(12)))


async def test_a_chain_of_fifty_workers_calls(four: list[Worker]) -> None:
    """Each worker calls the next one, around and around, before any of them answers."""
    x, ws = vector(), [weight_of(worker, 0) for worker in four]
    async with autograd.context() as ctx:
        y = await four[0].call("worker1", _around, x, 50)
        await ctx.backward([y.sum()])
        y = x
        for n in range(50):
            y = step(y, ws[(1 + n) % 4])
        for n in reversed(range(49)):
            y = torch.tanh(y + ws[(1 + n) % 4][0])
        of_x, *of_ws = expected(y.sum(), [x, *ws])
        check(gradients_of(four[0], ctx), [(x, of_x), (ws[0], of_ws[0])])
        for worker, w, of_w in zip(four[1:], ws[1:], of_ws[1:], strict=True):
            check(gradients_of(worker, ctx), [(w, of_w)])


async def _around(x: parts.Tensor, hops: int) -> parts.Tensor:

    worker = aiorpc.current()
    y = step(x, parts.weight(0))
    if hops == 1:
        return y
    back = await worker.call((worker.id + 1) % 4, _around, y, hops - 1)
    return torch.tanh(back + parts.weight(0)[0])
