"""Waiting for a condition, with a bound, instead of sleeping."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple

from aiorpc import Worker
from tests.conditions import unmet

LIMIT = 30.0  # seconds for what has to happen; of use only to a test that fails, on however slow a machine


async def until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """Return once `condition()` is true; fail after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, unmet(condition, value, limit)
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], limit: float = LIMIT) -> None:
    """As `until`, in a thread."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, unmet(condition, value, limit)
        time.sleep(0.002)


async def until_no_references(workers: Sequence[Worker]) -> None:
    """Return once every worker's table of references is empty; show the tables if that does not come.

    One that has closed has no values, and hears no more of who has let go of what: its table says nothing.
    """

    def are_empty() -> bool:
        tables = [worker._node.references for worker in workers]
        if all(each.closed or not any(astuple(each.counts())) for each in tables):
            return True
        # Tracebacks of errors that a test caught hold its locals, in cycles; until just now a thread that woke the test
        # may have been on its way out with such an error, and nothing here makes the collector run again.
        gc.collect()
        return False

    try:
        await until(are_empty)
    except AssertionError:
        raise AssertionError([worker._node.references.counts() for worker in workers]) from None
