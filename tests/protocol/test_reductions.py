"""Tensors that are not dense, by codec and layout alone: what stays in the body, what is shared, whose say counts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from aiorpc.channels.accelerator import DeviceBuffer, device_index
from aiorpc.channels.landing import Landing
from aiorpc.channels.layout import describe, rebuild
from aiorpc.channels.routes import going
from aiorpc.devices import to_device_map
from aiorpc.errors import SerializationError
from aiorpc.protocol.codec import Incoming, Outgoing, decode_values, encode_values
from aiorpc.protocol.messages import Reply, read_values, write
from aiorpc.protocol.packing import pack, unpack
from aiorpc.protocol.reductions import load_nested, load_sparse
from tests.fakes.cuda import FakeCuda
from tests.tensors import (
    KINDS,
    ROWS,
    Pair,
    Reducing,
    Stateful,
    Tagged,
    Watching,
    assert_same,
    numbers,
    travel,
)

Tensor = torch.Tensor
# Of what stands in the body for one of the large things below: names of classes and functions, sizes, positions.
BODY = 1500
#: What numpy itself writes into the pickle.
IN_BODY = {"array: permuted"} if numpy.lib.NumpyVersion(numpy.__version__) < "2.3.0" else set[str]()

# torch tells once in a process that it is still working on these kinds; the tests make them themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
]


@pytest.mark.parametrize("name", KINDS)
def test_kind_arrives_and_leaves_the_body(name: str) -> None:
    """Value, dtype, layout, strides, flags and attributes arrive, without a warning, and no bytes are in the body."""
    sent = KINDS[name]()
    (bare, (inside, again)), size = travel(sent, [sent, sent])
    assert again is inside
    assert_same(bare, sent)
    assert_same(inside, sent)
    assert size < BODY or name in IN_BODY


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_odd_kinds_share_with_their_memory() -> None:
    """A storage, the tensor over it and a quantised tensor of it are one memory at the receiver, and travel once."""
    tensor = numbers()
    quantised = torch.quantize_per_tensor(numbers(), 1.0, 0, torch.quint8)
    ((arrived, storage, typed), again), _ = travel([tensor, tensor.untyped_storage(), tensor.storage()], tensor)
    storage[2], storage[3] = 40, 66  # 42.0, but for two zeros
    assert arrived[0, 0] == again[0, 0] == typed[0] == 42
    assert storage.nbytes() == tensor.nbytes
    ((first, half), _), _ = travel([quantised, quantised[: ROWS // 2]], None)
    assert first.untyped_storage().data_ptr() == half.untyped_storage().data_ptr()


# --- subclasses with a mind of their own ------------------------------------------------------------------------------


def test_state_of_a_subclass_is_its_own_affair() -> None:
    """``__getstate__`` and ``__setstate__``, ``__reduce_ex__`` and ``copyreg`` are used where a class has them."""
    stateful = numbers(3).as_subclass(Stateful)
    stateful.secret = 5
    (arrived, negated), _ = travel(stateful, numbers(3).as_subclass(Reducing))
    assert (type(arrived), arrived.secret) == (Stateful, 6)
    assert (type(negated), negated.tolist()) == (Reducing, [-1, -2, -3])


def test_subclass_that_stands_for_zeros() -> None:
    """A derivative that torch knows to be zero has no memory, whatever its class: it arrives as zeros."""
    (arrived,), _ = travel(torch._efficientzerotensor(2000).as_subclass(Tagged))
    assert type(arrived) is Tagged
    assert torch.equal(arrived.as_subclass(Tensor), torch.zeros(2000))


def test_subclass_that_watches_operations_sees_none() -> None:
    """Sending an object is no operation on it; the receiver's own constructor is not called either."""
    sent = Tensor._make_subclass(Watching, numbers())
    (arrived,), size = travel(sent)
    assert type(arrived) is Watching
    assert size < BODY
    with torch._C._DisableTorchDispatch():
        assert torch.equal(arrived.as_subclass(Tensor), numbers())


def test_parts_of_a_wrapper_arrive() -> None:
    """A wrapper subclass is rebuilt around the tensors it holds."""
    left = numbers()
    (arrived,), _ = travel(Pair(left, left.t()))
    assert torch.equal(arrived.left, left)
    assert torch.equal(arrived.right, left.t())
    assert arrived.left.data_ptr() == arrived.right.data_ptr()


def test_attributes_may_lead_back_to_the_tensor() -> None:
    """Attributes are set on the tensor after it was made, so that a cycle is one again, and goes with its tensor."""
    for make in (numbers, lambda: nn.Parameter(numbers()), lambda: numbers().as_subclass(Tagged)):
        sent = make()
        sent.self = [sent]  # type: ignore[attr-defined]  # tensors take any attribute
        (arrived,), _ = travel(sent)
        assert arrived.self[0] is arrived
        gone = weakref.ref(arrived)
        del sent.self, arrived  # type: ignore[attr-defined]  # tensors take any attribute
        gc.collect()
        assert gone() is None


def test_hooks_and_gradients_stay_behind() -> None:
    """Hooks belong to the sender's graph: they are left out, silently, as is ``grad``."""
    sent = numbers().requires_grad_()
    sent.register_hook(lambda grad: grad)
    (sent * 2).sum().backward()
    own = numbers().as_subclass(Tagged).requires_grad_()
    own.register_hook(lambda grad: grad)
    (arrived, (inside, other)), _ = travel(sent, [sent, own])
    for tensor in (arrived, inside, other):
        assert tensor.grad is None
        assert tensor._backward_hooks is None
        assert (tensor.requires_grad, tensor.is_leaf) == (True, True)


# --- tensors on devices -----------------------------------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """Two devices that do not exist."""
    with FakeCuda(lag=(0, 0.0005)) as fake:
        yield fake
        assert fake.violations == []


def travel_on_devices(fake: FakeCuda, devices: dict[Any, Any], *values: Any) -> tuple[list[Any], int]:
    """As `travel`, by a device map; the buffers on devices are taken as they are, for one process has both ends."""
    route = going(fake, to_device_map(devices), "ps")
    out = Outgoing(route=route)
    body = write(Reply(encode_values(list(values), out)))
    table, buffers = describe(out.tensors, route) if out.tensors else ([], [])
    arrived: list[Any] = []
    for buffer in buffers:
        if isinstance(buffer, DeviceBuffer):
            there = fake.empty(len(buffer), device_index(buffer.target))
            fake.move(there, buffer.carrier, fake.current(buffer.index))
            fake.settle(buffer.index)
            arrived.append(DeviceBuffer(there, device_index(buffer.target), buffer.target))
        else:
            arrived.append(bytearray(buffer))
    tensors = rebuild(unpack(pack(table)), arrived, Landing(fake))
    return decode_values(read_values(body), Incoming(tensors, ()), out.buffers), len(body)


def test_parts_of_a_wrapper_arrive_on_devices(fake: FakeCuda) -> None:
    """A subclass around tensors on devices: each part goes by the map, and none of it is in the body."""
    left, right = fake.fake_tensor(numbers(), 0), fake.fake_tensor(numbers() + 1, 1)
    ((pair, again),), size = travel_on_devices(fake, {0: 1, 1: 0}, [Pair(left, right), left])
    assert (pair.left.device.index, pair.right.device.index) == (1, 0)
    assert again is pair.left
    assert torch.equal(pair.left.cpu(), numbers())
    assert torch.equal(pair.right.cpu(), numbers() + 1)
    assert size < BODY


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_the_host_arrive_beside_devices(fake: FakeCuda, name: str) -> None:
    """A route for devices changes nothing for what is in the host's memory, if the map leaves that there."""
    sent = KINDS[name]()
    (bare, (inside, on_device)), _ = travel_on_devices(fake, {0: 1}, sent, [sent, fake.fake_tensor(numbers(2), 0)])
    assert_same(bare, sent)
    assert_same(inside, sent)
    assert on_device.device.index == 1


@pytest.mark.parametrize("parts", [torch.zeros(0, 2, dtype=torch.int64), torch.tensor(1), torch.zeros(0)])
def test_a_nested_tensor_of_no_parts_is_refused(parts: Tensor) -> None:
    """torch ends the process where one is used."""
    with pytest.raises(SerializationError, match="nested tensor of no parts"):
        load_nested(torch.empty(0), parts, parts.clone(), torch.zeros(0, dtype=torch.int64), False)


def test_an_honest_nested_tensor_of_no_parts_is_refused_by_its_sender() -> None:
    """With a word about what it is; before, torch asked its user to report a bug."""
    with pytest.raises(SerializationError, match="a nested tensor of no parts cannot be sent"):
        travel(torch.nested.nested_tensor([]))


@pytest.mark.parametrize(
    ("layout", "indices"),
    [
        (torch.sparse_coo, [torch.tensor([[1 << 40]])]),
        (torch.sparse_coo, [torch.tensor([[-1]])]),
        (torch.sparse_csr, [torch.tensor([0, 1]), torch.tensor([1 << 40])]),
        (torch.sparse_csr, [torch.tensor([0, 1 << 40]), torch.tensor([0])]),
    ],
)
def test_indices_outside_of_a_sparse_tensor_are_refused(layout: torch.layout, indices: list[Tensor]) -> None:
    """torch would write to where they point."""
    size = torch.Size((3,) if layout is torch.sparse_coo else (1, 3))
    with pytest.raises(SerializationError, match="no sparse tensor"):
        load_sparse(layout, size, False, False, *indices, torch.ones(1))
