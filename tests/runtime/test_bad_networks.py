"""All features at once, at random, where the network between the workers is bad and nobody dies: so nothing may fail.

Each feature has tests of its own for connections that break. These are for three and more of them together: with TLS or
seals, with values without pickle or with them, and with little room at any place. What each step must come to is known
beforehand: a call is run once, calls of one task begin in their order, an item is handed out once, parameters are what
all steps have made of them. In the end nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc.nn import RemoteModule
from aiorpc.optim import DistributedOptimizer
from tests.authority import Authority
from tests.runtime import test_extremes as extremes
from tests.runtime.network import Network, network
from tests.runtime.test_extremes import NAMES, PATIENCE, Doing, full, is_full, patiently, what_is_left
from tests.runtime.waiting import LIMIT, until
from tests.tiers import examples

AT_ONCE = 4  # steps of one worker
LONGEST = 0.3  # seconds that a connection stands still
SMALL: dict[str, tuple[Any, ...]] = {
    "max_pending_calls": (20,),
    "max_queued_calls": (8,),
    "stream_window": (1,),
    "max_streams": (2,),
    "max_unsent_bytes": (1000, 300_000),
    "max_remembered_answers": (1,),
    "max_remembered_bytes": (1,),
    "shared_memory": (0, 1 << 20),
    "min_bulk_bytes": (1, extremes.NEVER),
    "max_unacknowledged_bytes": (4 << 20,),
    "dedicated_loop": (True,),
}

numbers = itertools.count(1)
ran: Counter[int] = Counter()
begun: defaultdict[int, list[int]] = defaultdict(list)
put: set[int] = set()
perhaps_put: set[int] = set()
got: Counter[int] = Counter()
queues: dict[str, rpc.Queue] = {}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for each in (ran, begun, put, perhaps_put, got, queues):
        each.clear()


# --- handlers ---------------------------------------------------------------------------------------------------------


async def run_one(number: int) -> int:
    ran[number] += 1
    return number


async def begin_one(task: int, number: int) -> int:
    begun[task].append(number)
    return number


async def meet(tag: str) -> None:
    await rpc.group(list(NAMES), timeout=PATIENCE).barrier(tag)


class Served:
    """What each worker serves under a name."""

    async def read(self, count: int, size: int) -> AsyncIterator[torch.Tensor]:
        for number in range(count):
            yield full(size, number)

    @rpc.batched(max_size=4, max_wait=0.003)
    def tripled(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return [3 * row for row in rows]


class Scale(torch.nn.Module):
    """A module of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


rpc.register_safe(Scale, torch.optim.SGD)


# --- what is done -----------------------------------------------------------------------------------------------------


async def run_once(do: Doing) -> None:
    """With retries. A call whose answer was forgotten says so, and is not run again."""
    handle = rpc.peer(do.to, retries=30, backoff=(0.005, 0.05), idempotent=True)
    calls = {number: handle.call(run_one, number) for number in itertools.islice(numbers, 5)}
    for (number, _), outcome in zip(
        calls.items(), await asyncio.gather(*calls.values(), return_exceptions=True), strict=True
    ):
        if isinstance(outcome, rpc.RpcError) and ("forgotten" in str(outcome) or isinstance(outcome, rpc.Overloaded)):
            assert ran[number] <= 1
        else:
            assert (outcome, ran[number]) == (number, 1)


async def begin_in_order(do: Doing) -> None:
    """Those that were not refused; one whose answer was dropped has been run."""
    task = next(numbers)
    calls = [rpc.call(do.to, begin_one, task, number) for number in range(do.random.choice((5, 15)))]
    for number, outcome in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        assert outcome == number or isinstance(outcome, rpc.Overloaded), outcome
        assert outcome != number or begun[task].count(number) == 1
    assert begun[task] == sorted(set(begun[task]))


async def use_what_is_served(do: Doing) -> None:
    handle = rpc.peer(do.to).object("served")
    count, size = do.random.randrange(10), do.random.choice((3, 70_000))
    items = [item async for item in handle.stream().read(count, size)]
    assert all(is_full(item, size, number) for number, item in enumerate(items)) and len(items) == count
    leaf = torch.ones(size, requires_grad=True)
    async with rpc.autograd.context() as context:
        tripled = await patiently(lambda: handle.tripled(leaf))
        there = await patiently(lambda: rpc.call(do.third, torch.mul, tripled, 2.0))
        await context.backward([there.sum()])
        assert is_full(context.gradients()[leaf], size, 6)


async def train(do: Doing) -> None:
    """Parameters of two workers; each step is made once."""
    modules = [await RemoteModule.create(f"{each}/cpu", Scale) for each in (do.to, do.third)]
    parameters = [each for module in modules for each in await module.remote_parameters_async()]
    optimizer = await DistributedOptimizer.create(torch.optim.SGD, parameters, lr=1.0)
    first = second = 1.0
    for _ in range(2):
        async with rpc.autograd.context() as context:
            output = await modules[1].forward_async(await modules[0].forward_async(full(4, 0.5)))
            assert torch.allclose(output, full(4, 0.5 * first * second))
            await optimizer.backward_and_step(context, [output.sum()])
        first, second = first - 0.5 * second, second - 0.5 * first
    assert torch.allclose(await parameters[0], full(4, first))


async def meet_others(do: Doing) -> None:
    """One that has no room to come keeps the others waiting there: all are called off, and it is tried again."""
    call = rpc.group(list(NAMES)).call(meet, f"tag {next(numbers)}")
    try:
        async for _, outcome in call:
            outcome.result()
    finally:
        call.cancel()


async def put_some(do: Doing) -> None:
    """Some of them large: those stay here. A put whose time is up, or that is cancelled, may have been made."""
    queue = rpc.queue(f"of-{do.to}", owner=do.to, timeout=do.random.choice((0.02, 2.0)))

    async def put_one(number: int) -> None:
        perhaps_put.add(number)
        with contextlib.suppress(rpc.RpcTimeout, rpc.Overloaded):
            await queue.put((number, full(do.random.choice((1, 3000, 70_000)), number)))
            put.add(number)

    tasks = [asyncio.ensure_future(put_one(number)) for number in itertools.islice(numbers, 5)]
    await leave_some(tasks, do)


async def get_some(do: Doing) -> None:
    queue = rpc.queue(f"of-{do.to}", owner=do.to, timeout=0.2)

    async def get_some_at_once(count: int) -> None:
        with contextlib.suppress(rpc.RpcTimeout, rpc.Overloaded):
            for item in await queue.get_many(count):
                took(item)

    tasks = [asyncio.ensure_future(get_some_at_once(do.random.choice((1, 3)))) for _ in range(4)]
    await leave_some(tasks, do)


async def leave_some(tasks: list[asyncio.Task[None]], do: Doing) -> None:
    """Cancel the last of them after a moment, and wait for all."""
    await asyncio.sleep(do.random.choice((0.0, 0.001, 0.02)))
    tasks[-1].cancel()
    for each in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await each


def took(item: tuple[int, torch.Tensor]) -> None:
    number, tensor = item
    got[number] += 1
    assert got[number] == 1 and is_full(tensor, len(tensor), number), f"item {number}, {got[number]} times"


STEPS: tuple[Callable[[Doing], Awaitable[None]], ...] = (
    *(each for each in extremes.STEPS if each is not extremes.put_and_get),
    run_once,
    begin_in_order,
    use_what_is_served,
    train,
    meet_others,
    put_some,
    put_some,
    get_some,
    get_some,
    get_some,
)


async def patiently_all(step: Callable[[Doing], Awaitable[None]], do: Doing) -> None:
    """Until there is room for it at each of several workers, too."""
    while True:
        try:
            await patiently(partial(step, do))
        except rpc.errors.GroupError as error:
            if not all(isinstance(each, rpc.Overloaded) for each in error.exceptions):
                raise
        else:
            return


async def do_all(name: str, seed: int) -> None:
    """Handler of each worker, for itself: each step once, in some order, several at once."""
    chance = random.Random(f"{seed} {name}")
    steps = chance.sample(STEPS, len(STEPS))

    async def take_steps() -> None:
        while steps:
            step = steps.pop()
            do = Doing(chance.choice(NAMES), chance.choice(NAMES), random.Random(chance.random()))
            try:
                async with asyncio.timeout(2 * PATIENCE):
                    await patiently_all(step, do)
            except BaseException as error:
                error.add_note(f"{step.__name__} of {name}: {do.to}, {do.third}")
                raise

    await asyncio.gather(*(take_steps() for _ in range(AT_ONCE)))


async def own_a_queue(name: str) -> None:
    queues[name] = rpc.Queue(f"of-{name}", maxsize=4)


async def empty_a_queue(name: str) -> None:
    """Handler of each worker, for itself: what is there was not handed out."""
    queue = queues.pop(name)
    with contextlib.suppress(rpc.QueueEmpty):
        while True:
            took(await queue.get_nowait())
    await queue.shutdown(immediate=True)
    queue.close()


stops: list[Callable[[], object]] = []


async def publish_while(name: str) -> None:
    """Handler of each worker, for itself."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    stops.append(partial(loop.call_soon_threadsafe, stop.set))
    await extremes.publish_until(stop, name)
    await rpc.unpublish(f"by-{name}")


# --- all of them ------------------------------------------------------------------------------------------------------


def some_options(chance: random.Random, tls: rpc.Tls) -> list[dict[str, Any]]:
    """Of each worker: what all have to have alike, and up to three small limits of its own."""
    common: dict[str, Any] = {"transports": ("tcp",), "rpc_timeout": 2 * PATIENCE, "reconnect_grace": LIMIT}
    common |= chance.choice(({}, {"authenticate_frames": False}, {"tls": tls}))
    common |= chance.choice(({}, {"serialization": "safe", "allow": "*"}))
    chosen = [chance.sample(sorted(SMALL), chance.choice((0, 1, 3))) for _ in NAMES]
    return [common | {each: chance.choice(SMALL[each]) for each in names} for names in chosen]


async def disturb_until(stop: asyncio.Event, net: Network, chance: random.Random) -> None:
    while not stop.is_set():
        net.disturb(chance, LONGEST)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), chance.uniform(0, 0.15))


async def run(seed: int, each: list[dict[str, Any]]) -> None:
    chance, store, stop = random.Random(seed), HashStore(), asyncio.Event()
    with network() as net:
        workers = [
            rpc.Worker(name, rank=rank, world_size=len(NAMES), store=store, options=rpc.RpcBackendOptions(**options))
            for rank, (name, options) in enumerate(zip(NAMES, [mine | net.place() for mine in each], strict=True))
        ]
        for worker in workers:
            worker.serve("served", Served())
        await asyncio.gather(*(worker.start() for worker in workers))
        disturbing = asyncio.ensure_future(disturb_until(stop, net, chance))
        own = {worker.name: worker.peer(worker.name, timeout=0.0) for worker in workers}
        graceful = False
        try:
            await asyncio.gather(*(peer.call(own_a_queue, name) for name, peer in own.items()))
            publishing = [peer.call(publish_while, name) for name, peer in own.items()]
            await asyncio.gather(*(peer.call(do_all, name, seed) for name, peer in own.items()))
            stop.set()
            net.mend()
            for end in stops:
                end()
            await asyncio.gather(*publishing)
            for name, peer in own.items():
                await peer.call(empty_a_queue, name)
            assert put <= got.keys() <= perhaps_put
            for worker in workers:
                await until(lambda: not what_is_left(worker))  # noqa: B023  # awaited in the same turn
            graceful = True
        finally:
            stops.clear()
            stop.set()
            net.mend()
            await disturbing
            async with asyncio.timeout(LIMIT):
                reports = await asyncio.gather(*(worker.shutdown(graceful) for worker in workers))
        assert not any(report.lost or report.timed_out for report in reports)


@pytest.mark.random
@pytest.mark.slow
async def test_all_goes_on_over_a_bad_network(authority: Authority) -> None:
    """Whatever it does to the connections, for as short as that is."""
    tls = authority.tls("worker*")
    for seed in range(examples(10)):
        options = some_options(random.Random(seed), tls)
        try:
            await run(seed, options)
        except BaseException as error:
            error.add_note(f"seed {seed}, {options}")
            raise


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))
