"""One Future for every caller: blocking threads, ``await`` on any loop, callbacks, torch's C++ helpers.

The table has its states and transitions. A Future leaves PENDING once. The first settler wins; every later one learns
that it was too late.

    from      event                                     to       seen by
    PENDING   set_result / the answer arrived           VALUE    waiters woken, callbacks run
    PENDING   set_exception / error, deadline, lost peer ERROR   the same, the exception is raised
    PENDING   cancel                                    ERROR    RpcCancelled; the callee is told
    VALUE, ERROR   any settler                          unchanged; `set_*` raise, `_settle` returns False

Invariants
1. ``_callbacks`` begins with `UNCLAIMED`; the thread that removes it with the atomic ``list.remove`` settles. Nothing
   else decides.
2. ``_state`` is written after the outcome: a thread that sees VALUE or ERROR can read the outcome without a lock.
3. Each registered callback runs exactly once: the settler takes it from the list by an atomic ``list.pop``, or a thread
   that registers it and then finds the Future settled. No thread takes one while the Future is PENDING. A waiting
   thread runs none: it removes its own lock, or another thread has taken the lock and is about to release it.
4. User code (`then`, `add_done_callback`) never runs on a thread that runs an event loop, nor in one that waits for a
   call and reads its answer; it is handed to the pool.
5. torch's C++ half is completed once, by the winner, before any callback runs: `torch.futures.wait_all` sees it.
6. Settling runs no code of a value's or an error's class (`foreign.py`), whose exceptions would reach the settler.
7. An exception of a signal handler may interrupt a settler. Another thread then does the rest, and runs the
   interrupted callback again: internal callbacks may run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import torch

from . import foreign
from .callbacks import DEEPEST, Executor, UserCallback, block_observer, hand_over, nested, served
from .errors import RpcCancelled, RpcError, RpcTimeout, RpcUsageError, WouldBlockLoop
from .interrupts import acquire, ends_program, give_back
from .overseeing import LOOK, Watched, oversee
from .sites import CallSite, Unobserved, describe_site
from .threads import daemon

T = TypeVar("T")
S = TypeVar("S")

PENDING, VALUE, ERROR = 0, 1, 2

_CFuture = torch._C.Future
_running_loop = asyncio._get_running_loop
_LOCK = type(threading.Lock())
#: Stands among the callbacks of a Future until a thread settles it.
UNCLAIMED: Any = object()
_FIRST = (0,)
# Seconds after a deadline at which a waiting thread ends the call itself; the loop should do it before.
GRACE = 0.2
_NEVER = float("inf")
# The characters that are shown at either end of a Future's long description.
_SHOWN = 200


class ArrivalForFuture(Protocol):
    """Tensors of a value that streams of devices still make."""

    def join(self) -> None:
        """Make the current streams of this thread wait for them."""


Marks = Callable[[Any], ArrivalForFuture | None]


class Future(torch.futures.Future[T], Generic[T]):
    """A ``torch.futures.Future`` that can also be awaited and cancelled.

    All methods may be called from any thread. ``await`` works on any running loop. Cancelling a task that awaits the
    Future cancels the call only if nothing else waits for it; the callee may have run in part, or not at all.

    devices: as torch's: the devices that tensors of the result may live on. Completing the Future records the work of
        the current streams of these devices. Taking the value (`wait`, `value`, ``await``, a callback) makes the
        current streams wait for that work. The host waits for no device. Futures of calls do the same.
    """

    # Defaults on the class: an instance carries only what differs, which keeps making one cheap.

    # Set by its maker before other code has it.
    _subject: str = "a Future"  # what it stands for
    _site: CallSite | None = None  # where it was made; if set, an unseen failure is logged
    _loop: asyncio.AbstractEventLoop | None = None  # the loop that settles it; a wait on its thread would never end
    _home_thread: int | None = None  # the thread that made that loop and has to run it, if known
    _deadline: float | None = None  # the latest time of its end (`time.monotonic()`), if known
    _executor: Executor | None = None
    _sources: Sequence[Future[Any]] = ()  # Futures that it waits for
    _arrival: ArrivalForFuture | None = None  # of tensors of the value; set before it settles

    _state: int = PENDING
    _value: Any = None
    _error: BaseException | None = None
    _trace: TracebackType | None = None  # the error's first traceback
    _unobserved: Unobserved | None = None
    _seen: bool = False  # whether its error needs no log: see `_mark_seen`
    _marks: Marks | None = None  # makes the arrival of a callback's value
    _apart: bool = False  # whether the settling thread must not run users' callbacks
    _twins: bool = False  # whether torch's half gets a twin of the value: see `_twin`
    _devices: list[torch.device] = []  # noqa: RUF012  # never changed
    _parent: Callable[[], Future[Any] | None] = staticmethod(lambda: None)  # whose `then` made it
    _homes_beside: Collection[Home] = ()  # further loops that have to run

    def __init__(self, *, devices: Sequence[int | str | torch.device] | None = None) -> None:
        if devices:
            self._devices = [torch.device(device) for device in devices]
        _CFuture.__init__(self, self._devices)
        self._callbacks: list[_Registered] = [UNCLAIMED]

    # --- settling -----------------------------------------------------------------------------------------------------

    def _settle(self, value: Any, error: BaseException | None = None) -> bool:
        """Complete with a value or any error; False if another thread did so first. Any thread.

        Raises only exceptions of signal handlers, and Ctrl-C in a callback that runs here; it is complete then.
        """
        try:
            try:
                self._callbacks.remove(UNCLAIMED)
            except ValueError:
                return False
            if (
                error is None
                and self._arrival is None
                and not (self._devices or self._twins or issubclass(type(value), BaseException))
            ):  # most calls
                self._value = value
                self._state = VALUE
                _CFuture.set_result(self, value)
            else:
                self._publish_outcome(value, error)
            if self._callbacks:
                self._run_callbacks(self._apart)
        except BaseException:
            self._settle_elsewhere(value, error)
            raise
        return True

    def _publish_outcome(self, value: Any, error: BaseException | None) -> None:
        """Store the outcome and complete torch's half, or the rest of that if `_settle` was interrupted."""
        if self._state != PENDING:
            pass
        elif error is None:
            self._value = value
            self._state = VALUE
        else:
            self._error = error
            self._trace = foreign.field(error, "__traceback__")
            if self._site is not None and self._unobserved is None:  # before other threads can look at it
                self._unobserved = Unobserved(self._describe(), error)
                if self._seen:
                    self._unobserved.seen = True
            self._state = ERROR
        if _CFuture.done(self):
            return
        if self._error is not None:
            _CFuture._set_unwrap_func(self, _raise)
            _CFuture.set_result(self, _Failure(self, self._error))
            return
        if self._arrival is not None:  # torch's helpers take the value from its half
            _CFuture._set_unwrap_func(self, partial(_joined, self._arrival))
        if self._devices:
            self._complete_on_devices(value)
        elif self._twins:
            _CFuture.set_result(self, self._twin(value))
        elif foreign.is_a(value, BaseException):  # raising it would make the cycle that `_Failure` describes
            twin = foreign.copy_of(value)
            _CFuture.set_result(self, value if twin is None else twin)
        else:
            _CFuture.set_result(self, value)

    def _settle_elsewhere(self, value: Any, error: BaseException | None) -> None:
        """`_settle` was interrupted: if this thread has claimed the Future, another one does the rest."""
        if UNCLAIMED not in self._callbacks:
            daemon(self._settle_the_rest, value, error, name="aiorpc-settler").start()

    def _settle_the_rest(self, value: Any, error: BaseException | None) -> None:
        """Do the rest of an interrupted `_settle`. In a thread of its own, where no signal handler runs."""
        self._publish_outcome(value, error)
        self._run_callbacks(True)

    def _complete_on_devices(self, value: Any) -> None:
        """Complete torch's half, which pickles the value to find its tensors, and may fail."""
        try:
            _CFuture.set_result(self, value)
        except BaseException as error:
            self._value, self._error = None, RpcError(f"the value of {self._describe()} is none: {foreign.said(error)}")
            self._state = ERROR
            _CFuture._set_unwrap_func(self, _raise)
            _CFuture.set_result(self, _Failure(self, self._error))

    def _twin(self, value: T) -> T:
        """An equal value for torch's half, without errors whose tracebacks lead back here. See `_Failure`."""
        return value

    def set_result(self, result: T) -> None:
        """Complete with `result`. RpcUsageError if it is already complete."""
        if not self._settle(result):
            raise self._already_complete()

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]  # torch types result as T
        """Complete with an error, which waiters raise. RpcUsageError if it is already complete.

        AssertionError, as in torch, if `result` is not an Exception.
        """
        if not isinstance(result, Exception):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        if not self._settle(None, result):
            raise self._already_complete()

    def _already_complete(self) -> RpcUsageError:
        return RpcUsageError(
            f"{self._describe()} is already complete. Note that a Future can only be marked completed once."
        )

    def cancel(self, msg: object = None) -> bool:
        """Give up on the answer. True if this call settled it; the callee is then told to stop. Any thread.

        A running ``async def`` handler is cancelled. A handler in a thread gets RpcCancelled where it waits for
        something of aiorpc, or can ask ``aiorpc.cancelled()``; its result is dropped.
        """
        reason = f": {msg}" if msg else ""
        error = RpcCancelled(f"{self._describe()} was cancelled{reason}")
        if not self._settle(None, error):
            return False
        self._on_cancel()
        return True

    def _on_cancel(self) -> None:
        """Called after `cancel` settled it. A call's tells the callee."""

    # --- looking ------------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it has settled; never blocks."""
        return self._state != PENDING

    def cancelled(self) -> bool:
        """Whether it ended with RpcCancelled: by `cancel`, or as the callee's answer."""
        return foreign.is_a(self._error, RpcCancelled)

    def value(self) -> T:
        """The result of a completed Future; raises its error, or RpcUsageError if it is not complete."""
        if self._state == PENDING:
            raise RpcUsageError(f"value() of {self._describe()}: it is not complete yet; use wait() or await it")
        if self._error is None and self._arrival is None and not self._devices:  # as `_outcome`, for most calls
            value: T = self._value
            return value
        try:
            return self._outcome()
        finally:
            del self  # see _outcome

    def exception(self) -> BaseException | None:
        """The error of a completed Future, None if it has a value; RpcUsageError if it is not complete."""
        if self._state == PENDING:
            raise RpcUsageError(f"exception() of {self._describe()}: it is not complete yet")
        if self._unobserved is not None:
            self._unobserved.seen = True
        return self._error

    @property
    def _waiters(self) -> int:
        """How many wait for it now: threads in `wait`, tasks that await it, and callbacks."""
        return len(self._callbacks) - (UNCLAIMED in self._callbacks)

    def _describe(self) -> str:
        """What this Future stands for, with the place that made it, if known."""
        return self._subject if self._site is None else f"{self._subject} (made at {describe_site(self._site)})"

    def __repr__(self) -> str:
        state = ("pending", "done", "failed")[self._state]
        return f"<aiorpc.Future {state}: {self._describe()}>"

    def _mark_seen(self) -> None:
        """Its error, present or future, is dealt with: log nothing when it is collected."""
        self._seen = True
        if self._unobserved is not None:
            self._unobserved.seen = True

    def _outcome(self) -> T:
        if self._error is None:
            if self._arrival is not None:
                self._arrival.join()
            elif self._devices:
                _CFuture.wait(self)  # torch's half knows the streams of its completion
            value: T = self._value
            return value
        self._mark_seen()
        try:
            # Each raise appends to the traceback, so start again from the first one.
            raise foreign.with_traceback(self._error, self._trace)
        finally:
            del self  # the traceback holds this frame: a cycle would keep all of the callers' locals alive

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until it settles; returns the value or raises the error.

        Ctrl-C interrupts it. A call whose own deadline passes meanwhile ends with RpcTimeout, also if its loop does not
        run.

        timeout: seconds to wait; None relies on the call's own deadline. It bounds the waiting, not the call: when it
            passes RpcTimeout is raised, and the Future is untouched.

        Raised here: the error of the Future; WouldBlockLoop on the thread of the loop that has to settle it, and after
        a second on a thread whose loop should run and does not; RpcUsageError for a negative timeout. RpcCancelled,
        once, in a handler whose caller has given up, unless the handler has asked ``aiorpc.cancelled()``.
        """
        if timeout is not None and not timeout >= 0:  # not a number is refused, too
            raise RpcUsageError(f"timeout must not be negative; got {timeout!r}")
        if self._state == PENDING:
            self._block(timeout)
        if self._error is None and self._arrival is None and not self._devices:  # as `_outcome`, for most calls
            value: T = self._value
            return value
        try:
            return self._outcome()
        finally:
            del self  # see _outcome

    def _block(self, timeout: float | None) -> None:
        loop = _running_loop()
        if loop is not None and (loop is self._loop or any(loop is home for home, _ in self._homes())):
            raise WouldBlockLoop(
                f"wait() on {self._describe()} would block the event loop that has to answer it; "
                "use `await future` here, or call it from a `def` handler or another thread"
            )
        give_back()
        executor = self._executor
        if executor is None or not executor.may_stay_awake:
            self._sleep(timeout)
            return
        began = time.monotonic()
        executor.stay_awake(self._look_out, self.done, timeout)
        if self._state == PENDING:
            self._sleep(timeout)
        executor.waited(time.monotonic() - began)

    def _look_out(self, enough: Callable[[], bool]) -> None:
        """Read the answers that it waits for in this thread, until `enough()`."""
        for one in self._awaited():
            if type(one)._look_out is not Future._look_out:  # a call
                one._look_out(enough)

    def _awaited(self) -> Iterator[Future[Any]]:
        """This Future and those that it waits for, without the settled ones."""
        left: list[Future[Any]] = [self]  # not by recursion, and each once: `_end_overdue` says why
        seen: dict[int, Future[Any]] = {}
        while left:
            one = left.pop()
            if one._state == PENDING and id(one) not in seen:
                seen[id(one)] = one
                yield one
                left.extend(reversed(one._sources))

    def _sleep(self, timeout: float | None) -> None:
        # A Python lock, not torch's C++ wait: it can be interrupted by a signal on the main thread.
        gate = threading.Lock()
        gate.acquire()
        self._callbacks.append(gate)
        if self._state != PENDING and self._remove_callback(gate):  # the settler runs the others
            return
        observer, call = block_observer.get(), served.get()
        if observer is not None:
            observer.enter_blocked()
        given_up = ""
        woken: bool | None = None
        try:
            if call is not None:
                call.enter_wait(partial(self._let_go, gate))
            woken = self._wait_at(gate, timeout)
        finally:
            if woken is None:  # interrupted
                self._remove_callback(gate)
            if observer is not None:
                observer.exit_blocked()
            if call is not None:
                given_up = call.exit_wait()
        if given_up:  # as in `__await__`
            self._remove_callback(gate)
            if not self._waiters and not self.cancel():  # as there
                self._mark_seen()
            raise RpcCancelled(given_up)
        # If the callback is gone already, another thread settled it just as the time was up: the outcome is there.
        if not woken and self._remove_callback(gate) and self._state == PENDING:
            raise RpcTimeout(f"waited {timeout:g} s for {self._describe()}", seconds=timeout or 0.0)

    def _wait_at(self, gate: threading.Lock, timeout: float | None) -> bool:
        """Wait until it settles, or `timeout` seconds have passed; whether the lock was released."""
        now = time.monotonic()
        until = _NEVER if timeout is None else now + timeout
        due = (self._end_overdue(now) if self._deadline is None else self._deadline) + GRACE
        while not acquire(gate, max(0.0, min(until - now, due - now, LOOK))):
            now = time.monotonic()
            if self._state != PENDING or now >= until:
                return False
            self._refuse_idle_loop(False)
            due = self._end_overdue(now) + GRACE
        return True

    def _let_go(self, gate: threading.Lock) -> None:
        """End a thread's wait. The thread that takes the lock out of the list releases it."""
        if self._remove_callback(gate):
            gate.release()

    def _end_overdue(self, now: float) -> float:
        """End overdue calls that it waits for, because their loops have not. Any thread.

        Returns the earliest deadline of the others, or infinity.
        """
        due = _NEVER
        # No recursion: chains of `then` may be long. Each once: paths may fork and meet again.
        left: list[Future[Any]] = [self]
        seen: dict[int, Future[Any]] = {}
        while left:
            one = left.pop()
            parent = one._parent()
            for each in one._sources if parent is None else [*one._sources, parent]:
                if type(each)._end_overdue is not Future._end_overdue:  # a call, with a deadline of its own
                    due = min(due, each._end_overdue(now))
                elif id(each) not in seen:
                    seen[id(each)] = each
                    left.append(each)
        return due

    def _homes(self) -> set[Home]:
        """The loops that have to run for it to settle."""
        homes: set[Home] = set()
        for one in self._awaited():
            homes.add((one._loop, one._home_thread))
            homes.update(one._homes_beside)
        return homes

    def _refuse_idle_loop(self, awaited: bool) -> None:
        """Raise WouldBlockLoop if a loop of this thread has to run and does not.

        awaited: whether this thread runs another loop; if not, it waits.
        """
        here = threading.get_ident()
        for loop, thread in self._homes():
            if thread == here and loop is not None and not (loop.is_running() or loop.is_closed()):
                raise WouldBlockLoop(
                    f"{'to await' if awaited else 'wait() on'} {self._describe()} would never end: this thread is to "
                    f"run the loop that has to settle it, and {'runs another one' if awaited else 'waits'}; run `await "
                    "future` on that loop, as `loop.run_until_complete(...)` does"
                )

    def __await__(self) -> Generator[Any, None, T]:
        if self._state == PENDING:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            wake = loop, waiter
            self._callbacks.append(wake)
            if self._state != PENDING:
                self._run_callbacks()
            try:
                if loop is self._loop or (self._loop is None and not self._sources):
                    yield from waiter
                else:
                    yield from self._await_overseen(loop, waiter)
            except (asyncio.CancelledError, GeneratorExit, RpcError) as error:
                self._await_no_more(wake, error)
                raise
        try:
            if self._error is None and self._arrival is None and not self._devices:  # as `_outcome`, for most calls
                value: T = self._value
                return value
            return self._outcome_for_task()
        finally:
            del self  # see _outcome

    def _await_overseen(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> Generator[Any]:
        """Await what another loop settles, and look meanwhile whether that loop runs."""
        watched: Watched = oversee(self, loop, waiter)
        try:
            yield from waiter
        finally:
            del watched[waiter]

    def _await_no_more(self, wake: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]], error: object) -> None:
        """The task that awaits it was cancelled, its coroutine was dropped, or the overseer has raised."""
        was_registered = self._remove_callback(wake)
        if isinstance(error, RpcError) and not isinstance(error, WouldBlockLoop):
            return  # this process was forked
        # If this task was the last to wait, the callee is told. If the Future has settled just now, or another thread
        # is just settling it, its error does not matter any more.
        if not was_registered or not (self._waiters or self.cancel()):
            self._mark_seen()

    def _outcome_for_task(self) -> T:
        try:
            return self._outcome()
        except asyncio.CancelledError as error:  # the Future has ended with that; the task was not cancelled
            raise RpcCancelled(f"{self._describe()} has ended with {foreign.said(error)}") from None
        finally:
            del self  # see _outcome

    # --- callbacks ----------------------------------------------------------------------------------------------------

    def add_done_callback(self, callback: Callable[[Future[T]], Any]) -> None:
        """Call `callback(self)` once it settles; at once if it has. Never on a thread that runs a loop.

        The callback may block, and may make blocking calls. It runs in this thread if the Future has settled, in a
        thread of the pool if it stands for a call, and otherwise in the thread that settles it. Callbacks run one after
        the other, in their order, as do those of `then`. A callback's error is logged; Ctrl-C in the main thread goes
        on.
        """
        if not callable(callback):
            raise TypeError(f"add_done_callback(): incompatible function arguments: {callback!r} is not callable")
        self._when_settled(UserCallback(callback, self._executor))

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A Future of `callback(self)`, run once this one settles; its error becomes the new Future's error.

        For the Future of a call, an unseen error is logged, like an unseen error of the call.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments: {callback!r} is not callable")
        child: Future[S] = Future(devices=self._devices)
        child._subject = f"then({getattr(callback, '__qualname__', callback)!s}) of {_shortened(self._subject)}"
        child._site = self._site  # only the callback has seen its failure
        child._loop, child._executor = self._loop, self._executor
        child._home_thread = self._home_thread
        child._parent = weakref.ref(self)  # weak: chains of them would keep all values
        if self._sources or self._homes_beside:
            child._homes_beside = self._homes()

        marks = self._marks
        child._marks = marks
        held = [child]

        def run(parent: Future[T]) -> None:
            made = held[0]  # it runs once
            try:
                value = callback(parent)
                made._arrival = marks(value) if marks is not None else None
                made._settle(value)
            except BaseException as error:
                made._settle(None, error)
                if ends_program(error):
                    raise
            finally:
                # The traceback of the error has this frame, which must not lead back to the Future (`_outcome`).
                held.clear()
                del made, parent

        self._when_settled(UserCallback(run, self._executor))
        return child

    def _when_settled(self, callback: Callable[[Future[Any]], None]) -> None:
        """Register an internal callback: runs in the settling thread, must be quick and must not raise."""
        self._callbacks.append(callback)
        if self._state != PENDING:
            self._run_callbacks()

    def _remove_callback(self, callback: _Registered) -> bool:
        """Take a callback back; False if it has run or is about to."""
        try:
            self._callbacks.remove(callback)
        except ValueError:
            return False
        return True

    def _run_callbacks(self, apart: bool = False) -> None:
        callbacks = self._callbacks
        taken: list[_Registered] = []
        users: list[UserCallback] = []
        try:
            while callbacks:
                try:
                    taken += map(callbacks.pop, _FIRST)  # by one call of C: an interrupt cannot lose it
                except IndexError:  # another thread has come first
                    break
                callback = taken[0]
                if type(callback) is tuple and callback[0] is _running_loop():  # a task of this loop that awaits
                    waiter = callback[1]
                    if not waiter.done():
                        waiter.set_result(None)
                elif type(callback) is _LOCK:  # a thread that waits
                    callback.release()
                else:
                    self._run_callback(callback, apart, users)
                del taken[0]
            if users:
                hand_over(self, users)
        except BaseException:
            self._run_elsewhere(taken, users)
            raise

    def _run_callback(self, callback: _Registered, apart: bool, users: list[UserCallback]) -> None:
        """Run a callback that is no waiter of this thread. users: gets that of a user which has to run elsewhere."""
        kind = type(callback)
        if kind is tuple:  # a task of another loop that awaits
            loop, waiter = callback
            # A loop that is closed, maybe just now, has no waiters left; the settler must not hear of it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(wake, waiter)
        elif kind is UserCallback and (apart or _running_loop() is not None or nested.get() >= DEEPEST):
            users.append(callback)
        else:
            callback(self)

    def _run_elsewhere(self, taken: list[_Registered], users: list[UserCallback]) -> None:
        """`_run_callbacks` was interrupted: another thread goes on. taken: what it was about to run, if anything."""
        for callback in taken:
            if type(callback) is _LOCK:
                with contextlib.suppress(RuntimeError):  # it has been released
                    callback.release()
            elif type(callback) is not UserCallback or not (callback.begun or callback in users):
                self._callbacks.insert(0, callback)
        daemon(self._go_on, users, name="aiorpc-settler").start()

    def _go_on(self, users: list[UserCallback]) -> None:
        """Do the rest of an interrupted `_run_callbacks`. users: maybe handed over before; each is taken out once."""
        if users:
            hand_over(self, users)
        self._run_callbacks(True)


#: A waiter of a Future: an internal callback; a user's callback; the loop and the asyncio Future of a task that awaits
#: it; or the lock of a waiting thread. The last two are not functions, which saves a call of one.
_Registered = Any


class _Failure:
    """Stands for an error in torch's C++ half: a weak way to the error, and an equal one in case it is gone.

    Raising fills in the traceback, whose frames often hold the Future. The garbage collector does not see that cycle
    through C++: with the error itself there, Future and frames would never be freed.
    """

    __slots__ = ("future", "twin")

    def __init__(self, future: Future[Any], error: BaseException) -> None:
        self.future = weakref.ref(future)
        self.twin = twin_of(error)


def twin_of(error: BaseException) -> BaseException:
    """An equal error without a traceback, which leads to no frames."""
    twin = foreign.copy_of(error)
    if twin is None:
        twin = RpcError(foreign.said(error))
        foreign.set_cause(twin, foreign.field(error, "__cause__"))
    return twin


def _raise(failure: _Failure) -> None:
    future = failure.future()
    error = future.exception() if future is not None else None
    raise foreign.with_traceback(failure.twin, None) if error is None else error


def _joined(arrival: ArrivalForFuture, value: Any) -> Any:
    arrival.join()
    return value


def _shortened(subject: str) -> str:
    """A Future's description for the text of a derived Future: texts must not grow along a chain."""
    return subject if len(subject) <= 2 * _SHOWN else f"{subject[:_SHOWN]}...{subject[-_SHOWN:]}"


def wake(waiter: asyncio.Future[None]) -> None:
    """On the loop of an awaiting task: let it go on, unless it was cancelled."""
    if not waiter.done():
        waiter.set_result(None)


AnyFuture = torch.futures.Future[Any]
#: A loop and the thread that made it, if known.
Home = tuple[asyncio.AbstractEventLoop | None, int | None]


def when_done(future: AnyFuture, callback: Callable[[AnyFuture], None]) -> None:
    """Run an internal callback once any kind of torch Future settles, in the settling thread."""
    if isinstance(future, Future):
        future._when_settled(callback)
    else:
        _CFuture.add_done_callback(future, callback)


def is_future(value: object) -> TypeGuard[AnyFuture]:
    """Whether it is a torch Future of any kind (torch's ``then`` returns its bare C++ base)."""
    return isinstance(value, _CFuture)


def outcome(future: AnyFuture) -> tuple[Any, BaseException | None]:
    """Value and error of a completed torch Future; marks an error as seen."""
    try:
        return future.value(), None
    except BaseException as error:
        return None, error
