"""Contexts: where they go with a call, that they do not mix, and how they end."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import aiorpc
from aiorpc import NotAllowed, RpcBackendOptions, RpcUsageError, Worker, autograd
from aiorpc.autograd.contexts import forget, has_ended
from aiorpc.autograd.wire import unpack_ids
from aiorpc.errors import PeerLeft, SerializationError, WouldBlockLoop
from aiorpc.testing import cluster
from tests.autograd import parts
from tests.autograd.parts import Tensor, check, expected, gradients_of, inside, outside, step, vector, weight_of
from tests.runtime.waiting import LIMIT, until
from tests.scripts import make_current

# --- ids --------------------------------------------------------------------------------------------------------------


async def test_an_id_is_an_int_and_travels_as_one(workers: list[Worker]) -> None:
    """Pickled, or sent to a worker, it arrives as a plain int of the same value; the functions take either."""
    async with autograd.context() as ctx:
        for copy in (pickle.loads(pickle.dumps(ctx)), await workers[0].call("worker1", parts.echo, ctx)):
            assert type(copy) is int and copy == ctx and hash(copy) == hash(ctx)
            assert autograd.get_gradients(copy) == ctx.gradients() == {}


# --- the ways it takes ------------------------------------------------------------------------------------------------


def _sync(worker: Worker, x: Tensor) -> Any:
    return aiorpc.rpc_sync("worker1", parts.layer, args=(x,))


def _remote(worker: Worker, x: Tensor) -> Any:
    return aiorpc.remote("worker1", parts.layer, x).to_here()


def _proxy_sync(worker: Worker, x: Tensor) -> Any:
    return aiorpc.remote("worker1", parts.Layer).rpc_sync().forward(x)


async def _call(worker: Worker, x: Tensor) -> Any:
    return await worker.call("worker1", parts.layer, x)


async def _reference(worker: Worker, x: Tensor) -> Any:
    return await worker.remote("worker1", parts.layer, x)


async def _proxy(worker: Worker, x: Tensor) -> Any:
    return await worker.remote("worker1", parts.Layer).rpc_async().forward(x)


async def _sent_parameter(worker: Worker, x: Tensor) -> Tensor:
    return step(x, await worker.remote("worker1", parts.Layer).rpc_async().get_weight())


async def _then(worker: Worker, x: Tensor) -> Tensor:
    future = worker.call("worker1", parts.echo, x)
    return await future.then(lambda done: worker.call("worker1", parts.layer, done.wait()).wait())


async def _coroutine(worker: Worker, x: Tensor) -> Any:
    return await worker.call("worker1", parts.layer_async, x)


async def _deferred(worker: Worker, x: Tensor) -> Any:
    return await worker.call("worker1", parts.layer_deferred, x)


async def _by_value(worker: Worker, x: Tensor) -> Any:
    return await worker.call("worker1", lambda x: step(x, parts.weight(0)), x)


WAYS = [_call, _reference, _proxy, _sent_parameter, _then, _coroutine, _deferred, _by_value]
BLOCKING_WAYS = [_sync, _remote, _proxy_sync]


async def _compare(ctx: autograd.Context, workers: list[Worker], x: Tensor, y: Tensor) -> None:
    """y is one layer of worker 1 over x."""
    await ctx.backward([y.sum()])
    w = weight_of(workers[1], 0)
    of_x, of_w = expected(step(x, w).sum(), [x, w])
    check(gradients_of(workers[0], ctx), [(x, of_x)])
    check(gradients_of(workers[1], ctx), [(w, of_w)])


@pytest.mark.parametrize("way", WAYS)
async def test_each_awaited_way_of_calling_carries_it(
    workers: list[Worker], way: Callable[[Worker, Tensor], Awaitable[Tensor]]
) -> None:
    """Argument and result are part of the graph, whatever verb and whatever kind of handler."""
    x = vector()
    async with autograd.context() as ctx:
        await _compare(ctx, workers, x, await way(workers[0], x))


@pytest.mark.parametrize("way", BLOCKING_WAYS)
async def test_each_blocking_way_of_calling_carries_it(
    workers: list[Worker], way: Callable[[Worker, Tensor], Tensor]
) -> None:
    """The same for the verbs of scripts, and `with`."""

    def script() -> None:
        x, w = vector(), weight_of(workers[1], 0)
        with autograd.context() as context_id:
            y = way(workers[0], x)
            autograd.backward(context_id, [y.sum()])
            of_x, of_w = expected(step(x, w).sum(), [x, w])
            check(autograd.get_gradients(context_id), [(x, of_x)])
            check(gradients_of(workers[1], context_id), [(w, of_w)])

    await asyncio.to_thread(script)
    await until(lambda: not any(len(worker._node.gradients) for worker in workers))


@pytest.mark.parametrize("handler", [parts.layers, parts.layers_async])
async def test_streams_carry_it(workers: list[Worker], handler: Any) -> None:
    """Each item has its place in the graph; items may lead to each other at the sender."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        items = [item async for item in workers[0].stream("worker1", handler, x)]
        await ctx.backward([torch.stack(items).sum()])
        of_x, of_w = expected(torch.stack(list(_three(x, w))).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


def _three(x: Tensor, w: Tensor) -> Any:
    for _ in range(3):
        x = step(x, w)
        yield x


@pytest.mark.parametrize("handler", [parts.via, parts.via_async, parts.via_deferred])
async def test_nested_calls_carry_it_to_a_third_worker(workers: list[Worker], handler: Any) -> None:
    """A handler of any kind that calls another worker takes the context along."""
    x, w1, w2 = vector(), weight_of(workers[1], 0), weight_of(workers[2], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", handler, x, "worker2")
        await ctx.backward([y.sum()])
        of_x, of_w1, of_w2 = expected(step(step(step(x, w1), w2), w1).sum(), [x, w1, w2])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w1, of_w1)])
        check(gradients_of(workers[2], ctx), [(w2, of_w2)])
        assert await workers[0].call("worker2", parts.context_here) == ctx


async def test_a_call_without_tensors_carries_it_too(workers: list[Worker]) -> None:
    """What is called only passes the context on: the tensors come with the next call."""

    async def relay() -> Any:
        return await aiorpc.call("worker2", parts.context_here)

    assert await workers[0].call("worker1", relay) is None
    async with autograd.context() as ctx:
        assert await workers[0].call("worker1", relay) == ctx
    assert await workers[0].call("worker1", relay) is None


async def test_outside_of_a_context_gradients_do_not_travel(workers: list[Worker]) -> None:
    """A result that required gradients is a tensor like others for whoever gets it."""
    y = await workers[0].call("worker1", parts.layer, vector())
    assert y.is_leaf and [len(worker._node.gradients) for worker in workers] == [0, 0, 0]


class _Scaled:
    """A batched method: tensors of several calls are worked on at once."""

    def __init__(self) -> None:
        self.weight = parts.weight(0)
        self.sizes: list[int] = []

    @aiorpc.batched(max_size=2, max_wait=30.0)
    def forward(self, xs: Any) -> Any:
        """One layer."""
        self.sizes.append(len(xs))
        return step(torch.stack(list(xs)), self.weight)

    def sizes_so_far(self) -> list[int]:
        """How many calls each batch had."""
        return self.sizes


async def test_a_batch_of_calls_of_one_context(workers: list[Worker]) -> None:
    """Calls that a batched handler served at once have the gradients of calls one by one."""
    x, z, w = vector(1), vector(2), weight_of(workers[1], 0)
    batched = workers[0].remote("worker1", _Scaled)
    async with autograd.context() as ctx:
        u, v = await asyncio.gather(batched.rpc_async().forward(x), batched.rpc_async().forward(z))
        await ctx.backward([(u * u).sum() + v.sum()])
        u, v = step(x, w), step(z, w)
        of_x, of_z, of_w = expected((u * u).sum() + v.sum(), [x, z, w])
        check(gradients_of(workers[0], ctx), [(x, of_x), (z, of_z)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])
    assert await batched.rpc_async().sizes_so_far() == [2]


async def test_a_batch_of_calls_of_two_contexts(workers: list[Worker]) -> None:
    """One batch serves calls of two contexts, whose graphs are one then: to go backward through it is refused."""
    weight_of(workers[1], 0)
    batched = workers[0].remote("worker1", _Scaled)
    ready = asyncio.Barrier(2)

    async def one(seed: int) -> None:
        x = vector(seed)
        async with autograd.context() as ctx:
            y = await batched.rpc_async().forward(x)
            async with ready:  # both are open while one of them goes backward
                with pytest.raises(RpcUsageError, match="must not gather calls of several contexts"):
                    await ctx.backward([(y * seed).sum()])
            check(gradients_of(workers[0], ctx), [])
            check(gradients_of(workers[1], ctx), [])
            await ready.wait()

    async with asyncio.timeout(20):
        await asyncio.gather(one(1), one(2))
    assert await batched.rpc_async().sizes_so_far() == [2]


# --- several at once --------------------------------------------------------------------------------------------------


async def _train(worker: Worker, seed: int, workers: list[Worker]) -> None:
    x = vector(seed)
    w1, w2 = weight_of(workers[1], 0), weight_of(workers[2], 0)
    async with autograd.context() as ctx:
        y = await worker.call("worker1", parts.via_async if seed % 2 else parts.via, x, "worker2")
        await asyncio.sleep(0)
        await ctx.backward([(y * seed).sum()])  # type: ignore[attr-defined, operator]
        of_x, of_w1, of_w2 = expected((step(step(step(x, w1), w2), w1) * seed).sum(), [x, w1, w2])
        check(gradients_of(worker, ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w1, of_w1)])
        check(gradients_of(workers[2], ctx), [(w2, of_w2)])


async def test_contexts_of_many_tasks_do_not_mix(workers: list[Worker]) -> None:
    """Tasks that each have a context open at the same time each see the gradients of their own loss alone."""
    async with asyncio.timeout(30):
        await asyncio.gather(*(_train(workers[0], seed, workers) for seed in range(12)))


async def test_contexts_of_many_threads_do_not_mix(workers: list[Worker]) -> None:
    """The same for threads."""
    w = weight_of(workers[1], 0)
    together = threading.Barrier(4)

    def script(seed: int) -> None:
        x = vector(seed)
        with autograd.context() as context_id:
            y = aiorpc.rpc_sync("worker1", parts.layer, args=(x,))
            together.wait(20)
            autograd.backward(context_id, [(y * seed).sum()])
            of_x, of_w = expected((step(x, w) * seed).sum(), [x, w])
            check(autograd.get_gradients(context_id), [(x, of_x)])
            check(gradients_of(workers[1], context_id), [(w, of_w)])
            together.wait(20)

    await asyncio.gather(*(asyncio.to_thread(script, seed) for seed in range(1, 5)))


async def test_nested_contexts(workers: list[Worker]) -> None:
    """Inside of the inner one calls belong to it alone; when it is left, to the outer one again."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as outer:
        y = await workers[0].call("worker1", parts.layer, x)
        async with autograd.context() as inner:
            assert await workers[0].call("worker1", parts.context_here) == inner
            z = await workers[0].call("worker1", parts.layer, x)
            await inner.backward([(3 * z).sum()])
            of_x, of_w = expected((3 * step(x, w)).sum(), [x, w])
            check(gradients_of(workers[0], inner), [(x, of_x)])
            check(gradients_of(workers[1], inner), [(w, of_w)])
        await until(lambda: [len(worker._node.gradients) for worker in workers] == [1, 1, 0])
        assert outer.gradients() == {}
        assert await workers[0].call("worker1", parts.context_here) == outer
        await outer.backward([y.sum()])
        check(gradients_of(workers[1], outer), [(w, expected(step(x, w).sum(), [w])[0])])


async def test_a_handler_opens_a_context_of_its_own(workers: list[Worker]) -> None:
    """Inside of a handler a context of its own hides that of the caller, which comes back behind it."""
    x, w = vector(), weight_of(workers[2], 0)

    async def handler() -> tuple[int | None, int, int | None, Tensor]:
        async with autograd.context() as own:
            inside = await aiorpc.call("worker2", parts.context_here)
            y = await aiorpc.call("worker2", parts.layer, vector())
            await own.backward([y.sum()])
            (gradient,) = own.gradients().values()
        return inside, int(own), await aiorpc.call("worker2", parts.context_here), gradient

    async with autograd.context() as ctx:
        inside, own, behind, gradient = await workers[0].call("worker1", handler)
        assert inside == own != ctx and behind == ctx
    torch.testing.assert_close(gradient, expected(step(x, w).sum(), [x])[0], rtol=0, atol=1e-12)


async def test_a_tensor_of_another_context_ends_the_pass(workers: list[Worker]) -> None:
    """What came in one context cannot be differentiated in another: an error, not a gradient that is missing."""
    async with autograd.context():
        y = await workers[0].call("worker1", parts.layer, vector())
        async with autograd.context() as inner:
            z = await workers[0].call("worker1", parts.layer, y)
            with pytest.raises(RpcUsageError):
                await inner.backward([z.sum()])


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_leaving_releases_it_everywhere(workers: list[Worker]) -> None:
    """When the block has ended all workers drop graph and gradients, also those the opener never called."""
    x = vector()
    held = weakref.ref(x)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.via, x, "worker2")
        await ctx.backward([y.sum()])
        contexts = [weakref.ref(worker._node.gradients.get(ctx)) for worker in workers]
        assert [len(worker._node.gradients) for worker in workers] == [1, 1, 1]
    await until(lambda: not any(len(worker._node.gradients) for worker in workers))
    del x, y
    # A thread that had a part in it may be on its way out still.
    await until(lambda: gc.collect() >= 0 and held() is None and not any(context() for context in contexts))


async def test_one_caller_may_bring_so_many_contexts() -> None:
    """Calls in a further one are refused, with the option as the reason, until one of them has ended."""
    options = [RpcBackendOptions(), RpcBackendOptions(max_contexts=3), RpcBackendOptions()]
    async with cluster(3, options=options) as workers:
        make_current(workers[0])
        async with autograd.context():
            async with autograd.context(), autograd.context():
                for _ in range(2):
                    await workers[0].call("worker1", parts.context_here)
                await _in_one_more(workers[0])
                await _in_one_more(workers[0])
            await until(lambda: not len(workers[1]._node.gradients))
            contexts = [autograd.context() for _ in range(3)]
            for each in contexts:
                await each.__aenter__()
                assert await workers[0].call("worker1", parts.context_here)
            async with autograd.context() as further:
                for function in (parts.context_here, parts.layer):
                    with pytest.raises(aiorpc.Overloaded, match=r"3 autograd contexts.*max_contexts"):
                        await workers[0].call("worker1", function, *[vector()][: function is parts.layer])  # type: ignore[call-overload]
                assert await workers[2].call("worker1", len, "abc") == 3
                make_current(workers[2])
                async with autograd.context():
                    assert await workers[2].call("worker1", parts.context_here)
                make_current(workers[0])
                await contexts.pop().__aexit__(None, None, None)
                await until(lambda: len(workers[1]._node.gradients) == 2)
                assert await workers[0].call("worker1", parts.context_here) == further
            for each in contexts:
                await each.__aexit__(None, None, None)
        await until(lambda: not any(len(worker._node.gradients) for worker in workers))


async def _in_one_more(worker: Worker) -> None:
    async with autograd.context() as ctx:
        assert await worker.call("worker1", parts.context_here) == ctx


@pytest.mark.parametrize("limit", ["max_pending_calls", "max_queued_calls", "max_queued_bytes", "max_call_rate"])
async def test_the_end_is_told_whatever_else_there_is(limit: str) -> None:
    """No limit of users' calls refuses it, at the opener or where it is told, nor the end of a pass that failed."""
    limits = {
        "max_pending_calls": RpcBackendOptions(max_pending_calls=1),
        "max_queued_calls": RpcBackendOptions(max_queued_calls=1),
        "max_queued_bytes": RpcBackendOptions(max_queued_bytes=1 << 20),
        "max_call_rate": RpcBackendOptions(max_call_rate=4),
    }
    at_opener = limit == "max_pending_calls"
    options = [limits[limit] if at_opener else RpcBackendOptions(), RpcBackendOptions() if at_opener else limits[limit]]
    async with cluster(2, options=options) as workers:
        make_current(workers[0])
        async with asyncio.timeout(LIMIT), autograd.context() as ctx:
            y = await workers[0].call("worker1", parts.layer, vector())
            busy = workers[0].call("worker1", _never, torch.zeros(1 << 20))
            await until(lambda: workers[1].statistics().calls_running == 1)
            with pytest.raises(aiorpc.Overloaded, match=limit):
                while True:
                    await workers[0].call("worker1", parts.echo, bytes(1 << 10))  # with next to nothing it has room
            y.register_hook(_fail)
            with pytest.raises(ArithmeticError, match="in a hook"):
                await ctx.backward([y.sum()])
            await until(lambda: workers[1]._node.gradients.get(ctx).passed)
        await until(lambda: not any(len(worker._node.gradients) for worker in workers))
        busy.cancel()


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError("in a hook")


async def _never(value: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("blocking", [False, True])
async def test_the_end_is_told_by_a_handler_whose_time_is_up(workers: list[Worker], blocking: bool) -> None:
    """A context that it leaves then ends on the other workers, too."""
    with pytest.raises(aiorpc.RpcTimeout):
        await workers[0].peer("worker1", timeout=0.3).call(_leave_late if blocking else _leave_late_on_loop)
    await until(lambda: not any(len(worker._node.gradients) for worker in workers))


async def _leave_late_on_loop() -> None:
    async with autograd.context():
        await aiorpc.call("worker2", parts.layer, vector())
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)  # its time is up here, too


def _leave_late() -> None:
    with autograd.context():
        aiorpc.rpc_sync("worker2", parts.layer, args=(vector(),))
        while not aiorpc.cancelled():
            time.sleep(0.01)
        time.sleep(0.05)


@pytest.mark.parametrize("through", ["", "worker1"])
async def test_a_worker_that_comes_after_the_end(through: str) -> None:
    """A call that waits for it belongs to the context: whoever has made it tells of the end, too."""
    store = HashStore()
    async with cluster(2, dynamic=True, store=store) as workers:
        make_current(workers[0])
        async with autograd.context():
            if through:
                await workers[0].call(through, _call_and_go_on, "late")
            else:
                call = workers[0].call("late", parts.layer, vector())
        assert not len(workers[0]._node.gradients)
        await until(lambda: not len(workers[1]._node.gradients))
        late = await Worker("late", world_size=None, store=store)
        await until(lambda: late.statistics().calls_served >= 1)
        if not through:
            assert (await call).shape == vector().shape
        await until(lambda: not len(late._node.gradients))
        await late.shutdown(graceful=False)


def _call_and_go_on(to: str) -> None:
    aiorpc.rpc_async(to, parts.layer, args=(vector(),))


async def test_an_exception_inside_releases_it_too(workers: list[Worker]) -> None:
    """The exception of the block comes out, and no context is left."""
    with pytest.raises(ZeroDivisionError):
        async with autograd.context():
            await workers[0].call("worker1", parts.via, vector(), "worker2")
            raise ZeroDivisionError
    await until(lambda: not any(len(worker._node.gradients) for worker in workers))

    def script() -> None:
        with autograd.context():
            aiorpc.rpc_sync("worker1", parts.layer, args=(vector(),))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(script)
    await until(lambda: not any(len(worker._node.gradients) for worker in workers))


async def test_a_context_in_an_async_generator_whose_consumer_stops(workers: list[Worker]) -> None:
    """The task that closes the generator leaves the context everywhere; the consumer can open another one."""
    worse: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: worse.append(context))

    async def losses() -> AsyncIterator[float]:
        while True:
            async with autograd.context() as ctx:
                y = await workers[0].call("worker1", parts.via, vector(), "worker2")
                await ctx.backward([y.sum()])
                yield y.sum().item()

    for _ in range(3):
        async for _ in losses():
            break
        await until(lambda: not any(len(worker._node.gradients) for worker in workers))
        async with autograd.context() as ctx:
            await ctx.backward([(await workers[0].call("worker1", parts.layer, vector())).sum()])
            assert len(ctx.gradients()) == 1
    loop.set_exception_handler(None)
    assert not worse, worse


async def test_contexts_that_are_not_left_in_the_reverse_order(workers: list[Worker]) -> None:
    """As those of two generators that take turns: the end of the first one leaves calls in the other as they are."""
    first, second = autograd.context(), autograd.context()
    await first.__aenter__()
    ctx = await second.__aenter__()
    await first.__aexit__(None, None, None)
    x = vector()
    y = await workers[0].call("worker1", parts.layer, x)
    await ctx.backward([y.sum()])
    assert x in ctx.gradients()
    await second.__aexit__(None, None, None)


async def test_what_makes_contexts_one_at_a_time_has_no_second_one(workers: list[Worker]) -> None:
    """It is refused while the first one is open, which goes on; then the same object opens the next one."""
    maker = autograd.context()
    async with maker as first:
        with pytest.raises(RpcUsageError, match=f"autograd context {int(first)} .* is still open"):
            await maker.__aenter__()
        assert await workers[0].call("worker1", parts.context_here) == first and first.gradients() == {}
        assert len(workers[0]._node.gradients) == 1
    async with maker as second:
        assert second != first
    assert not len(workers[0]._node.gradients)


async def test_a_context_that_another_thread_leaves(workers: list[Worker]) -> None:
    """As a generator is closed by whoever drops it last: it is left everywhere, and that thread has no context then."""

    def enter() -> Generator[None, None, None]:
        with autograd.context():
            aiorpc.rpc_sync("worker1", parts.layer, args=(vector(),))
            yield

    entered = enter()
    await asyncio.to_thread(next, entered)
    assert len(workers[1]._node.gradients) == 1

    def leave() -> int | None:
        entered.close()
        return aiorpc.rpc_sync("worker1", parts.context_here)

    assert await asyncio.to_thread(leave) is None
    await until(lambda: not any(len(worker._node.gradients) for worker in workers))


async def test_use_after_it_was_left_raises(workers: list[Worker]) -> None:
    """The id names nothing any more, on any worker, and the error says so."""
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, vector())
    match = f"Could not find autograd context with id: {int(ctx)} on worker 'worker0'"
    with pytest.raises(RpcUsageError, match=match):
        ctx.gradients()
    with pytest.raises(RpcUsageError, match=match):
        await ctx.backward([y.sum()])
    with pytest.raises(RpcUsageError, match=match):
        autograd.get_gradients(ctx)
    with pytest.raises(RpcUsageError, match="on worker 'worker1'"):
        await workers[0].call("worker1", parts.gradient_here, ctx, 0)
    with pytest.raises(RpcUsageError, match=match):
        await asyncio.to_thread(autograd.backward, ctx, [y.sum()])


@pytest.mark.parametrize("wrong", [None, "1", 1.0, True])
async def test_what_is_no_id_is_refused(workers: list[Worker], wrong: Any) -> None:
    """A context is named by an int; anything else is an error of usage."""
    root = vector().sum()
    with pytest.raises(RpcUsageError):
        await asyncio.to_thread(autograd.backward, wrong, [root])
    with pytest.raises(RpcUsageError):
        autograd.get_gradients(wrong)


async def test_plain_with_on_the_loop_is_refused(workers: list[Worker]) -> None:
    """So is `backward`; the errors say what to write instead, and nothing was opened."""
    with pytest.raises(WouldBlockLoop, match=r"async with autograd\.context\(\) as ctx"), autograd.context():
        pass
    assert len(workers[0]._node.gradients) == 0
    async with autograd.context() as ctx:
        with pytest.raises(WouldBlockLoop, match=r"await ctx\.backward\(roots\)"):
            autograd.backward(ctx, [vector().sum()])


class _Gate:
    """Calls that wait until they may go on."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self.waiting = 0

    async def open(self) -> None:
        """Let them go on."""
        self._open.set()

    async def layer(self, x: Tensor) -> Tensor:
        """One layer, then."""
        await self._open.wait()
        return parts.layer(x)

    async def context_of(self, to: str) -> tuple[int | None, bool]:
        """The context that a call from here is part of then, and whether gradients would travel with it."""
        await self._open.wait()
        y = await aiorpc.call(to, parts.layer, vector())
        return await aiorpc.call(to, parts.context_here), not y.is_leaf


async def test_what_could_not_be_sent_is_not_remembered(workers: list[Worker]) -> None:
    """A call, or a result, that cannot be encoded leaves nothing of its tensors."""
    x = vector()
    async with autograd.context() as ctx:
        with pytest.raises(SerializationError):
            await workers[0].call("worker1", parts.echo, [x, threading.Lock()])
        assert not workers[0]._node.gradients.get(ctx).sent
        with pytest.raises(SerializationError):
            await workers[0].call("worker1", lambda x: [x, threading.Lock()], x)
        assert len(workers[0]._node.gradients.get(ctx).sent) == 1 and not workers[1]._node.gradients.get(ctx).sent


async def test_a_call_that_is_cancelled_takes_no_part(workers: list[Worker]) -> None:
    """Whose result nobody waits for any more: a pass over other results does not wait for it either."""
    x, w = vector(), weight_of(workers[1], 0)
    gate = workers[0].remote("worker2", _Gate)
    async with autograd.context() as ctx:
        call = gate.rpc_async().layer(x)
        await until(lambda: len(workers[2]._node.gradients) == 1)
        call.cancel()
        y = await workers[0].call("worker1", parts.layer, x)
        await ctx.backward([y.sum()])
        check(gradients_of(workers[0], ctx), [(x, expected(step(x, w).sum(), [x])[0])])
        await gate.rpc_async().open()


async def test_a_call_that_comes_late_does_not_open_it_again(workers: list[Worker]) -> None:
    """A worker that was told of the end serves a call of the context as one of none."""
    gate = workers[0].remote("worker1", _Gate)
    async with autograd.context():
        call = gate.rpc_async().context_of("worker2")
        await until(lambda: len(workers[1]._node.gradients) == 1)
    await gate.rpc_async().open()
    assert await asyncio.wait_for(call, 10) == (None, False)
    await until(lambda: not any(len(worker._node.gradients) for worker in workers))


async def test_leaving_while_the_first_call_is_under_way() -> None:
    """A call that was not awaited, to a worker that was never called before, leaves no context there."""
    async with cluster(3) as workers:
        make_current(workers[0])
        for name in ("worker1", "worker2"):
            async with autograd.context():
                call = workers[0].call(name, parts.via, vector(), "worker1" if name == "worker2" else "worker2")
            await asyncio.wait([asyncio.ensure_future(_outcome(call))], timeout=30)
            await until(lambda: not any(len(worker._node.gradients) for worker in workers))


async def _outcome(call: Any) -> Any:
    return await call


async def test_a_worker_that_leaves_takes_part_no_more() -> None:
    """One that took part has left before the end of the context: leaving it neither fails nor waits."""
    store = HashStore()
    async with cluster(2, dynamic=True, store=store) as workers:
        make_current(workers[0])
        third = await Worker("worker2", world_size=None, store=store)
        async with asyncio.timeout(20):
            async with autograd.context():
                await workers[0].call("worker2", parts.via, vector(), "worker1")
                await third.shutdown(graceful=False)
            await until(lambda: not any(len(worker._node.gradients) for worker in workers))


class _Held(torch.autograd.Function):
    """Its backward waits until the test lets it go on."""

    entered, go_on = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _Held.entered.set()
        assert _Held.go_on.wait(20)
        return gradients[0]


def _held(x: Tensor) -> Tensor:
    return parts.apply(_Held, x)


async def test_a_worker_that_leaves_hears_that_a_pass_has_failed() -> None:
    """It waits for its part of one that it has accepted, refuses what else the pass asks for, and then goes at once."""
    async with cluster(3, dynamic=True, options=RpcBackendOptions(rpc_timeout=0)) as workers:
        make_current(workers[0])
        _Held.entered.clear()
        _Held.go_on.clear()
        async with asyncio.timeout(20), autograd.context() as ctx:
            y = await workers[0].call("worker2", _held, await workers[0].call("worker1", parts.layer, vector()))
            backward = asyncio.ensure_future(ctx.backward([y.sum()]))
            await until(_Held.entered.is_set)
            await until(lambda: workers[1]._node.gradients.get(ctx).parts)
            leaving = asyncio.ensure_future(workers[1].shutdown())
            await until(lambda: workers[1]._node.engine.lifetime.parting)
            _Held.go_on.set()
            with pytest.raises(PeerLeft, match="is draining"):
                await backward
            await leaving


async def test_when_its_opener_leaves_the_others_release_it() -> None:
    """A worker that is gone leaves its contexts, everywhere."""
    store = HashStore()
    async with cluster(2, dynamic=True, store=store) as workers:
        third = await Worker("worker2", world_size=None, store=store)
        make_current(third)
        context = autograd.context()
        await context.__aenter__()
        await third.call("worker0", parts.via, vector(), "worker1")
        assert [len(worker._node.gradients) for worker in workers] == [1, 1]
        await third.shutdown(graceful=False)
        await until(lambda: not any(len(worker._node.gradients) for worker in workers))
        async with asyncio.timeout(10):
            await context.__aexit__(None, None, None)


async def test_nobody_ends_the_contexts_of_others(workers: list[Worker]) -> None:
    """Whoever takes part and says that it has ended has its opener asked first; others have nobody asked."""
    x = vector()
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        for name in ("worker0", "worker1"):
            assert unpack_ids(await outside(workers[2].call, name, forget, int(ctx))) == []
        assert not workers[1]._node.gradients.doubted
        await workers[0].call("worker2", parts.via, vector(), "worker1")  # and so it takes part
        for name in ("worker0", "worker1"):
            assert unpack_ids(await outside(workers[2].call, name, forget, int(ctx))) == []
        await until(lambda: not workers[1]._node.gradients.doubted)
        assert len(workers[0]._node.gradients) == 1 and workers[1]._node.gradients.find(ctx) is not None
        await ctx.backward([y.sum()])
        assert x in ctx.gradients()


async def test_ids_of_contexts_and_passes_cannot_be_guessed(workers: list[Worker]) -> None:
    """Two of one worker have the worker's own bits in common, and no more than random ones have besides."""
    ids = [workers[1]._node.gradients.new_id() for _ in range(200)]
    assert all(0 < id < 1 << 63 for id in ids)
    ones = [sum(id >> bit & 1 for id in ids) for bit in range(63)]
    assert all(40 < count < 160 for count in ones[:48]) and set(ones[48:]) <= {0, 200}


async def test_a_call_that_is_refused_makes_nobody_take_part() -> None:
    """Neither in a context that is there, nor in one that it would bring; and so does one of the runtime's handlers."""
    nothing = RpcBackendOptions(allow={"actor": [], "*": "*"})
    store = HashStore()
    async with (
        Worker("worker0", world_size=None, store=store, options=nothing) as learner,
        Worker("worker1", world_size=None, store=store, role="actor") as actor,
    ):
        make_current(learner)
        ours = learner._node.gradients.open()
        for context_id in (ours.id, actor._node.gradients.open().id, actor._node.gradients.new_id()):
            with inside(actor, context_id):
                with pytest.raises(NotAllowed):
                    await actor.call("worker0", parts.layer, vector())
                assert (await actor.call("worker0", has_ended, ours.id)) is False
        assert not ours.known and len(learner._node.gradients) == 1
        learner._node.gradients.leave(ours.id)
