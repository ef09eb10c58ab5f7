"""What members do while faults happen: operations of all kinds, each with a value that is known beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

import aiorpc as rpc

from . import handlers
from .handlers import Mark

LIMIT = 100.0  # seconds: the deadline of operations, none of which comes near it unless something is wrong
NUMBERS = 1 << 24  # operations that one member can make


class WrongValue(Exception):
    """What came back is not what it has to be."""


@dataclass(frozen=True)
class Outcome:
    """What became of one operation. error: the name of its class, empty if it went well. worker, pid: as it says.

    unsent: whether the error says that nothing was sent. retried: whether it may run once in each of several processes.
    """

    number: int
    kind: str
    to: str
    unsent: bool = False
    retried: bool = False
    error: str = ""
    worker: str = ""
    pid: int = 0
    text: str = ""


@dataclass
class Load:
    """The operations of one member, the current worker. life: a number that no other process of the round has.

    kinds: of operations.
    """

    worker: rpc.Worker
    names: list[str]
    life: int
    file: str
    rng: random.Random
    threads: ThreadPoolExecutor
    kinds: Sequence[str]

    def __post_init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.ending = False
        self._numbers = itertools.count(self.life * NUMBERS)

    async def run(self, at_once: int) -> None:
        """So many operations at a time, until `ending` is set."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(self._repeat())

    async def _repeat(self) -> None:
        while not self.ending:
            self.outcomes.append(await self._one())
            await asyncio.sleep(self.rng.uniform(0, 0.01))

    async def _one(self) -> Outcome:
        kind, to = self.rng.choice(self.kinds), self.rng.choice(self.names)
        mark = Mark(self.file, next(self._numbers))
        outcome = partial(Outcome, mark.number, kind, to, retried=kind == "retried")
        try:
            await OPERATIONS[kind](self, to, mark)
            return outcome()
        except Exception as error:  # whatever it is: the round's end judges it
            unsent = kind in ONE_CALL and "othing was sent" in str(error)
            worker, pid = getattr(error, "worker", ""), getattr(error, "pid", 0)
            text = "; ".join([str(error), *getattr(error, "__notes__", ())])
            return outcome(unsent=unsent, error=type(error).__name__, worker=worker, pid=pid, text=text)

    def another(self, name: str) -> str:
        """A member other than that one."""
        return self.rng.choice([each for each in self.names if each != name])

    def number(self) -> int:
        """Some number."""
        return self.rng.randrange(1000)


async def call(load: Load, to: str, mark: Mark) -> None:
    """A coroutine."""
    value = load.number()
    check(await rpc.call(to, handlers.add_one, mark, value), value + 1)


async def thread(load: Load, to: str, mark: Mark) -> None:
    """A function in a thread."""
    value = load.number()
    check(await rpc.call(to, handlers.add_two, mark, value), value + 2)


async def blocking(load: Load, to: str, mark: Mark) -> None:
    """A call that a thread waits for."""
    value = load.number()
    made = partial(load.worker.call, to, handlers.add_one, mark, value)
    check(await load.worker.loop.run_in_executor(load.threads, lambda: made().wait()), value + 1)


async def nested(load: Load, to: str, mark: Mark) -> None:
    """A call by way of another member."""
    value = load.number()
    check(await rpc.call(to, handlers.through, load.another(to), mark, value), value + 2)


async def retried(load: Load, to: str, mark: Mark) -> None:
    """A call that is made again."""
    value = load.number()
    handle = rpc.peer(to, retries=3, backoff=(0.02, 0.2), idempotent=True)
    check(await handle.call(handlers.add_one, mark, value), value + 1)


async def cancelled(load: Load, to: str, mark: Mark) -> None:
    """A call that is given up."""
    future = rpc.call(to, handlers.asleep, mark, 0.02)
    await asyncio.sleep(load.rng.uniform(0, 0.02))
    future.cancel()
    with contextlib.suppress(rpc.RpcCancelled):
        await future


async def short(load: Load, to: str, mark: Mark) -> None:
    """A call whose deadline passes."""
    try:
        await rpc.peer(to, timeout=load.rng.uniform(0.001, 0.03)).call(handlers.asleep, mark, 0.02)
    except rpc.RpcTimeout as error:
        check(error.worker, to)


async def stream(load: Load, to: str, mark: Mark) -> None:
    """Items, in order and all of them."""
    count, size = load.rng.randrange(1, 40), load.rng.choice((10, 1000, 40_000))
    items = [item async for item in rpc.stream(to, handlers.numbers, mark, count, size)]
    check([int(item[-1]) for item in items], list(range(count)))


async def reference(load: Load, to: str, mark: Mark) -> None:
    """An object there, used from here and from a third member."""
    start = load.number()
    total = rpc.remote(to, handlers.Total, mark, start)
    check(await total.rpc_async().add(1), start + 1)
    check(await rpc.call(load.another(to), handlers.use, total, 2), start + 3)
    check((await total.rpc_async().add(4)), start + 7)


async def gradient(load: Load, to: str, mark: Mark) -> None:
    """A pass over three members."""
    factor, weight = float(load.number()), torch.ones(3, requires_grad=True)
    async with rpc.autograd.context() as context:
        there = await rpc.call(to, handlers.times, mark, weight, factor)
        beyond = await rpc.call(load.another(to), torch.mul, there, 2.0)
        await context.backward([beyond.sum()])
        check(context.gradients()[weight].tolist(), [2 * factor] * 3)


async def large(load: Load, to: str, mark: Mark) -> None:
    """Bytes that go through shared memory, or over a second connection."""
    tensor = torch.full((load.rng.randrange(40_000, 600_000),), load.number())
    tensor[load.rng.randrange(len(tensor))] = 7
    back = await rpc.call(to, handlers.echo, mark, tensor)
    check(torch.equal(back, tensor), True)


async def batch(load: Load, to: str, mark: Mark) -> None:
    """A call that is run with others."""
    value = load.number()
    check(await rpc.call(to, handlers.all_doubled, (mark, value)), 2 * value)


def check(found: object, expected: object) -> None:
    """WrongValue if it is not that."""
    if found != expected:
        raise WrongValue(f"{found!r} in place of {expected!r}")


OPERATIONS: dict[str, Callable[[Load, str, Mark], Awaitable[None]]] = {
    each.__name__: each
    for each in (call, thread, blocking, nested, retried, cancelled, short, stream, reference, gradient, large, batch)
}
#: Those that call one handler and do nothing else: if that is not sent, nothing has run.
ONE_CALL = frozenset({"call", "thread", "blocking", "nested", "stream", "large", "batch"})
#: Those that may be given up, so that a run is neither sure nor ruled out, whatever comes of them.
GIVEN_UP = frozenset({"cancelled", "short"})
