"""Landing: on which streams a message arrives, how others come to wait for it, and coroutines that keep to them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from aiorpc.channels.accelerator import Stream
from aiorpc.channels.landing import LandedCoroutine, Landing, StreamPool
from tests.fakes.cuda import FakeCuda, FakeTensor

LAG = (0, 0.001)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """Two devices."""
    with FakeCuda(lag=LAG) as fake:
        yield fake
        assert fake.violations == []


def slowly(fake: FakeCuda, value: float, index: int = 0, size: int = 1000) -> FakeTensor:
    """A tensor that holds its value only after much work of the current stream."""
    tensor = fake.fake_tensor(torch.zeros(size), index)
    for _ in range(20):
        tensor.add_(1)
    tensor.fill_(value)
    return tensor


def lands(fake: FakeCuda, *indices: int) -> Landing:
    return Landing(fake, StreamPool(fake), indices)


def land(fake: FakeCuda, landing: Landing, value: float, index: int = 0) -> FakeTensor:
    """A tensor that arrives on these streams."""
    with landing.entered():
        tensor = slowly(fake, value, index)
    landing.carriers.append((index, fake.carrier(tensor)))
    return tensor


# --- streams of landings ----------------------------------------------------------------------------------------------


def test_messages_one_after_the_other_take_one_stream(fake: FakeCuda) -> None:
    """torch keeps memory for each stream by itself: others would keep as much again."""
    pool = StreamPool(fake)
    first = Landing(fake, pool, [0, 1]).streams
    for _ in range(10):
        assert Landing(fake, pool, [0, 1]).streams == first
        fake.machine.drain(10.0)


def test_a_stream_that_still_works_is_left_alone(fake: FakeCuda) -> None:
    """What was given to it now would come after all of that; when it is done it is taken again."""
    pool = StreamPool(fake)
    landing = Landing(fake, pool, [0])
    (stream,) = landing.streams.values()
    with landing.entered():
        tensor = slowly(fake, 1.0, size=100_000)
    del landing
    other = Landing(fake, pool, [0])
    assert other.streams[0] is not stream
    fake.machine.drain(10.0)
    assert Landing(fake, pool, [0]).streams[0] is stream
    del tensor


# --- arrivals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_who_joins_sees_what_was_made_on_other_streams(fake: FakeCuda, index: int) -> None:
    """The current streams of the thread that joins wait; whoever does not join would read too early."""
    early = 0
    for round_ in range(20):
        landing = lands(fake, 0, 1)
        tensor = land(fake, landing, round_ + 1, index)
        with landing.entered():
            arrival = landing.arrival()
        assert arrival is not None
        with fake.entered([fake.fresh(index)]):
            early += bool((tensor + 0).ne(round_ + 1).any())
        with fake.entered([fake.fresh(index)]):
            arrival.join()
            assert torch.equal((tensor + 0).cpu(), torch.full((1000,), round_ + 1.0))
    assert early, "the streams were never apart, so nothing was shown"


def test_joining_keeps_the_memory_for_the_stream_that_joins(fake: FakeCuda) -> None:
    """A tensor that is dropped while the joining stream still reads it is read unharmed."""
    for round_ in range(20):
        landing = lands(fake, 0)
        tensor = land(fake, landing, round_)
        with landing.entered():
            arrival = landing.arrival()
        assert arrival is not None
        with fake.entered([fake.fresh(0)]):
            arrival.join()
            busy = slowly(fake, 0)
            result = tensor + busy
            del tensor, arrival
            landing.carriers.clear()
        with landing.entered():  # where the memory is given out again
            slowly(fake, 99)
        fake.machine.drain(10)
        assert torch.equal(result.cpu(), torch.full((1000,), float(round_)))


def test_joining_holds_up_no_thread(fake: FakeCuda) -> None:
    """Streams wait, the host does not."""
    landing = lands(fake, 0)
    land(fake, landing, 1)
    with landing.entered():
        arrival = landing.arrival()
    assert arrival is not None
    arrival.join()
    arrival.join()  # any number of times
    assert not fake.waiters
    assert fake.calls["synchronize"] == 0


# --- landings ---------------------------------------------------------------------------------------------------------


# --- coroutines -------------------------------------------------------------------------------------------------------


def streams(fake: FakeCuda) -> list[Stream]:
    return [fake.current(index) for index in range(fake.count())]


async def serve(coroutine: Any, landing: Landing) -> None:
    """As the runtime does."""
    await LandedCoroutine(coroutine, landing)


async def test_each_step_runs_on_the_streams_of_its_landing(fake: FakeCuda) -> None:
    """Also after an await; and what runs meanwhile has those of the loop."""
    outside = streams(fake)
    landing = lands(fake, 0, 1)
    with landing.entered():
        wanted = streams(fake)
    seen: list[list[Stream]] = []
    meanwhile: list[list[Stream]] = []

    async def handler() -> None:
        for _ in range(5):
            seen.append(streams(fake))
            await asyncio.sleep(0)
        seen.append(streams(fake))

    task = asyncio.create_task(serve(handler(), landing))
    while not task.done():
        meanwhile.append(streams(fake))
        await asyncio.sleep(0)
    await task
    assert seen == [wanted] * 6
    assert len(meanwhile) >= 5
    assert all(each == outside for each in meanwhile)
    assert streams(fake) == outside


async def test_stream_that_a_coroutine_enters_is_found_again(fake: FakeCuda) -> None:
    """Across an await within its block; after the block the landing's own is back, and the loop never has it."""
    outside = streams(fake)
    landing = lands(fake, 0, 1)
    with landing.entered():
        wanted = streams(fake)
    own, inner = fake.fresh(1), fake.fresh(1)
    seen: list[Stream] = []

    async def handler() -> None:
        with fake.entered([own]):
            await asyncio.sleep(0)
            seen.append(fake.current(1))
            with fake.entered([inner]):
                await asyncio.sleep(0)
                seen.append(fake.current(1))
            await asyncio.sleep(0)
            seen.append(fake.current(1))
        await asyncio.sleep(0)
        seen.append(fake.current(1))

    task = asyncio.create_task(serve(handler(), landing))
    while not task.done():
        assert streams(fake) == outside
        await asyncio.sleep(0)
    await task
    assert seen == [own, inner, own, wanted[1]]
    assert streams(fake) == outside


async def test_errors_go_through(fake: FakeCuda) -> None:
    """What the coroutine raises comes out, what it awaits raises within it, and the streams are put back."""
    outside = streams(fake)
    landing = lands(fake, 0)
    with landing.entered():
        wanted = fake.current(0)
    caught: list[tuple[str, Stream]] = []

    async def handler() -> None:
        try:
            await failing
        except KeyError:
            caught.append(("await", fake.current(0)))
        raise ValueError("mine")

    failing = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(handler(), landing))
    await asyncio.sleep(0)
    failing.set_exception(KeyError())
    with pytest.raises(ValueError, match="mine"):
        await task
    assert caught == [("await", wanted)]
    assert streams(fake) == outside


async def test_cancellation_goes_through_and_may_be_refused(fake: FakeCuda) -> None:
    """It is raised at the await, on the coroutine's streams; a coroutine that goes on does so on them."""
    outside = streams(fake)
    landing = lands(fake, 0)
    with landing.entered():
        wanted = fake.current(0)
    seen: list[Stream] = []

    async def handler() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(fake.current(0))
        await asyncio.sleep(0)
        seen.append(fake.current(0))
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(fake.current(0))

    task = asyncio.create_task(serve(handler(), landing))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    for _ in range(4):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [wanted] * 3
    assert streams(fake) == outside


class Once:
    """Yields once to whoever drives it."""

    def __await__(self) -> Generator[str, Any, Any]:
        return (yield "waiting")


def driven(coroutine: Any, landing: Landing) -> Generator[Any, Any, None]:
    return LandedCoroutine(coroutine, landing).__await__()


class Losable(FakeCuda):
    """Devices that can be lost."""

    lost = False

    @contextmanager
    def entered(self, streams: Sequence[Stream]) -> Iterator[None]:
        if self.lost:
            raise RuntimeError("the device is lost")
        with super().entered(streams):
            yield


def test_device_that_fails_between_two_steps_is_an_error_of_the_coroutine() -> None:
    """It comes out where the coroutine is awaited: nobody waits for ever."""

    async def handler() -> None:
        await Once()

    fake = Losable(lag=LAG)
    with fake:
        coroutine = handler()
        steps = driven(coroutine, lands(fake, 0))
        next(steps)
        fake.lost = True
        with pytest.raises(RuntimeError, match="the device is lost"):
            steps.send(None)
        coroutine.close()
