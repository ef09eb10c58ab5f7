"""When the loop looks for what nobody tells it of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiorpc.runtime.engine.looking import Looking
from tests.runtime.test_deadlines import FakeLoop

SHORTEST = 0.01


class Looked:
    """A loop, and when it has looked. again: after how many seconds it is to look again, as each look says in turn."""

    def __init__(self, *again: float | None) -> None:
        self.loop = FakeLoop()
        self.posts = 0
        self.looks: list[float] = []
        self.again = list(again)
        engine: Any = SimpleNamespace(loop=self.loop, call_on_loop=self._post)
        self.looking = Looking(engine, self._look, lambda: SHORTEST)

    def _post(self, function: Any) -> None:
        self.posts += 1
        self.loop.call_soon_threadsafe(function)

    def _look(self) -> float | None:
        self.looks.append(self.loop.now)
        assert not self.looking.near  # so who asks now is heard
        return self.again.pop(0)


@pytest.mark.parametrize("posted", [True, False])
def test_it_looks_after_the_shortest_pause_and_then_as_it_says(posted: bool) -> None:
    """Nobody looks before somebody asks, or after a look has said that there is nothing more."""
    looked = Looked(SHORTEST, 5 * SHORTEST, None)
    looked.loop.advance(1.0)
    start = looked.loop.now
    (looked.looking.ask if posted else looked.looking.begin)()
    looked.loop.advance(10.0)
    assert looked.looks == pytest.approx([start + SHORTEST, start + 2 * SHORTEST, start + 7 * SHORTEST])
    assert looked.posts == posted and not looked.loop.waiting and not looked.looking.near


def test_a_look_that_raises_is_not_the_last() -> None:
    """Whoever asks next is heard."""
    looked = Looked()
    looked.looking.ask()
    with pytest.raises(IndexError):
        looked.loop.advance(SHORTEST)
    looked.again.append(None)
    looked.looking.ask()
    looked.loop.advance(SHORTEST)
    assert len(looked.looks) == 2


def test_what_is_closed_looks_no_more() -> None:
    """Twice is as good as once."""
    looked = Looked(SHORTEST)
    looked.looking.ask()
    looked.loop.advance(0.0)
    looked.looking.close()
    looked.looking.close()
    assert not looked.loop.waiting
    looked.loop.advance(1.0)
    assert not looked.looks
