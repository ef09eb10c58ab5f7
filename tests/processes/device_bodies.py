"""Workers with devices that do not exist: what they run, what they are asked to do, and what they say at their end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

import aiorpc as rpc
from aiorpc import RpcBackendOptions, Worker

from ..fakes.cuda import FakeCuda
from .workers import Children, Link, Place, meeting_file, places, processes, wait_for

UUIDS = ("FAKE-A", "FAKE-B")
BOX = 8 * 1024 * 1024  # bytes of an outbox in these tests
RANDOM_SIZES = (10, 5000, 70_000, 400_000, 3_000_000, BOX + 7)
Maps = dict[str, dict[Any, Any]]  # by worker: device here, device there


class Home:
    """The fake of this process; handlers ask for it."""

    fake: FakeCuda | None = None
    state: dict[str, Any] = {}  # noqa: RUF012  # what handlers leave for later ones


def fake_here() -> FakeCuda:
    """The devices of this process."""
    assert Home.fake is not None
    return Home.fake


@dataclass
class Setup:
    """One worker. fake: arguments of FakeCuda; None: it has no devices. breaks: called before a process makes it."""

    maps: Maps = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    fake: dict[str, Any] | None = field(default_factory=dict)
    breaks: Callable[[], None] | None = None

    def make_fake(self, seed: int) -> FakeCuda | None:
        """Its devices: A and B, a little late."""
        if self.fake is None:
            return None
        arguments: dict[str, Any] = {"seed": seed, "uuids": UUIDS, "lag": (0.0, 0.001)}
        return FakeCuda(**(arguments | self.fake))

    def make_worker(self, place: Place, fake: FakeCuda | None) -> Worker:
        """The worker, not yet started."""
        chosen: dict[str, Any] = {"device_buffer": BOX}
        options = RpcBackendOptions(**(chosen | self.options))
        for name, device_map in self.maps.items():
            options.set_device_map(name, device_map)
        return Worker(
            place.name,
            rank=None if place.world_size is None else place.rank,  # the rank of one that has left is not given again
            world_size=place.world_size,
            init_method=place.init_method,
            options=options,
            accelerator=fake,
        )


@dataclass
class Report:
    """What a worker says at its end. in_use: bytes by device, when all is drained. waited: its loop for a device."""

    violations: list[str]
    in_use: list[int]
    calls: dict[str, int]
    waited: bool
    memfds: int
    lost: list[str]


def memfds() -> int:
    """How many descriptors of device memory this process has open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "memfd:fake-device" in os.readlink(f"/proc/self/fd/{fd}")
    return count


def used(fake: FakeCuda) -> list[int]:
    """Bytes of each device that tensors have."""
    gc.collect()
    return [fake.in_use(index) for index in range(fake.count())]


async def drained(fake: FakeCuda, seconds: float = 20.0) -> list[int]:
    """Bytes of each device once they stand at nothing, or what they are after so many seconds."""
    with contextlib.suppress(AssertionError):
        await asyncio.to_thread(wait_for, lambda: not any(used(fake)), seconds)
    return used(fake)


def host(place: Place, link: Link, setup: Setup) -> Report:
    """A worker that joins, leaves at once, and so serves until the others leave, too."""
    if setup.breaks is not None:
        setup.breaks()
    return asyncio.run(_host(place, link, setup))


async def _host(place: Place, link: Link, setup: Setup) -> Report:
    fake = Home.fake = setup.make_fake(place.rank)
    worker = setup.make_worker(place, fake)
    await worker.start()
    shutdown = await worker.shutdown()
    lost = [info.name for info in shutdown.lost]
    if fake is None:
        return Report([], [], {}, False, memfds(), lost)
    Home.state.clear()
    in_use = await drained(fake)
    waited = threading.get_ident() in fake.waiters
    fake.close()
    return Report(fake.violations, in_use, dict(fake.calls), waited, memfds(), lost)


@dataclass
class Group:
    """Workers with devices: w0 is here, the others are processes."""

    worker: Worker
    fake: FakeCuda
    children: Children
    reports: dict[str, Report] = field(default_factory=dict)

    async def ask(self, to: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call, within bounds."""
        return await asyncio.wait_for(self.worker.call(to, function, *args, **kwargs), 30)


Scenario = Callable[[Group], Awaitable[None]]


async def play(
    scenario: Scenario, *setups: Setup, ended: tuple[str, ...] = (), sound: bool = True, even: bool = True
) -> Group:
    """Run a scenario, whose tensors die with it, in a group: the first worker is here. What all say at their end.

    ended: who is killed. sound: nobody has broken a rule, no loop has waited, and no device memory is left. even: as
    often as memory was opened it was closed; calls that were told to fail count, too.
    """
    with processes() as children, meeting_file() as init_method:
        first, *others = places(len(setups), init_method)
        for place, setup in zip(others, setups[1:], strict=True):
            children.start(place, host, setup)
        fake = Home.fake = setups[0].make_fake(0)
        assert fake is not None
        with fake:
            worker = setups[0].make_worker(first, fake)
            await worker.start()
            group = Group(worker, fake, children)
            try:
                await scenario(group)
                in_use = await drained(fake) if sound else []
            finally:
                Home.state.clear()
                report = await worker.shutdown()
                waited = threading.get_ident() in fake.waiters
            lost = [info.name for info in report.lost]
            for place in others:
                if place.name not in ended:
                    group.reports[place.name] = await children[place.name].ahear()
            await asyncio.to_thread(lambda: children.check_ended(but=ended))
        group.reports["w0"] = Report(fake.violations, in_use, dict(fake.calls), waited, memfds(), lost)
        Home.fake = None
    if sound:
        check(group, even)
    return group


def check(group: Group, even: bool = True) -> None:
    """Nobody has broken a rule, no loop has waited for a device, and all memory has come back."""
    for name, report in group.reports.items():
        assert not report.violations, (name, report.violations[:3])
        assert not report.waited, name
        assert not any(report.in_use), (name, report.in_use)
        assert not even or report.calls.get("open", 0) == report.calls.get("close", 0), (name, report.calls)
        assert not report.memfds, (name, report.memfds)


def come_and_go(place: Place, link: Link, setup: Setup, times: int) -> list[dict[str, int]]:
    """A worker of a group without a fixed size that joins, says so, leaves when told, and comes back, with the same
    devices. How many descriptors of device memory, and bytes of it, there were each time after it had left."""
    return asyncio.run(_come_and_go(place, link, setup, times))


async def _come_and_go(place: Place, link: Link, setup: Setup, times: int) -> list[dict[str, int]]:
    left: list[dict[str, int]] = []
    fake = Home.fake = setup.make_fake(1)
    assert fake is not None
    with fake:
        for number in range(times):
            worker = setup.make_worker(Place(f"{place.name}-{number}", 0, None, place.init_method), fake)
            await worker.start()
            link.tell("joined")
            await asyncio.to_thread(link.hear)
            await worker.shutdown()
            # What stays are the pages of events, which a process keeps.
            left.append({"memfds": memfds(), "in use": sum(await drained(fake, 5.0)), "freed": fake.calls["free"]})
            assert fake.calls["close"] == fake.calls["open"]
            assert not fake.violations, fake.violations
            link.tell("left")
    return left


def keep_asking(place: Place, link: Link, setup: Setup, seed: int) -> None:
    """A worker of a group without a fixed size that asks w0 for as long as it lives."""
    asyncio.run(_keep_asking(place, link, setup, seed))


async def _keep_asking(place: Place, link: Link, setup: Setup, seed: int) -> None:
    chance = random.Random(seed)
    fake = Home.fake = setup.make_fake(seed)
    assert fake is not None
    worker = setup.make_worker(place, fake)
    await worker.start()
    link.tell("joined")
    while True:
        marks = [chance.randrange(251) for _ in range(3)]
        size = chance.choice(RANDOM_SIZES)
        calls = [worker.call("w0", plus, on_device(size, mark)) for mark in marks]
        for mark, answer in zip(marks, await asyncio.wait_for(asyncio.gather(*calls), 30), strict=True):
            if bad := wrong(answer, pattern(size, mark) + 1):
                link.tell(f"{bad} of {size} bytes are wrong")


# --- values -----------------------------------------------------------------------------------------------------------


def pattern(size: int, mark: int = 0) -> torch.Tensor:
    """So many bytes that tell where they belong, and of which message they are."""
    return ((torch.arange(size, dtype=torch.int64) * 7 + torch.arange(size, dtype=torch.int64) // 251 + mark) % 251).to(
        torch.uint8
    )


def on_device(size: int, mark: int = 0, index: int = 0) -> torch.Tensor:
    """The same on a device."""
    return fake_here().fake_tensor(pattern(size, mark), index)


def wrong(tensor: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements are not as they should be."""
    found = tensor.cpu()
    assert found.dtype == expected.dtype and found.shape == expected.shape, (found.shape, found.dtype)
    return int((found != expected).sum())


# --- handlers ---------------------------------------------------------------------------------------------------------


def plus(value: torch.Tensor, n: int = 1) -> torch.Tensor:
    """A plain handler: a new tensor, made on the handler's stream."""
    return value + n


async def aplus(value: torch.Tensor, n: int = 1) -> torch.Tensor:
    """The same in several steps, with others between them."""
    half = n // 2
    first = value + half
    await asyncio.sleep(0)
    second = first + (n - half - 1)
    await asyncio.sleep(0.002)
    return second + 1


@rpc.async_execution
def plus_later(value: torch.Tensor, n: int = 1) -> rpc.Future[torch.Tensor]:
    """The same by another thread, on a stream of its own."""
    fake = fake_here()
    future: rpc.Future[torch.Tensor] = rpc.Future()
    index, worker = value.device.index, rpc.current()
    given = fake.mark(fake.current(index))

    def work() -> None:
        stream = fake.fresh(index)
        with fake.entered([stream]):
            fake.wait(given, stream)
            fake.keep(fake.carrier(value), stream)
            result = value + n
            # What Future(devices=...) does; torch's half of it takes devices only where there are some.
            future._arrival = worker._node.accelerators.arrival()
            future.set_result(result)

    threading.Thread(target=work, name="plus-later").start()
    return future


@rpc.batched(4, max_wait=0.05)
def plus_together(values: list[torch.Tensor], numbers: list[int]) -> list[torch.Tensor]:
    """The same for several callers at once."""
    return [value + number for value, number in zip(values, numbers, strict=True)]


@rpc.batched(4, max_wait=0.05)
async def aplus_together(values: list[torch.Tensor], numbers: list[int]) -> list[torch.Tensor]:
    """The same in steps."""
    first = [value + 0 for value in values]
    await asyncio.sleep(0.001)
    return [value + number for value, number in zip(first, numbers, strict=True)]


def give_back(value: Any) -> Any:
    """What came."""
    return value


async def agive_back(value: Any) -> Any:
    """The same, later."""
    await asyncio.sleep(0)
    return value


def make(size: int, mark: int, index: int = 1) -> torch.Tensor:
    """A tensor of the handler's own."""
    return on_device(size, mark, index)


def where(value: Any) -> str:
    """Type of the device, its number, and what the first element is."""
    return f"{value.device} {int(value.reshape(-1)[0].item())}"


def describe(value: torch.Tensor) -> tuple[Any, ...]:
    """What is said of a tensor apart from its elements."""
    return (
        str(value.device),
        tuple(value.shape),
        tuple(value.stride()),
        value.requires_grad,
        isinstance(value, torch.nn.Parameter),
    )


def share(first: torch.Tensor, second: torch.Tensor) -> int:
    """Write to one, look at the other: how many of its elements changed."""
    first.fill_(7)
    return int((second == 7).sum().item())


def fail_after_work(value: torch.Tensor) -> NoReturn:
    """Give the stream work, and raise."""
    for _ in range(3):
        value.add_(1)
    raise ValueError("after work")


def items(value: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """A stream of tensors."""
    for number in range(count):
        yield value + number


async def aitems(value: torch.Tensor, count: int) -> AsyncIterator[torch.Tensor]:
    """The same from the loop."""
    for number in range(count):
        await asyncio.sleep(0)
        yield value + number


def by_way_of(to: list[str], value: torch.Tensor, n: int) -> torch.Tensor:
    """Ask the next of several workers, blocking, and add something before and after."""
    if not to:
        return value + n
    answer: torch.Tensor = rpc.rpc_sync(to[0], by_way_of, args=(to[1:], value + n, n))
    return answer + n


async def aby_way_of(to: list[str], value: torch.Tensor, n: int) -> torch.Tensor:
    """The same in steps."""
    if not to:
        return value + n
    answer: torch.Tensor = await rpc.call(to[0], aby_way_of, to[1:], value + n, n)
    return answer + n


class Model:
    """A remote object with a tensor on a device."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight + 0

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        """Of the kind that blocks."""
        return value + self.weight

    async def aapply(self, value: torch.Tensor) -> torch.Tensor:
        """In steps."""
        await asyncio.sleep(0)
        return value + self.weight

    def get(self) -> torch.Tensor:
        """The tensor itself."""
        return self.weight

    async def aget(self) -> torch.Tensor:
        """The same from the loop."""
        return self.weight


def use(ref: rpc.RRef[torch.Tensor], n: int) -> torch.Tensor:
    """A value that another handler has made, on another stream."""
    return ref.local_value() + n


def fetch(ref: rpc.RRef[torch.Tensor], n: int) -> torch.Tensor:
    """The same, from wherever it is."""
    return ref.to_here() + n


def hold(value: torch.Tensor) -> rpc.RRef[torch.Tensor]:
    """A reference to a new tensor of this worker."""
    return rpc.RRef(value + 1)


@dataclass
class Pair:
    """Tensors in a dataclass."""

    first: torch.Tensor
    second: torch.Tensor


def swap(pair: Pair) -> Pair:
    """Both, the other way round."""
    return Pair(pair.second + 0, pair.first + 0)


def mixed(here: torch.Tensor, there: torch.Tensor, n: int) -> dict[str, torch.Tensor]:
    """Tensors of the host and of a device in one message."""
    return {"here": here + n, "there": there + n}


def stay(seconds: float, value: torch.Tensor) -> torch.Tensor:
    """Answer late."""
    threading.Event().wait(seconds)
    return value + 1


async def astay(seconds: float, value: torch.Tensor) -> torch.Tensor:
    """Answer late, from the loop."""
    await asyncio.sleep(seconds)
    return value + 1


def fake_state() -> dict[str, Any]:
    """Of this process: calls of the driver, bytes in use, violations."""
    fake = fake_here()
    return {"calls": dict(fake.calls), "in use": used(fake), "violations": list(fake.violations), "memfds": memfds()}


def fail_next(name: str, times: int) -> None:
    """Let calls of the driver of this process fail."""
    fake_here().fail(name, times)


def stop_failing(name: str) -> None:
    """What was to fail and was not called is forgotten."""
    fake = fake_here()
    fake.failures.pop(name, None)


def say_by_hand(to: str, channel: int, fields: list[Any]) -> None:
    """Send a message of a channel that nobody has thought out."""
    worker = rpc.current()
    link = next(link for link in worker._node.links.all() if link.record.name == to)
    worker._node.engine.call_on_loop(link.say, channel, fields)
