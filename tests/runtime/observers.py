"""What tests see of the messages of a worker, and how they keep a worker from reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiorpc import Worker
from aiorpc.runtime.engine.observing import Passage

from .waiting import LIMIT


class Seen:
    """An observer that notes what it is shown, and lets it pass if `passes` says so. Any thread."""

    def __init__(self, passes: Callable[[Passage], bool] = lambda passage: True) -> None:
        self.left: list[Passage] = []
        self._passes = passes

    def leaving(self, passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
        self.left.append(passage)
        if self._passes(passage):
            send()
        else:
            drop()

    def holds(self) -> bool:
        return False


@contextmanager
def seen(worker: Worker, passes: Callable[[Passage], bool] = lambda passage: True) -> Iterator[Seen]:
    """The messages of a worker in the block. passes: whether one that is about to leave does so, or is dropped."""
    observer, engine = Seen(passes), worker._node.engine
    engine.observers = (*engine.observers, observer)
    try:
        yield observer
    finally:
        engine.observers = tuple(each for each in engine.observers if each is not observer)


@contextmanager
def standing_still(worker: Worker) -> Iterator[None]:
    """The loop of a worker that has one of its own does not run in the block: nothing is read, nobody is answered."""
    stands, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert go_on.wait(LIMIT)

    worker.loop.call_soon_threadsafe(stand)
    assert stands.wait(LIMIT)
    try:
        yield
    finally:
        go_on.set()
