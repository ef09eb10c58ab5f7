"""A worker's report on itself, as `report.WorkerReport`. Any thread, also while the worker's loop stands still."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import fields

from .. import _version
from ..channels import Traffic
from ..channels.inline import Inline
from ..protocol.identity import WorkerRecord, legible
from ..protocol.states import PeerState
from ..queues.served import ServedQueue
from ..runtime.callee.service import Service
from ..runtime.caller.peer import Peer
from ..runtime.calls.current import ServedCall
from ..runtime.engine.tally import BOUNDS
from ..runtime.node import Node
from ..runtime.statistics import Statistics, collect
from ..sites import describe_site
from .counting import counted
from .memo import memo
from .report import (
    SeenCall,
    SeenEvent,
    SeenLoop,
    SeenMember,
    SeenName,
    SeenQueue,
    SeenReader,
    SeenSubscription,
    WorkerReport,
)
from .stacks import stack_of_call, stack_of_step, stands_at_lock

#: The oldest so many calls of each side are in a report, and so many members.
_MOST = 1000


def report_of(node: Node, *, tally: bool = False, log: bool = False) -> WorkerReport:
    """What one sees of that worker now. tally, log: as of `Look`."""
    engine, now = node.engine, time.monotonic()
    statistics = collect(node)
    return WorkerReport(
        name=engine.name,
        id=engine.id,
        role=engine.record.role,
        mark=mark_of(engine.record),
        init_method=node.worker.init_method,
        dynamic=node.rendezvous.dynamic,
        state=engine.lifetime.state.value,
        pid=os.getpid(),
        hostname=legible(socket.gethostname()),
        version=_version.__version__,
        made=time.time(),
        uptime=now - engine.began,
        metrics=node.metrics_address,
        memory=_memory(),
        statistics=_numbers(statistics),
        traffic={
            f"{name}.{each.name}": getattr(traffic, each.name)
            for name, traffic in statistics.channels.items()
            for each in fields(traffic)
            if isinstance(getattr(traffic, each.name), int)
        },
        loop=_loop(node),
        members=_members(node),
        calls=_made(node, now) + _served(node, now),
        queues=[
            _queue(name, served._value)
            for name, served in list(node.objects.by_name.items())
            if isinstance(served._value, ServedQueue)
        ],
        published=_published(node, now),
        subscriptions=[
            SeenSubscription(each.name, each.newest, now - each.came if each.newest else 0.0)
            for each in list(node.publications.prefetchers.values())
            if each.reads
        ],
        events=[
            SeenEvent(when, type(event).__name__, event.worker.name, str(getattr(event, "cause", "")))
            for when, event in list(node.events.recent)
        ],
        tally=counted(engine) if tally else [],
        bounds=list(BOUNDS) if tally else [],
        log=memo().lines() if log else [],
    )


def _memory() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no Linux
        return 0


def _numbers(statistics: Statistics) -> dict[str, float]:
    found = {each.name: getattr(statistics, each.name) for each in fields(statistics) if each.name != "channels"}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _loop(node: Node) -> SeenLoop:
    monitor = node.monitor
    silent = monitor.silent()
    stands = stack_of_step(node.engine.thread) if silent else []
    return SeenLoop(silent, monitor.lag_mean, monitor.lag_max, stands)


# --- members ----------------------------------------------------------------------------------------------------------


def _members(node: Node) -> list[SeenMember]:
    found = {node.engine.name: _member(node.engine.record, "itself")}
    lost = node.group.lost
    for peer in node.peers.all():
        if peer.record is None or (peer.state is PeerState.GONE and peer.record.id not in lost):
            continue  # it has left
        if peer.name not in found:
            found[peer.name] = _member(peer.record, peer.state.value)
        if peer.name in found and peer.connection is not None:
            _add_traffic(found[peer.name], peer)
    for record in node.group.live():  # in a free group some may not have been called
        if record.name not in found:
            found[record.name] = _member(record, PeerState.IDLE.value)
    for service in list(node.services):
        member = found.get(service.record.name)
        if member is not None:
            _add_traffic(member, service.link)
    for link in list(node.links.all()):
        if link.record.name in found:
            _add_apart(found[link.record.name], link.distribution.traffic())
    for info in list(lost.values()):
        known = found.setdefault(info.name, SeenMember(info.name, info.id))
        if known.id == info.id:  # and not another one in its place
            known.state = "lost"
    return list(found.values())[:_MOST]


def _member(record: WorkerRecord, state: str) -> SeenMember:
    return SeenMember(record.name, record.id, record.role, record.hostname, record.pid, state, mark_of(record))


def mark_of(record: WorkerRecord) -> str:
    """Of this life of a worker, as in reports."""
    return record.incarnation[:12]


def _add_traffic(member: SeenMember, end: Peer | object) -> None:
    connection = getattr(end, "connection", None)
    if connection is not None:
        member.sent += connection.bytes_sent
        member.received += connection.bytes_received
        member.unsent += connection.queue.size


def _add_apart(member: SeenMember, moved: dict[str, Traffic]) -> None:
    for name, traffic in moved.items():
        if name != Inline.name:  # which is among the bytes of the connection
            member.apart_sent += traffic.bytes_sent
            member.apart_received += traffic.bytes_received


# --- calls ------------------------------------------------------------------------------------------------------------


def _made(node: Node, now: float) -> list[SeenCall]:
    calls = [
        SeenCall(
            "made",
            node.engine.name,
            peer.name,
            call.call_id,
            call.function,
            call.kind,
            "connecting" if peer.connection is None else "sent",
            now - call.started,
            None if call._deadline is None else call._deadline - now,
            describe_site(call._site),
            [],
            call.parent,
            call.part_of,
            call.system,
        )
        for peer in node.peers.all()
        for call in list(peer.pending.calls.values())
    ]
    calls += [
        SeenCall(
            "made",
            node.engine.name,
            each.worker,
            0,
            each.function,
            "call",
            "waits for its next try",
            each.seconds,
            each.deadline,
            each.made_at,
        )
        for each in node.retries.pending_calls()
    ]
    return _oldest(calls)


def _served(node: Node, now: float) -> list[SeenCall]:
    services: Iterable[Service] = (*node.services, *node.orphaned)
    return _oldest([_served_call(node, call, now) for service in services for call in list(service.calls.values())])


def _served_call(node: Node, call: ServedCall, now: float) -> SeenCall:
    return SeenCall(
        "served",
        call.caller.name,
        node.engine.name,
        call.call_id,
        call.function,
        "call" if call.credit is None else "stream",
        "running" if call.begun else "queued",
        now - call.started,
        None if call.deadline is None else call.deadline - now,
        stands_at=stack_of_call(call) if call.begun else [],
        at_lock=call.begun and stands_at_lock(call),
        part_of=("batch", call.batch) if call.batch else None,
        own=call.system,
    )


def _oldest(calls: list[SeenCall]) -> list[SeenCall]:
    calls.sort(key=lambda call: -call.since)
    return calls[:_MOST]


# --- queues and published values --------------------------------------------------------------------------------------


def _queue(name: str, queue: ServedQueue) -> SeenQueue:
    return SeenQueue(
        name,
        len(queue._items),
        queue.maxsize,
        len(queue._getters),
        len(queue._putters),
        queue._unfinished,
        time.monotonic() - queue._untaken if queue._items else 0.0,
    )


def _published(node: Node, now: float) -> list[SeenName]:
    return [
        SeenName(
            name,
            publisher.newest,
            now - publisher.put_at,
            [
                SeenReader(
                    each.record.name,
                    each.have,
                    publisher.newest - each.have,
                    now - each.lacking if each.lacking else 0.0,
                )
                for each in list(publisher.subscribers.values())
            ],
        )
        for name, publisher in list(node.publications.publishers.items())
        if publisher.newest
    ]
