"""What channels have moved: counted and added up by several threads at once, without a lock."""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from aiorpc import channels
from aiorpc.channels import Traffic, Wire, count_refused, inline, shared
from aiorpc.channels.arena import Arena
from aiorpc.channels.inline import Inline
from aiorpc.channels.shm import Lender
from aiorpc.channels.space import KIB
from aiorpc.options import SHARE_SIZE
from tests.channels.ends import SharedEnds
from tests.transport.ends import meanwhile

FILES = channels.__file__, inline.__file__, shared.__file__, collections.__file__


def moments(work: Callable[[], Any], other: Callable[[], Any], check: Callable[[int], None]) -> int:
    """Do `other` wherever the interpreter may turn to another thread that does it. check: how often was one done?"""
    for at in range(10_000):
        found = meanwhile(work, at, lambda _: other(), *FILES, signals=True)
        check(1 + found)
        if not found:
            return at
    raise AssertionError("it does not end")


def test_the_first_refusals_for_a_reason_are_all_counted() -> None:
    """Also where another thread counts one as Python's own code says that there was none so far."""
    others: list[str] = []

    class Refused(Counter[str]):
        def __missing__(self, reason: str) -> int:
            others.append(reason)
            self[reason] = 1
            return 0

    lender = Lender(Arena(64 * KIB))
    lender.refused = Refused()
    lender.retire()
    for _ in range(2):
        assert lender.lend(b"x") is None
    assert lender.refused == {"retired": 2 + len(others)}


def test_what_rides_along_is_all_counted() -> None:
    """Threads that send over one link count at once."""
    channel = Inline()

    def check(times: int) -> None:
        assert channel.traffic == Traffic(times, 3 * times)
        channel.traffic.sent = channel.traffic.bytes_sent = 0

    count = partial(channel.count, [b"abc"])
    assert moments(count, count, check) > 1


def test_what_goes_through_shared_memory_is_all_counted() -> None:
    """As what rides along."""
    ends = SharedEnds()
    traffic, size = ends.ends[0].traffic, SHARE_SIZE

    def send() -> None:
        wire = ends.ends[0].send_one(bytes(size))
        assert wire is not None
        wires.append(wire)

    def check(times: int) -> None:
        assert (traffic.sent, traffic.bytes_sent) == (times, times * size)
        traffic.sent = traffic.bytes_sent = 0
        ends.ends[0].withdraw(wires, named=False)
        wires.clear()

    wires: list[Wire] = []
    try:
        traffic.sent = traffic.bytes_sent = 0
        assert moments(send, send, check) > 1
    finally:
        ends.dispose()


def test_adding_up_while_something_is_refused() -> None:
    """Who adds up what a link has moved gets what was counted before, and no error: others go on."""
    link, total = Traffic(), Traffic()

    def start() -> None:
        for traffic in (link, total):
            traffic.refused.clear()
            count_refused(traffic.refused, "full")

    def check(_: int) -> None:
        assert total.refused["full"] == 2
        start()

    start()
    assert moments(partial(total._add, link), partial(count_refused, link.refused, "closed"), check) > 1
