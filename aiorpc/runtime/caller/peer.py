"""The caller's side of one other worker: the connection to it, the calls it owes us, the functions it knows by number.

The states of a peer, and which thread may bring it from one to the next, are the table `protocol.states.PEER`; the
fields that go with them are changed under `_lock`. `fail` alone makes a peer GONE, and the error that it is given ends
every call that is pending then or is made later.

Invariants
1. A call is in `pending` from before its frame is queued until somebody takes it out. `dict.pop` decides who that is,
   and whoever took it out settles its Future.
2. A function's number goes with its name until a reply to such a call has confirmed that the callee knows the number.
3. GONE is final: a worker that comes back under the same name is a new peer (it has another incarnation).
4. Whoever holds the lock of the references may send here, and sending takes `_lock`. So nothing that holds `_lock` may
   take the lock of the references.
5. While there is no link, messages wait in `_waiting`. `ready` posts them in their order under the lock, and whoever
   sends meanwhile waits for the lock, so that no message overtakes them.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from ... import foreign
from ...channels.landing import Landing
from ...errors import Overloaded, PeerClosed, RpcError, RpcTimeout, SerializationError, WorkerClosed
from ...futures import current_autograd, describe_site
from ...protocol.codec import Past
from ...protocol.frames import CALL, ERROR, ITEM, REPLY, Buffer, Frame, Kind, encode_frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import ByName, Call, Fetch, Function, Method, Values, read_error, read_values
from ...protocol.reference_messages import PassedReference
from ...protocol.states import PEER, PeerEvent, PeerState
from ...transport.connection import Connection
from ..calls.current import Node, current_call
from ..calls.failures import decode_error, without_frames
from ..calls.functions import describe, find_name
from ..calls.pending import PendingCall
from ..calls.values import LARGE_PICKLE, Results, decode, encode
from ..engine.deadlines import Deadlines
from ..engine.observing import Passage
from ..gradients.contexts import Gradients, Tape
from ..links.link import FEW, Handler, Link
from ..links.links import Links
from ..links.observed import ask, frame_passage
from ..links.reassembly import Message
from .future import CallFuture, FunctionEntry, copy_for, name_argument
from .waiting import WaitingCall, WaitingFrame, is_call, nothing

logger = logging.getLogger("aiorpc")


class References(Protocol):
    """The references of the worker, as far as peers need them: for references in answers."""

    def load(self, passed: Sequence[PassedReference], sender: int) -> Sequence[Any]:
        """Handles of the references in a message from `sender`."""


class ItemSink(Protocol):
    """The consumer of a stream (`Stream`)."""

    def on_item(self, item: Values, segments: Sequence[Buffer], landing: Landing | None) -> None:
        """An item arrived; on the worker's loop."""


class Home(Node, Protocol):
    """What a peer needs of the worker that it belongs to."""

    links: Links
    gradients: Gradients

    @property
    def references(self) -> References: ...

    def connect(self, peer: Peer) -> None:
        """Begin to connect to that peer, on the loop. `Peer.attach` and then `ready` follow, or `Peer.fail`."""

    def on_goodbye(self, record: WorkerRecord) -> None:
        """That worker has said that it leaves. On the loop."""

    def read_error(self, function: str, error: BaseException) -> BaseException:
        """The error that the caller of that function is to get for the one that has arrived."""


class Peer:
    """Another worker, as it is called from here. See the module.

    name, record: of the worker; the record is None until it is known where the worker is. same_main: whether it runs
    the same main module as this worker, so that what that defines can go by name. devices: whether this
    worker has devices on which tensors may arrive. route: where tensors on devices go; None if tensors need not be
    looked at. gone: the error that calls end with, once the peer is GONE.
    """

    def __init__(self, home: Home, deadlines: Deadlines, name: str, record: WorkerRecord | None) -> None:
        self.engine = home.engine
        self.accelerators = home.links.accelerators
        self.devices = self.accelerators.accelerator is not None
        self.marks = self.accelerators.arrival
        self.name = name
        self.route = self.accelerators.route_to(name)
        self.record: WorkerRecord | None = None
        self.same_main = False
        if record is not None:
            self.identify(record)
        self.state = PEER.initial
        self.max_body = self.engine.options.max_frame_bytes
        self.max_segment = self.engine.options.max_tensor_bytes
        self.pending: dict[int, CallFuture] = {}
        # Weak: a consumer that breaks out of its loop drops the stream, and that is what stops the producer.
        self.streams: WeakValueDictionary[int, ItemSink] = WeakValueDictionary()
        self.gone: RpcError | None = None
        self.connection: Connection | None = None
        self.link: Link | None = None
        self.handlers: dict[int, Handler] = {
            REPLY: self.on_answer,
            ERROR: self.on_answer,
            ITEM: self._on_item,
            Kind.GOODBYE: self._on_goodbye,
        }
        self._home = home
        self._deadlines = deadlines
        self._lifetime = home.engine.lifetime
        self._counters = home.engine.counters
        # How many of `pending` are calls of the runtime; one of them (ENTER) lasts as long as we wait to leave.
        self._system = 0
        self._ids = itertools.count(1)
        # By the number of the call; numbers below 0 are for messages that are no calls.
        self._waiting: dict[int, WaitingCall | WaitingFrame] = {}
        self._others = itertools.count(-1, -1)
        # It may be taken twice by one thread: a message that cannot be sent is called off while the lock is held.
        self._lock = threading.RLock()
        # By function. Only functions with a name are entered, and those live as long as their module anyway.
        self._functions: dict[Any, FunctionEntry] = {}
        self._numbers = itertools.count()

    def rename(self, name: str) -> None:
        """The worker's name is known now, and with it the device map that leads to the worker."""
        self.name = name
        self.route = self.accelerators.route_to(name)

    def identify(self, record: WorkerRecord) -> None:
        """It is known now which worker it is."""
        self.record = record
        self.same_main = record.main == self.engine.record.main

    def describe(self) -> str:
        """Name, rank, host and pid, for errors."""
        return self.record.describe() if self.record is not None else f"worker {self.name!r}"

    # --- calling ------------------------------------------------------------------------------------------------------

    def call(
        self,
        function: Callable[..., Any] | Method | Fetch,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: float,
        *,
        creates: Sequence[int] | None = None,
        credit: int | None = None,
        system: bool = False,
        stream: ItemSink | None = None,
        depth: int = 2,
    ) -> CallFuture:
        """Send one call and return its Future at once. Any thread.

        function: a callable, or what names a method or the value of a reference. timeout: seconds, 0 for no limit.
        creates: ids of the reference whose value the result becomes. credit, stream: for a stream, how many items the
        producer may send at first, and who takes them. system: whether the call is the runtime's own. depth: how many
        stack frames up the user's code is. Raises SerializationError and Overloaded; nothing was sent then. If the peer
        is gone, nothing is raised here: the Future has the error.
        """
        if self._lifetime.closed:
            self._lifetime.check_open()
        pending = self.pending
        if not system:
            limit = self.engine.options.max_pending_calls
            # The runtime's own calls do not count: a worker that waits for the others at shutdown still makes its own.
            if len(pending) - self._system >= limit or self._given_up() >= limit:
                raise self._overloaded()

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
            tape = None if system else self._home.gradients.calls(autograd, self)

        # What is called, and with which arguments.
        values = list(args)
        names: list[str] | None = None
        if kwargs:
            names = list(kwargs)
            values.extend(kwargs.values())
        named: Function
        kind = type(function)
        if kind is Method or kind is Fetch:
            named = function  # type: ignore[assignment]  # by its type
            entry = FunctionEntry(named.name if type(named) is Method else "to_here")
        else:
            try:
                entry = self._functions.get(function) or self._enter(function)
            except TypeError:  # not hashable, so it has no name
                entry = FunctionEntry(describe(function), function=function)  # type: ignore[arg-type]  # by its type
            if entry.confirmed:
                named = entry.number
            elif entry.number >= 0:
                named = ByName(entry.number, entry.name)
            else:
                named = None
                values.insert(0, function)
        try:
            remaining = None if deadline is None else deadline - now
            head = (named, names, remaining, trace, autograd if tape is not None else None, credit, creates)
            body, buffers, out = encode(Call, head, values, self, self.route, tape)
        except SerializationError as error:
            what = name_argument(error.position, named is None, len(args), names, entry.name)
            raise SerializationError(f"{what} for worker {self.name!r} {error}") from error.__cause__

        future = CallFuture(self, entry, now, deadline, system)
        if not system:
            frame = sys._getframe(depth)
            future._site = (frame.f_code, frame.f_lasti)
        future.call_id = call_id = next(self._ids)
        try:
            # Entered before the frame is queued: the answer may come before this function has returned.
            pending[call_id] = future
            if system:
                self._system += 1
            else:
                self._counters.made += 1
            if stream is not None:
                self.streams[call_id] = stream
                future.streamed = True
            if deadline is not None:
                self._deadlines.add(deadline)
            link = self.link  # read once: the loop takes it away when the connection ends
            if buffers and not (link is not None and link.rides(buffers)):
                self._send_buffers(WaitingCall(future, body, buffers, out))
            else:
                whole = encode_frame(CALL, call_id, body, buffers)
                if link is None or self.connection is None:
                    self._send_later(WaitingFrame(CALL, call_id, whole, future))
                else:
                    link.send(CALL, call_id, whole, urgent=len(pending) <= FEW + self._system, call=future)
        except BaseException:  # a signal handler has raised it: nobody will get the Future, so nobody could cancel it
            future.cancel()
            raise
        # `fail` may have looked through `pending` before this call was in it; `gone` is set before that look.
        if self.gone is not None:
            self._settle(call_id, self.gone)
        return future

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"{len(self.pending) - self._system} calls to worker {self.name!r} wait for answers, and "
            f"{max(0, self._given_up())} frames of calls given up wait to be sent (max_pending_calls); "
            "await some before making more"
        )

    def _given_up(self) -> int:
        # Unsent frames of calls that nobody waits for any more: a peer that does not read must not fill our memory.
        connection = self.connection
        unsent = len(self._waiting) if connection is None else connection.unsent
        return unsent - len(self.pending)

    def _enter(self, function: Any) -> FunctionEntry:
        """The entry of a function that is called for the first time: it gets a number if it can go by name."""
        name = find_name(function, self.same_main)
        if name is None:
            return FunctionEntry(describe(function), function=function)
        return self._functions.setdefault(function, FunctionEntry(name, next(self._numbers)))

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, kind: int, call_id: int, body: bytes, *, urgent: bool = False, later: bool = False) -> None:
        """Send a message without buffers, connecting first if need be. Any thread; dropped when the peer is gone.

        later: it leaves with the next one, or with `flush`, whichever comes first.
        """
        frame = encode_frame(kind, call_id, body)
        link = self.link
        if link is None or self.connection is None:
            self._send_later(WaitingFrame(kind, call_id, frame))
        else:
            link.send(kind, call_id, frame, urgent=urgent, more=later)

    def flush(self) -> None:
        """Send what is queued. On the loop."""
        if self.connection is not None:
            self.connection.flush()

    def _send_later(self, message: WaitingFrame) -> None:
        """Keep a message until there is a link; send it if there is one by now."""
        if not message.passed and self.record is not None and self.engine.observers:
            # It leaves as far as its sender is concerned; once there is a link nobody is asked again.
            passage = frame_passage(message.kind, message.call_id, message.frame, message.call, self.record)
            ask(self.engine.observers, passage, partial(self._send_later, message._replace(passed=True)), nothing)
            return
        with self._lock:
            link = self.link
            if self.connection is None or link is None:
                self._wait(message.call_id, message)
                return
        self._send_waiting(link, message)

    def _send_waiting(self, link: Link, message: WaitingFrame) -> None:
        kind, call_id, frame, call, passed = message
        link.send(kind, call_id, frame, call=call, passed=passed)

    def _send_buffers(self, message: WaitingCall) -> None:
        """Send a call that has buffers: from here, or from a thread if that takes too long here. Any thread."""
        link = self.link
        if self.connection is None or link is None:
            message = self._settled(message)
            if not message.passed and self.record is not None and self.engine.observers:
                size = len(message.body) + sum(map(len, message.buffers))
                passage = Passage(CALL, message.call_id, message.body, size, message.call, self.record)
                again = partial(self._send_buffers, message._replace(passed=True))
                ask(self.engine.observers, passage, again, message.out.unsend if message.out is not None else nothing)
                return
            if self._hold_back(message.call_id, message):
                return
            link = self.link
            if link is None:  # gone again, and the call with it
                return
        if link.too_long_for_loop(message.buffers):
            self.engine.in_background(self._post, link, self._settled(message))
        else:
            self._post(link, message)

    def _settled(self, message: WaitingCall) -> WaitingCall:
        """The same message, ready to be sent later or by another thread: buffers on devices are cloned now."""
        if self.route is None:
            return message
        return message._replace(buffers=self.accelerators.settled(message.buffers))

    def _post(self, link: Link, message: WaitingCall) -> None:
        call_id = message.call_id
        parcel = None
        future = self.pending.get(call_id)
        try:
            if future is not None:
                parcel = link.prepare(CALL, call_id, message.body, message.buffers)
        except Exception as error:
            failure = RpcError(f"a call to {self.describe()} could not be sent: {error}")
            self.engine.call_on_loop(self._settle, call_id, failure)  # not here: as below
        if parcel is None or call_id not in self.pending:  # given up meanwhile
            if parcel is not None:
                link.withdraw(parcel)
            if message.out is not None:
                # Not here: `ready` holds our lock, and who holds that of the references may wait for it.
                self.engine.call_on_loop(message.out.unsend)
            return
        link.post(
            parcel,
            urgent=len(self.pending) <= FEW + self._system,
            call=message.call,
            undo=message.out,
            passed=message.passed,
        )
        if call_id not in self.pending:
            self._call_off(call_id)  # the word that it was given up may have come before it

    def _hold_back(self, call_id: int, message: WaitingCall) -> bool:
        """Keep a call until there is a connection; False if there is one by now. Any thread."""
        with self._lock:
            if self.connection is not None:
                return False
            self._wait(call_id, message)
            return True

    def _wait(self, call_id: int, waiting: WaitingCall | WaitingFrame) -> None:
        if self.gone is None:
            # Another message about a call (CANCEL) must not take the place of the call itself.
            key = call_id if is_call(waiting) else next(self._others)
            self._waiting[key] = waiting
            if self.state is PeerState.IDLE:
                self.state = PEER.next(self.state, PeerEvent.FIRST_MESSAGE)
                self.engine.call_on_loop(self._home.connect, self)

    # --- giving up ----------------------------------------------------------------------------------------------------

    def cancel(self, call_id: int) -> None:
        """The caller of that call has given up: forget it and tell the callee. Any thread."""
        self.streams.pop(call_id, None)
        if self._take(call_id) is not None:
            self._call_off(call_id)

    def _call_off(self, call_id: int) -> None:
        # A call to a worker that has not joined yet is just taken back. No reference can be inside of it, because
        # encoding one needs the worker's id (`Peers.id_of`).
        with self._lock:
            taken_back = self.record is None and self._waiting.pop(call_id, None) is not None
        if not taken_back:
            link = self.link
            if link is not None:
                link.give_up(call_id)
            self.send(Kind.CANCEL, call_id, b"")

    def rest(self) -> bool:
        """Go back to IDLE if no message waits for the connection any more; True if so. On the loop."""
        with self._lock:
            if self._waiting or self.gone is not None:
                return False
            self.state = PEER.next(self.state, PeerEvent.NOBODY_WAITS)
            return True

    def _take(self, call_id: int) -> CallFuture | None:
        """Take a call out of `pending`, which ends it; None if somebody else has ended it before. Any thread."""
        future = self.pending.pop(call_id, None)
        if future is not None and future.system:
            self._system -= 1
        return future

    def scan_deadlines(self, now: float) -> float:
        """End the calls whose deadline has passed; the earliest deadline of the rest, or infinity. On the loop."""
        following = float("inf")
        due = []
        # Not items(): making its pairs can start the garbage collector, and with it other threads, in mid-iteration.
        for future in list(self.pending.values()):
            deadline = future.deadline
            if deadline is None:
                continue
            if deadline <= now:
                due.append(future.call_id)
            elif deadline < following:
                following = deadline
        for call_id in due:
            self._expire(call_id)
        return following

    def _expire(self, call_id: int) -> None:
        future = self._take(call_id)
        if future is None:
            return
        self.streams.pop(call_id, None)
        self._time_out(future)
        self._call_off(call_id)

    def _time_out(self, future: CallFuture) -> None:
        assert future.deadline is not None
        self._counters.timed_out += 1
        seconds = round(future.deadline - future.started, 6)  # what was asked for, not 0.09999999999854481
        state = "" if self.state is PeerState.READY else f"; there is no connection to it yet ({self.state.value})"
        future._settle(
            None,
            RpcTimeout(
                f"RPC ran for more than set timeout ({seconds:g} s): {future.describe()} got no answer{state}. "
                "It was told to stop, and may or may not have run.",
                worker=self.name,
                function=future.function,
                seconds=seconds,
            ),
        )

    # --- messages from the callee, on the loop; on_answer also in a thread that waits for it --------------------------

    def on_failed(self, frame: Frame, error: Exception) -> None:
        """The buffers of an answer or of an item of a stream cannot be had: the call ends with an error."""
        future = self._take(frame.call_id)
        self._discard(frame)
        if self.streams.pop(frame.call_id, None) is not None:  # an item is missing, so those behind it are not wanted
            self._call_off(frame.call_id)
        if future is not None:
            failure = RpcError(f"the result of {future.describe()} did not arrive: {error}")
            future._settle(None, failure)

    def _on_item(self, frame: Frame) -> None:
        stream = self.streams.get(frame.call_id)
        if stream is None:
            self._discard(frame)
        else:
            stream.on_item(read_values(frame.body), frame.segments, frame.landing if type(frame) is Message else None)

    def _on_goodbye(self, _: Frame) -> None:
        link = self.link
        assert link is not None and self.record is not None, "a message came over it"
        self._home.on_goodbye(self.record)
        # No answer can follow on this connection (the goodbye may have come earlier on another).
        link.when_drained(partial(self.fail, PeerClosed(f"{self.describe()} has shut down")))

    def on_answer(self, frame: Frame) -> None:
        """An answer has arrived. Called by whoever reads the connection: the loop, or a thread that waits."""
        future = self._take(frame.call_id)
        if future is None:
            self._counters.late_answers += 1
            self._discard(frame)
            return
        now = time.monotonic()
        if future.deadline is not None and now > future.deadline:
            self._time_out(future)
            self._counters.late_answers += 1
            self._discard(frame)
            return
        self._counters.record_latency(now - future.started)
        entry = future.entry
        # An error may have come before the callee looked at the function (Overloaded, no such module).
        if not entry.confirmed and entry.number >= 0 and frame.kind == REPLY:
            entry.confirmed = True  # from now on the number goes alone
        if future.streamed:
            self.streams.pop(frame.call_id, None)
        if frame.kind == ERROR:
            self._settle_error(future, frame)
            return
        landing = frame.landing if type(frame) is Message else None
        try:
            result = read_values(frame.body)
            if result.pickled and len(result.pickled) > LARGE_PICKLE:
                self.engine.background.submit(self._settle_value, future, result, frame.segments, landing)
                return
        except Exception as error:
            future._settle(None, without_frames(error))
            return
        self._settle_value(future, result, frame.segments, landing)

    def _settle_value(
        self, future: CallFuture, result: Values, segments: Sequence[Buffer], landing: Landing | None
    ) -> None:
        try:
            landing = landing or (self.devices and self.accelerators.landing()) or None
            if landing is None:
                values = decode(result, segments, self.load_references, self.track)
            else:
                with landing.entered():
                    values = decode(result, segments, self.load_references, self.track, landing)
                    future._arrival = landing.arrival()
            value = values[0] if len(values) < 2 else Results(values)
        except BaseException as error:  # even SystemExit is that call's alone
            failure = RpcError(f"the result of {future.describe()} cannot be read here: {foreign.said(error)}")
            failure.__cause__ = without_frames(error)
            future._settle(None, failure)
        else:
            future._settle(value)

    def _settle_error(self, future: CallFuture, frame: Frame) -> None:
        try:
            error = self._home.read_error(future.function, decode_error(read_error(frame.body), future.function))
            if not foreign.is_a(error, BaseException):
                raise TypeError("read_error gave something that is no exception")
        except BaseException as broken:
            error = RpcError(f"{future.describe()} failed, and its error cannot be read: {foreign.said(broken)}")
        future._settle(None, error)

    def _discard(self, frame: Frame) -> None:
        """Drop an answer or item that nobody waits for. References inside of it still have to be taken."""
        if frame.kind == ERROR:
            return
        try:
            references = read_values(frame.body).references
            if references:
                self.load_references(references)
        except Exception:
            logger.debug("a late answer of %s cannot be read", self.name, exc_info=True)

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

    def attach(self, number: int, connection: Connection) -> None:
        """The handshake is done, and frames may come from now on. number: the number of the link."""
        assert self.record is not None, "the handshake was with the worker of that record"
        self.link = self._home.links.make(connection, self.record, self, number=number, opener=True)

    def ready(self, connection: Connection) -> None:
        """Send what has waited, in its order; from now on messages go out at once.

        `connection` is set last, under the lock: until then everybody who sends sees that there is none, and waits for
        the lock behind the messages that are posted here.
        """
        with self._lock:
            link = self.link
            assert link is not None, "it was made when the connection was"
            while self._waiting:  # in order; whoever calls meanwhile waits for the lock
                waiting, self._waiting = self._waiting, {}
                for each in waiting.values():
                    if isinstance(each, WaitingFrame):
                        self._send_waiting(link, each)
                    elif link.too_long_for_loop(each.buffers):
                        self.engine.in_background(self._post, link, each)
                    else:
                        self._post(link, each)
            self.connection = connection
            self.state = PEER.next(self.state, PeerEvent.CONNECTED)

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
            self.state = PEER.next(self.state, _event_of(error, self.state))
            self._waiting.clear()
        for call_id in list(self.pending):
            self._settle(call_id, error)
        # Let go of the connection: it has a long buffer, and a peer that is gone is kept for its name.
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()

    def refuse(self, call_id: int, error: RpcError) -> None:
        """That call cannot be sent: its Future gets the error. Any thread."""
        self._settle(call_id, error)

    def _settle(self, call_id: int, error: RpcError) -> None:
        future = self._take(call_id)
        self.streams.pop(call_id, None)
        if future is not None:
            future._settle(None, copy_for(error, future))

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

    # --- looking, from any thread -------------------------------------------------------------------------------------

    def pending_calls(self) -> list[PendingCall]:
        """The calls of users that this peer has not answered."""
        now = time.monotonic()
        return [
            PendingCall(
                "made",
                self.name,
                future.function,
                now - future.started,
                None if future.deadline is None else future.deadline - now,
                describe_site(future._site),
            )
            for future in list(self.pending.values())
            if not future.system
        ]

    def user_calls(self) -> int:
        """How many pending calls are users' and not the runtime's."""
        return sum(not future.system for future in list(self.pending.values()))


def _event_of(error: RpcError, state: PeerState) -> PeerEvent:
    """What has happened to a peer whose calls fail with that error from now on."""
    if type(error) is PeerClosed:
        return PeerEvent.GOODBYE
    if type(error) is WorkerClosed:
        return PeerEvent.CLOSED
    return PeerEvent.UNREACHABLE if state is PeerState.CONNECTING else PeerEvent.LOST
