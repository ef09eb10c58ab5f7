"""The next call of one caller, read by the thread that will run it.

A `def` handler runs in a thread of the pool. As the loop reads calls, each would wake two threads: the loop's, and that
one. Of a caller that makes one call after the other, the thread that has run a call waits for the next one itself: it
stands by (`Lookout.stand_by`, `Connection.attach`), and is the only one to be woken.

It takes calls of functions and of methods that run in the pool, and of them those whose message says nothing that is
the loop's alone; and in front of such a call what it can do at once itself (`Mode.BRIEF`, memory that is given back).
A tensor for a device is no more than a copy to be enqueued, if all of it lies in an outbox. All else is left to the
loop, as it came and in order, which costs a change of threads more. So a caller of whom something was left is given up
for the next call, and for twice as many each time again.

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

# A caller is given up for so many calls at most.
_LONGEST = 255


class Found(NamedTuple):
    """What a call names, found before it was started.

    mode: how it runs. value, attribute, arrival: for a method of a reference that value, what `find_method` gives, and
    what is to be waited for on devices.
    """

    mode: Mode
    value: object
    attribute: object
    arrival: Arrival | None


class ServiceForStanding(Protocol):
    """Who serves the calls. ahead: a call of which the message was read already: its number, and what it names."""

    link: Link
    ahead: tuple[int, Call, Found] | None

    @property
    def for_threads(self) -> Callable[[Function], Found | None]:
        """What a call of that function finds, if any thread can start it (`Resolver.for_threads`)."""


class RunnerForStanding(Protocol):
    """Who runs them. submitted: how many went to the pool."""

    submitted: int


class Standing:
    """See the module: what a thread of the pool stands by for (`engine.lookout.JobSource`).

    pause: for how many calls the caller is given up; the runner, which has threads stand by, counts them, and says in
    `running` which call it runs.
    """

    def __init__(self, service: ServiceForStanding, runner: RunnerForStanding, connection: Connection) -> None:
        self.pause: int = 0
        self.attach: Callable[[select.epoll], bool] = connection.attach
        self.bring: Callable[[], None] = connection.read_once
        self.leave: Callable[[], None] = connection.leave_to_loop
        self.back_off: BackOff = BackOff()
        self.running: int | None = None
        self._taken: int | None = None  # the call that a thread took last
        self._read = 0  # bytes that had come by then
        self._connection = connection
        self._service = service
        self._runner = runner
        self._left = 0  # for how many calls the caller was given up last
        connection.on_stood = self._take_all

    def _take_all(self, frames: list[Frame]) -> bool:
        """See `Connection.on_stood`: takes one call that needs nothing of the loop, and memory that is given back."""
        before = self._runner.submitted
        taken = self._take(frames)
        if self._runner.submitted != before:
            self._left = 0
            self._read = self._connection.bytes_received
        else:
            self._left = self.pause = min(2 * self._left + 1, _LONGEST)
        return taken

    def keep(self) -> bool:
        """See `JobSource`. Not behind a call that the loop has read, nor if more has come since a thread read this one.

        The latter is a caller that makes several calls at once: the loop is up then, and two threads that are both
        awake wait for the interpreter at each of their system calls.
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
            if ahead is not None:  # several calls at once are handed out faster by the loop
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
            if references and not all_lent(references):  # the loop says that it has them
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
