"""Answers to the caller: results, errors and items of the calls of one connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from ... import foreign
from ...channels import AnyBuffer
from ...errors import ItemLost, Overloaded, RpcCancelled, RpcError, SerializationError
from ...futures import AnyFuture, outcome
from ...interrupts import is_interrupt
from ...logs import logger
from ...protocol.frames import ERROR, HEAD, ITEM, REPLY, Buffer, encode_frame
from ...protocol.messages import Item, Reply, Values, write, write_plain
from ...protocol.states import CallOutcome
from ...sites import spates
from ...transport.connection import Connection
from ..calls.current import ServedCall, where
from ..calls.failures import encode_error
from ..calls.functions import is_intrinsic
from ..calls.values import Destination, Results, encode
from ..engine.call_tracing import CallTracer
from ..engine.engine import Engine
from ..engine.forked import end_child
from ..engine.pool import ProcessExits
from ..gradients.contexts import OF_VALUE, Gradients, Tape
from ..gradients.kept import PeerForContexts
from ..links.distribution import Prepared
from ..links.link import FEW, Link
from .backlog import Backlog
from .remembered import KeptAnswer, Remembered, not_begun, not_there
from .served_calls import ServedCalls

_VALUE, _ERROR, _REFUSED = CallOutcome.VALUE, CallOutcome.ERROR, CallOutcome.REFUSED
#: The body and the buffers of a result, and whether an unsent one has steps to undo.
_Written = tuple[bytes, Sequence[AnyBuffer], bool]
_NOTHING = write(Reply(Values([None])))  # the body of an answer without a result

# Why no one waits for the outcome of a call (`ServedCall.unwaited`), for the log.
CANCELLED = "its caller has cancelled it"
GONE = "its caller is gone"
OVERDUE = "the time that its caller had for it was up"
# Errors of a handler that stops because its caller has given up.
_STOPPED = (RpcCancelled, asyncio.CancelledError, ProcessExits)


class PeerForAnswers(Destination, PeerForContexts, Protocol):
    """The calling worker (`Peer`)."""


class ReferencesForAnswers(Protocol):
    """The values of references of this worker (`References`)."""

    def settle_created(self, call: ServedCall, result: object, error: BaseException | None = None) -> None:
        """Set the value of the reference that the call creates, or the error for its users. Any thread."""


class Answers:
    """The answers of one connection. Any thread. remembered: answers of idempotent calls."""

    def __init__(
        self,
        engine: Engine,
        link: Link,
        connection: Connection,
        caller: PeerForAnswers,
        gradients: Gradients,
        references: ReferencesForAnswers,
        backlog: Backlog,
        served: ServedCalls,
    ) -> None:
        self.remembered: Remembered = Remembered(engine.options)
        self._engine = engine
        self._link = link
        self._connection = connection
        self._caller = caller
        self._gradients = gradients
        self._references = references
        self._accelerators = link.accelerators
        self._backlog = backlog
        self._served = served

    def _may_answer(self, call: ServedCall, size: int = 0) -> bool:
        """End a call with a value of so many bytes; whether to send it.

        An answer whose caller has just given up is sent, too: the caller drops it but takes its references, and the
        table of references here waits for that.
        """
        call.replied = self._served.end(call, _VALUE, size) or call.cancelled
        # The answer is sent next, and this thread polls for the caller's next call, if it stands by.
        if call.replied and self._engine.pool.may_stay_awake:
            self._engine.pool.lookout.get_ready()
        return call.replied

    def _urgent(self) -> bool:
        """Whether to write an answer at once: with few other calls it would hardly be joined with another one."""
        return len(self._served.calls) < FEW + self._served.system

    def enter(self, call: ServedCall) -> Overloaded | None:
        """Before a call runs: enter its caller into the autograd context of the call. Any thread.

        Returns the refusal, if the call may not run. A handler for every member runs outside of the context: otherwise
        a call without rights would make this worker take part.
        """
        assert call.autograd is not None, "it was made in a context"
        serves_all = None if call.handler is None else partial(is_intrinsic, call.handler.function)
        try:
            call.autograd = self._gradients.called(call.autograd, self._caller, serves_all)
        except Overloaded as error:
            call.autograd = None
            return error.with_traceback(None)  # its frames would hold the call
        return None

    # --- results ------------------------------------------------------------------------------------------------------

    def answer_future(self, call: ServedCall, copy: bool, future: AnyFuture) -> None:
        """Send the value or the error of a settled Future. copy: see `answer`."""
        value, error = outcome(future)
        if error is None:
            self.answer(call, value, copy=copy)
        else:
            self.answer_error(call, error)

    def answer_awaited(self, call: ServedCall, future: asyncio.Future[object]) -> None:
        """Send the value or the error of a done Future of the loop."""
        call.on_cancel = None  # breaks a reference cycle
        if future.cancelled():
            if not call.cancelled:
                self.answer_cancelled(call)
        elif (error := future.exception()) is not None:
            self.answer_error(call, error)
        else:
            self.answer(call, future.result())

    def answer_cancelled(self, call: ServedCall) -> None:
        """The call's task or Future was cancelled, and not by its caller."""
        self.answer_error(call, RpcCancelled(f"{call.function} was cancelled on {self._engine.name!r}"))

    def answer(self, call: ServedCall, result: object, *, copy: bool = False) -> None:
        """Send the result, unless the caller has given up. copy: the result's tensors may change right after this."""
        if self._engine.lifetime.forked:
            end_child(where(call))
        backlog = self._backlog
        if (
            call.unwaited
            or call.creates is not None
            or call.once is not None
            or (backlog.queue.size + backlog.bulk.unsent + backlog.held > backlog.limit and not call.system)
        ):
            self._keep_or_refuse(call, result, copy)
            return
        reply = Reply(Values(list(result) if type(result) is Results else [result]))
        frame = write_plain(REPLY, call.call_id, reply, self._caller.max_body)
        if frame is not None:
            size = sum(map(len, frame)) - HEAD.size if self._engine.call_observers else 0
            if self._may_answer(call, size):
                urgent = len(self._served.calls) < FEW + self._served.system  # as `_urgent`
                self._link.send(REPLY, call.call_id, frame, urgent=urgent, call=call)
            return
        written = self._encode(call, result, reply)
        if written is not None:
            del result, reply
            self._send_written(call, written, copy)

    def _keep_or_refuse(self, call: ServedCall, result: object, copy: bool) -> None:
        """Deal with a result that is not sent as it is: the call may come again, creates a reference or has no caller
        any more; or there is no room for its answer."""
        if not call.unwaited:
            if call.creates is not None:
                self._answer_creation(call, result)
            elif call.once is not None:
                self._answer_once(call, result, copy)
            else:
                self.answer_error(call, self._backlog.overloaded(call))
        elif self._served.end(call, _VALUE) and call.creates is not None:  # others may wait for the value
            self._references.settle_created(call, result)
        elif call.credit is not None:
            self.stopped(call)

    def _answer_once(self, call: ServedCall, result: object, copy: bool) -> None:
        """The result of an idempotent call is kept, for when that comes again."""
        backlog = self._backlog
        crowded = backlog.queue.size + backlog.bulk.unsent + backlog.held > backlog.limit and not call.system
        written = self._encode(call, result, Reply(Values(list(result) if type(result) is Results else [result])))
        if written is None:
            return
        body, buffers, references = written
        first = self.remembered.snapshot(REPLY, body, buffers, references)
        for each in self.remembered.keep(call, first):
            self.give_again(each, first)
        if crowded:
            self.answer_error(call, backlog.overloaded(call))
        else:
            self._send_written(call, written, copy)

    def _encode(self, call: ServedCall, result: object, reply: Reply) -> _Written | None:
        """The result as its message has it; None if that cannot be, which the caller has been told then."""
        error: BaseException
        try:
            tape = self._tape(call, result) if call.autograd else None
            body, buffers, out = encode(reply, self._caller, self._link.route_back, tape)
            return body, buffers, out is not None
        except SerializationError as refused:
            error = SerializationError(f"{self._result_of(call)} {refused}")
        except Exception as failure:
            error = failure
        except BaseException as failure:  # pickling raised it: no reason to end this worker
            self.answer_error(call, not_pickled(self._result_of(call), failure))
            pass_on(failure)
            return None
        self.answer_error(call, error)
        return None

    def _tape(self, call: ServedCall, result: object) -> Tape | None:
        """The tape that records the answer's tensors in the autograd context of its call."""
        assert call.autograd is not None, "it is asked in one alone"
        gradients = self._gradients
        if gradients.as_torch and call.handler is None and call.arguments.values == OF_VALUE:
            return gradients.fetched(call.autograd, self._caller, result)
        return gradients.answers(call.autograd, self._caller)

    def _send_written(self, call: ServedCall, written: _Written, copy: bool) -> None:
        """Send a result with its buffers, in a background thread if copying them takes long."""
        body, buffers, _ = written
        link = self._link
        if not buffers or (not copy and link.distribution.rides(buffers)):
            if self._may_answer(call, len(body) + sum(map(len, buffers))):
                frame = encode_frame(REPLY, call.call_id, body, buffers)  # type: ignore[arg-type]  # none on a device: they ride
                link.send(REPLY, call.call_id, frame, urgent=self._urgent(), call=call)
        elif not copy and link.distribution.too_long_for_loop(buffers):
            settled = self._accelerators.settled(buffers)
            size = sum(map(len, settled))
            self._backlog.held += size
            self._engine.in_background(self._answer_buffers, call, body, settled, size)
        else:
            prepared = self._prepare(call, body, buffers, copy)
            del buffers, written
            self._post(call, prepared)

    def _answer_creation(self, call: ServedCall, value: object) -> None:
        """The result becomes the value of a reference and stays here; its creator gets an empty answer.

        Other workers may wait for the value: they are answered in the same write.
        """
        if self._may_answer(call):
            self._send(REPLY, call, _NOTHING, more=True)
        self._references.settle_created(call, value)
        self._connection.push()

    def _answer_buffers(self, call: ServedCall, body: bytes, buffers: Sequence[AnyBuffer], size: int) -> None:
        """In a background thread, because copying the buffers takes long. size: of these, in bytes."""
        try:
            self._post(call, self._prepare(call, body, buffers, False))
        finally:
            self._backlog.held -= size

    def _prepare(self, call: ServedCall, body: bytes, buffers: Sequence[AnyBuffer], copy: bool) -> Prepared | None:
        try:
            return self._link.distribution.prepare(REPLY, call.call_id, body, buffers, copy=copy)
        except SerializationError as error:
            self.answer_error(call, SerializationError(f"{self._result_of(call)} {error}"))
            return None
        except Exception as error:
            self.answer_error(call, error)
            return None

    def _post(self, call: ServedCall, prepared: Prepared | None) -> None:
        if prepared is None:
            return
        if self._may_answer(call, len(prepared.body) + prepared.size):
            self._link.post(prepared, urgent=self._urgent(), call=call)
        else:
            self._link.distribution.withdraw(prepared)

    def _send(
        self, kind: int, call: ServedCall, body: bytes, buffers: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        frame = encode_frame(kind, call.call_id, body, buffers)
        self._link.send(kind, call.call_id, frame, urgent=self._urgent(), more=more, call=call)

    def _result_of(self, call: ServedCall, what: str = "the result") -> str:
        return f"{what} of {call.function} on worker {self._engine.name!r}"

    # --- errors -------------------------------------------------------------------------------------------------------

    def answer_error(self, call: ServedCall, error: BaseException) -> None:
        """Send the exception, unless the call has ended."""
        if self._engine.lifetime.forked:
            end_child(where(call), error)
        if self._engine.tracer is not None:
            _note_error(self._engine.tracer, call, error)
        taken = self._served.end(call, _ERROR if call.begun else _REFUSED)
        if taken and call.creates is not None:
            self._references.settle_created(call, None, error)
        if call.unwaited:
            self._end_unwaited(call, error, counted=taken)
            return
        if not taken:
            return
        call.replied = True
        again = not call.begun if call.once is None else self._may_come_again(call, error)
        # Errors may be long, so they are bounded, too; but an ItemLost is sent once only, and must go.
        if self._backlog.waiting > self._backlog.limit and not isinstance(error, (Overloaded, ItemLost)):
            error = self._backlog.overloaded(call)
            again = again or call.once is not None
        if logger.isEnabledFor(logging.DEBUG):
            self._log(call, error)
        if call.handler is not None and call.handler.declared is not None and isinstance(error, RpcError):
            foreign.with_traceback(error, None)  # the text suffices for refusals of the runtime
        self._send(ERROR, call, write(encode_error(error, self._engine.name, self._engine.safe, again)))
        self._tell(error)

    def _tell(self, error: BaseException) -> None:
        if self._engine.on_handler_error is not None:
            try:
                self._engine.on_handler_error(error)
            except Exception as broken:
                said = "on_handler_error of worker %s raised"
                foreign.log_error(logger, logging.ERROR, broken, said, self._engine.name)

    # --- outcomes without a waiting caller ----------------------------------------------------------------------------

    def _end_unwaited(self, call: ServedCall, error: BaseException, counted: bool) -> None:
        """Log the error of a handler whose caller does not wait any more.

        counted: whether it counts as the end of the call.
        """
        if call.system or not call.begun:
            return
        # No errors of the handler's: an item that the ended connection did not send, a reference that the caller freed.
        if call.cancelled and (type(error) is RpcError or foreign.is_a(error, _STOPPED)):
            self.stopped(call)
            return
        if not counted:
            self._engine.counters.failed_unheard += 1
        more = spates.line(f"{call.function} raised unheard")
        if more is not None:
            said = "worker %s: %s, called by worker %s, raised %s, and no one waits for that: %s%s"
            what = (self._engine.name, call.function, call.caller.name, foreign.said(error), call.unwaited, more)
            if self._engine.on_handler_error is None:
                foreign.log_error(logger, logging.ERROR, error, said, *what)
            else:  # the drop-in's hook shows the traceback
                logger.error(said, *what)
        self._tell(error)

    def stopped(self, call: ServedCall) -> None:
        """Log that the handler was stopped because its caller has given up."""
        if call.system or (call.credit is not None and call.unwaited is CANCELLED):  # a consumer has ended its stream
            return
        more = spates.line(f"{call.function} was stopped")
        if more is not None:
            said = "worker %s: %s, called by worker %s, was stopped: %s%s"
            # Programs for torch do not expect that a timeout stops a handler.
            told = call.unwaited is GONE or (call.unwaited is OVERDUE and self._gradients.as_torch)
            level = logging.WARNING if told else logging.INFO
            logger.log(level, said, self._engine.name, call.function, call.caller.name, call.unwaited, more)

    def _log(self, call: ServedCall, error: BaseException) -> None:
        if not call.begun and foreign.is_a(error, Overloaded):
            text, name = foreign.text_of(error), self._engine.name
            logger.debug("worker %s refused %s, called by worker %s: %s", name, call.function, call.caller.name, text)
        else:
            foreign.log_error(
                logger.of(self._engine.name), logging.DEBUG, error, "%s for %s raised", call.function, call.caller
            )

    # --- idempotent calls ---------------------------------------------------------------------------------------------

    def give_again(self, call: ServedCall, answer: KeptAnswer) -> None:
        """Send the kept answer of an idempotent call once more."""
        if answer.unkept:
            self.answer_error(call, not_there(answer))
        elif self._backlog.waiting > self._backlog.limit:
            self.answer_error(call, self._backlog.overloaded(call))
        elif answer.buffers:
            self._post(call, self._prepare(call, answer.body, answer.buffers, False))
        elif self._may_answer(call):
            self._send(answer.kind, call, answer.body)

    def forget(self, call: ServedCall) -> None:
        """An idempotent call was not run, or was given up: tell later tries that they may come again."""
        for each in self.remembered.drop(call):
            self.answer_error(each, not_begun(each))

    def _may_come_again(self, call: ServedCall, error: BaseException) -> bool:
        """Whether an idempotent call that ends with that error may be sent again; if not, the error is its answer."""
        if not call.begun:
            self.forget(call)
            return True
        if self.remembered.has(call):  # its answer is kept, and had no room
            return True
        told = encode_error(error, self._engine.name, self._engine.safe)
        first = self.remembered.snapshot(ERROR, write(told), ())
        for each in self.remembered.keep(call, first):
            self.give_again(each, first)
        return False

    # --- items of streams ---------------------------------------------------------------------------------------------

    def send_item(self, call: ServedCall, item: object) -> None:
        """Send one item of a stream. Raises SerializationError."""
        if self._engine.lifetime.forked:
            end_child(where(call))
        link = self._link
        frame = write_plain(ITEM, call.call_id, Item(Values([item])), self._caller.max_body)
        if frame is not None:
            link.send(ITEM, call.call_id, frame, call=call)
            return
        tape: Tape | None = self._gradients.answers(call.autograd, self._caller) if call.autograd else None
        try:
            body, buffers, _ = encode(Item(Values([item])), self._caller, link.route_back, tape)
        except SerializationError as error:
            raise SerializationError(f"{self._result_of(call, 'an item')} {error}") from error.__cause__
        except (SystemExit, GeneratorExit, KeyboardInterrupt) as error:
            pass_on(error)
            raise not_pickled(self._result_of(call, "an item"), error) from error
        if buffers:
            try:
                prepared = link.distribution.prepare(ITEM, call.call_id, body, buffers, copy=True)
            except SerializationError as error:
                raise SerializationError(f"{self._result_of(call, 'an item')} {error}") from None
            link.post(prepared, call=call)
        else:
            link.send(ITEM, call.call_id, encode_frame(ITEM, call.call_id, body), call=call)


def _note_error(tracer: CallTracer, call: ServedCall, error: BaseException) -> None:
    """Note an error on the span of a call. A call that is refused before its function was found gets one for that."""
    if call.span is None and not (call.begun or call.system or call.function.startswith("aiorpc.")):
        call.span = tracer.served(call, known=False)
    if call.span is not None:
        call.span.failed(error)


def pass_on(error: BaseException) -> None:
    """Raise an error again after it was sent as an answer, if it was Ctrl-C, which is meant for the program, too.

    All other errors of handlers, even SystemExit, are of their call alone.
    """
    if is_interrupt(error):
        raise error


def not_pickled(what: str, error: BaseException) -> SerializationError:
    """The error for a value whose pickling has raised no Exception but, for example, SystemExit."""
    failure = SerializationError(f"{what} cannot be serialised: {foreign.said(error)}")
    foreign.set_cause(failure, error)
    return failure
