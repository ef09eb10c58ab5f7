"""The caller's side of one other worker: how a call is made and sent, and the connection that it needs.

The calls that the worker owes us are in `owed`, the functions that it knows by number in `known`, and messages that
wait for a link in `waiting`.

The states of a peer, and which thread may bring it from one to the next, are the table `protocol.states.PEER`; the
fields that go with them are changed under `_lock`. `fail` alone makes a peer GONE, and the error that it is given ends
every call that is pending then or is made later.

Invariants
1. A function's number goes with its name until a reply to such a call has confirmed that the callee knows the number.
2. GONE is final: a worker that comes back under the same name is a new peer (it has another incarnation).
3. Whoever holds the lock of the references may send here, and sending takes `_lock`. So nothing that holds `_lock` may
   take the lock of the references.
4. While it is not known which worker it is, it is not known either whether that runs our main module. Calls are
   written for one that does, with the form for one that does not beside it where that is another; the link decides.
5. While there is no link, messages wait in `_waiting`. `ready` posts them in their order under the lock, and whoever
   sends meanwhile waits for the lock, so that no message overtakes them.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch

from ... import foreign
from ...callbacks import current_autograd
from ...channels.shm import Copies
from ...errors import (
    Overloaded,
    PeerClosed,
    RpcError,
    RpcUsageError,
    SerializationError,
    UnknownWorker,
    WorkerClosed,
)
from ...protocol.codec import Outgoing, Past
from ...protocol.frames import CALL, ERROR, ITEM, REPLY, Buffer, Frame, Kind, encode_frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import ByName, Call, Cancel, Fetch, Function, Method, ObjectMethod, write, write_plain
from ...protocol.packing import FLAT
from ...protocol.reference_messages import PassedReference
from ...protocol.states import PEER, PeerEvent, PeerState
from ...sites import CallSite
from ...transport.connection import Connection
from ..calls.current import current_call
from ..calls.failures import NO_VALUE, absence_behind
from ..calls.functions import describe
from ..calls.values import encode
from ..engine.deadlines import Deadlines
from ..engine.observing import Passage
from ..gradients.contexts import Gradients, Tape
from ..links.link import FEW, KindMethod, Link
from ..links.observed import ask, frame_passage
from .future import CallFuture, cannot_send
from .known import FunctionEntry, KnownFunctions
from .misuse import OF_VERBS, check_keywords, no_function, warn_of_copy
from .owed import Home as OwedHome
from .owed import ItemSink, OwedCalls
from .waiting import Form, WaitingCall, WaitingFrame, WaitingMessages, nothing

logger = logging.getLogger("aiorpc")


class ReferencesForPeer(Protocol):
    """The references of the worker, as far as peers need them: for references in answers."""

    def load(self, passed: Sequence[PassedReference], sender: int) -> Sequence[Any]:
        """Handles of the references in a message from `sender`."""


class Try(NamedTuple):
    """One try of a call with retries. site: where the call was made, None to leave that out. once: as in a Call.

    allowed: seconds that all of its tries have together; None for no limit, and where there is but this one.
    """

    site: CallSite | None
    once: tuple[int, int] | None
    allowed: float | None = None


class Home(OwedHome, Protocol):
    """What a peer needs of the worker that it belongs to."""

    gradients: Gradients

    @property
    def references(self) -> ReferencesForPeer: ...

    def connect(self, peer: Peer) -> None:
        """Begin to connect to that peer, on the loop. `Peer.attach` and then `ready` follow, or `Peer.fail`."""

    def on_goodbye(self, record: WorkerRecord, sure: bool) -> None:
        """That worker has said that it leaves. sure: it was it for sure that has said so. On the loop."""


class Peer:
    """Another worker, as it is called from here. See the module.

    name, record: of the worker; the record is None until it is known where the worker is. known: the functions that it
    knows by number. same_main: whether it runs the same main module as this worker, so that what that defines can go by
    name; true until it is known. safe: whether it reads no pickles, as this worker. devices: whether this worker has
    devices on which tensors may arrive. route: where tensors on devices go; None if tensors need not be looked at.
    gone: the error that calls end with, once the peer is GONE, and ended: when that was; parting: what that will be,
    while answers may still come from one that has left. former: the peer that had the name before; made: when this one
    was.
    Times are ``time.monotonic()`` seconds.
    """

    def __init__(
        self, home: Home, deadlines: Deadlines, name: str, record: WorkerRecord | None, former: Peer | None = None
    ) -> None:
        self.engine = home.engine
        self.accelerators = home.links.accelerators
        self.devices = self.accelerators.accelerator is not None
        self.marks = self.accelerators.arrival
        self.name = name
        self.route = self.accelerators.route_to(name)
        self.record: WorkerRecord | None = None
        self.same_main = True
        self.known = KnownFunctions(self)
        if record is not None:
            self.identify(record)
        self.state = PEER.initial
        self.safe = self.engine.safe
        self.max_body = self.engine.options.max_frame_bytes
        self.max_segment = self.engine.options.max_tensor_bytes
        self.owed = OwedCalls(home, deadlines, self)
        self.gone: RpcError | None = None
        self.parting: RpcError | None = None
        self.ended = 0.0
        self.former = former
        self.made = time.monotonic()
        self.connection: Connection | None = None
        self.link: Link | None = None
        self.methods: dict[int, KindMethod] = {
            REPLY: self.owed.on_answer,
            ERROR: self.owed.on_answer,
            ITEM: self.owed.on_item,
            Kind.GOODBYE: self._on_goodbye,
        }
        self.on_failed = self.owed.on_failed
        self.call_of = self.owed.pending.get
        self._home = home
        self._lifetime = home.engine.lifetime
        self._waiting = WaitingMessages()
        # It may be taken twice by one thread: a message that cannot be sent is called off while the lock is held.
        self._lock = threading.RLock()

    def rename(self, name: str) -> None:
        """The worker's name is known now, and with it the device map that leads to the worker."""
        self.name = name
        self.route = self.accelerators.route_to(name)

    def identify(self, record: WorkerRecord) -> None:
        """It is known now which worker it is."""
        if record.main != self.engine.record.main:
            self.same_main = False
            self.known.forget_main()
        self.former = None
        self.record = record  # at last: whoever sees it relies on the above

    def describe(self) -> str:
        """Name, rank, host and pid, for errors."""
        return self.record.describe() if self.record is not None else f"worker {self.name!r}"

    # --- calling ------------------------------------------------------------------------------------------------------

    def call(
        self,
        function: Callable[..., Any] | Method | ObjectMethod | Fetch,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: float,
        *,
        creates: Sequence[int] | None = None,
        credit: int | None = None,
        system: bool = False,
        stream: ItemSink | None = None,
        wait: bool = False,
        later: bool = False,
        depth: int = 2,
        one_try: Try | None = None,
        keeps: Any = None,
    ) -> CallFuture:
        """Send one call and return its Future at once. Any thread.

        function: a callable, or what names a method of an object, or the value of a reference. timeout: seconds, 0 for
        no limit. creates: ids of the reference whose value the result becomes. credit, stream: for a stream, how many
        items the producer may send at first, and who takes them. system: whether the call is the runtime's own. wait:
        whether it waits for the worker to join, however long that takes. later: whether a call without large arguments
        leaves with the next message, or with `flush`. depth: how many stack frames up the user's code is.
        one_try: for a call that may be tried more than once, in place of depth. keeps: a handle that lives no shorter
        than the call: where the value behind it is called, the word that it has died must not overtake the call, whose
        arguments may be long. Raises SerializationError, Overloaded, RpcUsageError for what is no function, and what
        the construction of a reference in the arguments ended with, as its time was up; nothing was sent then. If the
        peer is gone, nothing is raised here: the Future has the error.
        """
        if self._lifetime.closed:
            self._lifetime.check_open()
        owed = self.owed
        pending = owed.pending
        if not system:
            limit = self.engine.options.max_pending_calls
            connection = self.connection
            if connection is None:
                unsent = len(self._waiting)
            else:
                queue = connection.queue
                unsent = len(queue.frames) + len(queue.begun)
            # The runtime's own calls do not count: a worker that waits for the others at shutdown still makes its own.
            # Unsent frames of calls that were given up do: a peer that does not read must not fill our memory.
            if len(pending) - owed.system >= limit or unsent - len(pending) >= limit:
                raise self._overloaded(unsent)

        # How long the call may take, and as part of which call it is made: a nested call inherits the rest of the time.
        now = time.monotonic()
        deadline = now + timeout if timeout else None
        trace: int | None = None
        serving = current_call.get()
        if serving is not None and not serving.replied and serving.node is self._home:
            trace = serving.trace
            if serving.deadline is not None and (deadline is None or serving.deadline < deadline):
                deadline = serving.deadline
        tape: Tape | None = None
        autograd = current_autograd.get()
        if autograd:
            tape = None if system else self._home.gradients.calls(autograd, self, function)

        # What is called, and with which arguments.
        unknown = self.record is None
        values = list(args)
        names: list[str] | None = None
        if kwargs:
            names = list(kwargs)
            values.extend(kwargs.values())
            if not OF_VERBS.isdisjoint(kwargs) and not self._home.gradients.as_torch:
                check_keywords(function, kwargs, self.name)
        named: Function
        kind = type(function)
        if kind is Method or kind is Fetch:
            named = function  # type: ignore[assignment]  # by its type
            entry = FunctionEntry(named.name if type(named) is Method else "to_here")
        elif kind is ObjectMethod:
            named = function  # type: ignore[assignment]  # by its type
            entry = FunctionEntry(describe(function))
        else:
            try:
                entry = self.known[function]
            except TypeError:  # not hashable, so it has no name
                entry = FunctionEntry(describe(function), function=function)  # type: ignore[arg-type]  # by its type
            if entry.confirmed:
                named = entry.number
            elif entry.number >= 0:
                named = ByName(entry.number, entry.name)
            elif self.safe:
                raise self._not_by_value(entry)
            else:
                if not callable(function):
                    raise RpcUsageError(no_function(function, self.name))
                named = None
                values.insert(0, function)
                if kind is MethodType and not self._home.gradients.as_torch:
                    warn_of_copy(function, self.name, depth + 1)
        remaining = None if deadline is None else deadline - now
        once = None if one_try is None else one_try.once
        head = (named, names, remaining, trace, autograd if tape is not None else None, credit, creates, once)
        call_id = next(owed.ids)
        # Made before it is written: once that has counted references, all that may fail stands in the last `try`.
        future = CallFuture(self, entry, call_id, now, deadline, system)
        future.patient = wait
        if one_try is not None:
            future.site = one_try.site
            if one_try.allowed is not None:
                future.allowed = one_try.allowed
        elif not system:
            caller = sys._getframe(depth)
            future.site = (caller.f_code, caller.f_lasti)
        flat = not unknown and FLAT.issuperset(map(type, values))  # as `write_plain` asks, without it if they are not
        frame = write_plain(CALL, call_id, head, values, self.max_body) if flat else None
        body, out, otherwise = b"", None, None
        buffers: Sequence[Any] = ()
        if frame is None:
            try:
                body, buffers, out = encode(Call, head, values, self, self.route, tape, lends=not unknown)
            except SerializationError as error:
                absence = absence_behind(error)
                if type(absence) is UnknownWorker or isinstance(absence, NO_VALUE):
                    # Nobody to wait for, as `remote` has nobody; or nothing to pass on. A copy: others raise it, too.
                    raise copy.copy(absence) from None
                if absence is not None:
                    owed.enter(future, stream)  # it ends before it is sent: whom its reference leads to is not there
                    owed.settle(call_id, absence)
                    return future
                target = f"worker {self.name!r}"
                raise cannot_send(error, entry.name, target, named is None, len(args), names) from error.__cause__
        leaving: list[Sequence[Buffer]] | None = None
        try:
            if unknown:
                otherwise = self._for_other_main(entry, function, head, values, tape, Form(body, buffers, out))
            if out is not None and out.lent:
                owed.lent[call_id] = out.lent
            if keeps is not None:
                owed.lent[call_id] = [*owed.lent.get(call_id, ()), keeps]
            # Entered before the frame is queued: the answer may come before this function has returned.
            owed.enter(future, stream)
            link = self.link  # read once: the loop takes it away when the connection ends
            linked = link is not None and self.connection is not None
            if (
                frame is None
                and otherwise is None
                and (out is None or linked)
                and (not buffers or (link is not None and link.distribution.rides(buffers)))
            ):
                frame = encode_frame(CALL, call_id, body, buffers)
            if frame is None:
                self.send_buffers(WaitingCall(future, body, buffers, out, False, otherwise))
            elif link is None or not linked:
                self.send_later(WaitingFrame(CALL, call_id, frame, future))
            else:
                if out is not None:
                    leaving = [frame]
                urgent = len(pending) <= FEW + owed.system
                link.send(CALL, call_id, frame, urgent=urgent, more=later, call=future, undo=out, unsent=leaving)
        except BaseException:  # a signal handler has raised it: nobody will get the Future, so nobody could cancel it
            future.cancel()
            if out is not None and not out.posted and leaving != []:
                self._unsend(out)
            raise
        # `fail` may have looked through `pending` before this call was in it; `gone` is set before that look.
        if self.gone is not None:
            owed.settle(call_id, self.gone)
        return future

    def _for_other_main(
        self,
        entry: FunctionEntry,
        function: Any,
        head: tuple[Any, ...],
        values: list[Any],
        tape: Tape | None,
        form: Form,
    ) -> Form | SerializationError | None:
        """A call that was written for a worker with our main module, as one with another needs it; None if so, too.

        Or the error that it ends with, if the worker turns out to be of that kind.
        """
        if entry.of_main:
            if self.safe:
                return self._not_by_value(entry)
            head, values = (None, *head[1:]), [function, *values]
        try:
            other = Form(*encode(Call, head, values, self, self.route, tape, other_main=True))
        except SerializationError as error:
            target = f"worker {self.name!r}, which runs another main module,"
            return cannot_send(error, entry.name, target, head[0] is None, 0, None)
        if other.body == form.body:
            self._unsend(other.out)
            return None
        return other

    def _not_by_value(self, entry: FunctionEntry) -> SerializationError:
        return SerializationError(
            f"the function {entry.name} for worker {self.name!r} is not sent: it would travel by value, and "
            "this group uses safe serialization; define it at the top of a module that both workers can import"
        )

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
            self.engine.call_on_loop(self.owed.settle, message.call_id, other)  # not here: as in `post`
            return None
        return message._replace(otherwise=None)

    def _unsend(self, out: Outgoing | None) -> None:
        """What that is of does not leave."""
        if out is not None:
            # Not here: `ready` holds our lock, and who holds that of the references may wait for it.
            self.engine.call_on_loop(out.unsend)

    def refusal(self) -> Overloaded | None:
        """Why no further call of users is taken now; None if one is. As `call` decides it."""
        connection, pending = self.connection, len(self.owed.pending)
        unsent = (
            len(self._waiting) if connection is None else len(connection.queue.frames) + len(connection.queue.begun)
        )
        limit = self.engine.options.max_pending_calls
        return self._overloaded(unsent) if pending - self.owed.system >= limit or unsent - pending >= limit else None

    def _overloaded(self, unsent: int) -> Overloaded:
        pending = len(self.owed.pending)
        logger.debug("worker %r is overloaded with %d calls, %d messages unsent", self.name, pending, unsent)
        return Overloaded(
            f"{pending - self.owed.system} calls to worker {self.name!r} wait for answers, and "
            f"{max(0, unsent - pending)} frames of calls given up wait to be sent (max_pending_calls); "
            "await some before making more"
        )

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
            # It leaves as far as its sender is concerned; once there is a link nobody is asked again.
            passage = frame_passage(message.kind, message.call_id, message.frame, message.call, self.record)
            ask(self.engine.observers, passage, partial(self.send_later, message._replace(passed=True)), nothing)
            return
        with self._lock:
            link = self.link
            if self.connection is None or link is None:
                self._wait(message)
                return
        self._send_waiting(link, message)

    def _send_waiting(self, link: Link, message: WaitingFrame) -> None:
        kind, call_id, frame, call, passed = message
        link.send(kind, call_id, frame, call=call, passed=passed)

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
        call_id, owed, out = message.call_id, self.owed, message.out
        parcel = None
        try:
            if out is not None:
                out.posted = True
            urgent = len(owed.pending) <= FEW + owed.system
            if call_id in owed.pending:
                parcel = link.distribution.prepare(CALL, call_id, message.body, message.buffers, copies=copies)
        except BaseException as error:
            if not foreign.is_a(error, Exception) or foreign.from_signal(error):
                self._unsend(out)
                raise
            if isinstance(message.call, CallFuture):
                message.call.unsent = True
            failure = RpcError(f"a call to {self.describe()} could not be sent: {foreign.said(error)}")
            self.engine.call_on_loop(owed.settle, call_id, failure)  # not here: as below
        if parcel is None or call_id not in owed.pending:  # given up meanwhile
            if parcel is not None:
                link.distribution.withdraw(parcel)
            self._unsend(out)
            return
        try:
            link.post(parcel, urgent=urgent, call=message.call, undo=out, passed=message.passed)
        except BaseException:
            if parcel.unsent:  # a signal handler has raised it, before the message was queued
                link.distribution.withdraw(parcel)
                self._unsend(out)
            raise
        if call_id not in owed.pending:
            deadline = message.call.deadline
            expired = deadline is not None and deadline <= time.monotonic()
            self.call_off(call_id, expired)  # the word that it was given up may have come before it

    def _wait(self, message: WaitingCall | WaitingFrame) -> None:
        if self.gone is None:
            self._waiting.add(message)
            if self.state is PeerState.IDLE:
                try:
                    self.state = PEER.next(self.state, PeerEvent.FIRST_MESSAGE)
                    self.engine.call_on_loop(self._home.connect, self)
                except BaseException:  # a signal handler has raised it, maybe before the loop was asked
                    self.engine.call_on_loop(self._home.connect, self)
                    raise

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
        return self._take_back(call_id) and self.owed.take(call_id) is not None

    def _take_back(self, call_id: int) -> bool:
        # To a worker that has not joined yet. No reference can be inside of such a call, because encoding one needs the
        # worker's id (`Peers.id_of`).
        with self._lock:
            return self.record is None and self._waiting.take_back(call_id)

    def turn_away(self, before: float, error: Callable[[], RpcError]) -> None:
        """Nobody of that name is there: the calls made before that time end, but for those that wait. On the loop."""
        for call in list(self.owed.pending.values()):
            if not call.patient and call.started <= before:
                with self._lock:
                    self._waiting.take_back(call.call_id)
                self.owed.settle(call.call_id, error())

    def rest(self) -> bool:
        """Go back to IDLE if no message waits for the connection any more; True if so. On the loop."""
        with self._lock:
            if self._waiting or self.gone is not None:
                return False
            self.state = PEER.next(self.state, PeerEvent.NOBODY_WAITS)
            return True

    # --- what comes from the peer -------------------------------------------------------------------------------------

    def _on_goodbye(self, _: Frame) -> None:
        link = self.link
        assert link is not None and self.record is not None, "a message came over it"
        link.connection.on_suspended = None  # its last word: the end of the socket is that of the connection
        self._home.on_goodbye(self.record, True)  # we have dialled it
        # No answer can follow on this connection (the goodbye may have come earlier on another).
        link.when_drained(partial(self.fail, PeerClosed(f"{self.describe()} has shut down")))

    def load_references(self, passed: Sequence[PassedReference]) -> Sequence[Any]:
        """Handles of the references in a message from this peer."""
        assert self.record is not None, "an answer came over a connection, so the peer is known"
        return self._home.references.load(passed, self.record.id)

    def track(self, said: Any, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Past | None]:
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
            while True:  # in order; whoever calls meanwhile waits for the lock
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
        """The peer is gone for good: every call that it owes us ends with that error. On the loop. Idempotent.

        This is the only place where a peer becomes GONE.
        """
        with self._lock:
            if self.gone is not None:
                return
            self.gone = error
            self.ended = time.monotonic()
            self.state = PEER.next(self.state, _event_of(error, self.state))
            self._waiting.take_all()  # their calls end with that error
        self.owed.fail(error)
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
            link.send(Kind.GOODBYE, 0, encode_frame(Kind.GOODBYE, 0, b""), urgent=True)


def _event_of(error: RpcError, state: PeerState) -> PeerEvent:
    """What has happened to a peer whose calls fail with that error from now on."""
    if type(error) is PeerClosed:
        return PeerEvent.GOODBYE
    if type(error) is WorkerClosed:
        return PeerEvent.CLOSED
    return PeerEvent.UNREACHABLE if state is PeerState.CONNECTING else PeerEvent.LOST
