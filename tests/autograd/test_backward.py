"""Backward passes: what gets a gradient and what does not, how often hooks run, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
import weakref
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils.checkpoint import checkpoint

import aiorpc
from aiorpc import RpcBackendOptions, RpcCancelled, RpcTimeout, RpcUsageError, Worker, autograd
from aiorpc.autograd import engine as autograd_engine
from aiorpc.autograd.parts import abort, gather, go_on, part_of
from aiorpc.autograd.wire import MORE, from_wire, pack_names, to_wire
from aiorpc.runtime.calls.current import current_node
from aiorpc.runtime.gradients.reach import SentName
from aiorpc.testing import cluster
from tests.autograd import parts
from tests.autograd.parts import SIZE, Tensor, apply, check, expected, gradients_of, step, vector, weight_of
from tests.runtime import hostile
from tests.runtime.waiting import LIMIT, until
from tests.unlooked import unlooked_at

double = torch.float64
NOTHING = to_wire({})  # no gradients
MOST = 3000  # instructions: more than any of this takes

# --- messages ---------------------------------------------------------------------------------------------------------


def test_short_gradients_that_were_expanded_are_sent_dense() -> None:
    """As that of a sum is; a long one goes as the one element that it has, and others go as they are."""
    short, long, turned = torch.ones(()).expand(2, 2), torch.ones(()).expand(100, 100), torch.ones(2, 3).t()
    gradients = {SentName(1, place): each for place, each in enumerate((short, long, turned, None))}
    packed, *sent = to_wire(gradients)
    assert torch.equal(sent[0], short) and sent[0].stride() == (2, 1)
    assert len(sent) == 3 and sent[1] is long and sent[2] is turned
    assert [each is None for each in from_wire(packed, sent)[0].values()] == [False, False, False, True]


async def test_a_gradient_that_goes_to_and_fro_takes_two_messages() -> None:
    """The question that brings it, and the answer that brings the next one back."""
    length, x = 4, vector()
    alone = RpcBackendOptions(shared_memory=0)  # of which links speak soon after they have met
    async with cluster(3, options=alone) as workers:
        current_node.set(workers[0]._node)
        async with autograd.context() as ctx:
            y = x
            for _ in range(length):
                y = await workers[0].call("worker1", torch.mul, y, 2)
            before = [worker.statistics().messages_sent for worker in workers]
            await ctx.backward([y.sum()])
            sent = [worker.statistics().messages_sent - was for worker, was in zip(workers, before, strict=True)]
            assert sent == [length, length, 0]
            torch.testing.assert_close(ctx.gradients()[x], torch.full_like(x, 2.0**length))


async def test_gradients_are_kept_no_longer_than_they_are_needed(workers: list[Worker]) -> None:
    """Where one goes to and fro there are a few at a time, and not one for each call until the pass has ended."""
    length, x = 30, vector()
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    x.register_hook(lambda _: alive.append(sum(each() is not None for each in seen)))
    async with autograd.context() as ctx:
        y = x
        for _ in range(length):
            z = y * 2
            z.register_hook(lambda gradient: seen.append(weakref.ref(gradient)))
            y = await workers[0].call("worker1", parts.echo, z)
        await ctx.backward([y.sum()])
        torch.testing.assert_close(ctx.gradients()[x], torch.full_like(x, 2.0**length))
    assert len(seen) == length and alive and alive[0] < 10


@pytest.mark.parametrize("watched", ["", "hook", "retain_grad"])
async def test_a_loss_of_all_results_of_a_chain_goes_through_its_graph_a_few_times(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, watched: str
) -> None:
    """And not once for each call, though each result has its whole gradient only when the next call has been gone
    through. A result whose gradient the program sees is seen once, with the whole of it."""
    length, x, w = 12, vector(), weight_of(workers[1], 0)
    runs: list[int] = []

    def counted(tensors: Any, *args: Any, **options: Any) -> Any:
        runs.append(sum(type(each) is GradientEdge and each.node is root for each in tensors))
        return _engine_run_backward(tensors, *args, **options)

    monkeypatch.setattr(autograd_engine, "_engine_run_backward", counted)
    seen = Seen()
    async with autograd.context() as ctx:
        y, loss, results = x, torch.zeros((), dtype=double), list[Tensor]()
        for _ in range(length):
            y = await workers[0].call("worker1", parts.layer, y)
            results.append(y)
            loss = loss + (y * y).sum()
        middle = results[length // 2]
        if watched == "hook":
            middle.register_hook(seen)
        elif watched == "retain_grad":
            middle.retain_grad()
        root = loss.grad_fn
        await ctx.backward([loss])
        y, loss, results = x, torch.zeros((), dtype=double), []
        for _ in range(length):
            y = step(y, w)
            results.append(y)
            loss = loss + (y * y).sum()
        of_x, of_w, of_middle = expected(loss, [x, w, results[length // 2]])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])
        if watched == "hook":
            seen.once(of_middle)
        elif watched == "retain_grad":
            torch.testing.assert_close(middle.grad, of_middle)
    assert 1 <= sum(map(bool, runs)) <= 2


@pytest.mark.parametrize("retain", [False, True])
async def test_the_graph_is_gone_as_far_as_a_pass_has_come(workers: list[Worker], retain: bool) -> None:
    """What nodes have saved is let go when they have run, as in one process, and not when the context ends."""
    length, x = 5, vector()
    saved: list[weakref.ref[Saved]] = []

    def pack(tensor: Tensor) -> Saved:
        kept = Saved(tensor.detach())
        saved.append(weakref.ref(kept))
        return kept

    async with autograd.context() as ctx:
        y = x
        for _ in range(length):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
                z = y.sin()
            y = await workers[0].call("worker1", parts.layer_async, z)
        await ctx.backward([y.sum()], retain_graph=retain)
        assert [each() is not None for each in saved] == [retain] * length
        if retain:
            await ctx.backward([y.sum()])
        y = x
        for _ in range(length):
            y = step(y.sin(), weight_of(workers[1], 0))
        (of_x,) = expected(y.sum(), [x])
        torch.testing.assert_close(ctx.gradients()[x], of_x * (2 if retain else 1), rtol=0, atol=1e-12)


class Saved:
    """What a node has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


async def test_what_a_worker_tells_of_its_graph_does_not_grow_with_the_square_of_it(workers: list[Worker]) -> None:
    """In a recurrent net whose state stays here each tensor that is sent leads to all that have come before it."""
    length, x, w = 200, vector(), weight_of(workers[1], 0)
    workers[0]._node.gradients.most_behind = -1
    async with autograd.context() as ctx:
        y = x
        for _ in range(length):
            y = torch.tanh(y * 0.5 + await workers[0].call("worker1", parts.layer_async, y))
        (first, *_) = workers[0]._node.gradients.get(ctx).sent
        told = await workers[0].call("worker0", gather, int(ctx), pack_names([first]))
        assert len(told) < 200 * length  # with a name for each of them, 800
        await ctx.backward([y.sum()])
        y = x
        for _ in range(length):
            y = torch.tanh(y * 0.5 + step(y, w))
        of_x, of_w = expected(y.sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


async def test_questions_that_come_late(workers: list[Worker]) -> None:
    """Of a part that is done there is nothing more to say; of one that failed, why."""
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, vector())
        await ctx.backward([y.sum()])
        context = workers[1]._node.gradients.get(ctx)
        (number,) = context.passed
        assert await workers[0].call("worker1", go_on, int(ctx), number, *NOTHING) == to_wire({}, MORE)[0]
        part_of(workers[1]._node, context, number + 1).fail(ValueError("as it was"))
        with pytest.raises(ValueError, match="as it was"):
            await workers[0].call("worker1", go_on, int(ctx), number + 1, *NOTHING)


async def test_who_does_not_run_a_pass_is_told_nothing_of_it(workers: list[Worker]) -> None:
    """A question of another worker is refused, and that of the one who runs it stays open."""
    async with autograd.context() as ctx:
        await workers[0].call("worker1", parts.layer, vector())
        await workers[2].call("worker1", parts.layer, vector())
        question = workers[0].call("worker1", go_on, int(ctx), 1, *NOTHING)
        await until(lambda: 1 in workers[1]._node.gradients.get(ctx).parts)
        with pytest.raises(aiorpc.RpcError, match="worker 2 does not run this backward pass"):
            await workers[2].call("worker1", go_on, int(ctx), 1, *NOTHING)
        assert not question.done()
        second = workers[0].call("worker1", go_on, int(ctx), 1, *NOTHING)
        assert await question == to_wire({}, MORE)[0] and not second.done()
    with pytest.raises(aiorpc.RpcError, match="was left"):
        await second


# --- roots ------------------------------------------------------------------------------------------------------------


async def test_several_roots(workers: list[Worker]) -> None:
    """The pass computes the gradients of their sum; a root may be there twice, and may have any one-element shape."""
    x, w1, w2 = vector(), weight_of(workers[1], 0), weight_of(workers[2], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        z = await workers[0].call("worker2", parts.layer, x)
        first, second = y.sum(), (y * z).sum().reshape(1, 1)
        await ctx.backward([first, second, first])
        y, z = step(x, w1), step(x, w2)
        of_x, of_w1, of_w2 = expected(2 * y.sum() + (y * z).sum(), [x, w1, w2])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w1, of_w1)])
        check(gradients_of(workers[2], ctx), [(w2, of_w2)])


async def test_a_received_scalar_is_a_root(workers: list[Worker]) -> None:
    """A loss that came from another worker needs nothing done to it here."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        loss = await workers[0].call("worker1", _loss, x)
        await ctx.backward([loss])
        of_x, of_w = expected(step(x, w).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


def _loss(x: Tensor, k: int = 0) -> Tensor:
    return step(x, parts.weight(k)).sum()


def _backward_here(context_id: int, x: Tensor, to: str) -> None:
    loss = aiorpc.rpc_sync(to, parts.layer, args=(step(x, parts.weight(0)),)).sum()
    autograd.backward(context_id, [loss])


async def _backward_here_async(context_id: int, x: Tensor, to: str) -> None:
    loss = (await aiorpc.call(to, parts.layer, step(x, parts.weight(0)))).sum()
    await autograd.Context(context_id).backward([loss])


@pytest.mark.parametrize("handler", [_backward_here, _backward_here_async])
async def test_roots_at_another_worker(workers: list[Worker], handler: Any) -> None:
    """A handler runs the pass: gradients go to all workers, the caller that waits for it among them."""
    x, w1, w2 = vector(), weight_of(workers[1], 0), weight_of(workers[2], 0)
    async with autograd.context() as ctx:
        await workers[0].call("worker1", handler, ctx, x, "worker2")
        of_x, of_w1, of_w2 = expected(step(step(x, w1), w2).sum(), [x, w1, w2])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w1, of_w1)])
        check(gradients_of(workers[2], ctx), [(w2, of_w2)])


async def test_the_blocking_backward(workers: list[Worker]) -> None:
    """`autograd.backward` from a thread returns None when the gradients are there."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        await asyncio.to_thread(autograd.backward, ctx, [y.sum()])
        check(gradients_of(workers[1], ctx), [(w, expected(step(x, w).sum(), [w])[0])])


async def test_a_loss_of_this_worker_alone(workers: list[Worker]) -> None:
    """A pass without other workers is one too."""
    x = vector()
    async with autograd.context() as ctx:
        await ctx.backward([(x * x).sum()])
        check(ctx.gradients(), [(x, 2 * x.detach())])


REFUSED: list[tuple[Any, str]] = [
    ([], "No tensors provided"),
    (None, "must be a list"),
    (torch.ones(1, requires_grad=True).sum(), "must be a list"),
    ([1.0], "must be tensors, not float"),
    ([torch.ones(())], "requires_grad not set"),
    ([torch.ones((), requires_grad=True)], "does not have a valid gradient function"),
    ([torch.ones(2, requires_grad=True) * 2], "not a scalar"),
]


@pytest.mark.parametrize("roots, text", REFUSED, ids=[text for _, text in REFUSED])
async def test_roots_that_cannot_be(workers: list[Worker], roots: Any, text: str) -> None:
    """They are refused at once and say why, before anything was computed; the context stays usable."""
    x = vector()
    async with autograd.context() as ctx:
        good = (await workers[0].call("worker1", parts.layer, x)).sum()
        if isinstance(roots, list) and roots:
            roots = [good, *roots]
        with pytest.raises(RpcUsageError, match=text):
            ctx.backward(roots)
        with pytest.raises(RpcUsageError, match=text):
            await asyncio.to_thread(autograd.backward, ctx, roots)
        assert ctx.gradients() == gradients_of(workers[1], ctx) == {}
        await ctx.backward([good])
        assert len(ctx.gradients()) == 1


# --- graphs -----------------------------------------------------------------------------------------------------------


async def test_a_tensor_passed_on_through_workers(workers: list[Worker]) -> None:
    """Received and sent on unchanged, by some that only pass it on and some that also use it."""
    x, w = vector(), weight_of(workers[2], 0)
    async with autograd.context() as ctx:
        y = x * 3
        there = await workers[0].call("worker1", parts.echo, y)
        further = await workers[0].call("worker2", parts.echo, there)
        back = await workers[0].call("worker1", parts.echo, further)
        z = await workers[0].call("worker2", parts.layer, back)
        await ctx.backward([(z * there).sum()])
        y = x * 3
        of_x, of_w = expected((step(y, w) * y).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [])
        check(gradients_of(workers[2], ctx), [(w, of_w)])


async def test_a_parameter_used_by_many_calls(workers: list[Worker]) -> None:
    """Its gradients add up, of calls at the same time and of calls that follow each other."""
    xs, w = [vector(seed) for seed in range(8)], weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        ys = await asyncio.gather(*(workers[0].call("worker1", parts.layer, x) for x in xs))
        y = torch.stack(list(ys)).sum(0)
        for _ in range(3):
            y = await workers[0].call("worker1", parts.layer, y)
        await ctx.backward([y.sum()])
        y = torch.stack([step(x, w) for x in xs]).sum(0)
        for _ in range(3):
            y = step(y, w)
        *of_xs, of_w = expected(y.sum(), [*xs, w])
        check(gradients_of(workers[0], ctx), zip(xs, of_xs, strict=True))
        check(gradients_of(workers[1], ctx), [(w, of_w)])


def _with_reference(reference: Any, x: Tensor) -> Tensor:
    return step(x, reference.to_here())


async def _with_reference_async(reference: Any, x: Tensor) -> Tensor:
    return step(x, await reference)


def _own_weight() -> Tensor:
    return parts.weight(0)


@pytest.mark.parametrize("handler", [_with_reference, _with_reference_async])
@pytest.mark.parametrize("to", ["worker0", "worker1", "worker2"])
async def test_references_as_arguments(workers: list[Worker], handler: Any, to: str) -> None:
    """A handler uses the parameter that a reference names: its owner gets the gradient."""
    x, w = vector(), weight_of(workers[1], 0)
    reference = workers[0].remote("worker1", _own_weight)
    async with autograd.context() as ctx:
        y = await workers[0].call(to, handler, reference, x)
        await ctx.backward([y.sum()])
        of_x, of_w = expected(step(x, w).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


async def test_recurrent_use_of_a_remote_object(workers: list[Worker]) -> None:
    """State that stays at its owner between calls ties their graphs together."""
    xs, w = [vector(seed) for seed in range(6)], weight_of(workers[1], 0)
    cell = workers[0].remote("worker1", parts.Layer)
    async with autograd.context() as ctx:
        states = [await cell.rpc_async().recur(x) for x in xs]
        await ctx.backward([(states[-1] * states[2]).sum() + states[0].sum()])
        state, states = torch.zeros(SIZE, dtype=double), []
        for x in xs:
            state = torch.tanh(x @ w + state)
            states.append(state)
        *of_xs, of_w = expected((states[-1] * states[2]).sum() + states[0].sum(), [*xs, w])
        check(gradients_of(workers[0], ctx), zip(xs, of_xs, strict=True))
        check(gradients_of(workers[1], ctx), [(w, of_w)])


async def test_state_that_later_calls_depend_on_from_outside(workers: list[Worker]) -> None:
    """A call's argument comes from an earlier result while state stays: targets become ready one after the other."""
    x, w, v = vector(), weight_of(workers[1], 0), weight_of(workers[2], 0)
    cell = workers[0].remote("worker1", parts.Layer)
    async with autograd.context() as ctx:
        y = x
        for _ in range(4):
            y = await cell.rpc_async().recur(y)
            y = await workers[0].call("worker2", parts.layer_async, y)
        await ctx.backward([y.sum()])
        y, state = x, torch.zeros(SIZE, dtype=double)
        for _ in range(4):
            state = torch.tanh(y @ w + state)
            y = step(state, v)
        of_x, of_w, of_v = expected(y.sum(), [x, w, v])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])
        check(gradients_of(workers[2], ctx), [(v, of_v)])


async def test_results_that_the_loss_does_not_use(workers: list[Worker]) -> None:
    """Nobody waits for their gradients, and parameters that only they depend on get none."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        unused = await workers[0].call("worker2", parts.layer, x)
        further = await workers[0].call("worker1", parts.layer, unused, 1)
        y = await workers[0].call("worker1", parts.layer, x)
        await workers[0].call("worker2", parts.layer, y, 2)
        await ctx.backward([y.sum()])
        of_x, of_w = expected(step(x, w).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])
        check(gradients_of(workers[2], ctx), [])
        await ctx.backward([further.sum()])  # and what one pass left out is there for the next
        assert weight_of(workers[1], 1) in gradients_of(workers[1], ctx)


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    w, v = parts.weight(0), parts.weight(1)
    return step(x, w), step(x, v)


async def test_one_of_several_results_is_used(workers: list[Worker]) -> None:
    """The others of the same call get no gradient, and no zeros."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y, _unused = await workers[0].call("worker1", _two, x)
        await ctx.backward([y.sum()])
        of_x, of_w = expected(step(x, w).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


async def test_nothing_here_gets_a_gradient(workers: list[Worker]) -> None:
    """Arguments that require none are none of the graph's business."""
    w = weight_of(workers[1], 0)
    x = vector().detach()
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        await ctx.backward([y.sum()])
        check(ctx.gradients(), [])
        check(gradients_of(workers[1], ctx), [(w, expected(step(x, w).sum(), [w])[0])])


async def test_detached_and_no_grad(workers: list[Worker]) -> None:
    """What a handler detaches, or computes without gradients, ends the graph there."""

    def detach(x: Tensor) -> Tensor:
        return x.detach() * 2

    def no_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * 2

    x = vector()
    async with autograd.context() as ctx:
        for handler in (detach, no_grad):
            y = await workers[0].call("worker1", handler, x)
            assert not y.requires_grad
            await ctx.backward([(y * x).sum()])
        check(ctx.gradients(), [(x, 4 * x.detach())])


async def test_calls_under_no_grad(workers: list[Worker]) -> None:
    """The caller's `no_grad` is of its own thread: what it sends still requires gradients, as it says itself."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        with torch.no_grad():
            y = await workers[0].call("worker1", parts.layer, x)
        await ctx.backward([y.sum()])
        check(gradients_of(workers[1], ctx), [(w, expected(step(x, w).sum(), [w])[0])])


async def test_calls_under_no_grad_as_in_torch(workers: list[Worker]) -> None:
    """The drop-in's way: they record nothing, neither what is sent nor what a module behind them has."""
    for worker in workers:
        worker._node.gradients.as_torch = True
    x = vector()
    async with autograd.context() as ctx:
        with torch.no_grad():
            call = workers[0].call("worker1", parts.layer, x)
        y = await call
        assert y.is_leaf
        await ctx.backward([(y * x).sum()])
        check(gradients_of(workers[0], ctx), [(x, y.detach()), (y, x.detach())])
        assert workers[1]._node.gradients.find(ctx) is None


async def test_calls_in_inference_mode(workers: list[Worker]) -> None:
    """What leaves the mode of the caller's thread has its past all the same, a leaf's and another's."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        z = x * 2

        def make() -> list[Any]:
            with torch.inference_mode():
                return [workers[0].call("worker1", parts.layer, each) for each in (x, z)]

        one, two = [await call for call in await asyncio.to_thread(make)]
        await ctx.backward([(one + two).sum()])
        of_x, of_w = expected((step(x, w) + step(x * 2, w)).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


# --- repeated passes --------------------------------------------------------------------------------------------------


async def test_retained_graphs_and_repeated_passes(workers: list[Worker]) -> None:
    """With retain_graph a second pass adds to the gradients of the first; after one without, torch's error."""
    x, w1, w2 = vector(), weight_of(workers[1], 0), weight_of(workers[2], 0)
    of_x, of_w1, of_w2 = expected(step(step(step(x, w1), w2), w1).sum(), [x, w1, w2])
    async with autograd.context() as ctx:
        loss = (await workers[0].call("worker1", parts.via, x, "worker2")).sum()
        for n in (1, 2, 3):
            await ctx.backward([loss], retain_graph=n < 3)
            check(gradients_of(workers[0], ctx), [(x, n * of_x)])
            check(gradients_of(workers[1], ctx), [(w1, n * of_w1)])
            check(gradients_of(workers[2], ctx), [(w2, n * of_w2)])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            await ctx.backward([loss])
        loss = (await workers[0].call("worker1", parts.layer, x)).sum()
        await ctx.backward([loss])  # the context goes on


async def test_gradients_are_a_copy(workers: list[Worker]) -> None:
    """What `gradients` gave does not change with the next pass."""
    x = vector()
    async with autograd.context() as ctx:
        await ctx.backward([(2 * x).sum()])
        before = ctx.gradients()
        await ctx.backward([(2 * x).sum()])
        torch.testing.assert_close(before[x], torch.full_like(x, 2).detach())
        torch.testing.assert_close(ctx.gradients()[x], torch.full_like(x, 4).detach())
        before.clear()
        assert len(ctx.gradients()) == 1


async def test_passes_of_one_context_at_the_same_time(workers: list[Worker]) -> None:
    """Several passes over a retained graph run at once and add up."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        losses = [(y * factor).sum() for factor in range(1, 6)]
        await asyncio.gather(*(ctx.backward([loss], retain_graph=True) for loss in losses))
        of_x, of_w = expected(15 * step(x, w).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


# --- functions and nodes ----------------------------------------------------------------------------------------------


class Scale(torch.autograd.Function):
    """A Function with arguments that are no tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, name: str, flag: bool = False) -> Tensor:
        """x * factor."""
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """And back."""
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.factor + 0 * x, None, None, None


def _scaled(x: Tensor) -> Tensor:
    return apply(Scale, step(x, parts.weight(0)), 3.0, "three")


async def test_custom_functions(workers: list[Worker]) -> None:
    """They run at the worker that applied them, with complete gradients, once."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", _scaled, x)
        z = apply(Scale, y, 2.0, "two", True)
        await ctx.backward([(z * y).sum()])
        y = 3 * step(x, w)
        of_x, of_w = expected((2 * y * y).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


def _changed_later(x: Tensor) -> Tensor:
    y = torch.sigmoid(x * parts.weight(0)[0])
    z = y.exp()  # needs y and z as they are
    y.add_(1)
    return z * y


async def test_in_place_changes_of_saved_tensors_are_found(workers: list[Worker]) -> None:
    """torch's error, of whichever worker, reaches the caller."""
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", _changed_later, vector())
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            await ctx.backward([y.sum()])
        assert any("worker1" in note for note in caught.value.__notes__)


async def test_a_sent_tensor_that_is_changed_afterwards(workers: list[Worker]) -> None:
    """A tensor that was saved for its own past may not change after sending it either; one that was not, may."""
    x = vector()
    async with autograd.context() as ctx:
        y = x.exp()  # saves its result
        z = await workers[0].call("worker1", parts.layer, y)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            await ctx.backward([z.sum()])
        assert any("worker0" in note for note in caught.value.__notes__)
    w = weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y = x * 2
        z = await workers[0].call("worker1", parts.layer, y)
        y.mul_(5)  # now another tensor with another past
        await ctx.backward([z.sum() + y.sum()])
        of_x, of_w = expected(step(x * 2, w).sum() + (10 * x).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


def _in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    x += parts.weight(0)[0]
    x[1] = 0.5
    return x


async def test_in_place_operations_on_received_tensors(workers: list[Worker]) -> None:
    """A handler may write into what it received; the caller's tensor and the gradients are right."""
    x, w = vector(), weight_of(workers[1], 0)
    mask = torch.ones(SIZE, dtype=double)
    mask[1] = 0
    async with autograd.context() as ctx:
        y = x * 1
        z = await workers[0].call("worker1", _in_place, y)
        z.mul_(3)
        z.relu_()
        await ctx.backward([z.sum()])
        reference = ((2 * x + w[0]) * mask + (1 - mask) * 0.5) * 3
        of_x, of_w = expected(reference.relu().sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])
        torch.testing.assert_close(y, x * 1)


class Embedding:
    """A remote table with sparse gradients."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = torch.nn.Parameter(torch.randn(10, SIZE, dtype=double, generator=generator))

    def forward(self, indices: Tensor, *, dense: bool = False) -> Tensor:
        """Rows of the table."""
        return torch.nn.functional.embedding(indices, self.table, sparse=not dense)

    def gradient(self, context_id: int) -> tuple[bool, Tensor, Tensor]:
        """Whether it is sparse, the gradient, and the table."""
        (gradient,) = autograd.get_gradients(context_id).values()
        return gradient.is_sparse, gradient.to_dense(), self.table.detach()


@pytest.mark.parametrize("order", [(False, False), (False, True), (True, False)])
async def test_sparse_gradients(workers: list[Worker], order: tuple[bool, bool]) -> None:
    """They stay sparse and add up; with dense ones they become dense."""
    table = workers[0].remote("worker1", Embedding)
    indices = torch.tensor([1, 3, 3])
    x = vector()
    async with autograd.context() as ctx:
        for dense in order:
            y = await table.rpc_async().forward(indices, dense=dense)
            await ctx.backward([(y * x).sum()])
        is_sparse, gradient, values = await table.rpc_async().gradient(ctx)
        assert is_sparse == (order == (False, False))
        leaf = values.requires_grad_()
        loss = 2 * (torch.nn.functional.embedding(indices, leaf) * x).sum()
        of_x, of_table = expected(loss, [x, leaf])
        torch.testing.assert_close(gradient, of_table, rtol=0, atol=1e-12)
        check(ctx.gradients(), [(x, of_x)])


async def test_a_sparse_gradient_goes_to_another_worker(workers: list[Worker]) -> None:
    """A table that was sent as a parameter gets its gradient from where it was used."""
    table = torch.nn.Parameter(torch.randn(10, SIZE, dtype=double, generator=torch.Generator().manual_seed(1)))
    indices = torch.tensor([7, 0, 7])

    def look_up(indices: Tensor, table: Tensor) -> Tensor:
        return torch.nn.functional.embedding(indices, table, sparse=True).exp()

    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", look_up, indices, table)
        await ctx.backward([y.sum()])
        (gradient,) = ctx.gradients().values()
        wanted = expected(torch.nn.functional.embedding(indices, table).exp().sum(), [table])[0]
        torch.testing.assert_close(gradient.to_dense(), wanted, rtol=0, atol=1e-12)


def multiply(matrices: list[Tensor], other: Tensor) -> Tensor:
    """Handler: the first of some matrices, sparse ones, times another one."""
    product: Tensor = torch.sparse.mm(matrices[0], other)
    return product


def in_sparse(dense: Tensor, layout: torch.layout) -> Tensor:
    """Handler: the same matrix, twice as large."""
    return (dense * 2).to_sparse(layout=layout)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("is_leaf", [True, False])
async def test_sparse_tensors_that_are_sent(workers: list[Worker], layout: torch.layout, is_leaf: bool) -> None:
    """Arguments and results, also inside of containers: gradients go to where they came from."""
    dense = torch.diag(vector()).detach()
    matrix = dense.to_sparse(layout=layout).requires_grad_() if is_leaf else dense.requires_grad_()
    other = torch.randn(SIZE, SIZE, dtype=double, generator=torch.Generator().manual_seed(2)).requires_grad_()
    async with autograd.context() as ctx:
        sent = matrix if is_leaf else await workers[0].call("worker2", in_sparse, matrix, layout)
        y = await workers[0].call("worker1", multiply, [sent], other)
        await ctx.backward([(y * y).sum()])
        found = ctx.gradients()
    local = torch.sparse.mm(matrix if is_leaf else in_sparse(matrix, layout), other)
    wanted = expected((local * local).sum(), [matrix, other])
    assert set(found) == {matrix, other}
    assert found[matrix].layout == wanted[0].layout
    for leaf, gradient in zip((matrix, other), wanted, strict=True):
        torch.testing.assert_close(found[leaf].to_dense(), gradient.to_dense(), rtol=0, atol=1e-12)


async def test_attributes_of_a_sparse_tensor_travel_with_its_past(workers: list[Worker]) -> None:
    """As those of others do. Outside of a context, and once it was left, it arrives as a leaf."""
    matrix = torch.eye(SIZE, dtype=double).to_sparse().requires_grad_()
    matrix.label = "mine"  # type: ignore[attr-defined]  # tensors take attributes
    assert await workers[0].call("worker1", label_and_leaf, matrix) == ("mine", True)
    async with autograd.context():
        assert await workers[0].call("worker1", label_and_leaf, matrix) == ("mine", False)


def label_and_leaf(matrix: Tensor) -> tuple[str, bool]:
    """Handler."""
    return matrix.label, matrix.is_leaf  # type: ignore[attr-defined]  # it came with one


def _checkpointed(x: Tensor) -> Tensor:
    w = parts.weight(0)
    y: Tensor = checkpoint(lambda x: step(step(x, w), w).exp(), x, use_reentrant=False)
    return y * x


async def test_activation_checkpointing(workers: list[Worker]) -> None:
    """Non-reentrant checkpoints in handlers, and around what was received."""
    x, w = vector(), weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", _checkpointed, x)
        z: Any = checkpoint(lambda y: (y * x).sin(), y, use_reentrant=False)
        await ctx.backward([z.sum()])
        of_x, of_w = expected(((step(step(x, w), w).exp() * x) * x).sin().sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


async def test_a_local_backward_says_what_to_use(workers: list[Worker]) -> None:
    """`loss.backward()` and `torch.autograd.grad` cannot go through a received tensor; a local part works."""
    x = vector()
    async with autograd.context():
        y = await workers[0].call("worker1", parts.layer, x)
        with pytest.raises(RpcUsageError, match=r"use aiorpc\.autograd\.backward\(context_id, \[loss\]\)"):
            y.sum().backward()
        (of_y,) = torch.autograd.grad((y * y).sum(), [y])
        torch.testing.assert_close(of_y, 2 * y)
    assert x.grad is None


# --- hooks ------------------------------------------------------------------------------------------------------------


class Seen:
    """Gradients that a hook saw."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def __call__(self, gradient: Tensor) -> None:
        self.gradients.append(gradient.detach().clone())

    def once(self, wanted: Tensor) -> None:
        """It saw this and nothing else."""
        assert len(self.gradients) == 1, f"the hook ran {len(self.gradients)} times"
        torch.testing.assert_close(self.gradients[0], wanted, rtol=0, atol=1e-12)


async def test_hooks_run_once_with_complete_gradients(workers: list[Worker]) -> None:
    """On leaves, on tensors that were sent (twice, and used here too), and on received ones, used here and sent on."""
    x, w1, w2 = vector(), weight_of(workers[1], 0), weight_of(workers[2], 0)
    seen = {name: Seen() for name in ("x", "w1", "w2", "sent", "received")}
    for name, leaf in (("x", x), ("w1", w1), ("w2", w2)):
        leaf.register_hook(seen[name])
    async with autograd.context() as ctx:
        sent = x.exp()
        sent.register_hook(seen["sent"])
        received, other = await asyncio.gather(
            workers[0].call("worker1", parts.layer, sent), workers[0].call("worker2", parts.layer_async, sent)
        )
        received.register_hook(seen["received"])
        last = await workers[0].call("worker1", parts.layer_async, received + other)
        await ctx.backward([(last * received + sent * sent).sum()])

        y = x.exp()
        one, two = step(y, w1), step(y, w2)
        loss = (step(one + two, w1) * one + y * y).sum()
        of_x, of_w1, of_w2, of_y, of_one = expected(loss, [x, w1, w2, y, one])
        seen["sent"].once(of_y)
        seen["received"].once(of_one)
        for name, wanted in (("x", of_x), ("w1", of_w1), ("w2", of_w2)):
            assert seen[name].gradients.pop() is not None  # of `expected`, which goes through the same leaves
            seen[name].once(wanted)
        check(gradients_of(workers[0], ctx), [(x, of_x)])


class Kept:
    """A remote object that keeps what it received, for a later call."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.kept = torch.zeros(())

    def first(self, x: Tensor) -> Tensor:
        """Keep x."""
        self.kept = x
        x.register_hook(lambda _: self.seen.update(["received"]))
        return self._sent("first", x * parts.weight(0)[0])

    def second(self, x: Tensor) -> Tensor:
        """Use what was kept."""
        return self._sent("second", x * self.kept)

    def _sent(self, name: str, y: Tensor) -> Tensor:
        y.register_hook(lambda _: self.seen.update([name]))
        return y

    def counts(self) -> dict[str, int]:
        """How often the hooks ran."""
        return dict(self.seen)


@pytest.mark.xfail(reason="the node of `second` runs in two runs of the engine: passes.py says when", strict=True)
async def test_hooks_of_tensors_that_share_a_kept_graph(workers: list[Worker]) -> None:
    """Two results of one worker, where the second's gradient leads to the first's: each one's hooks run once."""
    x, w, v = vector(), weight_of(workers[1], 0), weight_of(workers[2], 0)
    kept = workers[0].remote("worker1", Kept)
    async with autograd.context() as ctx:
        y = await kept.rpc_async().first(x)
        z = await workers[0].call("worker2", parts.layer, y)
        last = await kept.rpc_async().second(z)
        await ctx.backward([last.sum()])
        of_x, of_w, of_v = expected((step(x * w[0], v) * x).sum(), [x, w, v])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])
        check(gradients_of(workers[2], ctx), [(v, of_v)])
    assert await kept.rpc_async().counts() == {"received": 1, "first": 1, "second": 1}


async def test_hooks_that_change_gradients(workers: list[Worker]) -> None:
    """A hook's result takes the gradient's place: on a leaf, on a sent tensor, and on a received one."""
    x, w = vector(), weight_of(workers[1], 1)
    w.register_hook(lambda g: g.clamp(-0.1, 0.1))

    def handler(x: Tensor) -> Tensor:
        x.register_hook(lambda g: g.clamp(-0.2, 0.2))
        y = step(x, parts.weight(1))
        y.register_hook(lambda g: g * 2)
        return y

    def local(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda g: g + 1)
        return y

    async with autograd.context() as ctx:
        y = local(await workers[0].call("worker1", handler, local(x)))
        await ctx.backward([y.sum()])
        z = local(x) * 1
        of_x, of_w = expected(local(handler_like(z, w)).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


def handler_like(x: Tensor, w: Tensor) -> Tensor:
    """The handler above with its parameter given."""
    x.register_hook(lambda g: g.clamp(-0.2, 0.2))
    y = step(x, w)
    y.register_hook(lambda g: g * 2)
    return y


class NodeHooks:
    """Hooks on the ``AccumulateGrad`` node of a leaf, which only lives as long as somebody holds it."""

    def __init__(self, leaf: Tensor) -> None:
        self.node = get_gradient_edge(leaf).node
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self.handles = [self.node.register_prehook(self._halve), self.node.register_hook(self._look)]

    def _halve(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.before += gradients
        return tuple(gradient / 2 for gradient in gradients)

    def _look(self, none: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
        assert none == ()
        self.after += gradients


async def test_hooks_on_nodes_of_leaves(workers: list[Worker]) -> None:
    """They run as in one process, once each, with what they change; not when they were removed; `.grad` stays None."""
    leaves = x, w, _ = vector(), weight_of(workers[1], 0), weight_of(workers[1], 2)
    of_x, of_w = expected(step(x, w).sum(), [x, w])
    hooked = [NodeHooks(leaf) for leaf in leaves]
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        await ctx.backward([y.sum()], retain_graph=True)
        check(gradients_of(workers[0], ctx), [(x, of_x / 2)])
        check(gradients_of(workers[1], ctx), [(w, of_w / 2)])
        hooked[0].handles[0].remove()
        await ctx.backward([y.sum()])
        check(gradients_of(workers[0], ctx), [(x, of_x * 1.5)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])
    for seen, wanted in (
        (hooked[0].before, [of_x]),
        (hooked[0].after, [of_x / 2, of_x]),
        (hooked[1].before, [of_w, of_w]),
        (hooked[1].after, [of_w / 2, of_w / 2]),
        (hooked[2].before + hooked[2].after, []),
    ):
        torch.testing.assert_close(seen, wanted)
    assert all(leaf.grad is None for leaf in leaves)


async def test_hooks_on_nodes_of_leaves_run_without_gradients(workers: list[Worker]) -> None:
    """As in torch's engine: a gradient that they make with a parameter has no graph, which would keep that alive."""
    x, scale, modes = vector(), torch.ones(SIZE, dtype=double, requires_grad=True), list[bool]()
    node = get_gradient_edge(x).node

    def change(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        modes.append(torch.is_grad_enabled())
        return tuple(gradient * scale for gradient in gradients)

    node.register_prehook(change)
    node.register_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        await ctx.backward([y.sum()])
        assert modes == [False, False] and not ctx.gradients()[x].requires_grad


async def test_hooks_on_nodes_registered_after_the_first_pass(workers: list[Worker]) -> None:
    """The node was looked at before; its hooks are those of now."""
    x = vector()
    node, seen = get_gradient_edge(x).node, []
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        await ctx.backward([y.sum()], retain_graph=True)
        node.register_hook(lambda _, gradients: seen.append(gradients))
        await ctx.backward([y.sum()])
    assert len(seen) == 1


@pytest.mark.parametrize("register", ["register_prehook", "register_hook"])
async def test_exceptions_of_hooks_on_nodes_of_leaves(workers: list[Worker], register: str) -> None:
    """They end the pass, and the caller learns where."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("in a hook")

    node = get_gradient_edge(weight_of(workers[1], 0)).node
    getattr(node, register)(fail)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, vector())
        with pytest.raises(ZeroDivisionError, match="in a hook") as caught:
            await ctx.backward([y.sum()])
    assert "in the backward pass on worker 'worker1'" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("at", [0, 1])
async def test_errors_that_take_no_note(workers: list[Worker], at: int) -> None:
    """They end the pass like others, though nobody learns where."""

    def fail(*_: object) -> None:
        raise hostile.make("add_note", ValueError)

    x = vector()
    leaf = x if at == 0 else weight_of(workers[1], 0)
    leaf.register_hook(fail)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        with pytest.raises(hostile.Hostile):
            async with asyncio.timeout(LIMIT):
                await ctx.backward([y.sum()])


async def test_a_hook_on_the_node_of_a_leaf_may_not_change_the_shape(workers: list[Worker]) -> None:
    """What it returns is added to a gradient of the leaf's shape."""
    x = vector()
    node = get_gradient_edge(x).node
    node.register_prehook(lambda gradients: gradients[0].sum())
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        with pytest.raises(RuntimeError, match=r"AccumulateGrad node changed the shape of a gradient from \(\d+,\) to"):
            await ctx.backward([y.sum()])


# --- interruptions ----------------------------------------------------------------------------------------------------


# --- leaves that change after the forward pass ------------------------------------------------------------------------


def _freeze(leaf: Tensor) -> None:
    leaf.requires_grad_(False)


def _freeze_and_thaw(leaf: Tensor) -> None:
    leaf.requires_grad_(False)
    leaf.requires_grad_()


def _retype(leaf: Tensor) -> None:
    leaf.data = leaf.data.float()


def _retype_a_module(leaf: Tensor) -> None:
    assert isinstance(leaf, torch.nn.Parameter)
    torch.nn.ParameterList([leaf]).to(torch.bfloat16)


def _shifted(x: Tensor, w: Tensor) -> Tensor:
    """Saves no leaf for the way back, on which torch refuses one that has changed."""
    return (x + w * 2).tanh()


def _shift(x: Tensor) -> Tensor:
    return _shifted(x, parts.weight(0))


@pytest.mark.parametrize("change", [_freeze, _freeze_and_thaw, _retype, _retype_a_module])
async def test_leaves_that_change_after_the_forward_pass(workers: list[Worker], change: Any) -> None:
    """A worker's own, and another's: they get what torch's `backward` gives them in one process, and so do others."""
    changed = v, w = torch.nn.Parameter(vector().detach()), weight_of(workers[1], 0)
    alike = [torch.nn.Parameter(leaf.detach().clone()) for leaf in changed]
    x, y = vector(1), vector(1)
    loss = _shifted(_shifted(y, alike[0]), alike[1]).sum()
    for leaf in alike:
        change(leaf)
    loss.backward()
    async with autograd.context() as ctx:
        result = await workers[0].call("worker1", _shift, _shifted(x, v))
        for leaf in changed:
            change(leaf)
        await ctx.backward([result.sum()])
        found = {**gradients_of(workers[0], ctx), **gradients_of(workers[1], ctx)}
    wanted = {leaf: twin.grad for leaf, twin in zip((x, v, w), (y, *alike), strict=True) if twin.grad is not None}
    assert len(wanted) == (1 if change is _freeze else 3)
    assert found.keys() == wanted.keys()
    for each, gradient in wanted.items():
        torch.testing.assert_close(found[each], gradient)
    assert all(each.grad is None for each in (x, v, w))


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (_retype, r"shape \(4, 4\), torch\.float32 on cpu"),
        (lambda leaf: setattr(leaf, "data", leaf.data[:2]), r"shape \(2, 4\), torch\.float64 on cpu"),
    ],
)
async def test_an_error_names_leaves_that_do_not_fit_any_more(workers: list[Worker], change: Any, now: str) -> None:
    """What torch raises of a node that has saved one says which, where, and what to do."""
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, vector())
        change(weight_of(workers[1], 0))
        with pytest.raises(RuntimeError) as caught:
            await ctx.backward([y.sum()])
    said = "".join(caught.value.__notes__)
    assert "on worker 'worker1'" in said
    assert re.search(rf"a leaf of {now} was of shape \(4, 4\), torch\.float64 on cpu in the forward pass: go ", said)


async def test_a_leaf_that_changes_between_two_uses(workers: list[Worker]) -> None:
    """It has two nodes then: both gradients count, and hooks on each see that of their own."""
    x, w = vector(), weight_of(workers[1], 0)
    v = w.detach().clone().requires_grad_()
    seen: list[list[Tensor]] = [[], []]
    async with autograd.context() as ctx:
        before = await workers[0].call("worker1", _shift, x)
        nodes = [get_gradient_edge(w).node]
        _retype(w)
        after = await workers[0].call("worker1", _shift, x.float())
        nodes.append(get_gradient_edge(w).node)
        for node, gradients in zip(nodes, seen, strict=True):
            node.register_prehook(gradients.extend)
        await ctx.backward([before.sum() + after.double().sum()])
        of_double = expected(_shifted(x, v).sum(), [v])
        v = v.detach().float().requires_grad_()
        of_float = expected(_shifted(x.float(), v).sum(), [v])
        torch.testing.assert_close(gradients_of(workers[1], ctx)[w], of_double[0] + of_float[0])
    torch.testing.assert_close(seen, [of_double, of_float])


async def test_nodes_run_outside_of_the_loop(workers: list[Worker]) -> None:
    """Hooks run in threads other than the loop's, at each worker."""
    loop, threads = threading.get_ident(), []
    x = vector()
    for leaf in (x, weight_of(workers[1], 0)):
        leaf.register_hook(lambda _: threads.append(threading.get_ident()))
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer_async, x)
        await ctx.backward([y.sum()])
    assert len(threads) == 2 and loop not in threads


# --- kinds of tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
async def test_types(workers: list[Worker], dtype: torch.dtype) -> None:
    """Each type that can require gradients gets them in its own type."""
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()

    def square(x: Tensor) -> Tensor:
        return x * x

    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", square, x)
        await ctx.backward([(y * x).abs().sum()])
        wanted = expected((square(x) * x).abs().sum(), [x])[0]
        found = ctx.gradients()[x]
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted)


async def test_conjugates(workers: list[Worker]) -> None:
    """A tensor with a pending conjugation is sent with its values, and its gradient goes back through it."""
    x = torch.randn(SIZE, dtype=torch.complex128, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def turn(x: Tensor) -> Tensor:
        return (x * (1 + 2j)).conj()

    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", turn, x.conj())
        await ctx.backward([(y.real * y.imag).sum()])
        z = turn(x.conj())
        check(ctx.gradients(), [(x, expected((z.real * z.imag).sum(), [x])[0])])


async def test_views(workers: list[Worker]) -> None:
    """Views, transposed and expanded tensors, slices with gaps, and two views of one tensor in one call."""
    x = torch.randn(6, 5, dtype=double, generator=torch.Generator().manual_seed(4)).requires_grad_()

    def views(x: Tensor) -> list[Tensor]:
        return [x.t(), x[::2, 1:], x[:1].expand(3, 5), x.reshape(-1)[3:20:4], x[2], x.unsqueeze(0)]

    def work(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.sin().t() if tensor.dim() == 2 else (2 * tensor)[..., :3] for tensor in tensors]

    async with autograd.context() as ctx:
        results = await workers[0].call("worker1", work, views(x))
        await ctx.backward([sum(((n + 1) * result.pow(2)).sum() for n, result in enumerate(results))])  # type: ignore[list-item]
        loss: Any = sum(((n + 1) * result.pow(2)).sum() for n, result in enumerate(work(views(x))))
        check(ctx.gradients(), [(x, expected(loss, [x])[0])])


async def test_gradients_that_are_not_contiguous(workers: list[Worker]) -> None:
    """Transposed and expanded gradients travel as they are meant."""
    x = torch.randn(3, 5, dtype=double, generator=torch.Generator().manual_seed(4)).requires_grad_()
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.echo, x)
        await ctx.backward([y.t().matmul(torch.arange(6.0, dtype=double).reshape(2, 3).t()).sum() + y.sum()])
        wanted = expected(x.t().matmul(torch.arange(6.0, dtype=double).reshape(2, 3).t()).sum() + x.sum(), [x])[0]
        check(ctx.gradients(), [(x, wanted)])


def _separate(tensors: list[Tensor]) -> bool:
    """Whether writing to one of them changes no other one, nor one element another."""
    for n, tensor in enumerate(tensors):
        before = [other.clone() for other in tensors]
        tensor.view(-1)[0] += 1
        before[n].view(-1)[0] += 1
        if not all(torch.equal(*pair) for pair in zip(tensors, before, strict=True)):
            return False
    return True


class Sum(torch.autograd.Function):
    """Of three tensors; gives each the same gradient, reshaped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Their sum, elementwise."""
        return x + y + z

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Views of one tensor."""
        return tuple(grads[0].view(-1).view_as(grads[0]) for _ in range(3))


class Constant(torch.autograd.Function):
    """Its gradient is a tensor that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        """The same."""
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The constant itself."""
        return ctx.gradient, None


class Nothing(torch.autograd.Function):
    """No gradient comes out of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """None."""
        return None


def _nothing(x: Tensor) -> Tensor:
    return apply(Nothing, x)


@pytest.mark.parametrize("way", ["same", "views", "expanded", "function", "runs"])
async def test_gradients_never_share_memory(workers: list[Worker], way: str) -> None:
    """Whoever changes one gradient in place, as clipping does, changes no other one."""
    x, y, z = leaves = [vector(seed) for seed in range(3)]
    async with autograd.context() as ctx:
        if way == "same":
            total = x + y + z
        elif way == "views":
            total = (x.view(2, 2) + y.view(2, 2)).view(-1) + z
        elif way == "expanded":
            total = x.sum() + y.sum() + z.sum()
        elif way == "function":
            total = apply(Sum, *leaves)
        else:  # that of x is known later than that of y: they come out of two runs of the engine
            total = x + y + z + await workers[0].call("worker1", _nothing, x)
        back = await workers[0].call("worker1", parts.echo, total)
        await ctx.backward([(back * torch.arange(1.0, SIZE + 1, dtype=double)).sum()])
        found = list(ctx.gradients().values())
        assert len(found) == 3 and _separate(found)


async def test_a_gradient_that_a_node_keeps(workers: list[Worker]) -> None:
    """The context's gradient is not the tensor that a custom Function returned and holds on to."""
    x, constant = vector(), torch.arange(1.0, SIZE + 1, dtype=double)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.echo, apply(Constant, x, constant))
        await ctx.backward([y.sum()])
        assert _separate([ctx.gradients()[x], constant])


async def test_no_gradient_comes_back(workers: list[Worker]) -> None:
    """Where a node gives None there is no gradient, and nobody waits for one."""
    x = vector()
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", _nothing, x * 2)
        y = await workers[0].call("worker2", parts.layer, y)
        await ctx.backward([y.sum()])
        check(ctx.gradients(), [])
        assert list(gradients_of(workers[2], ctx)) == [weight_of(workers[2], 0)]


async def test_a_tensor_sent_twice(workers: list[Worker]) -> None:
    """Twice in one call, and in two calls: it is one tensor of the graph."""
    x, w = vector(), weight_of(workers[1], 0)

    def both(x: Tensor, y: list[Tensor]) -> Tensor:
        return step(x, parts.weight(0)) * y[0] + y[1]

    async with autograd.context() as ctx:
        y = x * 2
        z = await workers[0].call("worker1", both, y, [y, x])
        z = z + await workers[0].call("worker1", both, y, [x, y])
        await ctx.backward([z.sum()])
        y = x * 2
        of_x, of_w = expected((step(y, w) * y + x + step(y, w) * x + y).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


async def test_a_result_returned_twice(workers: list[Worker]) -> None:
    """One tensor in two places of a result, and one that the worker keeps and returns again in a later call."""
    x, w = vector(), weight_of(workers[1], 0)

    def twice(x: Tensor) -> list[Tensor]:
        y = step(x, parts.weight(0))
        return [y, y, x]

    async with autograd.context() as ctx:
        a, b, c = await workers[0].call("worker1", twice, x)
        await ctx.backward([(a * 2 + b * 3 + c).sum()])
        of_x, of_w = expected((step(x, w) * 5 + x).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x)])
        check(gradients_of(workers[1], ctx), [(w, of_w)])


async def test_parameters_sent_themselves(workers: list[Worker]) -> None:
    """A parameter is sent as a tensor with a past; its gradient comes back to the parameter."""
    x, w = vector(), weight_of(workers[0], 0)

    def use(x: Tensor, w: Tensor) -> tuple[Tensor, bool]:
        return step(x, w), w.is_leaf

    async with autograd.context() as ctx:
        y, was_leaf = await workers[0].call("worker1", use, x, w)
        assert not was_leaf
        await ctx.backward([(y * w[0]).sum()])
        of_x, of_w = expected((step(x, w) * w[0]).sum(), [x, w])
        check(gradients_of(workers[0], ctx), [(x, of_x), (w, of_w)])
        check(gradients_of(workers[1], ctx), [])


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SIZE, SIZE, dtype=double)
        self.second = torch.nn.Linear(SIZE, 2, dtype=double)

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        y: Tensor = self.second(self.first(x).tanh())
        return y


async def test_modules_as_arguments(workers: list[Worker]) -> None:
    """The parameters inside of a module that is sent along get their gradients at the sender."""
    x, net = vector(), Net()

    def run(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net(x)
        return y

    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", run, net, x)
        await ctx.backward([y.sum()])
        leaves = [x, *net.parameters()]
        check(ctx.gradients(), zip(leaves, expected(net(x).sum(), leaves), strict=True))


async def test_modules_as_arguments_as_in_torch(workers: list[Worker]) -> None:
    """The drop-in's way: what arrives has parameters that are ones, and can be trained, kept and copied."""
    for worker in workers:
        worker._node.gradients.as_torch = True

    def train(net: Any, w: Tensor, x: Tensor) -> tuple[bool, Tensor, Tensor]:
        parameters = [*net.parameters(), w]
        before = net.first.weight.detach().clone()
        net(x.detach()).sum().backward()
        torch.optim.SGD(parameters, lr=1.0).step()
        changed = bool((net.first.weight != before).any())
        return changed and all(type(each) is torch.nn.Parameter for each in parameters), net(x), x * w[0]

    x, net = vector(), Net()
    w = torch.nn.Parameter(vector())
    async with autograd.context() as ctx:
        trained, y, z = await workers[0].call("worker1", train, net, w, x)
        assert trained
        await ctx.backward([y.sum() + z.sum()])
        assert list(ctx.gradients()) == [x]
        there = gradients_of(workers[1], ctx)
    assert len(there) == 5 and all(type(each) is torch.nn.Parameter for each in there)


async def test_remote_modules(workers: list[Worker]) -> None:
    """A module behind a reference, called from two workers."""
    x = vector()
    net = workers[0].remote("worker1", Net)

    def use(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.rpc_sync().forward(x)
        return y

    def gradients(net: Any, context_id: int) -> tuple[list[Tensor], Any]:
        module = net.local_value()
        found = autograd.get_gradients(context_id)
        return [found[parameter] for parameter in module.parameters()], module.state_dict()

    async with autograd.context() as ctx:
        y = await net.rpc_async().forward(x) + await workers[0].call("worker2", use, net, x * 2)
        await ctx.backward([y.sum()])
        found, state = await workers[0].call("worker1", gradients, net, ctx)
        copy = Net()
        copy.load_state_dict(state)
        wanted = expected((copy(x) + copy(x * 2)).sum(), [x, *copy.parameters()])
        check(ctx.gradients(), [(x, wanted[0])])
        for one, other in zip(found, wanted[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


async def test_large_tensors(workers: list[Worker]) -> None:
    """Those that travel by other ways than small ones."""
    x = torch.randn(600, 600, dtype=double, generator=torch.Generator().manual_seed(4)).requires_grad_()

    async def square(x: Tensor) -> Tensor:
        return x * x

    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", square, x)
        y = await workers[0].call("worker2", parts.echo, y)
        await ctx.backward([(y * x).sum()])
        check(ctx.gradients(), [(x, 3 * x.detach() ** 2)])


async def test_empty_tensors(workers: list[Worker]) -> None:
    """Tensors without elements have gradients without elements."""
    x = torch.empty(0, SIZE, dtype=double, requires_grad=True)
    w = weight_of(workers[1], 0)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        await ctx.backward([y.sum()])
        check(gradients_of(workers[0], ctx), [(x, torch.zeros(0, SIZE, dtype=double))])
        check(gradients_of(workers[1], ctx), [(w, torch.zeros_like(w).detach())])


# --- errors -----------------------------------------------------------------------------------------------------------


class Broken(torch.autograd.Function):
    """A node that fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Not the same."""
        raise LookupError("no gradient to be found here")


def _broken(x: Tensor) -> Tensor:
    return apply(Broken, step(x, parts.weight(0)))


@pytest.mark.parametrize("at", ["worker0", "worker1"])
async def test_exceptions_of_a_node_reach_the_caller(workers: list[Worker], at: str) -> None:
    """With type and text, and notes that say on which worker and in which node; the context goes on."""
    async with autograd.context() as ctx:
        y = await workers[0].call("worker2", parts.layer, vector())
        y = _broken_here(y) if at == "worker0" else await workers[0].call("worker1", _broken, y)
        with pytest.raises(LookupError, match="no gradient to be found here") as caught:
            await ctx.backward([y.sum()])
        notes = "\n".join(caught.value.__notes__)
        assert at in notes and "BrokenBackward" in notes
        assert gradients_of(workers[2], ctx) == {}
        y = await workers[0].call("worker1", parts.layer, vector())
        await ctx.backward([y.sum()])


def _broken_here(x: Tensor) -> Tensor:
    return apply(Broken, x)


async def test_a_failure_that_nobody_looked_at_is_logged(
    workers: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a call is, with the line that began the pass: it is not awaited, so nobody else is told."""

    lines = partial(unlooked_at, caplog)

    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", _broken, vector())
        ctx.backward([y.sum()])
        await until(lines)
    (line,) = lines()
    assert "the backward pass of autograd context" in line and "test_backward.py" in line and "LookupError" in line
    caplog.clear()


async def test_exceptions_of_a_hook_reach_the_caller(workers: list[Worker]) -> None:
    """The same for what hooks raise."""

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError("in a hook")

    def handler(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(fail)
        return y

    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", handler, vector())
        with pytest.raises(ZeroDivisionError, match="in a hook") as caught:
            await ctx.backward([y.sum()])
        assert any("worker1" in note for note in caught.value.__notes__)


async def test_leaving_the_context_while_a_pass_runs(workers: list[Worker]) -> None:
    """A pass whose context ends ends too, with an error; nothing is left."""
    released = threading.Event()
    x = vector()
    x.register_hook(lambda _: released.wait(20) and None)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        running = ctx.backward([y.sum()])
        await asyncio.sleep(0)
    released.set()
    async with asyncio.timeout(20):
        with pytest.raises(aiorpc.RpcError):
            await running


def at_rest(workers: list[Worker]) -> bool:
    """Whether no thread of theirs has anything to do."""
    return all(worker._node.engine.pool.threads == worker._node.engine.pool.idle for worker in workers)


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_pass_that_is_cancelled_adds_no_more_gradients(workers: list[Worker], at: int) -> None:
    """On whichever worker it is at that time: it ends on all of them, and the next pass in that context is whole."""
    x, weights = vector(), [weight_of(worker, 0) for worker in workers]
    reached, released = threading.Event(), threading.Event()

    def wait(gradient: Tensor) -> None:
        reached.set()
        released.wait(LIMIT)

    hook = weights[at].register_hook(wait)
    loss = step(step(step(x, weights[0]), weights[1]), weights[2]).sum()
    try:
        async with autograd.context() as ctx:
            y = step(x, weights[0])
            for name in ("worker1", "worker2"):
                y = await workers[0].call(name, parts.layer, y)
            contexts = [worker._node.gradients.get(ctx) for worker in workers]
            running = ctx.backward([y.sum()], retain_graph=True)
            await until(reached.is_set)
            before = [context.gradients() for context in contexts]
            assert running.cancel() and running.cancelled()
            await until(lambda: not any(context.parts for context in contexts))
            released.set()
            await until(lambda: at_rest(workers))
            for context, gradients in zip(contexts, before, strict=True):
                check(context.gradients(), gradients.items())
            await ctx.backward([y.sum()])
            wanted = dict(zip([x, *weights], expected(loss, [x, *weights]), strict=True))
            leaves: list[list[Tensor]] = [[x, weights[0]], [weights[1]], [weights[2]]]
            for of_one, context, gradients in zip(leaves, contexts, before, strict=True):
                check(context.gradients(), [(leaf, wanted[leaf] + gradients.get(leaf, 0)) for leaf in of_one])
    finally:
        released.set()
        hook.remove()


async def test_a_pass_that_is_cancelled_before_it_began(workers: list[Worker]) -> None:
    """No other worker is told to go backward; neither by a time limit that has passed."""
    pool, jobs = workers[0]._node.engine.pool, list[tuple[Any, ...]]()

    def started_late(*job: Any) -> None:
        jobs.append(job)

    async def begin_late() -> None:
        while jobs:
            pool.submit(*jobs.pop())
        await until(lambda: at_rest(workers))
        assert gradients_of(workers[0], ctx) == gradients_of(workers[1], ctx) == {}

    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, vector())
        with mock.patch.object(pool, "submit", started_late):
            running = ctx.backward([y.sum()], retain_graph=True)
            running.cancel("never mind")
            with pytest.raises(RpcCancelled, match="never mind"):
                await running
        assert len(jobs) == 1
        await begin_late()
        with mock.patch.object(pool, "submit", started_late), pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await ctx.backward([y.sum()], retain_graph=True)
        assert len(jobs) == 1
        await begin_late()
        await ctx.backward([y.sum()])
        assert len(gradients_of(workers[1], ctx)) == 1


async def test_a_pass_that_is_over_cannot_be_cancelled(workers: list[Worker]) -> None:
    """Nor does its Future keep the pass, with its graph, for as long as somebody has it."""
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, vector())
        running = ctx.backward([y.sum()])
        graph = weakref.ref(y.grad_fn)
        del y
        await running
        assert not running.cancel() and not running.cancelled()
    await until(lambda: gc.collect() >= 0 and graph() is None)
    await running


@pytest.mark.parametrize("way", ["awaited", "blocking", "cancelled"])
async def test_a_pass_that_is_over_leaves_nothing_to_the_garbage_collector(workers: list[Worker], way: str) -> None:
    """Graph and gradients are gone with the context; they may be larger than what the collector takes notice of."""
    kept = list[weakref.ref[Any]]()
    gc.collect()
    gc.disable()
    try:
        async with autograd.context() as ctx:
            x = vector()
            y = await workers[0].call("worker1", parts.layer, x)
            kept += [weakref.ref(each) for each in (x, y, y.grad_fn, workers[0]._node.gradients.get(ctx))]
            if way == "blocking":
                await asyncio.to_thread(autograd.backward, ctx, [y.sum()])
            else:
                running = ctx.backward([y.sum()])
                if way == "cancelled":
                    running.cancel()
                    await asyncio.wait([asyncio.ensure_future(_outcome(running))])
                else:
                    await running
                del running
            kept += map(weakref.ref, ctx.gradients().values())
            del x, y
        await until(lambda: not any(each() is not None for each in kept))
    finally:
        gc.enable()


async def _outcome(call: Any) -> None:
    with contextlib.suppress(RpcCancelled):
        await call


async def test_the_deadline_of_a_pass() -> None:
    """A pass that takes longer than the worker's `rpc_timeout` fails with RpcTimeout, at all workers."""
    released = threading.Event()

    async with cluster(2) as workers:
        current_node.set(workers[0]._node)
        weight_of(workers[1], 0).register_hook(lambda _: released.wait(20) and None)
        async with autograd.context() as ctx:
            y = await workers[0].call("worker1", parts.layer, vector())
            workers[0]._node.engine.default_timeout = 0.5  # not before: to join and to call may take longer
            async with asyncio.timeout(20):
                with pytest.raises(RpcTimeout, match=r"the backward pass of .* not done after 0.5 s.*'worker1'"):
                    await ctx.backward([y.sum()])
            released.set()


async def test_nothing_is_written_to_grad(workers: list[Worker]) -> None:
    """`.grad` of leaves stays what it was, at all workers, and so does retained `.grad` of sent tensors."""
    x, w = vector(), weight_of(workers[1], 0)
    w.grad = torch.full_like(w, 7)
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        await ctx.backward([y.sum()])
        assert len(ctx.gradients()) == len(gradients_of(workers[1], ctx)) == 1
    assert x.grad is None
    torch.testing.assert_close(w.grad, torch.full_like(w, 7).detach())


async def test_nobody_ends_the_passes_of_others(workers: list[Worker]) -> None:
    """Neither one that runs, nor one that is to come: its number says who runs it."""
    x = vector()
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.layer, x)
        for number in range(ctx + 1, ctx + 5):
            with pytest.raises(aiorpc.RpcError, match="worker 2 does not run this backward pass"):
                await workers[2].call("worker1", abort, int(ctx), number, pack_names([]), "it shall fail")
        await ctx.backward([y.sum()])
        assert x in ctx.gradients()
