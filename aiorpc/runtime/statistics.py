"""The figures of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..channels import Traffic
from ..protocol.states import CallOutcome
from .node import Node

# Outcomes of a served call whose caller does not wait for it.
_CANCELLED = (CallOutcome.CANCELLED, CallOutcome.TIMEOUT, CallOutcome.LOST)

COUNTER, GAUGE, MAXIMUM = "counter", "gauge", "maximum"


def _is(kind: str, unit: str) -> int:
    """A field, with metadata for `docs/reference/statistics.md` and for programs that export it."""
    return field(default=0, metadata={"kind": kind, "unit": unit})


@dataclass(frozen=True)
class Statistics:
    """A worker at one moment, as `Worker.statistics` returns it. Times are in seconds, sizes in bytes.

    The reference lists each field with its meaning, under "Statistics". The metadata of a field
    (``dataclasses.fields``) has its ``kind`` and ``unit``. A counter only grows, from the start of the worker on. A
    gauge is the value at this moment. A maximum is the largest value since the start.
    """

    # Calls made here; fetching the value of a reference counts.
    calls_made: int = _is(COUNTER, "calls")
    calls_answered: int = _is(COUNTER, "calls")
    calls_pending: int = _is(GAUGE, "calls")
    calls_timed_out: int = _is(COUNTER, "calls")
    calls_retried: int = _is(COUNTER, "tries")  # failed tries that another one followed
    late_answers: int = _is(COUNTER, "answers")
    latency_p50: float = _is(GAUGE, "s")  # upper bound, to within a factor of two
    latency_p99: float = _is(GAUGE, "s")
    # Calls served here; refused calls, which were not served, count as failed.
    calls_served: int = _is(COUNTER, "calls")
    calls_running: int = _is(GAUGE, "calls")
    calls_failed: int = _is(COUNTER, "calls")
    calls_cancelled: int = _is(COUNTER, "calls")
    connections: int = _is(GAUGE, "connections")
    connections_refused: int = _is(COUNTER, "connections")
    # Their other end went away before it had proved itself; a local one counts only if it had sent something.
    connections_given_up: int = _is(COUNTER, "connections")
    connections_suspended: int = _is(COUNTER, "breaks")  # breaks of connections that may be resumed
    connections_resumed: int = _is(COUNTER, "breaks")  # resumptions
    bytes_sent: int = _is(COUNTER, "bytes")
    bytes_received: int = _is(COUNTER, "bytes")
    messages_sent: int = _is(COUNTER, "messages")  # of all kinds, the runtime's and pieces of large buffers among them
    messages_received: int = _is(COUNTER, "messages")
    threads: int = _is(GAUGE, "threads")
    threads_idle: int = _is(GAUGE, "threads")
    threads_blocked: int = _is(GAUGE, "threads")
    jobs_queued: int = _is(GAUGE, "jobs")
    references_owned: int = _is(GAUGE, "values")
    references_held: int = _is(GAUGE, "references")
    references_pending: int = _is(GAUGE, "references")
    # By the channel's name: its traffic, and why buffers took another way.
    channels: dict[str, Traffic] = field(default_factory=dict, metadata={"kind": COUNTER, "unit": "buffers, bytes"})
    shared_lent: int = _is(GAUGE, "bytes")  # of the arena, held by other workers
    shared_leases: int = _is(GAUGE, "blocks")  # with these bytes
    shared_used: int = _is(GAUGE, "bytes")  # of the arena, in blocks, with rounding
    shared_size: int = _is(GAUGE, "bytes")  # of the arena
    shared_resident: int = _is(GAUGE, "bytes")  # of memory that the arena occupies
    loop_lag_mean: float = _is(GAUGE, "s")
    loop_lag_max: float = _is(MAXIMUM, "s")
    loop_blocked: int = _is(COUNTER, "times")


def collect(node: Node) -> Statistics:
    """A worker's statistics, now. Any thread."""
    counters, monitor, pool = node.engine.counters, node.monitor, node.engine.pool
    peers = node.peers.all()
    connections = node.links.connections()
    references = node.references.counts()
    ended = counters.served_ended
    return Statistics(
        calls_made=counters.made,
        calls_answered=counters.answered(),
        calls_pending=sum(peer.pending.user_calls() for peer in peers),
        calls_timed_out=counters.made_ended[CallOutcome.TIMEOUT],
        calls_retried=counters.retried,
        late_answers=counters.late_answers,
        latency_p50=counters.quantile(0.5),
        latency_p99=counters.quantile(0.99),
        calls_served=counters.served,
        calls_running=sum(service.user_calls() for service in (*node.services, *node.orphaned)),
        calls_failed=ended[CallOutcome.ERROR] + ended[CallOutcome.REFUSED] + counters.failed_unheard,
        calls_cancelled=sum(ended[outcome] for outcome in _CANCELLED),
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
