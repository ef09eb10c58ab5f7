"""Routes: which tensors may go to a worker, to which of its devices, and what is said of the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aiorpc.channels.routes import Route, Staying, going, returning
from aiorpc.devices import to_device_map
from aiorpc.errors import SerializationError
from tests.fakes.cuda import FakeCuda

Tensor = torch.Tensor
CPU = torch.device("cpu")


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """Three devices."""
    with FakeCuda(devices=3, lag=(0, 0.001)) as fake:
        yield fake
        assert fake.violations == []


def there(fake: FakeCuda | None, **devices: int | str) -> Route:
    """To the worker "ps" by a map like ``d0=1``: what is on device 0 goes to device 1."""
    return going(fake, to_device_map({name.removeprefix("d"): target for name, target in devices.items()}), "ps")


def test_map_says_where_a_tensor_goes(fake: FakeCuda) -> None:
    """Each device to the one that the map names; a tensor of these goes as it is."""
    route = there(fake, d0=1, d1=0, d2="cpu")
    for index, target in enumerate(["cuda:1", "cuda:0", "cpu"]):
        tensor = fake.fake_tensor(torch.ones(2), index)
        assert route.target(tensor) == target
        assert route.takes(tensor)
        assert route.leads(tensor.device)


def test_tensors_of_the_host_are_none_of_its_business(fake: FakeCuda) -> None:
    """They are not taken, whatever the map says of the host; nor is what lies on another kind of device."""
    for route in (there(fake, d0=0), there(fake, cpu=0), there(None, cpu=0)):
        assert not route.takes(torch.ones(2))
        assert not route.takes(torch.ones(2, device="meta"))
    assert not there(fake, d0=0).leads(CPU)
    assert there(fake, cpu=0).leads(CPU)
    assert not there(fake, d0=0).leads(torch.device("meta"))


@pytest.mark.parametrize("ask", ["takes", "target"])
def test_unmapped_device_is_refused_with_all_that_one_has_to_know(fake: FakeCuda, ask: str) -> None:
    """The error names type, shape, device and worker, and says what to do."""
    route = there(fake, d0=1)
    tensor = fake.fake_tensor(torch.ones(2, 3, dtype=torch.float64), 1)
    with pytest.raises(
        SerializationError,
        match=(
            r"^a torch.float64 tensor of shape \(2, 3\) on cuda:1: no device map leads from there to worker 'ps'; "
            r"set one before init \(options.set_device_map\('ps', \{0: 0\}\), say\), or send tensor.cpu\(\)$"
        ),
    ):
        getattr(route, ask)(tensor)
    assert not route.leads(tensor.device)


def test_what_cannot_come_back_says_whose_map_is_missing(fake: FakeCuda) -> None:
    """Answers go by the caller's map, so the error at the callee tells whose it is."""
    route = returning(fake, to_device_map({0: 1}), "trainer")
    with pytest.raises(
        SerializationError,
        match=(
            r"^a torch.int64 tensor of shape \(\) on cuda:0: no device map leads from there to worker 'trainer'; "
            r"answers go by the inverse of the caller's map to this worker, which the caller sets; or return "
            r"tensor.cpu\(\)$"
        ),
    ):
        route.takes(fake.fake_tensor(torch.tensor(3), 0))


def test_returning_inverts_the_map(fake: FakeCuda) -> None:
    """What went there by the map comes back to where it was; the host on either side too."""
    devices = to_device_map({0: 1, 1: 2, 2: "cpu", "cpu": 0})
    out, back = going(fake, devices, "ps"), returning(fake, devices, "trainer")
    for index in range(3):
        tensor = fake.fake_tensor(torch.ones(2), index)
        arrived = out.target(tensor)
        if arrived == "cpu":
            assert back.host_target == str(tensor.device)
        else:
            assert back.target(fake.fake_tensor(torch.ones(2), int(arrived.removeprefix("cuda:")))) == str(
                tensor.device
            )
    assert out.host_target == "cuda:0"
    assert back.target(fake.fake_tensor(torch.ones(2), 0)) == "cpu"


def test_kinds_that_have_to_be_taken_apart_are_asked_for_their_device_too(fake: FakeCuda) -> None:
    """A tensor that the accelerator does not hold is not taken, and is refused just so if its device is not mapped."""
    with FakeCuda(devices=3, lag=(0, 0)) as other:  # to which none of the tensors of `fake` belongs
        strange = fake.fake_tensor(torch.ones(2), 0)
        assert not there(other, d0=1).takes(strange)
        with pytest.raises(SerializationError, match="on cuda:0: no device map leads from there"):
            there(other, d1=1).takes(strange)


def test_nested_tensor_is_refused_without_a_shape(fake: FakeCuda) -> None:
    """It has none that could be told."""

    class Nested:
        dtype, device, is_nested = torch.float32, torch.device("cuda", 2), True

    tensor: Tensor = Nested()  # type: ignore[assignment]  # none can be made without a device
    with pytest.raises(SerializationError, match=r"^a torch.float32 tensor on cuda:2: no device map"):
        there(fake, d0=1).takes(tensor)


def test_programs_for_torch_find_its_words(fake: FakeCuda) -> None:
    """Those that PyTorch's own tests look for; with them who, where and what to do."""
    words = {
        going: r"to worker 'w'; TensorPipe RPC backend only supports CPU tensors by default.*`set_device_map` on "
        r"`TensorPipeRpcBackendOptions`: set one before init",
        returning: r"to worker 'w'; Response device mapping is not available: answers go by the inverse",
    }
    for make, text in words.items():
        with pytest.raises(SerializationError, match=text):
            make(fake, {}, "w", as_torch=True).takes(fake.fake_tensor(torch.ones(2), 0))


def test_to_oneself_everything_stays(fake: FakeCuda) -> None:
    """On each device, and whoever keeps count of the devices in use is told."""
    used: list[int] = []
    route = Staying(fake, "w", used.append)
    for index in (2, 0):
        tensor = fake.fake_tensor(torch.ones(2), index)
        assert route.takes(tensor)
        assert route.target(tensor) == str(tensor.device)
        assert route.leads(tensor.device)
    assert set(used) == {2, 0}
    assert not route.takes(torch.ones(2)) and not route.leads(CPU) and not route.host_target
    assert not Staying(None, "w", used.append)
