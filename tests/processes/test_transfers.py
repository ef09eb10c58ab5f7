"""Large tensors between real processes, disturbed: killed, stopped, cancelled, refused, too many, too much.

Nothing here knows how they travel. Each tensor has a seed that settles all of its bytes, so a byte out of place shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.leaks import live_threads, open_descriptors
from tests.shared_files import named_shared_files

from . import bodies
from .workers import Child, Children, Link, Place, group, meeting_file, processes, serve, until

KIB, MIB = 1 << 10, 1 << 20
BOUND = 40.0  # seconds for anything that has to end


def made(seed: int, size: int) -> torch.Tensor:
    """So many bytes, whole numbers of 4, that only this seed gives."""
    return torch.arange(seed * 7919, seed * 7919 + size // 4, dtype=torch.int32)


def intact(tensor: torch.Tensor, seed: int) -> bool:
    """Whether every byte is as made."""
    return tensor.dtype == torch.int32 and torch.equal(tensor, made(seed, tensor.nbytes))


async def amade(seed: int, size: int) -> torch.Tensor:
    """The same on the loop."""
    return made(seed, size)


def checked(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Give back what arrived whole; the answer is as large as the question."""
    assert intact(tensor, seed), f"{seed} arrived broken"
    return tensor


def arrived(tensor: torch.Tensor, seed: int) -> bool:
    """Whether it arrived whole: a small answer to a large question."""
    return intact(tensor, seed)


async def aarrived(tensor: torch.Tensor, seed: int) -> bool:
    """The same on the loop."""
    return intact(tensor, seed)


def send_to(name: str, seed: int, size: int) -> bool:
    """From a handler: send a tensor to a third worker, which may be the caller, and take it back."""
    return intact(rpc.rpc_sync(name, checked, args=(made(seed, size), seed)), seed)


class Kept:
    """What handlers of a process hold on to."""

    tensors: list[tuple[torch.Tensor, int]] = []  # noqa: RUF012  # of the process, on purpose


def keep(tensor: torch.Tensor, seed: int) -> bool:
    """Hold it; whether it arrived whole."""
    Kept.tensors.append((tensor, seed))
    return intact(tensor, seed)


def broken() -> list[int]:
    """Seeds of what is held and is not any more what it was."""
    return [seed for tensor, seed in Kept.tensors if not intact(tensor, seed)]


def let_go() -> int:
    """Drop all that is held; how many."""
    count = len(Kept.tensors)
    Kept.tensors.clear()
    gc.collect()
    return count


def statistics() -> rpc.types.Statistics:
    """Of the worker that is asked."""
    return rpc.current().statistics()


def shared(of: rpc.types.Statistics) -> Any:
    """What went through shared memory, and why some did not."""
    return of.channels["shared memory"]


def sent(of: rpc.types.Statistics) -> tuple[int, int]:
    """How many buffers went any way, and their bytes."""
    return sum(way.sent for way in of.channels.values()), sum(way.bytes_sent for way in of.channels.values())


async def warmed(worker: rpc.Worker, *names: str, size: int = 2 * MIB) -> None:
    """Send both ways until it goes through shared memory: what that needs is prepared in the background."""

    async def both_share(name: str) -> bool:
        before = shared(worker.statistics()).sent, shared(await rpc.call(name, statistics)).sent
        assert intact(await rpc.call(name, checked, made(1, size), 1), 1)
        after = shared(worker.statistics()).sent, shared(await rpc.call(name, statistics)).sent
        return bool(after[0] > before[0] and after[1] > before[1])

    for name in names:
        await until(partial(both_share, name), BOUND)
    await until_all_back(worker, *names)


async def until_all_back(worker: rpc.Worker, *names: str) -> None:
    """Return once nothing is lent any more, by this worker and by those."""

    async def all_back() -> bool:
        return not worker.statistics().shared_lent and not any([await rpc.call(name, lent) for name in names])

    await until(all_back, BOUND)


def lent() -> int:
    """Bytes that others hold of this worker's memory."""
    return rpc.current().statistics().shared_lent


async def seconds_of(awaitable: Awaitable[Any]) -> float:
    """How long it takes."""
    started = time.monotonic()
    await awaitable
    return time.monotonic() - started


def in_thread(name: str, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """A blocking call in a thread of the loop's own pool."""
    return asyncio.ensure_future(asyncio.to_thread(lambda: rpc.rpc_sync(name, function, args=args)))


async def in_task(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """An awaited call."""
    return await rpc.call(name, function, *args)


# ---- killed


@contextlib.asynccontextmanager
async def survivor() -> AsyncIterator[tuple[rpc.Worker, Children, str]]:
    """This process in a group without a size, a place for others, and where they meet."""
    with processes() as children, meeting_file() as init_method:
        async with rpc.init("w0", init_method=init_method) as worker:
            yield worker, children, init_method


def buried(children: Children, child: Child) -> None:
    """It has ended, and the test holds nothing of it any more."""
    child.join()
    children.started.remove(child)
    child.pipe.close()
    child.process.close()


def join(place: Place, link: Link) -> list[str]:
    """Body: join a group without a size, and serve."""
    options = rpc.RpcBackendOptions(init_method=place.init_method)
    rpc.init_rpc(place.name, rpc_backend_options=options)
    link.tell("joined")
    link.hear(60)  # until it is killed
    return [info.name for info in rpc.shutdown().lost]


def foreign_memory() -> list[str]:
    """Mappings of shared memory that is not this process's own (no descriptor of it is open)."""
    own = set()
    for fd in open_descriptors():
        try:
            own.add(str(os.fstat(fd).st_ino))
        except OSError:  # closed meanwhile
            continue
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in lines if re.search(r"memfd:aiorpc|/dev/shm/", line)]
    return [line for line in shared if line.split()[4] not in own]


def held_here() -> dict[str, int]:
    """What a lost worker may leave in this process or on its machine: descriptors and threads by kind, files."""
    descriptors = [f"descriptor {re.sub('[0-9]+', '', target)}" for target in open_descriptors().values()]
    threads = [f"thread {re.sub('[0-9]+', '', thread.name)}" for thread in live_threads()]
    return Counter([*descriptors, *threads, *(f"file {name}" for name in named_shared_files())])


def traffic(name: str, role: int, chance: random.Random) -> list[asyncio.Future[Any]]:
    """Transfers that begin at once: the other worker receives, sends, or both. Each gives a whole tensor or True."""
    sizes = [chance.choice((1, 4, 16, 64)) * MIB for _ in range(4)]
    seeds = [chance.randrange(1, 10_000) for _ in sizes]
    receives: list[Callable[[int, int], Any]] = [
        lambda seed, size: asyncio.ensure_future(in_task(name, arrived, made(seed, size), seed)),
        lambda seed, size: in_thread(name, aarrived, made(seed, size), seed),
    ]
    sends: list[Callable[[int, int], Any]] = [
        lambda seed, size: asyncio.ensure_future(in_task(name, made, seed, size)),
        lambda seed, size: in_thread(name, amade, seed, size),
    ]
    both: list[Callable[[int, int], Any]] = [
        lambda seed, size: asyncio.ensure_future(in_task(name, checked, made(seed, size), seed)),
        lambda seed, size: in_thread(name, send_to, "w0", seed, size),
    ]
    kinds = (receives, sends, both)[role]
    futures = []
    for at, (seed, size) in enumerate(zip(seeds, sizes, strict=True)):
        future = kinds[at % 2](seed, size)
        future.seed = seed
        futures.append(future)
    return futures


async def kill_during(child: Child, role: int, chance: random.Random, share: float) -> tuple[list[Any], int]:
    """Kill it when so much of the time that transfers took before has passed since others began.

    The tensors that arrived, with their seeds, and how many transfers were lost.
    """
    name = child.place.name
    duration = await seconds_of(asyncio.gather(*traffic(name, role, chance)))
    calls = traffic(name, role, chance)
    await asyncio.sleep(duration * share)
    child.kill()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), BOUND)
    wrong = [result for result in results if not isinstance(result, torch.Tensor | rpc.PeerLost) and result is not True]
    assert not wrong, wrong
    pairs = zip(results, (call.seed for call in calls), strict=True)  # type: ignore[attr-defined]  # put there by us
    kept = [(result, seed) for result, seed in pairs if isinstance(result, torch.Tensor)]
    return kept, sum(isinstance(result, rpc.PeerLost) for result in results)


def is_gone(worker: rpc.Worker, name: str) -> bool:
    """Whether the group knows that it is lost."""
    return name not in [info.name for info in worker.worker_infos()]


@pytest.mark.long
@pytest.mark.slow
async def test_a_peer_killed_at_any_moment_of_a_transfer() -> None:
    """Receiver or sender: calls end with PeerLost or the right result, what arrived stays, and all else is let go."""
    chance = random.Random(42)
    kept: list[tuple[torch.Tensor, int]] = []
    before: dict[str, int] = {}
    lost = 0
    files = named_shared_files()
    async with survivor() as (worker, children, init_method):
        for number in range(10):
            child = children.start(Place(f"v{number}", -1, None, init_method), join)
            await child.ahear()
            share = 0.0 if number == 0 else chance.random()
            more, failed = await kill_during(child, number % 3, chance, share)
            kept[3:] = more
            lost += failed
            del more
            assert all(intact(tensor, seed) for tensor, seed in kept)
            assert named_shared_files() <= files
            await until(partial(is_gone, worker, child.place.name), BOUND)
            await until_all_back(worker)
            assert worker.statistics().calls_pending == 0
            buried(children, child)
            if number == 2:  # each role was there: pools and the arena are as large as they get
                before = held_here()
        assert lost >= 3, "the kills came too late to disturb anything"
        kept.clear()
        await until(lambda: gc.collect() >= 0 and not foreign_memory(), BOUND)
        with contextlib.suppress(AssertionError):
            await until(lambda: not more_than(before), 15)
        assert more_than(before) == {}


#: What pools and the arena take when they need it, up to a limit, and keep: threads, with the two descriptors that each
#: waits at once it has stood by for a connection (`runtime/engine/wakeup.py`), and segments.
KEPT = ("thread", "memfd", "eventfd", "eventpoll")


def more_than(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What this process holds more of than before: so many then, so many now.

    Of what is kept, less than one for each two of the seven rounds in between is none that a round has left behind.
    """
    pairs = {kind: (before.get(kind, 0), now) for kind, now in held_here().items()}
    return {kind: pair for kind, pair in pairs.items() if pair[1] > pair[0] + 3 * any(word in kind for word in KEPT)}


# ---- stopped


@contextlib.asynccontextmanager
async def stopped(child: Child) -> AsyncIterator[None]:
    """The process stands still in the block."""
    await child.stop()
    try:
        yield
    finally:
        child.kill(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "number"), [(0, 7), *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 8), (2, 9), (2, 10)))]
)
async def test_a_peer_stopped_in_the_middle_of_a_transfer(role: int, number: int) -> None:
    """Receiver or sender stands still for a second while others go on: all completes, and nothing was used again."""
    chance = random.Random(number)
    async with group(3) as (worker, children):
        await warmed(worker, "w1", "w2")
        duration = await seconds_of(asyncio.gather(*traffic("w1", role, chance)))
        assert all([await rpc.call("w1", keep, made(seed, 2 * MIB), seed) for seed in range(5)])
        mine = [(await rpc.call("w1", made, seed, 2 * MIB), seed) for seed in range(5)]
        calls = traffic("w1", role, chance)
        await asyncio.sleep(duration * chance.random() * 0.8)
        async with stopped(children["w1"]):
            end = time.monotonic() + 1.0
            while time.monotonic() < end:  # the memory that the stopped one holds had better not serve for this
                seed = chance.randrange(100, 200)
                assert intact(await rpc.call("w2", checked, made(seed, 2 * MIB), seed), seed)
        results = await asyncio.wait_for(asyncio.gather(*calls), BOUND)
        for call, result in zip(calls, results, strict=True):
            assert result is True or intact(result, call.seed)  # type: ignore[attr-defined]  # put there by us
        assert await rpc.call("w1", broken) == [] and all(intact(tensor, seed) for tensor, seed in mine)
        del results, result, calls, call, mine
        assert await rpc.call("w1", let_go) == 5
        await until_all_back(worker, "w1")


# ---- pressure, and refusals


@pytest.mark.long
async def test_a_receiver_that_keeps_everything() -> None:
    """Four times what may be shared: all arrives and stays intact, the rest goes another way, and it says why."""
    size, count = 8 * MIB, 32
    async with group(2, shared_memory=64 * MIB) as (worker, _):
        await warmed(worker, "w1")
        for first in range(0, count, 16):  # at once, more than there is room for
            calls = [rpc.call("w1", keep, made(seed, size), seed) for seed in range(first, first + 16)]
            assert all(await asyncio.wait_for(asyncio.gather(*calls), BOUND))
        del calls
        kept = [rpc.call("w1", made, seed, size) for seed in range(count)]
        mine = list(zip(await asyncio.wait_for(asyncio.gather(*kept), BOUND), range(count), strict=True))
        del kept
        assert await rpc.call("w1", broken) == [] and all(intact(tensor, seed) for tensor, seed in mine)
        for side in (worker.statistics(), await rpc.call("w1", statistics)):
            reasons = {reason: count for reason, count in shared(side).refused.items() if reason != "not mapped"}
            assert sum(reasons.values()) > 0 and all(re.fullmatch(r"[a-z ]+", reason) for reason in reasons), reasons
        held = worker.statistics().shared_lent
        assert 0 <= held <= 64 * MIB and worker.statistics().shared_size <= 64 * MIB
        mine.clear()
        assert await rpc.call("w1", let_go) == count
        await until_all_back(worker, "w1")
        assert await rpc.call("w1", arrived, made(1, size), 1)


ONE_SIDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "refused here": ({"shared_memory": 0}, {}),
    "refused there": ({}, {"shared_memory": 0}),
    "refused by both": ({"shared_memory": 0}, {"shared_memory": 0}),
    "one byte": ({"shared_memory": 1}, {}),
    "one byte there": ({}, {"shared_memory": 1}),
    "a page": ({"shared_memory": 4096}, {"shared_memory": 4096}),
    "less than a tensor": ({"shared_memory": 300 * KIB}, {"shared_memory": 1 * MIB}),
}


QUICK = ("refused here", "refused there", "one byte there", "less than a tensor")


@pytest.mark.parametrize(
    "sides", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in ONE_SIDED]
)
async def test_shared_memory_that_is_refused_or_tiny(sides: str) -> None:
    """Tensors of all sizes arrive both ways, kept or not, whoever has no memory to share."""
    here, there = ONE_SIDED[sides]
    async with group(2, serve, there, **here) as (worker, _):
        for seed, size in enumerate((4, 100 * KIB, 200 * KIB, 260 * KIB, 900 * KIB, 5 * MIB) * 3):
            assert await rpc.call("w1", keep, made(seed, size), seed)
            assert intact(await rpc.call("w1", made, seed, size), seed)
            assert await rpc.call("w1", send_to, "w0", seed, size)
        assert await rpc.call("w1", broken) == []
        for options, side in ((here, worker.statistics()), (there, await rpc.call("w1", statistics))):
            if options.get("shared_memory") == 0:
                assert (shared(side).sent, side.shared_lent, side.shared_size) == (0, 0, 0)
            assert side.shared_size <= max(options.get("shared_memory", 1 << 40), 0)
        await rpc.call("w1", let_go)
        await until_all_back(worker, "w1")


# ---- the loop, and many at once


async def test_one_tensor_to_several_workers_at_once() -> None:
    """It arrives everywhere intact, each has its own, and it was copied once for each."""
    names = ["w1", "w2", "w3"]
    async with group(4) as (worker, _):
        await warmed(worker, *names, size=8 * MIB)
        tensor = made(5, 4 * MIB)
        while True:  # the time limit of the test bounds it
            before = worker.statistics()
            answers = await asyncio.gather(*(rpc.call(name, keep, tensor, 5) for name in names))
            assert answers == [True] * 3
            after = worker.statistics()
            assert sent(after) == (sent(before)[0] + 3, sent(before)[1] + 3 * tensor.nbytes)
            if shared(after).sent == shared(before).sent + 3:
                break
            await asyncio.gather(*(rpc.call(name, let_go) for name in names))
        assert after.bytes_sent - before.bytes_sent < tensor.nbytes  # by no socket as well
        await rpc.call("w1", spoil)
        assert [await rpc.call(name, broken) for name in names] == [[5], [], []] and intact(tensor, 5)
        assert await asyncio.gather(*(rpc.call(name, let_go) for name in names)) == [1, 1, 1]
        await until_all_back(worker)


def spoil() -> None:
    """Change what is held, in place."""
    for tensor, _ in Kept.tensors:
        tensor += 1


def state_of_300() -> dict[str, torch.Tensor]:
    """Tensors of many types, sizes and layouts; some share, some are large, some are empty."""
    generator = torch.Generator().manual_seed(3)
    types = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.float16]
    state: dict[str, torch.Tensor] = {}
    for number in range(300):
        size = (0, 1, 7, 300, 5_000, 40_000, 200_000)[number % 7]
        tensor = torch.randn(size, generator=generator).mul(3).to(types[number % 6])
        state[f"layer.{number}"] = tensor.view(-1, 2).t() if size % 2 == 0 and number % 5 == 0 else tensor
    state["tied"] = state["layer.299"]
    state["part"] = state["layer.6"][100:50_000]
    state["scalar"] = torch.tensor(3)
    state["weight"] = torch.nn.Parameter(torch.randn(3, 64, 40, 40).to(memory_format=torch.channels_last))
    return state


@pytest.mark.long
async def test_a_state_dict_of_300_tensors_is_exact() -> None:
    """Names, types, shapes, strides, bits and sharing, there and back, before and after the way is warm."""
    async with group(2) as (worker, _):
        state = state_of_300()
        for _ in range(4):
            back = await asyncio.wait_for(rpc.call("w1", bodies.echo, state), BOUND)
            assert list(back) == list(state)
            for name, tensor in state.items():
                other = back[name]
                assert (other.dtype, other.shape, type(other)) == (tensor.dtype, tensor.shape, type(tensor)), name
                assert other.stride() == tensor.stride() and other.requires_grad == tensor.requires_grad, name
                assert torch.equal(other, tensor), name
            assert back["tied"].data_ptr() == back["layer.299"].data_ptr()
            assert back["part"].untyped_storage().data_ptr() == back["layer.6"].untyped_storage().data_ptr()
            del back, other
        await until_all_back(worker, "w1")


@pytest.mark.slow
async def test_a_call_cancelled_in_the_middle_of_its_transfer() -> None:
    """Argument or result, cancelled or out of time, at any moment: later calls work and nothing stays lent."""
    chance = random.Random(11)
    ends = {"cancelled": 0, "timed out": 0, "done": 0}
    async with group(2) as (worker, _):
        await warmed(worker, "w1", size=48 * MIB)
        duration = await seconds_of(rpc.call("w1", checked, made(1, 48 * MIB), 1))
        for number in range(12):
            # The first of each kind at once: how long others take is no matter of this one.
            tensor, delay = made(number, 48 * MIB), duration * chance.random() * 0.9 * (number > 2)
            peer = rpc.peer("w1", timeout=max(delay, 0.001) if number % 3 == 2 else 0)
            kind = (arrived, checked)[number % 2]
            call = asyncio.ensure_future(await_call(peer, kind, tensor, number))
            small = [rpc.call("w1", bodies.aadd, number, n) for n in range(5)]
            if number % 3 != 2:
                await asyncio.sleep(delay)
                call.cancel()
            await asyncio.wait([call], timeout=BOUND)
            assert call.done()
            ends[how_it_ended(call)] += 1
            del call, tensor
            assert await asyncio.wait_for(asyncio.gather(*small), BOUND) == [number + n for n in range(5)]
            assert intact(await rpc.call("w1", checked, made(number, 2 * MIB), number), number)
        await until_all_back(worker, "w1")
        assert ends["cancelled"] and ends["timed out"], ends
        assert worker.statistics().calls_pending == 0


async def await_call(peer: Any, function: Callable[..., Any], *args: Any) -> Any:
    """A task that waits for a call."""
    return await peer.call(function, *args)


def how_it_ended(call: asyncio.Future[Any]) -> str:
    """In a word; a failure that is none of these is raised."""
    if call.cancelled():
        return "cancelled"
    if isinstance(call.exception(), rpc.RpcTimeout):
        return "timed out"
    call.result()
    return "done"


@pytest.mark.long
@pytest.mark.slow
async def test_a_burst_of_large_transfers_from_threads_and_coroutines() -> None:
    """Dozens at once, both ways, of all sizes, with small calls between them: all intact, nothing stays lent."""
    chance = random.Random(5)
    async with group(3) as (worker, _):
        futures: list[asyncio.Future[Any]] = []
        for role in range(3):
            for _ in range(2):
                futures += traffic("w1", role, chance) + traffic("w2", role, chance)
        small = [rpc.call(name, bodies.aadd, n, 1) for n in range(100) for name in ("w1", "w2")]
        with ThreadPoolExecutor(8) as threads:
            loop = asyncio.get_running_loop()
            more = [loop.run_in_executor(threads, echo_from_thread, worker, seed) for seed in range(16)]
            assert all(await asyncio.wait_for(asyncio.gather(*more), BOUND * 2))
        for future in futures:
            result = await asyncio.wait_for(future, BOUND * 2)
            assert result is True or intact(result, future.seed)  # type: ignore[attr-defined]  # put there by this test
        assert await asyncio.wait_for(asyncio.gather(*small), BOUND) == [n + 1 for n in range(100) for _ in range(2)]
        del futures, future, result
        await until_all_back(worker, "w1")
        await until_all_back(worker, "w2")


def echo_from_thread(worker: rpc.Worker, seed: int) -> bool:
    """A large tensor there and back, blocking."""
    name = f"w{1 + seed % 2}"
    return intact(worker.call(name, checked, made(seed, 3 * MIB), seed).wait(), seed)
