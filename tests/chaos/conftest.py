"""A fork server for these tests alone."""

from __future__ import annotations

import pytest

from tests.processes.workers import own_fork_server


@pytest.fixture(scope="package", autouse=True)
def _own_fork_server(_own_temporary_directory: None) -> None:
    own_fork_server()
