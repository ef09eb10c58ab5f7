"""What holds whichever way tensors take, with each way and with each of torch's allocators."""

from __future__ import annotations

import pytest

from . import bodies
from .pair import DEVICE_BUFFER, MIB, VARIANTS, Pair

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("pair", VARIANTS, indirect=True)]

SMALL, MEDIUM, LARGE = 1000, MIB, 2 * DEVICE_BUFFER + 4 * MIB + 3
sizes = pytest.mark.parametrize("size", [SMALL, MEDIUM, LARGE])


def test_the_allocator_is_the_one_asked_for(pair: Pair, request: pytest.FixtureRequest) -> None:
    """Else the variants would all be the same."""
    variant = request.node.callspec.params["pair"]
    backend = "cudaMallocAsync" if variant == "cudaMallocAsync" else "native"
    assert pair.run(bodies.allocators) == [(backend, variant == "expandable")] * 2


def test_the_way_is_the_one_expected(pair: Pair) -> None:
    """Memory of the other process is opened with ipc, on both sides, and with nothing else."""
    opened = [calls.get("open", 0) for calls in pair.run(bodies.driver_calls)]
    assert (min(opened) > 0) if pair.way == "ipc" else (max(opened) == 0)


@sizes
def test_a_call_behind_a_busy_stream(pair: Pair, size: int) -> None:
    """The handler sees what the caller's stream has been told to write, and the call waits for nothing."""
    pair.run(bodies.sent_behind_a_busy_stream, size)


@sizes
def test_a_tensor_that_is_changed_right_after_the_call(pair: Pair, size: int) -> None:
    """The callee has it as it was."""
    pair.run(bodies.changed_right_after, size)


@sizes
def test_a_result_behind_a_busy_stream(pair: Pair, size: int) -> None:
    """Whoever awaits it can compute with it at once; with ipc it need not be there yet."""
    waiting = pair.run(bodies.awaited_on_the_loop, size)
    if pair.way == "ipc" and size < LARGE:
        assert waiting, "somebody has waited for the device on the host"


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_wait_on_a_side_stream(pair: Pair, size: int) -> None:
    """`Future.wait` makes the waiter's current stream wait."""
    pair.run(bodies.waited_for_on_a_side_stream, size)


def test_a_callback(pair: Pair) -> None:
    """`Future.then` runs its function on streams that have the value."""
    pair.run(bodies.continued_with_then, MEDIUM)


def test_handlers_have_streams_of_their_own(pair: Pair) -> None:
    """Those that await come back to theirs at each step; the loop itself is left on the default stream."""
    pair.run(bodies.handled_on_streams_of_their_own, 8)


def test_a_value_behind_a_reference(pair: Pair) -> None:
    """RRef: awaited, `to_here`, and used where it is."""
    pair.run(bodies.held_by_reference, MEDIUM)


def test_items_of_a_stream(pair: Pair) -> None:
    """Generators and async generators."""
    pair.run(bodies.streamed, MEDIUM)


def test_tensors_that_share_memory(pair: Pair) -> None:
    """They still do where they arrive."""
    pair.run(bodies.views_of_one_storage)
