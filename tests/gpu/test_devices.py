"""Which device is which: two of them, and numbers that differ between processes."""

from __future__ import annotations

import pytest
import torch

from . import bodies
from .pair import DEVICE_BUFFER, MIB, Pair, start_pair

pytestmark = pytest.mark.gpu

OPTIONS = {"device_buffer": DEVICE_BUFFER}
WAY = "auto"
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def uuids() -> list[str]:
    """Of the devices, by number."""
    if any(" MIG " in f"{torch.cuda.get_device_name(index)} " for index in range(torch.cuda.device_count())):
        pytest.skip("instances of MIG are not chosen by the names of their devices")
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def visible(order: list[str]) -> dict[str, str]:
    """An environment in which the devices are numbered so."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{uuid}" for uuid in order)}


def test_a_device_that_is_chosen_by_uuid() -> None:
    """The callee sees the same one, by another name."""
    first = uuids()[0]
    with start_pair(way=WAY, options=OPTIONS, peer_env=visible([first])) as pair:
        pair.run(bodies.arrives_on, "cuda:0", first)


@two_devices
@pytest.mark.parametrize("channel", ["auto", "staging"])
def test_from_one_device_to_another(channel: str) -> None:
    """By the map, and back by its inverse."""
    options = {**OPTIONS, "device_channel": channel}
    with start_pair(way=channel, options=options, maps={"w0": {0: 1}}) as pair:
        pair.run(bodies.arrives_on, "cuda:1", uuids()[1])


@two_devices
def test_devices_that_are_numbered_differently() -> None:
    """Number 1 here is number 0 there: the map is about numbers, the memory about devices."""
    first, second, *_ = uuids()
    with start_pair(way=WAY, options=OPTIONS, maps={"w0": {0: 1}}, peer_env=visible([second, first])) as pair:
        pair.run(bodies.arrives_on, "cuda:1", first)


@pytest.mark.parametrize("pair", ["auto"], indirect=True)
def test_beside_a_group_of_gloo(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Collectives and calls in turn on one device."""
    meeting = tmp_path_factory.mktemp("gloo") / "store"
    pair.run(bodies.beside_a_group, "gloo", f"file://{meeting}", MIB, limit=90)


@two_devices
def test_beside_a_group_of_nccl(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One device each, as NCCL asks for."""
    meeting = tmp_path_factory.mktemp("nccl") / "store"
    with start_pair(way=WAY, options=OPTIONS, maps={"w0": {0: 1}}) as pair:
        pair.run(bodies.beside_a_group, "nccl", f"file://{meeting}", MIB, limit=90)
