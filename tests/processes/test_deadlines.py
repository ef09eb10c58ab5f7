"""Every verb that takes a time, or that is part of something that has one, against a worker that is stopped."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

import aiorpc as rpc

from .workers import Link, Place, meeting_file, places, processes, until

# Seconds: what each verb is given, what it may take on a busy machine, and what the worker's own time is.
TIME, MOST, NEVER = 1.0, 60.0, 600.0
LARGE = 100_000  # bytes: an item stays with its producer


class Box:
    """Served by the worker that is stopped, and the value of references to it."""

    def get(self) -> int:
        return 1

    def items(self) -> Iterator[int]:
        yield 1


def echo(x: int) -> int:
    return x


def count(x: int) -> Iterator[int]:
    yield x


def be_stopped(place: Place, link: Link) -> None:
    """Body: serve, produce and read, until shutdown."""
    place.init_rpc()
    queue, box = rpc.Queue[Any]("theirs"), rpc.serve("box", Box())
    with rpc.subscribe("mine") as versions:
        next(versions)
        link.tell("reads")
        rpc.queue("mine", owner="w1").put(torch.ones(LARGE)).wait()
        link.hear()
    rpc.shutdown()
    del queue, box


class Here(NamedTuple):
    """What is there before the other worker is stopped."""

    queue: rpc.types.QueueHandle[Any]
    mine: rpc.Queue[Any]
    ref: rpc.RRef[Any]
    refs: rpc.types.RRefGroup[Any]
    publication: rpc.types.Publication
    threads: ThreadPoolExecutor

    @property
    def peer(self) -> rpc.types.PeerHandle:
        return rpc.peer("w0", timeout=TIME)

    @property
    def group(self) -> rpc.types.PeerGroup:
        return rpc.group(["w0"], timeout=TIME)

    def blocking(self, verb: Callable[[], Any]) -> Awaitable[Any]:
        """In a thread."""
        return asyncio.get_running_loop().run_in_executor(self.threads, verb)


async def items_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def awaited(waiting: Any) -> Any:
    return await waiting


def wait_shortly() -> Any:
    call = rpc.rpc_async("w0", echo, (1,))
    try:
        return call.wait(TIME)
    finally:
        call.cancel()


VERBS: dict[str, Callable[[Here], Any]] = {
    "rpc_sync": lambda here: here.blocking(lambda: rpc.rpc_sync("w0", echo, (1,), timeout=TIME)),
    "rpc_async": lambda here: rpc.rpc_async("w0", echo, (1,), timeout=TIME),
    "wait_for": lambda here: rpc.wait_for("nobody", timeout=TIME),
    "subscribe": lambda here: anext(rpc.subscribe("nothing", timeout=TIME)),
    "Publication.delivered": lambda here: here.publication.delivered(timeout=TIME),
    "Future.wait": lambda here: here.blocking(wait_shortly),
    # handles of workers and of objects
    "PeerHandle.call": lambda here: here.peer.call(echo, 1),
    "PeerHandle.call, tried again": lambda here: rpc.peer("w0", timeout=TIME, retries=3, idempotent=True).call(echo, 1),
    "PeerHandle.stream": lambda here: items_of(here.peer.stream(count, 1)),
    "PeerHandle.remote": lambda here: awaited(here.peer.remote(echo, 1)),
    "PeerHandle.remote, to_here": lambda here: here.blocking(here.peer.remote(echo, 1).to_here),
    "PeerHandle.remote, method": lambda here: here.peer.remote(Box).rpc_async().get(),
    "PeerHandle.remote, of that": lambda here: awaited(here.peer.remote(Box).remote().get()),
    "PeerHandle.remote, stream": lambda here: items_of(here.peer.remote(Box).stream().items()),
    "PeerHandle.object": lambda here: here.peer.object("box").get(),
    "ObjectHandle.rpc_sync": lambda here: here.blocking(lambda: rpc.peer("w0").object("box").rpc_sync(TIME).get()),
    "ObjectHandle.rpc_async": lambda here: rpc.peer("w0").object("box").rpc_async(TIME).get(),
    "ObjectHandle.remote": lambda here: awaited(rpc.peer("w0").object("box").remote(TIME).get()),
    "ObjectHandle.stream": lambda here: items_of(rpc.peer("w0").object("box").stream(TIME).items()),
    # references that were there
    "RRef.to_here": lambda here: here.blocking(lambda: here.ref.to_here(TIME)),
    "RRef.rpc_sync": lambda here: here.blocking(lambda: here.ref.rpc_sync(TIME).get()),
    "RRef.rpc_async": lambda here: here.ref.rpc_async(TIME).get(),
    "RRef.remote": lambda here: awaited(here.ref.remote(TIME).get()),
    "RRef.stream": lambda here: items_of(here.ref.stream(TIME).items()),
    # groups
    "PeerGroup.call": lambda here: here.group.call(echo, 1),
    "PeerGroup.call, tried again": lambda here: rpc.group(["w0"], timeout=TIME, retries=3, idempotent=True).call(
        echo, 1
    ),
    "PeerGroup.rpc_async": lambda here: rpc.group(["w0"]).rpc_async(echo, args=(1,), timeout=TIME),
    "PeerGroup.rpc_sync": lambda here: here.blocking(lambda: rpc.group(["w0"]).rpc_sync(echo, args=(1,), timeout=TIME)),
    "PeerGroup.any": lambda here: here.group.any(echo, 1),
    "PeerGroup.map": lambda here: items_of(here.group.map(echo, [1])),
    "PeerGroup.stream": lambda here: items_of(here.group.stream(count, 1)),
    "PeerGroup.remote": lambda here: awaited(here.group.remote(echo, 1)),
    "PeerGroup.remote, method": lambda here: here.group.remote(Box).rpc_async().get(),
    "PeerGroup.object": lambda here: here.group.object("box").get(),
    "PeerGroup.barrier": lambda here: rpc.group(["w0", "w1"], timeout=TIME).barrier(),
    "GroupObject.rpc_async": lambda here: rpc.group(["w0"]).object("box").rpc_async(TIME).get(),
    "GroupObject.rpc_sync": lambda here: here.blocking(lambda: rpc.group(["w0"]).object("box").rpc_sync(TIME).get()),
    "GroupObject.remote": lambda here: awaited(rpc.group(["w0"]).object("box").remote(TIME).get()),
    "GroupObject.stream": lambda here: items_of(rpc.group(["w0"]).object("box").stream(TIME).items()),
    "RRefGroup.rpc_async": lambda here: here.refs.rpc_async(TIME).get(),
    "RRefGroup.rpc_sync": lambda here: here.blocking(lambda: here.refs.rpc_sync(TIME).get()),
    "RRefGroup.remote": lambda here: awaited(here.refs.remote(TIME).get()),
    "RRefGroup.to_here": lambda here: here.blocking(lambda: here.refs.to_here(TIME)),
    # queues of the worker that is stopped, and an item that it keeps
    "QueueHandle.put": lambda here: rpc.queue("theirs", owner="w0").put(1, timeout=TIME),
    "QueueHandle.put, of the handle": lambda here: here.queue.put(torch.ones(LARGE)),
    "QueueHandle.put_nowait": lambda here: here.queue.put_nowait(1),
    "QueueHandle.get": lambda here: rpc.queue("theirs", owner="w0").get(timeout=TIME),
    "QueueHandle.get, in a thread": lambda here: here.blocking(here.queue.get().wait),
    "QueueHandle.get_many": lambda here: rpc.queue("theirs", owner="w0").get_many(3, timeout=TIME),
    "QueueHandle.get_nowait": lambda here: here.queue.get_nowait(),
    "QueueHandle.task_done": lambda here: here.queue.task_done(),
    "QueueHandle.join": lambda here: rpc.queue("theirs", owner="w0").join(timeout=TIME),
    "QueueHandle.qsize": lambda here: here.queue.qsize(),
    "QueueHandle.empty": lambda here: here.queue.empty(),
    "QueueHandle.full": lambda here: here.queue.full(),
    "QueueHandle.shutdown": lambda here: here.queue.shutdown(),
    "Queue.get": lambda here: here.mine.get(timeout=TIME),
    "Queue.get_nowait": lambda here: here.mine.get_nowait(),
}
# What makes one of the above, with the time that it has; and the end of the worker, which is tried last.
_MAKERS = {
    "peer",
    "group",
    "queue",
    "Worker.peer",
    "Worker.group",
    "Worker.queue",
    "Worker.Queue",
    "Worker.subscribe",
    "Worker.wait_for",
}
_LAST = {"shutdown", "Worker.shutdown", "drain", "Worker.drain"}


def test_no_verb_with_a_time_is_left_out() -> None:
    """Each public function and method that takes one is tried below, and each method of a handle of a queue."""
    found = set()
    for name in (*rpc.__all__, *rpc.types.__all__):
        public = getattr(rpc.types, name, None) or getattr(rpc, name)
        if inspect.isfunction(public):
            found |= {name} & _with_time({name: public})
        elif inspect.isclass(public):
            found |= {f"{name}.{each}" for each in _with_time(vars(public)) if not each.startswith("_")}
    found |= {
        f"QueueHandle.{each}" for each in vars(rpc.types.QueueHandle) if not each.startswith("_") and each != "bind"
    }
    assert found == {verb.partition(",")[0] for verb in VERBS} & found | (_MAKERS | _LAST) & found


def _with_time(functions: Any) -> set[str]:
    return {
        name
        for name, each in functions.items()
        if inspect.isfunction(each) and "timeout" in inspect.signature(each).parameters
    }


@pytest.mark.slow
async def test_every_verb_ends_when_its_time_is_up() -> None:
    """The other worker is stopped, and neither answers nor is gone; to leave takes no longer than it may, either."""
    with processes() as children, meeting_file() as method, ThreadPoolExecutor(len(VERBS)) as threads:
        first, own = places(2, method)
        child = children.start(first, be_stopped)
        options = rpc.RpcBackendOptions(rpc_timeout=NEVER)
        worker = rpc.init("w1", rank=1, world_size=2, init_method=own.init_method, options=options)
        await worker
        try:
            mine: rpc.Queue[Any] = rpc.Queue("mine", 1, timeout=TIME)
            publication = await rpc.publish("mine", torch.ones(1))
            await asyncio.to_thread(child.hear)
            ref, refs = rpc.remote("w0", Box), rpc.group(["w0"]).remote(Box)
            assert await ref.rpc_async().get() == 1 and (await refs.rpc_async().get()).values() == [1]
            queue = rpc.queue("theirs", owner="w0", timeout=TIME)
            assert await queue.empty()
            await until(mine.full)
            await child.stop()
            try:
                publication = await rpc.publish("mine", torch.zeros(1))
                here = Here(queue, mine, ref, refs, publication, threads)
                ends = await asyncio.gather(*(end_of(verb, here) for verb in VERBS.values()))
            finally:
                child.kill(signal.SIGCONT)
                child.tell("go on")
            expected = (rpc.RpcTimeout, rpc.errors.GroupError)
            odd = {verb: end for verb, end in zip(VERBS, ends, strict=True) if type(end) not in expected}
            assert isinstance(odd.pop("wait_for"), rpc.errors.UnknownWorker)  # in a group of fixed size that is known
            delivery = odd.pop("Publication.delivered")
            assert [each.name for each in delivery.missing] == ["w0"] and not odd, (delivery, odd)
        finally:
            await worker.shutdown(timeout=TIME)


async def end_of(verb: Callable[[Here], Any], here: Here) -> Any:
    """What it ends with: as a rule an error."""
    end: Any
    try:
        async with asyncio.timeout(MOST):  # raised as TimeoutError, which no verb raises
            end = await verb(here)
            end = end.values() if isinstance(end, rpc.types.Outcomes) else end
    except Exception as error:
        end = error
    return end
