"""Options at their ends, one at a time and two together, while all goes on at once: no wait is for ever, all is right.

Each feature and each option has tests of its own. These are for what two of them make of each other: here every worker
does everything to every other one, with little room or much, and in the end nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

import aiorpc as rpc
from aiorpc.testing import cluster
from tests.runtime.inside import breakable
from tests.runtime.waiting import until
from tests.tiers import examples

T = TypeVar("T")
MIB = 1 << 20
NEVER = 1 << 62
PATIENCE = 25.0  # seconds for one thing that is done, with all tries of those that are told Overloaded
NAMES = ("worker0", "worker1", "worker2")

#: By option: values that change what goes on, the least that makes sense among them.
ENDS: dict[str, tuple[Any, ...]] = {
    "num_worker_threads": (1,),
    "max_pending_calls": (20,),
    "max_queued_calls": (8,),
    "stream_window": (1,),
    "max_streams": (1,),
    "max_unsent_bytes": (1000, MIB),
    "max_queued_bytes": (100_000, 9 * MIB),
    "max_remembered_answers": (1,),
    "max_remembered_bytes": (1,),
    "shared_memory": (0, 70_000, MIB),
    "min_shared_bytes": (1, NEVER),
    "min_bulk_bytes": (1, NEVER),
    "dedicated_loop": (True,),
    "busy_wait": (0.0, 5.0),
    "switch_interval": (1e-5,),
    "max_unacknowledged_bytes": (4 * MIB,),
    "authenticate_frames": (False,),
    "reconnect_grace": (0.0,),
}
OVER_TCP = ("max_unacknowledged_bytes", "authenticate_frames", "reconnect_grace")
TRANSPORTS = ("unix", "tcp")


@dataclass
class Doing:
    """What one step needs. to, third: workers, which may be the same. queue: of `to`."""

    to: str
    third: str
    random: random.Random

    def size(self) -> int:
        """Of a tensor, in elements of four bytes."""
        return self.random.choice((10, 3000, 40_000, 70_000, 300_000))

    def number(self) -> int:
        return self.random.randrange(1000)


async def one_more(x: Any) -> Any:
    return x + 1


def two_more(x: Any) -> Any:
    return x + 2


def same(value: Any) -> Any:
    return value


def full(size: int, value: float) -> torch.Tensor:
    return torch.full((size,), value)


def by_way_of(to: str, x: int) -> int:
    """A handler that blocks for a call of its own."""
    got: int = rpc.rpc_sync(to, one_more, args=(x,), timeout=PATIENCE)
    return got


async def counted(count: int, size: int) -> AsyncIterator[torch.Tensor]:
    for number in range(count):
        yield full(size, number)


async def doze(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def value_of(ref: Any) -> Any:
    return await ref


@rpc.batched(max_size=4, max_wait=0.005)
def doubled(rows: list[int]) -> list[int]:
    return [2 * row for row in rows]


class Total:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, x: int) -> int:
        self.value += x
        return self.value


async def patiently(step: Callable[[], Awaitable[T]]) -> T:
    """What it gives, once there is room for it."""
    while True:
        try:
            return await step()
        except rpc.Overloaded:
            await asyncio.sleep(random.uniform(0.001, 0.02))


async def at_once(to: str, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """What that gives for each of these, all called at once."""
    calls = [partial(rpc.call, to, function, *each) for each in arguments]
    return await asyncio.gather(*map(patiently, calls))


def is_full(tensor: torch.Tensor, size: int, value: float) -> bool:
    return tensor.shape == (size,) and bool((tensor == value).all())


# --- what is done -----------------------------------------------------------------------------------------------------


async def call(do: Doing) -> None:
    x = do.number()
    assert await rpc.call(do.to, one_more, x) == x + 1
    assert await rpc.call(do.to, by_way_of, do.third, x) == x + 1


async def call_often(do: Doing) -> None:
    assert await at_once(do.to, two_more, ((i,) for i in range(30))) == list(range(2, 32))


async def send_tensors(do: Doing) -> None:
    size, x = do.size(), do.number()
    assert all(is_full(each, size, x) for each in await at_once(do.to, same, [(full(size, x),)] * 4))


async def have_tensors_made(do: Doing) -> None:
    size = do.size()
    found = await at_once(do.to, full, ((size, i) for i in range(6)))
    assert all(is_full(each, size, i) for i, each in enumerate(found))


async def read_a_stream(do: Doing) -> None:
    count, size = do.random.randrange(1, 12), do.random.choice((10, 3000, 70_000))
    seen = 0
    async with rpc.stream(do.to, counted, count, size) as stream:
        async for item in stream:
            assert is_full(item, size, seen)
            seen += 1
    assert seen == count


async def leave_a_stream(do: Doing) -> None:
    async with rpc.stream(do.to, counted, 1000, 40_000) as stream:
        async for item in stream:
            if item[0] == 2:
                break


async def give_up(do: Doing) -> None:
    given_up = rpc.call(do.to, same, full(do.size(), 1))
    await asyncio.sleep(do.random.uniform(0, 0.01))
    given_up.cancel()
    with contextlib.suppress(rpc.RpcCancelled, asyncio.CancelledError):
        await given_up
    with contextlib.suppress(rpc.RpcTimeout):
        await rpc.peer(do.to, timeout=do.random.uniform(0.001, 0.02)).call(doze, 0.2)


async def hold_references(do: Doing) -> None:
    x, size = do.number(), do.size()
    total = rpc.remote(do.to, Total, x)
    assert await total.rpc_async().add(1) == x + 1
    tensor = rpc.remote(do.to, full, size, x)
    assert is_full(await rpc.call(do.third, value_of, tensor), size, x)


async def put_and_get(do: Doing) -> None:
    queue, size = rpc.queue(f"of-{do.to}", owner=do.to), do.random.choice((1, 3000, 70_000))
    puts = asyncio.gather(*(patiently(partial(queue.put, (i, full(size, i)))) for i in range(5)))
    for _ in range(5):
        i, tensor = await patiently(queue.get)
        assert is_full(tensor, len(tensor), i)
    await puts


async def call_a_group(do: Doing) -> None:
    x, size = do.number(), do.size()
    for outcome in await rpc.group(list(NAMES)).call(one_more, full(size, x)):
        if isinstance(outcome.error, rpc.Overloaded):
            continue
        assert is_full(outcome.value, size, x + 1), outcome  # type: ignore[arg-type]


async def fill_batches(do: Doing) -> None:
    assert await at_once(do.to, doubled, ((i,) for i in range(6))) == [2 * i for i in range(6)]


async def ask_for_gradients(do: Doing) -> None:
    leaf, factor = torch.ones(do.random.choice((3, 70_000)), requires_grad=True), float(do.number())
    async with rpc.autograd.context() as context:
        there = await patiently(lambda: rpc.call(do.to, torch.mul, leaf, factor))
        await context.backward([there.sum()])
        assert is_full(context.gradients()[leaf], len(leaf), factor)


async def read_a_version(do: Doing) -> None:
    async with rpc.subscribe(f"by-{do.to}") as versions:
        async for version in versions:
            assert is_full(version.value["large"], 100_000, float(version.value["number"]))
            break


STEPS = (
    call,
    call_often,
    send_tensors,
    have_tensors_made,
    read_a_stream,
    leave_a_stream,
    give_up,
    hold_references,
    put_and_get,
    call_a_group,
    fill_batches,
    ask_for_gradients,
    read_a_version,
)


async def publish_until(stop: asyncio.Event, name: str) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        value = {"number": torch.tensor(float(number)), "large": full(100_000, number)}
        await patiently(lambda: rpc.publish(f"by-{name}", value))  # noqa: B023  # awaited in the same turn
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.05)


async def break_lines_until(stop: asyncio.Event, chance: random.Random) -> None:
    """Break connections over TCP, which are mended."""
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), chance.uniform(0.02, 0.1))
        lines = breakable(rpc.current())
        if lines and not stop.is_set():
            chance.choice(lines).break_off(1.0)


async def own_a_queue(name: str) -> None:
    """Handler of each worker, for itself, before the others look for it."""
    QUEUES[name] = rpc.Queue(f"of-{name}", maxsize=4)


async def do_all(name: str, seed: int, breaking: bool) -> None:
    """Handler of each worker, for itself: all steps, each some times, in some order, several at once, to everybody."""
    chance = random.Random(f"{seed} {name}")
    stop = asyncio.Event()
    beside = [asyncio.ensure_future(publish_until(stop, name))]
    if breaking:
        beside.append(asyncio.ensure_future(break_lines_until(stop, chance)))
    steps = list(STEPS) * 3
    chance.shuffle(steps)

    async def take_steps() -> None:
        while steps:
            step = steps.pop()
            do = Doing(chance.choice(NAMES), chance.choice(NAMES), random.Random(chance.random()))
            async with asyncio.timeout(PATIENCE):
                await patiently(partial(step, do))

    try:
        await asyncio.gather(*(take_steps() for _ in range(4)))
        READY.add(name)
        await until(lambda: len(READY) == len(NAMES))
    finally:
        stop.set()
        await asyncio.gather(*beside)
        queue = QUEUES.pop(name)
        await queue.shutdown(immediate=True)
        queue.close()
        await rpc.unpublish(f"by-{name}")


READY: set[str] = set()
QUEUES: dict[str, rpc.Queue[Any]] = {}


async def run(options: dict[str, Any], seed: int, *, breaking: bool = False) -> None:
    READY.clear()
    async with cluster(len(NAMES), options=rpc.RpcBackendOptions(rpc_timeout=PATIENCE, **options)) as workers:
        own = [worker.peer(worker.name, timeout=0.0) for worker in workers]
        await asyncio.gather(*(peer.call(own_a_queue, name) for peer, name in zip(own, NAMES, strict=True)))
        await asyncio.gather(*(peer.call(do_all, name, seed, breaking) for peer, name in zip(own, NAMES, strict=True)))
        for worker in workers:
            await until(lambda: not what_is_left(worker))  # noqa: B023  # awaited in the same turn


def what_is_left(worker: rpc.Worker) -> dict[str, Any]:
    """Of all that a worker may hold for a while."""
    gc.collect()
    found, names = (
        worker.statistics(),
        ("calls_pending", "calls_running", "shared_lent", "shared_leases", "jobs_queued"),
    )
    references = ("references_owned", "references_held", "references_pending")
    return {name: getattr(found, name) for name in (*names, *references) if getattr(found, name)}


SINGLE = [
    pytest.param(
        {"transports": (transport,), name: value},
        id=f"{transport} {name}={value}",
        marks=() if value is values[0] and transport == "tcp" else pytest.mark.long,
    )
    for transport in TRANSPORTS
    for name, values in ENDS.items()
    for value in values
    if transport == "tcp" or name not in OVER_TCP
]


@pytest.mark.parametrize("options", SINGLE)
async def test_all_goes_on_with_an_option_at_its_end(options: dict[str, Any]) -> None:
    await run(options, 1)


@pytest.mark.random
@pytest.mark.slow
async def test_all_goes_on_with_several_at_their_ends() -> None:
    """Over TCP, or not; and there with connections that break and are mended."""
    for seed in range(examples(30)):
        chance = random.Random(seed)
        transport = chance.choice(TRANSPORTS)
        names = [name for name in ENDS if transport == "tcp" or name not in OVER_TCP]
        chosen = {name: chance.choice(ENDS[name]) for name in chance.sample(names, chance.choice((2, 2, 5)))}
        breaking = transport == "tcp" and "reconnect_grace" not in chosen and seed % 2 == 0
        try:
            await run({"transports": (transport,), **chosen}, seed, breaking=breaking)
        except BaseException as error:
            error.add_note(f"seed {seed}, {transport}, {chosen}{', connections that break' if breaking else ''}")
            raise
