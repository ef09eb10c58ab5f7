"""The peer connection to another worker: its identity, its state, its connection, and sending messages.

The table `protocol.states.PEER` has the states, and the thread of each change; the fields that go with them change
under `_lock`. Only `fail` makes it GONE, and its error ends every pending and every later call.

Invariants
1. GONE is final: a worker that comes back under the same name is a new one, with another incarnation.
2. A thread with the lock of the references may send here, and sending takes `_lock`. So a thread with `_lock` must not
   take the lock of the references.
3. Without a link, messages wait in `_waiting`. `ready` posts them in order under the lock. A thread that sends
   meanwhile waits for the lock, so no message overtakes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import torch

from ... import foreign
from ...channels.shm import Copies
from ...errors import PeerLeft, RpcError, SerializationError, WorkerClosed
from ...futures import Marks
from ...locks import RLock
from ...protocol.codec import Outgoing, Past
from ...protocol.frames import CALL, ERROR, ITEM, REPLY, Frame, Kind, encode_frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import Cancel, Goodbye, Recorded, read_goodbye, read_parting, write
from ...protocol.reference_messages import PassedReference
from ...protocol.states import PEER, CallOutcome, PeerEvent, PeerState
from ...transport.connection import Connection
from ..engine.call_events import Step
from ..engine.deadlines import Deadlines
from ..engine.engine import Engine
from ..engine.observing import Passage, ask, frame_passage
from ..gradients.contexts import Gradients
from ..links.accelerators import Accelerators
from ..links.link import FEW, KindMethod, Link
from .arriving import Arriving, ArrivingContext
from .future import CallFuture
from .known import KnownFunctions
from .pending import PendingCalls
from .waiting import Form, WaitingCall, WaitingFrame, WaitingMessages, nothing


class ReferencesForPeer(Protocol):
    """The references of the worker, as peers need them for references in answers."""

    def load(self, passed: Sequence[PassedReference], sender: int) -> Sequence[object]:
        """Handles of the references in a message from `sender`."""


class PeerContext(ArrivingContext, Protocol):
    """The sending worker, as an addressee needs it."""

    gradients: Gradients

    @property
    def references(self) -> ReferencesForPeer: ...

    def connect(self, peer: Any) -> None:
        """Begin to connect to that `Peer`, on the loop. `attach` and then `ready` follow, or `fail`."""

    def on_goodbye(self, record: WorkerRecord, sure: bool, failed: str) -> None:
        """That worker has said goodbye. sure: the connection is proved to be its own. On the loop."""


class Addressee:
    """The peer connection to another worker; `Peer` makes the calls. See the module.

    name, record: of the worker; the record is None until it is known. known: the functions that it knows by number.
    same_main: whether it runs the same main module as this worker, whose functions then go by name; True until it is
    known. other_python: its minor version of Python, if it is known and not ours. safe: whether it reads no pickles, as
    this worker. devices: whether this worker has devices on which tensors may arrive. route: for tensors on devices;
    None if tensors need not be looked at. gone: the error that ends calls, once it is GONE; ended: since when. parting:
    the later `gone` of a worker that has left, while answers may still come. drains: whether it takes no more calls,
    and will leave. trouble: why the last try to connect
    failed, if known. former: the peer that had the name before; made: when this one was made. Times are
    ``time.monotonic()`` seconds.
    """

    def __init__(
        self,
        home: PeerContext,
        deadlines: Deadlines,
        name: str,
        record: WorkerRecord | None,
        former: Self | None = None,
    ) -> None:
        self.engine: Engine = home.engine
        self.accelerators: Accelerators = home.links.accelerators
        self.devices: bool = self.accelerators.accelerator is not None
        self.marks: Marks = self.accelerators.arrival
        self.name: str = name
        self.route = self.accelerators.route_to(name)
        self.record: WorkerRecord | None = None
        self.same_main: bool = True
        self.other_python: str = ""
        self.known: KnownFunctions = KnownFunctions(self)
        if record is not None:
            self.identify(record)
        self.state: PeerState = PEER.initial
        self.safe: bool = self.engine.safe
        self.max_body: int = self.engine.options.max_frame_bytes
        self.max_segment: int = self.engine.options.max_tensor_bytes
        self.pending: PendingCalls = PendingCalls(home.engine, deadlines, self)
        self._arriving = Arriving(home, self.pending, self)
        self.gone: RpcError | None = None
        self.parting: RpcError | None = None
        self.drains: bool = False
        self.ended: float = 0.0
        self.trouble = ""
        self.former = former
        self.made: float = time.monotonic()
        self.connection: Connection | None = None
        self.link: Link | None = None
        self.methods: dict[int, KindMethod] = {
            REPLY: self._arriving.on_answer,
            ERROR: self._arriving.on_answer,
            ITEM: self._arriving.on_item,
            Kind.GOODBYE: self._on_goodbye,
            Kind.PARTING: self._on_parting,
        }
        self.on_failed: Callable[[Frame, Exception], None] = self._arriving.on_failed
        self._home = home
        self._lifetime = home.engine.lifetime
        self._waiting = WaitingMessages()
        # Reentrant: a message that cannot be sent is called off while the lock is held.
        self._lock = RLock()

    def rename(self, name: str) -> None:
        """Set the worker's name, and with it the device map to the worker."""
        self.name = name
        self.route = self.accelerators.route_to(name)

    def identify(self, record: WorkerRecord) -> None:
        """Set the worker's record."""
        if record.main != self.engine.record.main:
            self.same_main = False
            self.known.forget_main()
        self.other_python = record.minor if record.minor != self.engine.record.minor else ""
        self.former = None
        self.record = record  # last: a thread that sees it relies on the lines above

    @property
    def as_torch(self) -> bool:
        """Whether the calls come from programs for torch."""
        return self._home.gradients.as_torch

    def describe(self) -> str:
        """Name, rank, host and pid, for errors."""
        return self.record.describe() if self.record is not None else f"worker {self.name!r}"

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, kind: int, call_id: int, body: bytes, *, urgent: bool = False, later: bool = False) -> None:
        """Send a message without buffers, connecting first if need be. Any thread; dropped when the peer is gone.

        later: it leaves with the next message, or with `flush`.
        """
        frame = encode_frame(kind, call_id, body)
        link = self.link
        if link is None or self.connection is None:
            self.send_later(WaitingFrame(kind, call_id, frame))
        else:
            link.send(kind, call_id, frame, urgent=urgent, more=later)

    def flush(self) -> None:
        """Send queued messages. On the loop."""
        if self.connection is not None:
            self.connection.flush()

    def send_later(self, message: WaitingFrame) -> None:
        """Keep a message until there is a link; send it if there is one already. Any thread."""
        if not message.passed and self.record is not None and self.engine.observers:
            # Observers see it now, and not again when there is a link.
            passage = frame_passage(message.kind, message.call_id, message.frame, message.call, self.record)
            ask(self.engine.observers, passage, partial(self.send_later, message._replace(passed=True)), nothing)
            return
        self._tell_of(message, "queued")
        with self._lock:
            link = self.link
            if self.connection is None or link is None:
                self._wait(message)
                return
        self._send_waiting(link, message)

    def _send_waiting(self, link: Link, message: WaitingFrame) -> None:
        kind, call_id, frame, call, passed = message
        self._tell_of(message, "running")
        link.send(kind, call_id, frame, call=call, passed=passed)

    def _tell_of(self, message: WaitingCall | WaitingFrame, step: Step) -> None:
        """Call the observers for a step of the message's call."""
        if self.engine.call_observers and message.call is not None and message.call_id in self.pending.calls:
            self.pending.tell(step, message.call)

    def send_buffers(self, message: WaitingCall) -> None:
        """Send a call with buffers, in a background thread if it takes too long. Any thread."""
        link = self.link
        if self.connection is None or link is None:
            formed = self._settled(message) if self.record is None else self._formed(self._settled(message))
            if formed is None:
                return
            message = formed
            if not message.passed and self.record is not None and self.engine.observers:
                size = len(message.body) + sum(map(len, message.buffers))
                passage = Passage(CALL, message.call_id, message.body, size, message.call, self.record)
                again = partial(self.send_buffers, message._replace(passed=True))
                ask(self.engine.observers, passage, again, message.out.unsend if message.out is not None else nothing)
                return
            self._tell_of(message, "queued")
            with self._lock:
                link = self.link
                if self.connection is None:
                    self._wait(message)
                    return
            if link is None:  # the link has ended, and the call with it
                return
        if message.otherwise is not None:  # the worker has just become known
            formed = self._formed(message)
            if formed is None:
                return
            message = formed
        if link.distribution.too_long_for_loop(message.buffers):
            self.engine.in_background(self.post, link, self._settled(message))
        else:
            self.post(link, message)

    def _settled(self, message: WaitingCall) -> WaitingCall:
        """The message for sending later or in another thread: with clones of buffers on devices."""
        if self.route is None:
            return message
        settled, other = self.accelerators.settled, message.otherwise
        if isinstance(other, Form):
            other = other._replace(buffers=settled(other.buffers))
        return message._replace(buffers=settled(message.buffers), otherwise=other)

    def post(self, link: Link, message: WaitingCall, copies: Copies | None = None) -> None:
        """Send a call over a link, unless the call has ended. copies: of buffers for several receivers. Any thread."""
        call_id, pending, out = message.call_id, self.pending, message.out
        envelope = None
        if out is not None:
            out.posted = True
        try:
            if call_id in pending.calls:
                envelope = link.distribution.prepare(CALL, call_id, message.body, message.buffers, copies=copies)
        except Exception as error:
            if isinstance(message.call, CallFuture):
                message.call.unsent = True
            self.engine.call_on_loop(pending.fail_one, call_id, self._not_sent(error))  # not here: as in `_unsend`
        if envelope is None or call_id not in pending.calls:  # given up meanwhile
            if envelope is not None:
                link.distribution.withdraw(envelope)
            self._unsend(out)
            return
        self._tell_of(message, "running")
        urgent = len(pending.calls) <= FEW + pending.system
        link.post(envelope, urgent=urgent, call=message.call, undo=out, passed=message.passed)
        if call_id not in pending.calls:
            deadline = message.call._deadline
            expired = deadline is not None and deadline <= time.monotonic()
            self.call_off(call_id, expired)  # the CANCEL may have left before the call

    def _not_sent(self, error: BaseException) -> RpcError:
        if type(error) is SerializationError:  # longer than the other end takes
            return SerializationError(f"a call to worker {self.name!r} cannot be sent: it {error}")
        return RpcError(f"a call to {self.describe()} could not be sent: {foreign.said(error)}")

    def _wait(self, message: WaitingCall | WaitingFrame) -> None:
        if self.gone is None:
            self._waiting.add(message)
            if self.state is PeerState.IDLE:
                self.state = PEER.next(self.state, PeerEvent.FIRST_MESSAGE)
                self.engine.call_on_loop(self._home.connect, self)

    def _formed(self, message: WaitingCall) -> WaitingCall | None:
        """The message in the form for the worker, which is known now; None if there is none, which ends the call."""
        other = message.otherwise
        if isinstance(other, Form) and not self.same_main:
            self._unsend(message.out)
            return message._replace(body=other.body, buffers=other.buffers, out=other.out, otherwise=None)
        if isinstance(other, Form):
            self._unsend(other.out)
        elif other is not None and not self.same_main:
            self._unsend(message.out)
            self.engine.call_on_loop(self.pending.fail_one, message.call_id, other)  # not here: as in `post`
            return None
        return message._replace(otherwise=None)

    def _unsend(self, out: Outgoing | None) -> None:
        """Undo the encoding of a message that does not leave."""
        if out is not None:
            # On the loop: `ready` holds our lock, and a thread with the lock of the references may wait for it.
            self.engine.call_on_loop(out.unsend)

    @property
    def unsent(self) -> int:
        """How many messages wait to be sent. Any thread."""
        connection = self.connection
        return len(self._waiting) if connection is None else len(connection.queue.frames) + len(connection.queue.begun)

    # --- giving up ----------------------------------------------------------------------------------------------------

    def call_off(self, call_id: int, expired: bool = False) -> None:
        """A call has ended without its answer: take it back, or send CANCEL. Any thread.

        expired: whether its time is up.
        """
        if not self._take_back(call_id):
            link = self.link
            if link is not None:
                link.distribution.give_up(call_id)
            self.send(Kind.CANCEL, call_id, write(Cancel(expired)))

    def take_back(self, call_id: int) -> bool:
        """Forget a call that waits for its worker to join. It is not sent, and its Future never settles.

        False if the call may have been sent, or has ended. Any thread.
        """
        return self._take_back(call_id) and self.pending.end(call_id, CallOutcome.CANCELLED) is not None

    def _take_back(self, call_id: int) -> bool:
        # The worker has not joined yet. Such a call has no references, because these need the worker's id
        # (`Peers.id_of`).
        with self._lock:
            return self.record is None and self._waiting.take_back(call_id)

    def turn_away(self, before: float, error: Callable[[], RpcError]) -> None:
        """No worker has that name: end the calls made before that time, except those with ``wait``. On the loop."""
        for call in list(self.pending.calls.values()):
            if not call.patient and call.started <= before:
                with self._lock:
                    self._waiting.take_back(call.call_id)
                self.pending.fail_one(call.call_id, error())

    def rest(self) -> bool:
        """Go back to IDLE, and return True, if no message waits for the connection. On the loop."""
        with self._lock:
            if self._waiting or self.gone is not None:
                return False
            self.state = PEER.next(self.state, PeerEvent.NOBODY_WAITS)
            return True

    # --- what comes from the peer -------------------------------------------------------------------------------------

    def _on_goodbye(self, frame: Frame) -> None:
        link = self.link
        assert link is not None and self.record is not None, "a message came over it"
        link.connection.on_suspended = None  # the socket's end now ends the connection
        why = read_goodbye(frame.body).failed
        self._home.on_goodbye(self.record, True, why)  # this worker opened the connection
        # No answer can follow on this connection (the goodbye may have come earlier on another).
        link.when_drained(partial(self.fail, farewell(self.record, why)))

    def _on_parting(self, frame: Frame) -> None:
        read_parting(frame.body)
        self.drains = True

    def load_references(self, passed: Sequence[PassedReference]) -> Sequence[object]:
        """Handles of the references in a message from this peer."""
        assert self.record is not None, "an answer came over a connection, so the peer is known"
        return self._home.references.load(passed, self.record.id)

    def track(self, said: Recorded, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Past | None]:
        """The tensors of a message from this peer, placed in the autograd graph. said: the message's entries about
        them.

        See `Gradients.receive`.
        """
        return self._home.gradients.receive(self, said, tensors)

    # --- connection, on the loop --------------------------------------------------------------------------------------

    def attach(self, link_number: int, connection: Connection) -> None:
        """Make the link after the handshake: frames may come from now on."""
        assert self.record is not None, "the handshake was with the worker of that record"
        self.link = self._home.links.make(connection, self.record, self, number=link_number, opener=True)

    def ready(self, connection: Connection) -> None:
        """Send the waiting messages in their order; later messages leave at once.

        `connection` is set last, under the lock: until then sending threads see none, and wait for the lock behind the
        messages posted here.
        """
        with self._lock:
            link = self.link
            assert link is not None, "it was made when the connection was"
            while True:  # in order; a thread that calls meanwhile waits for the lock
                if not self._waiting:
                    break
                for each in self._waiting.take_all():
                    if isinstance(each, WaitingFrame):
                        self._send_waiting(link, each)
                        continue
                    call = self._formed(each)
                    if call is None:
                        continue
                    if link.distribution.too_long_for_loop(call.buffers):
                        self.engine.in_background(self.post, link, call)
                        continue
                    self.post(link, call)
            self.connection = connection
            self.state = PEER.next(self.state, PeerEvent.CONNECTED)

    def on_line(self, event: PeerEvent) -> None:
        """Its connection was suspended or resumed."""
        with self._lock:
            self.state = PEER.after(self.state, event) or self.state

    def link_ended(self) -> None:
        """Drop the link: it has ended, and all its messages were handed on."""
        link, self.link = self.link, None
        if link is not None:
            link.close()

    def fail(self, error: RpcError) -> None:
        """The peer is gone for good: end every pending call with that error. On the loop. Idempotent.

        This is the only place where a peer becomes GONE.
        """
        with self._lock:
            if self.gone is not None:
                return
            self.gone = error
            self.ended = time.monotonic()
            self.state = PEER.next(self.state, _event_of(error, self.state))
            self._waiting.take_all()  # their calls end with that error
        self.pending.fail(error)
        # Drop the connection and its long buffer: the peer itself is kept for its name.
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def close(self) -> None:
        """This worker leaves: say goodbye, and end the calls that are still pending. On the loop."""
        if self.connection is not None:
            self.goodbye()
            self.connection.close()
            # `fail` must not abort it: it ends after the queue is written.
            self.connection = None
        self.fail(WorkerClosed(f"worker {self.engine.name!r} shut down before the answer came"))

    def goodbye(self) -> None:
        """Say goodbye to the peer, if that takes no waiting. Any thread."""
        link = self.link
        if self.connection is not None and link is not None:
            said = write(Goodbye(self.engine.lifetime.failed))
            link.send(Kind.GOODBYE, 0, encode_frame(Kind.GOODBYE, 0, said), urgent=True)


def farewell(record: WorkerRecord, failed: str = "", when: str = "") -> PeerLeft:
    """The error for everything that waits for a worker that has left.

    failed: the name of the error that ended its program, from its goodbye; "" for none. when: the end of the text.
    """
    left = f"left after an error ({failed})" if failed else "shut down"
    return PeerLeft(f"{record.describe()} has {left}{when}")


def _event_of(error: RpcError, state: PeerState) -> PeerEvent:
    """The event of a peer whose calls fail with that error."""
    if type(error) is PeerLeft:
        return PeerEvent.GOODBYE
    if type(error) is WorkerClosed:
        return PeerEvent.CLOSED
    return PeerEvent.UNREACHABLE if state is PeerState.CONNECTING else PeerEvent.LOST
