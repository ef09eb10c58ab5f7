"""Tensors between the devices of real processes; the devices are those of `tests.fakes`, which say what that proves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import aiorpc as rpc

from ..fakes.cuda import FakeCuda
from ..observability.scraping import scrape
from . import device_bodies as bodies
from .device_bodies import BOX, Group, Setup, on_device, pattern, play, wrong
from .workers import Place, meeting_file, processes, until

pytestmark = [pytest.mark.slow, pytest.mark.long]  # with real processes, and streams that are late on purpose

CROSSED = {"w1": {0: 1, 1: 0}}
SIZES = [1, 1000, 65536, 65537, (1 << 20) + 3, BOX + 5, 3 * BOX]
WAYS = ["auto", "ipc", "staging"]


def setups(way: str = "auto", **options: Any) -> tuple[Setup, Setup]:
    """w0 with a map that crosses the devices; w1 answers by its inverse."""
    chosen = {"device_channel": way, **options}
    return Setup(CROSSED, chosen), Setup({}, chosen)


def moved(group: Group, way: str) -> int:
    """Transfers and chunks that went that way, in either direction."""
    traffic = group.worker.statistics().channels[way]
    return traffic.sent + traffic.received


@pytest.mark.parametrize("way", ["ipc", "staging"])
async def test_metrics_show_the_memory_that_tensors_pass_through(way: str) -> None:
    """For each device that calls use: the outboxes on it, none if tensors go through the host; and torch's own."""

    async def scenario(group: Group) -> None:
        for index in (0, 1):
            await group.ask("w1", bodies.plus, on_device(1000, 1, index))
        seen = await scrape(group.worker)
        assert seen.labels("aiorpc_device_buffer_bytes", "device") == {"cuda:0", "cuda:1"}
        for index in (0, 1):
            expected = BOX if way == "ipc" else 0
            assert seen.of("aiorpc_device_buffer_bytes", device=f"cuda:{index}", worker="w0") == expected
            # There is no such device, so torch's allocator holds nothing of it.
            assert seen.of("aiorpc_device_allocated_bytes", device=f"cuda:{index}") == 0
            assert seen.of("aiorpc_device_reserved_bytes", device=f"cuda:{index}") == 0

    await play(scenario, *setups(way, metrics="127.0.0.1:0"))


@pytest.mark.parametrize("way", WAYS)
async def test_values_go_by_the_map_and_come_back_by_its_inverse(way: str) -> None:
    """From one byte to several times the outbox, each way: right values, on the right devices."""

    async def scenario(group: Group) -> None:
        for mark, size in enumerate(SIZES):
            index = mark % 2
            answer = await group.ask("w1", bodies.plus, on_device(size, mark, index))
            assert str(answer.device) == f"cuda:{index}"
            assert not wrong(answer, pattern(size, mark) + 1), size
            place = await group.ask("w1", bodies.where, on_device(size, mark, index))
            assert place == f"cuda:{1 - index} {mark % 251}"
        taken = "staging" if way == "staging" else "ipc"
        assert moved(group, taken)
        assert not moved(group, "staging" if taken == "ipc" else "ipc") or way == "auto"
        assert not moved(group, "direct")

    group = await play(scenario, *setups(way))
    for report in group.reports.values():
        # One outbox for each pair of devices that was used, in each direction.
        assert report.calls.get("open", 0) == (0 if way == "staging" else 2), report.calls


HANDLERS: list[Callable[..., Any]] = [
    bodies.plus,
    bodies.aplus,
    bodies.plus_later,
    bodies.plus_together,
    bodies.aplus_together,
]


@pytest.mark.parametrize("way", ["auto", "staging"])
@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: str(handler.__name__))
async def test_the_sender_may_overwrite_at_once(handler: Callable[..., Any], way: str) -> None:
    """What was sent is what the tensor held at the call, for each kind of handler, many at a time."""

    async def scenario(group: Group) -> None:
        for size in (100, 70_000, 1_500_000):
            source = on_device(size)
            calls = []
            for mark in range(8):
                source.copy_(pattern(size, mark))
                calls.append(group.worker.call("w1", handler, source, mark))
                source.fill_(0xEE)
            for mark, answer in enumerate(await asyncio.wait_for(asyncio.gather(*calls), 30)):
                assert not wrong(answer, pattern(size, mark) + mark), (size, mark)

    await play(scenario, *setups(way))


async def test_references() -> None:
    """Objects that hold tensors: methods from several handlers, `to_here`, values made by one handler and used by
    others, on other streams."""

    async def scenario(group: Group) -> None:
        worker = group.worker
        for mark in range(6):
            model = worker.remote("w1", bodies.Model, on_device(200_000, mark))
            given = [on_device(200_000, number) for number in range(4)]
            calls = [model.rpc_async().apply(value) for value in given[:2]]
            calls += [model.rpc_async().aapply(value) for value in given[2:]]
            for value in given:
                value.fill_(0)
            for number, answer in enumerate(await asyncio.wait_for(asyncio.gather(*calls), 30)):
                assert not wrong(answer, pattern(200_000, number) + pattern(200_000, mark))
            assert not wrong(await asyncio.wait_for(model.rpc_async().get(), 30), pattern(200_000, mark))
            made = worker.remote("w1", bodies.make, 200_000, mark)
            uses = [worker.call("w1", bodies.use, made, number) for number in range(4)]
            for number, answer in enumerate(await asyncio.wait_for(asyncio.gather(*uses), 30)):
                assert not wrong(answer, pattern(200_000, mark) + number)
            assert not wrong(await asyncio.wait_for(made, 30), pattern(200_000, mark))
            assert not wrong(await asyncio.to_thread(made.to_here, 30.0), pattern(200_000, mark))
            ref = await group.ask("w1", bodies.hold, on_device(100_000, mark))
            assert not wrong(await asyncio.wait_for(ref, 30), pattern(100_000, mark) + 1)
            del model, made, ref

    await play(scenario, *setups())


@pytest.mark.parametrize("way", ["auto", "staging"])
@pytest.mark.parametrize("generator", [bodies.items, bodies.aitems], ids=["def", "async"])
async def test_streams_of_tensors(generator: Callable[..., Any], way: str) -> None:
    """Items are right, in order, whatever their size."""

    async def scenario(group: Group) -> None:
        for size, count in ((10, 30), (200_000, 12), (BOX // 2, 3)):
            source = on_device(size)
            async with group.worker.stream("w1", generator, source, count) as stream:
                source.fill_(9)
                number = 0
                async for item in stream:
                    assert not wrong(item, pattern(size) + number), (size, number)
                    number += 1
                assert number == count

    await play(scenario, *setups(way))


async def test_a_worker_without_devices() -> None:
    """It takes what is mapped to its host, and its answers come back to the device."""

    async def scenario(group: Group) -> None:
        for mark, size in enumerate((1, 5000, 300_000, 9_000_000)):
            for handler in (bodies.plus, bodies.aplus):
                answer = await group.ask("w1", handler, on_device(size, mark), 2)
                assert str(answer.device) == "cuda:0"
                assert not wrong(answer, pattern(size, mark) + 2), size
        assert await group.ask("w1", bodies.where, on_device(9, 1)) == "cpu 1"
        assert moved(group, "staging") and not moved(group, "ipc")

    first, second = setups()
    await play(scenario, replace(first, maps={"w1": {0: "cpu"}}), replace(second, fake=None))


@pytest.mark.parametrize("options", [{"transports": ("tcp",)}, {}], ids=["tcp", "unix"])
async def test_opens_once_and_grows_nothing(options: dict[str, Any]) -> None:
    """2,000 small calls: the same events, one opening for each direction, memory as before."""

    async def scenario(group: Group) -> None:
        source = on_device(64)
        for _ in range(20):
            await group.ask("w1", bodies.give_back, source)
        await settled(group)
        ours, theirs = bodies.fake_state(), await group.ask("w1", bodies.fake_state)
        for _ in range(100):
            calls = [group.worker.call("w1", bodies.agive_back, source) for _ in range(20)]
            answers = await asyncio.wait_for(asyncio.gather(*calls), 30)
        assert not wrong(answers[-1], pattern(64))
        del answers, calls
        await settled(group)
        for before, after in ((ours, bodies.fake_state()), (theirs, await group.ask("w1", bodies.fake_state))):
            assert after["in use"] == before["in use"]
            assert after["memfds"] == before["memfds"]
            for name in ("event", "open", "open_event", "allocate", "pinned"):
                assert after["calls"].get(name, 0) == before["calls"].get(name, 0), name
            assert after["calls"]["open"] == 1

    await play(scenario, *setups(**options))


async def settled(group: Group) -> None:
    """Until only one small tensor lives here, and none there."""
    await until(lambda: bodies.used(group.fake) == [64, 0])

    async def nothing_there() -> bool:
        return bool((await group.ask("w1", bodies.fake_state))["in use"] == [0, 0])

    await until(nothing_there)


REFUSALS: dict[str, dict[str, Any]] = {
    "refused there": {"ipc": False},
    "no such thing there": {"ipc": None},
    "other devices": {"uuids": ("FAKE-C", "FAKE-D")},
    "no access": {"peer_access": {("FAKE-X", "FAKE-Y")}},
}


@pytest.mark.parametrize("why", REFUSALS)
@pytest.mark.parametrize("way", ["auto", "ipc"])
async def test_where_memory_cannot_be_shared(why: str, way: str) -> None:
    """By staging; or, where ipc is asked for alone, an error that says why, and the next call as well."""

    async def scenario(group: Group) -> None:
        for mark, size in enumerate((5, 200_000, BOX + 1)):
            call = group.ask("w1", bodies.plus, on_device(size, mark))
            if way == "auto":
                assert not wrong(await call, pattern(size, mark) + 1)
            else:
                with pytest.raises(rpc.RpcError, match="ipc") as caught:
                    await call
                assert not isinstance(caught.value, rpc.PeerLost)
        assert not group.worker.statistics().channels["ipc"].sent
        assert await group.ask("w1", bodies.plus, torch.ones(2)) is not None

    first, second = setups(way)
    # Access between devices that cross is needed only where they differ.
    await play(scenario, first, replace(second, fake=REFUSALS[why]))


def counted(fake: FakeCuda, name: str, count: int) -> bool:
    """Whether a method was called so often."""
    return fake.calls[name] == count


async def test_who_leaves_lets_go() -> None:
    """A worker comes and leaves five times: each time our outboxes are freed and its own are closed here."""

    async def scenario(init_method: str) -> None:
        setup = Setup({f"visitor-{number}": {0: 1} for number in range(5)})
        fake = bodies.Home.fake = setup.make_fake(0)
        assert fake is not None
        with fake, processes() as children:
            worker = setup.make_worker(Place("w0", 0, None, init_method), fake)
            await worker.start()
            try:
                child = children.start(Place("visitor", 0, None, init_method), bodies.come_and_go, Setup(), 5)
                for number in range(5):
                    assert await child.ahear() == "joined"
                    for mark in range(4):
                        call = worker.call(f"visitor-{number}", bodies.plus, on_device(100_000, mark))
                        assert not wrong(await asyncio.wait_for(call, 30), pattern(100_000, mark) + 1)
                    assert fake.calls["open"] == number + 1
                    child.tell("leave")
                    assert await child.ahear() == "left"
                    await until(partial(counted, fake, "free", number + 1))
                    await until(partial(counted, fake, "close", number + 1))
                    del call
                    assert await bodies.drained(fake) == [0, 0]
                    assert bodies.memfds() == 1  # the page of events
                left = await child.ahear()
                assert [each["freed"] for each in left] == [1, 2, 3, 4, 5]
                assert [each["memfds"] for each in left] == [1] * 5
                assert [each["in use"] for each in left] == [0] * 5
                assert child.join() == 0
            finally:
                await worker.shutdown()
        assert not fake.violations, fake.violations

    with meeting_file() as init_method:
        await scenario(init_method)
