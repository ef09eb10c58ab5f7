"""A running worker: its parts, put together.

The parts are made in order, each from those that it needs: the engine first, then the links, and so on up to the group
and the objects that open and accept connections. A part that needs a later one asks the node for it, through a
`Protocol` of its package, and not before the worker runs. `lifecycle` makes nodes and takes them down.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from torch.distributed import Store

from .. import foreign
from .._typing import Args, Kwargs
from ..channels.accelerator import Accelerator
from ..devices import DeviceClaims
from ..errors import RpcError, WorkerClosed
from ..logs import logger
from ..options import RpcBackendOptions
from ..protocol.identity import WorkerInfo, WorkerRecord, legible
from ..protocol.messages import Method
from ..protocol.states import WorkerEvent, WorkerState
from ..transport.certificates import Credentials
from .callee.objects import Objects
from .callee.service import Service
from .caller.peer import Peer
from .caller.peers import Peers
from .caller.retrying import Retries
from .caller.stream import Stream, open_stream
from .calls import current
from .calls.current import Registry, ServedCall, current_call, current_node, is_nested
from .calls.pending import PendingCall
from .engine.call_tracing import CallTracer
from .engine.engine import Engine
from .engine.lag import LoopMonitor
from .engine.lifetime import Lifetime, loop_has_ended
from .engine.lines import LineWatch
from .engine.steps import Steps
from .fanout.barriers import Barriers
from .gradients.contexts import Gradients
from .group.accepting import Acceptor
from .group.connecting import Connector
from .group.events import Events
from .group.group import Group
from .group.listening import Listeners
from .group.resumption import SessionResumption
from .hooks import Hooks
from .links.accelerators import Accelerators
from .links.link import Link
from .links.links import Links
from .links.memory import Memory
from .meeting.rendezvous import Rendezvous
from .meeting.secret import Secret
from .publication.publications import Publications
from .references.references import References
from .references.rref import RRef


class Attachment(Protocol):
    """A part of a worker that a layer above the runtime adds, such as its metrics."""

    def open(self, stop: threading.Event) -> None:
        """In a thread, before the worker meets others. Raises RpcUsageError if the worker cannot have it.

        stop: set when joining is given up, before `close` is called, which may be at any time.
        """

    def attach(self, node: Node) -> None:
        """The node was made, and takes no connections yet. On the loop."""

    def close(self) -> None:
        """The worker ends, or has not joined. Idempotent. Any thread."""

    def close_in_child(self) -> None:
        """In a forked child: let go of descriptors. No lock may be taken."""


@dataclass(frozen=True)
class Plan:
    """The user's description of a worker, before anything of it exists.

    worker: the `Worker` in the user's program. claims: about its devices, for the others. objects: served under names.
    role: as in its record. secret: of its group, if the program has that from another member. attachments: opened
    before it joins, and closed first when it ends. make_tracer: makes the tracer of its calls; None: it traces none.
    """

    worker: Any
    name: str
    options: RpcBackendOptions
    init_method: str
    rank: int | None
    world_size: int | None
    store: Store | None
    accelerator: Accelerator | None
    claims: DeviceClaims
    hooks: Hooks
    events: Events
    objects: Objects
    role: str = ""
    secret: Secret | None = None
    attachments: Sequence[Attachment] = ()
    make_tracer: Callable[[Engine], CallTracer] | None = None


@dataclass(frozen=True)
class Meeting:
    """The result of joining: the rendezvous, the members, and the secret that they share.

    credentials: for TLS, None without.
    """

    rendezvous: Rendezvous
    listeners: Listeners
    record: WorkerRecord
    records: Sequence[WorkerRecord]
    secret: bytes = field(repr=False)
    credentials: Credentials | None = None


class Node:
    """A running worker. On the loop, unless a method says otherwise.

    Every part documents its threads. `__init__` assigns all parts, so a node always has each part.
    """

    engine: Engine

    def __init__(self, meeting: Meeting, plan: Plan, lifetime: Lifetime, steps: Steps, stack: AsyncExitStack) -> None:
        """On the loop.

        stack: the exit stack of the worker's life. Each part enters its end there, and the stack runs these in reverse
        order. A part that others need while they end has to be entered before them, even if it is made later: so the
        devices, the connections and the engine are entered first, and end last.
        """
        options, hooks = plan.options, plan.hooks
        self.worker: Any = plan.worker
        self.events: Events = plan.events
        self.rendezvous: Rendezvous = meeting.rendezvous
        self.listeners: Listeners = meeting.listeners
        self.attachments: Sequence[Attachment] = plan.attachments
        self.metrics_address: str = ""  # host:port where its metrics are read; empty without them
        self.read_error: Callable[[str, BaseException], BaseException] = hooks.read_error
        self.patient = False  # whether to wait for running handlers; set when the worker leaves in good order
        lifetime.may_begin = partial(is_nested, self)
        self.engine = engine = Engine(
            lifetime,
            options,
            meeting.record,
            steps,
            prepare=lambda: current_node.set(self),
            credentials=meeting.credentials,
            on_handler_error=hooks.on_handler_error,
        )
        if plan.make_tracer is not None:
            engine.tracer = plan.make_tracer(engine)
        self.accelerators: Accelerators = Accelerators(engine, plan.accelerator, plan.claims, as_torch=hooks.as_torch)
        stack.push_async_callback(self._end_devices)
        stack.push_async_callback(self._end_connections)
        stack.push_async_callback(self._end_engine)

        self.connector: Connector = Connector(self, meeting.secret)
        self.resumption: SessionResumption = SessionResumption(self, self.connector.reopen)
        self.links: Links = Links(engine, self.accelerators, open_pipe=self.connector.open_pipe, other_end=_other_end)
        self.memory: Memory = self.links.memory
        stack.callback(self.memory.close)
        stack.callback(self.links.close)
        self.gradients: Gradients = Gradients(engine, sink=hooks.sink, as_torch=hooks.as_torch)
        stack.callback(self.gradients.close)
        ids = None if meeting.rendezvous.dynamic else {record.id for record in meeting.records}
        self.objects: Objects = plan.objects
        self.references: References = References(self, self.accelerators, hooks.handle_class, members=ids)
        stack.callback(self.references.close)
        self.peers: Peers = Peers(self)
        self.retries: Retries = Retries(self)
        self.barriers: Barriers = Barriers(self)
        self.services: set[Service] = set()
        self.orphaned: list[Service] = []  # services whose callers are gone and whose calls go on
        self.group: Group = Group(self, list(meeting.records))
        stack.callback(self.group.close)
        stack.callback(self.peers.close)
        stack.callback(self.retries.close)
        stack.callback(self._leave_callers)
        self.publications: Publications = Publications(self)
        stack.callback(self.publications.close)
        for record in meeting.records:
            self.peers.note(record)
        stack.push_async_callback(self._let_go_of_devices)
        self.acceptor: Acceptor = Acceptor(self, meeting.listeners, meeting.secret)
        stack.callback(self.acceptor.close)
        self.monitor: LoopMonitor = LoopMonitor(
            engine.loop,
            warn_after=options.lag_warning,
            describe=self.describe_running,
            apart=lambda: self.worker._thread is not None,
            name=engine.name,
            on_closed=partial(
                self.loop_closed, wait=False
            ),  # does not wait for a thread that takes the worker down: that one waits for the monitor's thread
        )
        stack.callback(self.monitor.stop)
        self.lines: LineWatch = LineWatch(engine.loop, engine.connections)
        stack.callback(self.lines.stop)

    async def start(self) -> None:
        """Start the devices that calls use, and begin to take connections."""
        await self.accelerators.start({self.engine.name: self.accelerators.claims, **self.rendezvous.claims})
        # Handlers run in copies of the reader's context, which must not be that of the starting code.
        contextvars.Context().run(self.acceptor.start)
        self.monitor.start()
        self.lines.start()

    # --- taking it down -----------------------------------------------------------------------------------------------

    def _leave_callers(self) -> None:
        for service in list(self.services):
            service.say_goodbye()

    async def _let_go_of_devices(self) -> None:
        if self.engine.loop.is_closed():
            return
        await self.accelerators.let_go(self.engine.bounds.devices)

    async def _end_engine(self) -> None:
        left = await self.engine.close(self.engine.bounds.threads if self.patient else 0.1)
        if left:
            logger.warning("worker %s shut down while %d handler threads were still running", self.engine.name, left)

    async def _end_connections(self) -> None:
        """Wait until the queues are written, for a bounded time: a peer that does not read must not delay the end."""
        connections = self.engine.connections
        limit = time.monotonic() + self.engine.bounds.connections
        closed = self.engine.loop.is_closed()  # then there is no wait
        while not closed and any(not each.ended for each in connections) and time.monotonic() < limit:  # noqa: ASYNC110  # no event for all ends
            await asyncio.sleep(0.005)
        for connection in list(connections):
            connection.abort()

    async def _end_devices(self) -> None:
        await self.accelerators.close(self.engine.bounds.devices)

    def loop_closed(self, *, wait: bool = True) -> None:
        """The worker's loop was closed without a shutdown: see `Lifecycle.loop_closed`."""
        self.worker._loop_closed(wait=wait)

    def leave_without_loop(self, error: RpcError) -> None:
        """Say goodbye without waiting, end the pending calls with that error, and close all connections."""
        self.engine.steps.stop.set()
        for peer in self.peers.all():
            _without_loop(peer.goodbye)
        for service in list(self.services):
            _without_loop(service.goodbye)
        for peer in self.peers.all():
            _without_loop(partial(peer.fail, error))
        for connection in list(self.engine.connections):
            _without_loop(connection.abort)

    # --- for the packages below ---------------------------------------------------------------------------------------

    def connect(self, peer: Peer) -> None:
        """Begin to connect to a peer."""
        self.connector.connect(peer)

    def peer_of(self, record: WorkerRecord) -> Peer:
        """The peer of a worker that has proved itself."""
        return self.peers.of(record)

    def on_goodbye(self, record: WorkerRecord, sure: bool, failed: str) -> None:
        """A worker says goodbye. sure: the connection is proved to be its own. failed: as of `farewell`."""
        self.group.on_goodbye(record, sure, failed)

    async def look_for_farewell(self, record: WorkerRecord) -> bool:
        """Whether an unreachable worker has left, according to the store."""
        return await self.group.look_for_farewell(record)

    async def reach(self, record: WorkerRecord) -> socket.socket:
        """A TCP socket that leads to a worker. Raises OSError or RpcError if it takes no connections."""
        return await self.connector.reach(record)

    async def probe(self, record: WorkerRecord) -> None:
        """Raises OSError or RpcError if a worker takes no connections."""
        await self.connector.probe(record)

    def on_unknown(self, worker_id: int) -> None:
        """No worker in the group has that id."""
        self.references.on_unknown(worker_id)

    def open_stream(
        self,
        peer: Peer,
        function: Method,
        args: Args,
        kwargs: Kwargs,
        timeout: float,
        *,
        depth: int,
        keeps: object = None,
    ) -> Stream[object]:
        """The stream of a call's items, see `stream.open_stream`. Any thread."""
        return open_stream(peer, function, args, kwargs, timeout, depth=depth + 1, keeps=keeps)

    # --- looking, from any thread -------------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether no call of users is under way, in either direction."""
        return (
            not any(peer.pending.user_calls() for peer in self.peers.all())
            and not any(service.user_calls() for service in list(self.services))
            and not self.retries.calls
            and not self.links.busy()
            and not any(observer.holds() for observer in self.engine.observers)
        )

    def owes_answers(self) -> bool:
        """Whether answers wait for their callers to read, or for a suspended connection."""
        return any(service.link.owing for service in list(self.services))

    def activity(self) -> tuple[bool, int]:
        """Whether the worker is idle, and how many calls of users it has seen. Graceful shutdown compares these."""
        counters = self.engine.counters
        return self.is_idle(), counters.made + counters.served

    def pending_calls(self) -> list[PendingCall]:
        """The calls under way at this worker, those it made and those it serves, oldest first.

        Calls between two tries are included.
        """
        calls = [call for peer in self.peers.all() for call in peer.pending.pending_calls()]
        calls += [call for service in (*self.services, *self.orphaned) for call in service.pending_calls()]
        calls += self.retries.pending_calls()
        return sorted(calls, key=lambda call: -call.seconds)

    def describe_running(self) -> str:
        """The handlers that may be blocking the loop, as text for a log message; empty if there are none."""
        running = [call.function for call in self.pending_calls() if call.direction == "served"]
        return f"a handler among {', '.join(running[:5])}" if running else ""

    def describe_pending(self) -> str:
        """The calls of users that are under way, oldest first, as text for a log message; empty if there are none."""
        calls = self.pending_calls()
        named = [f"{each.function} {'for' if each.direction == 'served' else 'on'} {each.worker}" for each in calls[:5]]
        return legible(", ".join((*named, f"and {len(calls) - 5} more") if len(calls) > 5 else named))

    def describe_leftovers(self) -> list[str]:
        """What others may still fetch from this worker: items of queues, for people. On the loop."""
        return [left for each in list(self.engine.leftovers) if (left := each.left())]

    def tell_parting(self) -> None:
        """Tell the callers that this worker takes no more calls, and what serves them beside calls. On the loop."""
        for leftover in list(self.engine.leftovers):
            leftover.part()
        for service in list(self.services):
            if not service.connection.resting:  # its caller hears it from the answer to its next call
                service.part()

    def end_waits(self, why: Callable[[str], WorkerClosed], *, calls: bool) -> list[str]:
        """See `Departure`. Waits of handlers go on, as parts of the calls that they serve."""
        ended = [each for waits in list(self.engine.waits) for each in waits.end_waits(why)]
        ended += [each for peer in self.peers.all() for each in peer.pending.end_waits(why, calls=calls)]
        return [*ended, *self.retries.end_waits()]

    def loop_ends(self) -> None:
        """All tasks of the loop are cancelled before a shutdown: end the waits of threads.

        The loop is usually closed next, which takes the worker down. Code on the loop, such as a cancelled task that
        cleans up, may still make calls.
        """
        lifetime, engine = self.engine.lifetime, self.engine
        lifetime.loop_ends = True
        lifetime.may_begin = lambda: engine.on_loop or is_nested(self)
        lifetime.close_door(alone=False)
        why = str(loop_has_ended(f"worker {engine.name!r}"))
        self.end_waits(lambda what: WorkerClosed(f"{what} got no answer: {why}"), calls=True)
        self.publications.leave()

    def continues(self, origin: tuple[int, int]) -> bool:
        """Whether an arriving call belongs to a chain of calls in which this worker makes or serves another one."""
        served = [call.origin for service in list(self.services) for call in list(service.calls.values())]
        if served.count(origin) > 1:  # the arriving call is among them
            return True
        caller, call_id = origin
        return caller == self.engine.info.id and any(call_id in peer.pending.calls for peer in self.peers.all())

    def worker_infos(self) -> list[WorkerInfo]:
        """All members this worker knows, itself included, by id; without those that have left or were lost."""
        return sorted((record.info for record in self.group.live()), key=lambda info: info.id)

    # --- the end without leaving --------------------------------------------------------------------------------------

    def in_forked_child(self) -> None:
        """In a forked child: release the parent's descriptors; every verb raises from now on.

        No lock may be taken here: a thread that held it in the parent does not exist in the child.
        """
        if self.engine.lifetime.state is not WorkerState.CLOSED:
            self.engine.lifetime.enter(WorkerEvent.FORKED)
        self.engine.in_forked_child()
        for connection in list(self.engine.connections):
            connection.close_in_child()
        self.listeners.close_in_child()
        for attachment in self.attachments:
            attachment.close_in_child()
        self.group.close_in_child()
        self.publications.close_in_child()
        self.memory.close_in_child()
        self.accelerators.close_in_child()

    def at_exit(self) -> None:
        """The interpreter exits before this worker has shut down: say goodbye without waiting.

        On the main thread. No thread can be started any more.
        """
        # Closed first, because the loop may still run in its thread: it must not take the ends of connections, with
        # which the others answer the goodbye, for losses.
        if self.engine.lifetime.state is not WorkerState.CLOSED:
            self.engine.lifetime.enter(WorkerEvent.EXITED)
        self.engine.lifetime.fail(getattr(sys, "last_type", None))  # the error of the main program, if any
        self.listeners.unlink()
        for attachment in self.attachments:
            attachment.close()
        for peer in self.peers.all():
            peer.goodbye()
        for service in list(self.services):
            service.goodbye()

    def at_end(self) -> None:
        """The interpreter ends before this worker has shut down: end the thread of its loop, if it has one of its own,
        and the pending calls. On the main thread, after `at_exit`."""
        thread = self.worker._thread
        if thread is None:
            return
        thread.end_at_exit()
        # A later finalizer may wait for one of them.
        _without_loop(self.publications.close)
        _without_loop(self.retries.close)
        for peer in self.peers.all():
            _without_loop(partial(peer.fail, self.engine.lifetime.why_closed()))


def _without_loop(step: Callable[[], object]) -> None:
    """Take a step of the end whose last part may need the loop, which is closed; the other parts are done."""
    try:
        step()
    except Exception as error:
        foreign.log_error(logger, logging.DEBUG, error, "taking a worker down without its loop")


#: The nodes of this process; the same object as `calls.current.registry`.
registry: Registry[Node] = cast("Registry[Node]", current.registry)


def serving() -> tuple[Node, ServedCall]:
    """In a handler of the runtime: the node that serves the call, and the call."""
    call = current_call.get()
    assert call is not None, "only handlers ask"
    node: Any = call.node  # a Node: there is nothing else
    return node, call


def node_of(rref: RRef[object]) -> Node:
    """The node of an RRef."""
    node: Node = rref._references.worker  # type: ignore[assignment]  # a Node: there is nothing else
    return node


def _other_end(link: Link) -> Link | None:
    """The other end of a link, if it is in this process."""
    for node in registry.nodes():
        if node.engine.record.incarnation == link.record.incarnation:
            return node.links.find(link.engine.record, link.number, opener=not link.opener)
    return None
