"""A loop in a thread of its own: for scripts that know no asyncio, and for programs whose own loop is busy."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..futures import block_observer

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where there is one, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def run_in_thread(function: Callable[[], T], name: str) -> T:
    """Run something that blocks in a thread of its own, and await it. Cancelled, the thread is left to its own end."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
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
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish, value, failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    result: T = await done
    thread.join()
    return result


class LoopThread:
    """A running loop in a daemon thread ``aiorpc-<name>-loop``; `close` ends both."""

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self._run, name=f"aiorpc-{name}-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            asyncio.set_event_loop(None)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and block for its result; Ctrl-C cancels it, waits for its end and is raised."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        observer = block_observer.get()
        if observer is not None:
            observer.enter_blocked()
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            concurrent.futures.wait([future], timeout=5.0)
            raise
        finally:
            if observer is not None:
                observer.exit_blocked()

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and await its result on the running loop."""
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()

        async def watched() -> T:
            try:
                return await coroutine
            finally:
                ended.set_result(None)

        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(watched(), self.loop))
        except asyncio.CancelledError:
            # It is cancelled there as well; let it clean up before the loop ends.
            await asyncio.wait((asyncio.wrap_future(ended),), timeout=5.0)
            raise

    def close(self) -> None:
        """End the loop and its thread. Idempotent; not from the thread itself."""
        if self.loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):  # another thread has closed it meanwhile
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self.loop.close()
