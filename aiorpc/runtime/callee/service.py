"""The callee's side of one connection: each call from its frame to its answer.

States of a served call; it is in `Service.calls` exactly while it is RUNNING, and `dict.pop` decides who ends it.

    RUNNING -> ANSWERED    the handler returned or raised: REPLY or ERROR goes out, once
    RUNNING -> CANCELLED   CANCEL came, the connection ended, or we shut down: the handler is told, its result dropped

Where a handler runs is its `Mode`: coroutines, and what of the runtime's never waits, on the loop, everything that may
block in the pool. Arguments are
unpickled where the handler runs, so that a slow ``__setstate__`` blocks no loop; a coroutine's, too, when large.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import foreign
from ...channels import AnyBuffer
from ...channels.landing import Steps, current_landing
from ...errors import Overloaded, ProtocolError, RpcCancelled, RpcError, RpcUsageError, SerializationError
from ...futures import AnyFuture, is_future, outcome, when_done
from ...protocol.codec import pack, unpack
from ...protocol.frames import CALL, ITEM, REPLY, Buffer, Frame, Kind, encode_frame
from ...protocol.identity import WorkerRecord
from ...transport.connection import Connection
from ..caller.peer import LARGE_PICKLE
from ..caller.streams import serve_async_generator, serve_generator
from ..calls import messages
from ..calls.batching import Batch, get_batcher
from ..calls.failures import encode_error
from ..calls.functions import Mode, Target
from ..engine.current import CallContext, current_call
from ..gradients.contexts import Tape, current_autograd
from ..links.link import FEW, OF_LINKS, Link, Message, Parcel
from ..statistics import PendingCall
from .batches import run_batch
from .resolver import Resolver

if TYPE_CHECKING:
    from ..worker import Worker

logger = logging.getLogger("aiorpc")

_NOTHING = pack([[None]])  # the body of an answer without a result
Run = Callable[[Target, CallContext, list[Any], Sequence[Buffer]], None]


class Service:
    """Serves the calls that arrive on one connection. Methods belong to the loop except where they say otherwise."""

    def __init__(self, worker: Worker, peer: WorkerRecord, connection: Connection, link: int) -> None:
        self.worker = worker
        self.peer = peer
        self.connection = connection
        self.calls: dict[int, CallContext] = {}
        self._system = (
            0  # how many of `calls` are the runtime's own; one of them lasts as long as its caller waits to leave
        )
        self._info = peer.info
        self.link = Link(worker, connection, peer, self, number=link, opener=False)
        self._target = worker.peers.of(peer)
        self._resolver = Resolver(self)
        self._devices = worker.accelerators.accelerator is not None
        self._run: dict[str, Run] = {  # by the value: hashing a member of an Enum is a call into Python
            Mode.THREAD.value: self._start_thread,
            Mode.DEFERRED.value: self._start_thread,
            Mode.GENERATOR.value: self._start_thread,
            Mode.COROUTINE.value: self._start_task,
            Mode.ASYNC_GENERATOR.value: self._start_task,
            Mode.BATCHED.value: self._start_thread,
            Mode.INLINE.value: self._run_inline,
        }

    # --- frames -------------------------------------------------------------------------------------------------------

    def on_frames(self, frames: list[Frame]) -> None:
        """Frames from the caller."""
        link = self.link
        for frame in frames:
            kind = frame.kind
            if link.held or kind in OF_LINKS:
                message = link.admit(frame)
                if message is None:
                    continue
                frame, kind = message, message.kind
            if kind == CALL:
                self._on_call(frame)
            elif kind == Kind.CANCEL:
                self.cancel(frame.call_id)
            elif kind == Kind.CREDIT:
                context = self.calls.get(frame.call_id)
                if context is not None and context.credits is not None:
                    context.credits.add(int(unpack(frame.body)[0]))
            elif kind == Kind.REFERENCE:
                self.worker.references.on_message(self.peer.id, tuple(unpack(frame.body)))
            elif kind == Kind.GOODBYE:
                self.worker.group.on_goodbye(self.peer)
            else:
                raise ProtocolError(f"{frame} is not for a callee")

    def on_failed(self, frame: Frame, error: Exception) -> None:
        """The buffers of a call cannot be had: it is answered with the reason."""
        self._on_call(frame, RpcError(f"the arguments did not arrive at worker {self.worker.name!r}: {error}"))

    def _on_call(self, frame: Frame, failure: Exception | None = None) -> None:
        fields = unpack(frame.body)
        try:
            wire_function, remaining, trace, _, extra = fields[:5]
        except ValueError:
            raise ProtocolError(f"{frame} has too few fields") from None
        autograd = None
        if type(trace) is list:
            trace, autograd = trace
            autograd = self.worker.gradients.called(autograd, self._target)
        deadline = None if remaining is None else time.monotonic() + remaining
        root = trace if trace is not None else (self.peer.id << 48) | frame.call_id
        context = CallContext(self.worker, self._info, frame.call_id, "?", deadline, root)
        context.autograd = autograd
        if type(frame) is Message:
            context.landing = frame.landing
        if type(extra) is list:
            self.worker.references.on_create(extra, self.peer.id, context)
        users = len(self.calls) - self._system
        if users >= self.worker.options.max_queued_calls and not self._resolver.is_system(wire_function):
            self.calls[frame.call_id] = context
            self.discard_arguments(fields)
            self.answer_error(
                context,
                Overloaded(
                    f"worker {self.worker.name!r} has {users} calls of {self.peer.name!r} waiting or "
                    "running (max_queued_calls); this one was not run"
                ),
            )
            return
        self.calls[frame.call_id] = context
        if len(fields) > 11 and fields[11]:
            self.worker.references.coming()
        try:
            if failure is not None:
                raise failure
            self._resolver.route(wire_function, context, fields, frame.segments)
        except BaseException as error:
            self.discard_arguments(fields)
            self.answer_error(context, error)
            _pass_on(error)

    def discard_arguments(self, fields: list[Any]) -> None:
        """A call that does not run: the references among its arguments still have to be taken."""
        if len(fields) > 11 and fields[11]:
            self._load_references(fields[11])

    def refuse(self, context: CallContext, fields: list[Any], failure: BaseException) -> None:
        """The call does not run: it is answered with that. Any thread."""
        self.worker.call_on_loop(self.discard_arguments, fields)
        self.answer_error(context, failure)

    # --- running it ---------------------------------------------------------------------------------------------------

    def start(self, target: Target, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> None:
        """Run a call's function, found by now, the way it has to be run."""
        context.function = target.name
        if target.system:
            context.system = True
            self._system += 1
        else:
            self.worker.counters.served_users += 1
        if _is_over(context):
            self.discard_arguments(fields)
            self.answer_error(context, _not_run(target))
            return
        streamed = target.mode in (Mode.GENERATOR, Mode.ASYNC_GENERATOR)
        if streamed != (type(fields[4]) is int):
            self.discard_arguments(fields)
            self.answer_error(context, _wrong_verb(target, streamed))
            return
        self._run[target.mode._value_](target, context, fields, segments)

    def decode(self, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> list[Any]:
        """The values of a call. On the thread that they are for. Raises whatever unpickling raises."""
        landing = context.landing or (self._devices and self.worker.accelerators.landing())
        if not landing:
            return messages.decode(fields[5:], segments, self._load_references, self._target.track)
        with landing.entered():
            return messages.decode(fields[5:], segments, self._load_references, self._target.track, landing)

    def _arguments(
        self, context: CallContext, fields: list[Any], segments: Sequence[Buffer]
    ) -> tuple[list[Any], dict[str, Any]]:
        values = self.decode(context, fields, segments)
        # Whoever still holds the message must not keep what only its arguments hold: see `_run_thread`.
        if type(segments) is list:
            segments.clear()
        fields[5:] = ()
        names = fields[3]
        if not names:
            return values, {}
        count = len(values) - len(names)
        return values[:count], dict(zip(names, values[count:], strict=True))

    def _load_references(self, wires: list[Any]) -> Sequence[Any]:
        return self.worker.references.load(wires, self.peer.id)

    def _run_inline(self, target: Target, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> None:
        token = current_call.set(context)
        try:
            args, kwargs = self._arguments(context, fields, segments)
            result = target.function(*args, **kwargs)
        except BaseException as error:
            self.answer_error(context, error)
            _pass_on(error)
            return
        finally:
            current_call.reset(token)
        self.answer(context, result)

    def _start_thread(
        self, target: Target, context: CallContext, fields: list[Any], segments: Sequence[Buffer]
    ) -> None:
        run = self._run_thread if context.landing is None else self._run_landed
        self.worker.pool.submit(run, target, context, fields, segments)

    def _run_landed(self, target: Target, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> None:
        """In the pool: on the streams on which the arguments arrive."""
        try:
            with context.landing.entered():
                self._run_thread(target, context, fields, segments)
        except Exception as error:  # the device's; whatever the handler raises was its answer
            self.answer_error(context, error)

    def _run_thread(self, target: Target, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> None:
        """In the pool: a handler that may block."""
        if _is_over(context):
            self.worker.call_on_loop(self.discard_arguments, fields)
            self.answer_error(context, _not_run(target))
            return
        token = current_call.set(context)
        within = current_autograd.set(context.autograd) if context.autograd else None
        try:
            args, kwargs = self._arguments(context, fields, segments)
            if context.arrival is not None:
                context.arrival.join()
            if context.landing is not None and target.mode is not Mode.BATCHED:
                context.landing.carriers.clear()  # the arguments are the handler's alone
            if target.mode is Mode.BATCHED:
                self._join_batch(target, context, args, kwargs)
                return
            # In a list, as `result` below: shared memory that nobody looks at any more goes back with the answer, and
            # is used again while it is in the caches.
            result = [target.function(*args, **kwargs)]
            args.clear()
            kwargs.clear()
            if target.mode is Mode.GENERATOR:
                serve_generator(self, context, result.pop(), fields[4])
                result.append(None)
        except BaseException as error:
            self.answer_error(context, error)
            return
        finally:
            current_call.reset(token)
            if within is not None:
                current_autograd.reset(within)
        try:
            if target.mode is Mode.DEFERRED:
                self._defer(target, context, result.pop())
            elif asyncio.iscoroutine(result[0]):
                # A plain function that hands back a coroutine: run it where coroutines run.
                self.worker.call_on_loop(self._create_task, context, result.pop())
            else:
                self.answer(context, result.pop())
        except BaseException as error:  # of a class that does not even say what it is
            self.answer_error(context, error)

    def _defer(self, target: Target, context: CallContext, result: object) -> None:
        if is_future(result):
            when_done(result, partial(self.answer_future, context, True))  # type: ignore[arg-type]  # is_future tells no checker
            return
        self.answer_error(
            context,
            RpcUsageError(
                f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but {target.name} returned {type(result).__qualname__}"
            ),
        )

    def _join_batch(self, target: Target, context: CallContext, args: list[Any], kwargs: dict[str, Any]) -> None:
        batcher = get_batcher(target.function, self.worker)
        assert batcher is not None, "the function was classified as batched"

        def done(result: object, error: BaseException | None) -> None:
            if error is None:
                self.answer(context, result, copy=True)
            else:
                self.answer_error(context, error)

        def arm(seconds: float, take: Callable[[], Batch | None]) -> None:
            def fire() -> None:
                run_batch(self.worker, take())

            self.worker.call_on_loop(self.worker.loop.call_later, seconds, fire)

        context.on_cancel = partial(batcher.discard, context)
        arrived = context.landing.arrival() if context.landing is not None else None
        batch = batcher.add(tuple(args), kwargs, done, arm, context, join=arrived and arrived.join)
        if context.cancelled:
            batcher.discard(context)
        run_batch(self.worker, batch)

    def _start_task(self, target: Target, context: CallContext, fields: list[Any], segments: Sequence[Buffer]) -> None:
        if len(fields) > 8 and fields[8] and len(fields[8]) > LARGE_PICKLE:
            self.worker.background.submit(self._decode_for_task, target, context, fields, segments)
            return
        try:
            args, kwargs = self._arguments(context, fields, segments)
        except BaseException as error:
            self.answer_error(context, error)
            return
        self._start_coroutine(target, context, args, kwargs, fields[4])

    def _decode_for_task(
        self, target: Target, context: CallContext, fields: list[Any], segments: Sequence[Buffer]
    ) -> None:
        try:
            args, kwargs = self._arguments(context, fields, segments)
        except BaseException as error:
            self.answer_error(context, error)
            return
        self.worker.call_on_loop(self._start_decoded, target, context, args, kwargs, fields[4])

    def _start_decoded(self, target: Target, context: CallContext, *rest: Any) -> None:
        if _is_over(context):  # by now
            self.answer_error(context, _not_run(target))
        else:
            self._start_coroutine(target, context, *rest)

    def _start_coroutine(
        self, target: Target, context: CallContext, args: list[Any], kwargs: dict[str, Any], credit: Any
    ) -> None:
        if context.landing is not None:
            context.landing.carriers.clear()  # the arguments are the handler's alone
        # The task copies this context, so it and all it starts know the call that they serve.
        token = current_call.set(context)
        within = current_autograd.set(context.autograd) if context.autograd else None
        try:
            result = target.function(*args, **kwargs)
            if target.mode is Mode.ASYNC_GENERATOR:
                result = serve_async_generator(self, context, result, credit)
            self._serve_coroutine(context, result)
        except BaseException as error:
            self.answer_error(context, error)
            _pass_on(error)
        finally:
            current_call.reset(token)
            if within is not None:
                current_autograd.reset(within)

    def _create_task(self, context: CallContext, coroutine: Any) -> None:
        if context.cancelled:
            coroutine.close()
            return
        token = current_call.set(context)
        within = current_autograd.set(context.autograd) if context.autograd else None
        try:
            self._serve_coroutine(context, coroutine)
        finally:
            current_call.reset(token)
            if within is not None:
                current_autograd.reset(within)

    def _serve_coroutine(self, context: CallContext, handler: Any) -> None:
        on_device = context.landing is not None or context.arrival is not None
        coroutine = self._run_steps(context, handler) if on_device else self._run_coroutine(context, handler)
        task = self.worker.tasks.serve(coroutine)
        if not task.done():
            context.on_cancel = partial(self._cancel_task, task, coroutine, handler)

    def _cancel_task(self, task: asyncio.Task[None], coroutine: Any, handler: Any) -> None:
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            # Nothing of it has run, so nothing of it will: the handler's coroutine would never be awaited.
            self.worker.tasks.drop(task)
            if hasattr(handler, "close"):
                handler.close()
        task.cancel()

    async def _run_steps(self, context: CallContext, handler: Any) -> None:
        """On the streams on which the arguments arrive."""
        coroutine = self._run_coroutine(context, handler)
        try:
            landing = context.landing or self.worker.accelerators.land()
            assert landing is not None, "nothing arrives on a device without one"
            current_landing.set(landing)  # of this task, and of those it starts
            if context.arrival is not None:
                with landing.entered():
                    context.arrival.join()
        except Exception as error:  # the device's
            coroutine.close()
            self.answer_error(context, error)
            return
        await Steps(coroutine, landing)

    async def _run_coroutine(self, context: CallContext, coroutine: Any) -> None:
        try:
            result = [await coroutine]
        except asyncio.CancelledError:
            if not context.cancelled:
                self.answer_error(context, RpcCancelled(f"{context.function} was cancelled on {self.worker.name!r}"))
                return
            raise
        except BaseException as error:
            self.answer_error(context, error)
            _pass_on(error)
            return
        finally:
            context.on_cancel = None  # it leads back here: without the cycle all of it goes with the last reference
            self.worker.tasks.served()
        self.answer(context, result.pop())

    # --- answering, from any thread -----------------------------------------------------------------------------------

    def answer_future(self, context: CallContext, copy: bool, future: AnyFuture) -> None:
        """Send what a Future has come to. copy: as of `answer`."""
        value, error = outcome(future)
        if error is None:
            self.answer(context, value, copy=copy)
        else:
            self.answer_error(context, error)

    def answer(self, context: CallContext, result: object, *, copy: bool = False) -> None:
        """Send the result, unless the call has ended. copy: the result's tensors may change right after this."""
        if context.cancelled:
            return
        if context.creates is not None:
            self._answer_creation(context, result)
            return
        try:
            values = list(result) if type(result) is messages.Results else [result]
            body, buffers, _ = messages.encode([], values, self._target, self.link.route_back, self._tape(context))
            del result, values, _
        except SerializationError as error:
            self.answer_error(context, SerializationError(f"the result of {context.function} {error}"))
            return
        except Exception as error:
            self.answer_error(context, error)
            return
        except BaseException as error:  # pickling raised it; it is no request to end this worker
            self.answer_error(context, _not_pickled(f"the result of {context.function}", error))
            _pass_on(error)
            return
        if not buffers or (not copy and self.link.rides(buffers)):
            if self._may_answer(context):
                self._send_answer(encode_frame(REPLY, context.call_id, body, buffers))
        elif not copy and self.link.too_long_for_loop(buffers):
            settled = self.worker.accelerators.settled(buffers)
            self.worker.in_background(self._answer_buffers, context, body, settled)
        else:
            parcel = self._prepare(context, body, buffers, copy)
            del buffers
            self._post(context, parcel)

    def _answer_creation(self, context: CallContext, value: object) -> None:
        """The result stays here. Whoever waits for it already is answered by the same write as its creator."""
        if self._may_answer(context):
            self._send_answer(encode_frame(REPLY, context.call_id, _NOTHING), more=True)
        self.worker.references.settle_created(context, value)
        self.connection.push()

    def _tape(self, context: CallContext) -> Tape | None:
        return self.worker.gradients.answers(context.autograd, self._target) if context.autograd else None

    def _answer_buffers(self, context: CallContext, body: bytes, buffers: Sequence[AnyBuffer]) -> None:
        """In a thread: copying the buffers takes long."""
        self._post(context, self._prepare(context, body, buffers, False))

    def _prepare(self, context: CallContext, body: bytes, buffers: Sequence[AnyBuffer], copy: bool) -> Parcel | None:
        try:
            return self.link.prepare(REPLY, context.call_id, body, buffers, copy=copy)
        except Exception as error:
            self.answer_error(context, error)
            return None

    def _post(self, context: CallContext, parcel: Parcel | None) -> None:
        if parcel is None:
            return
        if self._may_answer(context):
            self.link.post(parcel, urgent=len(self.calls) < FEW + self._system)
        else:
            self.link.withdraw(parcel)

    def _may_answer(self, context: CallContext) -> bool:
        # A call that ended meanwhile is answered all the same, as it may have taken references along: the caller drops
        # the late answer, and takes the references, for which the table here waits.
        context.replied = self._take(context.call_id) is not None or context.cancelled
        return context.replied

    def _take(self, call_id: int) -> CallContext | None:
        """The call is over; None if somebody else ended it. Any thread."""
        context = self.calls.pop(call_id, None)
        if context is not None and context.system:
            self._system -= 1
        return context

    def _send_answer(self, frame: Sequence[Buffer], *, more: bool = False) -> None:
        link = self.link
        if link.released or link.slots:
            link.flush(more=True)
        # With few other calls under way little would join it: no reason to wait for the loop.
        self.connection.send(frame, urgent=len(self.calls) < FEW + self._system, more=more)

    def answer_error(self, context: CallContext, error: BaseException) -> None:
        """Send the exception, unless the call has ended."""
        if self._take(context.call_id) is None:
            return
        context.replied = True
        if context.creates is not None:
            self.worker.references.settle_created(context, None, error)
        self.worker.counters.failed += 1
        if logger.isEnabledFor(logging.DEBUG):
            foreign.log_error(logger, logging.DEBUG, error, "%s for %s raised", context.function, context.caller)
        body = pack(encode_error(error, self.worker.name))
        self._send_answer(encode_frame(Kind.ERROR, context.call_id, body))
        if self.worker.on_handler_error is not None:
            try:
                self.worker.on_handler_error(error)
            except BaseException as broken:
                said = "on_handler_error of worker %s raised"
                foreign.log_error(logger, logging.ERROR, broken, said, self.worker.name)

    def send_item(self, context: CallContext, item: object) -> None:
        """Send one item of a stream. Raises SerializationError."""
        try:
            body, buffers, _ = messages.encode([], [item], self._target, self.link.route_back, self._tape(context))
        except SerializationError as error:
            raise SerializationError(f"an item of {context.function} {error}") from error.__cause__
        except (SystemExit, GeneratorExit, KeyboardInterrupt) as error:
            _pass_on(error)
            raise _not_pickled(f"an item of {context.function}", error) from error
        if buffers:
            self.link.post(self.link.prepare(ITEM, context.call_id, body, buffers, copy=True))
        else:
            self.connection.send(encode_frame(ITEM, context.call_id, body))

    # --- ending -------------------------------------------------------------------------------------------------------

    def cancel(self, call_id: int) -> None:
        """The caller has given up on that call."""
        context = self._take(call_id)
        self.link.give_up(call_id)  # the answer, or items, may be on their way
        if context is None:
            return
        context.cancelled = True
        self.worker.counters.cancelled += 1
        if context.creates is not None:
            error = RpcCancelled(f"{context.function} was cancelled by its caller")
            self.worker.references.settle_created(context, None, error)
        if context.credits is not None:
            context.credits.stop()
        if context.on_cancel is not None:
            context.on_cancel()

    def close(self) -> None:
        """The connection has ended: nobody waits for these calls any more."""
        for call_id in list(self.calls):
            self.cancel(call_id)

    def goodbye(self) -> None:
        """Tell the caller that we leave, if that takes no waiting. Any thread."""
        self.connection.send(encode_frame(Kind.GOODBYE, 0, b""), urgent=True)

    def say_goodbye(self) -> None:
        """We leave: tell the caller, after the answers that are queued, and close."""
        self.goodbye()
        self.connection.close()

    def pending_calls(self) -> list[PendingCall]:
        """The calls of users that are being served."""
        now = time.monotonic()
        return [
            PendingCall(
                "served",
                self.peer.name,
                context.function,
                now - context.started,
                None if context.deadline is None else context.deadline - now,
            )
            for context in list(self.calls.values())
            if not context.system
        ]

    def user_calls(self) -> int:
        """Calls of users that are being served."""
        return sum(not context.system for context in list(self.calls.values()))


def _pass_on(error: BaseException) -> None:
    """Called where an error has become the answer of a call: Ctrl-C is the program's besides, and is raised again.

    What handlers raise by themselves, SystemExit too, is of their call alone.
    """
    if foreign.is_interrupt(error):
        raise error


def _not_pickled(what: str, error: BaseException) -> SerializationError:
    failure = SerializationError(f"{what} cannot be serialised: {foreign.said(error)}")
    foreign.set_cause(failure, error)
    return failure


def _is_over(context: CallContext) -> bool:
    return context.cancelled or (context.deadline is not None and time.monotonic() > context.deadline)


def _not_run(target: Target) -> RpcCancelled:
    return RpcCancelled(f"{target.name} was not run: its caller had given up by then")


def _wrong_verb(target: Target, streamed: bool) -> RpcUsageError:
    if streamed:
        return RpcUsageError(f"{target.name} is a generator function: use `async for item in aiorpc.stream(...)`")
    return RpcUsageError(f"{target.name} is no generator function: use aiorpc.call, not aiorpc.stream")
