"""When messages that may leave with the next one are sent although there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiorpc.runtime.engine.bounds import Bounds
from aiorpc.runtime.gradients.piggybacked import Piggybacked
from tests.runtime.test_deadlines import FakeLoop

PAUSE = Bounds().piggyback_pause


class Waiting:
    """A loop, and a worker that messages wait for."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.posts = 0
        self.flushed: list[float] = []
        engine: Any = SimpleNamespace(loop=self.loop, bounds=Bounds(), call_on_loop=self._post)
        self.piggybacked = Piggybacked(engine)

    def _post(self, function: Any) -> None:
        self.posts += 1
        self.loop.call_soon_threadsafe(function)

    def flush(self) -> None:
        self.flushed.append(self.loop.now)

    def add(self) -> None:
        self.piggybacked.add(self)


def test_a_lone_message_leaves_after_a_pause() -> None:
    """And then nobody looks any more."""
    waiting = Waiting()
    before = waiting.loop.now
    assert not waiting.loop.waiting
    waiting.add()
    waiting.loop.advance(10.0)
    assert waiting.flushed == [before + PAUSE] and not waiting.loop.waiting


def test_many_messages_wake_the_loop_up_once() -> None:
    """One timer sees to all that come while some do, however many workers they are for; none waits longer than it."""
    waiting = Waiting()
    for turn in range(50):
        waiting.add()
        waiting.loop.advance(PAUSE / 4)
        assert turn < 4 or waiting.loop.now - waiting.flushed[-1] <= PAUSE
    assert waiting.posts == 1
    waiting.loop.advance(10.0)
    assert not waiting.loop.waiting
    waiting.add()
    assert waiting.posts == 2
    waiting.loop.advance(10.0)
    assert len(waiting.flushed) < 16


def test_what_is_closed_looks_no_more() -> None:
    """Whoever leaves has sent all that it sends."""
    waiting = Waiting()
    waiting.add()
    waiting.loop.advance(0.0)
    waiting.piggybacked.close()
    assert not waiting.loop.waiting
    waiting.piggybacked.close()
