"""One of two processes is killed with SIGKILL while its device is at work."""

from __future__ import annotations

import pytest

from . import bodies
from .pair import MIB, start_pair

pytestmark = pytest.mark.gpu


def test_the_sender_is_killed_before_its_kernel_is_over(refusal: str) -> None:
    """PeerLost in bounded time, and no stream of the survivor waits for the dead process for ever.

    With ipc alone: with staging nothing arrives before the kernel is over.
    """
    if refusal:
        pytest.skip(f"device memory cannot be shared between processes here: {refusal}")
    maps = {"w0": {0: 0}, "w1": {0: 0}}
    with start_pair(way="ipc", options={"device_channel": "ipc"}, maps=maps, killed=True) as pair:
        pair.run(bodies.lose_the_sender, MIB, limit=150)


@pytest.mark.parametrize("way", ["ipc", "staging"])
@pytest.mark.parametrize("size", [1000, 20 * MIB])
def test_the_receiver_is_killed_midway(way: str, size: int, refusal: str) -> None:
    """PeerLost in bounded time; what was to be sent is let go of, and all streams work."""
    if way == "ipc" and refusal:
        pytest.skip(f"device memory cannot be shared between processes here: {refusal}")
    options = {"device_channel": way, "device_buffer": 8 * MIB}
    with start_pair(way=way, options=options, killed=True) as pair:
        pair.run(bodies.lose_the_receiver, size, 32, limit=150)
