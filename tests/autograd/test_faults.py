"""Contexts and backward passes in real processes, of which some are killed or stopped."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import pytest
import torch

import aiorpc as rpc
from aiorpc import PeerLost, autograd
from tests.autograd import parts
from tests.autograd.parts import Tensor, apply, expected, step, vector
from tests.processes.workers import Link, Place, group, own_fork_server, until
from tests.scripts import set_bounds

BOUND = 40.0  # seconds; a pass has 60 by default, so an error that comes by then was told, not waited for


@pytest.fixture(scope="module", autouse=True)
def _own_fork_server(_own_temporary_directory: None) -> None:
    own_fork_server()


class _Stuck(torch.autograd.Function):
    """A node whose backward takes far too long, and says when it is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Wait."""
        _stuck.append(True)
        time.sleep(120)
        return grads[0]


_stuck: list[bool] = []  # of this process


def stuck_layer(x: Tensor) -> Tensor:
    """One layer that never comes back from its backward."""
    y: Tensor = apply(_Stuck, parts.layer(x))
    return y


def is_stuck() -> bool:
    """Whether a backward has come to such a layer here."""
    return bool(_stuck)


def open_contexts() -> int:
    """How many there are at this worker."""
    return len(rpc.current()._node.gradients)


def parts_under_way(context_id: int) -> int:
    """How many passes of a context this worker takes part in right now."""
    return len(rpc.current()._node.gradients.get(context_id).parts)


def weight_now(k: int = 0) -> Tensor:
    """The values of a parameter."""
    return parts.weight(k).detach()


def stay(place: Place, link: Link) -> None:
    """Serve until told to leave: who waits in `shutdown` does not wait long once another worker was lost."""
    place.init_rpc()
    link.hear(BOUND)
    rpc.shutdown()


async def released(*names: str) -> bool:
    """Whether these workers have no context."""
    return [await rpc.call(name, open_contexts) for name in names] == [0] * len(names)


async def test_a_worker_killed_in_the_middle_of_a_pass_ends_it_at_once() -> None:
    """PeerLost names it; workers that wait for its gradients stop; leaving the context releases the others."""
    async with group(3, stay, ended=("w1",)) as (worker, children), asyncio.timeout(BOUND):
        async with autograd.context() as ctx:
            y = await rpc.call("w2", parts.layer, vector())
            z = await rpc.call("w1", stuck_layer, y)
            running = ctx.backward([z.sum()])
            await until(lambda: rpc.call("w1", is_stuck))

            async def has(count: int) -> bool:
                return int(await rpc.call("w2", parts_under_way, ctx)) == count

            await until(lambda: has(1))  # w1 may have been told of the pass long before w2
            children["w1"].kill()
            with pytest.raises(PeerLost, match="w1"):
                await running
            await until(lambda: has(0))
            again = await rpc.call("w2", parts.layer, vector())
            await ctx.backward([again.sum()])  # the context is still good for those that live
        assert len(worker._node.gradients) == 0 and await released("w2")
        children["w2"].tell("leave")


async def test_a_worker_killed_before_the_pass_fails_it_at_once() -> None:
    """A pass that needs the graph of a dead worker fails; one that does not need it goes on."""
    async with group(3, stay, ended=("w1",)) as (worker, children), asyncio.timeout(BOUND):
        async with autograd.context() as ctx:
            x = vector()
            y = await rpc.call("w2", parts.layer, x)
            z = await rpc.call("w1", parts.layer, y)
            children["w1"].kill()
            with pytest.raises(PeerLost, match="w1"):
                await ctx.backward([z.sum() + y.sum()])
            await ctx.backward([y.sum()])
            w = await rpc.call("w2", weight_now)
            wanted = expected(step(x, w).sum(), [x])[0]
            torch.testing.assert_close(ctx.gradients()[x], wanted, rtol=0, atol=1e-12)
        assert len(worker._node.gradients) == 0 and await released("w2")
        children["w2"].tell("leave")


async def test_a_context_is_released_by_the_others_when_one_that_took_part_was_killed() -> None:
    """Also by those that only the dead one had called."""
    async with group(3, stay, ended=("w1",)) as (worker, children), asyncio.timeout(BOUND):
        async with autograd.context():
            await rpc.call("w1", parts.via, vector(), "w2")
            children["w1"].kill()
        assert len(worker._node.gradients) == 0
        await until(lambda: released("w2"))
        children["w2"].tell("leave")


def _open_and_wait(place: Place, link: Link) -> None:
    if place.name != "w1":
        stay(place, link)
        return
    place.init_rpc()
    with autograd.context():
        rpc.rpc_sync("w0", parts.via, args=(vector(), "w2"))
        link.tell("inside")
        time.sleep(120)


async def test_a_context_is_released_when_its_opener_was_killed() -> None:
    """All workers that took part forget it, without anybody telling them."""
    async with group(3, _open_and_wait, ended=("w1",)) as (worker, children), asyncio.timeout(BOUND):
        assert await children["w1"].ahear() == "inside"
        assert len(worker._node.gradients) == 1 == await rpc.call("w2", open_contexts)
        children["w1"].kill()
        await until(lambda: len(worker._node.gradients) == 0)
        await until(lambda: released("w2"))
        children["w2"].tell("leave")


async def test_contexts_do_not_pile_up_at_a_stopped_worker() -> None:
    """Leaving one waits until those that took part have dropped the one before."""
    async with group(2) as (worker, children), asyncio.timeout(BOUND):
        set_bounds(worker, leave_context=BOUND)
        under_way = []

        async def use() -> None:
            async with autograd.context():
                under_way.append(rpc.call("w1", parts.layer, vector()))

        await rpc.call("w1", parts.layer, vector())
        await children["w1"].stop()
        try:
            await use()
            second = asyncio.create_task(use())
            await until(lambda: len(under_way) == 2 and len(worker._node.gradients) == 0)
            done, _ = await asyncio.wait([second], timeout=0.2)
            assert not done
        finally:
            children["w1"].kill(signal.SIGCONT)
        await second
        await asyncio.gather(*map(outcome_of, under_way))
        await until(lambda: released("w1"))
        await until(lambda: not worker._node.gradients.farewells)


async def outcome_of(call: Any) -> Any:
    """A Future's value, in a coroutine."""
    return await call


async def test_leaving_does_not_wait_for_a_stopped_worker() -> None:
    """It is given up after a while, not long; the worker forgets the context when it goes on."""
    async with group(3) as (worker, children), asyncio.timeout(BOUND):
        set_bounds(worker, leave_context=0.5)
        async with autograd.context():
            await rpc.call("w1", parts.via, vector(), "w2")
            await children["w1"].stop()
        try:
            assert len(worker._node.gradients) == 0
        finally:
            children["w1"].kill(signal.SIGCONT)
        await until(lambda: released("w1", "w2"))


def _train(place: Place, link: Link) -> None:
    place.init_rpc()
    if place.name == "w1":
        x = vector()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("w0", parts.layer, args=(x,))
            reference = rpc.remote("w2", parts.Layer)
            z = reference.rpc_async().forward(y).wait()
            autograd.backward(context_id, [z.sum()])
            w, v = rpc.rpc_sync("w0", weight_now), rpc.rpc_sync("w2", weight_now)
            of_v = rpc.rpc_sync("w2", parts.gradient_here, args=(context_id, 0))
            link.tell((x, autograd.get_gradients(context_id)[x], w, v, of_v))
        link.tell((rpc.rpc_sync("w2", open_contexts), len(rpc.current()._node.gradients)))
    rpc.shutdown()


async def test_a_script() -> None:
    """The blocking names in processes of their own, written as for torch."""
    async with group(3, _train) as (worker, children), asyncio.timeout(BOUND):
        x, of_x, w, v, of_v = await children["w1"].ahear()
        v.requires_grad_()
        wanted = expected(step(step(x, w), v).sum(), [x, v])
        torch.testing.assert_close([of_x, of_v], wanted, rtol=0, atol=1e-12)
        assert await children["w1"].ahear() == (0, 0)
        await until(lambda: len(worker._node.gradients) == 0)  # w1 has nothing else to tell us, and waits a little


def _leave_suddenly(place: Place, link: Link) -> None:
    place.init_rpc()
    if place.name == "w1":
        link.hear()
        rpc.shutdown(graceful=False)
        _left.set()
        return
    rpc.shutdown()


async def test_a_worker_that_leaves_in_the_middle_of_a_pass_ends_it() -> None:
    """One that shuts down without waiting for others is as good as lost: an RpcError, at once."""
    async with group(2, _leave_suddenly) as (worker, children), asyncio.timeout(BOUND):
        async with autograd.context() as ctx:
            y = await rpc.call("w1", slow_layer, vector())
            running = ctx.backward([y.sum()])
            await until(lambda: rpc.call("w1", is_stuck))
            children["w1"].tell("leave")
            with pytest.raises(rpc.RpcError):
                await running
        assert len(worker._node.gradients) == 0


class _Slow(torch.autograd.Function):
    """A node that is stuck until its worker leaves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Wait, in bounds."""
        _stuck.append(True)
        _left.wait(BOUND)
        return grads[0]


_left = threading.Event()  # of this process


def slow_layer(x: Tensor) -> Tensor:
    """One layer with a slow backward."""
    y: Tensor = apply(_Slow, parts.layer(x))
    return y
