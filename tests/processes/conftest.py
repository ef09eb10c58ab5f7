"""A fork server for these tests alone."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="package", autouse=True)
def _own_fork_server(_own_temporary_directory: None) -> None:
    """End the one that other tests have started: what a server imports is settled by who starts it.

    With one that lacks aiorpc each of the workers here would import it anew, for longer than most tests take.
    """
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # nothing at all if there is none
