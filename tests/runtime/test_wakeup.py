"""What a thread waits at: it is woken, or a descriptor has something."""

from __future__ import annotations

import errno
import os
import select
import threading
import weakref
from collections.abc import Iterator

import pytest

from aiorpc.runtime.engine import wakeup as alarm_module
from aiorpc.runtime.engine.wakeup import WakeUp

LIMIT = 20.0


class Pipe:
    """A source with a descriptor."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.willing = True

    def attach(self, epoll: select.epoll) -> bool:
        if self.willing:
            epoll.register(self.read, select.EPOLLIN)
        return self.willing

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


@pytest.fixture
def pipes() -> Iterator[list[Pipe]]:
    made = [Pipe(), Pipe()]
    yield made
    for pipe in made:
        pipe.close()


@pytest.fixture
def wakeup() -> Iterator[WakeUp]:
    made = WakeUp()
    yield made
    made.close()


def test_release_wakes_the_thread(wakeup: WakeUp) -> None:
    """Before it waits, and while it does; what was taken is not there any more."""
    wakeup.release()
    assert wakeup.epoll.poll(LIMIT) == [(wakeup.event, select.EPOLLIN)]
    wakeup.take()
    assert wakeup.epoll.poll(0) == []
    timer = threading.Timer(0.05, wakeup.release)
    timer.start()
    assert wakeup.epoll.poll(LIMIT) == [(wakeup.event, select.EPOLLIN)]
    wakeup.take()
    timer.join()


def test_one_source_at_a_time(wakeup: WakeUp, pipes: list[Pipe]) -> None:
    """A new source takes the place of the one before, of which the thread hears nothing more."""
    first, second = pipes
    assert wakeup.watch(first) and wakeup.watched() is first
    os.write(first.write, b"x")
    assert [found for found, _ in wakeup.epoll.poll(LIMIT)] == [first.read]
    assert wakeup.watch(second) and wakeup.watched() is second
    assert wakeup.epoll.poll(0) == []
    os.write(second.write, b"x")
    wakeup.release()
    assert {found for found, _ in wakeup.epoll.poll(LIMIT)} == {second.read, wakeup.event}
    wakeup.take()


def test_a_source_that_cannot_be_watched_now(wakeup: WakeUp, pipes: list[Pipe]) -> None:
    """It is not watched then, nor is the one before."""
    first, second = pipes
    assert wakeup.watch(first)
    second.willing = False
    assert not wakeup.watch(second)
    assert wakeup.watched() is None
    os.write(first.write, b"x")
    assert wakeup.epoll.poll(0) == []


def test_a_source_is_not_kept(wakeup: WakeUp) -> None:
    """Once nobody else has it, it is gone."""
    pipe = Pipe()
    assert wakeup.watch(pipe)
    pipe.close()
    seen = weakref.ref(pipe)
    del pipe
    assert seen() is None and wakeup.watched() is None


def test_a_closed_alarm_is_released_in_vain() -> None:
    """Whoever comes too late writes to no descriptor that is somebody else's by now."""
    wakeup = WakeUp()
    event = wakeup.event
    wakeup.close()
    taken, other = os.pipe()
    try:
        assert event in (taken, other) or os.dup2(other, event)
        wakeup.release()
        assert select.select([taken], [], [], 0)[0] == []
    finally:
        for descriptor in {taken, other, event}:
            os.close(descriptor)


def test_what_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no descriptor for the second of the two."""
    before = os.listdir("/proc/self/fd")

    def full() -> select.epoll:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(select, "epoll", full)
    assert WakeUp.make() is None
    assert os.listdir("/proc/self/fd") == before


def test_none_is_made_where_descriptors_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others need them more; and what was opened to see that is closed again."""
    before = os.listdir("/proc/self/fd")
    made = WakeUp.make()
    assert made is not None
    made.close()
    monkeypatch.setattr(alarm_module, "most_descriptors", lambda: 2 * made.event)
    assert WakeUp.make() is None
    assert os.listdir("/proc/self/fd") == before
