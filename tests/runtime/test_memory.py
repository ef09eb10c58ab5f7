"""Large tensors between workers of one host go through shared memory, come back to their lender, and never hurt."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import Overloaded, PeerLost, RpcBackendOptions, RpcCancelled, RpcError, RpcTimeout, Worker
from aiorpc.channels.arena import Block
from aiorpc.channels.space import PAGE
from aiorpc.errors import SerializationError
from aiorpc.options import SHARE_SIZE
from aiorpc.runtime.links.messages import SHARED
from aiorpc.testing import cluster
from tests.runtime.inside import set_bounds
from tests.runtime.observers import standing_still
from tests.runtime.waiting import LIMIT, until

MIB = 1 << 20
COUNT = SHARE_SIZE // 4 + 1024  # of float32: just above what is worth a block


def large(seed: int = 0, count: int = COUNT) -> torch.Tensor:
    """A tensor that goes through shared memory."""
    return torch.arange(seed, seed + count, dtype=torch.float32)


def echo(value: Any) -> Any:
    return value


async def aecho(value: Any) -> Any:
    return value


def drop(*values: Any) -> None:
    """Take it, and keep nothing."""


def make(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def change(value: Any) -> tuple[bool, Any]:
    """Write to every element in place."""
    before = bool((value == value).all())
    value += 1
    return before, value


class Keeper:
    """What handlers have kept, and gates that hold them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.gate = threading.Event()
        self.started = threading.Event()


_keepers: dict[str, Keeper] = {}


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    """Where the handlers of this test put things; a gate that is open at the end."""
    made = _keepers["this test"] = Keeper()
    yield made
    made.gate.set()
    made.kept.clear()
    _keepers.clear()


def keep(value: Any) -> None:
    _keepers["this test"].kept.append(value)


def hold(value: Any) -> Any:
    """Answer with the same, once the gate is open."""
    _keepers["this test"].started.set()
    assert _keepers["this test"].gate.wait(30)
    return value


def count_up(number: int) -> Iterator[torch.Tensor]:
    for seed in range(number):
        yield large(seed)


async def acount_up(number: int) -> AsyncIterator[torch.Tensor]:
    for seed in range(number):
        yield large(seed)


class Unreadable:
    """Pickles, and raises when it is unpickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return fail_to_read, (self.value,)


def fail_to_read(value: Any) -> None:
    raise ValueError("not to be read")


def make_unreadable() -> Unreadable:
    return Unreadable(large())


def lent(*workers: Worker) -> int:
    """Bytes that others hold of these workers' memory."""
    return sum(worker.statistics().shared_lent for worker in workers)


def refused(worker: Worker) -> dict[str, int]:
    """Why large buffers went another way; not those that made more memory ready, or known to the other side."""
    reasons = dict(worker.statistics().channels["shared memory"].refused)
    reasons.pop("not mapped", None)
    reasons.pop("cold", None)
    return reasons


async def until_all_back(*workers: Worker, collect: bool = False) -> None:
    """Return once nothing of these workers' memory is lent. collect: cycles may be in the way."""
    try:
        if collect:
            await until(lambda: gc.collect() < 0 or not lent(*workers))
        await until(lambda: not lent(*workers))
    except AssertionError:
        blocks = {worker.name: worker._node.memory.arena.blocks for worker in workers}
        raise AssertionError(f"{lent(*workers)} bytes are still lent; blocks in use: {blocks}") from None
    assert all(worker._node.memory.arena.used == 0 for worker in workers)


async def warm(sender: Worker, receiver: Worker) -> None:
    """Call with large arguments and results until both ways go through shared memory."""
    before = [worker.statistics().channels["shared memory"].sent for worker in (sender, receiver)]

    def both_share() -> bool:
        now = [worker.statistics().channels["shared memory"].sent for worker in (sender, receiver)]
        return all(new > old for new, old in zip(now, before, strict=True))

    async with asyncio.timeout(LIMIT):
        while not both_share():
            await sender.call(receiver.name, echo, large())
            await asyncio.sleep(0.005)
    await until_all_back(sender, receiver)


@pytest.fixture
async def warmed() -> AsyncIterator[list[Worker]]:
    """Two workers on the test's loop, whose calls from the first to the second share memory."""
    async with cluster(2) as workers:
        await warm(*workers)
        yield workers


# --- arrives ----------------------------------------------------------------------------------------------------------


def sparse(layout: torch.layout) -> torch.Tensor:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return torch.eye(300).repeat(8, 8).to_sparse(layout=layout, blocksize=blocks)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    **{
        str(dtype).removeprefix("torch."): partial(torch.ones, SHARE_SIZE, dtype=dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    },
    "complex64": lambda: torch.complex(large(), large(1)),
    "conj": lambda: torch.complex(large(), large(1)).conj(),
    "transposed": lambda: large(count=512 * 300).reshape(512, 300).t(),
    "stepped": lambda: large(count=4 * COUNT)[::2],
    "offset": lambda: large(count=2 * COUNT)[COUNT + 3 :],
    "expanded": lambda: large().expand(3, COUNT),
    "requires_grad": lambda: large().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(large()),
    **{
        str(layout).removeprefix("torch."): partial(sparse, layout)
        for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    },
}


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense()


async def test_tensors_of_all_kinds_arrive_equal(warmed: list[Worker]) -> None:
    """By themselves and in a container, as argument and result: values, type, layout and gradient flag are kept."""
    for kind, make_one in TENSORS.items():
        await check_echo(warmed, kind, make_one())
        await until_all_back(*warmed)


async def check_echo(workers: list[Worker], kind: str, tensor: torch.Tensor) -> None:
    for _ in range(50):  # the arena may have to grow first
        if await echo_shares(workers, kind, tensor):
            return
        await until_all_back(*workers)
    raise AssertionError(f"{kind} never went through shared memory")


async def echo_shares(workers: list[Worker], kind: str, tensor: torch.Tensor) -> bool:
    before = [worker.statistics().channels["shared memory"].sent for worker in workers]
    alone = await workers[0].call("worker1", echo, tensor)
    (inside,) = await workers[0].call("worker1", echo, [tensor])
    for value in (alone, inside):
        assert torch.equal(dense(value), dense(tensor)), kind
        assert (type(value), value.dtype, value.layout) == (type(tensor), tensor.dtype, tensor.layout), kind
        assert (value.shape, value.requires_grad) == (tensor.shape, tensor.requires_grad), kind
    after = [worker.statistics().channels["shared memory"].sent for worker in workers]
    return all(new >= old + 2 for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["float32", "int16", "structured", "fortran"])
async def test_arrays_arrive_equal_and_writable(warmed: list[Worker], kind: str) -> None:
    """numpy arrays go the same way, both ways, and may be changed in place on either side."""
    array: Any = numpy.arange(2 * SHARE_SIZE, dtype=numpy.int16 if kind == "int16" else numpy.float32)
    if kind == "fortran":
        array = numpy.asfortranarray(array.reshape(512, -1))
    if kind == "structured":
        array = array.view([("a", "f4"), ("b", "f4")])
    before = warmed[0].statistics().channels["shared memory"].sent
    value = await warmed[0].call("worker1", echo, {"array": array})
    assert numpy.array_equal(value["array"], array) and value["array"].dtype == array.dtype
    assert value["array"].flags.writeable and warmed[0].statistics().channels["shared memory"].sent == before + 1
    if kind != "structured":
        untouched = array.copy()
        equal, changed = await warmed[0].call("worker1", change, array)
        assert equal and numpy.array_equal(changed, untouched + 1) and numpy.array_equal(array, untouched)
        changed *= 2
    changed = None
    del value
    await until_all_back(*warmed)


async def test_tensors_may_be_changed_where_they_arrive(warmed: list[Worker]) -> None:
    """In place, in the handler and at the caller: nobody else's copy changes."""
    tensor = large()
    equal, first = await warmed[0].call("worker1", change, tensor)
    _, second = await warmed[0].call("worker1", change, tensor)
    first.zero_()
    assert equal and torch.equal(tensor, large()) and torch.equal(second, large() + 1)
    del first, second
    await until_all_back(*warmed)


async def test_views_that_share_storage_still_share_it(warmed: list[Worker]) -> None:
    """Two views of one storage in a message are views of one block, which lives as long as either."""
    whole = large(count=2 * COUNT)
    one, two = await warmed[0].call("worker1", aecho, (whole[:COUNT], whole[8:]))
    one[8] = -1.0
    assert two[0] == -1.0
    del one
    await asyncio.sleep(0)
    assert lent(warmed[1]) > 0 and torch.equal(two[1:], whole[9:])
    del two
    await until_all_back(*warmed)


async def test_state_dicts_arrive_whole(warmed: list[Worker]) -> None:
    """Large and small tensors of one message, in order; the large ones through shared memory."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400), torch.nn.Linear(400, 300))
    state = model.state_dict()
    large_ones = sum(tensor.nbytes >= SHARE_SIZE for tensor in state.values())
    before = warmed[0].statistics().channels["shared memory"].sent
    back = await warmed[0].call("worker1", echo, state)
    assert list(back) == list(state) and all(torch.equal(back[name], state[name]) for name in state)
    assert warmed[0].statistics().channels["shared memory"].sent == before + large_ones == before + 2
    model.load_state_dict(back)
    del back
    await until_all_back(*warmed)


@pytest.mark.parametrize("generator", [count_up, acount_up])
async def test_items_of_streams_go_through_shared_memory(warmed: list[Worker], generator: Any) -> None:
    """In order and equal; each goes back when the consumer has dropped it."""
    before = warmed[1].statistics().channels["shared memory"].sent
    seed = 0
    async for item in warmed[0].stream("worker1", generator, 40):
        assert torch.equal(item, large(seed))
        seed += 1
    assert seed == 40 and warmed[1].statistics().channels["shared memory"].sent == before + 40
    del item
    await until_all_back(*warmed)


async def test_methods_of_references_take_and_give_shared_memory(warmed: list[Worker]) -> None:
    """Also what a reference's value is made from, and its copy."""
    reference = warmed[0].remote("worker1", torch.nn.Linear, 300, 300)
    rows = await reference.rpc_async().forward(torch.ones(400, 300))
    module = await reference
    assert torch.equal(rows, module(torch.ones(400, 300)))
    assert warmed[1].statistics().channels["shared memory"].sent >= 3
    del rows, module, reference
    await until_all_back(*warmed)


async def test_a_worker_shares_memory_with_itself() -> None:
    """A call to oneself takes the same way."""
    async with cluster(1) as (worker,):
        await warm(worker, worker)
        assert torch.equal(await worker.call("worker0", echo, large()), large())
        await until_all_back(worker)


async def test_workers_on_loops_of_their_own_share_memory() -> None:
    """Calls of many threads at once, each with its own data, both ways."""
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True)) as workers:

        def calls(thread: int) -> None:
            for turn in range(25):
                seed = 100 * thread + turn
                there, back = (workers[thread % 2], workers[1 - thread % 2])
                assert torch.equal(there.call(back.name, echo, large(seed)).wait(), large(seed))

        await asyncio.gather(*(asyncio.to_thread(calls, thread) for thread in range(6)))
        assert all(worker.statistics().channels["shared memory"].sent > 0 for worker in workers)
        await until_all_back(*workers)


def give_back_what_was_not_lent(to: str) -> int:
    (service,) = [each for each in aiorpc.current()._node.services if each.record.name == to]
    service.link.give_back(SHARED, [Block(0, 4096, 5, 77)], more=True)
    return 1


@pytest.mark.parametrize("blocking", [False, True])
async def test_memory_that_was_not_lent_and_is_given_back_ends_the_connection(blocking: bool) -> None:
    """Whoever reads it, a thread that waits for an answer, or the loop."""
    async with cluster(2, options=RpcBackendOptions(dedicated_loop=True), dynamic=True) as (worker, other):
        await warm(worker, other)
        call = worker.call(other.name, give_back_what_was_not_lent, worker.name)
        with pytest.raises(PeerLost, match=r"its connection broke|a release of a block that is not lent"):
            await (asyncio.to_thread(call.wait) if blocking else call)


# --- begins, and falls back -------------------------------------------------------------------------------------------


async def test_the_first_large_message_goes_inline(pair: list[Worker]) -> None:
    """Nothing waits for the memory: it is made ready meanwhile, and what comes after that goes through it."""
    small = await pair[0].call("worker1", echo, torch.ones(8))
    found = pair[0].statistics()
    assert torch.equal(small, torch.ones(8)) and found.shared_resident <= PAGE  # no memory for small ones
    assert torch.equal(await pair[0].call("worker1", echo, large()), large())
    first = pair[0].statistics().channels["shared memory"]
    assert first.sent == 0 and first.refused == {"cold": 1}
    await warm(*pair)
    sent = pair[0].statistics().channels["shared memory"]
    assert sent.bytes_sent == sent.sent * large().nbytes and pair[0].statistics().shared_size > 0


@pytest.mark.parametrize("size", [SHARE_SIZE - 4, SHARE_SIZE])
async def test_only_large_buffers_are_shared(warmed: list[Worker], size: int) -> None:
    """From SHARE_SIZE bytes on."""
    before = warmed[0].statistics().channels["shared memory"].sent
    await warmed[0].call("worker1", drop, torch.zeros(size, dtype=torch.uint8), torch.zeros(1000))
    assert warmed[0].statistics().channels["shared memory"].sent - before == (size >= SHARE_SIZE)


@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), RuntimeError("no such thing")])
async def test_a_peer_that_cannot_map_gets_the_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """One line says why, once for each connection; everything works, by socket."""

    open_file = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if "/fd/" in str(path):  # how a file without a name of another process is reached
            raise error
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    caplog.set_level(logging.INFO, "aiorpc")
    async with cluster(2) as workers:
        for seed in range(100):
            assert torch.equal(await workers[0].call("worker1", echo, large(seed)), large(seed))
            if len(refusals(caplog)) == 2:  # worker1 offers its own for the results
                break
            await asyncio.sleep(0.01)
        assert torch.equal(await workers[0].call("worker1", echo, large()), large())
        assert lent(*workers) == 0 and workers[0].statistics().channels["shared memory"].sent == 0
        assert workers[0].statistics().channels["shared memory"].refused["refused"] == 1
    assert len(refusals(caplog)) == 2
    assert "worker1 (rank 1" in refusals(caplog)[0] + refusals(caplog)[1] and str(error) in refusals(caplog)[0]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "cannot map our memory" in record.getMessage()]


@pytest.mark.parametrize("without", [0, 1])
async def test_without_shared_memory_on_either_side_the_bytes_travel(without: int) -> None:
    """shared_memory=0 at one of the two turns it off between them, both ways."""
    options = [RpcBackendOptions(), RpcBackendOptions()]
    options[without].shared_memory = 0
    async with cluster(2, options=options) as workers:
        for seed in range(10):
            assert torch.equal(await workers[0].call("worker1", echo, large(seed)), large(seed))
            assert torch.equal(await workers[1].call("worker0", aecho, large(seed)), large(seed))
        assert [worker.statistics().channels["shared memory"].sent for worker in workers] == [0, 0]
        assert workers[without].statistics().shared_size == 0
        assert lent(*workers) == 0


async def test_over_tcp_the_bytes_travel() -> None:
    """The other end may be on another machine: nothing is offered."""
    async with cluster(2, options=RpcBackendOptions(transports=("tcp",))) as workers:
        for seed in range(3):
            assert torch.equal(await workers[0].call("worker1", echo, large(seed)), large(seed))
        assert [worker.statistics().shared_size for worker in workers] == [0, 0]


async def test_a_buffer_larger_than_the_arena_goes_inline_and_is_counted() -> None:
    """Also when it is the first one; smaller ones are shared all the same."""
    async with cluster(2, options=RpcBackendOptions(shared_memory=4 * MIB)) as workers:
        huge = torch.arange(2 * MIB, dtype=torch.float32)
        await workers[0].call("worker1", drop)
        assert torch.equal(await workers[0].call("worker1", echo, huge), huge)
        assert refused(workers[0]) == {"limit": 1}
        await warm(*workers)
        assert torch.equal(await workers[0].call("worker1", echo, huge), huge)
        assert refused(workers[0]) == {"limit": 2}
        await until_all_back(*workers)


async def test_a_full_arena_falls_back_and_recovers(keeper: Keeper) -> None:
    """While a peer keeps what it got, the rest goes inline and is counted; when it lets go, memory is used again."""
    async with cluster(2, options=RpcBackendOptions(shared_memory=4 * MIB)) as workers:
        await warm(*workers)
        for seed in range(60):
            await workers[0].call("worker1", keep, large(seed))
        statistics = workers[0].statistics()
        assert all(torch.equal(value, large(seed)) for seed, value in enumerate(keeper.kept))
        assert statistics.shared_size <= 4 * MIB and statistics.shared_lent <= 3 * MIB
        keeper.kept.clear()
        await until_all_back(*workers)
        assert workers[0].statistics().channels["shared memory"].sent > 0
        await warm(*workers)


async def test_all_in_use_is_refused_by_reason(keeper: Keeper) -> None:
    """A peer that reads nothing holds at most its part of the arena; the reason is in the statistics."""
    options = RpcBackendOptions(shared_memory=4 * MIB, num_worker_threads=1)  # it keeps what comes in its order
    apart = replace(options, dedicated_loop=True, lag_warning=0.0)
    async with cluster(2, options=[options, apart]) as workers:
        await warm(*workers)
        with standing_still(workers[1]):
            calls = [workers[0].call("worker1", keep, large(seed)) for seed in range(40)]
            statistics = workers[0].statistics()
        await asyncio.gather(*calls)
        assert refused(workers[0]).get("share", 0) >= 1 and statistics.shared_lent <= 3 * MIB
        assert all(torch.equal(value, large(seed)) for seed, value in enumerate(keeper.kept))
        keeper.kept.clear()
        await until_all_back(*workers)


async def test_over_its_share_a_peer_copies_out(keeper: Keeper) -> None:
    """Past a quarter of the arena the receiver takes a copy, and the block goes back although the tensor is kept."""
    async with cluster(2, options=RpcBackendOptions(shared_memory=4 * MIB)) as workers:
        await warm(*workers)
        before = workers[0].statistics().channels["shared memory"].sent
        for seed in range(30):
            await workers[0].call("worker1", keep, large(seed))
            await until(lambda: workers[0].statistics().shared_lent <= MIB)
        assert workers[0].statistics().channels["shared memory"].sent == before + 30
        assert sum(value.nbytes for value in keeper.kept) > 3 * MIB
        keeper.kept.clear()
        await until_all_back(*workers)


async def test_a_second_segment_is_offered_when_the_first_is_full(keeper: Keeper) -> None:
    """Messages go inline until it is mapped, and through it afterwards."""
    async with cluster(2, options=RpcBackendOptions(shared_memory=64 * MIB)) as workers:
        workers[0]._node.memory.arena._segment_size = 4 * MIB
        await warm(*workers)
        indices = [segment.index for segment in workers[0]._node.memory.arena.segments]
        for seed in range(24):
            await workers[0].call("worker1", keep, large(seed))
        tensor = large(count=MIB)
        await until_shared(workers[0], tensor)
        assert indices == [0] and len(workers[0]._node.memory.arena.segments) > 1
        keeper.kept.clear()
        await until_all_back(*workers)


async def until_shared(worker: Worker, tensor: torch.Tensor) -> None:
    before = worker.statistics().channels["shared memory"].sent
    async with asyncio.timeout(LIMIT):
        while worker.statistics().channels["shared memory"].sent == before:
            assert torch.equal(await worker.call("worker1", echo, tensor), tensor)
            await asyncio.sleep(0.005)


# --- comes back -------------------------------------------------------------------------------------------------------


async def test_memory_comes_back_when_the_last_view_is_gone(warmed: list[Worker], keeper: Keeper) -> None:
    """Not before: a row that somebody keeps holds the block."""
    await warmed[0].call("worker1", keep, large())
    assert lent(warmed[0]) == large().nbytes
    row = keeper.kept.pop()[5:7].numpy()
    await warmed[0].call("worker1", drop)
    assert lent(warmed[0]) == large().nbytes and row.tolist() == [5.0, 6.0]
    del row
    await until_all_back(*warmed)


async def test_late_answers_give_their_memory_back(warmed: list[Worker], keeper: Keeper) -> None:
    """The deadline passed before the answer came: it is dropped, and its memory with it."""
    with pytest.raises(RpcTimeout):
        await warmed[0].peer("worker1", timeout=0.1).call(hold, large())
    keeper.gate.set()
    await until_all_back(*warmed)


async def test_cancelled_calls_give_their_memory_back(warmed: list[Worker], keeper: Keeper) -> None:
    """Those that run, and those that wait for a thread and never run."""
    calls = [warmed[0].call("worker1", hold, large(seed)) for seed in range(30)]
    assert await asyncio.to_thread(keeper.started.wait, LIMIT)
    assert lent(warmed[0]) == 30 * large().nbytes
    for call in calls:
        call.cancel()
    keeper.gate.set()
    for call in calls:
        with pytest.raises(RpcCancelled):
            await call
    await until_all_back(*warmed)


async def test_refused_calls_give_their_memory_back(keeper: Keeper) -> None:
    """Overloaded: the callee never looks at the arguments."""
    async with cluster(2, options=[RpcBackendOptions(), RpcBackendOptions(max_queued_calls=2)]) as workers:
        await warm(*workers)
        calls = [workers[0].call("worker1", hold, large()) for _ in range(8)]
        await until(lambda: sum(call.done() for call in calls) == 6)
        await until(lambda: lent(workers[0]) == 2 * large().nbytes)
        keeper.gate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) == 6
        results.clear()
        calls.clear()
        await until_all_back(*workers)


@pytest.mark.parametrize("function", [echo, aecho])
async def test_unreadable_arguments_give_their_memory_back(warmed: list[Worker], function: Any) -> None:
    """The callee cannot unpickle them, wherever it tries to; the caller is told."""
    for value in (Unreadable(large()), [Unreadable(large()), "x" * 100_000]):
        with pytest.raises(SerializationError, match="not to be read"):
            await warmed[0].call("worker1", function, value)
    await until_all_back(*warmed)


async def test_unreadable_results_give_their_memory_back(warmed: list[Worker]) -> None:
    """The caller cannot unpickle the result: its error holds no memory once it is dropped."""
    with pytest.raises(RpcError, match="cannot be read here") as caught:
        await warmed[0].call("worker1", make_unreadable)
    assert isinstance(caught.value.__cause__, ValueError)
    del caught
    await until_all_back(*warmed, collect=True)


async def test_results_that_nobody_looks_at_give_their_memory_back(warmed: list[Worker]) -> None:
    """The Future is dropped with its value."""
    future = warmed[0].call("worker1", make, COUNT)
    await until(future.done)
    assert lent(warmed[1]) == large().nbytes
    del future
    await until_all_back(*warmed)


async def test_functions_that_do_not_exist_give_their_memory_back(warmed: list[Worker]) -> None:
    """The arguments of a call that cannot be started."""
    reference = warmed[0].remote("worker1", torch.nn.Linear, 1, 1)
    with pytest.raises(AttributeError):
        await reference.rpc_async().no_such_method(large())
    with pytest.raises(RpcError, match="generator function"):
        await warmed[0].call("worker1", count_up, large())  # type: ignore[call-overload]
    await until_all_back(*warmed)


async def test_handlers_that_raise_give_their_memory_back(warmed: list[Worker]) -> None:
    """The traceback of the error holds the arguments no longer than the error itself."""
    for function in (fails, afails):
        with pytest.raises(ZeroDivisionError):
            await warmed[0].call("worker1", function, large())
    await until_all_back(*warmed, collect=True)


def fails(tensor: torch.Tensor) -> float:
    return len(tensor) / 0


async def afails(tensor: torch.Tensor) -> float:
    return len(tensor) / 0


@pytest.mark.parametrize("generator", [count_up, acount_up])
async def test_streams_left_early_give_their_memory_back(warmed: list[Worker], generator: Any) -> None:
    """Items taken, items that wait and items still under way."""
    async with warmed[0].stream("worker1", generator, 10_000) as stream:
        async for item in stream:
            assert torch.equal(item, large())
            break
        await until(lambda: lent(warmed[1]) > 4 * large().nbytes)
    del item, stream
    await until_all_back(*warmed)


async def test_streams_that_are_dropped_give_their_memory_back(warmed: list[Worker]) -> None:
    """Nobody closed the stream: dropping it does."""
    stream = warmed[0].stream("worker1", count_up, 10_000)
    assert torch.equal(await anext(stream), large())
    del stream
    await until_all_back(*warmed)


async def test_results_that_cannot_be_sent_leave_nothing_lent(warmed: list[Worker]) -> None:
    """The same for the callee."""
    with pytest.raises(SerializationError, match="the result of"):
        await warmed[0].call("worker1", make_unsendable)
    await until_all_back(*warmed)


def make_unsendable() -> Any:
    return large(), threading.Lock()


async def test_release_alone_needs_no_other_message(warmed: list[Worker], keeper: Keeper) -> None:
    """A tensor dropped long after its call, in some thread: its memory is back soon."""
    await warmed[0].call("worker1", keep, large())
    await asyncio.to_thread(keeper.kept.clear)
    await until(lambda: lent(warmed[0]) == 0)


async def test_tensors_in_cycles_come_back_with_the_collector(warmed: list[Worker]) -> None:
    """The last view dies inside of the garbage collector."""
    value: list[Any] = [await warmed[0].call("worker1", make, COUNT)]
    value.append(value)
    assert lent(warmed[1]) == large().nbytes
    del value
    gc.collect()
    await until_all_back(*warmed)


# --- connections and workers end --------------------------------------------------------------------------------------


async def test_adopted_tensors_outlive_the_workers() -> None:
    """Both have left; what was adopted stays as it was, and may be written."""
    async with cluster(2) as workers:
        await warm(*workers)
        kept = await workers[0].call("worker1", make, COUNT)
    assert torch.equal(kept, large())
    kept += 1
    assert torch.equal(kept, large(1))


async def test_what_was_let_go_right_before_leaving_comes_back() -> None:
    """The worker says so while it can; its process lives on, so nothing else would prove it."""
    async with cluster(1, dynamic=True, store=(store := HashStore())) as (lender,):
        guest = await Worker("guest", store=store)
        await warm(guest, lender)
        set_bounds(guest, release_pause=60.0)
        value = await guest.call("worker0", make, COUNT)
        assert lent(lender) == value.nbytes
        del value
        assert lent(lender) > 0
        await guest.shutdown()
        await until_all_back(lender)


async def test_large_messages_while_the_other_side_leaves_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """The first offer of memory may meet a worker that is closing."""
    for _ in range(5):
        async with cluster(3) as workers:
            await workers[0].call("worker1", drop)
            calls = [workers[0].call("worker1", echo, large()) for _ in range(3)]
            await asyncio.gather(*calls, workers[1].shutdown(graceful=False), return_exceptions=True)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_fork_in_a_handler_leaves_the_parent_alone(warmed: list[Worker], keeper: Keeper) -> None:
    """The child drops its adopted tensors and ends: nothing is released, nothing is closed."""
    await warmed[0].call("worker1", keep, large())
    assert await warmed[0].call("worker1", fork_and_drop, large(1)) == 0
    assert lent(warmed[0]) >= large().nbytes
    assert torch.equal(keeper.kept[0], large())
    assert torch.equal(await warmed[0].call("worker1", echo, large(2)), large(2))
    keeper.kept.clear()
    await until_all_back(*warmed)


def fork_and_drop(tensor: torch.Tensor) -> int:
    """The child's exit status: 0 when dropping everything there went well."""
    child = os.fork()
    if child == 0:
        try:
            _keepers["this test"].kept.clear()
            del tensor
            gc.collect()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- lasts ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
async def test_two_thousand_megabytes_keep_one_segment(warmed: list[Worker]) -> None:
    """Blocks are used again: the arenas stay as they were after the first call."""
    tensor = torch.arange(MIB // 4, dtype=torch.float32)
    sizes = [worker._node.memory.arena.size for worker in warmed]
    resident = 0
    for turn in range(2000):
        back = await warmed[0].call("worker1", aecho, tensor)
        if turn == 20:
            resident = sum(worker._node.memory.arena.resident for worker in warmed)
    assert torch.equal(back, tensor)
    assert [worker._node.memory.arena.size for worker in warmed] == sizes
    assert all(len(worker._node.memory.arena.segments) == 1 for worker in warmed)
    assert sum(worker._node.memory.arena.resident for worker in warmed) <= 2 * resident
    assert all(refused(worker) == {} for worker in warmed)
    del back
    await until_all_back(*warmed)
