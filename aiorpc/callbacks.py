"""Users' callbacks, which never run on threads of loops, and how waiting threads report to their pool.

One thread runs a list of callbacks in order. An interrupted settler may hand a list over twice (`futures.py`, invariant
7); each callback is taken by an atomic ``list.pop``, so it runs once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any, Protocol

from . import foreign
from .errors import WorkerClosed
from .interrupts import ends_program
from .logs import logger
from .sites import spates
from .threads import daemon


class Settled(Protocol):
    """A settled Future, for running its callbacks."""

    def _describe(self) -> str: ...


class BlockObserver(Protocol):
    """Hears when a thread of a pool begins and ends a wait: the pool runs another thread meanwhile."""

    def enter_blocked(self) -> None: ...

    def exit_blocked(self) -> None: ...


class Executor(Protocol):
    """Runs users' callbacks if the settling thread must not (`ThreadPool`).

    It also decides which threads wait without sleeping. may_stay_awake: whether any thread may.
    """

    @property
    def may_stay_awake(self) -> bool: ...

    def submit(self, fn: Callable[..., None], *args: object) -> None: ...

    def stay_awake(
        self, look: Callable[[Callable[[], bool]], None], done: Callable[[], bool], timeout: float | None
    ) -> None:
        """Call `look(enough)` if a wait without sleeping pays; `enough()` tells `look` to stop."""
        ...

    def waited(self, seconds: float) -> None:
        """This thread has waited for `seconds`, asleep or awake."""
        ...


# Set in the threads of a handler pool; a wait there does not use up the pool.
block_observer: ContextVar[BlockObserver | None] = ContextVar("aiorpc_block_observer", default=None)


class Served(Protocol):
    """The call that the running code serves (`ServedCall`), for waits inside of it."""

    def enter_wait(self, wake: Callable[[], object]) -> None:
        """This thread is about to wait. If the caller gives up before `exit_wait`, any thread calls `wake`, once."""

    def exit_wait(self) -> str:
        """The wait has ended. Returns the text of the RpcCancelled to raise if the caller has given up and no wait has
        raised that yet; or empty.
        """


# The call that code serves (runtime/calls/current.py); None outside of handlers.
served: ContextVar[Served | None] = ContextVar("aiorpc_call", default=None)


# The id of the autograd context that code runs in (runtime/gradients/contexts.py); 0 or None if there is none.
# Callbacks take it along.
current_autograd: ContextVar[int | None] = ContextVar("aiorpc_autograd", default=None)


# How many callbacks, users' or `collect_all`'s, the running code is nested in: each settles the Future of the next.
nested: ContextVar[int] = ContextVar("aiorpc_nested", default=0)
# At this depth another thread goes on: chains of `then` may be longer than one stack is deep.
DEEPEST = 32


class UserCallback:
    """A user's callback, which never runs on a loop's thread. begun: whether it has been called."""

    __slots__ = ("autograd", "begun", "callback", "executor")

    def __init__(self, callback: Callable[[Any], Any], executor: Executor | None) -> None:
        self.callback: Callable[[Any], object] = callback
        self.executor: Executor | None = executor
        self.autograd: int | None = current_autograd.get()
        self.begun: bool = False

    def __call__(self, future: Settled) -> None:
        token = current_autograd.set(self.autograd)
        depth = nested.set(nested.get() + 1)
        try:
            run = copy_context().run  # context variables that it sets do not stay in the thread
            self.begun = True
            run(self.callback, future)
        except BaseException as error:  # it must not harm other callbacks and the settler
            if not self.begun:  # raised by a signal handler
                raise
            if ends_program(error):  # Ctrl-C, in the main thread
                raise
            raised = f"a callback of {future._describe()} raised"
            more = spates.line(raised)
            if more is not None:
                foreign.log_error(logger, logging.ERROR, error, "%s%s", raised, more)
        finally:
            nested.reset(depth)
            current_autograd.reset(token)


def settle_within(future: Settled, executor: Executor | None, settle: Callable[[object], object]) -> None:
    """Let an internal callback settle `future`: here, or in another thread if this is deep within callbacks already.

    Programs may make chains of any length.
    """
    depth = nested.get()
    if depth >= DEEPEST:
        hand_over(future, [UserCallback(settle, executor)])
        return
    token = nested.set(depth + 1)
    try:
        settle(future)
    finally:
        nested.reset(token)


def hand_over(future: Settled, callbacks: list[UserCallback]) -> None:
    """Run callbacks in a thread that runs no loop, one after the other in their order."""
    try:
        executor = callbacks[0].executor
    except IndexError:  # they were handed over before
        return
    if executor is not None:
        try:
            executor.submit(_run_all, callbacks, future)
            return
        except WorkerClosed:  # its worker has shut down
            pass
    daemon(_run_all, callbacks, future, name="aiorpc-callback").start()


def _run_all(callbacks: list[UserCallback], future: Settled) -> None:
    while callbacks:
        try:
            callback = callbacks.pop(0)
        except IndexError:  # they were handed over twice
            return
        callback(future)
