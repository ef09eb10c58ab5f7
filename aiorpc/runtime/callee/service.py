"""The callee's side of one connection: each call from its message to its answer.

A call begins in `ServedCalls.begin` and ends in `ServedCalls.end`: with an answer (`answers`), or when its caller gives
up (`Service.cancel`). `resolver` finds its function, `running` runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ... import foreign
from ...errors import Overloaded, PeerLeft, PeerLost, ProtocolError, RpcCancelled, RpcError, RpcTimeout
from ...protocol import reference_messages
from ...protocol.codec import Past
from ...protocol.frames import CALL, Frame, Kind, encode_frame
from ...protocol.identity import WorkerRecord
from ...protocol.messages import (
    Call,
    Function,
    Goodbye,
    Parting,
    Recorded,
    read_call,
    read_cancel,
    read_credit,
    read_goodbye,
    write,
)
from ...protocol.packing import unpack
from ...protocol.reference_messages import PassedReference
from ...protocol.states import CallOutcome
from ...transport.connection import Connection
from ..calls.current import CommonHome, ServedCall
from ..calls.pending import PendingCall
from ..calls.permits import permits_of
from ..gradients.contexts import Gradients
from ..links.link import KindMethod, Link
from ..links.links import Links
from ..links.reassembly import Message
from . import answers
from .answers import CANCELLED, GONE, OVERDUE, Answers
from .backlog import Backlog
from .objects import Objects
from .rate import Rate
from .remembered import KeptAnswer
from .resolver import ReferencesForResolver, Resolver
from .running import Runner
from .served_calls import ServedCalls
from .standing import Found, Standing

# Bytes of arguments that always find room: such a call counts by max_queued_calls alone.
SMALL = 512


# The least limits on one caller's calls of the runtime's own: how many may wait, and how many it may make per second.
LEAST_CALLS, LEAST_RATE = 1024, 1000.0


class ReferencesForService(answers.ReferencesForAnswers, ReferencesForResolver, Protocol):
    """The references of the worker, as serving calls needs them."""

    def load(self, passed: Sequence[PassedReference], sender: int) -> Sequence[object]:
        """Handles of the references in a message from `sender`."""

    def on_message(self, sender: int, message: reference_messages.Message) -> None:
        """Handle a message of reference counting. Raises ProtocolError."""

    def on_create(self, creates: Sequence[int], sender: int, call: ServedCall) -> None:
        """A call that creates a reference has arrived; its result will be the value."""

    def coming(self, passed: Sequence[PassedReference]) -> None:
        """A call with these references among its arguments has arrived."""


class PeerForService(answers.PeerForAnswers, Protocol):
    """The calling worker (`Peer`)."""

    @property
    def gone(self) -> RpcError | None: ...

    @property
    def parting(self) -> RpcError | None: ...

    @property
    def unsent(self) -> int:
        """How many messages to that worker are unsent."""

    def track(self, said: Recorded, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Past | None]:
        """The tensors of a message from that worker, placed in the autograd graph. said: the message's entries about
        them."""


class ServiceContext(CommonHome, Protocol):
    """The worker, as serving calls needs it."""

    links: Links
    gradients: Gradients
    objects: Objects

    @property
    def references(self) -> ReferencesForService: ...

    def peer_of(self, record: WorkerRecord) -> PeerForService:
        """The peer of the calling worker."""

    @property
    def orphaned(self) -> list[Service]:
        """Services whose callers are gone and whose calls go on."""

    def continues(self, origin: tuple[int, int]) -> bool:
        """Whether an arriving call belongs to a chain of calls in which this worker makes or serves another one."""

    def on_goodbye(self, record: WorkerRecord, sure: bool, failed: str) -> None:
        """That worker has said goodbye. sure: the connection is proved to be its own. failed: the name of the error
        that ended its program, from its goodbye; "" for none."""


class Service:
    """Serves the calls of one connection. On the loop, unless a method says otherwise.

    record: of the calling worker. link: to it. calls: under way, by number.
    """

    def __init__(
        self, home: ServiceContext, record: WorkerRecord, connection: Connection, link_number: int, sure: bool = False
    ) -> None:
        """sure: the connection is proved to be that worker's own."""
        self.record = record
        self.sure = sure
        self.connection = connection
        self.methods: dict[int, KindMethod] = {
            CALL: self._on_call,
            Kind.CANCEL: self._on_cancel,
            Kind.CREDIT: self._on_credit,
            Kind.REFERENCE: self._on_reference,
            Kind.GOODBYE: self._on_goodbye,
        }
        self._home = home
        self._engine = home.engine
        self._info = record.info
        self._caller = home.peer_of(record)
        self.link: Link = home.links.make(connection, record, self, number=link_number, opener=False)
        self._backlog = Backlog(home.engine, self.link, connection)
        self._served = served = ServedCalls(home.engine, record.name)
        self.calls: dict[int, ServedCall] = served.calls
        self.pending_calls: Callable[[], list[PendingCall]] = served.pending_calls
        self.user_calls: Callable[[], int] = served.user_calls
        self.streams: Callable[[], int] = lambda: served.streams
        self._answers = Answers(
            home.engine, self.link, connection, self._caller, home.gradients, home.references, self._backlog, served
        )
        self._runner = Runner(
            home, self._answers, served, self._load_references, self._caller.track, self._backlog, record.id
        )
        self._permits = permits_of(home.engine.rights, home.engine.record, record)
        self._resolver = Resolver(
            home.engine, self._answers, served, self._runner, home.references, home.objects, record, self._permits
        )
        self._functions = self._resolver.functions
        self.for_threads: Callable[[Function], Found | None] = self._resolver.for_threads
        self.ahead: tuple[int, Call, Found] | None = None
        if connection.threads_may_read:
            self._runner.standing = Standing(self, self._runner, connection)
        limit = home.engine.options.max_call_rate
        self._rate = None if limit is None else Rate(limit, time.monotonic())
        # Separate limits for the runtime's own calls, and not too low for its work.
        self._own_rate = None if limit is None else Rate(max(limit, LEAST_RATE), time.monotonic())
        self._most_own = max(home.engine.options.max_queued_calls, LEAST_CALLS)

    def _load_references(self, passed: Sequence[PassedReference]) -> Sequence[object]:
        return self._home.references.load(passed, self.record.id)

    # --- messages from the caller -------------------------------------------------------------------------------------

    def on_failed(self, frame: Frame, error: Exception) -> None:
        """The buffers of a call did not arrive: answer with the reason."""
        self._on_call(frame, RpcError(f"the arguments did not arrive at worker {self._engine.name!r}: {error}"))

    def _on_call(self, frame: Frame, failure: Exception | None = None) -> None:
        """Begin a call that has arrived. On the loop, or in the pool thread that has read it (`standing`)."""
        ahead, found = self.ahead, None
        if ahead is not None and ahead[0] == frame.call_id:
            _, message, found = ahead
        else:
            message = read_call(frame.body)
        call = self._begin(frame, message)
        refusal = failure or self._refusal(call, message)
        if (refusal is not None or call.once is not None) and not self._is_accepted(call, message, refusal):
            return
        try:
            handler = self._functions.get(message.function) if type(message.function) is int else None
            if handler is not None:
                self._runner.start(call, handler)
            else:
                self._resolver.route(message.function, call, found)
        except BaseException as error:
            # It may be kept as the error of a reference, and its frames would keep the arguments.
            self._runner.refuse(call, foreign.with_traceback(error, None))
            answers.pass_on(error)

    def _is_accepted(self, call: ServedCall, message: Call, refusal: Exception | None) -> bool:
        """Whether a call that is refused, or idempotent, is to be run."""
        if refusal is None:
            return self._is_first(call)
        # Not raised: its traceback would hold a frame that has the arguments.
        call.function = self._resolver.name(message.function)
        self._runner.refuse(call, refusal)
        return False

    def _begin(self, frame: Frame, message: Call) -> ServedCall:
        """Make and enter the call of a message; from now on an answer or a cancellation must end it."""
        call = ServedCall(self._home, self._info, frame, message, self._permits)
        call.caller_id, call.record = self.record.id, self.record
        call.size = len(frame.body)
        if frame.segments or type(frame) is Message:
            _take_buffers(call, frame)
        self._served.begin(call)
        if message.creates is not None:
            self._home.references.on_create(message.creates, self.record.id, call)
        backlog = self._backlog
        if backlog.queue.size + backlog.bulk.unsent + backlog.held > backlog.most:
            backlog.stop_calls()
        return call

    def _refusal(self, call: ServedCall, message: Call) -> RpcError | None:
        """Why a call is refused; None if it is run. A call that announces an end always runs: accepted calls may wait
        for it.
        """
        served, options = self._served, self._engine.options
        refusal: RpcError | None = None
        if not (
            len(served.calls) - 1 - served.system < options.max_queued_calls
            and served.system < self._most_own
            and served.queued <= options.max_queued_bytes
            and (call.credit is None or served.streams <= options.max_streams)
            and self._rate is None
            and not self._engine.lifetime.parting
        ):
            refusal = self._why_refused(call, message)
        if refusal is None and message.payload.references:
            self._home.references.coming(message.payload.references)
        return refusal

    def _why_refused(self, call: ServedCall, message: Call) -> RpcError | None:
        """As `_refusal`, when a limit may be exceeded, or this worker leaves."""
        system = self._resolver.is_system(message.function)
        why = self._overload(call, system)
        refusal: RpcError
        if why is not None:
            refusal = Overloaded(f"worker {self._engine.name!r} {why}")
        elif (
            self._engine.lifetime.parting
            and not (system or self._resolver.is_of_queue(message.function))
            and not self._home.continues(call.origin)
        ):
            refusal = PeerLeft(f"{self._engine.record.describe()} is draining: it takes no more calls, and ran nothing")
        else:
            return None
        return None if self._resolver.is_brief(message.function) else refusal

    def _overload(self, call: ServedCall, system: bool) -> str | None:
        """The exceeded limit, as text; None if there is room for the call."""
        served, options, who = self._served, self._engine.options, self.record.name
        users = len(served.calls) - 1 - served.system
        if not system and users >= options.max_queued_calls:
            return f"has {users} calls of {who!r} waiting or running (max_queued_calls); this one was not run"
        if system and served.system >= self._most_own:
            return (
                f"has {served.system} calls of the runtime of {who!r} waiting (max_queued_calls); this one was not run"
            )
        if served.queued > options.max_queued_bytes and self._has_no_room(call.size):
            return (
                f"has {served.queued - call.size} bytes of arguments for calls of {who!r} waiting or running, and this "
                f"one has {call.size} (max_queued_bytes); it was not run"
            )
        if call.credit is not None and served.streams > options.max_streams:
            return f"has {options.max_streams} streams of {who!r} open (max_streams); this one was not"
        if self._rate is not None and not self._within_rate(system, call.started):
            return f"takes {options.max_call_rate:g} calls a second of {who!r} (max_call_rate); this one was not run"
        return None

    def _has_no_room(self, size: int) -> bool:
        """Whether a call with so many bytes of arguments, which exceeds `max_queued_bytes`, is refused.

        A call whose arguments alone exceed max_queued_bytes is admitted while the others are below the limit: otherwise
        a few waiting calls would starve it. A call with few bytes always has room: the waiting calls may need it, as
        items put into a full queue need a get.
        """
        limit = self._engine.options.max_queued_bytes
        return size > SMALL and (size <= limit or self._served.queued - size > limit)

    def _within_rate(self, system: bool, now: float) -> bool:
        """Whether a call is within `max_call_rate`. The runtime's own always are: instead, reading pauses."""
        if system:
            early = self._own_rate.owe(now) if self._own_rate is not None else 0.0
            if early:
                self._backlog.hold_off(early)
            return True
        return self._rate is None or self._rate.take(now)

    def _is_first(self, call: ServedCall) -> bool:
        """Whether to run an idempotent call. If not, it gets the answer of an earlier try."""
        found = self._answers.remembered.admit(call)
        if found is True:
            return True
        if isinstance(found, RpcError):
            self._runner.refuse(call, found)
            return False
        self._runner.discard_arguments(call)
        if isinstance(found, KeptAnswer):
            self._answers.give_again(call, found)
        return False

    def _on_cancel(self, frame: Frame) -> None:
        self.cancel(frame.call_id, read_cancel(frame.body).expired)

    def _on_credit(self, frame: Frame) -> None:
        call = self.calls.get(frame.call_id)
        if call is not None and call.credits is not None:
            call.credits.add(read_credit(frame.body).items)
            if call.credits.count > self._engine.options.max_stream_window:
                raise ProtocolError(
                    f"a credit of {call.credits.count} items for {call.function}; the limit is "
                    f"{self._engine.options.max_stream_window} (max_stream_window)"
                )

    def _on_reference(self, frame: Frame) -> None:
        options = self._engine.options
        if self._caller.unsent > options.max_references + options.max_pending_calls:  # each may have got an answer
            raise ProtocolError(
                f"it sends messages about references, and takes none of the {self._caller.unsent} to it"
            )
        self._home.references.on_message(self.record.id, reference_messages.read(unpack(frame.body)))

    def _on_goodbye(self, frame: Frame) -> None:
        self.connection.on_suspended = None  # the socket's end now ends the connection
        self._home.on_goodbye(self.record, self.sure, read_goodbye(frame.body).failed)

    # --- ending -------------------------------------------------------------------------------------------------------

    def cancel(self, call_id: int, expired: bool = False, ended: bool = False) -> None:
        """The caller has given up a call. expired: its time was up. ended: the connection has ended."""
        call = self.calls.get(call_id)
        if call is not None:
            # Before its end: a thread with the answer, which finds the call ended, reads why (`_may_answer`).
            call.unwaited = self._why_unwaited(expired, ended)
            call.cancelled = True
            outcome = CallOutcome.TIMEOUT if expired else CallOutcome.LOST if ended else CallOutcome.CANCELLED
            call = call if self._served.end(call, outcome) else None
        self.link.distribution.give_up(call_id)  # large buffers of it may be on their way
        if call is None:
            return
        if call.once is not None:
            self._answers.forget(call)
        # If this worker has closed its connections, users of the value get that error alone.
        if call.creates is not None and not (ended and self._engine.closed):
            # A fetch of the creator's or of a third worker may wait for the value.
            error: RpcError = RpcCancelled(f"{call.function} was cancelled by its caller")
            if ended:
                error = self._creator_gone()
            elif expired and call.deadline is not None:  # the creator's clock decides
                error = self._timed_out(call, call.deadline - call.started)
            self._home.references.settle_created(call, None, error)
        if call.credits is not None:
            call.credits.stop()
        tell = call.on_cancel  # read once: the handler's thread may reset it
        if tell is not None:
            tell()

    def _why_unwaited(self, expired: bool, ended: bool) -> str:
        if ended:
            return "this worker has left" if self._engine.closed else GONE
        return OVERDUE if expired else CANCELLED

    def _creator_gone(self) -> RpcError:
        record, gone = self.record, self._caller.gone or self._caller.parting
        what = ", which created the reference, before its value was there"
        if isinstance(gone, PeerLeft):
            return PeerLeft(f"{record.describe()} has shut down{what}")
        cause = gone.cause if isinstance(gone, PeerLost) else "its connection has ended"  # the group learns it next
        text = f"{record.describe()} was lost{what}: {cause}"
        host, pid = record.hostname, record.pid
        return PeerLost(text, worker=record.name, rank=record.rank, host=host, pid=pid, cause=cause)

    def _timed_out(self, call: ServedCall, seconds: float) -> RpcTimeout:
        seconds = max(0.0, round(seconds, 6))  # as the caller does
        name = self._engine.name
        return RpcTimeout(
            f"RPC ran for more than set timeout ({seconds:g} s): the call of {call.function} on worker {name!r}, by "
            f"which worker {call.caller.name!r} wanted to create the value of a reference. It was told to stop, and "
            "may or may not have run.",
            worker=name,
            function=call.function,
            seconds=seconds,
        )

    def close(self) -> None:
        """The connection has ended: cancel its calls, except some that go on (`_goes_on`).

        Their number and bytes are bounded by the limits of one caller: a member that reconnects again and again would
        otherwise pile them up.
        """
        orphaned = self._home.orphaned
        orphaned[:] = [service for service in orphaned if service.calls]
        others = [call for service in orphaned for call in list(service.calls.values())]
        count, size = len(others), sum(call.size for call in others)
        options = self._engine.options
        for call in list(self.calls.values()):
            count, size = count + 1, size + call.size
            if self._goes_on(call) and count <= options.max_queued_calls and size <= options.max_queued_bytes:
                call.unwaited = GONE
                call.replied = True
            else:
                count, size = count - 1, size - call.size
                self.cancel(call.call_id, ended=True)
        if self.calls:
            orphaned.append(self)
        self._backlog.close()
        self.link.close()

    def _goes_on(self, call: ServedCall) -> bool:
        """Whether a call goes on although its caller is gone: a creation of `remote`, for whose value others may wait;
        with torch every call. Not a stream, and nothing when this worker leaves.
        """
        if call.system or call.credit is not None or call.once is not None or self._engine.closed:
            return False
        return call.creates is not None or self._home.gradients.as_torch

    def goodbye(self) -> None:
        """Say goodbye to the caller, if that takes no waiting. Any thread."""
        said = write(Goodbye(self._engine.lifetime.failed))
        self.link.send(Kind.GOODBYE, 0, encode_frame(Kind.GOODBYE, 0, said), urgent=True)

    def part(self) -> None:
        """This worker takes no more calls: tell the caller, which may choose another worker from now on."""
        self.link.send(Kind.PARTING, 0, encode_frame(Kind.PARTING, 0, write(Parting())), urgent=True)

    def say_goodbye(self) -> None:
        """This worker leaves: say goodbye after the queued answers, and close the connection."""
        self.goodbye()
        self.connection.close()


def _take_buffers(call: ServedCall, frame: Frame) -> None:
    if type(frame) is Message:
        call.landing = frame.landing
    if call.landing is None:
        call.size += sum(map(len, frame.segments))
