"""Objects with names: called from other workers, in each manner; gone with their worker, and back with another one."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc as rpc
from aiorpc import NotAllowed, RpcBackendOptions, RpcUsageError, Worker
from aiorpc.errors import UnknownObject
from aiorpc.testing import cluster
from tests.runtime.bad_member import method_of
from tests.runtime.waiting import until, until_no_references

QUICK = (0.001, 0.01)


@rpc.exposed
class Buffer:
    """Methods of each mode."""

    kept = "a value"

    def __init__(self, *items: Any) -> None:
        self.items = [*items]
        self.released = threading.Event()

    def put(self, item: Any, *, times: int = 1) -> int:
        self.items += [item] * times
        return len(self.items)

    async def size(self) -> int:
        return len(self.items)

    def all(self) -> Iterator[Any]:
        yield from self.items

    async def aall(self) -> AsyncIterator[Any]:
        for each in self.items:
            yield each

    @rpc.async_execution
    def later(self) -> rpc.Future[str]:
        future: rpc.Future[str] = rpc.Future()
        future.set_result("later")
        return future

    @rpc.batched(max_size=1)
    def doubled(self, numbers: list[int]) -> list[int]:
        return [2 * each for each in numbers]

    def fail(self) -> None:
        raise KeyError("no")

    def held(self) -> str:
        assert self.released.wait(30)
        return "done"

    def remote(self) -> str:
        return "its own"

    def __call__(self, x: int) -> int:
        return -x

    def _secret(self) -> None:
        """Not for others."""


async def test_methods_are_called_in_each_mode(pair: list[Worker]) -> None:
    """Plain ones, coroutines, deferred and batched ones, and the object itself; also by its own worker."""
    pair[1].serve("buffer", Buffer())
    for worker in pair:
        buffer = worker.peer("worker1").object("buffer")
        assert isinstance(buffer, rpc.types.ObjectHandle)
        count = await buffer.size()
        assert await buffer.put(torch.ones(2), times=2) == count + 2
        assert await buffer.size() == count + 2
        assert (await buffer.later(), await buffer.doubled(4), await buffer(3)) == ("later", 8, -3)
        with pytest.raises(KeyError, match="no") as raised:
            await buffer.fail()
        assert "buffer.fail" in str(raised.value.__cause__)


async def test_the_manners_of_references_are_those_of_objects(pair: list[Worker]) -> None:
    """Futures, blocking, references of results, and a method whose name the handle has itself."""
    pair[1].serve("buffer", Buffer(1, 2))
    buffer = pair[0].peer("worker1").object("buffer")
    assert await asyncio.to_thread(buffer.rpc_sync().put, 3) == 3  # type: ignore[arg-type]
    with pytest.raises(rpc.errors.WouldBlockLoop, match="put"):
        buffer.rpc_sync().put(3)
    assert await buffer.rpc_async(timeout=20).size() == 3
    assert await buffer.rpc_async().remote() == "its own"
    assert await buffer.rpc_async()(5) == -5
    count = buffer.remote().put(4)
    assert await count == 4
    assert await count.rpc_async().bit_length() == 3
    del count
    await until_no_references(pair)


async def test_generators_of_an_object_are_streams(pair: list[Worker]) -> None:
    """Also those of a value that is referred to."""
    pair[1].serve("buffer", Buffer(*range(50)))
    buffer = pair[0].peer("worker1").object("buffer")
    assert [each async for each in buffer.stream().all()] == [*range(50)]
    assert [each async for each in buffer.stream(timeout=20).aall()] == [*range(50)]
    ref = pair[0].remote("worker1", Buffer, 1, 2)
    assert [each async for each in ref.stream().all()] == [1, 2]
    assert [each async for each in ref.stream().aall()] == [1, 2]
    with pytest.raises(RpcUsageError, match=r"Buffer\.fail is no generator"):
        async for _ in ref.stream().fail():
            raise AssertionError("it yields nothing")
    del ref
    await until_no_references(pair)


async def test_an_object_that_is_not_served_is_named_with_those_that_are(pair: list[Worker]) -> None:
    """The error says which worker, which object and what to do, and is a LookupError."""
    with pytest.raises(UnknownObject, match=r"'worker1' serves no object 'a', whose put.*serves none.*rpc.serve\('a'"):
        await pair[0].peer("worker1").object("a").put(1)
    pair[1].serve("b", Buffer())
    with pytest.raises(LookupError, match="it serves 'b'") as raised:
        await pair[0].peer("worker1").object("a").put(1)
    error = raised.value
    assert isinstance(error, UnknownObject)
    assert (error.worker, error.name, error.names) == ("worker1", "a", ("b",))


async def test_bad_names_and_bad_objects_are_refused_before_anything_is_sent(pair: list[Worker]) -> None:
    """At the owner and at the caller."""
    sent = pair[0].statistics().calls_made
    bad: list[Any] = ["", "with space", 5, "x" * 200]
    for name in bad:
        with pytest.raises(RpcUsageError, match="Object name must"):
            pair[0].peer("worker1").object(name)
        with pytest.raises(RpcUsageError, match="Object name must"):
            pair[1].serve(name, Buffer())
    with pytest.raises(RpcUsageError, match="None"):
        pair[1].serve("a", None)
    for worker in pair:
        ref = pair[0].remote("worker0", Buffer)
        with pytest.raises(RpcUsageError, match="serve the value itself"):
            worker.serve("a", ref)
    del ref
    given: Any = "yes"
    with pytest.raises(RpcUsageError, match="replace must be True or False"):
        pair[1].serve("a", Buffer(), replace=given)
    with pytest.raises(AttributeError, match=r"'_secret' of .* is private"):
        pair[0].peer("worker1").object("a")._secret()
    with pytest.raises(AttributeError, match="private"):
        pair[0].peer("worker1").object("a").rpc_async().__len__()
    assert pair[0].statistics().calls_made == sent + 2  # those that made the references
    await until_no_references(pair)


async def test_a_name_is_served_once_unless_it_is_replaced(pair: list[Worker]) -> None:
    """The error says what is served; replaced and closed objects let go of what they hold."""
    first = pair[1].serve("buffer", Buffer(1))
    with pytest.raises(RpcUsageError, match=r"serves an object 'buffer' already, a Buffer.*replace=True"):
        pair[1].serve("buffer", Buffer(2))
    second = pair[1].serve("buffer", Buffer(2, 3), replace=True)
    first.close()
    buffer = pair[0].peer("worker1").object("buffer")
    assert await buffer.size() == 2
    second.close()
    second.close()
    with pytest.raises(UnknownObject):
        await buffer.size()
    with pair[1].serve("buffer", Buffer()):
        assert await buffer.size() == 0
    with pytest.raises(UnknownObject):
        await buffer.size()


async def test_calls_under_way_go_on_when_their_object_is_served_no_longer(pair: list[Worker]) -> None:
    """Until they end they keep it; then nothing does."""
    value = Buffer()
    gone = weakref.ref(value)
    served = pair[1].serve("buffer", value)
    call = pair[0].peer("worker1").object("buffer").held()
    await until(lambda: any(each.direction == "served" for each in pair[1].pending_calls()))
    assert [each.function for each in pair[1].pending_calls()] == ["Buffer.held"]
    served.close()
    value.released.set()
    assert await call == "done"
    del value, served, call

    def collected() -> bool:
        gc.collect()
        return gone() is None

    await until(collected)


async def test_an_object_goes_with_its_worker() -> None:
    """What was served is let go of, and serving raises from then on."""
    store = HashStore()
    worker = Worker("a", store=store)
    value: Buffer | None = Buffer()
    gone = weakref.ref(value)
    worker.serve("buffer", value)
    value = None
    await worker
    assert gone() is not None
    await worker.shutdown()
    gc.collect()
    assert gone() is None
    with pytest.raises(rpc.WorkerClosed):
        worker.serve("buffer", Buffer())


async def test_an_object_comes_back_with_the_worker_that_takes_the_name() -> None:
    """What was served before joining is there at once; handles with retries wait for what is served later."""
    store = HashStore()
    options = RpcBackendOptions(rpc_timeout=30)
    async with Worker("caller", store=store, options=options) as caller:
        first = Worker("owner", store=store)
        first.serve("buffer", Buffer(1))
        await first
        plain = caller.peer("owner", wait=True).object("buffer")
        patient = caller.peer("owner", wait=True, retries=1000, backoff=QUICK).object("buffer")
        assert (await plain.size(), await patient.size()) == (1, 1)
        await first.shutdown()
        late = plain.size()
        second = Worker("owner", store=store)
        second.serve("buffer", Buffer(1, 2))
        await second
        assert await late == 2
        await second.shutdown()
        async with Worker("owner", store=store) as third:
            call = patient.size()
            await until(lambda: caller.statistics().calls_retried >= 2)
            third.serve("buffer", Buffer(1, 2, 3))
            assert await call == 3
            with pytest.raises(RpcUsageError, match=r"remote\(\) is not tried again"):
                patient.remote().size()
            with pytest.raises(RpcUsageError, match=r"stream\(\) is not tried again"):
                patient.stream().all()
            with pytest.raises(KeyError):
                await patient.fail()


@pytest.mark.parametrize("allow", [[rpc.exposed], ["tests.runtime.test_objects:Buffer.*"]])
async def test_rights_hold_for_methods_of_objects(allow: Any) -> None:
    """What the rule does not have is refused, and who is limited is not told which objects there are."""
    options = [RpcBackendOptions(), RpcBackendOptions(allow=allow)]
    async with cluster(2, options=options) as (worker, owner):
        owner.serve("buffer", Buffer())
        owner.serve("list", [])
        peer = worker.peer("worker1")
        assert await peer.object("buffer").put(1) == 1
        assert [each async for each in peer.object("buffer").stream().all()] == [1]
        with pytest.raises(NotAllowed, match=r"builtins:list\.append"):
            await peer.object("list").append(1)
        with pytest.raises(UnknownObject) as raised:
            await peer.object("other").append(1)
        assert raised.value.names == () and "list" not in str(raised.value)


async def test_rights_hold_for_objects_by_their_names() -> None:
    """Which methods of which object, whatever its class; a method of one is none of another, nor of a reference."""
    allow = ["object/first:put", "object/other:*", "object/list:append", f"{__name__}:make_buffer"]
    async with cluster(2, options=[RpcBackendOptions(), RpcBackendOptions(allow=allow)]) as (worker, owner):
        for name in ("first", "second", "other"):
            owner.serve(name, Buffer())
        owner.serve("list", [])
        object = worker.peer("worker1").object
        for _ in range(2):  # what is known of a method of a class says nothing of its rights
            assert await object("first").put(1)
            with pytest.raises(NotAllowed, match=r"Buffer\.size"):
                await object("first").size()
            with pytest.raises(NotAllowed, match=r"Buffer\.put"):
                await object("second").put(1)
            assert await object("other").size() == 0
            with pytest.raises(NotAllowed, match=r"Buffer\.put"):
                await worker.remote("worker1", make_buffer).rpc_async().put(1)
        await object("list").append(1)
        with pytest.raises(NotAllowed):
            await object("list").clear()


def make_buffer() -> Buffer:
    return Buffer()


async def test_an_attribute_of_an_object_is_called_if_it_is_named() -> None:
    """It may be anything: a pattern with wildcards is for methods alone."""
    allow = {"a": "object/box:*", "b": "object/box:run"}
    async with cluster(3, options=RpcBackendOptions(allow=allow), roles=["", "a", "b"]) as workers:
        workers[0].serve("box", Holder(abs))
        with pytest.raises(NotAllowed, match="run"):
            await workers[1].peer("worker0").object("box").run(-1)
        assert await workers[2].peer("worker0").object("box").run(-1) == 1


class Holder:
    """It has a function of others as an attribute."""

    def __init__(self, run: Any) -> None:
        self.run = run


async def test_private_methods_are_refused_by_the_owner(pair: list[Worker]) -> None:
    """Also when the caller does not look; what is not callable is said to be that."""
    pair[1].serve("buffer", Buffer())
    peer = pair[0]._node.peers.find("worker1")
    for name in ("_secret", "__init__", "__reduce__", "__class__"):
        with pytest.raises(RpcUsageError, match=f"{name} of the object 'buffer' is private"):
            await peer.call(method_of("buffer", name), (), None, 20.0)
    with pytest.raises(RpcUsageError, match="'kept' of Buffer is not callable"):
        await pair[0].peer("worker1").object("buffer").kept()
    with pytest.raises(AttributeError, match="nothing"):
        await pair[0].peer("worker1").object("buffer").nothing()


async def test_objects_are_served_where_nothing_is_pickled() -> None:
    """Arguments and results are as those of functions; errors keep what is plain of them."""
    async with cluster(2, options=RpcBackendOptions(serialization="safe", allow="*")) as (worker, owner):
        owner.serve("buffer", Buffer())
        buffer = worker.peer("worker1").object("buffer")
        assert await buffer.put({"x": torch.ones(2)}) == 1
        assert [each["x"].sum().item() async for each in buffer.stream().all()] == [2.0]
        with pytest.raises(UnknownObject) as raised:
            await worker.peer("worker1").object("other").put(1)
        assert (raised.value.worker, raised.value.name) == ("worker1", "other")


async def test_the_verb_serves_at_the_worker_that_is_current() -> None:
    """`rpc.serve` and `rpc.peer` of the block, over a stream that its consumer leaves."""
    async with rpc.init("a", store=HashStore()):
        with rpc.serve("buffer", Buffer(1, 2)) as served:
            assert repr(served) == "<aiorpc.serve 'buffer' on worker 'a'>"
            async with rpc.peer("a").object("buffer").stream().all() as items:
                assert await anext(items) == 1
    with pytest.raises(rpc.errors.NotInitialized):
        rpc.serve("buffer", Buffer())
