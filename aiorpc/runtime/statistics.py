"""What a worker has done and is doing, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..channels import Traffic
from .node import Node


@dataclass(frozen=True)
class Statistics:
    """A worker at one moment; see `Worker.statistics`. Times in seconds, sizes in bytes.

    Of calls that were made here: calls_made, calls_answered, calls_pending, calls_timed_out, calls_retried,
    late_answers, latency_p50 and latency_p99. Of calls that were served here: calls_served, calls_running, calls_failed
    and calls_cancelled; those that were refused, and so not served, have failed, too. To fetch the value of a reference
    is a call. Puts, gets and joins of a queue count at the worker that makes them alone.
    """

    calls_made: int = 0
    calls_answered: int = 0
    calls_pending: int = 0
    calls_timed_out: int = 0
    calls_retried: int = 0  # tries of calls with retries that failed, and were followed by another one
    late_answers: int = 0
    latency_p50: float = 0.0  # upper bound, to within a factor of two
    latency_p99: float = 0.0
    calls_served: int = 0
    calls_running: int = 0
    calls_failed: int = 0
    calls_cancelled: int = 0
    connections: int = 0
    connections_refused: int = 0
    connections_given_up: int = 0  # whose other end went away before it had proved itself; if local, not without a word
    connections_suspended: int = 0  # how often one broke that might go on over a new socket
    connections_resumed: int = 0  # how often one did
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0  # of all kinds, those of the runtime itself and pieces of large buffers among them
    messages_received: int = 0
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


def collect(node: Node) -> Statistics:
    """A worker's statistics, now. Any thread."""
    counters, monitor, pool = node.engine.counters, node.monitor, node.engine.pool
    peers = node.peers.all()
    connections = node.links.connections()
    references = node.references.counts()
    return Statistics(
        calls_made=counters.made,
        calls_answered=counters.answered(),
        calls_pending=sum(peer.owed.user_calls() for peer in peers),
        calls_timed_out=counters.timed_out,
        calls_retried=counters.retried,
        late_answers=counters.late_answers,
        latency_p50=counters.quantile(0.5),
        latency_p99=counters.quantile(0.99),
        calls_served=counters.served_users,
        calls_running=sum(service.user_calls() for service in (*node.services, *node.orphaned)),
        calls_failed=counters.failed,
        calls_cancelled=counters.cancelled,
        connections=len(connections),
        connections_refused=counters.refused,
        connections_given_up=counters.given_up,
        connections_suspended=counters.suspended,
        connections_resumed=counters.resumed,
        bytes_sent=counters.bytes_sent + sum(connection.bytes_sent for connection in connections),
        bytes_received=counters.bytes_received + sum(connection.bytes_received for connection in connections),
        messages_sent=counters.messages_sent + sum(link.messages_sent for link in node.links.all()),
        messages_received=counters.messages_received + sum(link.messages_received for link in node.links.all()),
        threads=pool.threads,
        threads_idle=pool.idle,
        threads_blocked=pool.blocked,
        jobs_queued=pool.queued + node.engine.shares.waiting,
        references_owned=references.owned,
        references_held=references.users,
        references_pending=references.pending,
        channels=node.links.traffic(),
        shared_lent=node.memory.lent,
        shared_leases=node.memory.leases,
        shared_used=node.memory.arena.used,
        shared_size=node.memory.arena.size,
        shared_resident=node.memory.arena.resident,
        loop_lag_mean=monitor.lag_mean,
        loop_lag_max=monitor.lag_max,
        loop_blocked=monitor.blocked_count,
    )
