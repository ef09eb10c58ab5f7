"""Connections between hosts that have broken: they are made again, or given up (`transport.lasting`).

The opener of a connection connects again; the acceptor waits for it, and only asks whether the opener's process is
still there. Both give up when `reconnect_grace` is over, of which the time does not count in which they stand still
themselves; only later if a process at the other's address takes connections and says nothing, or answers as that
worker, as its loop may be blocked: its host takes connections for it. Another program that has got the port of a dead
worker is no such sign, unless it is silent, too: whoever closes the connection has not been reached. They give up at
once when the process is proved dead: on this host by its pid; elsewhere when its listener refuses connections again and
again, as a worker listens for as long as it lives; and when something else answers in its place, be it another
incarnation, a worker that has given this one up, or no worker at all. As a goodbye may not have arrived, the store is
asked whether the worker has left before its loss is told.

The last word of a handshake may be lost with its socket: then the opener knows nothing of a connection for which the
acceptor waits, and opens another one. Whoever has a connection says something over it at once; so one over which
nothing has ever come, and whose opener answers and does not have it go on, is no sign of a loss when it is given up. It
is not waited for where the other one has taken its place (`replace`).

A connection may go on again and again and be of no use, as where the network loses all that is large: a tunnel does
that if packets are too large for it, and a handshake is small. So a connection is given up, too, if the same frame does
not get through it for the time of the grace, however often it goes on (`STUCK`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from ... import foreign
from ...errors import PeerRefused, ProtocolError
from ...logs import logger
from ...protocol.identity import WorkerRecord
from ...protocol.states import PeerEvent
from ...transport.connection import Connection
from ..caller.peer import Peer
from ..engine.host import provably_dead
from .events import WorkerResumed, WorkerSuspended
from .interface import MembershipContext

# Seconds between two tries: the first such pause, and the longest. Seconds that one try may take: a packet that is lost
# while a connection is made is sent again after one second, and after three.
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
TRY = 4.0
# A listener that refuses so often in a row, which takes most of a second, is gone.
REFUSALS = 5
# While its host takes connections, a process that does not answer may be busy, and is waited for so many times as long.
BUSY = 6
# So often a connection goes on again, the same frame being lacking at the other end, before that means anything.
STUCK = 2
TOO_LARGE = "what is large does not get there (is the MTU of a tunnel too large?)"
# Of the grace, what is left at least when the host has been silent for long before.
LEAST_SHARE = 0.5
# Seconds between two looks whether this process, or its loop, has stood still.
TICK = 0.05


@dataclass(eq=False)
class Line:
    """A connection that may be mended. opener: whether we have opened it. peer: whose calls go over it, if any do."""

    connection: Connection
    record: WorkerRecord
    link_number: int
    pipe: bool
    opener: bool
    peer: Peer | None = None
    #: How often it was suspended.
    times: int = field(default=0, init=False)
    #: What tells the first frame of ours from others that the other end had not received as the connection went on last
    #: (`Connection.lacking`); how often it has gone on since without that; and until when that is waited for.
    lacking: tuple[int, bytes] | None = field(default=None, init=False)
    in_vain: int = field(default=0, init=False)
    limit: float = field(default=0.0, init=False)
    #: When what listens there was last seen to be that worker, or to be silent as it may be; ``time.monotonic()``. Set
    #: by whoever speaks with it (`Connector.reopen`): that it takes connections says nothing.
    reached: float = field(default=0.0, init=False)
    #: When that worker has said something last (`_Opening.answered`); ``time.monotonic()``. Set as `reached`.
    answered: float = field(default=0.0, init=False)


class SessionResumption:
    """See the module. On the loop.

    reopen: has a line go on over a socket that leads to its worker, or asks at its acceptor whether that is there
    (`Connector.reopen`); raises OSError and RpcError.
    """

    def __init__(self, context: MembershipContext, reopen: Callable[[Line, socket.socket], Awaitable[None]]) -> None:
        self._context = context
        self._engine = context.engine
        self._reopen = reopen
        self._suspended: dict[str, set[Line]] = {}  # by incarnation

    def watch(self, line: Line) -> None:
        """That connection is ready, and lasts: when it breaks it is mended."""
        line.connection.on_suspended = partial(self._on_suspended, line)
        line.connection.on_resumed = partial(self._on_resumed, line)

    def _on_suspended(self, line: Line, cause: OSError) -> None:
        engine, record = self._engine, line.record
        if engine.closed:
            line.connection.abort(cause)
            return
        engine.counters.suspended += 1
        line.times += 1
        if line.peer is not None:
            line.peer.on_line(PeerEvent.BROKEN)
        logger.info("worker %s: a connection with %s has broken: %s", engine.name, record.describe(), cause)
        lines = self._suspended.setdefault(record.incarnation, set())
        if not lines:
            self._context.events.publish(WorkerSuspended(record.info, str(cause)))
        lines.add(line)
        grace = engine.options.reconnect_grace
        left = max(grace - line.connection.silent_for, LEAST_SHARE * grace)
        engine.tasks.spawn(self._mend(line, cause, left))

    def _on_resumed(self, line: Line) -> None:
        self._engine.counters.resumed += 1
        if line not in self._suspended.get(line.record.incarnation, set()):
            self._engine.counters.suspended += 1  # the other end has noticed, and this one had not yet
        if line.peer is not None:
            line.peer.on_line(PeerEvent.RESUMED)
        logger.info("worker %s: a connection with %s goes on", self._engine.name, line.record.describe())
        self._look_for_progress(line)
        if self._forget(line):
            self._context.events.publish(WorkerResumed(line.record.info))

    def replace(self, connection: Connection) -> None:
        """End a connection that we have accepted: its opener knows nothing of it, and has another one in its place.

        If it was suspended it is waited for no more, and that is no loss.
        """
        lines = [line for lines in self._suspended.values() for line in lines if line.connection is connection]
        connection.abort()
        for line in lines:
            if self._forget(line):
                self._context.events.publish(WorkerResumed(line.record.info))

    def _look_for_progress(self, line: Line) -> None:
        """Give up a connection that goes on again and again although what it has to send does not get through."""
        engine, lacking, now = self._engine, line.connection.lacking, time.monotonic()
        if lacking is None or lacking != line.lacking:
            line.lacking, line.in_vain, line.limit = lacking, 0, now + engine.options.reconnect_grace
            return
        line.in_vain += 1
        said = f"has gone on {line.in_vain + 1} times, and the same message has not got through: {TOO_LARGE}"
        if line.in_vain == STUCK:
            logger.warning("worker %s: a connection with %s %s", engine.name, line.record.describe(), said)
        if line.in_vain >= STUCK and now >= line.limit:
            # Whoever has it go on is not done with that.
            engine.loop.call_soon(line.connection.abort, ConnectionError(f"it {said}"))

    def _forget(self, line: Line) -> bool:
        """It is not suspended any more; whether it was the last one of that worker."""
        lines = self._suspended.get(line.record.incarnation, set())
        if line not in lines:
            return False
        lines.discard(line)
        if not lines:
            del self._suspended[line.record.incarnation]
        return not lines

    async def _mend(self, line: Line, cause: OSError, seconds: float) -> None:
        """Try until it goes on, or is to be given up. seconds: for so long, with a host that cannot be reached."""
        connection, times, tries, pause = line.connection, line.times, _Tries(), FIRST_PAUSE
        patience = _Patience(self._engine.loop, seconds, BUSY * self._engine.options.reconnect_grace)
        with contextlib.closing(patience):
            while connection.suspended and line.times == times and self._has_hope(line, patience, tries):
                await self._try(line, patience, tries)
                if connection.suspended and tries.refusal is None:
                    await asyncio.sleep(min(pause, patience.left))
                    pause = min(2 * pause, LAST_PAUSE)
        left = connection.suspended and line.times == times and await self._context.look_for_farewell(line.record)
        if line.times == times:
            alone = self._forget(line)
            if connection.suspended:
                needless = not (left or tries.refusal or tries.refused) and self._is_needless(line)
                connection.abort(None if left or needless else tries.refusal or self._loss(line, cause, tries))
                if needless and alone:
                    self._context.events.publish(WorkerResumed(line.record.info))

    def _is_needless(self, line: Line) -> bool:
        """Whether the opener of a connection seems to know nothing of it, and is there."""
        lately = time.monotonic() - self._engine.options.reconnect_grace - TRY
        there = line.answered > lately and not provably_dead(line.record, self._engine.record.host)
        return there and not line.opener and not line.connection.received

    def _has_hope(self, line: Line, patience: _Patience, tries: _Tries) -> bool:
        """Whether to try once more."""
        patience.look(line.reached + self._engine.options.reconnect_grace)
        return (
            tries.refusal is None
            and tries.refused < REFUSALS
            and patience.left > 0
            and not provably_dead(line.record, self._engine.record.host)
        )

    async def _try(self, line: Line, patience: _Patience, tries: _Tries) -> None:
        """Once, and take down how it went."""
        try:
            async with asyncio.timeout(patience.longest):
                await self._reach(line, min(TRY, patience.left))
            tries.refused = 0
        except (PeerRefused, ProtocolError) as error:
            # The acceptor has not been refused: what it has asked is somebody else than it served.
            tries.refusal = error if line.opener else ConnectionError(f"somebody else is at its address: {error}")
        except ConnectionRefusedError as error:
            tries.failed = foreign.text_of(error)
            tries.refused += 1
        except Exception as error:  # whatever it is, a timeout as a rule: it is tried again, up to the limit
            tries.failed = foreign.text_of(error) or f"what listens at {_place(line.record)} says nothing"
            tries.refused = 0
            logger.debug("worker %s: %s is not reached: %r", self._engine.name, line.record.describe(), error)

    async def _reach(self, line: Line, seconds: float) -> None:
        """Reach the other process, and have the line go on if this end has opened it."""
        try:
            async with asyncio.timeout(seconds):
                sock = await self._context.reach(line.record)
        except TimeoutError as error:
            raise TimeoutError(foreign.text_of(error) or f"no answer from {_place(line.record)}") from error
        await self._reopen(line, sock)  # a process that is busy takes its time

    def _loss(self, line: Line, cause: OSError, tries: _Tries) -> OSError:
        """Why a connection is given up: what has broken it, and why it was not made again."""
        text, record = foreign.text_of(cause), line.record
        if provably_dead(record, self._engine.record.host):
            return ConnectionError(f"{text}, and its process is gone")
        seconds, failed = self._engine.options.reconnect_grace, tries.failed
        grace = f" within reconnect_grace={seconds:g} s" if tries.refused < REFUSALS else ""
        return ConnectionError(f"{text}; it could not be made again{grace}{failed and ': '}{failed}")


@dataclass
class _Tries:
    """How it went. failed: why the last one did. refused: how many in a row, by the listener. refusal: for good."""

    failed: str = ""
    refused: int = 0
    refusal: Exception | None = None


class _Patience:
    """For how long a line is waited for.

    The time does not count in which this process was stopped, or its loop blocked: by how much something that runs
    often was late.

    seconds: with a host that cannot be reached; longest: with a process that is silent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, longest: float) -> None:
        self._loop = loop
        now = time.monotonic()
        self._limit, self._last = now + seconds, now + longest
        self._late = 0.0
        self._plan()

    def _plan(self) -> None:
        self._due = time.monotonic() + TICK
        self._timer = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._late += max(0.0, time.monotonic() - self._due)
        self._plan()

    def look(self, until: float) -> None:
        """To be called before each try, else this would be over when a process goes on that was stopped.

        until: the line is waited for until then at least, as long as that is not too long.
        """
        late, self._late = self._late, 0.0
        self._last += late
        self._limit = min(self._last, max(self._limit + late, until))

    @property
    def left(self) -> float:
        """Seconds that it may still take to reach the host, or 0."""
        return max(0.0, self._limit - time.monotonic())

    @property
    def longest(self) -> float:
        """Seconds that its process may still take to answer; may be negative."""
        return self._last - time.monotonic()

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()


def _place(record: WorkerRecord) -> str:
    return f"{record.tcp_host}:{record.tcp_port}"
