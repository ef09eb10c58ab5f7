"""Device memory that one end of a link sends through: an `Outbox`, and the other end's view of it, an `Inbox`.

The memory is cut into slots, each with one event. A user of a slot, on either side, enqueues on its stream

    wait for the slot's event, copy, record the slot's event

The records of an event form a chain: each comes after the one before. A wait for the latest record waits for all of
them, and a slot may be lent again as soon as the reader has *enqueued* its copy. No thread of the host waits for the
device. (TensorPipe's channel of that name works the same way: tensorpipe/channel/cuda_ipc.)

Who owns a slot

    from              to                   owner
    `take`            `release` came back  the sender's `put`, then the message that names it, then the reader
    `release`         `take`               none; the reader's copy may still be under way, the chain orders it
    the link ends     the process is gone  the reader: its copies may be under way, so the memory is kept

Handles are opened once for each link: opening takes milliseconds, and may block while the device is busy.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import itemgetter

from ...locks import Lock
from ...undoing import on_error
from ..accelerator import Event, Interprocess, Stream, Tensor
from ..space import KIB, MIB

# CUDA carves shorter allocations out of larger ones, and an exported handle would expose the larger one.
GRANULE = 2 * MIB
# Small slots keep short tensors from waiting for long ones: (bytes of a slot, how many at most, n: they may take 1/n of
# the box). The rest is cut into `_LARGE` slots.
_SMALL = ((64 * KIB, 32, 8), (1 * MIB, 16, 4))
_LARGE = 3
# Starts of slots: copies between aligned addresses are the fastest.
_ALIGN = 64 * KIB


def cut(size: int) -> list[tuple[int, int]]:
    """(start, bytes) of the slots of an outbox of so many bytes, the shortest first."""
    slots: list[tuple[int, int]] = []
    start = 0
    for room, most, share in _SMALL:
        for _ in range(min(most, size // share // room)):
            slots.append((start, room))
            start += room
    room = (size - start) // _LARGE // _ALIGN * _ALIGN
    slots += [(start + number * room, room) for number in range(_LARGE)]
    return sorted(slots, key=itemgetter(1))


class BoxEnd:
    """Either end of a box. Made and closed off the loop. index: of the device that it is on, or opened for.

    gone: whether it is closed and its memory let go.
    """

    _address: int
    _events: list[Event]

    def __init__(self, driver: Interprocess, index: int, let_go: Callable[[int, int], None]) -> None:
        """let_go: the driver's function that lets go of the memory (device, address); it waits for the device."""
        self.index = index
        self.gone: bool = False
        self._driver = driver
        self._let_go = let_go
        self._closed = False
        self._using = Lock()  # held while something is enqueued

    def release_waiters(self) -> None:
        """The process at the other end has died, maybe before its device had done what it recorded: end all waits of
        our streams for that, now and later. Never blocks."""
        for event in list(self._events):
            self._driver.release(event)

    def close(self) -> None:
        """Let go of it; an outbox only after the other end has closed it. May block until copies are done.
        Idempotent."""
        with self._using:
            if self._closed:
                return
            self._closed = True
        self._let_go(self.index, self._address)
        events, self._events = self._events, []
        self._driver.close_events(events)
        self.gone = True


class Outbox(BoxEnd):
    """The sender's end. `take` and `give` from any thread."""

    def __init__(self, driver: Interprocess, index: int, size: int) -> None:
        """Allocate it on device `index`. Raises what the driver raises, with nothing left behind."""
        super().__init__(driver, index, driver.free)
        self.size: int = -(-size // GRANULE) * GRANULE
        self.slots: list[tuple[int, int]] = cut(self.size)
        self._address = driver.allocate(index, self.size)
        self._events = []
        with on_error(lambda: driver.close_events(self._events)), on_error(driver.free, index, self._address):
            self.handle: bytes = driver.export(index, self._address)
            self._events = driver.events(index, len(self.slots))
            self.event_handles: list[bytes] = [driver.export_event(event) for event in self._events]
        self._rooms = [room for _, room in self.slots]
        self._free = [list[int]() for _ in self.slots]  # the free slots, by the first slot of the same size
        self._lock = Lock()
        for slot in range(len(self.slots)):
            self._free[self._first(slot)].append(slot)
        self._firsts = sorted({self._first(slot) for slot in range(len(self.slots))})

    def _first(self, slot: int) -> int:
        return bisect_left(self._rooms, self._rooms[slot])

    @property
    def lent(self) -> int:
        """How many slots are not free."""
        return len(self.slots) - sum(map(len, self._free))

    def take(self, size: int) -> int | None:
        """A free slot for so many bytes, or one of the largest if none holds so many; None if there is none."""
        least = self._firsts[-1] if size > self._rooms[-1] else bisect_left(self._rooms, size)
        with self._lock:
            for first in self._firsts:
                if first >= least and self._free[first]:
                    return self._free[first].pop()
        return None

    def give(self, slot: int) -> None:
        """The slot may be lent again. Raises ValueError if it is not lent."""
        if not 0 <= slot < len(self.slots):
            raise ValueError(f"slot {slot} of {len(self.slots)}")
        with self._lock:
            free = self._free[self._first(slot)]
            if slot in free:
                raise ValueError(f"slot {slot} is not lent")
            free.append(slot)

    def put(self, slot: int, source: Tensor, start: int, stream: Stream) -> int:
        """Enqueue a copy of the bytes of `source` from `start` on into the slot; returns how many. The event is
        recorded when this returns: now the slot may be named to the reader."""
        place, room = self.slots[slot]
        size = min(room, source.numel() - start)
        driver = self._driver
        with self._using:
            if self._closed:
                raise RuntimeError("the other worker has closed it")
            event = self._events[slot]
            try:
                driver.wait(event, stream)
                driver.copy(self._address + place, source.data_ptr() + start, size, stream)
                driver.record(event, stream)
            except Exception:
                # The copy may be enqueued without a record. Record again: the next user of the slot must wait for it.
                with contextlib.suppress(Exception):
                    driver.wait(event, stream)
                    driver.record(event, stream, again=True)
                raise
        return size


class Inbox(BoxEnd):
    """The reader's end, opened for one of its devices."""

    def __init__(
        self,
        driver: Interprocess,
        index: int,
        handle: bytes,
        event_handles: Sequence[bytes],
        slots: Sequence[tuple[int, int]],
    ) -> None:
        """Open it for device `index`. Raises what the driver raises, with nothing left open."""
        super().__init__(driver, index, driver.close)
        self.slots = slots
        self._address = driver.open(index, handle)
        with on_error(driver.close, index, self._address):
            self._events = driver.open_events(index, event_handles)

    def get(self, slot: int, target: int, size: int, stream: Stream) -> None:
        """Enqueue a copy of the slot's first bytes to an address. When this returns, the slot may be given back."""
        place, room = self.slots[slot]
        if not 0 < size <= room:
            raise ValueError(f"{size} bytes of a slot of {room}")
        driver = self._driver
        with self._using:
            if self._closed:
                raise RuntimeError("it was closed here")
            event = self._events[slot]
            driver.wait(event, stream)
            driver.copy(target, self._address + place, size, stream)
            driver.record(event, stream)
