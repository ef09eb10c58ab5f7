"""What metrics need to have counted where it happens: durations of calls, and the traffic of ended links, by worker.

An engine has a tally only while metrics are on, or a program looks at it from outside (`Engine.tally`). Everything
else that metrics tell is read from the parts of the worker when they are asked for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from ...channels import Traffic
from ...locks import Lock
from ...protocol.states import CallOutcome

#: Upper bounds of the buckets, in seconds: from 10 µs, each twice the one before, to 84 s. The bucket of a duration is
#: the number of its bits, in tens of microseconds: to look it up in a table takes twice as long.
BOUNDS = tuple(round(1e-5 * (1 << bits), 5) for bits in range(24))
_PER_SECOND = 1e5
_MOST_BITS = 64
#: How many functions are counted by name, on each side, and how many other workers; the first that are met.
MOST_FUNCTIONS, MOST_PEERS = 200, 200
#: Stands for all others, and for a function whose name the served worker does not know.
OTHER = "_OTHER"
_UNKNOWN = "?"
#: So many pairs of a function and a worker are counted on each side, the first that are met.
MOST_PAIRS = 500
#: Seconds without a look after which counting ends.
WATCHED = 30.0

Side = Literal["made", "served"]


class Durations:
    """The durations of one side's calls. Any thread.

    A row has a count for each number of bits, and the sum of the seconds. Rows are added to without a lock: no other
    thread gets between the bytecodes of a step, which contain no call.
    """

    def __init__(self) -> None:
        self._rows: dict[CallOutcome, dict[str, list[float]]] = {outcome: {} for outcome in CallOutcome}
        self._named: set[str] = set()

    def add(self, function: str, outcome: CallOutcome, seconds: float) -> None:
        """A call of that function has ended."""
        try:
            row = self._rows[outcome][function]
        except KeyError:
            row = self._row(function, outcome)
        row[int(seconds * _PER_SECOND).bit_length()] += 1
        row[-1] += seconds

    def _row(self, function: str, outcome: CallOutcome) -> list[float]:
        if function == _UNKNOWN or (function not in self._named and len(self._named) >= MOST_FUNCTIONS):
            function = OTHER
        else:
            self._named.add(function)
        return self._rows[outcome].setdefault(function, [0] * _MOST_BITS + [0.0])

    def rows(self) -> Iterator[tuple[str, CallOutcome, list[float]]]:
        """Function and outcome; the counts of the buckets, that of all longer calls, and the sum of the seconds."""
        for outcome, rows in self._rows.items():
            for function, row in list(rows.items()):
                *counts, total = list(row)
                yield function, outcome, [*counts[: len(BOUNDS)], sum(counts[len(BOUNDS) :]), total]


@dataclass
class PeerTraffic:
    """What went between this worker and another one. Bytes are those on sockets; channels are by name."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    channels: dict[str, Traffic] = field(default_factory=dict)

    def add(self, other: PeerTraffic) -> None:
        """Count what another link has moved, too."""
        self.bytes_sent += other.bytes_sent
        self.bytes_received += other.bytes_received
        self.messages_sent += other.messages_sent
        self.messages_received += other.messages_received
        self.add_channels(other.channels)

    def add_channels(self, moved: Mapping[str, Traffic]) -> None:
        """Count what channels have moved, too."""
        for name, traffic in list(moved.items()):
            self.channels.setdefault(name, Traffic())._add(traffic)


class Pairs:
    """Calls by function and other worker, while a program looks at this worker from outside (`Tally.pairs`).

    A row has a count for each bucket of `BOUNDS`, one for all longer calls, how many calls ended without a value, and
    the sum of the seconds. Any thread; rows are added to as those of `Durations`. Nothing has to end the counting: the
    first call that ends after its time does.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        """end: called by the call that ends after the time is over; in any thread."""
        self._end = end
        self._until = time.monotonic() + WATCHED
        self._rows: dict[Side, dict[tuple[str, str], list[float]]] = {"made": {}, "served": {}}

    def prolong(self) -> None:
        """Count for `WATCHED` seconds from now on."""
        self._until = time.monotonic() + WATCHED

    def add(self, side: Side, function: str, worker: str, outcome: CallOutcome, begun: float, now: float) -> None:
        """A call has ended. worker: the other one. begun, now: ``time.monotonic()``."""
        if now > self._until:
            self._end()
            return
        rows = self._rows[side]
        row = rows.get((function, worker))
        if row is None:
            pair = (function, worker) if len(rows) < MOST_PAIRS else (OTHER, OTHER)
            row = rows.setdefault(pair, [0.0] * (len(BOUNDS) + 3))
        row[bisect_left(BOUNDS, now - begun)] += 1
        if outcome is not CallOutcome.VALUE:
            row[-2] += 1
        row[-1] += now - begun

    def rows(self) -> Iterator[tuple[Side, str, str, list[float]]]:
        """Side, function, other worker, and a copy of the row."""
        for side, rows in self._rows.items():
            for (function, worker), row in list(rows.items()):
                yield side, function, worker, list(row)


class Tally:
    """See the module. Any thread.

    made, served: durations of calls of users. pairs: while a program looks from outside. peers: the traffic of ended
    links, by the other worker. changing: held while a link passes from the open ones to the ended ones, so that its
    traffic is counted once at all times.
    """

    def __init__(self) -> None:
        self.made: Durations = Durations()
        self.served: Durations = Durations()
        self.peers: dict[str, PeerTraffic] = {}
        self.changing: AbstractContextManager[Any] = Lock()
        self.pairs: Pairs | None = None

    def peer(self, name: str) -> str:
        """The label for a worker. It never changes, so that counters with it only grow. With `changing` held."""
        if name not in self.peers:
            if len(self.peers) >= MOST_PEERS:
                name = OTHER
            self.peers.setdefault(name, PeerTraffic())
        return name

    def ended(self, name: str, traffic: PeerTraffic) -> None:
        """A link to that worker has ended. With `changing` held."""
        self.peers[self.peer(name)].add(traffic)
