"""Parameters that live on workers, handlers that use them, and comparisons; importable on all sides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

import aiorpc
from aiorpc import Future, Worker, autograd
from aiorpc.runtime.calls.current import current_call
from aiorpc.runtime.gradients.contexts import current_autograd

Tensor = torch.Tensor
SIZE = 4
# Of workers, by number: each has parameters of its own, which a test in the same process can look at.
_weights: WeakKeyDictionary[Worker, dict[int, torch.nn.Parameter]] = WeakKeyDictionary()


def weight_of(worker: Worker, k: int) -> torch.nn.Parameter:
    """Parameter k of a worker, float64 of shape (SIZE, SIZE); made when first asked for, with the same values."""
    weights = _weights.setdefault(worker, {})
    if k not in weights:
        generator = torch.Generator().manual_seed(1000 * worker.id + k)
        values = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)
        weights.setdefault(k, torch.nn.Parameter(values))
    return weights[k]


def weight(k: int) -> torch.nn.Parameter:
    """In a handler: parameter k of its worker."""
    return weight_of(aiorpc.current(), k)


def vector(seed: int = 0) -> Tensor:
    """A leaf of shape (SIZE,) that requires gradients."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, dtype=torch.float64, generator=generator).requires_grad_()


def step(x: Tensor, w: Tensor) -> Tensor:
    """What the layers below compute."""
    return (x @ w).tanh()


def apply(function: Any, *args: Any) -> Tensor:
    """``function.apply`` of a torch.autograd.Function, which torch has given no types."""
    result: Tensor = function.apply(*args)
    return result


# --- handlers ---------------------------------------------------------------------------------------------------------


def layer(x: Tensor, k: int = 0) -> Tensor:
    """One layer, in a thread."""
    return step(x, weight(k))


async def layer_async(x: Tensor, k: int = 0) -> Tensor:
    """One layer, on the loop."""
    await asyncio.sleep(0)
    return step(x, weight(k))


@aiorpc.async_execution
def layer_deferred(x: Tensor, k: int = 0) -> Future[Tensor]:
    """One layer, as a Future."""
    future: Future[Tensor] = Future()
    future.set_result(step(x, weight(k)))
    return future


def layers(x: Tensor, k: int = 0) -> Iterator[Tensor]:
    """Three layers, one after the other, as a stream."""
    for _ in range(3):
        x = step(x, weight(k))
        yield x


async def layers_async(x: Tensor, k: int = 0) -> AsyncIterator[Tensor]:
    """The same, on the loop."""
    for _ in range(3):
        x = step(x, weight(k))
        yield x


def via(x: Tensor, to: str, k: int = 0) -> Tensor:
    """A layer here, one on another worker, and one here again."""
    y: Tensor = aiorpc.rpc_sync(to, layer, args=(step(x, weight(k)), k))
    return step(y, weight(k))


async def via_async(x: Tensor, to: str, k: int = 0) -> Tensor:
    """The same, on the loop."""
    y: Tensor = await aiorpc.call(to, layer_async, step(x, weight(k)), k)
    return step(y, weight(k))


@aiorpc.async_execution
def via_deferred(x: Tensor, to: str, k: int = 0) -> Future[Tensor]:
    """The same, without waiting."""
    future = aiorpc.rpc_async(to, layer, args=(step(x, weight(k)), k))
    w = weight(k)
    return future.then(lambda done: step(done.wait(), w))


def context_here() -> int | None:
    """The context that this call is part of."""
    call = current_call.get()
    assert call is not None
    return call.autograd


def gradient_here(context_id: int, k: int) -> Tensor | None:
    """The gradient of parameter k of this worker."""
    return autograd.get_gradients(context_id).get(weight(k))


def echo(value: Any) -> Any:
    """The same again."""
    return value


class Layer:
    """A remote object with a parameter and a state."""

    def __init__(self, k: int = 0) -> None:
        self.weight = weight(k)
        self.state = torch.zeros(SIZE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return step(x, self.weight)

    async def forward_async(self, x: Tensor) -> Tensor:
        """One layer, on the loop."""
        return step(x, self.weight)

    def recur(self, x: Tensor) -> Tensor:
        """One step of a recurrent net whose state stays here."""
        self.state = torch.tanh(x @ self.weight + self.state)
        return self.state

    def get_weight(self) -> Tensor:
        """The parameter."""
        return self.weight


# --- comparisons ------------------------------------------------------------------------------------------------------


def expected(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a loss that was computed in one process."""
    return list(torch.autograd.grad(loss, leaves))


def check(found: Mapping[Tensor, Tensor], wanted: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The gradients of one worker are these, and there are no others."""
    pairs = list(wanted)
    assert len(found) == len(pairs), f"{len(found)} gradients, {len(pairs)} expected"
    for leaf, gradient in pairs:
        assert leaf in found, f"no gradient for a leaf of shape {tuple(leaf.shape)}"
        torch.testing.assert_close(found[leaf], gradient, rtol=0, atol=1e-12)
        assert leaf.grad is None


def gradients_of(worker: Worker, context_id: int) -> dict[Tensor, Tensor]:
    """What a worker of this process has in a context."""
    return worker._node.gradients.get(context_id).gradients()


@contextlib.contextmanager
def inside(worker: Worker, context_id: int) -> Iterator[None]:
    """Calls of the block are in that context, of which the worker has been told by none of its members."""
    worker._node.gradients._enter(context_id)
    token = current_autograd.set(context_id)
    try:
        yield
    finally:
        current_autograd.reset(token)
        worker._node.gradients.leave(context_id)


async def outside(call: Callable[..., Any], *args: Any) -> Any:
    """Make a call in no context."""
    token = current_autograd.set(None)
    try:
        future = call(*args)
    finally:
        current_autograd.reset(token)
    return await future
