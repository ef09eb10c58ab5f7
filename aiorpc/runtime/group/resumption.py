"""Session resumption: broken connections between hosts are made again, or given up (`transport.lasting`).

The opener of a connection connects again. The acceptor waits for it, and only probes whether the opener's process is
there. Both give up after `reconnect_grace`, in which time spent stopped or blocked themselves does not count. They wait
longer (`BUSY`) while a process at the other's address takes connections and is silent, or answers as that worker: its
loop may be blocked. A process that closes the connection is no such sign. They give up at once if the process is proved
dead: on this host by its pid; elsewhere if its listener refuses connections again and again, because a worker listens
while it lives; or if something other answers there: another incarnation, a worker that has given this one up, or no
worker. Before a loss is reported, the store is asked whether the worker has left: its goodbye may not have arrived.

The last message of a handshake may be lost with its socket. Then the opener does not know the connection for which the
acceptor waits, and opens another one. An opener sends something over each new connection at once. So a connection over
which nothing came, and whose opener answers but does not resume it, is given up without a loss, and at once if another
connection takes its place (`replace`).

In a free group a connection over which nothing goes for a minute rests: its opener asks, and both ends let go of the
socket, and of nothing else. It resumes with the next message of the opener. Only an end that hears of the other's end
in another way, by the list of the group, lets it rest.

A network that loses large packets, such as a tunnel with too small an MTU, lets handshakes pass and no more. So a
connection is also given up if it resumes repeatedly (`STUCK`) and the same frame does not get through within the grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

from ... import foreign
from ...errors import PeerRefused, ProtocolError, RpcError
from ...logs import logger
from ...protocol.identity import WorkerRecord
from ...protocol.states import PeerEvent
from ...transport.connection import Connection
from ..caller.peer import Peer
from ..calls.current import current_call
from ..calls.functions import system
from ..engine.host import provably_dead
from .events import WorkerResumed, WorkerSuspended
from .group import Group
from .interface import MembershipContext

# Seconds between two tries: the first pause, and the longest. Seconds for one try: the system sends a lost packet of a
# new connection again after one second, and after three.
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
TRY = 4.0
# A listener that refuses so often in a row is gone; that takes most of a second.
REFUSALS = 5
# A silent process whose host takes connections may be busy: the wait for it is so many times as long.
BUSY = 6
# Resumptions without the same frame getting through, before that counts.
STUCK = 2
TOO_LARGE = "what is large does not get there (is the MTU of a tunnel too large?)"
# The least share of the grace that is left when the host was silent for long before.
LEAST_SHARE = 0.5
# Seconds between two looks whether this process or its loop was blocked.
TICK = 0.05


@dataclass(eq=False)
class Line:
    """A connection that may be resumed. opener: whether this worker opened it. peer: whose calls go over it, if any."""

    connection: Connection
    record: WorkerRecord
    link_number: int
    pipe: bool
    opener: bool
    peer: Peer | None = None
    #: How often it was suspended.
    times: int = field(default=0, init=False)
    #: The first frame that the other end lacked at the last resumption (`Connection.lacking`); how often the connection
    #: has resumed since without it; and the time limit for it.
    lacking: tuple[int, bytes] | None = field(default=None, init=False)
    in_vain: int = field(default=0, init=False)
    limit: float = field(default=0.0, init=False)
    #: When the listener last answered as that worker, or was silent; ``time.monotonic()``. `Connector.reopen` sets it:
    #: taking connections alone is no sign.
    reached: float = field(default=0.0, init=False)
    #: When that worker last answered (`_Opening.answered`); ``time.monotonic()``. Set as `reached`.
    answered: float = field(default=0.0, init=False)
    #: Whether both ends let go of its socket, or are about to; of what `moved`, its bytes, is the sum since `still`.
    rests: bool = field(default=False, init=False)
    moved: int = field(default=0, init=False)
    still: float = field(default=0.0, init=False)


class ResumptionContext(MembershipContext, Protocol):
    """A running worker, as `SessionResumption` needs it."""

    group: Group


class SessionResumption:
    """See the module. On the loop.

    reopen: resumes a line over a socket to its worker, or probes the opener (`Connector.reopen`); raises OSError and
    RpcError.
    """

    def __init__(self, context: ResumptionContext, reopen: Callable[[Line, socket.socket], Awaitable[None]]) -> None:
        self._context = context
        self._engine = context.engine
        self._reopen = reopen
        self._suspended: dict[str, set[Line]] = {}  # by incarnation
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._looked = 0.0  # when idle connections were looked for

    def watch(self, line: Line) -> None:
        """Resume that connection when it breaks: it is ready, and both sides want it to last."""
        line.connection.on_suspended = partial(self._on_suspended, line)
        line.connection.on_resumed = partial(self._on_resumed, line)
        self._lines.add(line)

    def _on_suspended(self, line: Line, cause: OSError) -> None:
        engine, record = self._engine, line.record
        if engine.closed:
            line.connection.abort(cause)
            return
        if line.rests:
            line.connection.resting = True
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
        rested, line.rests, line.connection.resting = line.rests, False, False
        if rested:
            return
        self._engine.counters.resumed += 1
        if line not in self._suspended.get(line.record.incarnation, set()):
            self._engine.counters.suspended += 1  # only the other end had noticed the break
        if line.peer is not None:
            line.peer.on_line(PeerEvent.RESUMED)
        logger.info("worker %s: a connection with %s goes on", self._engine.name, line.record.describe())
        self._look_for_progress(line)
        if self._forget(line):
            self._context.events.publish(WorkerResumed(line.record.info))

    def replace(self, connection: Connection) -> None:
        """End an accepted connection that its opener does not know, because the opener has made another one.

        A suspended one is not waited for any more, and its end is no loss.
        """
        lines = [line for lines in self._suspended.values() for line in lines if line.connection is connection]
        connection.abort()
        for line in lines:
            if self._forget(line):
                self._context.events.publish(WorkerResumed(line.record.info))

    # --- rest ---------------------------------------------------------------------------------------------------------

    def let_rest(self, may_rest: Callable[[WorkerRecord], bool]) -> None:
        """Let connections rest that this worker has opened and that are idle. Called regularly in a free group.

        may_rest: whether the end of that member is heard of without a connection.
        """
        now, patience = time.monotonic(), self._engine.bounds.rest
        if now < self._looked + patience / 4:
            return
        self._looked = now
        for line in [each for each in self._lines if each.opener and not each.pipe]:
            moved = sum(each.bytes_sent + each.bytes_received for each in _connections(line))
            if moved != line.moved:
                line.moved, line.still = moved, now
            elif now >= line.still + patience and may_rest(line.record) and _is_idle(line):
                line.still = now
                self._engine.tasks.spawn(self._let_rest(line))

    async def _let_rest(self, line: Line) -> None:
        peer, lines = line.peer, self._of_link(line.record, line.link_number, opener=True)
        assert peer is not None, "it is the first connection of its link"
        try:
            agreed = await peer.call(rest, (line.link_number,), None, self._engine.bounds.vouch, system=True)
        except RpcError:
            return
        if not agreed or self._engine.closed or not _is_idle(line):
            return
        moved = sum(each.connection.bytes_sent for each in lines)
        for each in lines:
            each.rests = True
            each.connection.on_wanted = partial(self._wake, line)
            each.connection.rest()
        # A thread may have sent something meanwhile, over an old socket or behind it.
        sent = sum(each.connection.bytes_sent for each in lines) != moved
        if sent or peer.pending.calls or any(each.connection.queue for each in lines):
            self._wake(line)

    def agree(self, record: WorkerRecord, link_number: int) -> bool:
        """A member wants its connection to here to rest; whether it may."""
        if not self._context.group.may_rest(record):
            return False
        for line in (lines := self._of_link(record, link_number, opener=False)):
            line.rests = True
        return bool(lines)

    def _of_link(self, record: WorkerRecord, link_number: int, *, opener: bool) -> list[Line]:
        """The first and the second connection of a link that are not closed."""
        found = (each for each in self._lines if each.link_number == link_number and each.opener == opener)
        return [each for each in found if each.record == record and not each.connection.closed]

    def wake(self) -> None:
        """No connection may rest any more: the list of the group is gone."""
        for line in list(self._lines):
            if line.connection.resting:
                self._wake(line)
            else:
                line.rests = False

    def _wake(self, line: Line) -> None:
        for each in self._of_link(line.record, line.link_number, opener=line.opener):
            if each.connection.resting:
                each.connection.resting, each.connection.on_wanted = False, None
                each.times += 1
                cause = ConnectionError("the connection to it had no socket, as it was idle")
                self._engine.tasks.spawn(self._mend(each, cause, self._engine.options.reconnect_grace))

    def _look_for_progress(self, line: Line) -> None:
        """Give up a connection that resumes repeatedly although its next frame does not get through."""
        engine, lacking, now = self._engine, line.connection.lacking, time.monotonic()
        if lacking is None or lacking != line.lacking:
            line.lacking, line.in_vain, line.limit = lacking, 0, now + engine.options.reconnect_grace
            return
        line.in_vain += 1
        said = f"has gone on {line.in_vain + 1} times, and the same message has not got through: {TOO_LARGE}"
        if line.in_vain == STUCK:
            logger.warning("worker %s: a connection with %s %s", engine.name, line.record.describe(), said)
        if line.in_vain >= STUCK and now >= line.limit:
            # later: the resumption is still running
            engine.loop.call_soon(line.connection.abort, ConnectionError(f"it {said}"))

    def _forget(self, line: Line) -> bool:
        """Mark it as not suspended; whether it was the last suspended one of that worker."""
        lines = self._suspended.get(line.record.incarnation, set())
        if line not in lines:
            return False
        lines.discard(line)
        if not lines:
            del self._suspended[line.record.incarnation]
        return not lines

    async def _mend(self, line: Line, cause: OSError, seconds: float) -> None:
        """Try until it resumes or is given up. seconds: the limit while its host cannot be reached."""
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
        """Whether the connection's opener is there and does not seem to know it."""
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
        """Try once, and note the outcome in `tries`."""
        try:
            async with asyncio.timeout(patience.longest):
                await self._reach(line, min(TRY, patience.left))
            tries.refused = 0
        except (PeerRefused, ProtocolError) as error:
            # The acceptor only probed: something other than the worker answered.
            tries.refusal = error if line.opener else ConnectionError(f"another process is at its address: {error}")
        except ConnectionRefusedError as error:
            tries.failed = foreign.text_of(error)
            tries.refused += 1
        except Exception as error:  # a timeout as a rule: it is tried again, up to the limit
            tries.failed = foreign.text_of(error) or f"what listens at {_place(line.record)} says nothing"
            tries.refused = 0
            logger.debug("worker %s: %s is not reached: %r", self._engine.name, line.record.describe(), error)

    async def _reach(self, line: Line, seconds: float) -> None:
        """Reach the other process, and resume the line if this end opened it."""
        try:
            async with asyncio.timeout(seconds):
                sock = await self._context.reach(line.record)
        except TimeoutError as error:
            raise TimeoutError(foreign.text_of(error) or f"no answer from {_place(line.record)}") from error
        await self._reopen(line, sock)  # outside of the limit: a busy process may be slow

    def _loss(self, line: Line, cause: OSError, tries: _Tries) -> OSError:
        """Why a connection is given up: why it broke, and why it was not resumed."""
        text, record = foreign.text_of(cause), line.record
        if provably_dead(record, self._engine.record.host):
            return ConnectionError(f"{text}, and its process is gone")
        seconds, failed = self._engine.options.reconnect_grace, tries.failed
        grace = f" within reconnect_grace={seconds:g} s" if tries.refused < REFUSALS else ""
        return ConnectionError(f"{text}; it could not be made again{grace}{failed and ': '}{failed}")


def _is_idle(line: Line) -> bool:
    """Whether nothing is under way over a connection that this worker has opened."""
    peer = line.peer
    if peer is None or peer.link is None or peer.pending.calls or peer.link.busy:
        return False
    return not any(each.closed or each.suspended or each.queue for each in _connections(line))


def _connections(line: Line) -> list[Connection]:
    """Its connection, and the second one of its link."""
    pipe = None if line.peer is None or line.peer.link is None else line.peer.link.pipe
    return [line.connection] if pipe is None or pipe is line.connection else [line.connection, pipe]


class _NodeForRest(Protocol):
    resumption: SessionResumption


@system
async def rest(link_number: int) -> bool:
    """Handler: a member asks to let its connection of that number rest."""
    call = current_call.get()
    assert call is not None and call.record is not None, "this is a handler"
    return cast(_NodeForRest, call.node).resumption.agree(call.record, link_number)


@dataclass
class _Tries:
    """The outcomes. failed: why the last try failed. refused: refusals by the listener in a row. refusal: a final
    one."""

    failed: str = ""
    refused: int = 0
    refusal: Exception | None = None


class _Patience:
    """How long a line is waited for.

    Time in which this process was stopped or its loop blocked does not count; a frequent timer's lateness measures it.

    seconds: while the host cannot be reached; longest: while the process is silent.
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
        """Add the time lost. Call it before each try: after a stop of this process the limits may have passed.

        until: the line is waited for until then at least, within the longest limit.
        """
        late, self._late = self._late, 0.0
        self._last += late
        self._limit = min(self._last, max(self._limit + late, until))

    @property
    def left(self) -> float:
        """Seconds left to reach the host, or 0."""
        return max(0.0, self._limit - time.monotonic())

    @property
    def longest(self) -> float:
        """Seconds left for the process to answer; may be negative."""
        return self._last - time.monotonic()

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()


def _place(record: WorkerRecord) -> str:
    return f"{record.tcp_host}:{record.tcp_port}"
