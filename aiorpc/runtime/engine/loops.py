"""A loop in a thread of its own, for scripts without asyncio and for programs whose own loop is busy."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..._typing import Coro
from ...callbacks import Served, block_observer, served
from ...errors import RendezvousError, RpcCancelled, WorkerClosed
from ...interrupts import acquire
from ...locks import Lock
from ...threads import daemon
from ...undoing import on_error

T = TypeVar("T")

_STDERR = 2
# Seconds for the last steps of a loop that has ended by itself.
_LAST_GRACE = 10.0
# Seconds between two looks of a waiting thread whether the loop has ended.
_LOOK = 1.0
# Seconds that an ending interpreter waits for the thread of a loop.
_LAST_MOMENT = 0.5
# Seconds that an interrupted thread waits for the end of its coroutine.
_INTERRUPTED_GRACE = 5.0


def occupy_standard_streams() -> None:
    """Open /dev/null for those of the descriptors 0, 1 and 2 that this process has closed, as daemons do.

    Otherwise sockets would get these numbers: a C library's output to stderr would go into a connection, and uvloop
    aborts the process when it closes one of them.
    """
    with contextlib.suppress(OSError):  # all descriptors are in use, these three, too; or there is no /dev
        while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _STDERR:
            os.set_inheritable(descriptor, True)  # as standard streams are
        os.close(descriptor)


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop if it is installed, otherwise of asyncio."""
    occupy_standard_streams()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Handed(Generic[T]):
    """A coroutine that runs on a loop for a thread, which blocks for its result in `wait`.

    make: makes the coroutine, on the loop; its error is the result. begun: whether the coroutine was made. ended:
    whether there is a result, or none will come.

    The loop never waits for a lock that the thread has: `_settled` is the thread's alone.
    """

    def __init__(self, make: Callable[[], Coro[T]], loop: asyncio.AbstractEventLoop) -> None:
        self.ended: bool = False
        self.begun: bool = False
        self._make = make
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._settled = threading.Lock()
        self._settled.acquire()

    def _begin(self) -> None:
        if self.ended:
            return
        try:
            coroutine = self._make()
            self.begun = True
            self._task = self._loop.create_task(coroutine)
            self._task.add_done_callback(self._on_done)
        except BaseException as error:
            self._error = error
            self._end()

    def _on_done(self, task: asyncio.Task[T]) -> None:
        self._task = None  # freed on the loop, not in the thread
        if not task.cancelled():
            self._error = task.exception()
            if self._error is None:
                self._result.append(task.result())
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken before
            self._settled.release()

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.ended:
            self._end()

    def _call(self, step: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(step)
        except RuntimeError:
            if not self._loop.is_closed():  # of a signal handler
                raise
            return False
        return True

    def _wait_until_ended(self, call: Served | None) -> None:
        """RpcCancelled if the caller of that call, which this thread serves, gives up first."""
        try:
            if call is not None:
                call.enter_wait(self._wake)
            while not (self.ended or acquire(self._settled, _LOOK) or self._loop.is_closed()):
                pass
        finally:
            given_up = "" if call is None else call.exit_wait()
        if given_up:
            raise RpcCancelled(given_up)

    def _end_soon(self) -> None:
        """The wait was interrupted: cancel it, and give it a moment to end."""
        until = time.monotonic() + _INTERRUPTED_GRACE
        if self._call(self._give_up):
            while not self.ended and time.monotonic() < until and not self._loop.is_closed():
                acquire(self._settled, 0.05)

    def wait(self, ended: str) -> T:
        """Run the coroutine, and block for its result. An error of a signal handler (Ctrl-C) cancels it, waits for its
        end and is raised; likewise RpcCancelled in a handler whose caller gives up.

        WorkerClosed, with the text `ended`, if the loop has ended first.
        """
        observer, call = block_observer.get(), served.get()
        if observer is not None:
            observer.enter_blocked()
        try:
            with on_error(self._end_soon):
                if self._call(self._begin):
                    self._wait_until_ended(call)
        finally:
            if observer is not None:
                observer.exit_blocked()
        # Its traceback would keep this object, and with it all locals of the callers.
        error, self._error = self._error, None
        if error is None:
            if self._result:
                return self._result.pop()
            raise WorkerClosed(ended)
        try:
            raise error
        finally:
            del error


def _mark_seen(future: asyncio.Future[T]) -> None:
    """Keep asyncio from logging its error."""
    if not future.cancelled():
        future.exception()


async def _bounded(coroutine: Coro[None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_GRACE):
            await coroutine


class LoopThread:
    """A running loop in a daemon thread ``aiorpc-<name>-loop``, from `start` on; `close` ends both.

    The thread makes its loop itself: an interrupted main thread would leave a half-made loop behind.

    on_end: called in that thread if the loop ends by itself (``SystemExit`` in a task, ``loop.stop()``), with the
    cause; the coroutine that it returns runs to its end before the loop is closed.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, name: str) -> None:
        self.on_end: Callable[[BaseException | None], Coro[None]] | None = None
        self._name = name
        self._closing = False
        self._over = False  # the loop ended by itself and takes no more
        self._handed: set[concurrent.futures.Future[Any]] = set()  # coroutines that run there for other loops
        self._blocking: set[Handed[Any]] = set()  # the same for threads
        self._lock = Lock()  # of `_begun`, `_over` and `_handed`
        self._begun = False  # whether the loop was made
        self._failure: Exception | None = None  # why it could not be made
        self._ready = threading.Lock()  # held until one of them is known
        self._ready.acquire()
        self._thread = daemon(self._run, name=f"aiorpc-{name}-loop")

    def start(self) -> LoopThread:
        """Start the thread and its loop, once. RendezvousError if the system gives no thread, or no descriptors. Call
        `close` after any error."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise self._cannot_start(error) from error
        acquire(self._ready)
        if self._failure is not None:
            raise self._cannot_start(self._failure) from self._failure
        return self

    def _cannot_start(self, error: Exception) -> RendezvousError:
        return RendezvousError(f"worker {self._name!r} cannot have a loop and a thread of its own: {error}")

    def _run(self) -> None:
        try:
            with self._lock:
                if self._closing:  # the starting thread was interrupted
                    return
                self.loop = new_loop()
                self._begun = True
        except Exception as error:
            self._failure = error
            return
        finally:
            self._ready.release()
        asyncio.set_event_loop(self.loop)
        cause: BaseException | None = None
        try:
            self.loop.run_forever()
        except BaseException as error:
            cause = error
        try:
            if not self._closing:
                self._end(cause)
        finally:
            asyncio.set_event_loop(None)
            with self._lock:
                self.loop.close()  # here: a thread that waits for this one may be interrupted

    def _end(self, cause: BaseException | None) -> None:
        """The loop has ended by itself: cancel its tasks, and end all waits for it."""
        if self.on_end is not None:
            self._finish(self.on_end(cause))
        with self._lock:
            self._over = True
        self._finish(self._last())

    async def _last(self) -> None:
        await asyncio.sleep(0)  # coroutines handed over just before become tasks
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)
        await asyncio.sleep(0)  # waiting threads get the outcome

    def _finish(self, coroutine: Coro[None]) -> None:
        """Run the loop until the coroutine is done, even if another task stops the loop again."""
        task = self.loop.create_task(_bounded(coroutine))
        until = time.monotonic() + 2 * _LAST_GRACE
        while not task.done() and time.monotonic() < until:
            with contextlib.suppress(BaseException):
                self.loop.run_until_complete(task)

    def _hand_over(self, coroutine: Coro[T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if self._over or self.loop.is_closed():
                coroutine.close()
                raise WorkerClosed(self._why_over())
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self._handed.add(future)
        future.add_done_callback(self._handed.discard)
        return future

    def _why_over(self) -> str:
        return f"the loop of worker {self._name!r} has ended"

    def run(self, coroutine: Coro[T]) -> T:
        """Run a coroutine there and block for its result, as `Handed.wait`."""

        def make() -> Coro[T]:
            if self._over:  # `_last` has run, and would not end it
                raise WorkerClosed(self._why_over())
            return coroutine

        handed = Handed(make, self.loop)
        try:
            self._blocking.add(handed)
            return handed.wait(self._why_over())
        finally:
            # If this thread was interrupted twice its coroutine may go on, and `close` waits for it.
            for each in tuple(self._blocking):
                if each.ended:
                    self._blocking.discard(each)
            if not handed.begun:  # the loop ends, or this thread was interrupted
                handed.ended = True
                coroutine.close()

    async def run_async(self, coroutine: Coro[T]) -> T:
        """Run a coroutine there and await its result on the running loop.

        A cancelled caller cancels it there, and returns after its end, however often it is cancelled. The coroutine
        begins in any case, because it may have to clean up.
        """
        running: list[asyncio.Task[T]] = []

        async def begun() -> T:
            task = asyncio.current_task()
            assert task is not None, "a coroutine runs in one"
            running.append(task)
            return await coroutine

        def give_up() -> None:
            if running:
                running[0].cancel()
            elif not handed.done():
                self.loop.call_soon(give_up)

        handed = self._hand_over(begun())
        result = asyncio.wrap_future(handed)
        try:
            await asyncio.wait((result,))
        except asyncio.CancelledError:
            result.add_done_callback(_mark_seen)
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(give_up)
            until = time.monotonic() + _INTERRUPTED_GRACE
            while not result.done() and time.monotonic() < until:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((result,), timeout=until - time.monotonic())
            raise
        if result.cancelled() and self._over:
            raise WorkerClosed(self._why_over())
        return result.result()

    @property
    def is_here(self) -> bool:
        """Whether the calling code runs in that thread."""
        return threading.current_thread() is self._thread

    def end_at_exit(self) -> None:
        """As `close`, when the interpreter exits: for a moment only, without a wait for running coroutines.

        A running uvloop would use the thread state of the dead interpreter, and the process would end by a signal.
        """
        self._closing = True
        self._stop(_LAST_MOMENT)

    def close(self) -> None:
        """End the loop and its thread. Idempotent; not from the thread itself.

        Running coroutines get a moment first: several threads may wait for the end of one worker, and each closes this.
        """
        self._closing = True
        try:
            self._wait_for_what_runs()
        finally:  # also if this thread is interrupted
            with self._lock:
                begun = self._begun
            if not begun:
                with contextlib.suppress(RuntimeError):  # the thread was not started, or ends at once
                    self._thread.join(_LOOK)
            elif not self.loop.is_closed():
                self._stop(5.0)

    def _wait_for_what_runs(self) -> None:
        if not self._over:
            until = time.monotonic() + _LOOK
            concurrent.futures.wait(tuple(self._handed), _LOOK)
            while not all(each.ended for each in tuple(self._blocking)) and time.monotonic() < until:
                time.sleep(0.001)
        if self._over and threading.current_thread() is not self._thread:
            self._thread.join(5.0)  # the thread closes its loop itself

    def _stop(self, seconds: float) -> None:
        """Stop the loop, and wait so many seconds for the thread, which closes it."""
        with contextlib.suppress(RuntimeError):  # another thread closed it
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(seconds)
