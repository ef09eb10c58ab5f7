"""Published tensors that lie on devices, or are to lie there; the devices do not exist (`tests.fakes`)."""

from __future__ import annotations

import pytest
import torch

import aiorpc as rpc
from aiorpc import Worker
from tests.fakes.cuda import FakeCuda
from tests.runtime.test_devices import group
from tests.runtime.test_publishing import LARGE, number_of, weights


async def test_what_lies_on_a_device_is_copied_to_the_host_once() -> None:
    """As it is at this point of the stream; in between tensors of the host, sharing kept."""
    async with group({}, {}) as (fake, workers):
        versions = workers[1].subscribe("policy")
        for number in (1, 2, 3):
            assert (await (await publish_from_devices(fake, workers[0], number)).delivered()).reached
            got = (await anext(versions)).value
            assert all(tensor.device.type == "cpu" for tensor in got.values())
            assert number_of(got) == number
            got["a"][5] = -1.0
            assert got["part"][0] == -1.0
        versions.close()


def publish_from_devices(fake: FakeCuda, worker: Worker, number: int) -> rpc.Future[rpc.types.Publication]:
    """Nothing that lies on a device outlives this but for what publishing holds."""
    whole = fake.tensor_of(torch.full((LARGE,), float(number)), 0)
    value = {"a": whole, "part": whole[5:9], "other": fake.tensor_of(torch.full((9,), float(number)), 1)}
    return worker.publish("policy", value | {"host": torch.full((LARGE,), float(number))})


async def test_tensors_are_moved_where_the_reader_wants_them(pair: list[Worker]) -> None:
    """With their dtypes, strides and shared storages; ``meta`` stands for a device that has no bytes."""
    base = torch.arange(LARGE, dtype=torch.float64).reshape(256, -1)
    value = {"whole": base, "turned": base.t(), "parameter": torch.nn.Parameter(torch.ones(9)), "other": [1, "two"]}
    await pair[0].publish("tree", value)
    async with pair[1].subscribe("tree", map_location="meta") as versions:
        got = (await anext(versions)).value
    assert [got[name].device.type for name in ("whole", "turned", "parameter")] == ["meta"] * 3
    assert got["turned"].shape == base.t().shape and got["turned"].stride() == base.t().stride()
    assert got["whole"].untyped_storage()._cdata == got["turned"].untyped_storage()._cdata
    assert type(got["parameter"]) is torch.nn.Parameter and got["parameter"].requires_grad
    assert got["other"] == [1, "two"]
    async with pair[1].subscribe("tree", map_location="cpu") as versions:
        got = (await anext(versions)).value
    assert torch.equal(got["whole"], base) and torch.equal(got["turned"], base.t())


async def test_a_device_that_cannot_be_is_refused(pair: list[Worker]) -> None:
    """Before anything is sent."""
    with pytest.raises(rpc.RpcUsageError, match="map_location"):
        pair[1].subscribe("policy", map_location="nowhere")
    await pair[0].publish("policy", weights(1))
