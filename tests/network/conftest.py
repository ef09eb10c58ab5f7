"""A fork server for these tests alone, and hosts to start workers on."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="package", autouse=True)
def _own_fork_server(_own_temporary_directory: None) -> None:
    """End the one that other tests have started: one without aiorpc would cost each worker its import."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # nothing at all if there is none
