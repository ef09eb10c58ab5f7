"""Everything that is a tensor, from one worker to the other and back: what arrives is what was sent."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from aiorpc import Worker
from aiorpc.errors import SerializationError
from tests.tensors import KINDS, Tagged, assert_same, numbers, tagged, with_note

Tensor = torch.Tensor

# torch tells once in a process that it is still working on these kinds; the tests make them themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
]


def echo(*values: Any) -> list[Any]:
    return list(values)


def write_and_read(writable: Tensor, others: Sequence[Tensor]) -> list[Any]:
    """Write to one tensor in the handler, and say what the others have there then."""
    with torch.no_grad():
        first_of(writable).fill_(42)
    return [first_of(other).item() for other in others]


def first_of(tensor: Tensor) -> Tensor:
    return tensor[(0,) * tensor.ndim]


async def test_kinds_arrive_at_a_worker(pair: list[Worker]) -> None:
    """All of them in one message there and back, and each by itself."""
    sent = {name: make() for name, make in KINDS.items()}
    (together,) = await pair[0].call("worker1", echo, sent)
    assert list(together) == list(sent)
    for name, value in sent.items():
        (alone,) = await pair[0].call("worker1", echo, value)
        assert_same(alone, value)
        assert_same(together[name], value)


# --- sharing ----------------------------------------------------------------------------------------------------------


def sharing_cases() -> dict[str, tuple[Any, ...]]:
    """Groups of tensors over one storage: the first is written to, the others must see it."""
    base = numbers(8, 8)
    parameter = nn.Parameter(numbers())
    words = torch.zeros(1000, dtype=torch.int32)
    own: Any = tagged(numbers())
    return {
        "views": (base, base[0], base.t(), base[:, :3]),
        "parameter and its data": (parameter, parameter.data),
        "types": (words, words.view(torch.int16), words[:2].view(torch.uint8)),
        "subclass and its memory": (own, own.friend),
        "the same twice": (base, base),
    }


@pytest.mark.parametrize("name", sharing_cases())
@pytest.mark.parametrize("place", ["bare", "inside", "mixed"])
async def test_views_share_at_the_worker(pair: list[Worker], name: str, place: str) -> None:
    """What shared memory at the caller does so in the handler, whether bare or in a container."""
    first, *others = sharing_cases()[name]
    assert all(first_of(other).item() != 42 for other in others)
    if place == "bare":
        seen = await pair[0].call("worker1", write_bare, first, *others)
    elif place == "inside":
        seen = await pair[0].call("worker1", write_inside, {"first": first, "others": others})
    else:
        seen = await pair[0].call("worker1", write_mixed, first, others)
    assert seen == [42] * len(others)
    assert first_of(first) != 42


def write_bare(first: Tensor, *others: Tensor) -> list[Any]:
    return write_and_read(first, others)


def write_inside(group: dict[str, Any]) -> list[Any]:
    return write_and_read(group["first"], group["others"])


def write_mixed(first: Tensor, others: list[Tensor]) -> list[Any]:
    return write_and_read(first, others)


# --- modules and their state ------------------------------------------------------------------------------------------


def network(layers: int) -> Any:
    return nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)) for _ in range(layers)])


def apply(module: nn.Module, value: Tensor) -> Tensor:
    module.eval()
    with torch.no_grad():
        result: Tensor = module(value)
    return result


async def test_state_dict_arrives_in_order(pair: list[Worker]) -> None:
    """A state_dict of more than 300 tensors in one message: names in order, tensors equal, ``_metadata`` kept."""
    sent = network(45).state_dict()
    assert len(sent) > 300
    (arrived,) = await pair[0].call("worker1", echo, sent)
    assert type(arrived) is collections.OrderedDict
    assert list(arrived) == list(sent)
    assert vars(arrived) == vars(sent)
    assert "_metadata" in vars(arrived)
    for name, tensor in sent.items():
        assert_same(arrived[name], tensor)
    network(45).load_state_dict(arrived)


async def test_module_arrives_whole(pair: list[Worker]) -> None:
    """A module computes the same there; tied weights stay tied, notes on parameters stay, buffers are buffers."""
    module = network(2)
    module.register_parameter("tied", module[0][0].weight)
    module.own = nn.Buffer(numbers(3), persistent=False)
    with_note(module[1][0].weight)
    value = numbers(1, 3, 16, 16)
    assert torch.equal(await pair[0].call("worker1", apply, module, value), apply(module, value))
    (arrived,) = await pair[0].call("worker1", echo, module)
    assert arrived.tied is arrived[0][0].weight
    assert arrived[1][0].weight.note == ["text", 1]
    assert list(arrived.state_dict()) == list(module.state_dict())
    assert isinstance(arrived.own, nn.Buffer)


# --- small things -----------------------------------------------------------------------------------------------------


# --- what cannot travel -----------------------------------------------------------------------------------------------


def freed() -> Any:
    tensor = numbers()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(numbers())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fake": (fake, r"a torch.float32 tensor of shape \(64, 512\) is a FakeTensor: it has no values"),
    "mkldnn": (lambda: numbers().to_mkldnn(), r"has the layout torch._mkldnn, .*; send tensor.to_dense\(\)"),
    "freed": (freed, r"holds a torch.float32 tensor of shape \(64, 512\) whose memory was freed"),
    "freed subclass": (lambda: freed().as_subclass(Tagged), "a torch.float32 tensor .* whose memory was freed"),
    "meta storage": (lambda: torch.UntypedStorage(4, device="meta"), "a storage of 4 bytes on meta has no way"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_travel_is_refused(pair: list[Worker], name: str) -> None:
    """The caller gets a SerializationError that says which tensor and why, as argument and as result."""
    make, expected = REFUSED[name]
    with pytest.raises(SerializationError, match=rf"argument 0 of .*echo for worker 'worker1' .*{expected}"):
        await pair[0].call("worker1", echo, make())
    with pytest.raises(SerializationError, match=expected):
        await pair[0].call("worker1", make)
    assert await pair[0].call("worker1", echo, 1) == [1]
