"""Events in shared words: two real processes, with streams that are lists of what is still to be done."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from aiorpc.channels import signals
from aiorpc.channels.signals import HANDLE_SIZE, Memops, Signal, make_signals, open_signals

LIMIT = 20.0  # seconds that the other process has to say something


class Lane:
    """A stream: each step says whether it is done."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], bool]] = []

    def run(self) -> int:
        """Do what can be done; how many steps are left."""
        while self.steps and self.steps[0]():
            self.steps.pop(0)
        return len(self.steps)


def _word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


class Host(Memops):
    """A driver whose devices have the host's addresses, as those of CUDA have."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, size: int) -> int:
        self.registered[address] = size
        return address

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def write_value(self, address: int, value: int, stream: Lane) -> None:
        def write() -> bool:
            _word(address).value = value
            return True

        stream.steps.append(write)

    def wait_value(self, address: int, value: int, stream: Lane) -> None:
        def reached() -> bool:
            return ((_word(address).value - value) & 0xFFFFFFFF) < 1 << 31

        stream.steps.append(reached)


class Other:
    """A process that has opened the events, and does with them what it is told to."""

    def __init__(self, handles: list[bytes]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, handles), daemon=True)
        self.process.start()
        theirs.close()
        assert self.ask("ready") == "ready"

    def ask(self, *order: Any) -> Any:
        self.pipe.send(order)
        assert self.pipe.poll(LIMIT), "the other process says nothing"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(LIMIT)
        self.process.close()
        self.pipe.close()


def _serve(pipe: Connection, handles: list[bytes]) -> None:
    events, lane = open_signals(Host(), 0, handles), Lane()
    while True:
        match pipe.recv():
            case ("ready",):
                pipe.send("ready")
            case ("record", number):
                events[number].record(lane)
                pipe.send(len(lane.steps))
            case ("wait", number):
                events[number].wait(lane)
                pipe.send(len(lane.steps))
            case ("run",):
                pipe.send(lane.run())
            case ("done", number):
                pipe.send(events[number].done())


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def events(host: Host) -> Iterator[list[Signal]]:
    made = make_signals(host, 0, 3)
    yield made
    made[0].close()
    made.clear()  # pytest holds on to the list


@pytest.fixture
def other(events: list[Signal]) -> Iterator[Other]:
    made = Other([event.handle for event in events])
    yield made
    made.end()


def test_what_was_never_recorded_holds_up_nobody(events: list[Signal], other: Other) -> None:
    """On either side."""
    lane = Lane()
    events[0].wait(lane)
    assert not lane.steps and events[0].done()
    assert other.ask("wait", 0) == 0 and other.ask("done", 0)


def test_each_waits_for_what_the_other_recorded_last(events: list[Signal], other: Other) -> None:
    """In turn, many times; nothing goes on before it is done, and other events are not touched by it."""
    lane = Lane()
    for _ in range(5):
        events[1].wait(lane)
        events[1].record(lane)
        assert not events[1].done() and events[0].done() and events[2].done()
        assert other.ask("wait", 1) == 1
        assert other.ask("record", 1) == 2
        assert other.ask("run") == 2
        assert lane.run() == 0
        mine = Lane()
        events[1].wait(mine)
        assert mine.run() == 1 and not events[1].done()
        assert other.ask("run") == 0
        assert mine.run() == 0 and events[1].done()


def test_a_dead_process_is_waited_for_no_more(events: list[Signal], other: Other) -> None:
    """By what waits already, and by what comes later, in whatever order; what is ours is waited for as before."""
    mine, waiting, later = Lane(), Lane(), Lane()
    events[0].record(mine)  # stays to be done
    events[1].record(mine)
    other.ask("wait", 1)
    other.ask("record", 1)
    other.ask("record", 2)
    events[1].wait(waiting)
    events[2].wait(waiting)
    events[0].wait(later)
    assert waiting.run() == 2 and later.run() == 1
    other.process.kill()
    other.process.join(LIMIT)
    assert waiting.run() == 2
    for event in events:
        event.release()
    assert waiting.run() == 0 and later.run() == 1
    events[1].wait(waiting)
    assert waiting.run() == 0
    assert mine.run() == 0 and later.run() == 0
    events[2].record(mine)
    events[2].wait(later)
    assert later.run() == 1 and mine.run() == 0 and later.run() == 0


def test_numbers_begin_anew_after_the_largest(events: list[Signal]) -> None:
    """As the driver compares them."""
    lane, waiting = Lane(), Lane()
    events[0]._words[0] = events[0]._words[2] = 0xFFFFFFFE
    for _ in range(4):
        events[0].record(lane)
        events[0].wait(waiting)
        assert not events[0].done() and waiting.run() == 1
        lane.run()
        assert events[0].done() and waiting.run() == 0


def test_memory_stays_until_it_is_closed(host: Host) -> None:
    """Streams may still write to it, whatever has become of the objects; closed, nothing stays locked or open."""
    before = len(os.listdir("/proc/self/fd"))
    events = make_signals(host, 0, 200)
    assert list(host.registered.values()) == [8192]
    assert len(os.listdir("/proc/self/fd")) > before
    last = events.pop()
    events.clear()
    gc.collect()
    assert host.registered
    last.close()
    last.close()
    assert not host.registered
    del last
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def in_child(body: Callable[[], str]) -> str:
    """What it returns in another process, which does not have the memory."""
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    process = context.Process(target=lambda: theirs.send(body()), daemon=True)
    process.start()
    assert pipe.poll(LIMIT)
    said: str = pipe.recv()
    process.join(LIMIT)
    process.close()
    pipe.close()
    theirs.close()
    return said


def refusal(handles: list[bytes]) -> str:
    """Why they cannot be opened by another process."""

    def attempt() -> str:
        try:
            open_signals(Host(), 0, handles)
        except RuntimeError as error:
            return str(error)
        return ""

    return in_child(attempt)


def test_what_cannot_be_opened_says_why(host: Host, events: list[Signal]) -> None:
    """Handles that are none, of this process, of several pages, beyond the memory, and of memory that is gone."""
    first, second = events[0].handle, events[1].handle
    with pytest.raises(RuntimeError, match="of this process"):
        open_signals(Host(), 0, [first])
    assert refusal([first, second]) == ""
    assert "has 64 bytes, not 3" in refusal([b"abc"])
    assert "no handle of an event" in refusal([bytes(HANDLE_SIZE)])
    others = make_signals(host, 0, 1)
    assert "not made together" in refusal([first, others[0].handle])
    kind, pid, fd, size, number, nonce = signals._HANDLE.unpack_from(first)

    def changed(**changes: Any) -> list[bytes]:
        fields = {"kind": kind, "pid": pid, "fd": fd, "size": size, "number": number, "nonce": nonce, **changes}
        return [signals._HANDLE.pack(*fields.values()).ljust(HANDLE_SIZE, b"\0")]

    assert "have no event 1000" in refusal(changed(number=1000))
    assert "cannot be opened" in refusal(changed(fd=fd + 1000))
    assert "nonce" in refusal(changed(nonce=bytes(16)))
    assert "a segment of" in refusal(changed(size=2 * size))
    gone = others[0].handle
    others[0].close()
    others.clear()
    gc.collect()
    assert refusal([gone])
