"""What a client process measures of gradients across workers, the same code on both sides, and what the server runs.

Models have two layers, the first in the client and the second on the server. Nothing is measured before its results
were compared with those of the same model in one process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from .bulk_clients import AGAIN_CALLS
from .functions import resident_bytes
from .gpu_clients import synchronize
from .sides import SERVER
from .stats import BenchError, percentile

Tensor = torch.Tensor
FIRST, SECOND = 1, 2  # seeds of the layers
CPU = ("cpu", "cpu")
LEARNING_RATE = 0.01
CHECKED_STEPS = 3
WARM_UP_CHAINS = 5
LEAVE_SECONDS = 5.0
MB = 1 << 20


@dataclass(frozen=True)
class Side:
    """The modules of one side; the measurements use names that both have."""

    rpc: Any
    autograd: Any
    optim: Any


def side_of(rpc: Any) -> Side:
    """What belongs to ``aiorpc``, or to ``torch.distributed.rpc``."""
    package = rpc.__name__.removesuffix(".rpc")
    return Side(rpc, import_module(f"{package}.autograd"), import_module(f"{package}.optim"))


# --- what the server runs ---------------------------------------------------------------------------------------------


def layer(size: int, seed: int, device: str = "cpu") -> torch.nn.Linear:
    """A linear layer of size by size: the same one in whatever process it is made."""
    generator = torch.Generator().manual_seed(seed)  # its own: other threads draw from the common one
    made: torch.nn.Linear = torch.nn.utils.skip_init(torch.nn.Linear, size, size)
    bound = size**-0.5
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return made.to(device)


def apply_layer(rref: Any, x: Tensor) -> Tensor:
    """The owner's layer, applied."""
    result: Tensor = rref.local_value()(x)
    return result


def parameter_rrefs(rref: Any, rpc_name: str) -> list[Any]:
    """An RRef of each parameter of the owner's layer. rpc_name: of the side's module."""
    rpc = import_module(rpc_name)
    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]


def parameters(rref: Any) -> list[Tensor]:
    """The parameters of the owner's layer, as they are now."""
    return [parameter.detach() for parameter in rref.local_value().parameters()]


def gradients(rref: Any, context_id: int, rpc_name: str) -> list[Tensor]:
    """What a context has for the owner's layer."""
    found = side_of(import_module(rpc_name)).autograd.get_gradients(context_id)
    return [found[parameter] for parameter in rref.local_value().parameters()]


def one_more(x: Tensor) -> Tensor:
    """A round trip that a gradient passes through unchanged."""
    return x + 1


@functools.lru_cache(maxsize=1)
def _kept(shape: torch.Size) -> Tensor:
    return torch.ones(shape)


def exchange(tensor: Tensor) -> Tensor:
    """Take a tensor and answer with another one of its shape; not with the one that came, which could be lent back."""
    return _kept(tensor.shape)


def open_contexts(rpc_name: str) -> int:
    """Autograd contexts that this process keeps anything for."""
    rpc = import_module(rpc_name)
    if rpc_name == "aiorpc":
        return len(rpc.current()._node.gradients)
    return int(side_of(rpc).autograd._get_debug_info()["num_autograd_contexts"])


# --- checks -----------------------------------------------------------------------------------------------------------


def check(what: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """A side that computes something else has no speed."""
    for one, other in zip(found, expected, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item()):
            raise BenchError(f"{what} are not those of the same model in one process")


# --- timing -----------------------------------------------------------------------------------------------------------


def interleaved(cases: Mapping[str, Callable[[], object]], seconds: float, least: int) -> dict[str, float]:
    """The median microseconds of each case: all in turn for so long, and `least` times at least.

    What disturbs the machine disturbs all of them alike.
    """
    clock = time.perf_counter_ns
    samples: dict[str, list[int]] = {name: [] for name in cases}
    end = clock() + int(seconds * 1e9)
    turn = 0
    while turn < least + AGAIN_CALLS or clock() < end:
        for name, case in cases.items():
            before = clock()
            result = case()
            after = clock()
            del result
            if turn >= AGAIN_CALLS:
                samples[name].append(after - before)
        turn += 1
    return {name: percentile(taken, 50) / 1e3 for name, taken in samples.items()}


# --- a model in training ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def examples(width: int, batch: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """What goes into a model, and what should come out."""
    generator = torch.Generator().manual_seed(0)
    inputs, goal = torch.randn(2, batch, width, generator=generator).to(device)
    return inputs, goal


class Training:
    """Two layers with a rectifier between them, the mean square of the error, and an optimizer of all parameters.

    devices: of the layer here, and of the one there.
    """

    def __init__(self, rpc: Any, width: int, batch: int, devices: tuple[str, str] = CPU) -> None:
        self._side, self._here = side_of(rpc), devices[0]
        self._inputs, self._goal = examples(width, batch, devices[0])
        self.first = layer(width, FIRST, devices[0])
        self.second = rpc.remote(SERVER, layer, args=(width, SECOND, devices[1]))
        rrefs = [rpc.RRef(parameter) for parameter in self.first.parameters()]
        rrefs += rpc.rpc_sync(SERVER, parameter_rrefs, args=(self.second, rpc.__name__))
        self._optimizer = self._side.optim.DistributedOptimizer(torch.optim.SGD, rrefs, lr=LEARNING_RATE)

    def _loss(self) -> Tensor:
        hidden = torch.relu(self.first(self._inputs))
        result = self._side.rpc.rpc_sync(SERVER, apply_layer, args=(self.second, hidden))
        return torch.nn.functional.mse_loss(result, self._goal)

    def _backward(self, context_id: int) -> None:
        self._side.autograd.backward(context_id, [self._loss()])

    def pass_(self) -> None:
        """Forward and backward."""
        with self._side.autograd.context() as context_id:
            self._backward(context_id)
        synchronize(self._here)

    def step(self) -> None:
        """The same, and a step of the optimizer."""
        with self._side.autograd.context() as context_id:
            self._backward(context_id)
            self._optimizer.step(context_id)
        synchronize(self._here)

    def step_at_once(self) -> None:
        """The same as `step`, backward and step in one verb where that side has one."""
        at_once = getattr(self._optimizer, "backward_and_step", None)
        if at_once is None:
            self.step()
            return
        with self._side.autograd.context() as context_id:
            at_once(context_id, [self._loss()])
        synchronize(self._here)

    def parameters(self) -> list[Tensor]:
        """All parameters as they are now."""
        here = [parameter.detach() for parameter in self.first.parameters()]
        return here + list(self._side.rpc.rpc_sync(SERVER, parameters, args=(self.second,)))


def trained(width: int, batch: int, steps: int, device: str = "cpu") -> list[Tensor]:
    """The parameters of the same model in one process after so many steps."""
    inputs, goal = examples(width, batch, device)
    model = torch.nn.Sequential(layer(width, FIRST, device), torch.nn.ReLU(), layer(width, SECOND, device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), goal).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def training(rpc: Any, width: int, batch: int, warm_up: int, devices: tuple[str, str] = CPU) -> Training:
    """A model that was found right, and has taken so many steps."""
    found = Training(rpc, width, batch, devices)
    for _ in range(CHECKED_STEPS):
        found.step()
    check("parameters after some steps", found.parameters(), trained(width, batch, CHECKED_STEPS, devices[0]))
    for _ in range(warm_up):
        found.step()
    return found


def steps(
    rpc: Any,
    width: int,
    batch: int,
    warm_up: int,
    seconds: float,
    least: int,
    devices: tuple[str, str] = CPU,
) -> dict[str, float]:
    """Steps per second, also with backward and step in one verb, and passes without a step; by the median time."""
    model = training(rpc, width, batch, warm_up, devices)
    cases = {"step": model.step, "at once": model.step_at_once, "pass": model.pass_}
    found = interleaved(cases, seconds, least)
    return {name: 1e6 / microseconds for name, microseconds in found.items()}


def growth(
    rpc: Any,
    width: int,
    batch: int,
    warm_up: int,
    iterations: int,
    patience: float = LEAVE_SECONDS,
) -> dict[str, float]:
    """MB (2^20) by which both processes grew in so many steps, and the autograd contexts that are left in them.

    patience: how many seconds the last context has for being left everywhere.
    """
    model = training(rpc, width, batch, warm_up)
    before = resident_bytes(), rpc.rpc_sync(SERVER, resident_bytes)
    for _ in range(iterations):
        model.step()
    after = resident_bytes(), rpc.rpc_sync(SERVER, resident_bytes)
    left = _contexts_left(rpc, patience)
    sizes = {end: max(0, after[at] - before[at]) / MB for at, end in enumerate(("caller", "callee"))}
    return sizes | {"contexts, caller": float(left[0]), "contexts, callee": float(left[1])}


def _contexts_left(rpc: Any, patience: float) -> tuple[int, int]:
    """Those that are there after a while: torch does not wait until the others have left a context."""
    end = time.monotonic() + patience
    while True:
        left = open_contexts(rpc.__name__), rpc.rpc_sync(SERVER, open_contexts, args=(rpc.__name__,))
        if not any(left) or time.monotonic() > end:
            return left
        time.sleep(0.005)


# --- two large shards -------------------------------------------------------------------------------------------------


class Shards:
    """Two layers, their outputs summed up. alone: the same model in this process; to be trained by nobody."""

    def __init__(self, rpc: Any, size: int, batch: int) -> None:
        self._side = side_of(rpc)
        self._inputs, _ = examples(size, batch)
        self.first = layer(size, FIRST)
        self.second = rpc.remote(SERVER, layer, args=(size, SECOND))
        self.alone = torch.nn.Sequential(layer(size, FIRST), layer(size, SECOND))

    def _backward(self, context_id: int) -> None:
        result = self.second.rpc_sync().forward(self.first(self._inputs))
        self._side.autograd.backward(context_id, [result.sum()])

    def pass_(self) -> None:
        """Forward and backward."""
        with self._side.autograd.context() as context_id:
            self._backward(context_id)

    def compute(self) -> tuple[Tensor, ...]:
        """The same in this process."""
        return torch.autograd.grad(self.alone(self._inputs).sum(), list(self.alone.parameters()))

    def copies(self) -> None:
        """As many bytes both ways as a pass sends: activations there and back, and their gradients back and there."""
        for _ in ("forward", "backward"):
            self._side.rpc.rpc_sync(SERVER, exchange, args=(self._inputs,))

    def check(self) -> None:
        """BenchError if gradients are not right."""
        side = self._side
        with side.autograd.context() as context_id:
            self._backward(context_id)
            found = side.autograd.get_gradients(context_id)
            here = [found[parameter] for parameter in self.first.parameters()]
            there = side.rpc.rpc_sync(SERVER, gradients, args=(self.second, context_id, side.rpc.__name__))
            check("gradients", [*here, *there], self.compute())


def shards(rpc: Any, size: int, batch: int, seconds: float, least: int) -> dict[str, float]:
    """Milliseconds of a pass, of its computation alone, and of its copies alone; `times`: how many times both."""
    model = Shards(rpc, size, batch)
    model.check()
    found = interleaved({"pass": model.pass_, "compute": model.compute, "copies": model.copies}, seconds, least)
    times = found["pass"] / (found["compute"] + found["copies"])
    return {name: microseconds / 1e3 for name, microseconds in found.items()} | {"times": times}


# --- chains -----------------------------------------------------------------------------------------------------------


def _chain(side: Side, x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A tensor through so many round trips and back: what came out, and the gradient."""
    with side.autograd.context() as context_id:
        y = x
        for _ in range(length):
            y = side.rpc.rpc_sync(SERVER, one_more, args=(y,))
        side.autograd.backward(context_id, [y.sum()])
        return y.detach(), side.autograd.get_gradients(context_id)[x]


def chains(rpc: Any, lengths: Sequence[int], seconds: float, least: int) -> dict[str, float]:
    """Microseconds of chains by their length as text, forward and backward, and `slope`: of one more round trip."""
    side, x = side_of(rpc), torch.zeros(2, 2, requires_grad=True)
    for length in lengths:
        for _ in range(WARM_UP_CHAINS):
            check("a chain's results", _chain(side, x, length), (torch.full((2, 2), float(length)), torch.ones(2, 2)))
    found = interleaved({str(length): functools.partial(_chain, side, x, length) for length in lengths}, seconds, least)
    return found | {"slope": slope(lengths, [found[str(length)] for length in lengths])}


def slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line that is nearest to the values, by least squares."""
    middle = sum(places) / len(places)
    spread = sum((place - middle) ** 2 for place in places)
    return sum((place - middle) * value for place, value in zip(places, values, strict=True)) / spread
