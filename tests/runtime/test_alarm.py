"""What a thread waits at: it is woken, or a descriptor has something."""

from __future__ import annotations

import errno
import os
import select
import threading
import weakref
from collections.abc import Iterator

import pytest

from aiorpc.runtime.engine import alarm as alarm_module
from aiorpc.runtime.engine.alarm import Alarm

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
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    made.close()


def test_release_wakes_the_thread(alarm: Alarm) -> None:
    """Before it waits, and while it does; what was taken is not there any more."""
    alarm.release()
    assert alarm.epoll.poll(LIMIT) == [(alarm.event, select.EPOLLIN)]
    alarm.take()
    assert alarm.epoll.poll(0) == []
    timer = threading.Timer(0.05, alarm.release)
    timer.start()
    assert alarm.epoll.poll(LIMIT) == [(alarm.event, select.EPOLLIN)]
    alarm.take()
    timer.join()


def test_one_source_at_a_time(alarm: Alarm, pipes: list[Pipe]) -> None:
    """A new source takes the place of the one before, of which the thread hears nothing more."""
    first, second = pipes
    assert alarm.watch(first) and alarm.watched() is first
    os.write(first.write, b"x")
    assert [found for found, _ in alarm.epoll.poll(LIMIT)] == [first.read]
    assert alarm.watch(second) and alarm.watched() is second
    assert alarm.epoll.poll(0) == []
    os.write(second.write, b"x")
    alarm.release()
    assert {found for found, _ in alarm.epoll.poll(LIMIT)} == {second.read, alarm.event}
    alarm.take()


def test_a_source_that_cannot_be_watched_now(alarm: Alarm, pipes: list[Pipe]) -> None:
    """It is not watched then, nor is the one before."""
    first, second = pipes
    assert alarm.watch(first)
    second.willing = False
    assert not alarm.watch(second)
    assert alarm.watched() is None
    os.write(first.write, b"x")
    assert alarm.epoll.poll(0) == []


def test_a_source_is_not_kept(alarm: Alarm) -> None:
    """Once nobody else has it, it is gone."""
    pipe = Pipe()
    assert alarm.watch(pipe)
    pipe.close()
    seen = weakref.ref(pipe)
    del pipe
    assert seen() is None and alarm.watched() is None


def test_a_closed_alarm_is_released_in_vain() -> None:
    """Whoever comes too late writes to no descriptor that is somebody else's by now."""
    alarm = Alarm()
    event = alarm.event
    alarm.close()
    taken, other = os.pipe()
    try:
        assert event in (taken, other) or os.dup2(other, event)
        alarm.release()
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
    assert Alarm.make() is None
    assert os.listdir("/proc/self/fd") == before


def test_none_is_made_where_descriptors_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others need them more; and what was opened to see that is closed again."""
    before = os.listdir("/proc/self/fd")
    made = Alarm.make()
    assert made is not None
    made.close()
    monkeypatch.setattr(alarm_module, "most_descriptors", lambda: 2 * made.event)
    assert Alarm.make() is None
    assert os.listdir("/proc/self/fd") == before
