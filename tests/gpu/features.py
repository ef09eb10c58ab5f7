"""What w0 does on its device with what is built on calls: groups, publication, queues, gradients, modules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import torch
from torch import nn

import aiorpc as rpc
from aiorpc.nn import RemoteModule
from aiorpc.optim import DistributedOptimizer
from aiorpc.testing import cluster

from .bodies import HERE, LONG, MIB, ROUNDS, echo, total

Tensor = torch.Tensor

# --- many tensors, long ones, and to oneself --------------------------------------------------------------------------


def sums(tensors: list[Tensor]) -> tuple[list[float], list[str]]:
    """Of each, and where it lies."""
    return [float(tensor.sum()) for tensor in tensors], [str(tensor.device) for tensor in tensors]


async def many_in_one_call(count: int) -> None:
    """Tensors of all sizes and of both places in one message."""
    places = [HERE, "cpu"]
    tensors = [torch.full((1 + 997 * number,), float(number), device=places[number % 2]) for number in range(count)]
    found, devices = await rpc.call("w1", sums, tensors)
    assert found == [number * (1.0 + 997 * number) for number in range(count)]
    assert devices == [places[number % 2] for number in range(count)]


def is_ramp(tensor: Tensor) -> bool:
    """Whether each number is its own place."""
    return torch.equal(tensor, torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device))


async def a_long_one(size: int) -> None:
    """Many times as long as what it goes through; each part lands in its place, there and back."""
    ramp = torch.arange(size // 4, dtype=torch.int32, device=HERE)
    assert await rpc.call("w1", is_ramp, ramp)
    assert is_ramp(await rpc.call("w1", echo, ramp))


async def to_oneself(size: int) -> None:
    """A worker calls itself."""
    for cycles in ROUNDS:
        tensor = torch.zeros(size, dtype=torch.uint8, device=HERE)
        torch.cuda._sleep(cycles)
        tensor.fill_(7)
        assert await rpc.call("w0", total, tensor) == 7 * size


async def between_workers_of_one_process(size: int) -> None:
    """They hand tensors over directly."""
    options = rpc.RpcBackendOptions(device_maps={"worker1": {0: 0}})
    async with cluster(2, options=[options, rpc.RpcBackendOptions()]) as workers:
        for cycles in ROUNDS:
            tensor = torch.zeros(size, dtype=torch.uint8, device=HERE)
            torch.cuda._sleep(cycles)
            tensor.fill_(7)
            future = workers[0].call("worker1", echo, tensor)
            tensor.fill_(9)
            back = await future
            assert int(back.sum()) == 7 * size


# --- groups, queues ---------------------------------------------------------------------------------------------------


async def called_as_a_group(size: int) -> None:
    """One call to a group, this worker among it; the tensor is of the device."""
    for cycles in ROUNDS:
        tensor = torch.zeros(size, dtype=torch.uint8, device=HERE)
        torch.cuda._sleep(cycles)
        tensor.fill_(7)
        future = rpc.group(["w0", "w1"]).call(total, tensor)
        tensor.fill_(9)
        assert (await future).values() == [7 * size, 7 * size]


async def take(name: str) -> tuple[str, float]:
    """Get an item: where it lies, and its sum."""
    item: Tensor = await rpc.queue(name, owner="w0").get()
    return str(item.device), float(item.sum())


async def give(name: str, size: int) -> None:
    """Put one."""
    await rpc.queue(name, owner="w0").put(torch.full((size,), 3.0, device=HERE))


async def through_a_queue(size: int) -> None:
    """Put here and got there, and the other way round."""
    queue: rpc.Queue[Any] = rpc.Queue("samples", maxsize=4)
    for number in range(5):
        await queue.put(torch.full((size,), float(number), device=HERE))
        assert await rpc.call("w1", take, "samples") == (HERE, float(number) * size)
        await rpc.call("w1", give, "samples", size)
        item = await queue.get()
        assert (str(item.device), float(item.sum())) == (HERE, 3.0 * size)
    await queue.shutdown()


# --- publication ------------------------------------------------------------------------------------------------------


async def read(name: str, least: int, place: str | None) -> dict[str, Any]:
    """Take a version of that number or a later one: devices, sums, and whether `view` is a part of `weight`."""
    async for version in rpc.subscribe(name, map_location=place, timeout=30):
        if version.version >= least:
            value: dict[str, Tensor] = version.value
            value["view"][0] += 1
            return {
                "version": version.version,
                "devices": {key: str(each.device) for key, each in value.items()},
                "sums": {key: float(each.double().sum()) for key, each in value.items()},
                "shared": float(value["weight"][5]) == float(value["view"][0]),
            }
    raise AssertionError("no version came")


async def published(size: int) -> None:
    """Weights on the device, filled by a kernel that is still to run: each reader has them as they were."""
    weight, host = torch.zeros(size, device=HERE), torch.ones(size)
    for number, cycles in enumerate(ROUNDS * 2, start=1):
        torch.cuda._sleep(cycles)
        weight.fill_(number)
        value = {"weight": weight, "view": weight[5:9], "half": weight[:9].bfloat16(), "host": host}
        version = await rpc.publish("policy", value)
        weight.fill_(-1)
        for place, expected in ((HERE, HERE), ("cpu", "cpu"), (None, "cpu")):
            found = await rpc.call("w1", read, "policy", version.version, place)
            assert found["version"] == version.version
            assert set(found["devices"].values()) == {expected}
            assert found["sums"]["weight"] == number * size + 1, "something else than what was published"
            assert found["sums"] | {"weight": 0.0} == {
                "weight": 0.0,
                "view": number * 4.0 + 1,
                "half": number * 9.0,
                "host": float(size),
            }
            assert found["shared"]
        assert (await version.delivered(timeout=30)).reached
    await rpc.unpublish("policy")


# --- gradients and modules --------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer whose numbers are known."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(size * size, device=HERE).reshape(size, size).float() / size**2)

    def forward(self, x: Tensor) -> Tensor:
        """Behind a kernel."""
        torch.cuda._sleep(LONG // 100)
        return torch.tanh(x @ self.weight)

    def gradient(self, context_id: int) -> Tensor:
        """What a context has for the weight."""
        return rpc.autograd.get_gradients(context_id)[self.weight]

    def value(self) -> Tensor:
        """The weight."""
        return self.weight.detach()


async def gradients(size: int) -> None:
    """A pass through w1 gives what one in this process gives, and an optimizer steps with it where the weight is."""
    there, here = rpc.remote("w1", Layer, size), Layer(size)
    optimizer = await DistributedOptimizer.create(torch.optim.SGD, [await rpc.call("w1", weight_of, there)], lr=0.1)
    local = torch.optim.SGD(here.parameters(), lr=0.1)
    for number in range(5):
        x = (torch.arange(3 * size, device=HERE).reshape(3, size).float() / (number + 3 * size)).requires_grad_()
        local.zero_grad()
        (x_grad,) = torch.autograd.grad((here(x * 2) ** 2).sum(), [x], retain_graph=False)
        (here(x * 2) ** 2).sum().backward()
        async with rpc.autograd.context() as context:
            y = await there.rpc_async().forward(x * 2)
            assert str(y.device) == HERE
            await context.backward([(y**2).sum()])
            torch.testing.assert_close(context.gradients()[x], x_grad)
            torch.testing.assert_close(await there.rpc_async().gradient(context), here.weight.grad)
            await optimizer.step(context)
        local.step()
        torch.testing.assert_close(await there.rpc_async().value(), here.weight.detach())


def weight_of(layer: rpc.RRef[Layer]) -> rpc.RRef[nn.Parameter]:
    """A reference to the weight, at its owner."""
    return rpc.RRef(layer.local_value().weight)


async def remote_module() -> None:
    """On w1's device: what is sent from the host arrives on the device, and by the map what is sent from one does."""
    module = await RemoteModule.create("w1/cuda:0", nn.Linear, (4, 2))
    for place in ("cpu", HERE):
        y = await module.forward_async(torch.ones(3, 4, device=place))
        assert str(y.device) == HERE
        assert y.shape == (3, 2)
    parameters = await module.remote_parameters_async()
    assert [str((await each).device) for each in parameters] == [HERE, HERE]


# --- streams of tensors, and calls that are called off ----------------------------------------------------------------


async def count_up(size: int) -> AsyncIterator[Tensor]:
    """Without an end."""
    number = 0
    while True:
        yield torch.full((size,), float(number), device=HERE)
        number += 1
        await asyncio.sleep(0)


async def left_early(size: int) -> None:
    """Streams that are left and calls that are cancelled with tensors under way leave the channel as it was."""
    for _ in range(20):
        stream = rpc.stream("w1", count_up, size)
        async for item in stream:
            if float(item[0]) == 3.0:
                break
        await stream.aclose()
        calls = [rpc.call("w1", echo, torch.ones(size, device=HERE)) for _ in range(8)]
        for call in calls[::2]:
            call.cancel()
        for call in calls[1::2]:
            assert float((await call).sum()) == size
    assert is_ramp(await rpc.call("w1", echo, torch.arange(20 * MIB, device=HERE)))
