"""Backward passes: what gets a gradient and what does not, how often hooks run, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import aiorpc
from aiorpc import RpcCancelled, RpcTimeout, RpcUsageError, Worker, autograd
from aiorpc.autograd.parts import abort, go_on
from aiorpc.autograd.wire import MORE, pack_names, to_wire
from aiorpc.testing import cluster
from tests.autograd import parts
from tests.autograd.parts import SIZE, Tensor, apply, check, expected, gradients_of, step, vector, weight_of
from tests.runtime.waiting import LIMIT, until
from tests.scripts import make_current
from tests.unlooked import unlooked_at

double = torch.float64
NOTHING = to_wire({})  # no gradients

# --- messages ---------------------------------------------------------------------------------------------------------


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


async def test_deep_and_wide_graphs(workers: list[Worker]) -> None:
    """Deeper than Python may recurse, with more paths than could be walked and more leaves than bits of a word."""
    leaves = [torch.ones(1, dtype=double, requires_grad=True) for _ in range(200)]
    async with autograd.context() as ctx:
        y = await workers[0].call("worker1", parts.echo, torch.stack(leaves).sum(0) / 200)
        for _ in range(60):
            y = y * y  # twice as many paths each time
        for _ in range(20 * sys.getrecursionlimit()):
            y = y + 1
        async with asyncio.timeout(LIMIT):
            await ctx.backward([y.sum()])
        assert ctx.gradients().keys() == set(leaves)


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


# --- functions and nodes ----------------------------------------------------------------------------------------------


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
        make_current(workers[0])
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
