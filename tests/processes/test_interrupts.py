"""Signal handlers that raise in the midst of a blocking call: Ctrl-C in a notebook, a script's own alarm clock."""

from __future__ import annotations

import random
import signal
import time
from types import FrameType
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.runtime.waiting import wait_until

from . import bodies
from .workers import Link, Place, meeting_file, places, processes, serve

INTERRUPTS = 1500
SECONDS = 20.0
# Shorter than a call at its shortest, longer than one at its longest: the alarm hits any part of it.
EARLIEST, LATEST = 2e-5, 1.2e-3


class _Alarm(Exception):
    """Raised by the signal handler."""


def call_until(rung: list[bool], value: Any) -> None:
    """Calls without pause, until the alarm has rung.

    Not for ever: if it rings where nothing is to be raised, in the midst of a weak reference's end, say, Python prints
    what it has raised, and goes on. A function of its own, because Python 3.13 may look for
    signals at the end of a loop at an instruction that it does not count as inside of the `try` around the loop.
    """
    while not rung:
        rpc.rpc_sync("w1", bodies.echo, args=(value,))


def interrupted(place: Place, link: Link, seed: int, busy_wait: float) -> None:
    """Calls without pause, interrupted at any moment; after each interruption another call has to be answered."""
    chance = random.Random(seed)
    place.init_rpc(busy_wait=busy_wait)
    values: list[Any] = [7, torch.arange(8192.0), torch.arange(100_000.0)]  # the last one goes by shared memory
    rung: list[bool] = []

    def ring(_: int, frame: FrameType | None) -> None:
        rung.append(True)
        raise _Alarm

    signal.signal(signal.SIGALRM, ring)
    hits, until = 0, time.monotonic() + SECONDS
    while hits < INTERRUPTS and time.monotonic() < until:
        value = chance.choice(values)
        rung.clear()
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(EARLIEST, LATEST))
            try:
                call_until(rung, value)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _Alarm:  # and nothing else, whatever was under way: no error of a call that says it
            pass
        hits += 1
        assert rpc.rpc_sync("w1", bodies.echo, args=(hits,), timeout=20.0) == hits
    wait_until(lambda: rpc.current().statistics().calls_pending == 0)  # those that nobody waited for any more
    wait_until(lambda: rpc.current()._node.memory.arena.used == 0)
    link.tell((hits, rpc.current().statistics().calls_timed_out))
    rpc.shutdown()


@pytest.mark.time_limit(90)
@pytest.mark.parametrize("busy_wait", [0.001, pytest.param(0.0, marks=pytest.mark.long)])
def test_an_interrupted_call_harms_no_other(busy_wait: float) -> None:
    """Whatever instruction the signal comes at: later calls are answered, and none stays pending or keeps memory."""
    with meeting_file() as init_method, processes() as children:
        first, second = places(2, init_method)
        children.start(second, serve)
        caller = children.start(first, interrupted, 20, busy_wait)
        hits, timed_out = caller.hear(60.0)
        assert hits > INTERRUPTS // 10
        assert timed_out == 0
        children.check_ended()
