"""What a client process does for `counting`: operations of both styles, and the counts of both processes."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import nn

import aiorpc

from . import counter, gradient_clients
from .functions import async_noop, echo, noop
from .sides import SERVER

WINDOW = 512
WIDTH, BATCH, LEARNING_RATE = 16, 8, 0.01  # of the layer in `dropin`
WARM_UP = 5  # steps of a model
CHAIN = 20  # round trips in one graph

Run = Callable[[int], object]
AwaitedRun = Callable[[int], Coroutine[Any, Any, None]]
#: By end, ``caller`` and ``callee``: what ran there in each batch.
Counts = dict[str, list[Counter[str]]]


# --- operations: each function gives what repeats one, with as few functions of its own as can be ---------------------


def awaited() -> AwaitedRun:
    """Awaited calls of an ``async def`` that does nothing."""

    async def run(times: int) -> None:
        call, function = aiorpc.call, async_noop
        for _ in range(times):
            await call(SERVER, function)

    return run


def in_flight() -> AwaitedRun:
    """So many windows of such calls: all of a window are started before the first is awaited."""

    async def run(times: int) -> None:
        call, function = aiorpc.call, async_noop
        for _ in range(times):
            for future in [call(SERVER, function) for _ in range(WINDOW)]:
                await future

    return run


def blocking() -> Run:
    """``rpc_sync`` of a ``def`` that does nothing."""
    return _blocking(noop)


def tensor() -> Run:
    """``rpc_sync`` of a function that returns the 2x2 tensor that it gets."""
    return _blocking(echo, torch.ones(2, 2))


def operator() -> Run:
    """``rpc_sync`` of ``torch.add`` with two such tensors."""
    return _blocking(torch.add, torch.ones(2, 2), torch.ones(2, 2))


def _blocking(function: Callable[..., Any], *args: Any) -> Run:
    def run(times: int) -> None:
        call = aiorpc.rpc_sync
        for _ in range(times):
            call(SERVER, function, args)

    return run


class Layer(nn.Module):
    """The layer of ``dropin_program``, with aiorpc's references."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Its result."""
        return torch.tanh(self.linear(values))

    def parameter_rrefs(self) -> list[aiorpc.RRef[nn.Parameter]]:
        """References to its parameters, for a DistributedOptimizer."""
        return [aiorpc.RRef(parameter) for parameter in self.parameters()]


def training() -> Run:
    """Training steps of ``dropin_program``: forward, backward and optimizer of a layer that the server has."""
    layer = aiorpc.remote(SERVER, Layer)
    parameters = layer.rpc_sync().parameter_rrefs()
    optimizer = aiorpc.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=LEARNING_RATE)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)

    def run(times: int) -> None:
        for _ in range(times):
            with aiorpc.autograd.context() as context_id:
                loss = nn.functional.mse_loss(layer.rpc_sync().forward(inputs), targets)
                aiorpc.autograd.backward(context_id, [loss])
                optimizer.step(context_id)

    return run


def two_layers() -> Run:
    """Training steps of `gradients`, with narrower layers: one here, one on the server, parameters of both."""
    model = gradient_clients.training(aiorpc, WIDTH, BATCH, WARM_UP)

    def run(times: int) -> None:
        for _ in range(times):
            model.step()

    return run


def two_layers_at_once() -> Run:
    """The same with backward and step in one verb."""
    model = gradient_clients.training(aiorpc, WIDTH, BATCH, WARM_UP)

    def run(times: int) -> None:
        for _ in range(times):
            model.step_at_once()

    return run


def chain() -> Run:
    """Chains of round trips in one graph, forward and backward, as in `gradients`."""
    x = torch.zeros(2, 2, requires_grad=True)

    def run(times: int) -> None:
        call, ones = aiorpc.rpc_sync, torch.ones(2, 2)
        for _ in range(times):
            with aiorpc.autograd.context() as context_id:
                y = x
                for _ in range(CHAIN):
                    y = call(SERVER, torch.add, (y, ones))
                aiorpc.autograd.backward(context_id, [y.sum()])

    return run


# --- counting ---------------------------------------------------------------------------------------------------------


@functools.cache
def _made(make: Callable[[], Any]) -> Any:
    """What a function gives, made once: a model of each round would be let go during the next one."""
    return make()


def count_blocking(rpc: Any, make: Callable[[], Run], times: int, batches: int) -> Counts:
    """What both processes run in pairs of batches: one of no operation, and one of so many.

    The former has what marking the counts takes, which the latter has as well.
    """
    run = _made(make)
    run(times)  # to warm up
    for _ in range(batches):
        for each in (0, times):
            counter.mark()
            rpc.rpc_sync(SERVER, counter.mark)
            run(each)
            rpc.rpc_sync(SERVER, counter.mark)
            counter.mark()
    return {"caller": counter.between_marks(), "callee": rpc.rpc_sync(SERVER, counter.between_marks)}


async def count_awaited(rpc: Any, make: Callable[[], AwaitedRun], times: int, batches: int) -> Counts:
    """The same with ``await``.

    Operations have a task of their own, as all coroutines that wait for one another are resumed together, and counted.
    """
    run = _made(make)
    await run(times)
    for _ in range(batches):
        for each in (0, times):
            await asyncio.create_task(_awaited_batch(rpc, run, each))
    return {"caller": counter.between_marks(), "callee": await rpc.call(SERVER, counter.between_marks)}


async def _awaited_batch(rpc: Any, run: AwaitedRun, times: int) -> None:
    counter.mark()
    await rpc.call(SERVER, counter.async_mark)
    await asyncio.create_task(run(times))
    await rpc.call(SERVER, counter.async_mark)
    counter.mark()
