"""The caller's side of one other worker: how a call is made.

How its messages are sent is in `addressee`, the calls that the worker owes us are in `owed`, the functions that it
knows by number in `known`, and messages that wait for a link in `waiting`.

Invariants
1. A function's number goes with its name until a reply to such a call has confirmed that the callee knows the number.
2. While it is not known which worker it is, it is not known either whether that runs our main module. Calls are
   written for one that does, with the form for one that does not beside it where that is another; the link decides.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...callbacks import current_autograd
from ...channels.accelerator import DeviceBuffer
from ...errors import Overloaded, RpcUsageError, SerializationError, UnknownWorker
from ...logs import logger
from ...protocol.codec import Outgoing
from ...protocol.frames import CALL, Buffer, encode_frame
from ...protocol.messages import ByName, Call, Fetch, Function, Method, ObjectMethod, Values, write_plain
from ...protocol.packing import FLAT
from ...protocol.reference_messages import ReferenceId
from ...sites import CallSite
from ..calls import tracing
from ..calls.current import current_call
from ..calls.failures import NO_VALUE, absence_behind
from ..calls.functions import describe
from ..calls.values import encode
from ..gradients.contexts import Tape
from ..links.link import FEW, Link
from .addressee import Addressee
from .future import CallFuture, cannot_send
from .known import FunctionEntry
from .misuse import OF_VERBS, check_keywords, no_function, warn_of_copy
from .owed import ItemSink
from .waiting import Form, WaitingCall, WaitingFrame


class Try(NamedTuple):
    """One try of a call with retries. site: where the call was made; None of one for what was begun elsewhere, as the
    items that several wait for. once: as in a Call.

    allowed: seconds that all of its tries have together; None for no limit, and where there is but this one.
    """

    site: CallSite | None
    once: tuple[int, int] | None
    allowed: float | None = None


class Peer(Addressee):
    """Another worker, as it is called from here. See the module, and `Addressee`."""

    def call(
        self,
        function: Callable[..., object] | Method | ObjectMethod | Fetch,
        args: Sequence[object],
        kwargs: dict[str, object] | None,
        timeout: float,
        *,
        creates: ReferenceId | None = None,
        credit: int | None = None,
        system: bool = False,
        stream: ItemSink | None = None,
        wait: bool = False,
        later: bool = False,
        depth: int = 2,
        one_try: Try | None = None,
        keeps: object = None,
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
        if self._lifetime.shut:  # what has no site goes on with what was begun before
            self._lifetime.check_begin(begun=system or (one_try is not None and one_try.site is None))
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
        origin: tuple[int, int] | None = None
        serving = current_call.get()
        if serving is not None and not serving.replied and serving.node is self._home:  # as `is_nested`
            origin = serving.origin
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
                if type(function) is MethodType and not self._home.gradients.as_torch:
                    warn_of_copy(function, self.name, depth + 1)
        remaining = None if deadline is None else deadline - now
        once = None if one_try is None else one_try.once
        call = Call(
            named,
            Values(values),
            names,
            remaining,
            origin,
            tracing.current(),
            autograd if tape is not None else None,
            credit,
            creates,
            once,
        )
        call_id = next(owed.ids)
        # Made before it is written: once that has counted references, all that may fail stands in the last `try`.
        future = CallFuture(self, entry, call_id, now, deadline, system)
        future.patient = wait
        if origin is not None:
            future.nested = True
        if one_try is not None:
            future._site = one_try.site
            if one_try.allowed is not None:
                future.allowed = one_try.allowed
        elif not system:
            caller = sys._getframe(depth)
            future._site = (caller.f_code, caller.f_lasti)
        flat = not unknown and FLAT.issuperset(map(type, values))  # as `write_plain` asks, without it if they are not
        frame = write_plain(CALL, call_id, call, self.max_body) if flat else None
        body, out, otherwise = b"", None, None
        buffers: Sequence[Any] = ()
        if frame is None:
            try:
                body, buffers, out = encode(call, self, self.route, tape, lends=not unknown)
            except SerializationError as error:
                absence = absence_behind(error)
                if type(absence) is UnknownWorker or isinstance(absence, NO_VALUE):
                    # Nobody to wait for, as `remote` has nobody; or nothing to pass on. A copy: others raise it, too.
                    raise copy.copy(absence) from None
                if absence is not None:
                    future.unsent = True  # whom its reference leads to is not there
                    owed.enter(future, stream)
                    owed.settle(call_id, absence)
                    return future
                target = f"worker {self.name!r}"
                raise cannot_send(error, entry.name, target, named is None, len(args), names) from error.__cause__
            link = self.link
            if buffers and link is not None and not link.distribution.sharing:
                self._check_length(link, body, buffers, out)
        leaving: list[Sequence[Buffer]] | None = None
        try:
            if unknown:
                otherwise = self._for_other_main(entry, function, call, tape, Form(body, buffers, out))
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

    def _check_length(self, link: Link, body: bytes, buffers: Sequence[Any], out: Outgoing | None) -> None:
        """SerializationError for a call that is longer than the other end takes, while nothing of it is kept yet.

        Where there may be room in shared memory that is seen as it is sent.
        """
        if DeviceBuffer in map(type, buffers):
            return
        try:
            link.distribution.check_length(buffers, body)
        except SerializationError as error:
            if out is not None:
                out.unsend()
            raise self._not_sent(error) from None

    def _for_other_main(
        self,
        entry: FunctionEntry,
        function: object,
        call: Call,
        tape: Tape | None,
        form: Form,
    ) -> Form | SerializationError | None:
        """A call that was written for a worker with our main module, as one with another needs it; None if so, too.

        Or the error that it ends with, if the worker turns out to be of that kind.
        """
        if entry.of_main:
            if self.safe:
                return self._not_by_value(entry)
            call = replace(call, function=None, payload=Values([function, *call.payload.values]))
        try:
            other = Form(*encode(call, self, self.route, tape, other_main=True))
        except SerializationError as error:
            target = f"worker {self.name!r}, which runs another main module,"
            return cannot_send(error, entry.name, target, call.function is None, 0, None)
        if other.body == form.body:
            self._unsend(other.out)
            return None
        return other

    def _not_by_value(self, entry: FunctionEntry) -> SerializationError:
        return SerializationError(
            f"the function {entry.name} for worker {self.name!r} is not sent: it would travel by value, and "
            "this group uses safe serialization; define it at the top of a module that both workers can import"
        )

    def refusal(self) -> Overloaded | None:
        """Why no further call of users is taken now; None if one is. As `call` decides it."""
        unsent, pending = self.unsent, len(self.owed.pending)
        limit = self.engine.options.max_pending_calls
        return self._overloaded(unsent) if pending - self.owed.system >= limit or unsent - pending >= limit else None

    def _overloaded(self, unsent: int) -> Overloaded:
        pending = len(self.owed.pending)
        logger.debug("worker %r is overloaded with %d calls, %d messages unsent", self.name, pending, unsent)
        given_up = f", and {unsent - pending} frames of calls given up wait to be sent" if unsent > pending else ""
        return Overloaded(
            f"{pending - self.owed.system} calls to worker {self.name!r} wait for answers{given_up} "
            "(max_pending_calls); await some before making more"
        )
