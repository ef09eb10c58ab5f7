"""The caller's side of one other worker: how a call is made.

`Peer.call` admits a call, names its function, writes its message and sends it. Rare cases are in functions beside that
path. `addressee` sends messages, `pending` has the pending calls, `known` the functions that the worker knows by
number, and `waiting` the messages that wait for a link.

Invariants
1. A function's number goes with its name until a reply to such a call has confirmed that the callee knows the number.
2. An unknown worker may run our main module or another one. A call to it is written in both forms, if they differ, and
   the link takes one of them.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from types import MethodType
from typing import NamedTuple

from msgspec.structs import replace

from ...callbacks import current_autograd
from ...channels.accelerator import DeviceBuffer
from ...errors import Overloaded, RpcUsageError, SerializationError, UnknownWorker
from ...logs import logger
from ...protocol.codec import Outgoing
from ...protocol.frames import CALL, HEAD, Buffer, encode_frame
from ...protocol.messages import ByName, Call, Fetch, Function, Method, ObjectMethod, Values, write_plain
from ...protocol.states import CallOutcome
from ...protocol.trace_context import TraceContext
from ...rights import FETCH
from ..calls import tracing
from ..calls.current import ServedCall, current_call
from ..calls.failures import NO_VALUE, absence_behind
from ..calls.functions import describe
from ..calls.options import PLAIN_CALL, CallOptions
from ..calls.values import encode
from ..engine.call_tracing import CallTracer, MadeSpan, Raised
from ..gradients.contexts import Tape
from ..links.link import FEW
from .addressee import Addressee
from .future import CallFuture, cannot_send
from .known import FunctionEntry
from .misuse import OF_VERBS, check_keywords, no_function, warn_of_copy
from .waiting import Form, WaitingCall, WaitingFrame

#: What a call names: a callable, a method of an object, or the value of a reference.
Named = Callable[..., object] | Method | ObjectMethod | Fetch


class _Request(NamedTuple):
    """A named call before its encoding. message: with the values of the program.

    by_position: how many arguments are positional. tape: of its autograd context.
    """

    call: CallFuture
    function: Named
    message: Call
    by_position: int
    tape: Tape | None
    options: CallOptions


class Peer(Addressee):
    """Another worker, and the calls to it. See the module, and `Addressee`."""

    def call(
        self,
        function: Named,
        args: Sequence[object],
        kwargs: dict[str, object] | None,
        timeout: float,
        *,
        system: bool = False,
        depth: int = 2,
        options: CallOptions = PLAIN_CALL,
    ) -> CallFuture:
        """Send one call and return its Future at once. Any thread.

        timeout: seconds, 0 for no limit. system: whether the call is the runtime's own. depth: how many stack frames up
        the user's code is. Raises SerializationError, Overloaded, RpcUsageError if it is no function, and the error of
        a reference in the arguments whose value was not created; nothing was sent then. If the peer is gone, nothing is
        raised: the Future has the error.
        """
        self._admit(system, options.begun)
        values = list(args)
        names = self._add_named(function, kwargs, values) if kwargs else None
        now = time.monotonic()
        deadline = now + timeout if timeout else None
        serving = current_call.get()
        origin: tuple[int, int] | None = None
        if serving is not None and not serving.replied and serving.node is self._home:  # as `is_nested`
            origin, deadline = serving.origin, _earlier(deadline, serving.deadline)
        context = current_autograd.get()
        tape = within = None
        if context and not system:
            tape, within, options = self._in_context(context, function, options)
        entry, named = self.name_of(function)
        if named is None:
            self._add_by_value(entry, function, values, depth + 1)
        remaining = None if deadline is None else deadline - now
        trace, span, tracer = tracing.current(), None, self.engine.tracer
        if tracer is not None and not system:
            trace, span = self._traced(tracer, entry.name, trace, options)
        message = Call(
            named,
            Values(values),
            names,
            remaining,
            origin,
            trace,
            within,
            options.credit,
            options.creates,
            options.once,
        )
        call = CallFuture(self, entry, next(self.pending.ids), now, deadline, system)
        if origin is not None or options is not PLAIN_CALL:
            self._take_options(call, options, None if origin is None else serving)
        if not (system or options.site or options.begun):
            caller = sys._getframe(depth)
            call._site = caller.f_code, caller.f_lasti
        if span is not None:
            call.span = span
        frame = None if self.record is None else write_plain(CALL, call.call_id, message, self.max_body)
        try:
            if frame is not None:
                self._send_frame(call, frame, options)
            else:
                self._send_written(_Request(call, function, message, len(args), tape, options))
        except Exception as error:
            if span is not None:
                span.ended(CallOutcome.REFUSED, Raised(error))
            self.pending.cancel(call.call_id)
            raise
        # `fail` sets `gone` first, and may have gone through `calls` before this call was in it.
        if self.gone is not None:
            self.pending.fail_one(call.call_id, self.gone)
        return call

    # --- admitting ----------------------------------------------------------------------------------------------------

    def _admit(self, system: bool, begun: bool) -> None:
        """Raise WorkerClosed if no call may begin, and Overloaded if there are too many."""
        if self._lifetime.shut:
            self._lifetime.check_begin(begun=system or begun)
        if system:
            return
        pending, connection = self.pending, self.connection
        count, limit = len(pending.calls), self.engine.options.max_pending_calls
        unsent = len(self._waiting)
        if connection is not None:
            unsent = len(connection.queue.frames) + len(connection.queue.begun)
        if count - pending.system >= limit or unsent - count >= limit:
            raise self._overloaded(count, unsent)

    def refusal(self) -> Overloaded | None:
        """Why a further call of users would be refused now; None if it would not."""
        try:
            self._admit(False, True)
        except Overloaded as error:
            return error
        return None

    def _overloaded(self, count: int, unsent: int) -> Overloaded:
        """The runtime's own calls do not count: a leaving worker still makes them.

        Unsent frames of abandoned calls count: a peer that does not read must not fill our memory.
        """
        logger.debug("worker %r is overloaded with %d calls, %d messages unsent", self.name, count, unsent)
        given_up = f", and {unsent - count} frames of calls given up wait to be sent" if unsent > count else ""
        return Overloaded(
            f"{count - self.pending.system} calls to worker {self.name!r} wait for answers{given_up} "
            "(max_pending_calls); await some before making more"
        )

    def _in_context(
        self, context: int, function: Named, options: CallOptions
    ) -> tuple[Tape | None, int | None, CallOptions]:
        """The tape of a call in an autograd context, the context if the call takes part, and its options."""
        tape = self._home.gradients.calls(context, self, function)
        if tape is not None and options.part_of is None:
            options = options._replace(part_of=("context", context))
        return tape, None if tape is None else context, options

    def _traced(
        self, tracer: CallTracer, function: str, trace: TraceContext | None, options: CallOptions
    ) -> tuple[TraceContext | None, MadeSpan | None]:
        """The trace context of a call of users, and its span; None if it is a part of something with a span.

        What continues earlier work (`begun`) is a part of that.
        """
        if options.span is not None:
            return options.span.context, None
        if options.begun:
            return trace, None
        span = tracer.made(function, self, stream=options.stream is not None)
        return (trace, None) if span is None else (span.context, span)

    def _take_options(self, call: CallFuture, options: CallOptions, serving: ServedCall | None) -> None:
        """Note a call's options on it, and the call whose handler makes it."""
        if serving is not None:
            call.parent = serving.caller.name, serving.call_id
        call.patient, call._site = options.wait, options.site
        if options.allowed is not None:
            call.allowed = options.allowed
        if options.part_of is not None:
            call.part_of = options.part_of
        if options.stream is not None:
            call.streamed, call.kind = True, "stream"
            self.pending.streams[call.call_id] = options.stream
        elif options.creates is not None:
            call.kind = "remote"

    # --- naming -------------------------------------------------------------------------------------------------------

    def name_of(self, function: Named) -> tuple[FunctionEntry, Function]:
        """The entry of a function, and its form in a message to this peer; None if it goes by value. Any thread.

        Any thread.
        """
        if type(function) in _NAMES:
            return FunctionEntry(describe_named(function)), function  # type: ignore[return-value]  # by its type
        try:
            entry = self.known[function]
        except TypeError:  # not hashable: no name
            entry = FunctionEntry(describe(function), function=function)  # type: ignore[arg-type]  # by its type
        if entry.confirmed:
            return entry, entry.number
        return entry, ByName(entry.number, entry.name) if entry.number >= 0 else None

    def _add_named(self, function: Named, kwargs: dict[str, object], values: list[object]) -> list[str]:
        """Add the keyword arguments to the values; their names."""
        if not OF_VERBS.isdisjoint(kwargs) and not self._home.gradients.as_torch:
            check_keywords(function, kwargs, self.name)
        values.extend(kwargs.values())
        return list(kwargs)

    def _add_by_value(self, entry: FunctionEntry, function: Named, values: list[object], depth: int) -> None:
        """Put a function in front of the values. Raises if it cannot travel by value; warns of a method, which takes a
        copy of its object along.
        """
        if self.safe:
            raise self._not_by_value(entry)
        if not callable(function):
            raise RpcUsageError(no_function(function, self.name))
        if type(function) is MethodType and not self._home.gradients.as_torch:
            warn_of_copy(function, self.name, depth + 1)
        values.insert(0, function)

    def _not_by_value(self, entry: FunctionEntry) -> SerializationError:
        return SerializationError(
            f"the function {entry.name} for worker {self.name!r} is not sent: it would travel by value, and "
            "this group uses safe serialization; define it at the top of a module that both workers can import"
        )

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, request: _Request) -> Form | None:
        """Encode a call with values that are not plain; None if the call has ended by an error."""
        message, lends = request.message, self.record is not None
        try:
            form = Form(*encode(message, self, self.route, request.tape, lends=lends))
        except SerializationError as error:
            absence = absence_behind(error)
            if type(absence) is UnknownWorker or isinstance(absence, NO_VALUE):
                # No worker to wait for, as with `remote`, or no value to pass on. A copy: other calls raise it, too.
                raise copy.copy(absence) from None
            if absence is None:
                target = f"worker {self.name!r}"
                by_value, names = message.function is None, message.names
                entry = request.call.entry
                raise cannot_send(error, entry.name, target, by_value, request.by_position, names) from error.__cause__
            request.call.unsent = True  # the owner of a reference is not there
            self.pending.begin(request.call)
            self.pending.fail_one(request.call.call_id, absence)
            return None
        self._check_length(form)
        return form

    def _check_length(self, form: Form) -> None:
        """SerializationError for a call longer than the other end takes, before anything of it is kept.

        If shared memory may have room, sending checks it instead.
        """
        link = self.link
        if not form.buffers or link is None or link.distribution.sharing:
            return
        if DeviceBuffer in map(type, form.buffers):
            return
        try:
            link.distribution.check_length(form.buffers, form.body)  # type: ignore[arg-type]  # none is on a device
        except SerializationError as error:
            if form.out is not None:
                form.out.unsend()
            raise self._not_sent(error) from None

    def _for_other_main(self, request: _Request, form: Form) -> Form | SerializationError | None:
        """The form of a call for a worker with another main module; None if it is the same.

        Or the error that ends it if the worker turns out to run another one.
        """
        entry, message = request.call.entry, request.message
        if entry.of_main:
            if self.safe:
                return self._not_by_value(entry)
            message = replace(message, function=None, payload=Values([request.function, *message.payload.values]))
        try:
            other = Form(*encode(message, self, self.route, request.tape, other_main=True))
        except SerializationError as error:
            target = f"worker {self.name!r}, which runs another main module,"
            return cannot_send(error, entry.name, target, message.function is None, 0, None)
        if other.body == form.body:
            self._unsend(other.out)
            return None
        return other

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send_frame(
        self, call: CallFuture, frame: Sequence[Buffer], options: CallOptions, out: Outgoing | None = None
    ) -> None:
        """Begin a call, and send it if there is a link; otherwise it waits. out: undone if the call does not leave."""
        pending = self.pending
        observed = self.engine.call_observers
        if options.keeps is not None:
            pending.lent[call.call_id] = [*pending.lent.get(call.call_id, ()), options.keeps]
        # Before the frame is queued: the answer may come before this function has returned.
        pending.begin(call, sum(map(len, frame)) - HEAD.size if observed else 0)
        link = self.link  # read once: the loop removes it when the connection ends
        if link is None or self.connection is None:
            self.send_later(WaitingFrame(CALL, call.call_id, frame, call))
            return
        if observed:
            pending.tell("running", call)
        urgent = len(pending.calls) <= FEW + pending.system
        link.send(CALL, call.call_id, frame, urgent=urgent, more=options.later, call=call, undo=out)

    def _send_written(self, request: _Request) -> None:
        """Write a call whose values are not plain, begin it and send it."""
        form = self._write(request)
        if form is None:
            return
        call, options, out = request.call, request.options, form.out
        try:
            otherwise = self._for_other_main(request, form) if self.record is None else None
            if out is not None and out.lent:
                self.pending.lent[call.call_id] = out.lent
            link = self.link
            linked = link is not None and self.connection is not None
            rides = not form.buffers or (link is not None and link.distribution.rides(form.buffers))
            if rides and otherwise is None and (out is None or linked):
                frame = encode_frame(CALL, call.call_id, form.body, form.buffers)  # type: ignore[arg-type]  # none is on a device: they ride
                self._send_frame(call, frame, options, out)
                return
            if options.keeps is not None:
                self.pending.lent[call.call_id] = [*self.pending.lent.get(call.call_id, ()), options.keeps]
            self.pending.begin(call, form.size if self.engine.call_observers else 0)
            self.send_buffers(WaitingCall(call, form.body, form.buffers, out, False, otherwise))
        except Exception:
            if out is not None and not out.posted:
                self._unsend(out)
            raise


_NAMES = frozenset((Method, Fetch, ObjectMethod))


def describe_named(function: Named) -> str:
    """The name of a method, an object's method or a fetch, for people."""
    if type(function) is Method:
        return function.name
    return FETCH if type(function) is Fetch else describe(function)


def _earlier(deadline: float | None, other: float | None) -> float | None:
    """The earlier of two deadlines, None for no limit."""
    if deadline is None or other is None:
        return other if deadline is None else deadline
    return min(deadline, other)
