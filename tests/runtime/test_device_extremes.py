"""Tensors on devices, with options at their ends and drivers that refuse now and then, while all goes on at once.

As `test_extremes`, for devices: three workers do everything to each other, with tensors that lie on devices which do
not exist (`tests.fakes`), are late, and in an unkind order. No wait is for ever, nothing is wrong that came, whatever
fails says why, and in the end nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import Worker
from aiorpc.channels.device import DIRECT, Devices
from aiorpc.runtime.links.accelerators import Accelerators
from tests.fakes.cuda import FakeCuda, FakeTensor
from tests.fakes.interprocess import HANDLE, FakeInterprocess
from tests.runtime.test_devices import is_all, late, values
from tests.runtime.test_extremes import (
    ENDS,
    MIB,
    NAMES,
    OVER_TCP,
    TRANSPORTS,
    break_lines_until,
    patiently,
    what_is_left,
)
from tests.runtime.waiting import LIMIT, until
from tests.tiers import examples

Tensor = torch.Tensor
PATIENCE = 25.0  # seconds for one thing that is done
DEVICES = 2
WAYS = ("direct", "staging", "ipc")
BOX = 4 * MIB  # the least
#: Calls of a driver that may be refused.
REFUSED = (
    *("empty", "fresh", "mark", "wait", "keep", "move", "pinned", "synchronize"),
    *("copy", "record", "interprocess.wait", "allocate", "export", "event", "export_event", "open", "open_event"),
)
# What users of a device may meet that refuses.
TOLD = "the fake device was told to fail", "was told to have no memory", "bytes left of", "never created"


class OneProcess(FakeInterprocess):
    """Workers of one process, each with a fake of its own, share memory as those of several do."""

    def _read(self, magic: bytes, handle: bytes) -> tuple[int, int, int, bytes, bytes]:
        found, pid, fd, number, nonce, who = HANDLE.unpack_from(handle)
        assert found == magic
        return pid, fd, number, nonce, who


class Refusing(FakeCuda):
    """Devices that refuse now and then, but for those who have asked to be spared. refusals: how often."""

    interprocess_type = OneProcess
    refusals = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.chance = random.Random(kwargs.get("seed"))
        self.spared = threading.local()
        super().__init__(*args, **kwargs)

    def count_call(self, name: str) -> None:
        """Or refuse it."""
        if self.refusals and name in REFUSED and not getattr(self.spared, "here", False):
            with self.machine.lock:
                refuses = self.chance.random() < self.refusals
            if refuses:
                self.fail(name)
        super().count_call(name)

    @contextlib.contextmanager
    def sparing(self) -> Iterator[None]:
        """Nothing is refused to this thread."""
        self.spared.here = True
        try:
            yield
        finally:
            self.spared.here = False


@dataclass
class Doing:
    """What one step needs. to, third: workers, which may be the same."""

    to: str
    third: str
    random: random.Random

    def size(self) -> int:
        """Of a tensor, in elements of four bytes."""
        return self.random.choice((1, 10, 3000, 40_000, 70_000, 300_000, 1_200_000))

    def short(self) -> int:
        return self.random.choice((1, 3000, 70_000))

    def index(self) -> int:
        return self.random.randrange(DEVICES)

    def number(self) -> int:
        return self.random.randrange(1000)

    def patience(self) -> float:
        return self.random.uniform(0.001, 0.03)


def here() -> Refusing:
    """The devices of the worker whose handler this is."""
    driver = rpc.current()._node.accelerators.accelerator
    assert isinstance(driver, Refusing)
    return driver


def made(index: int, value: float, size: int) -> FakeTensor:
    """A tensor on the current stream, that has its value only after a while."""
    return late(here(), index, value, size)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """On other streams than those that are current."""
    driver = here()
    with driver.sparing():
        streams = [driver.fresh(index) for index in range(DEVICES)]
    with driver.entered(streams):
        yield


def check(tensor: Tensor, index: int, value: float, size: int) -> None:
    assert (type(tensor), tensor.device.index, tuple(tensor.shape)) == (FakeTensor, index, (size,))
    assert is_all(tensor, value), (value, tensor[:3].tolist(), size)


# --- handlers ---------------------------------------------------------------------------------------------------------


def plus_one(x: Any) -> Any:
    for _ in range(3):
        x = x + 0
    return x + 1


async def plus_one_async(x: Any) -> Any:
    x = x + 0
    await asyncio.sleep(0)
    x = x + 0
    await asyncio.sleep(0.001)
    return x + 1


@rpc.batched(max_size=4, max_wait=0.005)
def plus_one_batched(xs: list[Tensor]) -> list[Tensor]:
    return [plus_one(x) for x in xs]


@rpc.batched(max_size=4, max_wait=0.005)
async def plus_one_batched_async(xs: list[Tensor]) -> list[Tensor]:
    await asyncio.sleep(0.001)
    return [plus_one(x) for x in xs]


HANDLERS = (plus_one, plus_one_async, plus_one_batched, plus_one_batched_async)


def same(value: Any) -> Any:
    return value


def slowly(x: Tensor) -> Tensor:
    time.sleep(0.03)
    return x + 1


async def slowly_async(x: Tensor) -> Tensor:
    await asyncio.sleep(0.03)
    return x + 1


def by_way_of(to: list[str], x: Tensor) -> Tensor:
    if not to:
        return x + 1
    answer: Tensor = rpc.rpc_sync(to[0], by_way_of, args=(to[1:], x + 1), timeout=PATIENCE)
    return answer + 1


async def by_way_of_async(to: list[str], x: Tensor) -> Tensor:
    if not to:
        return x + 1
    answer: Tensor = await rpc.call(to[0], by_way_of_async, to[1:], x + 1)
    return answer + 1


def counted(count: int, index: int, size: int) -> Iterator[Tensor]:
    for number in range(count):
        yield made(index, number, size)


async def counted_async(count: int, index: int, size: int) -> AsyncIterator[Tensor]:
    for number in range(count):
        await asyncio.sleep(0)
        yield made(index, number, size)


async def raised_by(x: Tensor, count: int) -> AsyncIterator[Tensor]:
    for number in range(count):
        yield x + number


async def value_of(ref: Any) -> Any:
    return await ref


def value_here(ref: Any) -> Any:
    return ref.to_here(timeout=PATIENCE) + 0


class Model(torch.nn.Module):
    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight + 0)

    def added_to(self, x: Tensor) -> Tensor:
        return x + self.weight

    async def added_to_async(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return x + self.weight

    def get(self) -> Tensor:
        return self.weight


# --- what is done -----------------------------------------------------------------------------------------------------


async def call(do: Doing) -> None:
    """The caller overwrites its tensor right after."""
    size, index, value = do.size(), do.index(), do.number()
    handler = do.random.choice(HANDLERS)
    x = made(index, value, size)
    future = rpc.call(do.to, handler, x)
    x.fill_(-1)
    check(await future, index, value + 1, size)


async def call_often(do: Doing) -> None:
    size, index = do.short(), do.index()
    handler = do.random.choice(HANDLERS)

    async def one(value: int) -> None:
        x = made(index, value, size)
        check(await patiently(lambda: rpc.call(do.to, handler, x)), index, value + 1, size)

    await all_of([one(value) for value in range(8)])


async def call_in_a_thread(do: Doing) -> None:
    size, index, value = do.size(), do.index(), do.number()

    def script() -> None:
        with elsewhere():
            x = made(index, value, size)
            check(rpc.rpc_sync(do.to, plus_one, args=(x,), timeout=PATIENCE), index, value + 1, size)
            future = rpc.rpc_async(do.to, plus_one_async, args=(x,), timeout=PATIENCE)
            x.fill_(-1)
            with elsewhere():
                check(future.wait(), index, value + 1, size)

    await asyncio.to_thread(script)


async def send_many(do: Doing) -> None:
    """On devices and on the host, in containers, with views and one twice."""
    size, value = do.size(), do.number()
    zero, one, host = made(0, value, size), made(1, value + 1, size), values(value + 2, do.size())
    sent = [zero, {"one": one, "host": [host]}, zero[: size // 2 + 1], one]
    future = rpc.call(do.to, same, sent)
    zero.fill_(-1)
    one.fill_(-1)
    got = await future
    check(got[0], 0, value, size)
    check(got[1]["one"], 1, value + 1, size)
    check(got[2], 0, value, size // 2 + 1)
    check(got[3], 1, value + 1, size)
    assert torch.equal(got[1]["host"][0], host)


async def have_made(do: Doing) -> None:
    """Without anything on a device in the request."""
    size, index, value = do.size(), do.index(), do.number()
    got = await rpc.call(do.to, made, index, value, size)
    check(got, back(do.to, index), value, size)


async def ask_around(do: Doing) -> None:
    size, index, value = do.short(), do.index(), do.number()
    to = [do.third, do.random.choice(NAMES)]
    handler = by_way_of_async if do.random.random() < 0.7 else by_way_of
    x = made(index, value, size)
    check(await rpc.call(do.to, handler, to, x), index, value + 5, size)


async def read_a_stream(do: Doing) -> None:
    count, index, size = do.random.randrange(1, 12), do.index(), do.short()
    kind, seen = do.random.randrange(3), 0
    producer: Any = (counted, counted_async, raised_by)[kind]
    arguments = (count, index, size) if kind < 2 else (made(index, 0, size), count)
    on = back(do.to, index) if kind < 2 else index
    async with rpc.stream(do.to, producer, *arguments) as stream:
        async for item in stream:
            check(item, on, seen, size)
            seen += 1
    assert seen == count


async def leave_a_stream(do: Doing) -> None:
    index, size = do.index(), do.size()
    async with rpc.stream(do.to, do.random.choice((counted, counted_async)), 1000, index, size) as stream:
        async for item in stream:
            if is_all(item, 2):
                break


async def give_up(do: Doing) -> None:
    size, index = do.size(), do.index()
    handler = do.random.choice((same, slowly, slowly_async, plus_one_batched))
    given_up = rpc.call(do.to, handler, made(index, 1, size))
    await asyncio.sleep(do.patience())
    given_up.cancel()
    with contextlib.suppress(rpc.RpcCancelled, asyncio.CancelledError):
        await given_up
    with contextlib.suppress(rpc.RpcTimeout):
        await rpc.peer(do.to, timeout=do.patience()).call(handler, made(index, 1, size))


async def hold_references(do: Doing) -> None:
    size, index, value = do.size(), do.index(), do.number()
    there = rpc.remote(do.to, made, index, value, size)
    got = await rpc.call(do.third, do.random.choice((value_of, value_here)), there)
    check(got, back(do.third, forth(do.third, do.to, index)), value, size)
    got = await there
    check(got, back(do.to, index), value, size)


async def hold_a_model(do: Doing) -> None:
    size, index, value = do.short(), do.index(), do.number()
    weight, x = made(index, value, size), made(index, 1, size)
    model = rpc.remote(do.to, Model, weight)
    weight.fill_(-1)
    name = do.random.choice(("added_to", "added_to_async"))
    for _ in range(2):
        check(await getattr(model.rpc_async(), name)(x), index, value + 1, size)
    check(await model.rpc_async().get(), index, value, size)


async def put_and_get(do: Doing) -> None:
    """As many come out as went in, each whole."""
    # A worker that leaves takes items along, and leaves others behind.
    queue = rpc.queue(f"of-{do.to}", owner=do.to, timeout=2.0 if MORTAL else None)
    size, index = do.short(), do.index()
    put = 0

    async def put_one(value: int) -> None:
        nonlocal put
        x = made(index, value, size)
        try:
            await patiently(lambda: queue.put((value, {"x": x})))
            put += 1
        except Exception as error:
            must_be_told(error)
        gotten = False
        while not gotten and put > 0:
            try:
                value, item = await patiently(queue.get)
                gotten = True
            except rpc.errors.ItemLost as error:
                must_be_told(error)
                put -= error.count
                break
            except Exception as error:
                must_be_told(error)
                if isinstance(error, (*GONE, rpc.RpcTimeout)):
                    return
                continue
            put -= 1
            tensor = item["x"]
            assert is_all(tensor, value), (value, tensor[:3].tolist())

    for value in range(5):
        await put_one(value)


async def call_a_group(do: Doing) -> None:
    size, index, value = do.short(), do.index(), do.number()
    x = made(index, value, size)
    for outcome in await rpc.group(list(NAMES)).call(do.random.choice(HANDLERS[:2]), x):
        if outcome.error is not None:
            if not isinstance(outcome.error, rpc.Overloaded):
                must_be_told(outcome.error)
            continue
        check(outcome.value, index, value + 1, size)  # type: ignore[arg-type]


async def go_on_with_results(do: Doing) -> None:
    size, index, value = do.short(), do.index(), do.number()
    x = made(index, value, size)
    future = rpc.call(do.to, plus_one, x).then(lambda done: done.value() + 1)
    check(await future, index, value + 2, size)


async def read_a_version(do: Doing) -> None:
    timeout = 1.0 if do.to in MORTAL else None
    async with rpc.subscribe(f"by-{do.to}", timeout=timeout) as versions:
        async for version in versions:
            number = float(version.value["number"])
            for name in ("zero", "one", "host"):
                assert version.value[name].device.type == "cpu"
                assert bool((version.value[name] == number).all()), (name, number, version.value[name])
            break


STEPS = (
    *(call, call_often, call_in_a_thread, send_many, have_made, ask_around, read_a_stream, leave_a_stream, give_up),
    *(give_up, hold_references, hold_a_model, put_and_get, call_a_group, go_on_with_results, read_a_version),
)


def forth(of: str, to: str, index: int) -> int:
    """Where what lies on that device of one worker arrives at another one."""
    return index if of == to else MAP[index]


def back(to: str, index: int) -> int:
    """Where it comes from: of what lies there at another worker, here."""
    return forth(rpc.current().name, to, index)


MAP = {0: 1, 1: 0}


async def all_of(awaitables: Sequence[Awaitable[Any]]) -> None:
    """Also where one fails."""
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    if errors:
        raise errors[0]


def must_be_told(error: BaseException) -> None:
    """Raise what is not due to a device that refused."""
    if MORTAL and isinstance(error, (*GONE, rpc.RpcTimeout)):
        return
    if isinstance(error, AssertionError) or not is_told(error) or not here().refusals:
        raise error


def is_told(error: BaseException) -> bool:
    return any(text in str(error) for text in TOLD)


GONE = (
    rpc.PeerLost,
    rpc.PeerLeft,
    rpc.errors.PeerRefused,
    rpc.errors.UnknownWorker,
    rpc.WorkerClosed,
    rpc.errors.ItemLost,
)
MORTAL: set[str] = set()  # workers that leave in the middle


async def publish_until(stop: asyncio.Event, name: str) -> bool:
    """Whether the devices let it publish at least one version."""
    number, published = 0, False
    while not stop.is_set():
        number += 1
        on = [made(index, number, 50_000) for index in range(DEVICES)]
        value = {"number": torch.tensor(float(number)), "host": values(number), "zero": on[0], "one": on[1]}
        try:
            await patiently(lambda: rpc.publish(f"by-{name}", value))  # noqa: B023  # awaited in the same turn
            published = True
        except Exception as error:
            must_be_told(error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.1)
    return published


async def own_a_queue(name: str) -> None:
    QUEUES[name] = rpc.Queue(f"of-{name}", maxsize=4)


async def do_all(name: str, seed: int, breaking: bool, rounds: int) -> None:
    """Handler of each worker, for itself: all steps, each some times, in some order, several at once, to everybody."""
    chance = random.Random(f"{seed} {name}")
    stop = asyncio.Event()
    publishing = asyncio.ensure_future(publish_until(stop, name))
    breaks = [asyncio.ensure_future(break_lines_until(stop, chance))] if breaking else []
    steps = list(STEPS) * rounds
    chance.shuffle(steps)

    async def take_steps() -> None:
        while steps:
            step = steps.pop()
            do = Doing(chance.choice(NAMES), chance.choice(NAMES), random.Random(chance.random()))
            try:
                async with asyncio.timeout(PATIENCE):
                    await patiently(partial(step, do))
            except Exception as error:
                error.add_note(f"{name} {step.__name__} {do.to} {do.third}")
                must_be_told(error)

    try:
        try:
            await all_of([take_steps() for _ in range(4)])
        finally:
            READY.add(name)
        await until(lambda: READY.issuperset({*NAMES} - MORTAL), 80)
    finally:
        stop.set()
        await asyncio.gather(publishing, *breaks)
        queue = QUEUES.pop(name)
        left = await queue.qsize()
        await queue.shutdown(immediate=True)
        queue.close()
        if publishing.result():
            await rpc.unpublish(f"by-{name}")
        LEFT[name] = left


@pytest.fixture(autouse=True)
def _records_of_text() -> Iterator[None]:
    """pytest keeps the records of the log: without their tracebacks, whose frames keep tensors in memory of devices."""

    def write_out(record: logging.LogRecord) -> bool:
        if record.exc_info:
            record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
        return True

    log = logging.getLogger("aiorpc")
    log.addFilter(write_out)
    try:
        yield
    finally:
        log.removeFilter(write_out)


READY: set[str] = set()
QUEUES: dict[str, rpc.Queue[Any]] = {}
LEFT: dict[str, int] = {}


def what_is_left_on(worker: Worker) -> dict[str, Any]:
    """As of workers without devices, and what their links hold for tensors on their way."""
    found = what_is_left(worker)
    if MORTAL:  # what a worker has borrowed stays lent as long as its process lives
        found = {name: count for name, count in found.items() if not name.startswith("shared")}
    for link in worker._node.links.all():
        link.flush()
        devices = link.channel("device")
        assert isinstance(devices, Devices)
        under_way = devices.under_way
        found |= {f"{name} {link.record.name}": count for name, count in under_way.items() if count}
    driver = worker._node.accelerators.accelerator
    assert isinstance(driver, FakeCuda)
    return found | {f"bytes on {index}": size for index in range(DEVICES) if (size := driver.in_use(index))}


async def run(
    way: str,
    options: dict[str, Any],
    seed: int,
    *,
    refusals: float = 0.0,
    breaking: bool = False,
    dies: float | None = None,
    rounds: int = 1,
) -> None:
    """refusals: how often a driver refuses a call. dies: after so many seconds the last worker leaves at once."""
    READY.clear()
    LEFT.clear()
    MORTAL.clear()
    if dies is not None:
        MORTAL.add(NAMES[-1])
    with contextlib.ExitStack() as stack:
        if way == "ipc":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(Accelerators, "way", lambda self, record: DIRECT if record.name == self._engine.name else "")
        arguments: dict[str, Any] = {"lag": (0, 0.0006), "patience": 4 * LIMIT, "memory": 128 * MIB}
        uuids = [f"FAKE-{index}" for index in range(DEVICES)]
        fakes = [Refusing(seed=seed, uuids=uuids, **arguments)]
        if way != "direct":
            fakes += [Refusing(seed=seed + rank, uuids=uuids, **arguments) for rank in (1, 2)]
        else:
            fakes *= len(NAMES)
        for fake in fakes:
            stack.enter_context(fake)
        store = HashStore()
        workers = []
        for rank, name in enumerate(NAMES):
            mine = rpc.RpcBackendOptions(
                **{
                    "device_channel": "staging" if way == "staging" else "auto",
                    "device_buffer": BOX,
                    "rpc_timeout": PATIENCE,
                    **options,
                }
            )
            for other in NAMES:
                if other != name:
                    mine.set_device_map(other, MAP)
            workers.append(
                Worker(name, rank=rank, world_size=len(NAMES), store=store, options=mine, accelerator=fakes[rank])
            )
        await asyncio.gather(*[worker.start() for worker in workers])
        graceful = False
        try:
            own = [worker.peer(worker.name, timeout=0.0) for worker in workers]
            await asyncio.gather(*(peer.call(own_a_queue, name) for peer, name in zip(own, NAMES, strict=True)))
            for fake in fakes:
                fake.refusals = refusals
            each_own = zip(own, NAMES, strict=True)
            doing = [peer.call(do_all, name, seed, breaking, rounds) for peer, name in each_own]
            if dies is not None:
                await asyncio.sleep(dies)
                await workers.pop().shutdown(graceful=False)
                with contextlib.suppress(*GONE, rpc.RpcCancelled):
                    await doing.pop()
            await all_of(doing)
            del doing
            for fake in fakes:
                fake.refusals = 0.0
            del own
            for worker in workers:
                try:
                    await until(lambda: not what_is_left_on(worker))  # noqa: B023  # awaited in the same turn
                except AssertionError:
                    raise AssertionError(worker.name, what_is_left_on(worker)) from None
            assert MORTAL or not any(LEFT.values()), LEFT
            graceful = True
        finally:
            for fake in fakes:
                fake.refusals = 0.0
            await asyncio.gather(*[worker.shutdown(graceful) for worker in workers], return_exceptions=True)
        for fake in fakes:
            assert not fake.violations, fake.violations[:5]
            assert threading.get_ident() not in fake.waiters, "the loop waited for a device"
            assert fake.interprocess is not None
            mapped = [(each.index, each.opened) for each in fake.interprocess.mapped.values()]
            assert not mapped, (mapped, fake.calls)
            assert [fake.current(index) for index in range(DEVICES)] == fake.default_streams


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_all_goes_on(way: str) -> None:
    """Nobody refuses anything, and all that comes is right."""
    await run(way, {}, 1)


@pytest.mark.slow
@pytest.mark.long
async def test_all_goes_on_with_devices_that_refuse() -> None:
    """Now and then, with several options at their ends; and with connections that break, or a worker that leaves."""
    for seed in range(examples(20)):
        chance = random.Random(seed)
        way, transport = WAYS[seed % len(WAYS)], chance.choice(TRANSPORTS)
        names = [name for name in ENDS if transport == "tcp" or name not in OVER_TCP]
        chosen = {name: chance.choice(ENDS[name]) for name in chance.sample(names, chance.choice((0, 1, 3)))}
        refusals = chance.choice((0.001, 0.02, 0.08))
        breaking = transport == "tcp" and "reconnect_grace" not in chosen and chance.random() < 0.5
        # Memory that a process shares is freed when it ends, and this one goes on.
        dies = chance.uniform(0.1, 1.0) if way != "ipc" and not chosen and chance.random() < 0.5 else None
        options = {"transports": (transport,), **chosen}
        try:
            await run(way, options, seed, refusals=refusals, breaking=breaking, dies=dies)
        except BaseException as error:
            error.add_note(f"seed {seed}, {way}, {options}, {refusals} refused, breaking: {breaking}, dies: {dies}")
            raise
