"""The loop monitor: real blockages are measured and named once, everything else stays silent."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aiorpc.runtime.engine.lag import LoopMonitor
from tests.runtime.waiting import LIMIT, until

BLOCKED = 0.6  # seconds; far longer than `warn_after`: what of it a busy machine gives to others is no blockage
Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs a coroutine function on one loop or the other."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def runner(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(asyncio.wait_for(main(), 2 * LIMIT))

    yield runner


def monitor(**changes: Any) -> LoopMonitor:
    settings: dict[str, Any] = {"interval": 0.02, "warn_after": 0.1, "describe": lambda: "call 7 of slow", "name": "t"}
    return LoopMonitor(asyncio.get_running_loop(), **(settings | changes))


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiorpc-watch-t"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "aiorpc"]


def block_for(seconds: float) -> None:
    time.sleep(seconds)


def test_a_blocked_loop_is_reported_once_with_handler_and_place(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """One WARNING of logger aiorpc for one blockage: how long, the handler, the innermost frames, and what to do."""

    async def main() -> None:
        watch = monitor()
        watch.start()
        await asyncio.sleep(0)  # it measures from the loop's next turn on
        block_for(BLOCKED)
        await until(lambda: watch.blocked_count > 0)
        watch.stop()
        assert watch.lag_max > 0.1  # less than it was blocked: time without a processor is excused
        assert 0 < watch.lag_mean < watch.lag_max
        assert watch.blocked_count == 1

    run(main)
    (text,) = warnings(caplog)
    assert [(record.name, record.levelno) for record in caplog.records] == [("aiorpc", logging.WARNING)]
    assert re.search(
        r"blocked for 0\.\d\d s by call 7 of slow \(at test_lag\.py:\d+ block_for < test_lag\.py:\d+ main", text
    )
    assert "`def` handler" in text
    assert "options.dedicated_loop" in text


def test_a_handler_that_holds_the_interpreter_lock_is_reported(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """One long C call stops the watchdog too; the processor time it used tells it from a stopped process."""

    async def main() -> None:
        watch = monitor()
        watch.start()
        await until(lambda: watch.lag_mean > 0)
        spent, size = 0.0, 1_000_000
        while spent < 0.2:
            start = time.thread_time()  # on a busy machine more time passes than is spent
            3**size
            spent, size = time.thread_time() - start, size * 2
        await until(lambda: watch.blocked_count > 0)
        watch.stop()

    run(main)
    assert warnings(caplog)


def test_a_healthy_loop_is_never_reported(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Fifty intervals of a busy loop that keeps yielding: no warning, and the lag stays small."""

    async def main() -> None:
        watch = monitor(interval=0.01, warn_after=0.5)
        watch.start()
        end = time.monotonic() + 50 * 0.01
        turns = 0
        while time.monotonic() < end:
            sum(range(1000))
            await asyncio.sleep(0)
            turns += 1
        watch.stop()
        assert turns > 100
        assert watch.blocked_count == 0
        assert watch.lag_max < 0.5

    run(main)
    assert warnings(caplog) == []


def test_stop_ends_timer_and_thread(run: Run) -> None:
    """After stop nothing ticks and no thread is left; stop again is nothing; start begins anew."""

    async def main() -> None:
        watch = monitor()
        watch.start()
        watch.start()
        (thread,) = watchers()
        assert thread.daemon
        watch.stop()
        assert not thread.is_alive()
        watch.stop()
        watch.start()
        await until(lambda: watch.lag_max > 0)
        assert len(watchers()) == 1
        watch.stop()
        assert watchers() == []
        before = watch.lag_max
        block_for(before + 0.1)
        await asyncio.sleep(0.05)  # longer than an interval
        assert watch.lag_max == before

    run(main)


ROOT = Path(__file__).resolve().parents[2]
# Without the package's ``__init__``, which imports torch: the process starts in a tenth of the time.
STOPPED_PROGRAM = f"""
import asyncio, logging, os, signal, sys, time, types, uvloop
sys.modules["aiorpc"] = types.ModuleType("aiorpc")
sys.modules["aiorpc"].__path__ = [{str(ROOT / "aiorpc")!r}]
from aiorpc.runtime.engine.lag import LoopMonitor
logging.basicConfig(level=logging.WARNING, format="%(message)s")
async def main():
    while time.thread_time() < 1.0:  # as one that has imported torch
        pass
    interval = float(sys.argv[2])
    watch = LoopMonitor(asyncio.get_running_loop(), interval=interval, warn_after=0.2, describe=lambda: "innocent")
    watch.start()
    await asyncio.sleep(0.1)
    print("ready", flush=True)
    line = await asyncio.to_thread(sys.stdin.readline)
    await asyncio.sleep(0.1 + interval)
    print("silent so far, blocked", watch.blocked_count, "times", file=sys.stderr, flush=True)
    time.sleep(1.0 + interval)
    await asyncio.sleep(0.1)
    watch.stop()
factory = asyncio.new_event_loop if sys.argv[1] == "asyncio" else uvloop.new_event_loop
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("interval", [0.02, 1.0], ids=["later", "before the first look"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_stopped_process_blames_nobody(loop: str, interval: float) -> None:
    """SIGSTOP for three times the threshold is not a blocked loop; a blockage after it is reported again."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED_PROGRAM, loop, str(interval)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.6 + interval)  # how long it is stopped is what is tested
        process.send_signal(signal.SIGCONT)
        _, log = process.communicate("go\n", timeout=LIMIT)
    finally:
        process.kill()
        process.communicate()
    before, _, after = log.partition("silent so far, blocked 0 times\n")
    assert before == ""
    assert "blocked for" in after
    assert "by innocent" in after


@pytest.mark.parametrize("changes", [{"interval": 0.0}, {"warn_after": -1.0}])
async def test_settings_that_make_no_sense_are_refused(changes: dict[str, float]) -> None:
    """An interval of nothing and a negative threshold are named."""
    with pytest.raises(ValueError, match="interval must be > 0"):
        monitor(**changes)
