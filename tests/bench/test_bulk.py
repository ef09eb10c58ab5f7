"""Measurements of large tensors: what a client does, the lag of a loop, and a small run of the real thing."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from bench import bulk, bulk_clients, functions
from bench.stats import BenchError
from bench.ticker import Ticker
from tests.bench.here import Here, one_element_wrong


@pytest.fixture(autouse=True)
def _forget_payloads() -> Iterator[None]:
    yield
    bulk_clients.payloads.cache_clear()


def test_sizes_are_said_in_their_unit() -> None:
    """Labels name the bytes that are sent."""
    assert [bulk.label(size) for size in bulk.TARGETS] == ["4 KB", "64 KB", "1 MB", "16 MB", "256 MB"]
    assert all(bulk_clients.payloads(size)[0].nbytes == size for size in (4 << 10, 1 << 20))


def test_payloads_of_a_burst_are_different_tensors() -> None:
    """Nobody gains by noticing that the same tensor is sent again."""
    first, second = bulk_clients.payloads(1024, 2)
    assert not torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_least_calls_are_timed_however_long_they_take() -> None:
    """A box of no time still holds the least number of samples, and what warms up is no sample."""
    calls: list[int] = []
    samples = bulk_clients.timed(lambda: calls.append(1), seconds=0.0, least=3)
    assert len(samples) == 3
    assert len(calls) == 3 + bulk_clients.AGAIN_CALLS


def test_answer_is_dropped_before_the_next_call() -> None:
    """Whatever held the last answer's memory is gone when the next call begins."""
    answers: list[weakref.ref[torch.Tensor]] = []

    def call() -> torch.Tensor:
        assert all(answer() is None for answer in answers)
        made = torch.ones(2)
        answers.append(weakref.ref(made))
        return made

    bulk_clients.timed(call, seconds=0.0, least=3)
    assert len(answers) == 3 + bulk_clients.AGAIN_CALLS


def test_warming_up_sends_and_echoes() -> None:
    """Both kinds of calls are made as often as asked."""
    rpc = Here()
    bulk_clients.warm_up(rpc, 1024, seconds=0.0, least=2)
    assert rpc.functions.count(functions.sink) == 2
    assert rpc.functions.count(functions.echo) == 2 + 1
    assert {size for _, size in rpc.calls} == {1024}


def test_side_that_echoes_wrongly_is_not_measured() -> None:
    """An echo that differs in one element ends the measurement."""
    with pytest.raises(BenchError, match="different"):
        bulk_clients.warm_up(Here(one_element_wrong), 1024, seconds=0.0, least=1)


def test_first_sends_are_of_each_size_once() -> None:
    """No tensor goes before the first of its size; figures are by bytes."""
    rpc = Here()
    taken = bulk_clients.first_sends(rpc, [1024, 4096])
    assert list(taken) == ["1024", "4096"]
    assert [call for call in rpc.calls if call[0] is not functions.noop] == [
        (functions.sink, 1024),
        (functions.sink, 4096),
    ]


def test_first_send_that_arrives_short_is_not_measured() -> None:
    """A tensor that lost elements on its way is an error."""
    with pytest.raises(BenchError, match="1 of 256 elements"):
        bulk_clients.first_sends(Here(lambda answer: 1), [1024])


def test_state_dict_has_the_tensors_of_a_resnet50() -> None:
    """What is sent is as large and in as many pieces as the real one: 320 tensors, 25.6 million parameters."""
    weights = bulk_clients.resnet50.__wrapped__()
    assert len(weights) == 320
    assert sum(each.numel() for each in weights.values() if each.is_floating_point()) == 25_557_032 + 2 * 26_560


async def test_ticker_notices_a_loop_that_was_held_up() -> None:
    """Holding up the loop shows as lag of about that length; the tick under way when it is stopped counts."""

    def hold_up() -> None:
        time.sleep(0.1)

    ticker = Ticker()
    await asyncio.sleep(0.01)
    hold_up()
    assert await ticker.stop() >= 0.08


async def test_ticker_of_the_callee_is_stopped_once() -> None:
    """The functions a client calls start and stop one ticker and leave none behind."""
    await functions.start_ticker()
    assert await functions.stop_ticker() >= 0.0
    assert functions.server().ticker is None
