"""The caller's side of one other worker: the connection to it, the calls it owes us, the functions it knows by number.

States of a peer, changed on the loop only:

    from        event                               to          what happens
    IDLE        first frame for it                  CONNECTING  frames wait in `_waiting`
    CONNECTING  handshake done                      READY       waiting frames go out, in order
    CONNECTING  no way to reach it in time          GONE        pending calls fail with PeerLost or PeerRefused
    READY       GOODBYE                             GONE        pending calls fail with PeerClosed
    READY       connection broke, process died      GONE        pending calls fail with PeerLost
    any         we shut down                        GONE        pending calls fail with WorkerClosed

Invariants
1. A call is in `pending` from before its frame is queued until somebody takes it out: `dict.pop` says who settles it.
2. A function's number goes with its name until a reply to such a call confirmed that the callee has it.
3. GONE is final: a worker that comes back under the same name is a new peer (another incarnation).
4. Whoever holds the lock of the references may send here, which takes `_lock`: nothing under `_lock` takes theirs.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from ... import foreign
from ...channels import AnyBuffer
from ...channels.landing import Landing
from ...errors import Overloaded, PeerClosed, ProtocolError, RpcError, RpcTimeout, SerializationError, WorkerClosed
from ...futures import describe_site
from ...protocol.codec import Past, unpack
from ...protocol.frames import CALL, ERROR, ITEM, REPLY, Buffer, Frame, Kind, encode_frame
from ...protocol.identity import WorkerRecord
from ...transport.connection import Connection
from ..calls import messages
from ..calls.failures import decode_error, without_frames
from ..calls.functions import describe, find_name
from ..engine.current import current_call
from ..gradients.contexts import Tape, current_autograd
from ..links.link import FEW, OF_LINKS, Link, Message
from ..statistics import PendingCall
from .future import CallFuture, FunctionEntry, copy_for, name_argument

if TYPE_CHECKING:
    from ...protocol.codec import Outgoing
    from ..links.link import Parcel
    from ..worker import Worker
    from .streams import Stream

logger = logging.getLogger("aiorpc")
_CFuture = torch._C.Future

# A reply whose pickle is longer than this is unpickled in the pool, off the loop.
LARGE_PICKLE = 64 * 1024
_ANSWERS = (REPLY, ERROR)


class State(Enum):
    """See the module."""

    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"
    GONE = "gone"


class _Message(NamedTuple):
    """A call with buffers that has not been sent."""

    call_id: int
    body: bytes
    buffers: Sequence[AnyBuffer]
    out: Outgoing | None


class Peer:
    """See the module. `call` may be used from any thread; what is marked so belongs to the loop."""

    def __init__(self, worker: Worker, name: str, record: WorkerRecord | None) -> None:
        self.worker = worker
        self.devices = worker.accelerators.accelerator is not None  # whether tensors may arrive on some
        self.rename(name)
        self.record = record
        self.state = State.IDLE
        self.max_body = worker.options.max_frame_bytes
        self.max_segment = worker.options.max_tensor_bytes
        self.pending: dict[int, CallFuture] = {}
        # Weak: a consumer that breaks out of its loop drops the stream, and that is what stops the producer.
        self.streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self.gone: RpcError | None = None
        self.connection: Connection | None = None
        self.link: Link | None = None
        self._system = 0  # how many of `pending` are the runtime's own; one of them lasts while we wait to leave
        self._ids = itertools.count(1)
        self._waiting: dict[int, Sequence[Buffer] | _Message] = {}  # by call; below 0 what belongs to none
        self._others = itertools.count(-1, -1)
        self._lock = threading.RLock()  # a message that cannot be sent is called off while it is held
        # By function: those that have a name live as long as their module does.
        self._functions: dict[Any, FunctionEntry] = {}
        self._numbers = itertools.count()

    def rename(self, name: str) -> None:
        """Its name is known now; and with it the device map that leads to it."""
        self.name = name
        self.route = self.worker.accelerators.route_to(name)  # for tensors on devices; None: they need no look

    @property
    def same_main(self) -> bool:
        """Whether the peer runs the same main module, so that what it defines can go by name."""
        return self.record is not None and self.record.main == self.worker.record.main

    def describe(self) -> str:
        """Name, rank, host and pid, for errors."""
        return self.record.describe() if self.record is not None else f"worker {self.name!r}"

    # --- calling ------------------------------------------------------------------------------------------------------

    def call(
        self,
        function: Callable[..., Any] | list[Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: float,
        *,
        extra: Any = None,
        system: bool = False,
        stream: Stream | None = None,
        depth: int = 2,
    ) -> CallFuture:
        """Send one call and return its Future at once. Any thread.

        function: a callable, or the wire form of a method or value of a reference. timeout: seconds, 0 for no limit.
        extra: a stream's credit, or the ids of the reference that the call creates. depth: frames up to the user's
        code. Raises SerializationError and Overloaded; nothing was sent then. A lost peer is told by the Future.
        """
        worker = self.worker
        if worker.closed:
            worker.check_open()
        pending = self.pending
        limit = worker.options.max_pending_calls
        # The runtime's own calls do not count: a worker that waits for the others at shutdown still makes its calls.
        if not system and (len(pending) - self._system >= limit or self._given_up() >= limit):
            raise Overloaded(
                f"{len(pending) - self._system} calls to worker {self.name!r} wait for answers, and "
                f"{max(0, self._given_up())} frames of calls given up wait to be sent (max_pending_calls); "
                "await some before making more"
            )
        future = CallFuture(self, system)
        if not system:
            frame = sys._getframe(depth)
            future._site = (frame.f_code, frame.f_lasti)
        future._started = now = time.monotonic()
        deadline = now + timeout if timeout else None
        trace: int | None = None
        context = current_call.get()
        if context is not None and not context.replied and context.worker is worker:
            trace = context.trace
            if context.deadline is not None and (deadline is None or context.deadline < deadline):
                deadline = context.deadline
        tape: Tape | None = None
        said: Any = trace
        autograd = current_autograd.get()
        if autograd and not system:
            tape = worker.gradients.calls(autograd, self)
            if tape is not None:
                said = [trace, autograd]
        remaining = None if deadline is None else deadline - now
        future._deadline = deadline

        values = list(args)
        if kwargs:
            names: list[str] | None = list(kwargs)
            values.extend(kwargs.values())
        else:
            names = None
        wire_function: Any
        if type(function) is list:
            wire_function = function
            future._entry = FunctionEntry(str(function[-1]))
        else:
            try:
                entry = self._functions.get(function) or self._enter(function)
            except TypeError:  # not hashable, so it has no name
                entry = FunctionEntry(describe(function))
            future._entry = entry
            if entry.confirmed:
                wire_function = entry.number
            elif entry.number >= 0:
                wire_function = [entry.number, entry.name]
            else:
                wire_function = None
                values.insert(0, function)
        try:
            prefix = [wire_function, remaining, said, names, extra]
            body, buffers, out = messages.encode(prefix, values, self, self.route, tape)
        except SerializationError as error:
            where = name_argument(error.position, wire_function is None, len(args), names, future)
            raise SerializationError(f"{where} {error}") from error.__cause__
        future._call_id = call_id = next(self._ids)
        try:
            pending[call_id] = future
            if system:
                self._system += 1
            else:
                worker.counters.made += 1
            if stream is not None:
                self.streams[call_id] = stream
                future._streamed = True
            if deadline is not None:
                worker.deadlines.add(deadline)
            link = self.link  # read once: the loop takes it away when the connection ends
            if buffers and not (link is not None and link.rides(buffers)):
                self._send_buffers(_Message(call_id, body, buffers, out))
            else:
                if link is not None and (link.released or link.slots):
                    link.flush(more=True)
                whole = encode_frame(CALL, call_id, body, buffers)
                self.send(whole, urgent=len(pending) <= FEW + self._system, call_id=call_id)
        except BaseException:  # a signal handler's: nobody will have the Future
            future.cancel()
            raise
        if self.gone is not None:  # it went while we were at it, and may have missed this call
            self._settle(call_id, self.gone)
        return future

    def _send_buffers(self, message: _Message) -> None:
        """Send a call that has buffers: from here, or from a thread if that takes too long here. Any thread."""
        link = self.link
        if self.connection is None or link is None:
            message = self._settled(message)
            if self._hold_back(message.call_id, message):
                return
            link = self.link
            if link is None:  # gone again, and the call with it
                return
        if link.too_long_for_loop(message.buffers):
            self.worker.in_background(self._post, link, self._settled(message))
        else:
            self._post(link, message)

    def _settled(self, message: _Message) -> _Message:
        """The same, to be sent later or by another thread."""
        if self.route is None:
            return message
        return message._replace(buffers=self.worker.accelerators.settled(message.buffers))

    def _post(self, link: Link, message: _Message) -> None:
        call_id = message.call_id
        parcel: Parcel | None = None
        try:
            if call_id in self.pending:
                parcel = link.prepare(CALL, call_id, message.body, message.buffers)
        except Exception as error:
            failure = RpcError(f"a call to {self.describe()} could not be sent: {error}")
            self.worker.call_on_loop(self._settle, call_id, failure)  # not here: as below
        if parcel is None or call_id not in self.pending:  # given up meanwhile
            if parcel is not None:
                link.withdraw(parcel)
            if message.out is not None:
                # Not here: `ready` holds our lock, and who holds that of the references may wait for it.
                self.worker.call_on_loop(message.out.unsend)
            return
        link.post(parcel, urgent=len(self.pending) <= FEW + self._system)
        if call_id not in self.pending:
            self._call_off(call_id)  # the word that it was given up may have come before it

    def _given_up(self) -> int:
        # Unsent frames of calls that nobody waits for any more: a peer that does not read must not fill our memory.
        connection = self.connection
        unsent = len(self._waiting) if connection is None else connection.unsent
        return unsent - len(self.pending)

    def _enter(self, function: Any) -> FunctionEntry:
        """A function called for the first time: it gets a number here if it can go by name."""
        name = find_name(function, self.same_main)
        if name is None:
            return FunctionEntry(describe(function))
        return self._functions.setdefault(function, FunctionEntry(name, next(self._numbers)))

    def send(self, frame: Sequence[Buffer], *, urgent: bool = False, later: bool = False, call_id: int = 0) -> None:
        """Queue a frame for this peer, connecting first if need be. Any thread; dropped when the peer is gone.

        later: it leaves with the next one, or with `flush`, whichever comes first.
        """
        connection = self.connection
        if connection is None:
            with self._lock:
                connection = self.connection
                if connection is None:
                    self._wait(call_id, frame)
                    return
        connection.send(frame, urgent=urgent, more=later)

    def flush(self) -> None:
        """Send what is queued. On the loop."""
        if self.connection is not None:
            self.connection.flush()

    def _hold_back(self, call_id: int, message: _Message) -> bool:
        """Keep it until there is a connection; False if there is one. Any thread."""
        with self._lock:
            if self.connection is not None:
                return False
            self._wait(call_id, message)
            return True

    def _wait(self, call_id: int, waiting: Sequence[Buffer] | _Message) -> None:
        if self.gone is None:
            self._waiting[call_id or next(self._others)] = waiting
            if self.state is State.IDLE:
                self.state = State.CONNECTING
                self.worker.call_on_loop(self.worker.connect, self)

    def cancel(self, call_id: int) -> None:
        """The caller of that call has given up: forget it and tell the callee. Any thread."""
        self.streams.pop(call_id, None)
        if self._take(call_id) is not None:
            self._call_off(call_id)

    def _call_off(self, call_id: int) -> None:
        # To a worker that has not joined yet: the call is taken back (no reference can be inside, see `id_of`).
        with self._lock:
            taken_back = self.record is None and self._waiting.pop(call_id, None) is not None
        if not taken_back:
            link = self.link
            if link is not None:
                link.give_up(call_id)
            self.send(encode_frame(Kind.CANCEL, call_id, b""))

    def rest(self) -> bool:
        """Stop connecting if nobody waits for it any more; True if so. On the loop."""
        with self._lock:
            if self._waiting or self.gone is not None:
                return False
            self.state = State.IDLE
            return True

    def _take(self, call_id: int) -> CallFuture | None:
        """That call is over; None if somebody else ended it. Any thread."""
        future = self.pending.pop(call_id, None)
        if future is not None and future._system:
            self._system -= 1
        return future

    def scan_deadlines(self, now: float) -> float:
        """End the calls whose deadline has passed; the earliest deadline of the rest, or infinity. On the loop."""
        following = float("inf")
        due = []
        # Not items(): making its pairs can start the garbage collector, and with it other threads, in mid-iteration.
        for future in list(self.pending.values()):
            call_id = future._call_id
            deadline = future._deadline
            if deadline is None:
                continue
            if deadline <= now:
                due.append(call_id)
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
        assert future._deadline is not None
        self.worker.counters.timed_out += 1
        seconds = round(future._deadline - future._started, 6)  # what was asked for, not 0.09999999999854481
        state = "" if self.state is State.READY else f"; there is no connection to it yet ({self.state.value})"
        future._settle(
            None,
            RpcTimeout(
                f"RPC ran for more than set timeout ({seconds:g} s): {future.describe()} got no answer{state}. "
                "It was told to stop, and may or may not have run.",
                worker=self.name,
                function=future._function,
                seconds=seconds,
            ),
        )

    # --- answers, on the loop; on_answer also in a thread that waits for it -------------------------------------------

    def on_frames(self, frames: list[Frame]) -> None:
        """Frames from the callee."""
        link = self.link
        assert link is not None, "its link was made when the connection was"
        for frame in frames:
            kind = frame.kind
            if link.held or kind in OF_LINKS:
                message = link.admit(frame)
                if message is None:
                    continue
                frame, kind = message, message.kind
            if kind in _ANSWERS:
                self.on_answer(frame)
            elif kind == ITEM:
                stream = self.streams.get(frame.call_id)
                if stream is not None:
                    fields = unpack(frame.body)
                    stream.on_item(fields, frame.segments, frame.landing if type(frame) is Message else None)
                else:
                    self._discard(frame)
            elif kind == Kind.GOODBYE:
                self.worker.group.on_goodbye(self.record)
                # No answer can follow on this connection (the goodbye may have come earlier on another).
                link.when_drained(partial(self.fail, PeerClosed(f"{self.describe()} has shut down")))
            else:
                raise ProtocolError(f"{frame} is not for a caller")

    def on_failed(self, frame: Frame, error: Exception) -> None:
        """The buffers of an answer or item cannot be had."""
        future = self._take(frame.call_id)
        self._discard(frame)
        if self.streams.pop(frame.call_id, None) is not None:  # an item is missing: those behind it are not wanted
            self._call_off(frame.call_id)
        if future is not None:
            failure = RpcError(f"the result of {future.describe()} did not arrive: {error}")
            future._settle(None, failure)

    def on_answer(self, frame: Frame) -> None:
        """An answer came. By whoever reads the connection."""
        future = self._take(frame.call_id)
        if future is None:
            self.worker.counters.late_answers += 1
            self._discard(frame)
            return
        now = time.monotonic()
        if future._deadline is not None and now > future._deadline:
            self._time_out(future)
            self.worker.counters.late_answers += 1
            self._discard(frame)
            return
        self.worker.counters.record_latency(now - future._started)
        entry = future._entry
        # An error may have come before the callee looked at the function (Overloaded, no such module).
        if not entry.confirmed and entry.number >= 0 and frame.kind == REPLY:
            entry.confirmed = True
        if future._streamed:
            self.streams.pop(frame.call_id, None)
        if frame.kind == ERROR:
            self._settle_error(future, frame)
            return
        landing = frame.landing if type(frame) is Message else None
        try:
            fields = unpack(frame.body)
            if len(fields) > 3 and fields[3] and len(fields[3]) > LARGE_PICKLE:
                self.worker.background.submit(self._settle_value, future, fields, frame.segments, landing)
                return
        except Exception as error:
            future._settle(None, without_frames(error))
            return
        self._settle_value(future, fields, frame.segments, landing)

    def _settle_value(
        self, future: CallFuture, fields: list[Any], segments: Sequence[Buffer], landing: Landing | None
    ) -> None:
        try:
            landing = landing or (self.devices and self.worker.accelerators.landing()) or None
            if landing is None:
                values = messages.decode(fields, segments, self.load_references, self.track)
            else:
                with landing.entered():
                    values = messages.decode(fields, segments, self.load_references, self.track, landing)
                    future._arrival = landing.arrival()
            value = values[0] if len(values) < 2 else messages.Results(values)
        except BaseException as error:  # even SystemExit is that call's alone
            failure = RpcError(f"the result of {future.describe()} cannot be read here: {foreign.said(error)}")
            failure.__cause__ = without_frames(error)
            future._settle(None, failure)
        else:
            future._settle(value)

    def _settle_error(self, future: CallFuture, frame: Frame) -> None:
        try:
            error = self.worker.read_error(future._function, decode_error(unpack(frame.body), future._function))
            if not foreign.is_a(error, BaseException):
                raise TypeError("read_error gave something that is no exception")
        except BaseException as broken:
            error = RpcError(f"{future.describe()} failed, and its error cannot be read: {foreign.said(broken)}")
        future._settle(None, error)

    def _discard(self, frame: Frame) -> None:
        """An answer that nobody waits for; references inside still have to be taken."""
        if frame.kind == ERROR:
            return
        try:
            fields = unpack(frame.body)
            if len(fields) > 6 and fields[6]:
                self.load_references(fields[6])
        except Exception:
            logger.debug("a late answer of %s cannot be read", self.name, exc_info=True)

    def load_references(self, wires: list[Any]) -> Sequence[Any]:
        """Handles of the references in a message from this peer."""
        assert self.record is not None, "an answer came over a connection, so the peer is known"
        return self.worker.references.load(wires, self.record.id)

    def track(self, said: Any, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Past | None]:
        """The tensors of a message from this peer, with the past that it says they have. See `Gradients.receive`."""
        return self.worker.gradients.receive(self, said, tensors)

    # --- connection, on the loop --------------------------------------------------------------------------------------

    def attach(self, number: int, connection: Connection) -> None:
        """The handshake is done; frames may come. number: of the link."""
        assert self.record is not None, "the handshake was with the worker of that record"
        connection.on_frames = self.on_frames
        self.link = Link(self.worker, connection, self.record, self, number=number, opener=True)

    def ready(self, connection: Connection) -> None:
        """Send what has waited."""
        with self._lock:
            link = self.link
            assert link is not None, "it was made when the connection was"
            while self._waiting:  # in order; whoever calls meanwhile waits for the lock
                waiting, self._waiting = self._waiting, {}
                for each in waiting.values():
                    if not isinstance(each, _Message):
                        connection.send(each)
                    elif link.too_long_for_loop(each.buffers):
                        self.worker.in_background(self._post, link, each)
                    else:
                        self._post(link, each)
            self.connection = connection
            self.state = State.READY

    def fail(self, error: RpcError) -> None:
        """The peer is gone for good; every call it owes us fails. Idempotent."""
        with self._lock:
            if self.gone is not None:
                return
            self.gone = error
            self.state = State.GONE
            self._waiting.clear()
        for call_id in list(self.pending):
            self._settle(call_id, error)
        connection, self.connection = self.connection, None  # it has a long buffer, and we are kept
        if connection is not None:
            connection.abort()

    def _settle(self, call_id: int, error: RpcError) -> None:
        future = self._take(call_id)
        self.streams.pop(call_id, None)
        if future is not None:
            future._settle(None, copy_for(error, future))

    def close(self) -> None:
        """We leave: say goodbye and fail what is still pending. On the loop."""
        if self.connection is not None:
            self.goodbye()
            self.connection.close()
            self.connection = None  # it ends by itself, after what is queued: `fail` would abort it
        self.fail(WorkerClosed(f"worker {self.worker.name!r} shut down before the answer came"))

    def goodbye(self) -> None:
        """Tell the peer that we leave, if that takes no waiting. Any thread."""
        if self.connection is not None:
            self.connection.send(encode_frame(Kind.GOODBYE, 0, b""), urgent=True)

    def pending_calls(self) -> list[PendingCall]:
        """The calls of users that this peer has not answered."""
        now = time.monotonic()
        return [
            PendingCall(
                "made",
                self.name,
                future._function,
                now - future._started,
                None if future._deadline is None else future._deadline - now,
                describe_site(future._site),
            )
            for future in list(self.pending.values())
            if not future._system
        ]

    def user_calls(self) -> int:
        """Pending calls of users, not of the runtime."""
        return sum(not future._system for future in list(self.pending.values()))
