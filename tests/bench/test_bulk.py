"""Measurements of large tensors: what a client does, the lag of a loop, and a small run of the real thing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from bench import bulk_clients
from bench.stats import BenchError
from bench.ticker import Ticker
from tests.bench.here import Here, one_element_wrong


@pytest.fixture(autouse=True)
def _forget_payloads() -> Iterator[None]:
    yield
    bulk_clients.payloads.cache_clear()


def test_side_that_echoes_wrongly_is_not_measured() -> None:
    """An echo that differs in one element ends the measurement."""
    with pytest.raises(BenchError, match="different"):
        bulk_clients.warm_up(Here(one_element_wrong), 1024, seconds=0.0, least=1)


async def test_ticker_notices_a_loop_that_was_held_up() -> None:
    """Holding up the loop shows as lag of about that length; the tick under way when it is stopped counts."""

    def hold_up() -> None:
        time.sleep(0.1)

    ticker = Ticker()
    await asyncio.sleep(0.01)
    hold_up()
    assert await ticker.stop() >= 0.08
