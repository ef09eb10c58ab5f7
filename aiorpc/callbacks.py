"""Callbacks of users, kept off the threads of loops, and what a pool is told of threads that wait.

A list of them that is handed over is run by one thread, in order. It may be handed over twice, by a settler that was
interrupted (`futures.py`, invariant 7): each is taken from the list by an atomic ``list.pop``, so each runs once.
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
    """A Future that has settled, as far as running its callbacks takes."""

    def _describe(self) -> str: ...


class BlockObserver(Protocol):
    """Told when a thread of a pool begins and ends to wait, so that the pool can run another thread meanwhile."""

    def enter_blocked(self) -> None: ...

    def exit_blocked(self) -> None: ...


class Executor(Protocol):
    """Where callbacks of users run if the thread that settles must not run them (`ThreadPool`).

    It also says in which threads it pays to wait without sleeping. may_stay_awake: whether there may be any.
    """

    @property
    def may_stay_awake(self) -> bool: ...

    def submit(self, fn: Callable[..., None], *args: object) -> None: ...

    def stay_awake(
        self, look: Callable[[Callable[[], bool]], None], done: Callable[[], bool], timeout: float | None
    ) -> None:
        """Call `look(enough)` where a wait without sleeping pays, with a function that says when to stop it."""
        ...

    def waited(self, seconds: float) -> None:
        """This thread has waited for so many seconds, asleep or awake."""
        ...


# Set in the threads of a handler pool; a wait there does not use up the pool.
block_observer: ContextVar[BlockObserver | None] = ContextVar("aiorpc_block_observer", default=None)


class Served(Protocol):
    """The call that the running code serves (`ServedCall`), as far as whoever blocks within it knows it."""

    def enter_wait(self, wake: Callable[[], object]) -> None:
        """This thread is about to wait, and is woken by that if the caller gives up before `exit_wait`. Any thread may
        call it, once."""

    def exit_wait(self) -> str:
        """This thread waits no longer. The text of the RpcCancelled that it is to raise, if its caller has given up and
        it has not heard so yet."""


# The call that code serves (runtime/calls/current.py); None outside of handlers.
served: ContextVar[Served | None] = ContextVar("aiorpc_call", default=None)


# The id of the autograd context that code runs in (runtime/gradients/contexts.py); 0 or None if there is none.
# Callbacks take it along.
current_autograd: ContextVar[int | None] = ContextVar("aiorpc_autograd", default=None)


# In how many callbacks of users, and of `collect_all`, the running code is: each has settled the Future that the next
# one was registered at.
nested: ContextVar[int] = ContextVar("aiorpc_nested", default=0)
# So many at most, and then another thread goes on: chains of `then` may be longer than the stack of one is deep.
DEEPEST = 32


class UserCallback:
    """A callback of the user's, kept off loop threads. begun: whether it has been called."""

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
            run = copy_context().run  # what it sets stays in no thread, which serves others next
            self.begun = True
            run(self.callback, future)
        except BaseException as error:  # whatever it is, the other callbacks and the settler must not suffer
            if not self.begun:  # a signal handler has raised it
                raise
            if ends_program(error):  # the main thread's, whatever it was doing
                raise
            raised = f"a callback of {future._describe()} raised"
            more = spates.line(raised)
            if more is not None:
                foreign.log_error(logger, logging.ERROR, error, "%s%s", raised, more)
        finally:
            nested.reset(depth)
            current_autograd.reset(token)


def settle_within(future: Settled, executor: Executor | None, settle: Callable[[object], object]) -> None:
    """Have an internal callback settle `future`: here, or in another thread, if this is deep within callbacks already.

    For what the program may make as long chains of as it likes.
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
    """Have callbacks run in a thread that runs no loop, one after the other in their order."""
    try:
        executor = callbacks[0].executor
    except IndexError:  # it is the second time that they are handed over
        return
    if executor is not None:
        try:
            executor.submit(_run_all, callbacks, future)
            return
        except WorkerClosed:  # its worker has shut down, which may be what settled the Future
            pass
    daemon(_run_all, callbacks, future, name="aiorpc-callback").start()


def _run_all(callbacks: list[UserCallback], future: Settled) -> None:
    while callbacks:
        try:
            callback = callbacks.pop(0)
        except IndexError:  # they were handed over twice
            return
        callback(future)
