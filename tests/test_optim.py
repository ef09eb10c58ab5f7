"""DistributedOptimizer: steps equal those of one local optimizer; errors, turns, state, and lost owners."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import aiorpc
from aiorpc import PeerLost, RpcTimeout, RpcUsageError, RRef, Worker, autograd
from aiorpc.errors import WouldBlockLoop
from aiorpc.optim import DistributedOptimizer, NoGradients
from tests.processes import workers as processes
from tests.runtime.waiting import LIMIT, until, wait_until
from tests.scripts import as_script, run

Tensor = torch.Tensor


def values(seed: int) -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def here(weight: RRef[Any]) -> Tensor:
    """A parameter's values."""
    value: Tensor = weight.to_here()
    return value.detach()


# --- handlers ---------------------------------------------------------------------------------------------------------


def make(seed: int) -> torch.nn.Parameter:
    """A parameter."""
    return torch.nn.Parameter(values(seed))


def times(weight: RRef[Tensor], x: Tensor) -> Tensor:
    """Uses a parameter of this worker."""
    return (x @ weight.local_value()).tanh()


def grad_of(weight: RRef[Tensor]) -> Tensor | None:
    """What stands in `.grad`."""
    return weight.local_value().grad


def set_grad(weight: RRef[Tensor], value: float) -> None:
    """Somebody's own gradient."""
    weight.local_value().grad = torch.full_like(weight.local_value(), value)


def retype(weight: RRef[Tensor]) -> None:
    """The parameter is of another type from now on."""
    weight.local_value().data = weight.local_value().data.float()


def scaled(weight: RRef[Tensor], factor: float) -> Tensor:
    """Its gradient is `factor` everywhere."""
    return weight.local_value().sum() * factor


def step_there(optimizer: DistributedOptimizer, context_id: int) -> None:
    """Another worker's step."""
    optimizer.step(context_id)


async def step_there_async(optimizer: DistributedOptimizer, context_id: int) -> None:
    """The same on its loop."""
    await optimizer.step(context_id)


def shares_state(optimizer: RRef[Any]) -> bool:
    """Whether what leaves the optimizer is its own memory, which the next step changes."""
    local = optimizer.local_value()
    own, copy = local.optim.state_dict(), local.state_dict()
    return bool(own["state"][0]["exp_avg"].data_ptr() == copy["state"][0]["exp_avg"].data_ptr())


def step_part(optimizer: RRef[Any], context_id: int) -> None:
    """Another worker's step of one owner's part."""
    optimizer.rpc_sync().step(context_id)


def schedule(optimizer: RRef[Any]) -> None:
    """Halve the learning rate with each step of the schedule."""
    part = optimizer.local_value()
    part.schedule = torch.optim.lr_scheduler.ExponentialLR(part.optim, 0.5)


def next_epoch(optimizer: RRef[Any]) -> float:
    """A step of the schedule, and the learning rate from then on."""
    optimizer.local_value().schedule.step()
    lr: float = optimizer.local_value().optim.param_groups[0]["lr"]
    return lr


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArithmeticError("no way back")


def breaks_backward(weight: RRef[Tensor]) -> Tensor:
    """A loss whose backward pass fails on this worker."""
    loss: Tensor = _NoWayBack.apply(weight.local_value()).sum()  # type: ignore[no-untyped-call]  # torch's
    return loss


class Plain(torch.optim.Optimizer):
    """A user's optimizer: subtracts gradients, and takes notes."""

    at_once = 0
    overlaps = 0
    mixed = 0

    def __init__(self, params: Any, pause: float = 0.0) -> None:
        super().__init__(params, {"pause": pause})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Subtract."""
        kind = Plain
        kind.at_once += 1
        kind.overlaps += kind.at_once > 1
        for group in self.param_groups:
            kind.mixed += len({float(p.grad.flatten()[0]) for p in group["params"] if p.grad is not None}) > 1
            for p in group["params"]:
                time.sleep(group["pause"])
                if p.grad is not None:
                    p -= p.grad
        kind.at_once -= 1


class Meeting(torch.optim.SGD):
    """Steps only while another of its kind does."""

    barrier = threading.Barrier(2, timeout=LIMIT)

    def step(self, closure: Any = None) -> Any:
        """Meet."""
        Meeting.barrier.wait()


class Failing(torch.optim.SGD):
    """Does not like its gradients."""

    def step(self, closure: Any = None) -> Any:
        """Fail."""
        raise ArithmeticError("these gradients are no good")


class Held(torch.optim.SGD):
    """Steps when it is let."""

    begun = 0
    let = threading.Event()

    def step(self, closure: Any = None) -> Any:
        """Wait."""
        Held.begun += 1
        assert Held.let.wait(LIMIT)
        super().step()


def held_begun() -> int:
    """How many have begun in this process."""
    return Held.begun


# --- equal to a local optimizer ---------------------------------------------------------------------------------------


def remote_training(optimizer_class: Any, steps: int, kwargs: dict[str, Any], at_once: bool = False) -> list[Tensor]:
    """Three parameters on three workers, the caller's own first. at_once: backward and step by one verb."""
    names = ["worker0", "worker1", "worker2", "worker1"]
    weights = [aiorpc.remote(name, make, seed) for seed, name in enumerate(names)]
    optimizer = DistributedOptimizer(optimizer_class, weights, **kwargs)
    for number in range(steps):
        with autograd.context() as context_id:
            x = values(100 + number)
            for name, weight in zip(names, weights, strict=True):
                x = aiorpc.rpc_sync(name, times, (weight, x))
            if at_once:
                optimizer.backward_and_step(context_id, [x.pow(2).sum()])
                continue
            autograd.backward(context_id, [x.pow(2).sum()])
            optimizer.step(context_id)
    return [here(weight) for weight in weights]


def local_training(optimizer_class: Any, steps: int, kwargs: dict[str, Any]) -> list[Tensor]:
    weights = [make(seed) for seed in range(4)]
    optimizer = optimizer_class(weights, **kwargs)
    for number in range(steps):
        x = values(100 + number)
        for weight in weights:
            x = (x @ weight).tanh()
        optimizer.zero_grad()
        x.pow(2).sum().backward()
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01}),
        (Plain, {}),
    ],
    ids=lambda value: getattr(value, "__name__", "-".join(value) if isinstance(value, dict) else None),
)
async def test_equal_to_a_local_optimizer(apart: list[Worker], optimizer_class: Any, kwargs: dict[str, Any]) -> None:
    """Any class, over several steps, with parameters on all workers and several on one."""
    got = await run(apart[0], remote_training, optimizer_class, 3, kwargs)
    expected = local_training(optimizer_class, 3, kwargs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert not torch.equal(one, values(0))


def embedding(seed: int) -> torch.nn.Parameter:
    """A table."""
    return torch.nn.Parameter(torch.randn(10, 3, generator=torch.Generator().manual_seed(seed)))


def looked_up(table: RRef[Tensor], indices: list[int]) -> Tensor:
    """Sparse gradients."""
    return torch.nn.functional.embedding(torch.tensor(indices), table.local_value(), sparse=True)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
async def test_sparse_gradients(apart: list[Worker], optimizer_class: Any) -> None:
    """As with a local optimizer; rows that were not looked up stay."""

    def script() -> Tensor:
        table = aiorpc.remote("worker1", embedding, 0)
        optimizer = DistributedOptimizer(optimizer_class, [table], lr=0.1)
        for _ in range(2):
            with autograd.context() as context_id:
                rows = aiorpc.rpc_sync("worker1", looked_up, (table, [1, 3, 3]))
                autograd.backward(context_id, [rows.pow(2).sum()])
                optimizer.step(context_id)
        return here(table)

    table = embedding(0)
    optimizer = optimizer_class([table], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.embedding(torch.tensor([1, 3, 3]), table, sparse=True).pow(2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(await run(apart[0], script), table.detach())


async def test_a_learning_rate_that_changes(apart: list[Worker]) -> None:
    """A scheduler on each owner's part changes what the next steps use, as with a local optimizer."""

    def script() -> Tensor:
        weight = aiorpc.remote("worker1", make, 0)
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        for each in optimizer.remote_optimizers:
            aiorpc.rpc_sync(each.owner(), schedule, (each,))
        for _ in range(3):
            with autograd.context() as context_id:
                autograd.backward(context_id, [aiorpc.rpc_sync("worker1", scaled, (weight, 1.0))])
                optimizer.step(context_id)
            rates.append(aiorpc.rpc_sync("worker1", next_epoch, (optimizer.remote_optimizers[0],)))
        return here(weight)

    rates: list[float] = []
    torch.testing.assert_close(await run(apart[0], script), values(0) - 0.875)
    assert rates == [0.25, 0.125, 0.0625]


async def test_a_step_with_the_gradients_of_a_context_in_which_the_caller_takes_no_part(apart: list[Worker]) -> None:
    """It is refused, though the caller may call the optimizer and knows the context; nothing is stepped."""

    def script() -> Tensor:
        weight = aiorpc.remote("worker1", make, 0)
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        (reference,) = optimizer.remote_optimizers
        with autograd.context() as context_id:
            autograd.backward(context_id, [aiorpc.rpc_sync("worker1", scaled, (weight, 1.0))])
            step = as_script(aiorpc.current(), aiorpc.rpc_sync, "worker2", step_part, (reference, int(context_id)))
            refused = pytest.raises(RpcUsageError, match="Could not find autograd context")
            with ThreadPoolExecutor() as in_no_context, refused:
                in_no_context.submit(step).result(LIMIT)
        return here(weight)

    torch.testing.assert_close(await run(apart[0], script), values(0))


# --- gradients --------------------------------------------------------------------------------------------------------


async def test_parameters_without_a_gradient_are_left_alone(apart: list[Worker]) -> None:
    """One of an owner that has another, and all of an owner; `.grad` is as it was before, even if it was not None."""

    def script() -> None:
        weights = [aiorpc.remote(f"worker{owner}", make, owner) for owner in (1, 1, 2)]
        aiorpc.rpc_sync("worker1", set_grad, (weights[1], 7.0))
        optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=1.0, momentum=0.5)
        with autograd.context() as context_id:
            autograd.backward(context_id, [aiorpc.rpc_sync("worker1", scaled, (weights[0], 2.0))])
            optimizer.step(context_id)
        torch.testing.assert_close(here(weights[0]), values(1) - 2)
        assert torch.equal(weights[1].to_here(), values(1)) and torch.equal(weights[2].to_here(), values(2))
        grads = [aiorpc.rpc_sync(weight.owner_name(), grad_of, (weight,)) for weight in weights]
        assert grads[0] is None and grads[2] is None
        assert grads[1] is not None and grads[1].eq(7).all()

    await run(apart[0], script)


async def test_no_gradient_anywhere(apart: list[Worker]) -> None:
    """A step that would do nothing says so, names the owners, and has changed nothing."""

    def script() -> None:
        weights = [aiorpc.remote(f"worker{owner}", make, owner) for owner in (1, 2)]
        optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=1.0)
        with autograd.context() as context_id:
            with pytest.raises(RpcUsageError, match=r"no parameter .* has a gradient .*worker1, worker2"):
                optimizer.step(context_id)
            autograd.backward(context_id, [aiorpc.rpc_sync("worker1", scaled, (weights[0], 2.0))])
            optimizer.step(context_id)
        with autograd.context() as context_id, pytest.raises(RpcUsageError, match="no parameter"):
            optimizer.step(context_id)
        assert torch.equal(weights[1].to_here(), values(2))

    await run(apart[0], script)


async def test_contexts_that_are_none(apart: list[Worker]) -> None:
    """One that was left, one that never was, and what is no id."""

    def script() -> None:
        optimizer = DistributedOptimizer(torch.optim.SGD, [aiorpc.remote("worker1", make, 0)], lr=1.0)
        with autograd.context() as left:
            pass
        for gone in (left, 12345):
            with pytest.raises(RpcUsageError, match=f"autograd context with id: {int(gone)}"):
                optimizer.step(gone)
        wrongs: list[Any] = [True, "1", None]
        for wrong in wrongs:
            with pytest.raises(RpcUsageError, match="an int"):
                optimizer.step(wrong)

    await run(apart[0], script)


async def test_the_gradients_stay_in_the_context(apart: list[Worker]) -> None:
    """A second step with the same context steps again, as with gradients that were not zeroed."""

    def script() -> Tensor:
        weight = aiorpc.remote("worker1", make, 0)
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [aiorpc.rpc_sync("worker1", scaled, (weight, 2.0))])
            optimizer.step(context_id)
            optimizer.step(context_id)
        return here(weight)

    torch.testing.assert_close(await run(apart[0], script), values(0) - 4)


# --- errors -----------------------------------------------------------------------------------------------------------


async def test_parameters_that_are_none(apart: list[Worker]) -> None:
    """No list, no RRefs, an empty list: the caller's mistake, and nothing is sent."""

    def script() -> None:
        weight = aiorpc.remote("worker1", make, 0)
        cases: list[tuple[Any, str]] = [
            ([], "empty parameter list"),
            (3, "a list of RRefs of parameters, not one int"),
            (weight, "not one RRef"),
            ([weight, torch.ones(1)], r"params_rref\[1\] is no RRef but a Tensor"),
        ]
        for wrong, words in cases:
            with pytest.raises(RpcUsageError, match=words):
                DistributedOptimizer(torch.optim.SGD, wrong, lr=0.1)
        made: Any = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        with pytest.raises(
            RpcUsageError, match="the class, of which each owner makes its own, and not an object of SGD"
        ):
            DistributedOptimizer(made, [weight])
        weight.to_here()

    await run(apart[0], script)


async def test_errors_of_the_construction_name_the_owner(apart: list[Worker]) -> None:
    """Wrong arguments, and a value that is no parameter on one of two owners: the class' own error."""

    def script() -> None:
        weights = [aiorpc.remote("worker1", make, 0), aiorpc.remote("worker2", str, 5)]
        with pytest.raises(TypeError, match="learning") as caught:
            DistributedOptimizer(torch.optim.SGD, weights[:1], learning=1)
        assert "worker 'worker1'" in caught.value.__notes__[-1]
        with pytest.raises(TypeError, match="Tensor") as caught:
            DistributedOptimizer(torch.optim.SGD, weights, lr=1.0)
        assert "worker 'worker2'" in caught.value.__notes__[-1]
        weights[1].to_here()

    await run(apart[0], script)


async def test_errors_of_a_step_name_the_owner(apart: list[Worker]) -> None:
    """What the optimizer raises; `.grad` is put back all the same."""

    def script() -> None:
        weight = aiorpc.remote("worker2", make, 0)
        optimizer = DistributedOptimizer(Failing, [weight], lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [aiorpc.rpc_sync("worker2", scaled, (weight, 2.0))])
            with pytest.raises(ArithmeticError, match="no good") as caught:
                optimizer.step(context_id)
        assert "worker 'worker2'" in caught.value.__notes__[-1]
        assert aiorpc.rpc_sync("worker2", grad_of, (weight,)) is None

    await run(apart[0], script)


@pytest.mark.parametrize("owner", ["worker0", "worker2"])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_parameter_of_another_type_since_the_forward_pass(
    apart: list[Worker], owner: str, at_once: bool
) -> None:
    """It steps with its gradient in the type that it has now; also Adam, which takes no other."""

    def script() -> Tensor:
        weight = aiorpc.remote(owner, make, 0)
        optimizer = DistributedOptimizer(torch.optim.Adam, [weight], lr=1.0)
        with autograd.context() as context_id:
            loss = aiorpc.rpc_sync(owner, scaled, (weight, 2.0))
            aiorpc.rpc_sync(owner, retype, (weight,))
            if at_once:
                optimizer.backward_and_step(context_id, [loss])
            else:
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
        assert aiorpc.rpc_sync(owner, grad_of, (weight,)) is None
        return here(weight)

    torch.testing.assert_close(await run(apart[0], script), (values(0) - 1).float())


# --- backward and step at once ----------------------------------------------------------------------------------------


async def test_backward_and_step_are_what_both_are_one_after_the_other(apart: list[Worker]) -> None:
    """Over several steps, in a graph that comes to one worker twice; also the worker that runs the pass steps."""
    got = await run(apart[0], remote_training, torch.optim.Adam, 3, {"lr": 0.01}, True)
    for one, other in zip(got, local_training(torch.optim.Adam, 3, {"lr": 0.01}), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


async def test_backward_and_step_on_the_loop_can_be_awaited(current_pair: list[Worker]) -> None:
    """It does not block there."""
    weight = aiorpc.remote("worker1", make, 0)
    optimizer = await DistributedOptimizer.create(torch.optim.SGD, [weight], lr=1.0)
    async with autograd.context() as ctx:
        loss = await aiorpc.call("worker1", scaled, weight, 2.0)
        await optimizer.backward_and_step(ctx, [loss])
    torch.testing.assert_close((await weight).detach(), values(0) - 2)


async def test_backward_and_step_where_nobody_has_a_gradient(apart: list[Worker]) -> None:
    """It says so as a step does, whether an owner had no part in the pass or had one for others' parameters."""

    def script() -> None:
        weights = [aiorpc.remote("worker1", make, seed) for seed in range(2)] + [aiorpc.remote("worker2", make, 2)]
        for others in (weights[1:2], weights[2:]):
            optimizer = DistributedOptimizer(torch.optim.SGD, others, lr=1.0)
            with autograd.context() as context_id, pytest.raises(NoGradients, match="no parameter of this optimizer"):
                optimizer.backward_and_step(context_id, [aiorpc.rpc_sync("worker1", scaled, (weights[0], 2.0))])
        with autograd.context() as context_id:  # of two owners one has a gradient: the other is left alone
            optimizer = DistributedOptimizer(torch.optim.SGD, [weights[0], weights[2]], lr=1.0)
            optimizer.backward_and_step(context_id, [aiorpc.rpc_sync("worker1", scaled, (weights[0], 2.0))])
        torch.testing.assert_close(here(weights[0]), values(0) - 2)
        assert torch.equal(here(weights[1]), values(1)) and torch.equal(here(weights[2]), values(2))

    await run(apart[0], script)


async def test_an_owner_steps_only_if_the_pass_has_reached_its_parameters(apart: list[Worker]) -> None:
    """Gradients of an earlier pass are no reason, neither where the pass is run nor where a part of it is."""

    def script() -> None:
        own, there, further = (aiorpc.remote(f"worker{owner}", make, owner) for owner in range(3))
        optimizer = DistributedOptimizer(torch.optim.SGD, [own, there, further], lr=1.0)
        with autograd.context() as context_id:
            losses = [scaled(own, 2.0), aiorpc.rpc_sync("worker2", scaled, (further, 2.0))]
            autograd.backward(context_id, losses)
            x = torch.ones(4, 4, dtype=torch.float64).requires_grad_()  # a leaf of this worker, which is no parameter
            loss = aiorpc.rpc_sync("worker2", torch.sum, (aiorpc.rpc_sync("worker1", times, (there, x)),))
            optimizer.backward_and_step(context_id, [loss])
        assert torch.equal(here(own), values(0)) and torch.equal(here(further), values(2))
        assert not torch.equal(here(there), values(1))

    await run(apart[0], script)


async def test_backward_and_step_that_is_cancelled(current_pair: list[Worker]) -> None:
    """An owner does not step if its part of the pass was not done by then."""
    reached, released = threading.Event(), threading.Event()
    weight = aiorpc.remote("worker1", make, 0)
    optimizer = await DistributedOptimizer.create(torch.optim.SGD, [weight], lr=1.0)
    owned: Tensor = current_pair[1]._node.references.value(*weight._rref).wait()

    def wait(gradient: Tensor) -> None:
        reached.set()
        released.wait(LIMIT)

    owned.register_hook(wait)
    async with autograd.context() as ctx:
        loss = await aiorpc.call("worker1", scaled, weight, 2.0)
        running = optimizer.backward_and_step(ctx, [loss])
        await until(reached.is_set)
        assert running.cancel()
        parts = current_pair[1]._node.gradients.get(ctx).parts
        await until(lambda: not parts, LIMIT / 3)  # sooner than the time of the pass is up
        released.set()
        pool = current_pair[1]._node.engine.pool
        await until(lambda: pool.threads == pool.idle)
    assert torch.equal((await weight).detach(), values(0))


@pytest.mark.parametrize("owner", ["worker0", "worker2"])
async def test_errors_of_backward_and_step_name_the_owner(apart: list[Worker], owner: str) -> None:
    """What the optimizer raises ends the pass, at the worker that runs it as elsewhere."""

    def script() -> None:
        weight = aiorpc.remote(owner, make, 0)
        optimizer = DistributedOptimizer(Failing, [weight], lr=1.0)
        with autograd.context() as context_id:
            losses = [aiorpc.rpc_sync(owner, scaled, (weight, 2.0))]
            with pytest.raises(ArithmeticError, match="no good") as caught:
                optimizer.backward_and_step(context_id, losses)
        assert f"backward_and_step(), on worker {owner!r}" in "".join(caught.value.__notes__)
        assert aiorpc.rpc_sync(owner, grad_of, (weight,)) is None

    await run(apart[0], script)


async def test_a_pass_that_fails_does_not_step_where_it_failed(apart: list[Worker]) -> None:
    """The error of the backward pass is that of both, and the parameters behind it are as they were."""

    def script() -> Tensor:
        weight = aiorpc.remote("worker1", make, 0)
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0)
        with autograd.context() as context_id:
            loss = aiorpc.rpc_sync("worker1", breaks_backward, (weight,))
            with pytest.raises(ArithmeticError, match="no way back"):
                optimizer.backward_and_step(context_id, [loss])
        return here(weight)

    assert torch.equal(await run(apart[0], script), values(0))


# --- several trainers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["one optimizer", "one for each trainer"])
async def test_trainers_step_the_same_parameters_at_once(apart: list[Worker], own: bool) -> None:
    """Steps are serialised, also those of different optimizers; each sees the gradients of its own context only."""
    trainers, rounds = 4, 5
    Plain.at_once = Plain.overlaps = Plain.mixed = 0

    def prepare() -> tuple[list[RRef[Tensor]], DistributedOptimizer]:
        weights = [aiorpc.remote("worker1", make, seed) for seed in range(2)]
        return weights, DistributedOptimizer(Plain, weights, pause=0.002)  # type: ignore[return-value]

    def train(optimizer: DistributedOptimizer, weights: list[RRef[Tensor]], number: int) -> None:
        if own:
            optimizer = DistributedOptimizer(Plain, weights, pause=0.002)
        for _ in range(rounds):
            with autograd.context() as context_id:
                calls = [aiorpc.rpc_async("worker1", scaled, (weight, 2.0**number)) for weight in weights]
                autograd.backward(context_id, [call.wait() for call in calls])
                optimizer.step(context_id)

    weights, optimizer = await run(apart[0], prepare)
    await asyncio.gather(*[run(apart[0], train, optimizer, weights, number) for number in range(trainers)])
    total = rounds * sum(2.0**number for number in range(trainers))
    for seed, weight in enumerate(weights):
        torch.testing.assert_close((await weight).detach(), values(seed) - total, rtol=0, atol=1e-12)
    assert (Plain.overlaps, Plain.mixed) == (0, 0)


async def test_optimizers_that_share_nothing_step_at_once(apart: list[Worker]) -> None:
    """Each of two steps on one owner waits for the other to begin."""

    def train(seed: int) -> None:
        weight = aiorpc.remote("worker1", make, seed)
        optimizer = DistributedOptimizer(Meeting, [weight], lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [aiorpc.rpc_sync("worker1", scaled, (weight, 2.0))])
            optimizer.step(context_id)

    await asyncio.gather(run(apart[0], train, 0), run(apart[2], train, 1))


async def test_a_step_whose_caller_gave_up_is_not_made(apart: list[Worker]) -> None:
    """It waits for its turn, is given up, and leaves the parameters alone when its turn comes."""
    Held.begun = 0
    Held.let.clear()

    def script() -> Tensor:
        weight = aiorpc.remote("worker1", make, 0)
        optimizer = DistributedOptimizer(Held, [weight], lr=1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [aiorpc.rpc_sync("worker1", scaled, (weight, 2.0))])
            first = threading.Thread(target=as_script(aiorpc.current(), optimizer.step, context_id))
            first.start()
            wait_until(lambda: Held.begun == 1)
            second = optimizer.remote_optimizers[0].rpc_async().step(int(context_id))
            wait_until(lambda: apart[1]._node.engine.pool.blocked == 1)
            second.cancel()
            aiorpc.rpc_sync("worker1", len, ("",))  # the news of it has come by then
            Held.let.set()
            first.join(LIMIT)
            assert not first.is_alive()
            wait_until(lambda: apart[1].is_idle())
        return here(weight)

    torch.testing.assert_close(await run(apart[0], script), values(0) - 2)
    assert Held.begun == 1


async def test_a_step_of_this_worker_does_not_wait_for_ever(apart: list[Worker]) -> None:
    """One that runs in the caller's thread waits for its turn as long as a call would, and then has not stepped."""
    Held.begun = 0
    Held.let.clear()

    def script() -> tuple[Tensor, Tensor]:
        weight: RRef[Tensor] = aiorpc.RRef(make(0))
        optimizer = DistributedOptimizer(Held, [weight], lr=1.0)
        before = weight.local_value().detach().clone()
        with autograd.context() as context_id:
            autograd.backward(context_id, [scaled(weight, 2.0)])
            first = threading.Thread(target=as_script(aiorpc.current(), optimizer.step, context_id))
            first.start()
            wait_until(lambda: Held.begun == 1)
            aiorpc.current()._node.engine.default_timeout = 0.05
            with pytest.raises(RpcTimeout, match="it did not step"):
                optimizer.step(context_id)
            aiorpc.current()._node.engine.default_timeout = LIMIT
            Held.let.set()
            first.join(LIMIT)
            assert not first.is_alive()
        return before, weight.local_value().detach()

    before, after = await run(apart[0], script)
    torch.testing.assert_close(after, before - 2)
    assert Held.begun == 1


# --- blocking and awaitable -------------------------------------------------------------------------------------------


async def test_on_the_loop_everything_can_be_awaited(current_pair: list[Worker]) -> None:
    """And what would block is refused, with the words of what to use; the context's verbs on the loop."""
    weight = aiorpc.remote("worker1", make, 0)
    with pytest.raises(WouldBlockLoop, match=r"await DistributedOptimizer\.create"):
        DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0)
    optimizer = await DistributedOptimizer.create(torch.optim.SGD, [weight], lr=1.0, momentum=0.5)
    async with autograd.context() as ctx:
        await ctx.backward([await aiorpc.call("worker1", scaled, weight, 2.0)])
        await optimizer.step(ctx)
    async with autograd.context() as ctx:
        with pytest.raises(RpcUsageError, match="no parameter"):
            await optimizer.step(ctx)
    torch.testing.assert_close((await weight).detach(), values(0) - 2)
    with pytest.raises(WouldBlockLoop, match=r"await optimizer\.state_dict_async"):
        optimizer.state_dict()
    with pytest.raises(WouldBlockLoop, match=r"await optimizer\.load_state_dict_async"):
        optimizer.load_state_dict({})
    state = await optimizer.state_dict_async()
    assert state["worker1"]["state"][0]["momentum_buffer"].eq(2).all()
    await optimizer.load_state_dict_async(state)
    with pytest.raises(TypeError, match="learning"):
        await DistributedOptimizer.create(torch.optim.SGD, [weight], learning=1)


@pytest.mark.parametrize("stepper", [step_there, step_there_async])
async def test_another_worker_steps(apart: list[Worker], stepper: Any) -> None:
    """The optimizer travels, and is the same one there; `def` handlers and coroutines."""

    def script() -> Tensor:
        weight = aiorpc.remote("worker1", make, 0)
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0, momentum=0.5)
        with autograd.context() as context_id:
            autograd.backward(context_id, [aiorpc.rpc_sync("worker1", scaled, (weight, 2.0))])
            optimizer.step(context_id)
            aiorpc.rpc_sync("worker2", stepper, (optimizer, int(context_id)))
        return here(weight)

    torch.testing.assert_close(await run(apart[0], script), values(0) - 2 - 3)


# --- state ------------------------------------------------------------------------------------------------------------


async def test_state_goes_back_and_forth(apart: list[Worker]) -> None:
    """A new optimizer that gets the state goes on as the old one would; what came is a copy."""

    def step(optimizer: DistributedOptimizer, weights: list[RRef[Tensor]]) -> None:
        with autograd.context() as context_id:
            calls = [aiorpc.rpc_async(weight.owner_name(), scaled, (weight, 2.0)) for weight in weights]
            autograd.backward(context_id, [call.wait() for call in calls])
            optimizer.step(context_id)

    def script(renew: bool) -> tuple[dict[str, Any], list[Tensor]]:
        weights = [aiorpc.remote(f"worker{owner}", make, owner) for owner in (1, 2, 1)]
        optimizer = DistributedOptimizer(torch.optim.Adam, weights, lr=0.1)
        step(optimizer, weights)  # type: ignore[arg-type]
        state = optimizer.state_dict()
        assert not aiorpc.rpc_sync("worker1", shares_state, (optimizer.remote_optimizers[0],))
        if renew:
            optimizer = DistributedOptimizer(torch.optim.Adam, weights, lr=0.5)
            optimizer.load_state_dict(state)
            for owner in state.values():
                for each in owner["state"].values():
                    each["exp_avg"].fill_(1e6)
        step(optimizer, weights)  # type: ignore[arg-type]
        return state, [here(weight) for weight in weights]

    state, expected = await run(apart[0], script, False)
    assert {name: sorted(owner["state"]) for name, owner in state.items()} == {"worker1": [0, 1], "worker2": [0]}
    assert all(owner["param_groups"][0]["lr"] == 0.1 for owner in state.values())
    _, got = await run(apart[0], script, True)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


async def test_a_state_of_others_is_refused(apart: list[Worker]) -> None:
    """The names must be those of the owners; what does not fit raises the optimizer's error, with the owner's name."""

    def script() -> None:
        weights = [aiorpc.remote(f"worker{owner}", make, owner) for owner in (1, 2)]
        optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.1)
        state = optimizer.state_dict()
        wrongs: list[Any] = [{}, {"worker1": state["worker1"]}, {**state, "worker0": {}}, None]
        for wrong in wrongs:
            with pytest.raises(RpcUsageError, match="worker1, worker2"):
                optimizer.load_state_dict(wrong)
        with pytest.raises(ValueError, match="param") as caught:
            optimizer.load_state_dict({**state, "worker2": {"state": {}, "param_groups": []}})
        assert "worker 'worker2'" in caught.value.__notes__[-1]

    await run(apart[0], script)


# --- processes --------------------------------------------------------------------------------------------------------


async def losses_of(worker: Worker, weights: list[RRef[torch.Tensor]]) -> list[torch.Tensor]:
    """One of each, made by its owner; w1 owns the first, w0 the second."""
    return [await worker.call(name, scaled, weight, 1.0) for name, weight in zip(("w1", "w0"), weights, strict=True)]


async def test_a_lost_owner() -> None:
    """Killed while it steps: PeerLost, though the other owner is still at it; from then on at once."""
    Held.begun = 0
    Held.let.clear()
    async with processes.group(2, ended=("w1",)) as (worker, children):
        weights = [aiorpc.remote(name, make, 0) for name in ("w1", "w0")]
        optimizer = await DistributedOptimizer.create(Held, weights, lr=1.0)
        async with autograd.context() as ctx:
            losses = await losses_of(worker, weights)  # type: ignore[arg-type]
            await ctx.backward(losses)
            step = optimizer.step(ctx)

            async def both() -> bool:
                return Held.begun == 1 and await worker.call("w1", held_begun) == 1

            await processes.until(both)
            children["w1"].kill()
            with pytest.raises(PeerLost, match="w1"):
                await asyncio.wait_for(_of(step), LIMIT)
            with pytest.raises(PeerLost, match="w1"):
                await asyncio.wait_for(_of_step(optimizer, ctx), LIMIT)
            assert Held.begun == 1
            Held.let.set()
        with contextlib.suppress(PeerLost):
            await weights[0]
        await until(worker.is_idle)


async def _of(future: aiorpc.Future[None]) -> None:
    await future


async def _of_step(optimizer: DistributedOptimizer, context_id: int) -> None:
    await optimizer.step(context_id)
