"""An old-style program, written against ``torch.distributed.rpc`` alone: what `dropin` runs on torch's RPC and on ours.

    python bench/dropin_program.py --meeting /tmp/meeting --seconds 0.8

Two processes: a trainer that calls, and a server that also calls back. The last line it prints is a JSON object,
steps/s of its loops. It fails where a loop's results are wrong.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

SMALL, LAYER, LARGE = 4, 16, 4 << 20  # numbers in a tensor: LARGE is 16 MB
STEPS_OF_EPISODE = 20
LEARNING_RATE = 0.01


class Parameters:
    """A few numbers that a server keeps."""

    def __init__(self) -> None:
        self.values = torch.zeros(SMALL)

    def add(self, update: torch.Tensor) -> torch.Tensor:
        """Add to them; they are returned."""
        self.values += update
        return self.values


class Policy:
    """Answers what to do; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def select_action(self, state: torch.Tensor) -> int:
        """An action for a state."""
        self.asked += 1
        return int(state.sum()) % 2


class Environment:
    """Asks the trainer's policy at every step of an episode."""

    def __init__(self) -> None:
        self.state = torch.ones(SMALL)

    def run_episode(self, policy: RRef[Policy], steps: int) -> int:
        """How many steps it took, all of them."""
        for _ in range(steps):
            action = policy.rpc_sync().select_action(self.state)
            self.state = self.state + action
        return steps


class Layer(nn.Module):
    """A layer on the server."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(LAYER, LAYER)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Its result."""
        return torch.tanh(self.linear(values))

    def parameter_rrefs(self) -> list[RRef[nn.Parameter]]:
        """References to its parameters, for a DistributedOptimizer."""
        return [RRef(parameter) for parameter in self.parameters()]


class Calls:
    """The verbs with small tensors: one call, four at once, one of an object's methods, one that leaves a reference."""

    def __init__(self) -> None:
        self.ones = torch.ones(SMALL)
        self.parameters = rpc.remote("server", Parameters)
        self.steps = 0

    def step(self) -> None:
        """One of each."""
        two = rpc.rpc_sync("server", torch.add, args=(self.ones, 1))
        futures = [rpc.rpc_async("server", torch.mul, args=(self.ones, factor)) for factor in range(4)]
        six = sum(torch.futures.wait_all(futures))
        total = self.parameters.rpc_sync().add(self.ones)
        four = rpc.remote("server", torch.add, args=(two, two)).to_here()
        self.steps += 1
        if (float(two[0]), float(six[0]), float(total[0]), float(four[0])) != (2, 6, self.steps, 4):
            raise ValueError(f"wrong results: {two}, {six}, {total}, {four} in step {self.steps}")


class Episodes:
    """Reinforcement learning without the learning: the server's environment asks this process at every step."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.reference = RRef(self.policy)
        self.environment = rpc.remote("server", Environment)
        self.steps = 0

    def step(self) -> None:
        """One episode; its steps are what counts."""
        self.steps += self.environment.rpc_async().run_episode(self.reference, STEPS_OF_EPISODE).wait()
        if self.policy.asked != self.steps:
            raise ValueError(f"asked {self.policy.asked} times in {self.steps} steps")


class Training:
    """Forward, backward and optimizer of a layer that the server has."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.layer = rpc.remote("server", Layer)
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD, self.layer.rpc_sync().parameter_rrefs(), lr=LEARNING_RATE
        )
        self.inputs, self.targets = torch.randn(8, LAYER), torch.zeros(8, LAYER)
        self.first = self.loss_of_pass()

    def loss_of_pass(self) -> float:
        """Train once; the loss before."""
        with dist_autograd.context() as context_id:
            outputs = self.layer.rpc_sync().forward(self.inputs)
            loss = nn.functional.mse_loss(outputs, self.targets)
            dist_autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        return loss.item()

    def step(self) -> None:
        """Train once more."""
        loss = self.loss_of_pass()
        if not loss < self.first:
            raise ValueError(f"the loss was {self.first}, and is {loss}")


class Transfers:
    """A tensor of 16 MB, there and back."""

    def __init__(self) -> None:
        self.values = torch.ones(LARGE)

    def step(self) -> None:
        """One transfer each way."""
        doubled = rpc.rpc_sync("server", torch.mul, args=(self.values, 2))
        if float(doubled[-1]) != 2:
            raise ValueError(f"wrong result: {doubled}")


def rate(step: Callable[[], None], seconds: float, counts: int = 1) -> float:
    """How many per second, when each step counts that much; a fourth of the time before it is to warm up."""
    _repeat(step, seconds / 4)
    done, passed = _repeat(step, seconds)
    return counts * done / passed


def _repeat(step: Callable[[], None], seconds: float) -> tuple[int, float]:
    begin, done = time.perf_counter(), 0
    while not done or time.perf_counter() < begin + seconds:
        step()
        done += 1
    return done, time.perf_counter() - begin


def run(rank: int, meeting: str, seconds: float) -> None:
    """One process: the trainer is rank 0, and measures."""
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc("server" if rank else "trainer", rank=rank, world_size=2, rpc_backend_options=options)
    if not rank:
        rates = {
            "calls": rate(Calls().step, seconds),
            "episodes": rate(Episodes().step, seconds, STEPS_OF_EPISODE),
            "training": rate(Training().step, seconds),
            "transfers": rate(Transfers().step, seconds),
        }
        print(json.dumps(rates), flush=True)
    rpc.shutdown()


def main() -> None:
    """Run both processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--meeting", required=True, help="a file that does not exist, where the processes meet")
    parser.add_argument("--seconds", type=float, default=0.8, help="of each loop")
    arguments = parser.parse_args()
    mp.spawn(run, args=(arguments.meeting, arguments.seconds), nprocs=2, join=True)


if __name__ == "__main__":
    main()
