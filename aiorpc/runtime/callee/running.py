"""How a served call is run: the handler's `Mode` decides where it runs and how its result is sent.

Coroutines, and handlers of the runtime that never wait, run on the loop. Handlers that may block run in the pool.
Arguments are unpickled where the handler runs: a slow ``__setstate__`` in the arguments of a plain function does not
block the loop. The arguments of a coroutine are unpickled on the loop, or in a thread if they are large.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from types import GeneratorType
from typing import Any, Protocol

from torch import is_grad_enabled, set_grad_enabled

from ... import foreign
from ..._typing import Coro, T
from ...channels.landing import LandedCoroutine, current_landing
from ...errors import (
    NotAllowed,
    Overloaded,
    PeerLeft,
    ProtocolError,
    RpcCancelled,
    RpcError,
    RpcTimeout,
    RpcUsageError,
    SerializationError,
    WorkerClosed,
)
from ...futures import is_future, when_done
from ...interrupts import is_interrupt
from ...logs import logger
from ...protocol.messages import Values
from ..calls.batching import Batch, get_batcher
from ..calls.current import NO_VALUES, CommonHome, ServedCall, current_call
from ..calls.declared import Declaration
from ..calls.functions import Handler, Mode
from ..calls.values import LARGE_PICKLE, GradientLoader, ReferenceLoader, decode
from ..engine.engine import Engine
from ..engine.pool import NoThread
from ..engine.shares import Share
from ..gradients.contexts import current_autograd
from ..links.links import Links
from .answers import Answers, pass_on
from .backlog import Backlog
from .batches import NotRun, run_batch
from .producing import serve_async_generator, serve_generator
from .served_calls import ServedCalls
from .standing import Standing

_REF = "ref is the reference, or the handle of the object, that it is called through"


class RunnerContext(CommonHome, Protocol):
    """The worker, as running calls needs it."""

    links: Links


class Runner:
    """Runs the calls of one connection. On the loop, unless a method says otherwise.

    share: the caller's share of the pool's threads.
    """

    def __init__(
        self,
        node: RunnerContext,
        answers: Answers,
        served: ServedCalls,
        load_references: ReferenceLoader,
        track: GradientLoader,
        backlog: Backlog,
        caller: int,
    ) -> None:
        """caller: the id of the calling worker."""
        self._node = node
        self._engine: Engine = node.engine
        self._answers = answers
        self._served = served
        self._accelerators = node.links.accelerators
        self._devices = node.links.accelerators.accelerator is not None
        self._load_references = load_references
        self._track = track
        self._backlog = backlog
        self.share: Share = node.engine.shares.of(caller)
        self.submitted: int = 0  # calls, to the pool
        self.standing: Standing | None = None  # the source of jobs for threads
        self._tasks = node.engine.tasks.alive
        backlog.start(self.resume)
        self._ways: dict[str, Callable[[ServedCall], None]] = {  # by the value: hashing an Enum runs Python code
            Mode.THREAD.value: self._start_thread,
            Mode.DEFERRED.value: self._start_thread,
            Mode.GENERATOR.value: self._start_thread,
            Mode.COROUTINE.value: self._start_task,
            Mode.ASYNC_GENERATOR.value: self._start_task,
            Mode.BATCHED.value: self._start_thread,
            Mode.INLINE.value: self._run_inline,
            Mode.BRIEF.value: self._run_inline,
        }

    def start(self, call: ServedCall, handler: Handler) -> None:
        """Run a call, whose handler was found, by its mode. On the loop, or in any thread if its mode allows that."""
        self._served.identify(call, handler)
        mode = handler.mode
        if (
            handler.declared is not None
            or call.autograd is not None
            or call.credit is not None
            or mode is Mode.GENERATOR
            or mode is Mode.ASYNC_GENERATOR
            or call.cancelled
            or (call.deadline is not None and time.monotonic() > call.deadline)  # as `over`
        ) and not self._is_ready(call, handler):
            return
        assert call.handler is not None, "it was identified"
        backlog = self._backlog
        if (
            backlog.parked or backlog.queue.size + backlog.bulk.unsent + backlog.held > backlog.half
        ) and not handler.system:
            self._park(call)
            return
        try:
            self._ways[call.handler.mode._value_](call)
        except Exception as error:  # there is no thread for it; where the loop has called this, no one else answers
            self.refuse(call, error)

    def _park(self, call: ServedCall) -> None:
        """Make a call wait until its caller has read more answers."""
        if self._engine.call_observers:
            self._served.tell("queued", call)
        self._backlog.park(call)

    def resume(self, call: ServedCall) -> None:
        """Run a parked call. On the loop."""
        if call.over:  # by now
            self.refuse(call, _not_run(call))
            return
        assert call.handler is not None, "it was found before the call was parked"
        try:
            self._ways[call.handler.mode._value_](call)
        except Exception as error:  # as in `start`
            self.refuse(call, error)

    def _is_ready(self, call: ServedCall, handler: Handler) -> bool:
        """Whether the call can be run, by its handler, which may be another one by now; else it was refused."""
        refusal = _not_run(call) if call.over else self._prepare(call, handler)
        if refusal is not None:
            self.refuse(call, refusal)
        return refusal is None

    def _prepare(self, call: ServedCall, handler: Handler) -> RpcError | None:
        """Prepare a call of the runtime's own, in an autograd context, or of a stream; the refusal, if any.

        A call of a wrapper of a generator function that is no stream runs in a thread: it may return one result.
        """
        if handler.declared is not None:
            try:
                self._read_declared(call, handler.declared)
            except ProtocolError as error:
                return error
        if call.autograd is not None and (refusal := self._answers.enter(call)) is not None:
            return refusal
        streamed = handler.mode is Mode.GENERATOR or handler.mode is Mode.ASYNC_GENERATOR
        if call.credit is None:
            if streamed and not handler.wrapper:
                return _wrong_verb(call, True)
            if streamed:
                call.handler = handler._replace(mode=Mode.THREAD)
            return None
        if not streamed:
            return _wrong_verb(call, False)
        most = self._engine.options.max_stream_window
        return self._too_much_credit(call, most) if call.credit > most else None

    def _too_much_credit(self, call: ServedCall, most: int) -> Overloaded:
        return Overloaded(
            f"{call.caller.name!r} asks for {call.credit} items of {call.function} ahead; worker {self._engine.name!r} "
            f"sends at most {most} (max_stream_window): give the caller a shorter stream_window"
        )

    # --- arguments ----------------------------------------------------------------------------------------------------

    def _read_declared(self, call: ServedCall, declared: Declaration) -> None:
        """Decode the arguments of a handler of the runtime's by its declaration. ProtocolError if they differ."""
        if call.creates is not None or call.once is not None:
            raise ProtocolError(f"{declared.name} of the runtime makes no value of a reference, and is not tried again")
        call.arguments = declared.read(call.arguments, call.names)

    def decode(self, call: ServedCall, *, entered: bool = False) -> list[object]:
        """The values of a call. In the thread that uses them. entered: whether it is on the landing's streams.

        Errors of unpickling become SerializationError: the function has not run.
        """
        safe = self._engine.safe
        landing = call.landing or (self._devices and self._accelerators.landing()) or None
        try:
            if landing is None or entered:
                return decode(call.arguments, call.segments, self._load_references, self._track, landing, safe)
            with landing.entered():
                return decode(call.arguments, call.segments, self._load_references, self._track, landing, safe)
        except SerializationError as error:
            if not safe:
                raise
            raise SerializationError(
                f"an argument of {call.function} that {call.caller.name!r} has sent to worker {self._engine.name!r} "
                f"{foreign.text_of(error)}"
            ) from error.__cause__
        except RpcError:  # of the runtime: refused references, or a broken message
            raise
        except BaseException as error:
            raise self._unreadable(call, error) from error

    def _unreadable(self, call: ServedCall, error: BaseException) -> SerializationError:
        what = f"an argument of {call.function}" if call.handler is not None else f"{call.function}, or an argument,"
        advice = "; the module has to be importable there, too" if foreign.is_a(error, ImportError) else ""
        return SerializationError(
            f"{what} cannot be read on worker {self._engine.name!r}: {foreign.said(error)}; nothing was run{advice}"
        )

    def _take_arguments(self, call: ServedCall, *, entered: bool = False) -> tuple[list[object], dict[str, object]]:
        said = call.arguments
        values = said.values
        if said.pickled or said.references or self._devices or call.landing is not None:
            values = self.decode(call, entered=entered)
        elif said.table:
            values = decode(said, call.segments, self._load_references, self._track, None, self._engine.safe)
        # `drop_arguments`, inlined
        segments, call.segments, call.arguments = call.segments, (), NO_VALUES
        if type(segments) is list:
            segments.clear()
        return _named(values, call.names) if call.names else (values, {})

    def discard_arguments(self, call: ServedCall) -> None:
        """Drop the arguments of a refused call. Their references still have to be taken."""
        passed = call.arguments.references
        call.drop_arguments()
        if passed:
            try:
                self._load_references(passed)
            except ProtocolError:  # the call has its answer already
                logger.of(self._engine.name).debug("%s brought references that cannot be", call.function, exc_info=True)

    def refuse(self, call: ServedCall, error: BaseException) -> None:
        """Answer a call with an error instead of running it. Any thread."""
        if isinstance(error, NoThread):  # its caller may try again
            error = Overloaded(str(error))
        elif type(error) is WorkerClosed and self._engine.closed:  # a caller that connected later has got no goodbye
            error = PeerLeft(f"{self._engine.record.describe()} has shut down, and did not run {call.function}")
        elif type(error) in (NotAllowed, ProtocolError, Overloaded):
            # It may be kept as the error of a reference, and its frames would keep the value. And formatting a
            # traceback takes a hundred times as long as a refusal.
            foreign.with_traceback(error, None)
        self._engine.run_on_loop(self.discard_arguments, call)
        self._answers.answer_error(call, error)

    # --- on the loop, or in the thread that has read the call, between two frames -------------------------------------

    def _run_inline(self, call: ServedCall) -> None:
        handler = call.handler
        assert handler is not None, "it was found before the call was started"
        token = current_call.set(call)
        try:
            args, kwargs = self._take_arguments(call)
            self._served.run(call)
            result = handler.function(*args, **kwargs)
        except BaseException as error:
            self._answers.answer_error(call, error)
            pass_on(error)
            return
        finally:
            current_call.reset(token)
        if isinstance(result, asyncio.Future):  # awaited without a task
            call.on_cancel = result.cancel
            result.add_done_callback(partial(self._answers.answer_awaited, call))
        else:
            self._answers.answer(call, result)

    # --- in the pool --------------------------------------------------------------------------------------------------

    def _start_thread(self, call: ServedCall) -> None:
        self.submitted += 1
        if self._engine.call_observers:
            self._served.tell("queued", call)
        self.share.submit(self._run_thread if call.landing is None else self._run_landed, call, self.refuse)

    def _run_landed(self, call: ServedCall) -> None:
        """In the pool: run a handler on the device streams of its arguments."""
        assert call.landing is not None, "else it is `_run_thread` that runs"
        try:
            with call.landing.entered():
                self._run_thread(call)
        except Exception as error:  # of the device; the handler's own error was sent already
            self._answers.answer_error(call, error)

    def _run_thread(self, call: ServedCall) -> None:
        """In the pool: run a handler that may block."""
        if call.cancelled or (call.deadline is not None and time.monotonic() > call.deadline):  # as `over`
            self.refuse(call, _not_run(call))
            return
        backlog = self._backlog
        if (
            backlog.queue.size + backlog.bulk.unsent + backlog.held > backlog.half
            and not call.system
            and not call.unwaited
        ):
            self._park(call)
            return
        token = current_call.set(call)
        call.thread = threading.get_ident()
        within = current_autograd.set(call.autograd) if call.autograd else None
        with_gradients = is_grad_enabled()
        # In a list, from which it is taken below: this frame does not keep the result alive.
        result: list[Any] = []
        try:
            self._call_handler(call, result)
        except BaseException as error:
            self._answers.answer_error(call, error)
            return
        finally:
            call.thread = 0
            current_call.reset(token)
            if within is not None:
                current_autograd.reset(within)
            if is_grad_enabled() is not with_gradients:  # torch keeps it for the thread, not for the context
                set_grad_enabled(with_gradients)
            if self.standing is not None:
                self._stand_by(call, self.standing)
        if result:
            self._take_result(call, result)

    def _call_handler(self, call: ServedCall, result: list[Any]) -> None:
        """Call the handler in this thread, and add its result to `result`, unless its batch answers."""
        handler = call.handler
        assert handler is not None, "it was found before the call was started"
        args, kwargs = self._take_arguments(call, entered=call.landing is not None)  # by `_run_landed`
        if call.arrival is not None:
            call.arrival.join()
        if handler.mode is Mode.BATCHED:
            call.begun = True
            self._join_batch(call, args, kwargs)
            return
        if call.landing is not None:
            call.landing.carriers.clear()  # the arguments are the handler's alone
        self._served.run(call)
        # In a context of its own: a handler's context variables belong to its call.
        context = copy_context()
        if call.span is not None:
            context.run(call.span.enter)
        result.append(context.run(handler.function, *args, **kwargs))
        # Frees the arguments' shared memory: it returns with the answer, and is reused while it is cached.
        args.clear()
        kwargs.clear()
        if handler.wrapper:
            _check_items(call, result[0])
        if handler.mode is Mode.GENERATOR:
            assert call.credit is not None, "a stream comes with its credit"
            context.run(serve_generator, self._answers, call, result.pop(), call.credit, self._backlog)
            result.append(None)

    def _stand_by(self, call: ServedCall, standing: Standing) -> None:
        """Stand by for the next call of this caller, after the handler: meanwhile the loop reads.

        With more calls the loop is better, because it reads many at once. The runtime's own do not count: a worker in
        `shutdown` has one at the leader all the time.
        """
        if len(self._served.calls) >= 2 + self._served.system:
            return
        if standing.pause:
            standing.pause -= 1
        else:
            standing.running = call.call_id
            self._engine.pool.lookout.stand_by(standing)

    def _take_result(self, call: ServedCall, result: list[Any]) -> None:
        """Send the result of a handler that ran in a thread."""
        assert call.handler is not None, "it has run"
        try:
            if call.handler.mode is Mode.DEFERRED:
                self._defer(call, result.pop())
            elif (
                hasattr(type(result[0]), "__await__")  # avoids a Python function in most cases
                and type(result[0]) is not GeneratorType  # awaitable in Python 3.11
                and asyncio.iscoroutine(result[0])
            ):
                # A plain function has returned a coroutine: run it on the loop.
                self._engine.call_on_loop(self._create_task, call, result.pop())
            else:
                self._answers.answer(call, result.pop())
        except BaseException as error:  # a result whose class raises in attribute look-ups
            self._answers.answer_error(call, error)

    def _defer(self, call: ServedCall, result: object) -> None:
        if is_future(result):
            # A copy: the program may change the value of its own Future later.
            when_done(result, partial(self._answers.answer_future, call, True))
            return
        kind = type(result).__qualname__
        given = "it returns"
        if inspect.iscoroutine(result):
            result.close()  # keeps Python from warning that it was never awaited
            given = "the coroutine returns"
        self._answers.answer_error(
            call,
            # The first half is torch's, word for word; its decorator has another name there, too.
            RpcUsageError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but {call.function} returned {kind}; without @rpc.async_execution its caller gets what "
                f"{given}"
            ),
        )

    def _join_batch(self, call: ServedCall, args: list[object], kwargs: dict[str, object]) -> None:
        batcher = get_batcher(_function_of(call), self._node)
        assert batcher is not None, "the function was classified as batched"

        def done(result: object, error: BaseException | None) -> None:
            if error is None:
                self._answers.answer(call, result, copy=True)
            elif type(error) is NotRun:
                call.begun = False  # another worker may run it
                self.refuse(call, WorkerClosed(str(error)))
            else:
                self._answers.answer_error(call, error)

        def arm(seconds: float, take: Callable[[], Batch | None]) -> None:
            def fire() -> None:
                run_batch(self._node, take())

            self._engine.call_on_loop(self._engine.loop.call_later, seconds, fire)

        call.on_cancel = partial(batcher.discard, call)
        arrived = call.landing.arrival() if call.landing is not None else None

        def join(number: int) -> None:
            call.batch = number
            self._served.run(call)
            if arrived is not None:
                arrived.join()

        if self._engine.call_observers:
            self._served.tell("queued", call)
        batch = batcher.add(tuple(args), kwargs, done, arm, call, join=join)
        if call.cancelled:
            batcher.discard(call)
        run_batch(self._node, batch)

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _decode_for_task(self, call: ServedCall) -> None:
        """In a background thread: decode large arguments."""
        try:
            values = self.decode(call)
        except BaseException as error:
            self._answers.answer_error(call, error)
            return
        call.drop_arguments()
        call.arguments = Values(values)  # decoded already
        self._engine.call_on_loop(self._start_decoded, call)

    def _start_decoded(self, call: ServedCall) -> None:
        if call.over:  # by now
            self._answers.answer_error(call, _not_run(call))
        else:
            self._start_task(call)

    def _start_task(self, call: ServedCall) -> None:
        """Run a coroutine, or an asynchronous generator. On the loop."""
        pickled = call.arguments.pickled
        if pickled is not None and len(pickled) > LARGE_PICKLE:
            self._engine.background.submit(self._decode_for_task, call)
            return
        try:
            args, kwargs = self._take_arguments(call)
        except BaseException as error:
            self._answers.answer_error(call, error)
            pass_on(error)
            return
        if call.landing is not None:
            call.landing.carriers.clear()  # the arguments are the handler's alone
        handler = call.handler
        assert handler is not None, "it was found before the call was started"
        # The task copies this context, and knows the call that it serves.
        token = current_call.set(call)
        within = current_autograd.set(call.autograd) if call.autograd else None
        self._served.run(call)
        try:
            self._serve_coroutine(call, handler.function, args, kwargs)
        finally:
            current_call.reset(token)
            if within is not None:
                current_autograd.reset(within)

    def _create_task(self, call: ServedCall, coroutine: Coro[object]) -> None:
        if call.cancelled:
            coroutine.close()
            return
        token = current_call.set(call)
        within = current_autograd.set(call.autograd) if call.autograd else None
        try:
            self._serve_coroutine(call, _itself, [coroutine], {}, coroutine)
        finally:
            current_call.reset(token)
            if within is not None:
                current_autograd.reset(within)

    def _serve_coroutine(
        self,
        call: ServedCall,
        function: object,
        args: list[object],
        kwargs: dict[str, object],
        existing: Coro[object] | None = None,
    ) -> None:
        """Run an asynchronous function as a task. It is called within the task: if the loop ends before, no unawaited
        coroutine is left. existing: a coroutine that was returned already.
        """
        run = self._run_steps if call.landing is not None or call.arrival is not None else self._run_coroutine
        coroutine = run(call, function, args, kwargs)
        if call.span is None:
            task = self._engine.loop.create_task(coroutine)
        else:
            context = copy_context()
            context.run(call.span.enter)
            task = self._engine.loop.create_task(coroutine, context=context)
        if not task.done():  # a finished eager task has cleaned up already
            call.task = task
            self._tasks.add(task)
            call.on_cancel = partial(self._cancel_task, task, coroutine, existing)

    def _cancel_task(self, task: asyncio.Task[None], coroutine: Coro[None], existing: Coro[object] | None) -> None:
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:  # it will not run at all
            self._tasks.discard(task)
            if existing is not None:
                existing.close()
        task.cancel()

    async def _run_steps(
        self, call: ServedCall, function: object, args: list[object], kwargs: dict[str, object]
    ) -> None:
        """As a task: run a coroutine, each step on the device streams of its arguments."""
        coroutine = self._run_coroutine(call, function, args, kwargs)
        try:
            landing = call.landing or self._accelerators.land()
            assert landing is not None, "nothing arrives on a device without one"
            current_landing.set(landing)  # of this task, and of tasks that it starts
            if call.arrival is not None:
                with landing.entered():
                    call.arrival.join()
        except Exception as error:  # the device's
            coroutine.close()
            self._tasks.discard(call.task)
            self._answers.answer_error(call, error)
            return
        try:
            await LandedCoroutine(coroutine, landing)
        except Exception as error:  # of the device; the handler's own error was sent already
            self._answers.answer_error(call, error)  # first: closing the coroutine raises in the handler
            self._tasks.discard(call.task)
            coroutine.close()

    async def _run_coroutine(
        self, call: ServedCall, function: Any, args: list[object], kwargs: dict[str, object]
    ) -> None:
        try:
            made = function(*args, **kwargs)
            args.clear()  # the handler alone keeps them
            kwargs.clear()
            if call.credit is not None:
                made = self._serve_items(call, made, call.credit)
            result = [await made]
        except BaseException as error:
            if self._ends_task(call, error):
                raise
            return
        finally:
            self._tasks.discard(call.task)
            call.task = call.on_cancel = None  # breaks a reference cycle
        self._answers.answer(call, result.pop())

    def _serve_items(self, call: ServedCall, made: Any, credit: int) -> Coro[None]:
        _check_items(call, made)
        return serve_async_generator(self._answers, call, made, credit, self._backlog)

    def _ends_task(self, call: ServedCall, error: BaseException) -> bool:
        """Answer for a coroutine that has raised; whether the task is to end with that: the caller has cancelled it, or
        it was Ctrl-C."""
        if not foreign.is_a(error, asyncio.CancelledError):
            self._answers.answer_error(call, error)
            return is_interrupt(error)
        if call.cancelled:
            self._answers.stopped(call)
            return True
        self._answers.answer_cancelled(call)
        return False


def _function_of(call: ServedCall) -> Callable[..., object]:
    assert call.handler is not None, "it was found before the call was started"
    return call.handler.function


def _named(values: list[object], names: Sequence[str]) -> tuple[list[object], dict[str, object]]:
    """Positional and named arguments; the latter come last among the values."""
    count = len(values) - len(names)
    return values[:count], dict(zip(names, values[count:], strict=True))


def _itself(coroutine: T) -> T:
    """Returns a coroutine that exists already."""
    return coroutine


def _not_run(call: ServedCall) -> RpcError:
    """The error of a call that was given up before it ran. Its caller does not get it, but users of the value that it
    creates may."""
    if call.cancelled or call.deadline is None:
        return RpcCancelled(f"{call.function} was not run: its caller had given up by then")
    seconds, worker = max(0.0, round(call.deadline - call.started, 6)), call.node.engine.name  # as the caller does
    return RpcTimeout(
        f"RPC ran for more than set timeout ({seconds:g} s): {call.function} was not run on worker {worker!r}, as the "
        f"time that {call.caller.name!r} had for it was up by then",
        worker=worker,
        function=call.function,
        seconds=seconds,
    )


def _check_items(call: ServedCall, made: object) -> None:
    """Check the result of a wrapper of a generator function: items for a stream, one result for a call."""
    assert call.handler is not None, "it runs"
    if call.credit is None:
        if not inspect.isawaitable(made) and (inspect.isgenerator(made) or inspect.isasyncgen(made)):
            raise _wrong_verb(call, True)
    elif not hasattr(made, "__next__" if call.handler.mode is Mode.GENERATOR else "__anext__"):
        raise RpcUsageError(
            f"{call.function} wraps a generator function, and has returned a {type(made).__qualname__}, which is no "
            f"generator: {_not_streamed(call.handler)}"
        )


def _wrong_verb(call: ServedCall, streamed: bool) -> RpcUsageError:
    handler = call.handler
    assert handler is not None, "it was found before its verb was looked at"
    if streamed:
        method = handler.method
        verb = f"ref.stream().{method}(...)`, where {_REF}" if method else "aiorpc.stream(...)`"
        return RpcUsageError(f"{call.function} is a generator function: use `async for item in {verb}")
    return RpcUsageError(
        f"{call.function} is no generator function: {_not_streamed(handler)}. "
        "If it returns a generator, write `yield from` in it"
    )


def _not_streamed(handler: Handler) -> str:
    """Advice: the verb in place of a stream."""
    if handler.method:
        return f"use `await ref.rpc_async().{handler.method}(...)`, not ref.stream(), where {_REF}"
    return "use aiorpc.call, not aiorpc.stream"
