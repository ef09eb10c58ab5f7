"""Counting messages: what an observer of both ends says of them, and a small run of the real thing."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import aiorpc.testing
from aiorpc import RpcBackendOptions
from bench.message_clients import Watch
from tests.runtime.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def doubled(value: int) -> int:
    """What is called."""
    return 2 * value


async def test_a_watch_names_what_leaves() -> None:
    """Calls and answers by their function, at the worker that sends them, as many as the worker counts itself."""
    alone = RpcBackendOptions(shared_memory=0)  # of which links speak once they are there
    async with aiorpc.testing.cluster(2, options=alone) as workers:
        await workers[0].call("worker1", doubled, 1)
        watches = [Watch(), Watch()]
        for worker, watch in zip(workers, watches, strict=True):
            worker._node.engine.observers = (watch,)
        before = [worker.statistics().messages_sent for worker in workers]
        for value in range(3):
            assert await workers[0].call("worker1", doubled, value) == 2 * value
        name = f"{__name__}:doubled"
        await until(lambda: [watch.sent.total() for watch in watches] == [3, 3])
        assert [watch.sent for watch in watches] == [Counter({f"CALL {name}": 3}), Counter({f"REPLY {name}": 3})]
        assert [worker.statistics().messages_sent for worker in workers] == [each + 3 for each in before]


@pytest.mark.long
@pytest.mark.slow
def test_listing_names_the_messages_of_a_step() -> None:
    """A training step of a remote layer: a call and its answer for each of forward, backward, optimizer and leaving."""
    command = [sys.executable, "-m", "bench", "--quick", "--rounds", "1", "--only", "functions", "--list", "training"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    title, *lines = done.stdout[done.stdout.index(" number sent by") :].splitlines()
    said = {" ".join(line.split()[1:]): float(line.split()[0]) for line in lines}
    assert said["caller CALL aiorpc.autograd.parts:plan"] == said["callee REPLY aiorpc.autograd.parts:plan"] == 1.0
    assert float(title.split()[-2]) == pytest.approx(sum(said.values()), abs=0.2)
