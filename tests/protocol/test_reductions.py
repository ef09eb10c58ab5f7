"""Tensors that are not dense, by codec and layout alone: what stays in the body, what is shared, whose say counts."""

from __future__ import annotations

import copyreg
import gc
import weakref

import pytest
import torch
from torch import nn

from aiorpc.channels.layout import describe
from aiorpc.protocol.codec import Outgoing, encode_values
from tests.tensors import (
    KINDS,
    ODD,
    ROWS,
    Pair,
    Reducing,
    Stateful,
    Tagged,
    Watching,
    assert_same,
    make_reducing,
    masked,
    numbers,
    travel,
)

Tensor = torch.Tensor
# Of what stands in the body for one of the large things below: names of classes and functions, sizes, positions.
BODY = 1500

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
    assert size < BODY


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


def test_shared_bytes_travel_once() -> None:
    """Views, a Parameter and its data, a storage: one buffer."""
    parameter = nn.Parameter(numbers())
    out = Outgoing()
    encode_values([parameter.data[1:], [parameter, parameter.data, parameter.data.untyped_storage()]], out)
    assert sum(map(len, describe(out.tensors)[1])) == parameter.nbytes


# --- subclasses with a mind of their own ------------------------------------------------------------------------------


def test_state_of_a_subclass_is_its_own_affair() -> None:
    """``__getstate__`` and ``__setstate__``, ``__reduce_ex__`` and ``copyreg`` are used where a class has them."""
    stateful = numbers(3).as_subclass(Stateful)
    stateful.secret = 5
    (arrived, negated), _ = travel(stateful, numbers(3).as_subclass(Reducing))
    assert (type(arrived), arrived.secret) == (Stateful, 6)
    assert (type(negated), negated.tolist()) == (Reducing, [-1, -2, -3])


def test_subclass_in_copyreg(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program has registered for its class comes first."""
    monkeypatch.setitem(copyreg.dispatch_table, Tagged, lambda tensor: (make_reducing, (tensor.tolist(),)))
    (arrived,), _ = travel(numbers(2).as_subclass(Tagged))
    assert type(arrived) is Reducing


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


def test_parts_of_a_masked_tensor_arrive() -> None:
    """Data and mask."""
    sent = masked()
    (arrived,), _ = travel(sent)
    assert torch.equal(arrived.get_data(), sent.get_data())
    assert torch.equal(arrived.get_mask(), sent.get_mask())


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


def test_another_default_device_changes_nothing() -> None:
    """A program that makes tensors elsewhere by default receives them where they were."""
    sent = [make() for name, make in ODD.items() if "meta" not in name and "masked" not in name]
    with torch.device("meta"):
        arrived, _ = travel(*sent)
    for here, there in zip(arrived, sent, strict=True):
        assert_same(here, there)
