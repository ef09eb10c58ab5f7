"""The server that is killed and comes back."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from aiorpc.examples import comeback
from tests.examples.programs import matches, run_program
from tests.runtime.waiting import until

LIMIT = 120.0  # seconds for three processes that import torch, one behind the others


@pytest.mark.long
@pytest.mark.time_limit(150)
def test_it_goes_on_from_its_checkpoint_in_another_process(tmp_path: Path) -> None:
    """One process is lost in the middle; the last step is right, and made by another one."""
    program = ["-m", "aiorpc.examples.comeback", "--steps", "12", "--kill-at", "4"]
    outcome = run_program(program, tmp_path, timeout=LIMIT)
    assert outcome.code == 0, outcome.err
    spoken = (r"step 4: lost the server", r"12 steps, the last in another process; the error is 0\.00\d\d")
    assert matches(outcome.out, spoken), outcome.out


async def test_an_interrupted_program_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends with whoever looks after it."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*_: str) -> asyncio.subprocess.Process:
        process = await create(sys.executable, "-c", "import time; time.sleep(600)")
        started.append(process)
        return process

    create = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    supervisor = asyncio.create_task(comeback.supervise("file:///nowhere"))
    await until(lambda: started)
    supervisor.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervisor
    (process,) = started
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("options", [[], ["-OO"]], ids=["docstrings", "none"])
def test_no_steps_are_refused(options: list[str], tmp_path: Path) -> None:
    """It would go on for ever, as no step would be the last. Also where Python has no docstrings."""
    outcome = run_program([*options, "-m", "aiorpc.examples.comeback", "--steps", "-3"], tmp_path, timeout=LIMIT)
    assert outcome.code == 2 and "--steps must be at least 1" in outcome.err
