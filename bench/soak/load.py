"""The mixed load: kinds of work that one member does with others, again and again, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import torch

import aiorpc as rpc

from . import handlers

LARGE = 1 << 20  # elements: 4 MiB
DEADLINE = 120.0  # seconds; far more than anything takes, unless it hangs

Work = Callable[[str, str], Awaitable[None]]


@dataclass
class Done:
    """What came of the load so far, by kind of work. missed: tries with a member that was just not there."""

    done: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)  # the first of each kind


def check(right: bool, what: str) -> None:
    """ValueError if something came back wrong: never an assertion, which ``python -O`` leaves out."""
    if not right:
        raise ValueError(f"{what} came back wrong")


async def calls(to: str, third: str) -> None:
    """Twenty at once, half of them in threads."""
    futures = [rpc.call(to, handlers.add if n % 2 else handlers.add_on_loop, n, n) for n in range(20)]
    check(await asyncio.gather(*futures) == [2 * n for n in range(20)], "sums")


async def blocking(to: str, third: str) -> None:
    """A thread that waits for its answers."""

    def block() -> list[int]:
        return [int(rpc.rpc_sync(to, handlers.add, (n, 1))) for n in range(5)]

    check(await asyncio.to_thread(block) == [1, 2, 3, 4, 5], "sums")


async def by_value(to: str, third: str) -> None:
    """A function that has no name at the callee; another one each time."""
    number = random.randrange(1 << 30)
    check(await rpc.call(to, lambda n: n + number, 1) == number + 1, "a sum")


async def streams(to: str, third: str) -> None:
    """One from a thread, and one from the loop that is left in the middle."""
    found = [int(item[0]) async for item in rpc.stream(to, handlers.rows, 40)]
    check(found == list(range(40)), "items")
    async with rpc.stream(to, handlers.rows_on_loop, 1000) as stream:
        async for item in stream:
            if item[0] == 10:
                break


async def references(to: str, third: str) -> None:
    """Made, used, lent to a third worker, fetched, and dropped."""
    tallies = [rpc.remote(to, handlers.Tally, number) for number in range(4)]
    check(await tallies[0].rpc_async().add(5) == 5, "a tally")
    check(await rpc.call(third, handlers.add_for, tallies[1], 1) == 2, "a tally of a third worker")
    check((await tallies[2]).value == 2, "a fetched tally")


async def gradients(to: str, third: str) -> None:
    """A backward pass over three workers."""
    async with rpc.autograd.context() as context:
        leaf = torch.full((64,), 2.0, requires_grad=True)
        there = await rpc.call(third, handlers.square, await rpc.call(to, handlers.square, leaf))
        await context.backward([there.sum()])
        check(torch.equal(context.gradients()[leaf], torch.full((64,), 32.0)), "a gradient")


async def large(to: str, third: str) -> None:
    """Tensors of 4 MiB: by shared memory, or in pieces over TCP."""
    tensor = torch.full((LARGE,), random.random())
    check(torch.equal(await rpc.call(to, handlers.echo, tensor), tensor), "a large tensor")


async def batches(to: str, third: str) -> None:
    """As many callers as one batch takes."""
    futures = [rpc.call(to, handlers.doubled, number) for number in range(16)]
    check(await asyncio.gather(*futures) == [2 * number for number in range(16)], "a batch")


async def retried(to: str, third: str) -> None:
    """An idempotent call."""
    check(await rpc.peer(to, retries=2, idempotent=True).call(handlers.add, 1, 2) == 3, "a sum")


async def given_up(to: str, third: str) -> None:
    """A call that is cancelled, one whose deadline passes, and one that fails."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.02):
            await rpc.call(to, handlers.wait)
    with contextlib.suppress(rpc.RpcTimeout):
        await rpc.peer(to, timeout=0.05).call(handlers.wait)
    try:
        await rpc.call(to, handlers.fail, "on purpose")
    except ValueError as error:
        check(str(error) == "on purpose", "an error")


#: How many seconds lie between two times that one member does it.
WORK: dict[Work, float] = {
    calls: 1.0,
    blocking: 2.0,
    by_value: 3.0,
    streams: 2.0,
    references: 2.0,
    gradients: 2.0,
    large: 2.0,
    batches: 2.0,
    retried: 1.0,
    given_up: 3.0,
}


@dataclass
class Load:
    """The load of one member. steady: who is always there. guests: who comes and goes, and may fail calls by that."""

    name: str
    steady: list[str]
    guests: list[str]
    done: Done
    latencies: list[float] = field(default_factory=list)  # seconds of each no-op since the last sample

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work as long as the block lasts; at its end all of it has come to an end by itself."""
        ended = asyncio.Event()
        tasks = [asyncio.create_task(self._keep(work, pause, ended)) for work, pause in WORK.items()]
        tasks.append(asyncio.create_task(self._measure(ended)))
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*tasks)

    async def _keep(self, work: Work, pause: float, ended: asyncio.Event) -> None:
        name = getattr(work, "__name__", "work")
        while not await _set_within(ended, pause * random.uniform(0.5, 1.5)):
            others = [each for each in self.steady if each != self.name]
            third = random.choice(others)
            to = random.choice([*others, *(each for each in self.guests if each != self.name)])
            try:
                async with asyncio.timeout(DEADLINE):
                    await work(to, third)
                self.done.done[name] += 1
            except Exception as error:
                self._on_error(name, to, error)

    def _on_error(self, name: str, to: str, error: Exception) -> None:
        # What is said of a member that went in the midst of it; that of a reference to its value is for its user.
        if to in self.guests and isinstance(error, rpc.RpcError) and not isinstance(error, rpc.RpcTimeout):
            self.done.missed[name] += 1
            return
        self.done.failed[name] += 1
        self.done.errors.setdefault(f"{name}, {type(error).__name__}", f"{self.name} to {to}: {error}")

    async def _measure(self, ended: asyncio.Event) -> None:
        """How long a call of nothing takes to the first member, or from it to the second."""
        to = next(each for each in self.steady if each != self.name)
        while not await _set_within(ended, 0.1):
            started = time.perf_counter()
            try:
                await rpc.call(to, handlers.noop)
            except Exception as error:
                self._on_error("noop", to, error)
            else:
                self.latencies.append(time.perf_counter() - started)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
