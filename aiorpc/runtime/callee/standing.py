"""Leader/followers: the next call of a caller is read by the thread that runs it.

A `def` handler runs in a thread of the pool. If the loop reads, each call wakes two threads: the loop's, and that one.
For a caller that makes one call after the other, the thread that ran a call waits for the next one itself: it stands by
(`Lookout.stand_by`, `Connection.attach`), and only this thread wakes up.

It takes calls of functions and methods that run in the pool, if their messages need nothing of the loop, and before
such a call messages that it can handle at once (`Mode.BRIEF`, returned memory). A tensor for a device takes an enqueued
copy, if it is whole in an outbox. All other messages are left to the loop, in order, which costs one more change of
threads. After that the caller is read by the loop for the next call, and for twice as many each further time.

Invariants
1. A thread that has read from a connection hands out what it has read before any thread reads on. So calls are begun in
   the order in which they came, and the word that one was given up is never heard before the call itself.
2. A call that a thread has read is a job like any other: it is taken in its turn, by whichever thread is free.
3. While a handler runs, the loop hears of all that its caller has to say.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...channels.landing import Arrival
from ...protocol.frames import CALL, CHANNEL, PARCEL, RELEASE, Frame
from ...protocol.messages import Call, Function, read_call
from ...protocol.reference_messages import all_lent
from ...transport.connection import Connection
from ..calls.functions import Mode
from ..engine.busy_poll import BackOff
from ..links.link import Link

# The most calls for which a caller is left to the loop.
_LONGEST = 255


class Found(NamedTuple):
    """The target of a call, found before its start.

    mode: of the handler. value, attribute, arrival: for a method of a reference its value, the result of `find_method`,
    and the arrival of the value on devices.
    """

    mode: Mode
    value: object
    attribute: object
    arrival: Arrival | None


class ServiceForStanding(Protocol):
    """The service. ahead: a call whose message was read already: its number, the message, and the target."""

    link: Link
    ahead: tuple[int, Call, Found] | None

    @property
    def for_threads(self) -> Callable[[Function], Found | None]:
        """The target of a call that any thread can start (`Resolver.for_threads`)."""


class RunnerForStanding(Protocol):
    """The runner. submitted: how many calls went to the pool."""

    submitted: int


class Standing:
    """See the module: the source of jobs (`engine.lookout.JobSource`) for one connection.

    pause: for how many calls the caller is left to the loop; the runner counts them. running: the call after which a
    thread last stood by.
    """

    def __init__(self, service: ServiceForStanding, runner: RunnerForStanding, connection: Connection) -> None:
        self.pause: int = 0
        self.attach: Callable[[select.epoll], bool] = connection.attach
        self.bring: Callable[[], None] = connection.read_once
        self.leave: Callable[[], None] = connection.leave_to_loop
        self.back_off: BackOff = BackOff()
        self.running: int | None = None
        self._taken: int | None = None  # the last call taken by a thread
        self._read = 0  # bytes received by then
        self._connection = connection
        self._service = service
        self._runner = runner
        self._left = 0  # the last `pause`
        connection.on_stood = self._take_all

    def _take_all(self, frames: list[Frame]) -> bool:
        """See `Connection.on_stood`: takes one call that needs nothing of the loop, and returned memory."""
        before = self._runner.submitted
        taken = self._take(frames)
        if self._runner.submitted != before:
            self._left = 0
            self._read = self._connection.bytes_received
        else:
            self._left = self.pause = min(2 * self._left + 1, _LONGEST)
        return taken

    def keep(self) -> bool:
        """See `JobSource`. False after a call that the loop has read, and if more bytes have come since.

        More bytes mean several calls at once: the loop is awake then, and two awake threads would wait for the
        interpreter at each system call.
        """
        if self.running != self._taken:
            return False
        if self._connection.bytes_received != self._read:
            self.back_off.failed()
            return False
        return self._connection.keep_from_loop()

    def _take(self, frames: list[Frame]) -> bool:
        service = self._service
        link = service.link
        if link.held:
            return False
        ahead: tuple[int, Call, Found] | None = None
        for frame in frames:
            if frame.kind == RELEASE or (frame.kind == CHANNEL and link.any_thread_takes(frame)):
                continue
            if ahead is not None:  # the loop is faster with several calls at once
                return False
            if frame.kind == CALL:
                call = read_call(frame.body)
            elif frame.kind == PARCEL and (parcel := link.opened_anywhere(frame, CALL)) is not None:
                call = read_call(parcel.body)
            else:
                return False
            if call.credit is not None or call.creates is not None or call.once is not None:
                return False
            references = call.payload.references
            if references and not all_lent(references):  # the loop takes them
                return False
            found = service.for_threads(call.function)
            if found is None:
                return False
            if found.mode is not Mode.BRIEF:
                ahead = frame.call_id, call, found
        service.ahead = ahead
        if ahead is not None:
            self._taken = ahead[0]
        try:
            link.on_frames(frames)
        finally:
            service.ahead = None
        return True
