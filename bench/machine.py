"""How fast the machine is: told beside each table, so that a reader can tell slow code from a slow machine.

Three figures, of which each call of this project is made: what plain Python takes, what memory takes, and what it takes
to wake another process up that sleeps. None of this project's code is in them.
"""

from __future__ import annotations

import os
import select
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from .cohort import process_of
from .stats import BenchError

TURNS = 100_000
TIMES = 7  # each figure is the median of so many
COPIED = 256 << 20  # bytes, more than the caches have
WAKE_UPS = 500  # in each of the TIMES
PATIENCE_SECONDS = 10.0
#: The names of the figures among the facts of a run, and their units.
PYTHON, MEMORY, WAKE_UP = "turn of a loop", "copy of 256 MB", "wake-up"


def speed() -> dict[str, str]:
    """The three figures, as facts of a run. Takes about a second; BenchError if the process to be woken is gone."""
    return {
        PYTHON: f"{python_turn():.3g} ns",
        MEMORY: f"{copied():.3g} GB/s",
        WAKE_UP: f"{wake_up():.3g} µs",
    }


def line(facts: Mapping[str, str]) -> str:
    """The figures in one sentence; empty for files of before there were any."""
    if PYTHON not in facts:
        return ""
    return (
        f"This machine as the run began: {facts[PYTHON]} for a turn of a loop of plain Python, {facts[MEMORY]} for a "
        f"{MEMORY}, {facts[WAKE_UP]} to wake a process up"
    )


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(TIMES))


def python_turn() -> float:
    """Nanoseconds of a turn that computes, stores and looks up."""
    return _median(_turns)


def _turns() -> float:
    begin = time.perf_counter_ns()
    seen: dict[int, int] = {}
    for number in range(TURNS):
        seen[number & 63] = seen.get(number & 31, 0) + number
    return (time.perf_counter_ns() - begin) / TURNS


def copied(size: int = COPIED) -> float:
    """GB (10^9 bytes) that one core copies in a second, between two pieces of memory whose pages are there."""
    source = b"\x01" * size
    target = bytearray(source)
    view = memoryview(target)

    def rate() -> float:
        begin = time.perf_counter_ns()
        view[:] = source
        return size / (time.perf_counter_ns() - begin)

    return _median(rate)


def wake_up() -> float:
    """Microseconds from when a byte is written until who waits for it goes on: half of a round trip of two processes.

    Idle cores may halt meanwhile, as nothing keeps them awake.
    """
    with process_of(answer, "who is woken") as pipe:
        round_trips(pipe)  # until it has started
        return _median(lambda: round_trips(pipe)) / 2


def round_trips(pipe: Connection) -> float:
    """Microseconds of one, if the process at the other end runs `answer`; BenchError if it has gone."""
    place = pipe.fileno()
    poll = select.poll()
    poll.register(place, select.POLLIN)
    begin = time.perf_counter_ns()
    try:
        for _ in range(WAKE_UPS):
            os.write(place, b"!")
            if not poll.poll(PATIENCE_SECONDS * 1e3) or not os.read(place, 1):
                raise TimeoutError(f"nothing within {PATIENCE_SECONDS:g} s, or the end of what it sends")
    except OSError as error:
        raise BenchError(f"the process that is woken, to see what that takes, gave no answer: {error}") from error
    return (time.perf_counter_ns() - begin) / WAKE_UPS / 1e3


def answer(pipe: Connection) -> None:
    """Entry of the process that is woken: send each byte back, until nobody sends any."""
    place = pipe.fileno()
    while byte := os.read(place, 1):
        os.write(place, byte)
