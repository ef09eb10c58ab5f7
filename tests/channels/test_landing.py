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
from aiorpc.channels.routes import Route, Staying, going, returning
from aiorpc.devices import to_device_map
from aiorpc.errors import SerializationError
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


# --- routes -----------------------------------------------------------------------------------------------------------


Tensor = torch.Tensor
CPU = torch.device("cpu")


@pytest.fixture
def fake_of_routes() -> Iterator[FakeCuda]:
    """Three devices."""
    with FakeCuda(devices=3, lag=(0, 0.001)) as fake_of_routes:
        yield fake_of_routes
        assert fake_of_routes.violations == []


def there(fake_of_routes: FakeCuda | None, **devices: int | str) -> Route:
    """To the worker "ps" by a map like ``d0=1``: what is on device 0 goes to device 1."""
    return going(
        fake_of_routes, to_device_map({name.removeprefix("d"): target for name, target in devices.items()}), "ps"
    )


def test_map_says_where_a_tensor_goes(fake_of_routes: FakeCuda) -> None:
    """Each device to the one that the map names; a tensor of these goes as it is."""
    route = there(fake_of_routes, d0=1, d1=0, d2="cpu")
    for index, target in enumerate(["cuda:1", "cuda:0", "cpu"]):
        tensor = fake_of_routes.fake_tensor(torch.ones(2), index)
        assert route.target(tensor) == target
        assert route.takes(tensor)
        assert route.leads(tensor.device)


def test_tensors_of_the_host_are_none_of_its_business(fake_of_routes: FakeCuda) -> None:
    """They are not taken, whatever the map says of the host; nor is what lies on another kind of device."""
    for route in (there(fake_of_routes, d0=0), there(fake_of_routes, cpu=0), there(None, cpu=0)):
        assert not route.takes(torch.ones(2))
        assert not route.takes(torch.ones(2, device="meta"))
    assert not there(fake_of_routes, d0=0).leads(CPU)
    assert there(fake_of_routes, cpu=0).leads(CPU)
    assert not there(fake_of_routes, d0=0).leads(torch.device("meta"))


@pytest.mark.parametrize("ask", ["takes", "target"])
def test_unmapped_device_is_refused_with_all_that_one_has_to_know(fake_of_routes: FakeCuda, ask: str) -> None:
    """The error names type, shape, device and worker, and says what to do."""
    route = there(fake_of_routes, d0=1)
    tensor = fake_of_routes.fake_tensor(torch.ones(2, 3, dtype=torch.float64), 1)
    with pytest.raises(
        SerializationError,
        match=(
            r"^a torch.float64 tensor of shape \(2, 3\) on cuda:1: no device map leads from there to worker 'ps'; "
            r"set one before init \(options.set_device_map\('ps', \{0: 0\}\), say\), or send tensor.cpu\(\)$"
        ),
    ):
        getattr(route, ask)(tensor)
    assert not route.leads(tensor.device)


def test_what_cannot_come_back_says_whose_map_is_missing(fake_of_routes: FakeCuda) -> None:
    """Answers go by the caller's map, so the error at the callee tells whose it is."""
    route = returning(fake_of_routes, to_device_map({0: 1}), "trainer")
    with pytest.raises(
        SerializationError,
        match=(
            r"^a torch.int64 tensor of shape \(\) on cuda:0: no device map leads from there to worker 'trainer'; "
            r"answers go by the inverse of the caller's map to this worker, which the caller sets; or return "
            r"tensor.cpu\(\)$"
        ),
    ):
        route.takes(fake_of_routes.fake_tensor(torch.tensor(3), 0))


def test_returning_inverts_the_map(fake_of_routes: FakeCuda) -> None:
    """What went there by the map comes back to where it was; the host on either side too."""
    devices = to_device_map({0: 1, 1: 2, 2: "cpu", "cpu": 0})
    out, back = going(fake_of_routes, devices, "ps"), returning(fake_of_routes, devices, "trainer")
    for index in range(3):
        tensor = fake_of_routes.fake_tensor(torch.ones(2), index)
        arrived = out.target(tensor)
        if arrived == "cpu":
            assert back.host_target == str(tensor.device)
        else:
            assert back.target(fake_of_routes.fake_tensor(torch.ones(2), int(arrived.removeprefix("cuda:")))) == str(
                tensor.device
            )
    assert out.host_target == "cuda:0"
    assert back.target(fake_of_routes.fake_tensor(torch.ones(2), 0)) == "cpu"


def test_kinds_that_have_to_be_taken_apart_are_asked_for_their_device_too(fake_of_routes: FakeCuda) -> None:
    """A tensor that the accelerator does not hold is not taken, and is refused just so if its device is not mapped."""
    with FakeCuda(devices=3, lag=(0, 0)) as other:  # to which none of the tensors of `fake_of_routes` belongs
        strange = fake_of_routes.fake_tensor(torch.ones(2), 0)
        assert not there(other, d0=1).takes(strange)
        with pytest.raises(SerializationError, match="on cuda:0: no device map leads from there"):
            there(other, d1=1).takes(strange)


def test_nested_tensor_is_refused_without_a_shape(fake_of_routes: FakeCuda) -> None:
    """It has none that could be told."""

    class Nested:
        dtype, device, is_nested = torch.float32, torch.device("cuda", 2), True

    tensor: Tensor = Nested()  # type: ignore[assignment]  # none can be made without a device
    with pytest.raises(SerializationError, match=r"^a torch.float32 tensor on cuda:2: no device map"):
        there(fake_of_routes, d0=1).takes(tensor)


def test_programs_for_torch_find_its_words(fake_of_routes: FakeCuda) -> None:
    """Those that PyTorch's own tests look for; with them who, where and what to do."""
    words = {
        going: r"to worker 'w'; TensorPipe RPC backend only supports CPU tensors by default.*`set_device_map` on "
        r"`TensorPipeRpcBackendOptions`: set one before init",
        returning: r"to worker 'w'; Response device mapping is not available: answers go by the inverse",
    }
    for make, text in words.items():
        with pytest.raises(SerializationError, match=text):
            make(fake_of_routes, {}, "w", as_torch=True).takes(fake_of_routes.fake_tensor(torch.ones(2), 0))


def test_to_oneself_everything_stays(fake_of_routes: FakeCuda) -> None:
    """On each device, and whoever keeps count of the devices in use is told."""
    used: list[int] = []
    route = Staying(fake_of_routes, "w", used.append)
    for index in (2, 0):
        tensor = fake_of_routes.fake_tensor(torch.ones(2), index)
        assert route.takes(tensor)
        assert route.target(tensor) == str(tensor.device)
        assert route.leads(tensor.device)
    assert set(used) == {2, 0}
    assert not route.takes(torch.ones(2)) and not route.leads(CPU) and not route.host_target
    assert not Staying(None, "w", used.append)
