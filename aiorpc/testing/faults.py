"""Faults on purpose, for tests: messages of one worker that are dropped, delayed or refused, and a worker that dies.

A worker without faults pays nothing: `Faults` puts functions of its own (`fault_ways`) in front of methods of the
worker's peers and services, on those objects alone, when it is entered, and takes them away when it is left.

Invariants
1. A rule is asked once for each message, under a lock; which messages it hits depends on their order alone.
2. The runtime's own calls (joining, leaving, news of losses) are never hit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..errors import RpcError, RpcUsageError
from ..options import seconds as checked_seconds
from ..runtime.engine.current import registry
from .ways import Answers, Calls, MessageKind, SentMessage, Way

if TYPE_CHECKING:
    from ..runtime.callee.service import Service
    from ..runtime.caller.peer import Peer
    from ..runtime.caller.peers import To
    from ..runtime.worker import Worker

# Somebody waits for the answer to these, so sending them can fail.
_CALLS = frozenset((MessageKind.CALL, MessageKind.REMOTE, MessageKind.FETCH, MessageKind.GRADIENT, MessageKind.CONTEXT))


class Choice(TypedDict, total=False):
    """Which messages of its kinds a rule hits; see `Faults`."""

    to: str | None
    function: object
    when: Callable[[SentMessage], bool] | None
    times: int | None
    after: int


@dataclass(eq=False)
class Fault:
    """One rule, as `Faults` made it. messages: what it has hit so far."""

    action: str
    kinds: frozenset[MessageKind]
    to: str | None = None
    function: object = None
    when: Callable[[SentMessage], bool] | None = None
    times: int | None = None
    after: int = 0
    delay: float = 0.0
    error: RpcError | None = None
    messages: list[SentMessage] = field(default_factory=list)
    _passed: int = 0

    @property
    def count(self) -> int:
        """How many messages it has hit."""
        return len(self.messages)

    def end(self) -> None:
        """It hits no more."""
        self.times = 0

    def _hits(self, message: SentMessage) -> bool:
        if message.kind not in self.kinds or (self.to is not None and message.worker != self.to):
            return False
        if self.function is not None and not message.is_of(self.function):
            return False
        if self.when is not None and not self.when(message):
            return False
        if self.times is not None and len(self.messages) >= self.times:
            return False
        if self._passed < self.after:
            self._passed += 1
            return False
        self.messages.append(message)
        return True


class Faults:
    """``with Faults(worker) as faults``: what that worker sends goes by the rules, until the end of the block.

    Kinds are those of `MessageKind`; none means every call ("call", "remote" and "fetch"). Common to all rules:

    to: only messages to the worker of that name. function: only calls of that function (or of that name), and answers
    to them. when: only messages for which it returns True. after: so many that match pass first. times: so many are
    hit, None for all that follow. The first rule that hits a message decides. Any thread.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._rules: list[Fault] = []
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []
        self._ways: dict[object, Way] = {}

    # --- rules --------------------------------------------------------------------------------------------------------

    def drop(self, *kinds: str, **chosen: Unpack[Choice]) -> Fault:
        """Such messages are lost on their way, and nobody is told: a call ends when its timeout passes.

        aiorpc's connections lose nothing while they last, so a reference inside of a lost message, or one whose
        counting is disturbed, stays counted until a worker leaves.
        """
        return self._add(Fault("drop", _kinds(kinds), **chosen))

    def delay(self, seconds: float, *kinds: str, **chosen: Unpack[Choice]) -> Fault:
        """Such messages leave so many seconds later. A timeout that passes meanwhile ends the call as usual."""
        return self._add(Fault("delay", _kinds(kinds), delay=checked_seconds(seconds, "seconds"), **chosen))

    def fail(self, *kinds: str, error: RpcError | None = None, **chosen: Unpack[Choice]) -> Fault:
        """Such calls cannot be sent: their Futures get the error at once, and the callee hears nothing.

        error: an `RpcError` of any kind, to which the call is added; one that says it was on purpose if None.
        RpcUsageError for a kind that nobody waits for ("reply", "item", "cancel", "reference").
        """
        unheard = _kinds(kinds) - _CALLS
        if unheard:
            raise RpcUsageError(f"nobody is told when these cannot be sent: {', '.join(sorted(unheard))}")
        return self._add(Fault("fail", _kinds(kinds), error=error, **chosen))

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._rules.append(fault)
        return fault

    def find(self, message: SentMessage) -> Fault | None:
        """The rule that hits a message, which counts it."""
        with self._lock:
            return next((rule for rule in self._rules if rule._hits(message)), None)

    # --- a worker that dies -------------------------------------------------------------------------------------------

    async def kill(self, to: To) -> None:
        """End a worker as if its process had died: no goodbye, and what it was about to send is lost.

        Its process is killed, if that is another one of this host. A worker of this process loses its connections and
        is closed; threads that run its handlers go on until these return, as nothing can end a thread. RpcUsageError
        for a worker of another host.
        """
        peer = self.worker.peers.find(to)
        record = peer.record
        if record is None:
            raise RpcUsageError(f"worker {peer.name!r} has not joined yet")
        for worker in registry.workers():
            if worker.record.incarnation == record.incarnation:
                await _end(worker)
                return
        if record.host != self.worker.record.host or record.pid == os.getpid():
            raise RpcUsageError(f"{record.describe()} is not in this process or on this host")
        os.kill(record.pid, signal.SIGKILL)

    # --- in place, and not --------------------------------------------------------------------------------------------

    def __enter__(self) -> Faults:
        self.worker.check_open()
        peers = self.worker.peers
        if "find" in vars(peers):
            raise RpcUsageError(f"{self.worker!r} has faults already; add rules to those")
        for name in ("find", "of", "by_id", "add"):
            self.put(peers, name, partial(self._found, getattr(peers, name)))
        self.put(self.worker, "add_service", partial(self._served, self.worker.add_service))
        self.put(self.worker, "is_idle", partial(self._is_idle, self.worker.is_idle))
        for peer in peers.all():
            self._cover_peer(peer)
        for service in list(self.worker.services):
            self._cover_service(service)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._rules.clear()
            ways = list(self._ways.values())
        for way in ways:
            way.flush()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        for way in ways:  # what came between
            way.flush()

    def put(self, where: object, name: str, function: Callable[..., Any]) -> None:
        """In front of a method of that object alone."""
        setattr(where, name, function)
        self._undo.append(lambda: delattr(where, name))

    def _found(self, method: Callable[..., Peer], *args: Any) -> Peer:
        peer = method(*args)
        self._cover_peer(peer)
        return peer

    def _served(self, method: Callable[..., Service], *args: Any) -> Service:
        service = method(*args)
        self._cover_service(service)
        return service

    def _is_idle(self, method: Callable[[], bool]) -> bool:
        """What waits is on its way: a worker that leaves in good order stays until it has been sent."""
        return method() and not any(way.waiting for way in list(self._ways.values()))

    def _cover_peer(self, peer: Peer) -> None:
        with self._lock:
            if peer not in self._ways:
                self._ways[peer] = Calls(self, peer)

    def _cover_service(self, service: Service) -> None:
        with self._lock:
            if service not in self._ways:
                self._ways[service] = Answers(self, service)


def _kinds(names: Sequence[str]) -> frozenset[MessageKind]:
    try:
        chosen = frozenset(MessageKind(name) for name in names)
    except ValueError:
        known = ", ".join(MessageKind)
        raise RpcUsageError(f"there are messages of the kinds {known}; not {', '.join(map(repr, names))}") from None
    return chosen or frozenset((MessageKind.CALL, MessageKind.REMOTE, MessageKind.FETCH))


async def _end(worker: Worker) -> None:
    if worker.own_loop is not None and threading.get_ident() != worker.thread:
        await worker.own_loop.run_async(_end_on_loop(worker))
        worker.own_loop.close()
    else:
        await _end_on_loop(worker)
    # Others of this process cannot see it end: they are told what a look at a process would have told them.
    for other in registry.workers():
        known = other.group.members.get(worker.id)
        if known is not None and known.incarnation == worker.record.incarnation:
            other.call_on_loop(other.group._on_process_exit, known)


async def _end_on_loop(worker: Worker) -> None:
    for connection in list(worker.connections):
        connection.abort()  # without a cause, so that nobody is taken for lost here
    if worker.rendezvous is not None:
        worker.rendezvous.leave = lambda record: None  # type: ignore[method-assign]  # nor do they sign off
    await worker._close()
