"""Device memory that a dead process had a part in: its waiters are let go whenever that process ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiorpc.channels.accelerator import Interprocess
from aiorpc.channels.device.outbox import Inbox
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime.engine.host import host_identity
from aiorpc.runtime.links import accelerators
from aiorpc.runtime.links.accelerators import Accelerators
from tests.runtime.waiting import LIMIT, until

PATIENCE = 0.1


class StuckDriver:
    """Closing waits for the device, and the device for what the other process has recorded."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.closed = threading.Event()

    def open(self, index: int, handle: bytes) -> int:
        return 1 << 20

    def open_events(self, index: int, handles: Sequence[bytes]) -> list[object]:
        return [object() for _ in handles]

    def release(self, event: object) -> None:
        self.let_go.set()

    def close(self, index: int, address: int) -> None:
        if self.let_go.wait(LIMIT):
            self.closed.set()

    def close_events(self, events: Sequence[object]) -> None:
        assert self.closed.is_set()


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that may be killed."""
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(accelerators, "_DEATH_PATIENCE", PATIENCE)
    yield process
    process.kill()
    process.wait(LIMIT)


async def devices_of(peer: subprocess.Popen[bytes]) -> tuple[Accelerators, WorkerRecord, StuckDriver, Inbox]:
    """Of a worker that shares memory with the peer."""
    loop = asyncio.get_running_loop()
    steps = SimpleNamespace(run=lambda function: asyncio.to_thread(function))
    engine: Any = SimpleNamespace(
        name="me", loop=loop, steps=steps, record=SimpleNamespace(host=host_identity(), pid=os.getpid())
    )
    made = Accelerators(engine, None, cast(Any, SimpleNamespace(maps={}, devices=[])))
    await made.start({"me": made.claims})
    record = SimpleNamespace(host=host_identity(), pid=peer.pid, incarnation="x", describe=lambda: "the peer")
    driver = StuckDriver()
    inbox = Inbox(cast(Interprocess, driver), 0, b"", [b""] * 4, [(0, 8)] * 4)
    return made, cast(WorkerRecord, record), driver, inbox


@pytest.mark.parametrize("later", [0.0, 4 * PATIENCE])
async def test_who_dies_after_its_connection_is_waited_for_no_more(peer: subprocess.Popen[bytes], later: float) -> None:
    """At once, and when it was taken for one that lives on, so that its memory is being closed."""
    made, record, driver, inbox = await devices_of(peer)
    made.ended(record, [inbox])
    await asyncio.sleep(later)
    assert not driver.let_go.is_set()
    peer.kill()
    await until(lambda: inbox.gone)
    await made.close(LIMIT)


async def test_who_dies_while_its_memory_is_closed_is_waited_for_no_more(peer: subprocess.Popen[bytes]) -> None:
    """As where either worker leaves."""
    made, record, _, inbox = await devices_of(peer)
    made.hold(record, [inbox])
    made.in_background(inbox.close)
    peer.kill()
    await until(lambda: inbox.gone)
    await made.close(LIMIT)


async def test_a_worker_that_leaves_looks_once_more(peer: subprocess.Popen[bytes]) -> None:
    """Its process may live on, and so may the streams that wait."""
    made, record, driver, inbox = await devices_of(peer)
    made.ended(record, [inbox])
    peer.kill()
    await made.close(LIMIT)
    assert driver.let_go.is_set()
