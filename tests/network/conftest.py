"""A fork server for these tests alone, and hosts to start workers on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.workers import own_fork_server


@pytest.fixture(scope="package", autouse=True)
def _own_fork_server(_own_temporary_directory: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # workers on several hosts do not meet without one
        patch.setenv("AIORPC_SECRET", "a secret for all hosts of a test")
        own_fork_server()
        yield
