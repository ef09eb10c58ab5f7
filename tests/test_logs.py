"""The log: who speaks in it, and log handlers of programs that raise."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiorpc
from aiorpc import PeerLost
from aiorpc.logs import Log, logger
from aiorpc.testing import cluster
from tests.limits import busy
from tests.runtime.waiting import LIMIT, until

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (("the store is gone",), "worker w1: the store is gone"),
        (("worker %s was lost", "w10"), "worker w1: worker w10 was lost"),
        (("worker %s: %s", "w1", "it has shut down"), "worker w1: it has shut down"),
        (("worker %s cannot see who has left", "w1"), "worker w1 cannot see who has left"),
        (("%s", "worker 'w1' has left"), "worker 'w1' has left"),
        (("100 %% of it",), "worker w1: 100 %% of it"),
    ],
)
def test_a_line_begins_with_the_worker_that_speaks(
    said: tuple[str, ...], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it does not do so by itself; and the place in the record is that of who has logged."""
    Log("w1").warning(*said)
    (record,) = caplog.records
    assert record.getMessage() == line and record.name == "aiorpc" and record.filename == "test_logs.py"


def test_the_worker_of_a_process_speaks_where_nobody_else_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also once it has left, until there is another one."""
    for name in ("first", "second"):
        place = f"file://{tmp_path}/{name}"
        aiorpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=aiorpc.RpcBackendOptions(init_method=place))
        logger.warning("within")
        aiorpc.shutdown()
        logger.warning("behind")
    lines = [each.getMessage() for each in caplog.records]
    assert lines == [f"worker {name}: {when}" for name in ("first", "second") for when in ("within", "behind")]


async def test_of_several_workers_the_one_that_sees_a_loss_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Each of them names itself, and whom it has lost."""
    async with cluster(3, dynamic=True) as workers:
        for worker in workers[:2]:
            assert await worker.call("worker2", abs, -3) == 3
        await workers[2]._drop()
        await until(lambda: sum("was lost" in each.getMessage() for each in caplog.records) >= 2)
    lines = [each.getMessage() for each in caplog.records if "was lost" in each.getMessage()]
    assert {line.partition(":")[0] for line in lines} == {"worker worker0", "worker worker1"}
    assert all(": worker worker2 (rank 2" in line for line in lines)


def test_with_pythons_default_logging_the_speaker_is_seen(tmp_path: Path) -> None:
    """Nothing is configured: what goes to stderr has the name; the logger is as Python makes it."""
    script = (
        "import logging, sys, aiorpc\n"
        "options = aiorpc.RpcBackendOptions(init_method='file://' + sys.argv[1])\n"
        "aiorpc.init_rpc('me', rank=0, world_size=1, rpc_backend_options=options)\n"
        "call = aiorpc.rpc_async('me', divmod, (1, 0))\n"
        "while not call.done(): pass\n"
        "del call\n"
        "aiorpc.shutdown()\n"
        "assert 'handle' not in vars(logging.getLogger('aiorpc'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120 * busy(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("worker me: the call of builtins:divmod on worker 'me'"), done.stderr


class Broken(logging.Handler):
    """A log handler of a program that raises."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(f"the disk is full: {record.getMessage()}")


@pytest.fixture
def broken_log() -> Iterator[None]:
    handler, plain = Broken(logging.WARNING), logging.getLogger("aiorpc")
    plain.addHandler(handler)
    yield
    plain.removeHandler(handler)


@pytest.mark.usefixtures("broken_log")
def test_a_log_handler_that_raises_is_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever logs goes on; what a signal handler raises meanwhile is for somebody else."""
    logger.warning("worker %s was lost", "w1")
    assert re.search(r"OSError: the disk is full: (worker \S+: )?worker w1 was lost", capsys.readouterr().err)


@pytest.mark.usefixtures("broken_log")
async def test_a_log_handler_that_raises_does_no_harm() -> None:
    """A loss comes with a line in the log: calls end all the same, and whoever shuts down gets the report."""
    async with cluster(2) as workers:
        assert await workers[0].call("worker1", abs, -3) == 3
        call = workers[0].peer("worker1", timeout=LIMIT).call(asyncio.sleep, LIMIT)
        await until(lambda: workers[1].statistics().calls_running)
        await workers[1]._drop()
        with pytest.raises(PeerLost):
            await call
        report = await workers[0].shutdown()
        assert [each.name for each in report.lost] == ["worker1"]
