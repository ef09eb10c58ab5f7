"""Transfers are shown to observers: which channels took the buffers of a message, and how long that took."""

from __future__ import annotations

import logging

import pytest
import torch

from aiorpc import RpcBackendOptions, Worker
from aiorpc.runtime.engine.transfer_events import BufferTransfer
from aiorpc.testing import cluster


class Seen:
    """An observer that notes every transfer, and raises if it is told to."""

    def __init__(self, *, raises: bool = False) -> None:
        self.transfers: list[BufferTransfer] = []
        self._raises = raises

    def transferred(self, transfer: BufferTransfer) -> None:
        self.transfers.append(transfer)
        if self._raises:
            raise ValueError("wanted")


def observe(worker: Worker, **options: bool) -> Seen:
    seen = Seen(**options)
    worker._node.engine.transfer_observers = (seen,)
    return seen


def sizes(values: list[torch.Tensor]) -> list[int]:
    """Handler."""
    return [each.numel() for each in values]


async def test_buffers_of_one_message_are_one_transfer() -> None:
    """Those that several channels took, and those in the frame; short messages are none."""
    values = [torch.ones(1 << 20), torch.ones(1 << 16), torch.ones(5000)]
    async with cluster(2) as (worker, other):
        seen, there = observe(worker), observe(other)
        assert await worker.call("worker1", sizes, [torch.ones(3)]) == [3]
        assert not seen.transfers and not there.transfers
        assert await worker.call("worker1", sizes, values) == [1 << 20, 1 << 16, 5000]
        (sent,) = seen.transfers
        assert (sent.side, sent.worker, sent.channels, sent.copied) == ("sent", "worker1", ("shared memory",), True)
        assert sent.size == 4 * sum(each.numel() for each in values) and sent.started < sent.ended


async def test_a_transfer_ends_with_its_last_buffer() -> None:
    """At the receiver, from the message on."""
    async with cluster(2, options=RpcBackendOptions(shared_memory=0)) as (worker, other):
        seen, there = observe(worker), observe(other)
        await worker.call("worker1", sizes, [torch.ones(1 << 20), torch.ones(1 << 20)])
        (sent,), (received,) = seen.transfers, there.transfers
        assert sent.channels == received.channels == ("bulk",) and sent.size == received.size == 8 << 20
        assert not sent.copied and received.side == "received" and sent.call_id == received.call_id
        assert sent.started < received.ended and received.started <= received.ended


async def test_an_observer_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is in the log."""
    async with cluster(2) as (worker, _):
        seen = observe(worker, raises=True)
        assert await worker.call("worker1", sizes, [torch.ones(1 << 20)]) == [1 << 20]
        assert len(seen.transfers) == 1
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "the observer of transfers Seen.transferred raised" in record.getMessage()
