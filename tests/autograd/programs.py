"""Random programs over vectors: each can run in one process, or spread over workers by calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import aiorpc
from aiorpc import RRef, Worker, autograd
from tests.autograd import parts
from tests.autograd.parts import Tensor, apply, vector, weight_of

WORKERS = 4
LEAVES = 3
# By a call or as a reference, to a handler in a thread or on the loop; through another worker; as items of a stream; as
# one of a group; or without any call.
HOW = ["call", "call_async", "remote", "remote_async", "via", "via_async", "stream", "stream_async", "group", "here"]
# By name: how many values it takes.
OPERATIONS = {"linear": 1, "mul": 2, "add": 2, "mix": 2, "tanh": 1, "clamp": 1, "cube": 1, "stop": 1, "same": 1}


@dataclass(frozen=True)
class Node:
    """One operation. inputs: numbers of values; where, how: the worker and the kind of call, when it is spread."""

    operation: str
    inputs: tuple[int, ...]
    parameter: int
    where: int
    how: str


@dataclass(frozen=True)
class Program:
    """Values 0 to LEAVES - 1 are leaves; each node adds one, "mix" two. uses: those in each of the losses."""

    nodes: tuple[Node, ...]
    losses: tuple[tuple[int, ...], ...]


@st.composite
def programs(draw: st.DrawFn, longest: int = 10) -> Program:
    """Up to `longest` operations on up to four workers."""
    workers = draw(st.integers(1, WORKERS))
    count, nodes = LEAVES, []
    for _ in range(draw(st.integers(1, longest))):
        operation = draw(st.sampled_from(sorted(OPERATIONS)))
        # The latest are likelier: deep graphs rather than wide ones.
        recent = st.integers(max(0, count - 4), count - 1) | st.integers(0, count - 1)
        inputs = tuple(draw(recent) for _ in range(OPERATIONS[operation]))
        where = draw(st.integers(0, workers - 1))
        how = draw(st.sampled_from(HOW))
        nodes.append(Node(operation, inputs, draw(st.integers(0, 1)), where, how))
        count += 2 if operation == "mix" else 1
    use = st.lists(st.integers(0, count - 1), min_size=1, max_size=3).map(tuple)
    last = (count - 1, *draw(st.lists(st.integers(0, count - 1), max_size=2)))
    return Program(tuple(nodes), (last, *draw(st.lists(use, max_size=1))))


class Cube(torch.autograd.Function):
    """Not linear in its gradient: run on parts of one, it would give something else than on their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x / 2."""
        return x / 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """And back, with another function."""
        return torch.tanh(grads[0]).pow(3) + grads[0] / 2


class Stop(torch.autograd.Function):
    """No gradient comes out of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """None."""
        return None


def compute(operation: str, inputs: Sequence[Tensor], w: Tensor) -> tuple[Tensor, ...]:
    """The new values."""
    x = inputs[0]
    if operation == "linear":
        return (x @ w * 0.5,)
    if operation == "mul":
        return (x * inputs[1].sin(),)
    if operation == "add":
        return (x + inputs[1] * 0.5,)
    if operation == "mix":
        return tuple(torch.cat([x, inputs[1]]).roll(1).split(parts.SIZE))  # two outputs of one node
    if operation == "clamp":
        y = x * 1.5
        # torch calls hooks with None as well, behind a node that gives no gradient.
        y.register_hook(lambda gradient: None if gradient is None else gradient.clamp(-0.5, 0.5))
        return (y,)
    if operation == "cube":
        return (apply(Cube, x),)
    if operation == "stop":
        return (apply(Stop, x),)
    return (x.tanh(),) if operation == "tanh" else (x,)


def loss_of(values: Sequence[Tensor]) -> Tensor:
    """A scalar."""
    return torch.stack([(n + 1) * value.pow(2).sum() for n, value in enumerate(values)]).sum()


def leaves_of() -> list[Tensor]:
    """The leaves of a new run."""
    return [vector(seed) for seed in range(LEAVES)]


def run_alone(program: Program, leaves: Sequence[Tensor], workers: Sequence[Worker]) -> list[Tensor]:
    """The losses, computed in one process with the workers' parameters."""
    values = list(leaves)
    for node in program.nodes:
        inputs = [values[number] for number in node.inputs]
        values += compute(node.operation, inputs, weight_of(workers[_place(node)], node.parameter))
    return [loss_of([values[number] for number in uses]) for uses in program.losses]


def _place(node: Node) -> int:
    return 0 if node.how == "here" else node.where


# --- spread over workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A value that stays at its owner: one of those that a reference names."""

    reference: RRef[Any]
    number: int


def serve(operation: str, inputs: list[Any], parameter: int) -> tuple[Tensor, ...]:
    """Handler in a thread."""
    values = [each.reference.to_here()[each.number] if isinstance(each, Item) else each for each in inputs]
    return compute(operation, values, parts.weight(parameter))


async def serve_async(operation: str, inputs: list[Any], parameter: int) -> tuple[Tensor, ...]:
    """Handler on the loop."""
    values = [(await each.reference)[each.number] if isinstance(each, Item) else each for each in inputs]
    await asyncio.sleep(0)
    return compute(operation, values, parts.weight(parameter))


def serve_via(to: str, *args: Any) -> tuple[Tensor, ...]:
    """Handler in a thread: another worker is to do it. What goes through is a tensor of this worker's, too."""
    done: tuple[Tensor, ...] = aiorpc.rpc_sync(to, serve, args=args)
    return done


async def serve_via_async(to: str, *args: Any) -> tuple[Tensor, ...]:
    """The same on the loop, with an operation before and behind."""
    operation, inputs, parameter = args
    ahead = [each if isinstance(each, Item) else each * 1 for each in inputs]
    done: tuple[Tensor, ...] = await aiorpc.call(to, serve_async, operation, ahead, parameter)
    return tuple(each * 1 for each in done)


def serve_items(*args: Any) -> Iterator[Tensor]:
    """The new values, as a stream."""
    yield from serve(*args)


async def serve_items_async(*args: Any) -> AsyncIterator[Tensor]:
    """The same, on the loop."""
    for each in await serve_async(*args):
        yield each


async def run_spread(program: Program, leaves: Sequence[Tensor], worker: Worker) -> list[Tensor]:
    """The losses at that worker, with each node where the program says."""
    values: list[Any] = list(leaves)
    for node in program.nodes:
        inputs = [values[number] for number in node.inputs]
        handler = serve_async if node.how.endswith("async") else serve
        args = (node.operation, inputs, node.parameter)
        if node.how == "here":
            here = [await _fetch(value) for value in inputs]
            values += compute(node.operation, here, weight_of(worker, node.parameter))
        elif node.how.startswith("remote"):
            reference = worker.remote(f"worker{node.where}", handler, *args)
            values += [Item(reference, number) for number in range(2 if node.operation == "mix" else 1)]
        elif node.how.startswith("via"):
            through = serve_via_async if node.how == "via_async" else serve_via
            values += await worker.call(f"worker{(node.where + 1) % WORKERS}", through, f"worker{node.where}", *args)
        elif node.how.startswith("stream"):
            items: Any = serve_items_async if node.how == "stream_async" else serve_items
            values += [each async for each in worker.stream(f"worker{node.where}", items, *args)]
        elif node.how == "group":
            (given,) = (await worker.group([f"worker{node.where}"]).call(handler, *args)).values()
            values += given
        else:
            values += await worker.call(f"worker{node.where}", handler, *args)
    return [loss_of([await _fetch(values[number]) for number in uses]) for uses in program.losses]


async def _fetch(value: Any) -> Tensor:
    tensor: Tensor = (await value.reference)[value.number] if isinstance(value, Item) else value
    return tensor


async def compare(program: Program, workers: Sequence[Worker], *, passes: int = 1) -> None:
    """All gradients, at all workers, are those of the same program in one process; there are no others."""
    leaves = leaves_of()
    parameters = {worker: [weight_of(worker, k) for k in range(2)] for worker in workers}
    everything = [*leaves, *(each for of_one in parameters.values() for each in of_one)]
    total = torch.stack(run_alone(program, leaves, workers)).sum()
    wanted = dict(zip(everything, torch.autograd.grad(total, everything, allow_unused=True), strict=True))
    async with autograd.context() as ctx:
        losses = await run_spread(program, leaves, aiorpc.current())
        torch.testing.assert_close(torch.stack(losses).sum(), total, rtol=1e-12, atol=1e-12)
        for left in reversed(range(passes)):
            await ctx.backward(losses, retain_graph=left > 0)
        for worker in workers:
            context = worker._node.gradients.find(ctx)
            found = {} if context is None else context.gradients()
            for leaf in [*parameters[worker], *(leaves if worker is workers[0] else [])]:
                _compare(found.pop(leaf, None), wanted[leaf], passes)
            assert not found, f"gradients of leaves that nobody knows: {found}"
    assert all(leaf.grad is None for leaf in everything)


def _compare(found: Tensor | None, wanted: Tensor | None, passes: int) -> None:
    if found is None:
        # Where nothing flows torch has custom Functions run on zeros, and this one does not run them.
        assert wanted is None or not wanted.any(), "a gradient is missing"
        return
    assert wanted is not None, "a gradient that there should not be"
    wanted = wanted * passes
    # Sums in another order differ in their last bits; how much that is depends on how large they are.
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * (1 + float(wanted.abs().max())))
