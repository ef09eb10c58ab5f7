"""What the processes do on their devices. Those that are awaited run in w0, the others on either side."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import queue
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import aiorpc as rpc
from aiorpc.channels.cuda_runtime import CudaRuntime, find_runtime

from ..processes.workers import Link, Place

Tensor = torch.Tensor
MIB = 1 << 20
HERE = "cuda:0"
START = 100.0  # seconds: the other process starts its device
# Cycles of the device: about a fifth of a second at 2 GHz. Long against what a message takes.
LONG = 400_000_000
# Each body runs first with short kernels: the first launch of any kernel loads it, which may wait for those that run.
ROUNDS = (1, LONG)

# --- calls of the driver ----------------------------------------------------------------------------------------------

CALLS: Counter[str] = Counter()  # of this process, by the name of the method
SET_UP = ("allocate", "free", "export", "open", "close", "events", "open_events")


def count_calls() -> None:
    """From here on count what is asked of the driver besides copies, waits and records."""
    for name in SET_UP:
        setattr(CudaRuntime, name, _counted(name, getattr(CudaRuntime, name)))


def _counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*args: Any) -> Any:
        CALLS[name] += 1
        return method(*args)

    return counted


def calls() -> dict[str, int]:
    """What `count_calls` has counted."""
    return dict(CALLS)


# --- the driver alone, without the channel ----------------------------------------------------------------------------

SHARED = 3 * MIB
VALUES = (7, 9)


def lend(place: Place, link: Link) -> None:
    """Export memory and an event, then write each value when the test says so; tells the refusal if it cannot."""
    try:
        runtime = find_runtime()
        if runtime is None:
            raise RuntimeError("the runtime library was not found")
        if obstacle := runtime.obstacle(0):
            raise RuntimeError(obstacle)
        address = runtime.allocate(0, SHARED)
        (event,) = runtime.events(0, 1)
        offer = runtime.uuid(0), runtime.export(0, address), runtime.export_event(event)
    except RuntimeError as error:
        link.tell(str(error))
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sources = [torch.full((SHARED,), value, dtype=torch.uint8, device=HERE) for value in VALUES]
        torch.cuda._sleep(1)
    torch.cuda.synchronize()
    link.tell(offer)
    for source in sources:
        link.hear(START)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            runtime.wait(event, stream)
            runtime.copy(address, source.data_ptr(), SHARED, stream)
            runtime.record(event, stream)
        link.tell(runtime.query(event))
    link.hear(START)
    torch.cuda.synchronize()
    runtime.free(0, address)


def borrow(place: Place, link: Link) -> list[int]:
    """Open what `lend` exported, and read it as often as it is written; only the event orders the copies."""
    uuid, handle, event_handle = link.hear(START)
    runtime = find_runtime()
    try:
        if runtime is None or not runtime.reaches(0, uuid):
            raise RuntimeError(f"no way from here to device {uuid}")
        address = runtime.open(0, handle)
        (event,) = runtime.open_events(0, [event_handle])
    except RuntimeError as error:
        link.tell(str(error))
        return []
    targets = [torch.zeros(SHARED, dtype=torch.uint8, device=HERE) for _ in VALUES]
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    link.tell("")
    stream = torch.cuda.Stream()
    for target in targets:
        link.hear(START)
        with torch.cuda.stream(stream):
            runtime.wait(event, stream)
            torch.cuda._sleep(LONG)
            runtime.copy(target.data_ptr(), address, SHARED, stream)
            runtime.record(event, stream)
        link.tell(runtime.query(event))
    torch.cuda.synchronize()
    runtime.close(0, address)
    return [int(target.sum()) for target in targets]


# --- handlers ---------------------------------------------------------------------------------------------------------


def echo(value: Any) -> Any:
    """Give it back."""
    return value


def start_device() -> int:
    """Make a context, which takes seconds, and load the first kernels."""
    return total(torch.ones(1, device=HERE))


def pid() -> int:
    """Of this process."""
    return os.getpid()


def total(tensor: Tensor) -> int:
    """The sum, with no synchronisation but its own."""
    return int(tensor.sum())


def filled_late(size: int, value: int, cycles: int) -> Tensor:
    """A tensor that has its value only when a kernel of so many cycles is through."""
    tensor = torch.zeros(size, dtype=torch.uint8, device=HERE)
    torch.cuda._sleep(cycles)
    return tensor.fill_(value)


def stream_of_handler(tensor: Tensor | None = None) -> tuple[int, int]:
    """The handler's current stream, and the default one."""
    return torch.cuda.current_stream(0).cuda_stream, torch.cuda.default_stream(0).cuda_stream


async def hop(tensor: Tensor, times: int) -> tuple[Tensor, list[int]]:
    """Kernels with awaits between them, and the streams that were current at each."""
    streams = []
    for _ in range(times):
        streams.append(torch.cuda.current_stream(0).cuda_stream)
        torch.cuda._sleep(LONG // 100)
        tensor.add_(1)
        await asyncio.sleep(0.001)
    return tensor, streams


async def stream_of_loop() -> int:
    """What is current on the loop's thread between the steps of handlers."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[int] = loop.create_future()
    loop.call_soon(lambda: found.set_result(torch.cuda.current_stream(0).cuda_stream))
    return await found


def produce(count: int, size: int) -> Iterator[Tensor]:
    """Tensors one after the other."""
    for number in range(count):
        yield filled_late(size, number, LONG // 100)


async def aproduce(count: int, size: int) -> AsyncIterator[Tensor]:
    """The same on the loop."""
    for number in range(count):
        await asyncio.sleep(0)
        yield filled_late(size, number, LONG // 100)


def device_of(tensor: Tensor) -> tuple[str, str]:
    """Where it lies: the number, and the device's own name."""
    assert tensor.device.index is not None
    return str(tensor.device), str(torch.cuda.get_device_properties(tensor.device.index).uuid)


def allocator() -> tuple[str, bool]:
    """Which of torch's this process uses, and whether its segments are expandable."""
    kept = torch.ones(1000, device=HERE)
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return backend, False
    expandable = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    del kept
    return backend, expandable


def send_unmapped() -> str:
    """w1 has no device map for w0."""
    try:
        rpc.rpc_sync("w0", total, args=(torch.ones(10, device=HERE),), timeout=20)
    except Exception as error:
        return str(error)
    return ""


# --- what w0 does -----------------------------------------------------------------------------------------------------


async def warm_up() -> None:
    """Wait until both can compute, and the channel is there: what follows is measured in kernels."""
    assert await rpc.peer("w1", timeout=START).call(start_device) == 1
    for size in (1000, 100_000, 4 * MIB):
        back = await rpc.peer("w1", timeout=START).call(echo, torch.ones(size, device=HERE))
        assert float(back.sum()) == size


async def sent_behind_a_busy_stream(size: int) -> None:
    """The callee sees what the stream writes before the call, though the call does not wait for it."""
    for cycles in ROUNDS:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensor = torch.zeros(size, dtype=torch.uint8, device=HERE)
            torch.cuda._sleep(cycles)
            tensor.fill_(7)
            future = rpc.call("w1", total, tensor)
            busy = not stream.query()
        assert await future == 7 * size, "the handler has read it before it was written"
    assert busy, "the call has waited for the stream"


async def changed_right_after(size: int) -> None:
    """What the caller does to a tensor after the call is not seen by the callee."""
    for cycles in ROUNDS:
        tensor = torch.full((size,), 7, dtype=torch.uint8, device=HERE)
        torch.cuda._sleep(cycles)
        future = rpc.call("w1", total, tensor)
        tensor.fill_(9)
        del tensor
        again = torch.full((size,), 5, dtype=torch.uint8, device=HERE)  # likely the same memory
        assert await future == 7 * size, "the handler has seen a later value"
        assert int(again.sum()) == 5 * size


async def awaited_on_the_loop(size: int) -> bool:
    """What is awaited can be computed with at once; whether it was there before it was computed."""
    for cycles in ROUNDS:
        tensor = await rpc.call("w1", filled_late, size, 5, cycles)
        waiting = not torch.cuda.current_stream().query()
        doubled = tensor * 2
        assert int(doubled.sum()) == 10 * size, "the value was used before it was there"
    return waiting


async def waited_for_on_a_side_stream(size: int) -> None:
    """A thread waits under a stream of its own, and computes there."""
    for cycles in ROUNDS:
        assert await asyncio.to_thread(_wait_on_side_stream, size, cycles) == 10 * size


def _wait_on_side_stream(size: int, cycles: int) -> int:
    future = rpc.rpc_async("w1", filled_late, args=(size, 5, cycles))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        doubled = future.wait() * 2
        return int(doubled.sum())


async def continued_with_then(size: int) -> None:
    """A callback computes with the value."""
    for cycles in ROUNDS:
        future = rpc.call("w1", filled_late, size, 5, cycles).then(lambda done: int(done.value().sum()))
        assert await future == 5 * size


async def held_by_reference(size: int) -> None:
    """A value made on w1 stays there, and comes by await and by `to_here`."""
    for cycles in ROUNDS:
        reference = rpc.remote("w1", filled_late, size, 5, cycles)
        assert int((await reference).sum()) == 5 * size
        here = await asyncio.to_thread(reference.to_here)
        assert int(here.sum()) == 5 * size
        assert await rpc.call("w1", _total_of, reference) == 5 * size


def _total_of(reference: rpc.RRef[Tensor]) -> int:
    return int(reference.local_value().sum())


async def streamed(size: int) -> None:
    """Items of a generator are tensors of their own, each complete."""
    for generator in (produce, aproduce):
        numbers = [int(item.sum()) async for item in rpc.stream("w1", generator, 20, size)]
        assert numbers == [number * size for number in range(20)]


async def handled_on_streams_of_their_own(count: int) -> None:
    """Handlers run on streams other than the default one; those that await come back to theirs."""
    current, default = await rpc.call("w1", stream_of_handler, torch.zeros(1, device=HERE))
    assert current != default
    current, default = await rpc.call("w1", stream_of_handler)  # nothing arrives for it on a device
    assert current == default
    results = await asyncio.gather(*(rpc.call("w1", hop, torch.zeros(1000, device=HERE), 5) for _ in range(count)))
    for tensor, streams in results:
        assert tensor.tolist() == [5.0] * 1000
        assert len(set(streams)) == 1, f"a handler changed streams: {streams}"
        assert streams[0] != default
    assert await rpc.call("w1", stream_of_loop) == default


async def refused_without_a_map() -> str:
    """What w1, which has no map, says when it sends a tensor."""
    message: str = await rpc.call("w1", send_unmapped)
    return message


async def allocators() -> list[tuple[str, bool]]:
    """Of w0 and w1."""
    return [allocator(), await rpc.call("w1", allocator)]


async def driver_calls() -> list[dict[str, int]]:
    """Of w0 and w1."""
    return [calls(), await rpc.call("w1", calls)]


async def arrives_on(device: str, uuid: str) -> None:
    """A tensor of cuda:0 comes to lie on that device of w1, is right there, and comes back to cuda:0."""
    for size in (1000, MIB, 20 * MIB + 3):
        tensor = torch.full((size,), 3, dtype=torch.uint8, device=HERE)
        assert await rpc.call("w1", device_of, tensor) == (device, uuid)
        assert await rpc.call("w1", total, tensor) == 3 * size
        back = await rpc.call("w1", echo, tensor)
        assert str(back.device) == HERE
        assert int(back.sum()) == 3 * size


# --- kinds of tensors -------------------------------------------------------------------------------------------------


def numbers(*shape: int) -> Tensor:
    """Different ones, exact in all types."""
    return (torch.arange(torch.Size(shape).numel(), device=HERE) % 100 + 1).reshape(shape).float()


def gaps() -> Tensor:
    """A matrix of which half is zero."""
    return numbers(64, 512) * (torch.arange(512, device=HERE) % 2)


KINDS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: numbers(64, 512),
    "zero-dim": lambda: torch.tensor(3.5, device=HERE),
    "empty": lambda: torch.empty(0, 3, device=HERE),
    "transposed": lambda: numbers(64, 512).t(),
    "channels last": lambda: numbers(2, 3, 40, 50).contiguous(memory_format=torch.channels_last),
    "every second": lambda: numbers(64, 512)[:, ::2],
    "expanded": lambda: numbers(1, 512).expand(64, 512),
    "part of another": lambda: numbers(64, 512)[5:9, 7:11],
    "bool": lambda: numbers(64, 512) > 50,
    "bfloat16": lambda: numbers(64, 512).bfloat16(),
    "float8": lambda: numbers(64, 512).to(torch.float8_e4m3fn),
    "conjugate": lambda: (numbers(64, 512) * (1 + 2j)).conj(),
    "negative": lambda: (numbers(64, 512) * (1 + 2j)).conj().imag,
    "requires grad": lambda: numbers(64, 512).requires_grad_(),
    "parameter": lambda: nn.Parameter(numbers(64, 512)),
    "made in inference mode": lambda: torch.inference_mode()(numbers)(64, 512),
    "sparse": lambda: gaps().to_sparse(),
    "sparse rows": lambda: gaps().to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(numbers(64, 512), 0.5, 3, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([numbers(3, 400), numbers(5, 400)], layout=torch.jagged),
}


def facts(value: Tensor) -> list[Any]:
    """What a tensor is, without its numbers."""
    found: list[Any] = [type(value).__name__, str(value.device), str(value.dtype), str(value.layout)]
    found += [value.requires_grad, value.is_quantized, value.is_nested]
    if value.layout is torch.strided:
        found += [tuple(value.shape), value.is_conj(), value.is_neg()]
    return found


def plain(value: Tensor) -> list[Tensor]:
    """Its numbers, on the host."""
    value = value.detach()
    if value.is_nested:
        return [part for item in value.unbind() for part in plain(item)]
    if value.is_quantized:
        value = value.dequantize()
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.dtype is torch.float8_e4m3fn:
        value = value.float()
    return [value.resolve_conj().resolve_neg().cpu()]


def inspect(value: Tensor) -> tuple[list[Any], list[Tensor], Tensor]:
    """What has arrived, and itself again."""
    return facts(value), plain(value), value


async def there_and_back(name: str) -> None:
    """A tensor of that kind is the same at the callee, and when it comes back."""
    sent = KINDS[name]()
    facts_there, numbers_there, back = await rpc.call("w1", inspect, sent)
    assert facts_there == facts(sent), "at the callee"
    assert facts(back) == facts(sent), "back"
    if name in ("plain", "transposed", "channels last"):  # without gaps: these keep their order in memory
        assert back.stride() == sent.stride()
    for other in (numbers_there, plain(back)):
        assert all(torch.equal(one, two) for one, two in zip(other, plain(sent), strict=True))


async def views_of_one_storage() -> None:
    """Tensors that share memory share it at the callee, too."""
    base = numbers(1000)
    assert await rpc.call("w1", _add_to_first, base, base[:10]) == 10.0 * 1000 + float(base.sum())


def _add_to_first(base: Tensor, view: Tensor) -> float:
    view.add_(1000)
    return float(base.sum())


# --- many messages ----------------------------------------------------------------------------------------------------


def state() -> dict[str, float]:
    """What this process holds, in bytes and numbers, once its devices are idle."""
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, device=HERE)  # looks after what was freed while another stream used it
    torch.cuda.synchronize()
    free, all_of_it = torch.cuda.mem_get_info(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    opened = Counter(files())
    # Each thread that looks for calls without sleeping has these two, and another one may look for the first time.
    looking = opened.pop("anon_inode:[eventpoll]", 0), opened.pop("anon_inode:[eventfd]", 0)
    return {
        "allocated": float(torch.cuda.memory_allocated(0)),
        "device": float(all_of_it - free),
        "resident": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "descriptors": float(opened.total()),
        "looking": float(max(0, max(looking) - threading.active_count())),
        **{f"calls of {name}": float(CALLS[name]) for name in SET_UP},
    }


def files() -> list[str]:
    """What this process has open, without numbers."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is gone
            found.append(re.sub(r"\d+", "#", os.readlink(f"/proc/self/fd/{name}")))
    return found


def bump(tensor: Tensor) -> Tensor:
    """One more."""
    return tensor + 1


async def churn(messages: int, at_once: int) -> list[tuple[dict[str, float], dict[str, float], list[str]]]:
    """Echo so many tensors of all sizes.

    Returns what w0 and w1 held after a tenth of them, what at the end, and what each has open that it had not before.
    """
    before = await _exchange(messages // 10, at_once)
    open_before = [files(), await rpc.call("w1", files)]
    after = await _exchange(messages - messages // 10, at_once)
    open_after = [files(), await rpc.call("w1", files)]
    new = [
        sorted((Counter(late) - Counter(early)).elements()) for early, late in zip(open_before, open_after, strict=True)
    ]
    return list(zip(before, after, new, strict=True))


async def _exchange(messages: int, at_once: int) -> list[dict[str, float]]:
    choice = random.Random(0)
    left = iter(range(messages))

    async def one_after_another() -> None:
        for number in left:
            size = int(2 ** choice.uniform(0, 20))
            tensor = torch.full((size,), number % 1000, dtype=torch.float32, device=HERE)
            back = await rpc.call("w1", bump, tensor)
            if number % 50 == 0:
                assert int(back.min()) == int(back.max()) == number % 1000 + 1, f"message {number} of {size} numbers"

    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    # What torch keeps of what was freed is by stream, and how many of those were needed at once is chance.
    torch.cuda.empty_cache()
    await rpc.call("w1", torch.cuda.empty_cache)
    return [await asyncio.to_thread(state), await rpc.call("w1", state)]


# --- death ------------------------------------------------------------------------------------------------------------

ARRIVED: queue.Queue[tuple[Tensor, torch.cuda.Event]] = queue.Queue()


def keep(tensor: Tensor) -> None:
    """Take note of a tensor, and mark where the handler's stream was."""
    event = torch.cuda.Event()
    event.record()
    ARRIVED.put((tensor, event))


def sleep_long(times: int) -> None:
    """Keep the current stream busy for so many times `LONG`."""
    for _ in range(times):
        torch.cuda._sleep(LONG)


def send_behind_kernels(to: str, size: int, times: int) -> None:
    """Send a tensor that so many kernels of `LONG` cycles have to be done for."""
    tensor = torch.zeros(size, dtype=torch.uint8, device=HERE)
    sleep_long(times)
    tensor.fill_(7)
    rpc.rpc_sync(to, keep, args=(tensor,))


def slow_total(tensor: Tensor, cycles: int) -> int:
    """A sum behind a kernel."""
    torch.cuda._sleep(cycles)
    return int(tensor.sum())


async def in_thread(function: Callable[[], Any], seconds: float, what: str) -> Any:
    """Run what may hang, and say so in time. The thread that hangs is left behind."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(value)

    def run() -> None:
        try:
            value = function()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, value, None)

    threading.Thread(target=run, daemon=True, name=what).start()
    try:
        return await asyncio.wait_for(done, seconds)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {seconds:g} s") from None


def all_streams_work() -> None:
    """Compute on more streams than torch's pool has."""
    for _ in range(40):
        with torch.cuda.stream(torch.cuda.Stream()):
            assert int(torch.ones(1000, device=HERE).sum()) == 1000
    torch.cuda.synchronize()


async def lose_the_sender(size: int) -> None:
    """w1 is killed while what it has sent waits for a kernel of its own; w0 hears of it and goes on computing."""
    victim: int = await rpc.call("w1", pid)
    await rpc.call("w1", send_behind_kernels, "w0", size, 0)
    tensor, event = ARRIVED.get_nowait()
    torch.cuda.current_stream().wait_event(event)
    assert int(tensor.sum()) == 7 * size
    pending = rpc.call("w1", send_behind_kernels, "w0", size, 100)
    tensor, event = await in_thread(lambda: ARRIVED.get(timeout=30), 40, "the tensor's arrival")
    assert not event.query(), "the kernel was over before the sender could be killed"
    await _kill(victim, [pending, rpc.call("w1", echo, 1)])
    await in_thread(event.synchronize, 60, "the handler's stream, which waits for the dead process")
    await in_thread(all_streams_work, 60, "the other streams")
    assert tensor.shape == (size,)  # what it holds nobody can say


async def lose_the_receiver(size: int, count: int) -> None:
    """w1 is killed amid tensors that are not all sent; w0 hears of it, lets go of them, and goes on computing."""
    victim: int = await rpc.call("w1", pid)
    assert await rpc.call("w1", slow_total, torch.ones(size, dtype=torch.uint8, device=HERE), 1) == size
    before = (await in_thread(state, 60, "the device, idle"))["allocated"]
    futures = [rpc.call("w1", slow_total, torch.ones(size, dtype=torch.uint8, device=HERE), LONG) for _ in range(count)]
    assert await futures[0] == size
    await _kill(victim, futures[1:])
    del futures
    await in_thread(all_streams_work, 60, "the streams after the loss")
    for _ in range(100):
        held = (await in_thread(state, 60, "the device, idle again"))["allocated"] - before
        if held <= MIB:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{held:g} bytes for a dead process are still held")


async def _kill(victim: int, futures: list[rpc.Future[Any]]) -> None:
    os.kill(victim, signal.SIGKILL)
    lost = 0
    for future in futures:
        try:
            await asyncio.wait_for(future, 20)
        except rpc.PeerLost:
            lost += 1
    assert lost, "no call has ended with PeerLost"


# --- process groups ---------------------------------------------------------------------------------------------------


def join_group(backend: str, meeting: str, rank: int) -> None:
    """Of torch.distributed, beside the worker's own."""
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=60))


def leave_group() -> None:
    """The same."""
    dist.destroy_process_group()


def reduce(tensor: Tensor) -> Tensor:
    """Add that of the other."""
    dist.all_reduce(tensor)
    return tensor


async def beside_a_group(backend: str, meeting: str, size: int) -> None:
    """Calls and collectives in turn, on the same device or on one each."""
    joined = rpc.call("w1", join_group, backend, meeting, 1)
    await asyncio.to_thread(join_group, backend, meeting, 0)
    await joined
    for number in range(20):
        theirs = rpc.call("w1", reduce, torch.full((size,), float(number), device=HERE))
        ours = await asyncio.to_thread(reduce, torch.ones(size, device=HERE))
        for tensor in (ours, await theirs):
            assert float(tensor.min()) == float(tensor.max()) == number + 1
    left = rpc.call("w1", leave_group)
    await asyncio.to_thread(leave_group)
    await left
