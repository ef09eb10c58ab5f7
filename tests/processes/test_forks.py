"""Children that a handler forks: what they write is theirs alone, and one that comes back out of its handler ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import aiorpc as rpc
import aiorpc.testing
from tests.examples.programs import run_program
from tests.limits import busy
from tests.scripts import make_current

from . import bodies
from .test_memory import large, warm
from .workers import group

PATIENCE = 20.0  # seconds that a child has to end


# --- tensors that were received ---------------------------------------------------------------------------------------


def zero_in_a_child(tensor: torch.Tensor) -> tuple[bool, torch.Tensor]:
    """Fork a child that zeroes the tensor; whether the child saw it as it was, and the tensor."""
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(int(PATIENCE))
        try:
            # Not by torch: its threads are not there in a child, and it would wait for them.
            array = tensor.numpy()
            as_it_was = float(array[0]) == 0.0 and float(array[-1]) == len(array) - 1
            array[:] = 0
            status = 0 if as_it_was and not array.any() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0, tensor


class Zeroing:
    """A data set over a tensor, of which each item is zeroed when it is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        part = self.tensor[index * 100 : (index + 1) * 100]
        found = part.clone()
        part.zero_()
        return found


def zero_in_a_data_loader(tensor: torch.Tensor) -> tuple[bool, torch.Tensor]:
    """The same by forked children of a DataLoader."""
    data: Any = Zeroing(tensor)
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    found = torch.cat([batch.flatten() for batch in loader])
    return bool(torch.equal(found, large()[:400])), tensor


@pytest.mark.parametrize("handler", [zero_in_a_child, zero_in_a_data_loader])
async def test_what_a_child_writes_to_a_received_tensor_is_its_own(
    handler: Callable[[torch.Tensor], tuple[bool, torch.Tensor]],
) -> None:
    """The worker that has forked it, and the one that has sent the tensor, have it as it was."""
    async with group(2) as (worker, _):
        await warm(worker, "w1")
        before = worker.statistics().channels["shared memory"].sent
        for _ in range(6):
            seen, tensor = await rpc.call("w1", handler, large())
            assert seen and torch.equal(tensor, large())
            del tensor
        assert worker.statistics().channels["shared memory"].sent - before >= 6


async def test_child_of_the_sender_changes_nothing_that_was_sent() -> None:
    """A child of the process whose arena it is writes to a result that lies in it, and the receiver has what it had."""
    async with group(2) as (worker, _):
        await warm(worker, "w1")
        received = await rpc.call("w1", bodies.echo, large())
        seen, kept = await asyncio.to_thread(zero_in_a_child, received)
        assert seen and torch.equal(kept, large()) and torch.equal(received, large())


# --- children that come back ------------------------------------------------------------------------------------------


def child_here(path: str) -> bool:
    """Fork; whether this is the child, whose stderr is that file, or else wait until the child has ended."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), 2)
        return True
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            Path(path + ".status").write_text(str(os.waitstatus_to_exitcode(status)))
            return False
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def returns(path: str) -> str:
    """The child returns from the handler."""
    return "the child" if child_here(path) else "the parent"


def raises(path: str) -> str:
    """The child raises."""
    if child_here(path):
        raise ValueError("in the child")
    return "the parent"


def exits(path: str) -> str:
    """The child ends as programs do."""
    if child_here(path):
        sys.exit(5)
    return "the parent"


def hands_back(path: str) -> Any:
    """The child returns something to be awaited on the loop, which it has not."""
    return late("the child" if child_here(path) else "the parent")


async def late(value: str) -> str:
    """It, a moment later."""
    await asyncio.sleep(0)
    return value


async def returns_on_the_loop(path: str) -> str:
    """A coroutine whose child returns."""
    return "the child" if child_here(path) else "the parent"


async def waits_on_the_loop(path: str) -> str:
    """A coroutine whose child awaits something that its loop cannot bring."""
    if child_here(path):
        await asyncio.sleep(2 * PATIENCE)
    return "the parent"


def yields(path: str) -> Iterator[str]:
    """A generator whose child yields."""
    yield "the child" if child_here(path) else "the parent"


async def yields_on_the_loop(path: str) -> AsyncIterator[str]:
    """The same on the loop."""
    yield "the child" if child_here(path) else "the parent"


HANDLERS: list[Callable[[str], Any]] = [returns, raises, exits, hands_back, returns_on_the_loop, waits_on_the_loop]


@pytest.mark.parametrize("handler", [*HANDLERS, yields, yields_on_the_loop])
async def test_child_that_comes_back_out_of_its_handler_ends(handler: Callable[[str], Any], tmp_path: Path) -> None:
    """It says why on its stderr, unless it was asked to end; the parent answers, and its connections are untouched."""
    path = tmp_path / "said"
    async with group(2) as (worker, _):
        if handler in (yields, yields_on_the_loop):
            assert [item async for item in rpc.stream("w1", handler, str(path))] == ["the parent"]
        else:
            assert await rpc.call("w1", handler, str(path)) == "the parent"
        assert Path(f"{path}.status").read_text() == ("5" if handler is exits else "1")
        said = path.read_text()
        if handler is exits:
            assert said == ""
        else:
            assert "forked in" in said and "w1" in said and "os._exit()" in said
            assert handler is not raises or "ValueError: in the child" in said
            assert handler is hands_back or handler.__name__ in said
        assert await rpc.call("w1", bodies.call_back, "w0", 3) == 3
        assert (await worker.shutdown()).lost == ()


# --- what is under way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["call", "awaited", "group", "retried", "then", "put", "item", "close", "leave"])
async def test_a_child_that_waits_for_what_is_under_way_in_its_parent_is_told(what: str) -> None:
    """Nobody brings it an answer or an item: waiting raises, ending a stream returns; the parent's go on."""
    _release.clear()
    async with rpc.testing.cluster(2, options=rpc.RpcBackendOptions(rpc_timeout=0, dedicated_loop=True)) as workers:
        released = workers[0].call("worker1", held)
        together = workers[0].group(["worker1"]).call(held)
        retried = workers[0].peer("worker1", retries=2).call(held)
        stream = workers[0].stream("worker1", endless)
        make_current(workers[0])
        queue: rpc.Queue[Any] = rpc.Queue("full", maxsize=1)
        await queue.put(0)
        put = queue.put(1)
        waits: dict[str, Callable[[], object]] = {
            "call": released.wait,
            "awaited": lambda: asyncio.run(answer(released)),
            "group": together.wait,
            "retried": retried.wait,
            "then": released.then(lambda future: future.value()).wait,
            "put": put.wait,
            "item": partial(skip_to_the_end, stream),
            "close": stream.close,
            "leave": partial(leave_by_an_error, stream),
        }
        assert await asyncio.to_thread(next, stream) == 0
        assert await asyncio.to_thread(status_in_a_child, waits[what]) == (0 if what == "close" else 5)
        _release.set()
        assert await released and (await together).values() and await retried
        assert await asyncio.to_thread(next, stream) == 1
        await stream.aclose()
        assert await queue.get() == 0
        await put
        queue.close()


async def answer(future: rpc.Future[Any]) -> object:
    """Of a call."""
    return await future


_release = threading.Event()


def held() -> bool:
    """Handler."""
    return _release.wait(PATIENCE)


def endless() -> Iterator[int]:
    """Handler."""
    yield from itertools.count()


def skip_to_the_end(stream: Any) -> None:
    """Those that have come by then may be taken."""
    for _ in stream:
        pass


def leave_by_an_error(stream: Any) -> None:
    """Out of a block that ends the stream."""
    with stream:
        raise rpc.WorkerClosed("of the block itself")


def status_in_a_child(step: Callable[[], object]) -> int:
    """The status of a child that takes that step: 0, 5 if it raises WorkerClosed, else something else."""
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(int(PATIENCE))
        try:
            step()
            status = 0
        except rpc.WorkerClosed:
            status = 5
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- the end of children ----------------------------------------------------------------------------------------------

FORKS = """
import os, sys, warnings, aiorpc as rpc
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
options = rpc.RpcBackendOptions(init_method=sys.argv[1], transports=("tcp",), address=sys.argv[2])
rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
assert rpc.rpc_sync("w0", abs, (-3,)) == 3
child = os.fork()
if child == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_child_of_a_worker_with_tcp_ends_with_its_own_status(address: str, tmp_path: Path) -> None:
    """As children of `os.fork` and of DataLoader end, which runs whatever libraries of C have to do then."""
    (tmp_path / "forks.py").write_text(FORKS)
    arguments = ["forks.py", f"file://{tmp_path}/store", address]
    done = run_program(arguments, tmp_path, timeout=60 * busy())
    assert (done.code, done.out, done.err) == (0, "5\n", "")
