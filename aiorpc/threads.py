"""Threads that begin without context variables, and blocking functions that are awaited in a thread.

From Python 3.14 on ``-X thread_inherit_context=1``, the default of free-threaded builds, gives a new thread the
variables of the thread that starts it. The runtime's threads serve many callers, who must not see each other's
variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import TypeVar

from .errors import Overloaded

T = TypeVar("T")


def daemon(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """A daemon thread, not yet started."""
    if sys.version_info >= (3, 14):
        return threading.Thread(target=target, args=args, name=name, daemon=True, context=Context())
    return threading.Thread(target=target, args=args, name=name, daemon=True)


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the thread's number. Any thread.

    Without the garbage collector meanwhile: in some releases of Python 3.11 and 3.12 a collection inside of
    ``sys._current_frames`` can stop all threads for ever (python/cpython#106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def waits_in_main_thread() -> bool:
    """Whether this is the main thread and runs no loop: a signal handler may raise while it reads answers here."""
    return threading.current_thread() is threading.main_thread() and asyncio._get_running_loop() is None


async def run_in_thread(function: Callable[[], T], name: str) -> T:
    """Run a blocking function in a thread of its own, and await it. If the task is cancelled, the thread runs on.

    Raises Overloaded if no thread can be started.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def finish(value: object, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def run() -> None:
        value, failure = None, None
        try:
            value = function()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish, value, failure)

    thread = daemon(run, name=name)
    try:
        thread.start()
    except RuntimeError as error:
        raise Overloaded(f"thread {name} cannot be started: {error}; nothing was run") from error
    result: T = await done
    thread.join()
    return result
