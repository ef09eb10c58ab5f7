"""Fault injection for tests: drop, delay or refuse messages of one worker, and kill workers.

`Faults` is an observer of the messages that pass the worker's links (`engine.observing`). A worker without faults pays
nothing.

Invariants
1. A rule is asked once for each message, under a lock; only the messages' order decides which ones it hits.
2. The runtime's own calls (joining, leaving, news of losses) are never hit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from ..errors import RpcError, RpcUsageError
from ..locks import Lock
from ..logs import logger
from ..options import seconds as checked_seconds
from ..runtime.caller.future import CallFuture
from ..runtime.caller.member_call import MemberCall
from ..runtime.caller.peers import To
from ..runtime.engine.observing import Passage
from ..runtime.node import Node, registry
from ..worker import Worker
from .passing import Lanes, MessageKind, SentMessage, describe, lane_of

# Their senders wait for an answer, so sending them can fail.
_CALLS = frozenset((MessageKind.CALL, MessageKind.REMOTE, MessageKind.FETCH, MessageKind.GRADIENT, MessageKind.CONTEXT))


class Choice(TypedDict, total=False):
    """Which messages of its kinds a rule of `Faults` hits.

    to: only messages to the worker of that name.
    function: only calls of that function (or of that name), and answers to them.
    when: only messages for which it returns True; if it raises, the rule ends, and the end of the block raises the
        error.
    after: so many that match pass first.
    times: so many are hit, None for all that follow.
    """

    to: str | None
    function: object
    when: Callable[[SentMessage], bool] | None
    times: int | None
    after: int


@dataclass(eq=False)
class Fault:
    """One rule, as a method of `Faults` made it.

    action: what happens to a message. kinds: of messages. to: only messages to this worker; None: to any.
    function: only messages of this function, or of its name. when: only messages for which it returns True.
    times: how many it hits, None for all. after: how many it lets pass first. delay: seconds. error: of a refusal.
    messages: those that it has hit.
    """

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
    _raised: Exception | None = None  # by `when`

    def __post_init__(self) -> None:
        """Raises RpcUsageError for a choice that no message can meet."""
        if self.to is not None and not isinstance(self.to, str):
            raise RpcUsageError(f"to is the name of a worker, not {self.to!r:.80}")
        if self.when is not None and not callable(self.when):
            raise RpcUsageError(f"when is a function of a SentMessage, not {self.when!r:.80}")
        if self.function is not None and not isinstance(self.function, str) and not callable(self.function):
            raise RpcUsageError(f"function is a function, or the name of one, not {self.function!r:.80}")
        for name, value in (("times", 0 if self.times is None else self.times), ("after", self.after)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise RpcUsageError(f"{name} is a number of messages, not {value!r:.80}")

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
        if self.when is not None and not self._chosen(self.when, message):
            return False
        if self.times is not None and len(self.messages) >= self.times:
            return False
        if self._passed < self.after:
            self._passed += 1
            return False
        self.messages.append(message)
        return True

    def _chosen(self, when: Callable[[SentMessage], bool], message: SentMessage) -> bool:
        """The result of `when`. If it raises, the rule ends, and the sender of the message does not see the error."""
        try:
            return self._raised is None and when(message)
        except Exception as error:
            self._raised = error
            logger.error("the function `when` of a fault raised, which hits no more", exc_info=error)
            return False


class Faults:
    """``with Faults(worker) as faults``: rules for messages that the worker sends, until the end of the block.

    A rule is for some kinds of messages (`MessageKind`); by default for every call ("call", "remote" and "fetch").
    `Choice` selects among them. The first rule that hits a message decides. Any thread.

    Raised by a rule: RpcUsageError for a choice that no message could meet.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._node = worker._node
        self._at_work = _AtWork(self._node)

    # --- rules --------------------------------------------------------------------------------------------------------

    def drop(self, *kinds: str, **chosen: Unpack[Choice]) -> Fault:
        """Lose such messages silently: a call ends when its timeout passes.

        aiorpc's connections lose nothing while they last, so a reference inside of a lost message, or one whose
        counting is disturbed, stays counted until a worker leaves.
        """
        return self._add(Fault("drop", _kinds(kinds), **chosen))

    def delay(self, seconds: float, *kinds: str, **chosen: Unpack[Choice]) -> Fault:
        """Send such messages later by some seconds. A timeout that passes meanwhile ends the call as usual."""
        return self._add(Fault("delay", _kinds(kinds), delay=checked_seconds(seconds, "seconds"), **chosen))

    def fail(self, *kinds: str, error: RpcError | None = None, **chosen: Unpack[Choice]) -> Fault:
        """Refuse to send such calls: their Futures get the error at once, and the callee hears nothing.

        error: an `RpcError` of any kind, to which the call is added; None for an RpcError that says "on purpose".
        RpcUsageError for a kind without an answer ("reply", "item", "cancel", "reference").
        """
        if error is not None and not isinstance(error, RpcError):
            raise RpcUsageError(f"error must be an RpcError, the base of all errors of sending, not {error!r:.80}")
        unheard = _kinds(kinds) - _CALLS
        if unheard:
            raise RpcUsageError(f"no caller hears that these cannot be sent: {', '.join(sorted(unheard))}")
        return self._add(Fault("fail", _kinds(kinds), error=error, **chosen))

    def _add(self, fault: Fault) -> Fault:
        self._at_work.add(fault)
        return fault

    # --- a worker that dies -------------------------------------------------------------------------------------------

    async def kill(self, to: To) -> None:
        """End a worker as if its process had died: without a goodbye, and its unsent messages are lost.

        A worker in another process of this host is killed with its process. A worker of this process loses its
        connections and is closed; its handlers in threads run to their end. RpcUsageError for a worker of another host.
        """
        peer = self._node.peers.find(to)
        record = peer.record
        if record is None:
            raise RpcUsageError(f"worker {peer.name!r} has not joined yet")
        for node in registry.nodes():
            if node.engine.record.incarnation == record.incarnation:
                await _end(node)
                return
        if record.host != self._node.engine.record.host or record.pid == os.getpid():
            raise RpcUsageError(f"{record.describe()} is not in this process or on this host")
        os.kill(record.pid, signal.SIGKILL)

    # --- in place, and not --------------------------------------------------------------------------------------------

    def __enter__(self) -> Faults:
        self._worker._check_open()
        engine = self._node.engine
        if any(isinstance(observer, _AtWork) for observer in engine.observers):
            raise RpcUsageError(f"{self._worker!r} has faults already; add rules to those")
        engine.observers = (*engine.observers, self._at_work)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        raised = self._at_work.end()
        if raised and error is None:
            raise raised[0]


class _AtWork:
    """The rules of `Faults` as an observer of the messages of a worker (`Observer`)."""

    def __init__(self, node: Node) -> None:
        self._engine = node.engine
        self._rules: list[Fault] = []
        self._lock = Lock()
        self._lanes = Lanes(node.engine)

    def add(self, fault: Fault) -> None:
        """Add a rule after the others."""
        with self._lock:
            self._rules.append(fault)

    def _find(self, message: SentMessage) -> Fault | None:
        """The rule that hits a message, which counts it."""
        with self._lock:
            return next((rule for rule in self._rules if rule._hits(message)), None)

    def end(self) -> list[Exception]:
        """Stop observing, and send waiting messages. Returns the errors that rules have raised."""
        with self._lock:
            rules = self._rules.copy()
            self._rules.clear()
        self._lanes.flush()
        self._engine.observers = tuple(observer for observer in self._engine.observers if observer is not self)
        self._lanes.flush()  # messages that came in between
        return [rule._raised for rule in rules if rule._raised is not None]

    def leaving(self, passage: Passage, send: Callable[[], None], drop: Callable[[], None]) -> None:
        """See `Observer.leaving`."""
        lane = lane_of(passage)
        if lane is None:
            send()
            return
        message = describe(passage)
        fault = self._find(message) if message is not None else None
        if fault is None:
            if not self._lanes.follow(lane, send):
                send()
        elif fault.action == "delay":
            self._lanes.hold(lane, fault.delay, send)
        else:
            drop()
            if fault.action == "fail" and isinstance(passage.call, CallFuture | MemberCall):
                name = passage.record.name
                error = fault.error or RpcError(f"a message to {name!r} could not be sent (on purpose)")
                passage.call.refuse(error)

    def holds(self) -> bool:
        """See `Observer.holds`."""
        return self._lanes.waiting


def _kinds(names: Sequence[str]) -> frozenset[MessageKind]:
    try:
        chosen = frozenset(MessageKind(name) for name in names)
    except ValueError:
        known = ", ".join(MessageKind)
        raise RpcUsageError(f"there are messages of the kinds {known}; not {', '.join(map(repr, names))}") from None
    return chosen or frozenset((MessageKind.CALL, MessageKind.REMOTE, MessageKind.FETCH))


async def _end(node: Node) -> None:
    worker: Worker = node.worker
    thread = worker._thread
    if thread is not None and threading.get_ident() != node.engine.thread:
        await thread.run_async(worker._drop())
        thread.close()
    else:
        await worker._drop()
    # Other workers of this process cannot see it end, so they are told here.
    record = node.engine.record
    for other in registry.nodes():
        known = other.group.members.get(record.id)
        if known is not None and known.incarnation == record.incarnation:
            other.engine.call_on_loop(other.group.on_process_exit, known)
