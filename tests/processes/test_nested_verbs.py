"""Blocking verbs in signal handlers and finalizers that interrupt another one anywhere."""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.authority import Authority

from . import bodies
from .workers import Link, Place, meeting_file, places, processes, serve

HITS = 200
SECONDS = 30.0
PATIENCE = 20.0  # seconds for a call that takes less than a millisecond


def nested(number: int) -> None:
    assert rpc.rpc_sync("w1", bodies.echo, args=(number,), timeout=PATIENCE) == number


def in_signal_handlers(call: Callable[[], None]) -> int:
    """The handler calls; the alarm rings at any moment of the outer call."""
    chance, hits = random.Random(7), 0

    def ring(_: int, __: FrameType | None) -> None:
        nonlocal hits
        nested(hits)
        hits += 1
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 2e-3))

    signal.signal(signal.SIGALRM, ring)
    until = time.monotonic() + SECONDS
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    while hits < HITS and time.monotonic() < until:
        call()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return hits


class Calls:
    """Part of a cycle, so that the garbage collector ends it: its finalizer calls."""

    ended = 0

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        nested(Calls.ended)
        Calls.ended += 1


def in_finalizers(call: Callable[[], None]) -> int:
    """The garbage collector comes by at any allocation."""
    gc.set_threshold(3)
    until = time.monotonic() + SECONDS
    while Calls.ended < HITS and time.monotonic() < until:
        Calls()
        call()
    gc.set_threshold(700)
    return Calls.ended


def calls(place: Place, link: Link, way: Callable[[Callable[[], None]], int], options: dict[str, Any]) -> None:
    place.init_rpc(**options)
    value = torch.arange(1000.0)

    def call() -> None:
        assert torch.equal(rpc.rpc_sync("w1", bodies.echo, args=(value,), timeout=PATIENCE), value)

    for _ in range(30):  # so that this thread reads its own answers
        call()
    link.tell((way(call), rpc.current().statistics().calls_timed_out))
    rpc.shutdown()


@pytest.mark.time_limit(90)
@pytest.mark.parametrize("transport", ["unix", "tcp", "tls"])
@pytest.mark.parametrize("way", [in_signal_handlers, in_finalizers])
def test_a_blocking_verb_works_wherever_it_interrupts_one(
    way: Callable[[Callable[[], None]], int], transport: str, tmp_path: Path
) -> None:
    """It is answered, and so is the call that was interrupted, whichever turn at the connection that had."""
    options: dict[str, Any] = {"transports": ("unix",) if transport == "unix" else ("tcp",)}
    if transport == "tls":
        options["tls"] = Authority(tmp_path / "authority").tls("w*")
    with meeting_file() as init_method, processes() as children:
        first, second = places(2, init_method)
        children.start(second, serve, options)
        caller = children.start(first, calls, way, options)
        hits, timed_out = caller.hear(80)
        assert hits > 20 and timed_out == 0
        children.check_ended()
