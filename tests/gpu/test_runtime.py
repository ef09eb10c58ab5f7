"""The driver alone, between two processes: what the channel is built on."""

from __future__ import annotations

import pytest
import torch

from aiorpc.channels.cuda_runtime import find_library, find_runtime
from aiorpc.channels.torch_accelerator import find_accelerator

from . import bodies
from .pair import Exchange

pytestmark = pytest.mark.gpu


def test_the_library_of_torch_is_found() -> None:
    """With a device there is an accelerator, and it has the runtime library."""
    assert find_library() is not None
    accelerator = find_accelerator()
    assert accelerator is not None
    assert accelerator.interprocess is not None
    assert accelerator.count() == torch.cuda.device_count() >= 1


def test_the_device_says_who_it_is_and_what_it_can_do() -> None:
    """Its uuid is torch's, and it reaches itself and nobody unknown."""
    runtime = find_runtime()
    assert runtime is not None
    uuid = runtime.uuid(0)
    assert uuid == str(torch.cuda.get_device_properties(0).uuid)
    assert runtime.reaches(0, uuid)
    assert not runtime.reaches(0, "00000000-0000-0000-0000-000000000000")
    assert isinstance(runtime.obstacle(0), str)


def test_an_error_is_not_left_for_torch() -> None:
    """After a call that failed torch's next one is well."""
    runtime = find_runtime()
    assert runtime is not None
    with pytest.raises(RuntimeError, match=r"^cudaIpcOpenMemHandle on cuda:0: \w.* \(cudaError\w+, [1-9]\d*\)$"):
        runtime.open(0, bytes(64))
    with pytest.raises(RuntimeError, match=r"^cudaFree on cuda:0: "):
        runtime.free(0, 12345)
    assert torch.ones(3, device="cuda:0").sum().item() == 3
    torch.cuda.synchronize()


def test_two_processes_share_memory_and_an_event(exchange: Exchange) -> None:
    """Each reads what the other wrote, in the order that the event alone makes; nobody has waited on the host."""
    if exchange.refusal:
        pytest.skip(f"device memory cannot be shared between processes here: {exchange.refusal}")
    assert exchange.read == [value * bodies.SHARED for value in bodies.VALUES]
    assert exchange.done == [False] * 2 * len(bodies.VALUES)


def test_streams_are_current_inside_and_put_back() -> None:
    """On a real device, also from within; a fresh stream is not the default one."""
    accelerator = find_accelerator()
    assert accelerator is not None
    before, device = torch.cuda.current_stream(0), torch.cuda.current_device()
    one, two = accelerator.fresh(0), accelerator.fresh(0)
    assert before not in (one, two)
    with accelerator.entered([one]):
        with accelerator.entered([two]):
            assert torch.cuda.current_stream(0) == two
        assert torch.cuda.current_stream(0) == one
    assert (torch.cuda.current_stream(0), torch.cuda.current_device()) == (before, device)


@pytest.mark.parametrize("size", [1, 1000, 4 << 20, (4 << 20) + 1])
@pytest.mark.parametrize("place", ["pinned", "ordinary"])
def test_bytes_go_to_the_device_and_back(place: str, size: int) -> None:
    """Behind a busy stream, from either kind of memory, which is let go of at once."""
    accelerator = find_accelerator()
    assert accelerator is not None
    stream = accelerator.fresh(0)
    with accelerator.entered([stream]):
        there = accelerator.empty(size, 0)
        torch.cuda._sleep(bodies.LONG // 10)
    source = accelerator.pinned(size) if place == "pinned" else torch.empty(size, dtype=torch.uint8)
    source.fill_(7)
    accelerator.move(there, source, stream)
    del source
    others = [accelerator.pinned(size).fill_(9) for _ in range(3)]  # would get its memory, were it free
    back = accelerator.pinned(size)
    accelerator.move(back, there, stream)
    accelerator.synchronize(accelerator.mark(stream))
    assert torch.equal(back, torch.full((size,), 7, dtype=torch.uint8))
    assert len(others) == 3
