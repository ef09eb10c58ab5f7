"""The fake's memory and events between two real processes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from ..processes.workers import Child, Place, processes, wait_for
from .bodies import SIZE, obey, receive, send
from .cuda import POISON, FakeCuda, FakeInterprocess
from .interprocess import InterprocessEvent

PLACE = Place("other", 1, None, "")


class Other:
    """The other process, and what it is told to do."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def call(self, *order: Any) -> Any:
        """What the method gave, or "RuntimeError: ...", or a text that stands for an object there."""
        self.child.tell(order)
        return self.child.hear()

    def end(self) -> list[str]:
        """Its violations."""
        self.child.tell(("end",))
        violations: list[str] = self.child.hear()
        assert self.child.join() == 0
        return violations


@pytest.fixture
def options() -> dict[str, Any]:
    """Of the other process's fake; a test may override them."""
    return {"lag": (0.0, 0.0)}


@pytest.fixture
def other(options: dict[str, Any]) -> Iterator[Other]:
    """A process that obeys."""
    with processes() as children:
        yield Other(children.start(PLACE, obey, options))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """The fake of this process."""
    with FakeCuda(lag=(0.0, 0.0), patience=0.5) as fake:
        yield fake


def driver_of(fake: FakeCuda) -> FakeInterprocess:
    assert fake.interprocess is not None
    return fake.interprocess


def exchange(sender: str = "", receiver: str = "") -> tuple[int, list[str]]:
    """Messages that were wrong, and violations; each side leaves out what is named."""
    with processes() as children, FakeCuda(seed=1) as fake:
        child = children.start(PLACE, receive, receiver)
        driver = driver_of(fake)
        memory, event = driver.allocate(0, SIZE), driver.event(0)
        child.tell(driver.export(0, memory))
        child.tell(driver.export_event(event))

        def tell() -> None:
            child.tell(None)
            child.hear()

        send(fake, memory, event, sender, tell)
        wrong, violations = child.hear()
        assert child.join() == 0
        driver.free(0, memory)
    return wrong, violations + fake.violations


def test_a_buffer_is_exchanged_in_order() -> None:
    """With a wait, a copy and a record on both sides each message arrives, though nobody waits for a device."""
    assert exchange() == (0, [])


@pytest.mark.long
@pytest.mark.parametrize("left_out", ["wait", "record"])
def test_what_the_sender_leaves_out_is_seen(left_out: str) -> None:
    """Without its wait it overwrites what is not read; without its record the reader is too early."""
    assert exchange(sender=left_out)[0] > 0


@pytest.mark.long
@pytest.mark.parametrize("left_out", ["wait", "record"])
def test_what_the_receiver_leaves_out_is_seen(left_out: str) -> None:
    """Without its wait it reads too early; without its record the sender writes too early."""
    assert exchange(receiver=left_out)[0] > 0


def test_a_handle_is_opened_once(fake: FakeCuda, other: Other) -> None:
    """A second time is a violation; after `close` it is none."""
    driver = driver_of(fake)
    memory = driver.allocate(0, 100)
    handle = driver.export(0, memory)
    opened = other.call("open", 0, handle)
    assert type(opened) is int
    assert "has that memory open already" in other.call("open", 0, handle)
    other.call("close", 0, opened)
    opened = other.call("open", 0, handle)
    assert type(opened) is int
    assert other.call("close", 1, opened).startswith("RuntimeError")
    assert other.call("close", 0, opened) is None
    driver.free(0, memory)
    assert fake.violations == []
    assert len(other.end()) == 2


def test_memory_is_not_freed_while_it_is_open(fake: FakeCuda, other: Other) -> None:
    """That is a violation of the process that frees it."""
    driver = driver_of(fake)
    memory = driver.allocate(0, 100)
    opened = other.call("open", 0, driver.export(0, memory))
    with pytest.raises(RuntimeError, match="have the memory open"):
        driver.free(0, memory)
    assert len(fake.violations) == 1
    assert other.call("close", 0, opened) is None
    assert other.end() == []


def test_a_killed_process_has_nothing_open(fake: FakeCuda, other: Other) -> None:
    """What it had open may be freed."""
    driver = driver_of(fake)
    memory = driver.allocate(0, 100)
    assert type(other.call("open", 0, driver.export(0, memory))) is int
    other.child.kill()
    other.child.join()
    driver.free(0, memory)
    assert fake.violations == []


def test_a_freed_handle_cannot_be_opened(fake: FakeCuda, other: Other) -> None:
    """Nor if its descriptor was given to something else."""
    driver = driver_of(fake)
    memory = driver.allocate(0, 100)
    handle = driver.export(0, memory)
    driver.free(0, memory)
    assert "invalid" in other.call("open", 0, handle)
    again = driver.allocate(0, 100)
    assert "invalid" in other.call("open", 0, handle)
    assert "invalid" in other.call("open", 0, driver.export(0, again)[:63])
    assert "invalid" in other.call("open_event", 0, driver.export(0, again))
    driver.free(0, again)
    assert other.end() == []


@pytest.mark.parametrize("options", [{"uuids": ["B", "A"], "peer_access": False}])
def test_devices_go_by_their_names(other: Other) -> None:
    """A device may open what lies on the same one, whatever its number, and without access nothing else."""
    with FakeCuda(uuids=["A", "B"]) as fake:
        driver = driver_of(fake)
        memory, event = driver.allocate(0, 100), driver.event(0)
        assert "no access" in other.call("open", 0, driver.export(0, memory))
        assert "no access" in other.call("open_event", 0, driver.export_event(event))
        opened = other.call("open", 1, driver.export(0, memory))
        assert type(opened) is int
        assert other.call("reaches", 1, "A") is True
        assert other.call("reaches", 0, "A") is False
        assert len(other.end()) == 2
        driver.free(0, memory)


@pytest.mark.parametrize("options", [{"uuids": ["B", "A"], "peer_access": {("B", "A")}}])
def test_access_goes_one_way(other: Other) -> None:
    """Pairs say who reaches whose memory."""
    with FakeCuda(uuids=["A", "B"]) as fake:
        driver = driver_of(fake)
        first, second = driver.allocate(0, 100), driver.allocate(1, 100)
        assert type(other.call("open", 0, driver.export(0, first))) is int
        assert "no access" in other.call("open", 1, driver.export(1, second))
        assert len(other.end()) == 1


def test_a_copy_stays_within_what_was_opened(fake: FakeCuda, other: Other) -> None:
    """And comes from the device that it was opened for."""
    driver = driver_of(fake)
    memory = driver.allocate(0, 100)
    opened = other.call("open", 0, driver.export(0, memory))
    mine = other.call("allocate", 0, 100)
    stream, stranger = other.call("current", 0), other.call("current", 1)
    assert other.call("copy", mine, opened, 100, stream) is None
    assert "past the end" in other.call("copy", mine, opened + 1, 100, stream)
    assert "opened for device 0" in other.call("copy", mine, opened, 100, stranger)
    assert other.call("close", 0, opened) is None
    assert "nothing was given out" in other.call("copy", mine, opened, 100, stream)
    assert other.call("free", 0, mine) is None
    assert len(other.end()) == 3
    driver.free(0, memory)


def test_a_destroyed_event_is_not_used(fake: FakeCuda, other: Other) -> None:
    """By nobody, for anything, once the process that made it let go of it."""
    driver = driver_of(fake)
    event = driver.event(0)
    theirs, stream = other.call("open_event", 0, driver.export_event(event)), other.call("current", 0)
    assert other.call("record", theirs, stream) is None
    del event
    for name in ("record", "wait"):
        assert "was destroyed" in other.call(name, theirs, stream)
    assert "was destroyed" in other.call("query", theirs)
    assert len(other.end()) == 3


def test_an_event_is_not_let_go_of_before_it_is_done(other: Other) -> None:
    """Those who wait for it elsewhere may wait for ever."""
    with FakeCuda(lag=(0.0, 0.0), patience=5) as fake:
        driver = driver_of(fake)
        held, event = driver.event(0), driver.event(0)
        stream = other.call("current", 0)
        driver.record(hold(driver, fake, held), fake.current(0))
        theirs = other.call("open_event", 0, driver.export_event(held))
        last = other.call("open_event", 0, driver.export_event(event))
        assert other.call("wait", theirs, stream) is None  # holds up what comes after it
        assert other.call("record", last, stream) is None
        other.call("forget")
        driver.wait(event, fake.fresh(0))
        wait_for(lambda: fake.violations)
        assert "let go of it" in fake.violations[0]
        fake.abandon()
        assert other.end() == []


def test_a_wait_is_for_what_was_recorded_when_it_was_called(fake: FakeCuda, other: Other) -> None:
    """A later record of another process is not waited for; an event that was never recorded holds up nothing."""
    driver = driver_of(fake)
    event = driver.event(0)
    stream = fake.current(0)
    driver.wait(event, stream)
    fake.synchronize(fake.mark(stream))
    theirs, there = other.call("open_event", 0, driver.export_event(event)), other.call("current", 0)
    assert other.call("record", theirs, there) is None
    driver.wait(event, stream)
    fake.synchronize(fake.mark(stream))
    assert driver.query(event)
    assert fake.violations == other.end() == []


@pytest.mark.parametrize("options", [{"lag": (30.0, 30.0), "policy": "fair"}])
def test_a_process_killed_before_its_record_is_done_leaves_the_waiter_hanging(other: Other) -> None:
    """Until somebody records the event again."""
    with FakeCuda(lag=(0.0, 0.0)) as fake:
        driver = driver_of(fake)
        event = driver.event(0)
        theirs, stream = other.call("open_event", 0, driver.export_event(event)), other.call("current", 0)
        memory = other.call("allocate", 0, 16)
        assert other.call("copy", memory, memory + 8, 8, stream) is None  # takes half a minute
        assert other.call("record", theirs, stream) is None
        driver.wait(event, fake.current(0))
        mark = fake.mark(fake.current(0))
        other.child.kill()
        other.child.join()
        assert not fake.machine.drain(0.1)
        assert not mark.done
        assert not driver.query(event)
        driver.record(event, fake.fresh(0))
        fake.synchronize(mark)
        assert fake.violations == []


def test_a_stream_gives_up(fake: FakeCuda, other: Other) -> None:
    """After `patience` seconds, with a violation; after `abandon` at once and without."""
    driver = driver_of(fake)
    event = driver.event(0)
    hold(driver, fake, event)
    fake.synchronize(fake.mark(fake.current(0)))
    assert len(fake.violations) == 1
    assert "gave up after 0.5 s" in fake.violations[0]
    assert other.end() == []


def hold(driver: FakeInterprocess, fake: FakeCuda, event: InterprocessEvent) -> InterprocessEvent:
    """Let the current stream wait for a record of another event that nobody makes."""
    unrecorded = driver.event(0)
    unrecorded.words[0] = 1  # as of a process that was killed
    driver.wait(unrecorded, fake.current(0))
    return event


def test_what_is_freed_is_poison_for_those_who_have_it_open(fake: FakeCuda, other: Other) -> None:
    """They read what nobody wrote."""
    driver = driver_of(fake)
    memory = other.call("allocate", 0, 64)
    opened = driver.open(0, other.call("export", 0, memory))
    ctypes.memset(opened, 7, 64)
    assert "have the memory open" in other.call("free", 0, memory)
    assert ctypes.string_at(opened, 64) == bytes([POISON]) * 64
    driver.close(0, opened)
    assert len(other.end()) == 1


def test_nothing_is_opened_where_it_was_exported(fake: FakeCuda) -> None:
    """Neither memory nor events."""
    driver = driver_of(fake)
    memory, event = driver.allocate(0, 64), driver.event(0)
    with pytest.raises(RuntimeError, match="in the process that exported it"):
        driver.open(0, driver.export(0, memory))
    with pytest.raises(RuntimeError, match="in the process that exported it"):
        driver.open_event(0, driver.export_event(event))
    assert len(fake.violations) == 2
