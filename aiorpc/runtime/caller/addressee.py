"""Another worker, as messages are sent to it: which one it is, its state, and the connection that it needs.

The states, and which thread may bring it from one to the next, are the table `protocol.states.PEER`; the fields that go
with them are changed under `_lock`. `fail` alone makes it GONE, and the error that it is given ends every call that is
pending then or is made later.

Invariants
1. GONE is final: a worker that comes back under the same name is a new one (it has another incarnation).
2. A thread that holds the lock of the references may send here, and sending takes `_lock`. So nothing that holds
   `_lock` may take the lock of the references.
3. While there is no link, messages wait in `_waiting`. `ready` posts them in their order under the lock, and a
   thread that sends meanwhile waits for the lock, so that no message overtakes them.
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
from ...protocol.messages import Cancel, Goodbye, Recorded, read_goodbye, write
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
from .arriving import Arriving
from .arriving import Home as ArrivingHome
from .future import CallFuture
from .known import KnownFunctions
from .pending import PendingCalls
from .waiting import Form, WaitingCall, WaitingFrame, WaitingMessages, nothing


class ReferencesForPeer(Protocol):
    """The references of the worker, as far as peers need them: for references in answers."""

    def load(self, passed: Sequence[PassedReference], sender: int) -> Sequence[object]:
        """Handles of the references in a message from `sender`."""


class Home(ArrivingHome, Protocol):
    """What an addressee needs of the worker that sends to it."""

    gradients: Gradients

    @property
    def references(self) -> ReferencesForPeer: ...

    def connect(self, peer: Any) -> None:
        """Begin to connect to that `Peer`, on the loop. `attach` and then `ready` follow, or `fail`."""

    def on_goodbye(self, record: WorkerRecord, sure: bool, failed: str) -> None:
        """That worker has said that it leaves. sure: it was it for sure that has said so. On the loop."""


class Addressee:
    """Another worker, as messages are sent to it; `Peer` makes the calls. See the module.

    name, record: of the worker; the record is None until it is known where the worker is. known: the functions that it
    knows by number. same_main: whether it runs the same main module as this worker, so that what that defines can go by
    name; true until it is known. other_python: its minor version of Python where that is known and not ours. safe:
    whether it reads no pickles, as this worker. devices: whether this worker has devices on which tensors may arrive.
    route: where tensors on devices go; None if tensors need not be looked at. gone: the error that calls end with, once
    it is GONE, and ended: when that was; parting: what that will be, while answers may still come from one that has
    left. trouble: what has been in the way of a connection to it last, if that is known. former: who had the name
    before; made: when this one was. Times are ``time.monotonic()`` seconds.
    """

    def __init__(
        self, home: Home, deadlines: Deadlines, name: str, record: WorkerRecord | None, former: Self | None = None
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
        }
        self.on_failed: Callable[[Frame, Exception], None] = self._arriving.on_failed
        self._home = home
        self._lifetime = home.engine.lifetime
        self._waiting = WaitingMessages()
        # It may be taken twice by one thread: a message that cannot be sent is called off while the lock is held.
        self._lock = RLock()

    def rename(self, name: str) -> None:
        """The worker's name is known now, and with it the device map that leads to the worker."""
        self.name = name
        self.route = self.accelerators.route_to(name)

    def identify(self, record: WorkerRecord) -> None:
        """It is known now which worker it is."""
        if record.main != self.engine.record.main:
            self.same_main = False
            self.known.forget_main()
        self.other_python = record.minor if record.minor != self.engine.record.minor else ""
        self.former = None
        self.record = record  # at last: a thread that sees it relies on the above

    @property
    def as_torch(self) -> bool:
        """Whether programs for torch make the calls."""
        return self._home.gradients.as_torch

    def describe(self) -> str:
        """Name, rank, host and pid, for errors."""
        return self.record.describe() if self.record is not None else f"worker {self.name!r}"

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, kind: int, call_id: int, body: bytes, *, urgent: bool = False, later: bool = False) -> None:
        """Send a message without buffers, connecting first if need be. Any thread; dropped when the peer is gone.

        later: it leaves with the next one, or with `flush`, whichever comes first.
        """
        frame = encode_frame(kind, call_id, body)
        link = self.link
        if link is None or self.connection is None:
            self.send_later(WaitingFrame(kind, call_id, frame))
        else:
            link.send(kind, call_id, frame, urgent=urgent, more=later)

    def flush(self) -> None:
        """Send what is queued. On the loop."""
        if self.connection is not None:
            self.connection.flush()

    def send_later(self, message: WaitingFrame) -> None:
        """Keep a message until there is a link; send it if there is one by now. Any thread."""
        if not message.passed and self.record is not None and self.engine.observers:
            # It leaves as far as its sender is concerned; once there is a link no observer is asked again.
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
        """Tell the observers of calls of a step of the call that is in that message."""
        if self.engine.call_observers and message.call is not None and message.call_id in self.pending.calls:
            self.pending.tell(step, message.call)

    def send_buffers(self, message: WaitingCall) -> None:
        """Send a call that has buffers: from here, or from a thread if that takes too long here. Any thread."""
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
            if link is None:  # gone again, and the call with it
                return
        if message.otherwise is not None:  # it has become known just now
            formed = self._formed(message)
            if formed is None:
                return
            message = formed
        if link.distribution.too_long_for_loop(message.buffers):
            self.engine.in_background(self.post, link, self._settled(message))
        else:
            self.post(link, message)

    def _settled(self, message: WaitingCall) -> WaitingCall:
        """The same message, ready to be sent later or by another thread: buffers on devices are cloned now."""
        if self.route is None:
            return message
        settled, other = self.accelerators.settled, message.otherwise
        if isinstance(other, Form):
            other = other._replace(buffers=settled(other.buffers))
        return message._replace(buffers=settled(message.buffers), otherwise=other)

    def post(self, link: Link, message: WaitingCall, copies: Copies | None = None) -> None:
        """Send a call over that link, unless it has ended meanwhile. copies: of buffers that others get. Any thread."""
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
            self.call_off(call_id, expired)  # the word that it was given up may have come before it

    def _not_sent(self, error: BaseException) -> RpcError:
        if type(error) is SerializationError:  # it is longer than the other end takes
            return SerializationError(f"a call to worker {self.name!r} cannot be sent: it {error}")
        return RpcError(f"a call to {self.describe()} could not be sent: {foreign.said(error)}")

    def _wait(self, message: WaitingCall | WaitingFrame) -> None:
        if self.gone is None:
            self._waiting.add(message)
            if self.state is PeerState.IDLE:
                self.state = PEER.next(self.state, PeerEvent.FIRST_MESSAGE)
                self.engine.call_on_loop(self._home.connect, self)

    def _formed(self, message: WaitingCall) -> WaitingCall | None:
        """The same message in the form for the worker, now that it is known; None if it has none: its call ends."""
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
        """What that is of does not leave."""
        if out is not None:
            # Not here: `ready` holds our lock, and who holds that of the references may wait for it.
            self.engine.call_on_loop(out.unsend)

    @property
    def unsent(self) -> int:
        """How many messages wait to be sent. Any thread."""
        connection = self.connection
        return len(self._waiting) if connection is None else len(connection.queue.frames) + len(connection.queue.begun)

    # --- giving up ----------------------------------------------------------------------------------------------------

    def call_off(self, call_id: int, expired: bool = False) -> None:
        """A call has ended without its answer: take it back, or tell the callee. Any thread.

        expired: whether its time is up.
        """
        if not self._take_back(call_id):
            link = self.link
            if link is not None:
                link.distribution.give_up(call_id)
            self.send(Kind.CANCEL, call_id, write(Cancel(expired)))

    def take_back(self, call_id: int) -> bool:
        """Forget a call that waits for its worker to join, so that it is not sent; its Future never settles then.

        False if the call may have been sent, or has ended. Any thread.
        """
        return self._take_back(call_id) and self.pending.end(call_id, CallOutcome.CANCELLED) is not None

    def _take_back(self, call_id: int) -> bool:
        # To a worker that has not joined yet. No reference can be inside of such a call, because encoding one needs the
        # worker's id (`Peers.id_of`).
        with self._lock:
            return self.record is None and self._waiting.take_back(call_id)

    def turn_away(self, before: float, error: Callable[[], RpcError]) -> None:
        """No worker has that name: the calls made before that time end, but for those that wait. On the loop."""
        for call in list(self.pending.calls.values()):
            if not call.patient and call.started <= before:
                with self._lock:
                    self._waiting.take_back(call.call_id)
                self.pending.fail_one(call.call_id, error())

    def rest(self) -> bool:
        """Go back to IDLE if no message waits for the connection any more; True if so. On the loop."""
        with self._lock:
            if self._waiting or self.gone is not None:
                return False
            self.state = PEER.next(self.state, PeerEvent.NOBODY_WAITS)
            return True

    # --- what comes from the peer -------------------------------------------------------------------------------------

    def _on_goodbye(self, frame: Frame) -> None:
        link = self.link
        assert link is not None and self.record is not None, "a message came over it"
        link.connection.on_suspended = None  # its last word: the end of the socket is that of the connection
        why = read_goodbye(frame.body).failed
        self._home.on_goodbye(self.record, True, why)  # we have dialled it
        # No answer can follow on this connection (the goodbye may have come earlier on another).
        link.when_drained(partial(self.fail, farewell(self.record, why)))

    def load_references(self, passed: Sequence[PassedReference]) -> Sequence[object]:
        """Handles of the references in a message from this peer."""
        assert self.record is not None, "an answer came over a connection, so the peer is known"
        return self._home.references.load(passed, self.record.id)

    def track(self, said: Recorded, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Past | None]:
        """The tensors of a message from this peer, placed in the autograd graph. said: what the message says of them.

        See `Gradients.receive`.
        """
        return self._home.gradients.receive(self, said, tensors)

    # --- connection, on the loop --------------------------------------------------------------------------------------

    def attach(self, link_number: int, connection: Connection) -> None:
        """The handshake is done, and frames may come from now on. link_number: the number of the link."""
        assert self.record is not None, "the handshake was with the worker of that record"
        self.link = self._home.links.make(connection, self.record, self, number=link_number, opener=True)

    def ready(self, connection: Connection) -> None:
        """Send what has waited, in its order; from now on messages go out at once.

        `connection` is set last, under the lock: until then everybody who sends sees that there is none, and waits for
        the lock behind the messages that are posted here.
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
        """Its connection has broken and may go on, or goes on."""
        with self._lock:
            self.state = PEER.after(self.state, event) or self.state

    def link_ended(self) -> None:
        """The link has ended, and everything that it has brought has been handed on: let go of it."""
        link, self.link = self.link, None
        if link is not None:
            link.close()

    def fail(self, error: RpcError) -> None:
        """The peer is gone for good: every pending call ends with that error. On the loop. Idempotent.

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
        # Let go of the connection: it has a long buffer, and a peer that is gone is kept for its name.
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def close(self) -> None:
        """This worker leaves: say goodbye, and end the calls that are still pending. On the loop."""
        if self.connection is not None:
            self.goodbye()
            self.connection.close()
            # So that `fail` does not abort it: it ends by itself, after what is queued has been written.
            self.connection = None
        self.fail(WorkerClosed(f"worker {self.engine.name!r} shut down before the answer came"))

    def goodbye(self) -> None:
        """Tell the peer that we leave, if that takes no waiting. Any thread."""
        link = self.link
        if self.connection is not None and link is not None:
            said = write(Goodbye(self.engine.lifetime.failed))
            link.send(Kind.GOODBYE, 0, encode_frame(Kind.GOODBYE, 0, said), urgent=True)


def farewell(record: WorkerRecord, failed: str = "", when: str = "") -> PeerLeft:
    """The error that everything gets which waits for a worker that has left.

    failed: the name of the error that has ended its program, as it has said; "" for none. when: comes behind that.
    """
    left = f"left after an error ({failed})" if failed else "shut down"
    return PeerLeft(f"{record.describe()} has {left}{when}")


def _event_of(error: RpcError, state: PeerState) -> PeerEvent:
    """What has happened to a peer whose calls fail with that error from now on."""
    if type(error) is PeerLeft:
        return PeerEvent.GOODBYE
    if type(error) is WorkerClosed:
        return PeerEvent.CLOSED
    return PeerEvent.UNREACHABLE if state is PeerState.CONNECTING else PeerEvent.LOST
