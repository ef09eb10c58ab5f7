"""The metrics of a worker: their names, and how each is read from the parts of the worker.

`rpc_*` are those of OpenTelemetry's semantic conventions for RPC (1.45), as Prometheus writes their names; what these
lack is named `aiorpc_*`. Counters end in ``_total``, units are in the name. The number of label values is bounded: the
first functions and workers that are met have their names, all others are `_OTHER`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ..protocol.identity import legible
from ..protocol.states import CallOutcome, PeerState
from ..queues.served import ServedQueue
from ..runtime.engine.tally import BOUNDS, MOST_PEERS, Durations, PeerTraffic, Tally
from ..runtime.node import Node
from ..runtime.statistics import Statistics, collect
from .conventions import SYSTEM, method_name

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
#: How many published values and queues of a worker are told; the first ones.
MOST_NAMES = 100

#: Values of the labels beside `worker`, and the figure.
Row = tuple[tuple[str, ...], float]
#: The same with cumulated counts by the upper bounds of buckets, and the sum.
HistogramRow = tuple[tuple[str, ...], list[tuple[str, float]], float]


class Scraped:
    """A worker at one scrape: what several metrics are read from. In a thread of the server.

    now: when it was begun (monotonic seconds), together with those at other workers.
    """

    def __init__(self, node: Node, tally: Tally, now: float) -> None:
        self.node = node
        self.tally = tally
        self.now = now
        self.statistics: Statistics = collect(node)
        self.traffic: dict[str, PeerTraffic] = node.links.traffic_by_peer(tally)
        objects = [served._value for served in list(node.objects.by_name.values())]
        self.queues: list[ServedQueue] = [each for each in objects if isinstance(each, ServedQueue)][:MOST_NAMES]


@dataclass(frozen=True)
class Measure:
    """One metric. labels: beside `worker`. meaning: for `docs/reference/metrics.md` and for Prometheus."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str
    read: Callable[[Scraped], Iterable[Any]]  # of Row; of HistogramRow for a histogram


def _one(name: str, kind: str, meaning: str, read: Callable[[Scraped], float]) -> Measure:
    """A metric without further labels."""

    def rows(look: Scraped) -> list[Row]:
        return [((), read(look))]

    return Measure(name, kind, (), meaning, rows)


# --- calls ------------------------------------------------------------------------------------------------------------


def _durations(durations: Durations) -> Iterator[HistogramRow]:
    total: dict[tuple[str, CallOutcome], list[float]] = {}
    for function, outcome, row in durations.rows():
        known = total.setdefault((method_name(function), outcome), [0.0] * len(row))
        for place, count in enumerate(row):
            known[place] += count
    for (function, outcome), row in total.items():
        error = "" if outcome is CallOutcome.VALUE else str(outcome)
        count, buckets = 0.0, []
        for bound, calls in zip((*map(str, BOUNDS), "+Inf"), row, strict=False):  # the last figure is the sum
            count += calls
            buckets.append((bound, count))
        yield (SYSTEM, function, error), buckets, row[-1]


def _queued_here(look: Scraped) -> float:
    """Calls whose message waits for a connection."""
    waiting = (PeerState.IDLE, PeerState.CONNECTING, PeerState.SUSPENDED)
    return sum(peer.pending.user_calls() for peer in look.node.peers.all() if peer.state in waiting)


def _streams(look: Scraped) -> list[Row]:
    made = sum(len(peer.pending.streams) for peer in look.node.peers.all())
    served = sum(service.streams() for service in list(look.node.services))
    return [(("client",), made), (("server",), served)]


_OF_CALLS = ("rpc_system_name", "rpc_method", "error_type")
_CALLS = (
    Measure(
        "rpc_client_call_duration_seconds",
        HISTOGRAM,
        _OF_CALLS,
        "Calls of users made here, until their answer or other end; each try of a call with retries is one.",
        lambda look: _durations(look.tally.made),
    ),
    Measure(
        "rpc_server_call_duration_seconds",
        HISTOGRAM,
        _OF_CALLS,
        "Calls of users served here, from their arrival to their answer or other end.",
        lambda look: _durations(look.tally.served),
    ),
    _one(
        "aiorpc_client_active_calls",
        GAUGE,
        "Calls made here that wait for an answer.",
        lambda look: look.statistics.calls_pending,
    ),
    _one("aiorpc_client_queued_calls", GAUGE, "Those of them that wait for a connection.", _queued_here),
    _one(
        "aiorpc_client_retried_calls_total",
        COUNTER,
        "Failed tries that another one followed.",
        lambda look: look.statistics.calls_retried,
    ),
    _one(
        "aiorpc_client_late_answers_total",
        COUNTER,
        "Answers that came after their call had ended.",
        lambda look: look.statistics.late_answers,
    ),
    _one(
        "aiorpc_server_active_calls",
        GAUGE,
        "Calls that wait or run here.",
        lambda look: look.statistics.calls_running,
    ),
    _one(
        "aiorpc_server_queued_calls",
        GAUGE,
        "Those of them that wait for a thread.",
        lambda look: look.statistics.jobs_queued,
    ),
    Measure("aiorpc_streams", GAUGE, ("side",), "Open streams that are consumed (client) or produced here.", _streams),
)


# --- the network ------------------------------------------------------------------------------------------------------


def _by_peer(name: str, meaning: str, read: Callable[[PeerTraffic], float]) -> Measure:
    def rows(look: Scraped) -> list[Row]:
        return [((peer,), read(traffic)) for peer, traffic in look.traffic.items()]

    return Measure(name, COUNTER, ("peer",), meaning, rows)


def _by_channel(name: str, meaning: str, read: Callable[[Any], float]) -> Measure:
    def rows(look: Scraped) -> list[Row]:
        return [
            ((peer, legible(channel)), read(moved))
            for peer, traffic in look.traffic.items()
            for channel, moved in traffic.channels.items()
            if moved.sent or moved.received or moved.refused
        ]

    return Measure(name, COUNTER, ("peer", "channel"), meaning, rows)


_NETWORK = (
    _by_peer(
        "aiorpc_sent_bytes_total",
        "Bytes written to sockets. Tensors in shared memory are not in it.",
        lambda traffic: traffic.bytes_sent,
    ),
    _by_peer("aiorpc_received_bytes_total", "Bytes read from sockets.", lambda traffic: traffic.bytes_received),
    _by_peer(
        "aiorpc_sent_messages_total",
        "Messages of all kinds, those of the runtime among them.",
        lambda traffic: traffic.messages_sent,
    ),
    _by_peer(
        "aiorpc_received_messages_total", "The same in the other direction.", lambda traffic: traffic.messages_received
    ),
    _by_channel(
        "aiorpc_channel_sent_bytes_total", "Bytes of tensors that the channel took.", lambda moved: moved.bytes_sent
    ),
    _by_channel(
        "aiorpc_channel_received_bytes_total",
        "Bytes of tensors that came through it.",
        lambda moved: moved.bytes_received,
    ),
    _by_channel("aiorpc_channel_sent_transfers_total", "Tensors' buffers that it took.", lambda moved: moved.sent),
    _by_channel(
        "aiorpc_channel_received_transfers_total",
        "Tensors' buffers that came through it.",
        lambda moved: moved.received,
    ),
    _by_channel(
        "aiorpc_channel_refused_transfers_total",
        "Tensors' buffers that it did not take; another channel took them.",
        lambda moved: sum(moved.refused.copy().values()),
    ),
    _one("aiorpc_connections", GAUGE, "Open connections.", lambda look: look.statistics.connections),
    _one(
        "aiorpc_connection_breaks_total",
        COUNTER,
        "Breaks of connections that might be resumed.",
        lambda look: look.statistics.connections_suspended,
    ),
    _one(
        "aiorpc_connection_resumptions_total",
        COUNTER,
        "Breaks that were mended: the connection went on over a new socket.",
        lambda look: look.statistics.connections_resumed,
    ),
    _one(
        "aiorpc_refused_connections_total",
        COUNTER,
        "Connections that were turned away before they had proved that they belong to the group.",
        lambda look: look.statistics.connections_refused,
    ),
)


# --- the group --------------------------------------------------------------------------------------------------------


def _info(look: Scraped) -> list[Row]:
    record = look.node.engine.record
    return [((str(record.rank), record.hostname, str(record.pid), record.role, record.aiorpc), 1)]


_GROUP = (
    Measure(
        "aiorpc_worker_info", GAUGE, ("rank", "hostname", "pid", "role", "version"), "1, for the labels alone.", _info
    ),
    _one(
        "aiorpc_group_workers",
        GAUGE,
        "Members that this worker knows, itself among them, without those that have left or were lost.",
        lambda look: len(look.node.group.live()),
    ),
    _one(
        "aiorpc_lost_workers_total", COUNTER, "Members that this worker has lost.", lambda look: look.node.group.losses
    ),
)


# --- the process ------------------------------------------------------------------------------------------------------


def _threads(look: Scraped) -> list[Row]:
    seen = look.statistics
    busy = max(0, seen.threads - seen.threads_idle - seen.threads_blocked)
    return [(("busy",), busy), (("idle",), seen.threads_idle), (("blocked",), seen.threads_blocked)]


def _references(look: Scraped) -> list[Row]:
    seen = look.statistics
    counts = {"owned": seen.references_owned, "held": seen.references_held, "pending": seen.references_pending}
    return [((state,), count) for state, count in counts.items()]


def _of_devices(what: str) -> Callable[[Scraped], list[Row]]:
    """Reads the allocator of torch, for each device that calls use. `what`: as in `torch.cuda.memory_allocated`."""

    def rows(look: Scraped) -> list[Row]:
        accelerators = look.node.accelerators
        if accelerators.accelerator is None:
            return []
        kind = accelerators.accelerator.kind
        read = getattr(getattr(torch, kind, None), f"memory_{what}", None)
        return [((f"{kind}:{index}",), read(index)) for index in accelerators.buffers() if read is not None]

    return rows


def _device_buffers(look: Scraped) -> list[Row]:
    accelerators = look.node.accelerators
    if accelerators.accelerator is None:
        return []
    kind = accelerators.accelerator.kind
    return [((f"{kind}:{index}",), size) for index, size in accelerators.buffers().items()]


_PROCESS = (
    _one(
        "aiorpc_loop_lag_seconds",
        GAUGE,
        "How late the loop runs what is due: a moving average over the last seconds.",
        lambda look: look.statistics.loop_lag_mean,
    ),
    _one("aiorpc_loop_lag_max_seconds", GAUGE, "How late it was at worst.", lambda look: look.statistics.loop_lag_max),
    _one(
        "aiorpc_loop_blocked_total",
        COUNTER,
        "How often it was blocked for more than the option lag_warning.",
        lambda look: look.statistics.loop_blocked,
    ),
    Measure(
        "aiorpc_threads",
        GAUGE,
        ("state",),
        "Threads of handlers: busy, idle, or blocked, as they wait for a nested call.",
        _threads,
    ),
    Measure(
        "aiorpc_references",
        GAUGE,
        ("state",),
        "Values here that references name (owned); references here to values of others (held), and those of them "
        "that the owner has not confirmed (pending).",
        _references,
    ),
    _one("aiorpc_autograd_contexts", GAUGE, "Open autograd contexts.", lambda look: len(look.node.gradients)),
    _one(
        "aiorpc_shared_memory_size_bytes",
        GAUGE,
        "Shared memory that was set up.",
        lambda look: look.statistics.shared_size,
    ),
    _one("aiorpc_shared_memory_used_bytes", GAUGE, "That of it in blocks.", lambda look: look.statistics.shared_used),
    _one(
        "aiorpc_shared_memory_lent_bytes",
        GAUGE,
        "That of it that other workers hold.",
        lambda look: look.statistics.shared_lent,
    ),
    _one(
        "aiorpc_shared_memory_resident_bytes",
        GAUGE,
        "Memory of the machine that it takes up.",
        lambda look: look.statistics.shared_resident,
    ),
    Measure(
        "aiorpc_device_allocated_bytes",
        GAUGE,
        ("device",),
        "Memory of tensors on a device that calls use, in this process.",
        _of_devices("allocated"),
    ),
    Measure(
        "aiorpc_device_reserved_bytes",
        GAUGE,
        ("device",),
        "Memory that torch holds there for this process.",
        _of_devices("reserved"),
    ),
    Measure(
        "aiorpc_device_buffer_bytes",
        GAUGE,
        ("device",),
        "Memory there through which tensors go to other processes.",
        _device_buffers,
    ),
)


# --- published values and queues --------------------------------------------------------------------------------------


def _published(read: Callable[[Any, float], float]) -> Callable[[Scraped], list[Row]]:
    def rows(look: Scraped) -> list[Row]:
        publishers = list(look.node.publications.publishers.items())[:MOST_NAMES]
        return [((legible(name),), read(each, look.now)) for name, each in publishers if each.newest]

    return rows


def _lags(look: Scraped) -> list[Row]:
    rows: list[Row] = []
    for name, publisher in list(look.node.publications.publishers.items())[:MOST_NAMES]:
        have: dict[str, int] = {}  # the least of a worker's subscriptions
        for subscriber in list(publisher.subscribers.values()):
            reader = subscriber.record.name
            if reader in have or len(have) < MOST_PEERS:
                have[reader] = min(have.get(reader, subscriber.have), subscriber.have)
        rows += [((legible(name), reader), max(0, publisher.newest - least)) for reader, least in have.items()]
    return rows


def _subscribed(read: Callable[[Any, float], float], *, taken: bool) -> Callable[[Scraped], list[Row]]:
    """Of a worker's subscriptions to one name, the one that is furthest behind."""

    def rows(look: Scraped) -> list[Row]:
        least: dict[str, Any] = {}
        for each in list(look.node.publications.prefetchers.values()):
            number = each.taken if taken else each.newest
            known = least.get(each.name)
            if each.reads and number and (known is None or number < (known.taken if taken else known.newest)):
                least[each.name] = each
        return [((legible(name),), read(each, look.now)) for name, each in islice(least.items(), MOST_NAMES)]

    return rows


def _of_queues(name: str, meaning: str, read: Callable[[Any], float]) -> Measure:
    def rows(look: Scraped) -> list[Row]:
        found: Counter[str] = Counter()
        for queue in look.queues:
            found[legible(queue.name)] += int(read(queue.counts()))
        return [((queue,), count) for queue, count in found.items()]

    return Measure(name, GAUGE, ("queue",), meaning, rows)


_VALUES = (
    Measure(
        "aiorpc_published_version",
        GAUGE,
        ("name",),
        "The newest version of a value that this worker publishes.",
        _published(lambda publisher, now: publisher.newest),
    ),
    Measure(
        "aiorpc_published_age_seconds",
        GAUGE,
        ("name",),
        "Since when it is published.",
        _published(lambda publisher, now: now - publisher.put_at),
    ),
    Measure(
        "aiorpc_published_reader_lag_versions",
        GAUGE,
        ("name", "reader"),
        "How many versions a reader of this worker's value is behind.",
        _lags,
    ),
    Measure(
        "aiorpc_subscription_version",
        GAUGE,
        ("name",),
        "The newest version here of a value that this worker reads.",
        _subscribed(lambda each, now: each.newest, taken=False),
    ),
    Measure(
        "aiorpc_subscription_taken_version",
        GAUGE,
        ("name",),
        "The version that the program has taken last.",
        _subscribed(lambda each, now: each.taken, taken=True),
    ),
    Measure(
        "aiorpc_subscription_taken_age_seconds",
        GAUGE,
        ("name",),
        "Since when that version is here: the age of the weights that the program works with.",
        _subscribed(lambda each, now: now - each.taken_came, taken=True),
    ),
    _of_queues("aiorpc_queue_items", "Items in a queue of this worker.", lambda counts: counts.items),
    _of_queues("aiorpc_queue_waiting_getters", "Calls that wait there for an item.", lambda counts: counts.getters),
    _of_queues("aiorpc_queue_waiting_putters", "Calls that wait there for room.", lambda counts: counts.putters),
    _of_queues(
        "aiorpc_queue_unfinished_items", "Items that were got and are not finished.", lambda counts: counts.given
    ),
)

#: All metrics, in the order of the reference.
MEASURES: tuple[Measure, ...] = (*_CALLS, *_NETWORK, *_GROUP, *_PROCESS, *_VALUES)
