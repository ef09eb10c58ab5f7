"""Threads that begin without the context variables of whoever starts them, and how what blocks is awaited in one.

From Python 3.14 on ``-X thread_inherit_context=1``, which free-threaded builds have by default, gives them to every
thread. One of the runtime serves many callers: what a handler has set that was running as the thread was started would
be there in the calls of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from contextvars import Context
from typing import TypeVar

from .errors import Overloaded

T = TypeVar("T")


def daemon(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """A thread that keeps no process from ending, not yet started."""
    if sys.version_info >= (3, 14):
        return threading.Thread(target=target, args=args, name=name, daemon=True, context=Context())
    return threading.Thread(target=target, args=args, name=name, daemon=True)


def waits_in_main_thread() -> bool:
    """Whether this is the main thread, and it runs no loop: as it waits for a call it reads what is for others as well,
    and a signal handler may raise in the midst of that.
    """
    return threading.current_thread() is threading.main_thread() and asyncio._get_running_loop() is None


async def run_in_thread(function: Callable[[], T], name: str) -> T:
    """Run a function that blocks in a thread of its own, and await it. If that is cancelled, the thread runs on.

    Overloaded if the system gives no thread; then it is not run.
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
