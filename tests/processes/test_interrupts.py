"""Signals in the midst of blocking calls: Ctrl-C, and handlers of the program's that raise."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import aiorpc as rpc
from tests.runtime.waiting import wait_until

from . import bodies
from .workers import Link, Place, meeting_file, places, processes, serve

SECONDS = 20.0
STORM = 300
# Seconds within which Ctrl-C is raised; of use only to a test that fails.
BOUND = 5.0
# Shorter than a call at its shortest, longer than one at its longest: the alarm hits any part of it.
EARLIEST, LATEST = 2e-5, 1.2e-3
VALUES: list[Any] = [7, torch.arange(8192.0), torch.arange(100_000.0)]  # the last one goes by shared memory


class _Alarm(Exception):
    """Raised by the signal handler."""


class Interrupting:
    """An argument during whose pickling Ctrl-C comes."""

    written = 0

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        signal.raise_signal(signal.SIGINT)
        Interrupting.written += 1
        return int, (3,)


def send_later(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def interrupted(call: Callable[[], object]) -> float:
    """How many seconds after the signal Ctrl-C came out of a call."""
    with pytest.raises(KeyboardInterrupt):
        call()
    return time.monotonic()


def check_answers(number: int) -> None:
    assert rpc.rpc_sync("w1", bodies.echo, args=(number,), timeout=20.0) == number


def waits(place: Place, link: Link) -> None:
    """Ctrl-C while it waits for a call, a Future, several, an item of a stream, and its own shutdown."""
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    place.init_rpc()
    assert signal.getsignal(signal.SIGINT) is not before
    check_answers(0)
    slow = rpc.rpc_async("w1", time.sleep, args=(30,))
    for wait in (
        lambda: rpc.rpc_sync("w1", time.sleep, args=(30,)),
        lambda: slow.wait(),
        lambda: rpc.wait_all([slow, rpc.rpc_async("w1", time.sleep, args=(30,))]),
        lambda: rpc.remote("w1", time.sleep, args=(30,)).to_here(),
        lambda: next(iter(rpc.stream("w1", slow_items))),
    ):
        began = time.monotonic()
        send_later(0.2)
        assert interrupted(wait) - began < BOUND
        check_answers(1)
    rpc.shutdown(graceful=False)
    assert signal.getsignal(signal.SIGINT) is before
    link.tell("done")


def slow_items() -> Any:
    time.sleep(30)
    yield 1


def storm(place: Place, link: Link) -> None:
    """Ctrl-C at any moment of calls without pause; after each another call has to be answered."""
    chance = random.Random(11)
    place.init_rpc()
    longest, until, hits = 0.0, time.monotonic() + SECONDS, 0
    while hits < STORM and time.monotonic() < until:
        began = time.monotonic()
        rings = chance.uniform(EARLIEST, LATEST)
        try:
            send_later(rings)
            while time.monotonic() < began + BOUND:
                rpc.rpc_sync("w1", bodies.echo, args=(chance.choice(VALUES),))
        except KeyboardInterrupt:
            longest = max(longest, time.monotonic() - began)
        hits += 1
        check_answers(hits)
    wait_until(lambda: rpc.current().statistics().calls_pending == 0)
    wait_until(lambda: rpc.current()._node.memory.arena.used == 0)
    link.tell((hits, longest))
    rpc.shutdown()


def within(place: Place, link: Link) -> None:
    """Ctrl-C while the runtime runs code of the program's comes behind that."""
    place.init_rpc()
    interrupted(lambda: rpc.rpc_sync("w1", slow_echo, args=(Interrupting(),)))
    check_answers(1)
    link.tell(Interrupting.written)
    rpc.shutdown()


def slow_echo(value: object) -> object:
    time.sleep(0.5)
    return value


def own_handler(place: Place, link: Link) -> None:
    """A program with a handler of its own keeps it."""
    rung: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: rung.append(number))
    own = signal.getsignal(signal.SIGINT)
    place.init_rpc()
    send_later(0.2)
    assert rpc.rpc_sync("w1", slow_echo, args=(1,)) == 1
    assert signal.getsignal(signal.SIGINT) is own
    rpc.shutdown()
    assert signal.getsignal(signal.SIGINT) is own
    link.tell(rung)


def alarms(place: Place, link: Link) -> None:
    """A handler that raises, at any moment: it ends a wait, or the worker, with a name; a new one can be started."""
    chance = random.Random(20)

    def ring(_: int, __: FrameType | None) -> None:
        raise _Alarm("rung")

    signal.signal(signal.SIGALRM, ring)
    hits = closed = 0
    until = time.monotonic() + SECONDS
    place.init_rpc()
    while time.monotonic() < until:
        value = chance.choice(VALUES)
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(EARLIEST, LATEST))
            try:
                for _ in range(1000):
                    rpc.rpc_sync("w1", bodies.echo, args=(value,), timeout=10.0)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _Alarm:
            hits += 1
        except rpc.RpcError as error:  # code that the runtime ran has raised it, or the worker is closed
            assert "_Alarm" in f"{error} {error.__cause__!r}", error
        try:
            check_answers(hits)
        except rpc.WorkerClosed as error:
            assert "_Alarm: rung" in str(error), error
            closed += 1
            with contextlib.suppress(rpc.RpcError):
                rpc.shutdown(graceful=False)
            place.init_rpc()
            check_answers(hits)
    link.tell((hits, closed))
    rpc.shutdown()


@pytest.mark.time_limit(60)
def test_ctrl_c_ends_a_wait() -> None:
    """Whatever the verb waits for; the next one works. Python's handler is there again after the worker."""
    assert run(waits) == "done"


@pytest.mark.time_limit(60)
def test_ctrl_c_harms_no_call() -> None:
    """Whatever instruction it comes at: it is raised soon, later calls are answered, none stays or keeps memory."""
    hits, longest = run(storm)
    assert hits > STORM // 10
    assert longest < BOUND


@pytest.mark.time_limit(60)
def test_ctrl_c_within_the_runtime_is_deferred() -> None:
    """Code of the program's that it runs comes to its end; the verb raises where it waits."""
    assert run(within) == 1


@pytest.mark.time_limit(60)
def test_a_handler_of_the_program_stays() -> None:
    """It runs, the call goes on, and it is still installed when the worker has ended."""
    assert run(own_handler) == [signal.SIGINT]


@pytest.mark.time_limit(90)
def test_a_handler_that_raises_never_makes_a_call_hang() -> None:
    """It ends a wait, or it closes the worker, whose error names it; the others see a goodbye."""
    hits, closed = run(alarms, stays)
    assert hits > 20
    assert closed < hits


def stays(place: Place, link: Link) -> None:
    """Serve until the test says so; who leaves that group says goodbye."""
    place.init_rpc()
    link.hear(80.0)
    rpc.shutdown(graceful=False)


def run(body: Callable[[Place, Link], None], other: Callable[..., object] = serve) -> Any:
    """What the body tells. other: what w1 does, in a free group if it is not the usual."""
    with meeting_file() as init_method, processes() as children:
        first, second = places(2, init_method)
        if other is not serve:
            first, second = (Place(each.name, -1, None, init_method) for each in (first, second))
        server = children.start(second, other)
        caller = children.start(first, body)
        told = caller.hear(60.0)
        if other is not serve:
            caller.join()
            server.tell("end")
        children.check_ended()
        return told
