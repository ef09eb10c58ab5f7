"""The plugin for pytest that is installed with aiorpc: groups of workers, and faults, as fixtures.

    def test_double(rpc_workers):
        here, there = rpc_workers(2)
        assert here.call(there.name, double, 21).wait() == 42

It stands beside the package, and imports nothing of it before a fixture is used: importing aiorpc imports torch, and
runs of pytest that have no use for it are not to wait for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aiorpc import Worker
    from aiorpc.testing import Faults, ProcessCluster


@pytest.fixture
def rpc_workers() -> Iterator[Callable[..., list[Worker]]]:
    """A function that starts workers in this process: ``here, there = rpc_workers(2)``. They end with the test.

    It takes the arguments of `aiorpc.testing.blocking_cluster`, and gives what that gives.
    """
    from aiorpc.testing import blocking_cluster

    with contextlib.ExitStack() as stack:

        def start(size: int = 2, **chosen: Any) -> list[Worker]:
            return stack.enter_context(blocking_cluster(size, **chosen))

        yield start


@pytest.fixture
def rpc_processes() -> Iterator[Callable[..., ProcessCluster]]:
    """A function that starts workers in processes of their own: ``group = rpc_processes(2)``. They end with the test.

    It takes the arguments of `aiorpc.testing.process_cluster`, and gives what that gives.
    """
    from aiorpc.testing import process_cluster

    with contextlib.ExitStack() as stack:

        def start(size: int = 2, **chosen: Any) -> ProcessCluster:
            return stack.enter_context(process_cluster(size, **chosen))

        yield start


@pytest.fixture
def rpc_faults() -> Iterator[Callable[[Worker], Faults]]:
    """A function that puts `aiorpc.testing.Faults` in place, for a worker of this process, until the test ends."""
    from aiorpc.testing import Faults

    with contextlib.ExitStack() as stack:

        def start(worker: Worker) -> Faults:
            return stack.enter_context(Faults(worker))

        yield start
