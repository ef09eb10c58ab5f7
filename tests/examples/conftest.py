"""What the tests of the examples need beyond the common fixtures."""

from __future__ import annotations

import multiprocessing.util
import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def _lasting_directory_of_multiprocessing(_own_temporary_directory: None) -> None:
    """multiprocessing keeps one directory until the process ends; it must not lie in one that goes before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TMPDIR")
        patch.setattr(tempfile, "tempdir", None)
        multiprocessing.util.get_temp_dir()
