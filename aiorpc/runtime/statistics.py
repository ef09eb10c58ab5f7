"""What a worker has done and is doing, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..channels import Traffic
from ..channels.bulk import Bulk
from ..channels.device import DIRECT, IPC, STAGING
from ..channels.inline import Inline
from ..channels.shared import SharedMemory
from ..transport.connection import Connection

if TYPE_CHECKING:
    from .links.link import Link
    from .worker import Worker


class Counters:
    """Running counts of one worker. Written without locks: a rare lost increment costs less than a lock per call."""

    def __init__(self) -> None:
        self.made = 0  # calls of users made here
        self.served_users = 0  # calls of users served here
        self.failed = 0
        self.cancelled = 0
        self.timed_out = 0
        self.late_answers = 0
        self.bytes_sent = 0  # of connections that have ended
        self.bytes_received = 0
        self.refused = 0
        self.traffic: dict[str, Traffic] = {}  # of links that have ended, by channel
        self._latencies = [0] * 48  # answers by the number of bits of their latency in microseconds

    def record_latency(self, seconds: float) -> None:
        """One call was answered."""
        self._latencies[min(47, int(seconds * 1e6).bit_length())] += 1

    def add_connection(self, connection: Connection) -> None:
        """It has ended; its bytes still count."""
        self.bytes_sent += connection.bytes_sent
        self.bytes_received += connection.bytes_received

    def add_link(self, link: Link) -> None:
        """It has ended; what it has moved still counts."""
        for name, traffic in link.traffic().items():
            self.traffic.setdefault(name, Traffic()).add(traffic)
        if link.pipe is not None and link.pipe is not link.connection:
            self.add_connection(link.pipe)

    def answered(self) -> int:
        """Calls that got an answer."""
        return sum(self._latencies)

    def quantile(self, share: float) -> float:
        """Seconds within which that share of the answers came, to within a factor of two; 0.0 without answers."""
        total = self.answered()
        seen = 0
        for bits, count in enumerate(self._latencies):
            seen += count
            if total and seen >= share * total:
                return float(1 << bits) / 1e6
        return 0.0


@dataclass(frozen=True)
class Statistics:
    """A worker at one moment; see `Worker.statistics`. Times in seconds, sizes in bytes.

    Of calls that were made here: calls_made, calls_answered, calls_pending, calls_timed_out, late_answers, latency_p50
    and latency_p99. Of calls that were served here: calls_served, calls_running, calls_failed and calls_cancelled.
    """

    calls_made: int = 0
    calls_answered: int = 0
    calls_pending: int = 0
    calls_timed_out: int = 0
    late_answers: int = 0
    latency_p50: float = 0.0  # upper bound, to within a factor of two
    latency_p99: float = 0.0
    calls_served: int = 0
    calls_running: int = 0
    calls_failed: int = 0
    calls_cancelled: int = 0
    connections: int = 0
    connections_refused: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    threads: int = 0
    threads_idle: int = 0
    threads_blocked: int = 0
    jobs_queued: int = 0
    references_owned: int = 0
    references_held: int = 0
    references_pending: int = 0
    channels: dict[str, Traffic] = field(default_factory=dict)  # by name: what went which way, and what could not, why
    shared_lent: int = 0  # bytes of the arena that other workers hold now
    shared_leases: int = 0  # in so many blocks
    shared_used: int = 0  # bytes of the arena in blocks, with what rounding adds
    shared_size: int = 0  # bytes of the arena
    shared_resident: int = 0  # bytes of memory that it takes up
    loop_lag_mean: float = 0.0
    loop_lag_max: float = 0.0
    loop_blocked: int = 0


@dataclass(frozen=True)
class PendingCall:
    """One call under way. direction: "made" here or "served" here. seconds: how long. deadline: seconds left."""

    direction: str
    worker: str
    function: str
    seconds: float
    deadline: float | None
    made_at: str = field(default="")


def traffic(worker: Worker) -> dict[str, Traffic]:
    """What went by which channel since the worker started, by its name. Any thread."""
    total = {name: Traffic() for name in (SharedMemory.name, Bulk.name, Inline.name, DIRECT, IPC, STAGING)}
    for moved in (worker.counters.traffic, *(link.traffic() for link in worker.links())):
        for name, part in list(moved.items()):
            total[name].add(part)
    return total


def collect(worker: Worker) -> Statistics:
    """A worker's statistics, now. Any thread."""
    counters, monitor = worker.counters, worker.monitor
    peers = worker.peers.all()
    links = worker.links()
    connections = [link.connection for link in links if not link.connection.closed]
    connections += [link.pipe for link in links if link.pipe is not None and link.pipe is not link.connection]
    references = worker.references.counts()
    return Statistics(
        calls_made=counters.made,
        calls_answered=counters.answered(),
        calls_pending=sum(peer.user_calls() for peer in peers),
        calls_timed_out=counters.timed_out,
        late_answers=counters.late_answers,
        latency_p50=counters.quantile(0.5),
        latency_p99=counters.quantile(0.99),
        calls_served=counters.served_users,
        calls_running=sum(service.user_calls() for service in list(worker.services)),
        calls_failed=counters.failed,
        calls_cancelled=counters.cancelled,
        connections=len(connections),
        connections_refused=counters.refused,
        bytes_sent=counters.bytes_sent + sum(connection.bytes_sent for connection in connections),
        bytes_received=counters.bytes_received + sum(connection.bytes_received for connection in connections),
        threads=worker.pool.threads,
        threads_idle=worker.pool.idle,
        threads_blocked=worker.pool.blocked,
        jobs_queued=worker.pool.queued,
        references_owned=references.owned,
        references_held=references.users,
        references_pending=references.pending,
        channels=traffic(worker),
        shared_lent=worker.memory.lent,
        shared_leases=worker.memory.leases,
        shared_used=worker.memory.arena.used,
        shared_size=worker.memory.arena.size,
        shared_resident=worker.memory.arena.resident,
        loop_lag_mean=monitor.lag_mean if monitor is not None else 0.0,
        loop_lag_max=monitor.lag_max if monitor is not None else 0.0,
        loop_blocked=monitor.blocked_count if monitor is not None else 0,
    )
