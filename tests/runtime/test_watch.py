"""Watching processes of this host."""

from __future__ import annotations

import asyncio

import pytest

from aiorpc.runtime.engine.watch import ProcessWatch

from .test_rendezvous import make_record


@pytest.mark.parametrize("pid", [1 << 31, (1 << 32) - 1])
async def test_a_number_that_no_process_has_is_not_watched(pid: int) -> None:
    """A record may say any number of 32 bits, which is more than the system has for processes."""
    watch = ProcessWatch(asyncio.get_running_loop(), lambda record: None)
    assert not watch.add(make_record("w", 0, pid=pid))
    watch.close()
