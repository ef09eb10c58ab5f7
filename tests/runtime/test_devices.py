"""Tensors on devices, as users see them: two workers of this process, and devices that do not exist.

The fake devices are slow and unkind: whoever uses a tensor on a stream that did not wait for it reads something else.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import Queue, RpcBackendOptions, RpcError, Worker
from aiorpc.errors import DeviceMapError, SerializationError
from aiorpc.types import QueueHandle
from tests.fakes.cuda import FakeCuda, FakeTensor
from tests.runtime.inside import acting_as
from tests.runtime.waiting import LIMIT, until, until_no_references, wait_until

Tensor = torch.Tensor
CROSSED = {0: 1, 1: 0}
WAYS = {"auto": "direct", "staging": "staging"}
LAG = (0, 0.0006)
LATE = 10  # operations that a stream is given before it makes what somebody may read too early


@asynccontextmanager
async def group(
    *maps: dict[str, dict[Any, Any]],
    way: str = "auto",
    devices: int = 2,
    accelerators: Sequence[FakeCuda | None] | None = None,
    fake: FakeCuda | None = None,
    **options: Any,
) -> AsyncIterator[tuple[FakeCuda, list[Worker]]]:
    """Workers "worker0", ... with these device maps, on one fake; at the end nothing of it is in use, or went wrong."""
    # Hundreds of calls at once: on a busy machine a stream waits for long.
    with fake or FakeCuda(devices, lag=LAG, patience=4 * LIMIT) as fake:
        store = HashStore()
        workers = []
        for rank, each in enumerate(maps):
            # Streams that lag on purpose, on a busy machine: hundreds of calls at once take longer than one wait may.
            mine = RpcBackendOptions(device_channel=way, rpc_timeout=6 * LIMIT, **options)
            for name, device_map in each.items():
                mine.set_device_map(name, device_map)
            accelerator = fake if accelerators is None else accelerators[rank]
            workers.append(
                Worker(
                    f"worker{rank}",
                    rank=rank,
                    world_size=len(maps),
                    store=store,
                    options=mine,
                    accelerator=accelerator,
                )
            )
        try:
            await asyncio.gather(*[worker.start() for worker in workers])
            yield fake, workers
        finally:
            await asyncio.gather(*[worker.shutdown() for worker in workers], return_exceptions=True)
        assert fake.violations == []
        assert threading.get_ident() not in fake.waiters, "the loop waited for a device"
        assert [fake.current(index) for index in range(fake.count())] == fake.default_streams, (
            "streams of the loop's thread"
        )
        await until(lambda: nothing_in_use(fake))


def nothing_in_use(fake: FakeCuda) -> bool:
    """Whether all memory came back; first without the garbage collector, which takes its time."""
    for attempt in range(3):
        if attempt == 2:
            gc.collect()
        fake.machine.drain(LIMIT)
        if not any(fake.in_use(index) for index in range(fake.count())):
            return True
    return False


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """How tensors travel within this process."""
    return str(request.param)


@pytest.fixture
async def pair(way: str) -> AsyncIterator[tuple[FakeCuda, list[Worker]]]:
    """Two workers; device 0 of the first goes to device 1 of the second, and device 1 to device 0."""
    async with group({"worker1": CROSSED}, {}, way=way) as made:
        yield made


def values(value: float, size: int = 1000) -> Tensor:
    return torch.full((size,), float(value))


def late(fake: FakeCuda, index: int, value: float, size: int = 1000) -> FakeTensor:
    """A tensor on the current stream, that has its value only after a while."""
    tensor = fake.fake_tensor(torch.zeros(size), index)
    for _ in range(LATE):
        tensor.add_(1)
    tensor.fill_(value)
    return tensor


def is_all(tensor: Tensor, value: float) -> bool:
    """On the current stream; waits for that."""
    return bool((tensor + 0).cpu().eq(value).all())


def fake_of(tensor: Tensor) -> FakeCuda:
    assert isinstance(tensor, FakeTensor)
    return tensor.fake


# --- handlers ---------------------------------------------------------------------------------------------------------


def plus_one(x: Tensor, wait: int = LATE) -> Tensor:
    """Late."""
    for _ in range(wait):
        x = x + 0
    return x + 1


async def plus_one_async(x: Tensor) -> Tensor:
    for _ in range(5):
        x = x + 0
        await asyncio.sleep(0)
    return x + 1


def plus_one_in_coroutine(x: Tensor) -> Any:
    return plus_one_async(x)


@aiorpc.async_execution
def plus_one_deferred(x: Tensor) -> aiorpc.Future[Tensor]:
    future: aiorpc.Future[Tensor] = aiorpc.Future()
    future.set_result(plus_one(x))
    return future


@aiorpc.batched(max_size=1)
def plus_one_batched(xs: list[Tensor]) -> list[Tensor]:
    return [plus_one(x) for x in xs]


@aiorpc.batched(max_size=1)
async def plus_one_batched_async(xs: list[Tensor]) -> list[Tensor]:
    await asyncio.sleep(0)
    return [plus_one(x) for x in xs]


HANDLERS: dict[str, Callable[..., Any]] = {
    "def": plus_one,
    "async def": plus_one_async,
    "def that gives a coroutine": plus_one_in_coroutine,
    "async_execution": plus_one_deferred,
    "batched": plus_one_batched,
    "batched async": plus_one_batched_async,
}


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HANDLERS)
async def test_values_are_those_at_the_time_of_the_call(pair: tuple[FakeCuda, list[Worker]], name: str) -> None:
    """Requests by the map and answers by its inverse, whoever serves; the caller overwrites its tensor right after."""
    fake, (worker0, _) = pair
    for size in (1, 1000, 300_000):
        for index in (0, 1):
            x = late(fake, index, 7, size)
            future = worker0.call("worker1", HANDLERS[name], x)
            x.fill_(1000)
            y = await future
            assert (type(y), y.device) == (FakeTensor, x.device)
            assert is_all(y, 8)


async def test_statistics_say_which_way(pair: tuple[FakeCuda, list[Worker]], way: str) -> None:
    """What went to devices is counted under the way that it took, at both ends."""
    fake, (worker0, worker1) = pair
    await worker0.call("worker1", plus_one, fake.fake_tensor(values(1), 0))
    for worker in (worker0, worker1):
        channels = worker.statistics().channels
        taken = {name: (channels[name].sent, channels[name].received) for name in ("direct", "ipc", "staging")}
        assert taken.pop(WAYS[way]) == (1, 1)
        assert set(taken.values()) == {(0, 0)}
        assert channels[WAYS[way]].bytes_sent == channels[WAYS[way]].bytes_received == 4000


def places(*tensors: Tensor, **more: Tensor) -> list[str]:
    return [str(tensor.device) for tensor in [*tensors, *more.values()]]


def echo(*args: Any, **kwargs: Any) -> Any:
    return [*args, *kwargs.values()]


async def test_tensors_of_host_and_devices_in_one_message(pair: tuple[FakeCuda, list[Worker]]) -> None:
    """Each arrives on its own device, bare, by keyword and inside of others, and comes back to where it was."""
    fake, (worker0, _) = pair
    zero, one, host = late(fake, 0, 1), late(fake, 1, 2), values(3, 300_000)
    assert await worker0.call("worker1", places, zero, host, one, more=zero) == ["cuda:1", "cpu", "cuda:0", "cuda:1"]
    sent = [zero, {"one": one, "host": [host]}, (zero[10:20], zero.view(10, 100).t())]
    (bare, inside, views), named = await worker0.call("worker1", echo, sent, named=one)
    assert [is_all(bare, 1), is_all(inside["one"], 2), is_all(named, 2)] == [True] * 3
    assert torch.equal(inside["host"][0], host)
    assert [tensor.device.index for tensor in (bare, inside["one"], *views, named)] == [0, 1, 0, 0, 1]
    views[1][0, 0] = 9
    assert bare.cpu()[0] == 9, "views of one storage do not share it any more"
    assert views[1].stride() == (1, 100)


async def test_flags_and_kinds_arrive(pair: tuple[FakeCuda, list[Worker]]) -> None:
    """Gradients wanted, Parameters, nothing at all, one element: as on the host."""
    fake, (worker0, _) = pair
    sent: list[Any] = [
        fake.fake_tensor(values(1).requires_grad_(), 0),
        torch.nn.Parameter(fake.fake_tensor(values(2), 1)),
        fake.fake_tensor(torch.empty(3, 0), 0),
        fake.fake_tensor(torch.tensor(5), 1),
    ]
    for arrived in (await worker0.call("worker1", echo, *sent), (await worker0.call("worker1", echo, sent))[0]):
        for got, wanted in zip(arrived, sent, strict=True):
            assert isinstance(got, torch.nn.Parameter) is isinstance(wanted, torch.nn.Parameter)
            assert (got.requires_grad, got.device, got.shape) == (wanted.requires_grad, wanted.device, wanted.shape)
            assert torch.equal(got.detach().cpu(), wanted.detach().cpu())


class Model(torch.nn.Module):
    """With parameters wherever."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        self.tied = self.weight


# --- what the map does not name ---------------------------------------------------------------------------------------


def unmapped_calls() -> dict[str, tuple[Callable[[Worker, Tensor], Any], str]]:
    """Ways to pass a tensor, and what the error says of the place."""
    return {
        "positional": (lambda worker, x: worker.call("worker1", echo, 1, x), "argument 1 of echo"),
        "keyword": (lambda worker, x: worker.call("worker1", echo, 1, other=x), "argument 'other' of echo"),
        "nested": (lambda worker, x: worker.call("worker1", echo, {"a": [x]}), "argument 0 of echo"),
        "nested by keyword": (lambda worker, x: worker.call("worker1", echo, named=(x,)), "argument 'named' of echo"),
        "parameter": (lambda worker, x: worker.call("worker1", echo, torch.nn.Parameter(x)), "argument 0 of echo"),
        "empty": (lambda worker, x: worker.call("worker1", echo, x[:0]), "argument 0 of echo"),
        "remote": (lambda worker, x: worker.remote("worker1", echo, x), "argument 0 of echo"),
        "handle": (lambda worker, x: worker.peer("worker1").call(echo, x), "argument 0 of echo"),
    }


@pytest.mark.parametrize("name", unmapped_calls())
async def test_unmapped_tensor_is_refused_before_anything_is_sent(way: str, name: str) -> None:
    """The error names argument, function, worker, tensor and device; no call was made, and nothing was sent."""
    async with group({"worker1": {0: 1}}, {}, way=way) as (fake, (worker0, worker1)):
        make, place = unmapped_calls()[name]
        before = [worker.statistics() for worker in (worker0, worker1)]
        x = fake.fake_tensor(torch.ones(2, 3), 1)
        with pytest.raises(SerializationError) as caught:
            await make(worker0, x)
        text = str(caught.value)
        argument, _, function = place.partition(" of ")
        assert text.startswith(f"{argument} of {__name__}:{function} for worker 'worker1'")
        shape = r"(0, 3)" if name == "empty" else r"(2, 3)"
        assert f"torch.float32 tensor of shape {shape} on cuda:1: no device map leads" in text
        assert "options.set_device_map('worker1', {0: 0})" in text
        del caught  # its frames hold the reference that came to nothing
        gc.collect()
        await until_no_references([worker0, worker1])
        for worker, was in zip((worker0, worker1), before, strict=True):
            now = worker.statistics()
            assert (now.calls_pending, now.calls_served) == (0, was.calls_served)
            if name != "remote":  # of which the owner is told that it came to nothing
                assert (now.connections, now.bytes_sent) == (was.connections, was.bytes_sent)
        del x
        assert is_all(await worker0.call("worker1", plus_one, fake.fake_tensor(values(1), 0)), 2)


async def test_to_oneself_everything_stays_where_it_is(way: str) -> None:
    """Arguments, results and values behind references, also on devices that no map names; a map says otherwise."""
    async with group({}, {"worker1": CROSSED}, way=way) as (fake, (worker0, worker1)):
        for index in (1, 0):
            back = await worker0.call("worker0", plus_one, late(fake, index, 3))
            assert is_all(back, 4) and back.device.index == index
            reference = worker0.remote("worker0", plus_one, late(fake, index, 5))
            here = await reference
            assert is_all(here, 6) and here.device.index == index
            del back, reference, here
        assert await worker1.call("worker1", index_of, fake.fake_tensor(values(1), 0)) == 1
        gc.collect()
        await until_no_references([worker0, worker1])


def index_of(x: Tensor) -> int | None:
    return x.device.index


async def queue_of(owner: Worker, other: Worker) -> tuple[Queue[Any], QueueHandle[Any]]:
    """A queue of that worker, and the handle of another one."""
    with acting_as(owner):
        queue: aiorpc.Queue[Any] = aiorpc.Queue("items")
    with acting_as(other):
        return queue, aiorpc.queue("items", owner=owner.name)


async def test_items_of_queues_are_waited_for(way: str) -> None:
    """By whoever gets them, on whatever stream; from a producer here and elsewhere, alone and several at once."""
    maps: list[dict[str, dict[Any, Any]]] = [{"worker1": CROSSED}, {"worker0": CROSSED}]
    async with group(*maps, way=way) as (fake, (worker0, worker1)):
        queue, there = await queue_of(worker0, worker1)
        for number in range(5):
            await there.put(late(fake, number % 2, number))
            got = await queue.get()
            assert is_all(got, number) and got.device.index == 1 - number % 2
            await queue.put(late(fake, number % 2, number))
            with fake.entered([fake.fresh(0), fake.fresh(1)]):
                got = await there.get()
                assert is_all(got, number) and got.device.index == 1 - number % 2
        for number in range(3):
            await there.put({"x": late(fake, 0, number)})
        items = await queue.get_many(3)
        assert [is_all(item["x"], number) for number, item in enumerate(items)] == [True] * 3
        del got, items
        queue.close()
        gc.collect()
        await until_no_references([worker0, worker1])


def make(index: int, fakes: list[str]) -> Any:
    """A tensor of the callee's own."""
    tensor = late(FAKES[fakes[0]], index, 5)
    return {"inside": tensor} if len(fakes) > 1 else tensor


FAKES: dict[str, FakeCuda] = {}  # what handlers that get no tensor make theirs on


@pytest.fixture
async def one_way(way: str) -> AsyncIterator[tuple[FakeCuda, list[Worker]]]:
    """Device 0 of the first worker goes to device 1 of the second, and nothing else anywhere."""
    async with group({"worker1": {0: 1}}, {}, way=way) as made:
        FAKES["one"] = made[0]
        yield made
        del FAKES["one"]


@pytest.mark.parametrize("nested", [False, True])
async def test_unmapped_result_reaches_the_caller(one_way: tuple[FakeCuda, list[Worker]], nested: bool) -> None:
    """As the handler's error, with device and worker; what the map does name comes."""
    _, (worker0, worker1) = one_way
    fakes = ["one", "nested"] if nested else ["one"]
    for _ in range(2):
        with pytest.raises(
            SerializationError,
            match=r"the result of .*make .*torch.float32 tensor of shape \(1000,\) on cuda:0: .* worker 'worker0'; .*"
            "which the caller sets",
        ):
            await worker0.call("worker1", make, 0, fakes)
        made = await worker0.call("worker1", make, 1, fakes)
        made = made["inside"] if nested else made
        assert str(made.device) == "cuda:0"
        assert is_all(made, 5)
    assert worker1.statistics().calls_failed == 2


# --- streams of handlers ----------------------------------------------------------------------------------------------


def stream_names(*tensors: Tensor) -> list[str]:
    """Of the devices of these tensors, after a while."""
    return [repr(fake_of(tensor).current(tensor.device.index)) for tensor in tensors]


class Meeting:
    """Handlers that are all there at once."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.arrived = 0


_meetings: dict[str, Meeting] = {}


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    _meetings["it"] = Meeting(3)
    yield _meetings["it"]
    _meetings["it"].barrier.abort()
    del _meetings["it"]


def meet(x: Tensor) -> tuple[list[str], Tensor]:
    before = stream_names(x)
    _meetings["it"].barrier.wait(LIMIT)
    assert stream_names(x) == before
    return before, x + 1


async def meet_async(x: Tensor) -> tuple[list[str], Tensor]:
    before = stream_names(x)
    _meetings["it"].arrived += 1
    while _meetings["it"].arrived < 3:
        await asyncio.sleep(0)
        assert stream_names(x) == before
    return before, x + 1


@pytest.mark.parametrize("handler", [meet, meet_async])
async def test_concurrent_handlers_have_streams_of_their_own(
    pair: tuple[FakeCuda, list[Worker]], meeting: Meeting, handler: Callable[..., Any]
) -> None:
    """None of them the default one; and what they got is ready on them, though nobody waited."""
    fake, (worker0, _) = pair
    async with asyncio.timeout(LIMIT):
        results = await asyncio.gather(
            *[worker0.call("worker1", handler, late(fake, 0, number)) for number in range(3)]
        )
    for number, (_, tensor) in enumerate(results):
        assert is_all(tensor, number + 1)
    names = [name for (name,), _ in results]
    assert len(set(names)) == 3
    assert all(name.endswith("of device 1>") and "default" not in name for name in names)


# --- streams of callers -----------------------------------------------------------------------------------------------


def use(tensor: Tensor) -> bool:
    """On the current stream, which is another one than that which it arrived on."""
    return is_all(tensor, 8)


def use_wait(futures: list[Any]) -> list[bool]:
    return [use(future.wait()) for future in futures]


def use_value(futures: list[Any]) -> list[bool]:
    for future in futures:
        wait_until(future.done)
    return [use(future.value()) for future in futures]


def use_wait_all(futures: list[Any]) -> list[bool]:
    return [use(tensor) for tensor in aiorpc.wait_all(futures)]


def use_collect_all(futures: list[Any]) -> list[bool]:
    return [use(future.value()) for future in aiorpc.collect_all(futures).wait(LIMIT)]


def use_torch_wait_all(futures: list[Any]) -> list[bool]:
    return [use(tensor) for tensor in torch.futures.wait_all(futures)]


def use_torch_collect_all(futures: list[Any]) -> list[bool]:
    return [use(future.wait()) for future in torch.futures.collect_all(futures).wait()]


def use_then(futures: list[Any]) -> list[bool]:
    """What a callback makes of the value is the value of the new Future, used by another thread on another stream."""
    children = [future.then(lambda done: plus_one(done.wait()) - 1) for future in futures]
    return [use(child.wait(LIMIT)) for child in children]


def use_then_in_callback(futures: list[Any]) -> list[bool]:
    return [future.then(lambda done: use(done.value())).wait(LIMIT) for future in futures]


def use_callback(futures: list[Any]) -> list[bool]:
    seen: list[bool] = []
    for future in futures:
        future.add_done_callback(lambda done: seen.append(use(done.wait())))
    wait_until(lambda: len(seen) == len(futures))
    return seen


def use_awaited_elsewhere(futures: list[Any]) -> list[bool]:
    """On another loop, in another thread."""

    async def use_all() -> list[bool]:
        return [use(tensor) for tensor in await asyncio.gather(*futures)]

    return asyncio.run(use_all())


WAITS = [
    use_wait,
    use_value,
    use_wait_all,
    use_collect_all,
    use_torch_wait_all,
    use_torch_collect_all,
    use_then,
    use_then_in_callback,
    use_callback,
    use_awaited_elsewhere,
]


@pytest.mark.parametrize("wait", WAITS)
async def test_result_is_right_on_whatever_stream_it_is_used(
    pair: tuple[FakeCuda, list[Worker]], wait: Callable[[list[Any]], list[bool]]
) -> None:
    """A thread that waits for a call uses the result on its own stream, which it need not synchronise with anything."""
    fake, (worker0, _) = pair

    def script(number: int) -> list[bool]:
        index = number % 2
        with fake.entered([fake.fresh(index)]):
            futures = [worker0.call("worker1", plus_one, late(fake, index, 7)) for _ in range(3)]
            with fake.entered([fake.fresh(index)]):
                return wait(futures)

    for number in range(4):
        assert await asyncio.to_thread(script, number) == [True] * 3


async def test_awaited_result_is_right_on_whatever_stream_it_is_used(pair: tuple[FakeCuda, list[Worker]]) -> None:
    """On the worker's loop: await, gather, as_completed, wait_for."""
    fake, (worker0, _) = pair

    def call() -> aiorpc.Future[Tensor]:
        return worker0.call("worker1", plus_one, late(fake, 0, 7))

    for _ in range(3):
        made = [call() for _ in range(4)]
        first = await made[0]
        second = await asyncio.wait_for(made[1], LIMIT)
        others = await asyncio.gather(*made[2:])
        with fake.entered([fake.fresh(0)]):
            assert [use(made[number].value()) for number in range(4)] == [True] * 4
        assert [use(tensor) for tensor in (first, second, *others)] == [True] * 4


async def test_futures_of_handlers_wait_on_the_handler_s_streams(pair: tuple[FakeCuda, list[Worker]]) -> None:
    """What a handler gets from a nested call is ready on the handler's streams, in threads and in coroutines."""
    fake, (worker0, _) = pair
    for handler in (nested, nested_async, nested_deferred):
        results = await asyncio.gather(
            *[worker0.call("worker1", handler, late(fake, number % 2, number)) for number in range(4)]
        )
        assert [is_all(result, number + 2) for number, result in enumerate(results)] == [True] * 4


def nested(x: Tensor) -> Tensor:
    """To the same worker, as a worker may have a map to itself, or by the host."""
    y: Tensor = aiorpc.rpc_sync("worker1", plus_one, (x.cpu(),))
    return x * 0 + fake_of(x).fake_tensor(y, x.device.index) + 1


async def nested_async(x: Tensor) -> Tensor:
    y = await aiorpc.call("worker1", plus_one, x.cpu())
    return x * 0 + fake_of(x).fake_tensor(y, x.device.index) + 1


@aiorpc.async_execution
def nested_deferred(x: Tensor) -> Any:
    index, fake = x.device.index, fake_of(x)
    future = aiorpc.rpc_async("worker1", plus_one, (x.cpu(),))
    return future.then(lambda done: fake.fake_tensor(done.wait(), index) + 1)


@aiorpc.async_execution
def completed_elsewhere(x: Tensor, wrapped: bool) -> Any:
    """By a thread on a stream of its own, some time after the handler is gone."""
    future: Any = aiorpc.Future() if wrapped else torch.futures.Future()
    fake, index = fake_of(x), x.device.index
    ready = fake.mark(fake.current(index))
    worker = aiorpc.current()

    def handler_is_gone() -> bool:
        now = worker.statistics()
        return now.threads_idle == now.threads

    def complete() -> None:
        own = fake.fresh(index)
        with fake.entered([own]):
            fake.wait(ready, own)
            fake.keep(fake.carrier(x), own)
            wait_until(handler_is_gone)
            future.set_result(plus_one(x))

    threading.Thread(target=complete).start()
    return future


@pytest.mark.parametrize("wrapped", [False, True])
async def test_future_that_another_thread_completes_is_sent_from_its_streams(
    pair: tuple[FakeCuda, list[Worker]], wrapped: bool
) -> None:
    """The result of an `async_execution` handler is sent as it is where it was made."""
    fake, (worker0, _) = pair
    if not wrapped:
        return await bare_future(fake, worker0)
    results = await asyncio.gather(
        *[worker0.call("worker1", completed_elsewhere, late(fake, number % 2, number), wrapped) for number in range(4)]
    )
    assert [is_all(result, number + 1) for number, result in enumerate(results)] == [True] * 4


async def bare_future(fake: FakeCuda, worker: Worker) -> None:
    """torch's own: it is not told when somebody waits for it, so the other thread may come first, on the default
    stream that both have."""
    result = await worker.call("worker1", complete_bare, late(fake, 0, 3))
    assert is_all(result, 4)


@aiorpc.async_execution
def complete_bare(x: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    streams = [fake_of(x).current(x.device.index)]

    def complete() -> None:
        with fake_of(x).entered(streams):
            future.set_result(plus_one(x))

    thread = threading.Thread(target=complete)
    thread.start()
    return future


# --- Futures that others complete -------------------------------------------------------------------------------------


@aiorpc.async_execution
def passed_on(x: Tensor) -> aiorpc.Future[Tensor]:
    """The Future of a nested call is the handler's own."""
    return aiorpc.rpc_async("worker0", plus_one, (x,))


@aiorpc.async_execution
def passed_on_and_more(x: Tensor) -> aiorpc.Future[Tensor]:
    return aiorpc.rpc_async("worker0", plus_one, (x,)).then(lambda done: plus_one(done.wait()))


async def nested_there_and_back(x: Tensor) -> Tensor:
    return plus_one(await aiorpc.call("worker0", plus_one_async, x))


def nested_there_and_back_blocking(x: Tensor) -> Tensor:
    return plus_one(aiorpc.rpc_sync("worker0", plus_one, (x,)))


@pytest.fixture
async def both_ways(way: str) -> AsyncIterator[tuple[FakeCuda, list[Worker]]]:
    """Each worker has a map to the other and to itself: 0 to 1 and 1 to 0."""
    maps = {"worker0": CROSSED, "worker1": CROSSED}
    async with group(maps, maps, way=way) as made:
        yield made


@pytest.mark.parametrize(
    ("handler", "more"),
    [
        (passed_on, 1),
        (passed_on_and_more, 2),
        (nested_there_and_back, 2),
        (nested_there_and_back_blocking, 2),
    ],
)
async def test_nested_calls_with_maps_both_ways(
    both_ways: tuple[FakeCuda, list[Worker]], handler: Callable[..., Any], more: int
) -> None:
    """A handler's own calls go by its own worker's map; what they bring is right where it is used or passed on."""
    fake, (worker0, _) = both_ways
    results = await asyncio.gather(
        *[worker0.call("worker1", handler, late(fake, number % 2, number)) for number in range(6)]
    )
    assert [result.device.index for result in results] == [number % 2 for number in range(6)]
    assert [is_all(result, number + more) for number, result in enumerate(results)] == [True] * 6


# --- batches ----------------------------------------------------------------------------------------------------------


@aiorpc.batched(max_size=3)
def summed(xs: list[Tensor]) -> list[Tensor]:
    """All of them get the sum of all, and their own device is the same."""
    total = xs[0] + 0
    for x in xs[1:]:
        total += x
    return [total + number for number in range(len(xs))]


@aiorpc.batched(max_size=3)
async def summed_async(xs: list[Tensor]) -> list[Tensor]:
    total = xs[0] + 0
    for x in xs[1:]:
        await asyncio.sleep(0)
        total += x
    return [total + number for number in range(len(xs))]


def call_apart(fake: FakeCuda, worker: Worker, handler: Callable[..., Any], value: float) -> aiorpc.Future[Tensor]:
    """A call from a stream that has nothing to do with those of the other calls."""
    with fake.entered([fake.fresh(0)]):
        return worker.call("worker1", handler, late(fake, 0, value))


@pytest.mark.parametrize("handler", [summed, summed_async])
async def test_batch_joins_the_streams_of_all_its_callers(
    pair: tuple[FakeCuda, list[Worker]], handler: Callable[..., Any]
) -> None:
    """Arguments that came on several streams are ready where they are used together, and each gets its own result."""
    fake, (worker0, _) = pair
    for round_ in range(4):
        results = await asyncio.gather(
            *[call_apart(fake, worker0, handler, 10**number + round_) for number in range(3)]
        )
        # Which of them is first in the batch is not said.
        found = sorted(int(result.cpu()[0].item()) for result in results)
        assert found == [111 + 3 * round_ + number for number in range(3)]
        assert all(bool(result.cpu().eq(result.cpu()[0]).all()) for result in results)


# --- references -------------------------------------------------------------------------------------------------------


class Counter:
    """An object on its owner, with a tensor on a device."""

    def __init__(self, x: Tensor) -> None:
        self.total = plus_one(x)

    def read(self) -> Tensor:
        return self.total + 0


def local_total(rref: aiorpc.RRef[Tensor]) -> Tensor:
    return rref.local_value() + 1


async def local_total_async(rref: aiorpc.RRef[Tensor]) -> Tensor:
    await rref
    return rref.local_value() + 1


def with_argument(rref: aiorpc.RRef[Tensor], x: Tensor) -> Tensor:
    return rref.local_value() + x


async def awaited_with_argument(rref: aiorpc.RRef[Tensor], x: Tensor) -> Tensor:
    return await rref + x


@pytest.mark.parametrize("maker", [plus_one, plus_one_async, plus_one_deferred, plus_one_batched])
async def test_value_of_a_reference_is_right_on_other_streams(
    pair: tuple[FakeCuda, list[Worker]], maker: Callable[..., Any]
) -> None:
    """Made by one handler, read by others, fetched by the caller: nobody reads it before it is there."""
    fake, (worker0, worker1) = pair
    for value in range(3):
        rref = worker0.remote("worker1", maker, late(fake, 0, value))
        x = late(fake, 0, 10)
        futures = [worker0.call("worker1", handler, rref) for handler in (local_total, local_total_async)]
        more = [worker0.call("worker1", handler, rref, x) for handler in (with_argument, awaited_with_argument)]
        assert [is_all(each, value + 2) for each in await asyncio.gather(*futures)] == [True] * 2  # type: ignore[arg-type]
        assert [is_all(each, value + 11) for each in await asyncio.gather(*more)] == [True] * 2  # type: ignore[arg-type]
        fetched = await rref
        assert fetched.device.index == 0
        assert is_all(fetched, value + 1)
        assert is_all(await asyncio.to_thread(rref.to_here), value + 1)
        del rref, futures, more, fetched, x
    await until_no_references([worker0, worker1])


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("size", [100, 5000, 3_000_000])
@pytest.mark.parametrize("on_device", [False, True])
async def test_method_that_is_called_at_once_finds_its_object(
    pair: tuple[FakeCuda, list[Worker]], on_device: bool, size: int, connected: bool
) -> None:
    """The call of a method does not overtake the creation of its object, however long the latter's tensors take."""
    fake, (worker0, worker1) = pair
    if connected:
        await worker0.call("worker1", echo)
    rref: Any = worker0.remote("worker1", Counter, late(fake, 0, 4, size) if on_device else values(4, size))
    result = await rref.rpc_async().read()
    assert is_all(result, 5)
    del rref
    await until_no_references([worker0, worker1])


async def test_own_value_is_right_on_other_streams(pair: tuple[FakeCuda, list[Worker]]) -> None:
    """An RRef of what this worker has made on a stream of its own: who takes it here waits for that, on the device."""
    fake, (worker0, worker1) = pair
    with acting_as(worker0):
        for value in range(3):
            with fake.entered([fake.fresh(0)]):
                rref: aiorpc.RRef[Tensor] = aiorpc.RRef(late(fake, 0, value))
            with fake.entered([fake.fresh(0)]):
                assert is_all(rref.local_value(), value)
            del rref
    await until_no_references([worker0, worker1])


def read_and_forget(rref: aiorpc.RRef[Tensor]) -> Tensor:
    """Reads late, when the reference may be gone."""
    value = rref.local_value()
    busy: Tensor = fake_of(value).fake_tensor(torch.zeros(1000), value.device.index)
    for _ in range(LATE):
        busy.add_(1)
    return value + busy - LATE


async def test_value_that_is_dropped_while_it_is_read(pair: tuple[FakeCuda, list[Worker]]) -> None:
    """Its memory is not used again before the streams that took the value are done with it."""
    fake, (worker0, worker1) = pair
    for value in range(8):
        rref = worker0.remote("worker1", plus_one, late(fake, 0, value), 0)
        future = worker0.call("worker1", read_and_forget, rref)
        del rref
        result = await future
        await until_no_references([worker0, worker1])
        again = [worker0.call("worker1", plus_one, late(fake, 0, 99), 0) for _ in range(4)]  # on all streams
        await asyncio.gather(*again)
        assert is_all(result, value + 1)


# --- streams of items -------------------------------------------------------------------------------------------------


def items(x: Tensor) -> Iterator[Tensor]:
    for number in range(5):
        yield x
        for _ in range(LATE):
            x.add_(0)
        x.fill_(number + 1)


async def items_async(x: Tensor) -> AsyncIterator[Tensor]:
    for number in range(5):
        yield x
        await asyncio.sleep(0)
        for _ in range(LATE):
            x.add_(0)
        x.fill_(number + 1)


@pytest.mark.parametrize("producer", [items, items_async])
async def test_items_are_those_at_the_time_they_were_yielded(
    pair: tuple[FakeCuda, list[Worker]], producer: Callable[..., Any]
) -> None:
    """The producer writes to its tensor right after; the consumer reads each item on whatever stream."""
    fake, (worker0, _) = pair
    got = []
    async for item in worker0.stream("worker1", producer, late(fake, 0, 0)):
        with fake.entered([fake.current(0)]):
            got.append(float((item + 0).cpu().unique().item()))
            assert item.device.index == 0
    assert got == [0, 1, 2, 3, 4]


# --- the host on either side ------------------------------------------------------------------------------------------


async def test_device_to_host_and_back(way: str) -> None:
    """A map to the cpu: the callee, which has no devices, gets ordinary tensors, and what it returns goes back up."""
    async with group({"worker1": {0: "cpu"}}, {}, way=way, accelerators=None) as (fake, (worker0, _)):
        assert await worker0.call("worker1", places, late(fake, 0, 1), values(1)) == ["cpu", "cpu"]
        for handler in HANDLERS.values():
            x = late(fake, 0, 7)
            future = worker0.call("worker1", handler, x)
            x.fill_(0)
            result = await future
            assert str(result.device) == "cuda:0"
            assert is_all(result, 8)
        del x, future, result


async def test_device_to_a_worker_without_devices() -> None:
    """It needs none to get what lay on one, nor to answer."""
    with FakeCuda(2, lag=LAG) as fake:
        async with group({"worker1": {1: "cpu"}}, {}, fake=fake, accelerators=[fake, None]) as (_, (worker0, _)):
            for size in (1, 1000, 3_000_000):
                x = late(fake, 1, 7, size)
                assert await worker0.call("worker1", places, x) == ["cpu"]
                result = await worker0.call("worker1", plus_one, x)
                assert str(result.device) == "cuda:1"
                assert is_all(result, 8)
            del x, result


async def test_host_to_device_and_back(way: str) -> None:
    """A map from the cpu: handlers of all kinds work on the device, and the caller gets ordinary tensors."""
    async with group({"worker1": {"cpu": 1}}, {}, way=way) as (_, (worker0, _)):
        assert await worker0.call("worker1", places, values(1), values(2)) == ["cuda:1", "cuda:1"]
        for handler in HANDLERS.values():
            for size in (1, 1000, 300_000):
                result = await worker0.call("worker1", handler, values(7, size))
                assert result.is_cpu
                assert torch.equal(result, values(8, size))


# --- joining and leaving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("maps", "text"),
    [
        ({"worker1": {0: 2}}, "Node worker1? has target devices with invalid indices"),
        ({"worker1": {5: 0}}, "Node worker0 has source devices with invalid indices"),
        ({"nobody": {0: 0}}, "Node worker0 has invalid target node names in its device maps"),
    ],
)
async def test_wrong_device_map_fails_all_members(maps: dict[str, dict[Any, Any]], text: str) -> None:
    """The same error for each of them, a ValueError; and the group can be formed by others then."""
    with FakeCuda(lag=(0, 0)) as fake:
        store = HashStore()
        options = RpcBackendOptions(rpc_timeout=LIMIT)
        for name, device_map in maps.items():
            options.set_device_map(name, device_map)
        workers = [
            Worker(
                f"worker{rank}",
                rank=rank,
                world_size=3,
                store=store,
                options=options if rank == 0 else None,
                accelerator=fake,
            )
            for rank in range(3)
        ]
        errors = await asyncio.gather(*[worker.start() for worker in workers], return_exceptions=True)
        assert {type(error) for error in errors} == {DeviceMapError}
        assert all(isinstance(error, ValueError) for error in errors)
        assert len({str(error) for error in errors}) == 1
        assert text.replace("worker1?", "worker0") in str(errors[0])
    async with group({"worker1": CROSSED}, {}, {}) as (fake, (worker0, *_)):
        assert is_all(await worker0.call("worker1", plus_one, fake.fake_tensor(values(1), 0)), 2)


async def test_shutdown_waits_for_what_is_under_way(way: str) -> None:
    """Workers that leave in good order bring large tensors to their end first, there and back."""
    async with group({"worker1": CROSSED}, {}, way=way) as (fake, (worker0, worker1)):
        futures = [worker0.call("worker1", plus_one, late(fake, n % 2, n, 3_000_000), 2) for n in range(6)]
        await asyncio.gather(worker0.shutdown(), worker1.shutdown())
        assert all(future.done() for future in futures)
        assert [is_all(future.value(), number + 1) for number, future in enumerate(futures)] == [True] * 6
        del futures


async def test_hard_shutdown_ends_what_is_under_way(way: str) -> None:
    """Calls fail, and nothing stays on the devices."""
    async with group({"worker1": CROSSED}, {}, way=way) as (fake, (worker0, worker1)):
        futures = [worker0.call("worker1", plus_one, late(fake, n % 2, n, 3_000_000), 2) for n in range(6)]
        await until(lambda: worker1.statistics().bytes_received)
        await asyncio.gather(worker0.shutdown(graceful=False), worker1.shutdown(graceful=False))
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(each, (RpcError, FakeTensor)) for each in outcomes)
        del futures, outcomes


# --- many, and failures -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
async def test_many_calls_from_threads_and_the_loop(both_ways: tuple[FakeCuda, list[Worker]]) -> None:
    """Two hundred at once, of all kinds and sizes, in both directions: all right, and nothing is left behind."""
    fake, workers = both_ways
    handlers = [*HANDLERS.values(), nested_there_and_back]

    def make_call(number: int) -> tuple[aiorpc.Future[Tensor], int]:
        handler = handlers[number % len(handlers)]
        more = 2 if handler is nested_there_and_back else 1
        source = 0 if more == 2 else number % 2
        x = late(fake, number // 2 % 2, number, (1, 100, 20_000, 200_000)[number % 4])
        future = workers[source].call(f"worker{1 - source}", handler, x)
        x.fill_(-1)
        return future, number + more

    def script(first: int) -> list[bool]:
        with fake.entered([fake.fresh(0), fake.fresh(1)]):
            made = [make_call(first + number) for number in range(25)]
            return [is_all(future.wait(), value) for future, value in made]

    threads = asyncio.gather(*[asyncio.to_thread(script, first) for first in (0, 25, 50, 75)])

    async def here(number: int) -> bool:
        future, value = make_call(number)
        return is_all(await future, value)

    assert all(await asyncio.gather(*[here(number) for number in range(100, 200)]))
    assert [each for result in await threads for each in result] == [True] * 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["empty", "fresh", "mark", "wait", "keep", "move", "pinned"])
@pytest.mark.parametrize("handler", [plus_one, plus_one_async])
async def test_device_that_fails_once_fails_one_call_at_most(
    pair: tuple[FakeCuda, list[Worker]], name: str, handler: Callable[..., Any]
) -> None:
    """Wherever the driver refuses: the call has an error or its result, the next one works; nothing waits for ever."""
    fake, workers = pair
    worker0 = workers[0]
    assert is_all(await worker0.call("worker1", handler, late(fake, 0, 1)), 2)
    for after in range(4):
        x = late(fake, 0, 3)
        try:
            async with asyncio.timeout(LIMIT):
                with failing(fake, name, after):
                    result = await worker0.call("worker1", handler, x)
                assert is_all(result, 4)
        except RuntimeError as error:  # an RpcError, or what the device said
            assert "the fake device was told to fail" in str(error) or "was told to have no memory" in str(error)
        assert is_all(await worker0.call("worker1", handler, late(fake, 0, 5)), 6)
    await until(lambda: all(worker.is_idle() for worker in workers))


@contextmanager
def failing(fake: FakeCuda, name: str, after: int) -> Iterator[None]:
    """A method fails once meanwhile, after so many calls that succeed."""
    count, left = fake.count_call, [after]

    def count_call(called: str) -> None:
        if called == name:
            left[0] -= 1
            if left[0] == -1:
                fake.fail(name)
        count(called)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "count_call", count_call)
        yield


class Adding:
    """A value that keeps what it was made of."""

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def sum_with(self, x: Tensor) -> float:
        return float(x.sum())


async def test_a_reference_whose_arguments_cannot_be_sent(way: str) -> None:
    """Who has called a method of it by then hears that it will never be, however late the call arrives; its owner keeps
    nothing of it."""
    async with group({"worker1": CROSSED}, {}, way=way) as (fake, workers):
        worker0 = workers[0]
        assert is_all(await worker0.call("worker1", plus_one, fake.fake_tensor(values(1))), 2)
        with failing(fake, "empty", 0):
            ref = worker0.remote("worker1", Adding, fake.fake_tensor(values(1)))
            call = ref.rpc_async().sum_with(torch.ones(4_000_000))
        with pytest.raises(RpcError, match="the value was never created"):
            await asyncio.wait_for(call, LIMIT / 2)
        with pytest.raises(RpcError, match=r"could not be sent: .* was told to have no memory"):
            await ref
        del ref, call
        gc.collect()
        await until_no_references(workers)


# --- groups of workers ------------------------------------------------------------------------------------------------


async def test_a_call_to_several_workers_sends_tensors_on_devices_to_each(way: str) -> None:
    """By the map to each of them; whoever takes the outcomes, all or one by one, finds the values there."""
    async with group({"worker1": CROSSED, "worker2": {0: 0}}, {}, {}, way=way) as (fake, workers):
        others = workers[0].group(["worker1", "worker2"])
        sent = late(fake, 0, 4)
        outcomes = await others.call(plus_one, sent)
        assert all(is_all(value, 5) for value in outcomes.values())
        async for _, outcome in others.call(plus_one, sent):
            assert is_all(outcome.result(), 5)
        other = late(fake, 1, 4)
        outcomes = await others.call(plus_one, other)  # no map leads from there to worker2
        assert is_all(outcomes["worker1"].result(), 5)
        assert type(outcomes["worker2"].error) is SerializationError
        del outcomes, outcome, sent, other
