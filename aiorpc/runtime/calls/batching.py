"""``@batched``: one call of a function for many callers; each gets its own result or error.

A ``Batcher`` belongs to one function (for methods: to one instance) and gathers arrivals into an open ``Batch``. It
runs nothing and has no timer: the arrival that fills a batch gets it back to run, and the caller of ``add`` provides a
timer. So the same code serves coroutine handlers, handler threads and tests.

At most ``concurrency`` batches of one ``Batcher`` run at once. A runner first calls `Batch.begin`, which keeps a batch
that may not run yet; `Batch.end` of another batch returns it. An incomplete batch whose time has passed while others
run stays open and grows until its turn.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Generic, NamedTuple, NoReturn, cast

import torch

from ... import foreign
from ..._typing import Args, Function, T_co
from ...errors import RpcCancelled, RpcUsageError
from ...locks import Lock
from ...logs import logger
from ..engine.call_tracing import ServedSpan
from .annotations import signature

MARK = "__aiorpc_batched__"
_BY_VALUE = (int, str, MethodType)
Done = Callable[[object | None, BaseException | None], None]
Arm = Callable[[float, Callable[[], "Batch | None"]], object]


class _Entry(NamedTuple):
    """One caller of a batch.

    args, kwargs: as passed. done: called with its result or error. token: identifies it for `discard`. join: called
    with the number of the batch before its arguments are used, in the thread that uses them.
    """

    args: Args
    kwargs: Mapping[str, object]
    done: Done
    token: object
    join: Callable[[int], None] | None


class Batch:
    """Callers served by one call of the function. Run it once, with ``run`` or ``run_async``.

    Every caller's ``done(result, error)`` is called exactly once, in the thread that runs the batch. Callers may be
    discarded until the batch starts. Call ``abort`` on a batch that will never run. It counts as running between
    ``begin`` and ``end``.
    """

    def __init__(self, batcher: Batcher[object], target: Function, deadline: float | None) -> None:
        self.number: int = next(batcher.numbers)
        self._batcher = batcher
        self._target = target
        self._entries: list[_Entry] = []
        self.deadline = deadline
        """When it must run though not full, in seconds of ``time.monotonic``; None: only when full."""
        self.overdue = False
        """Whether that time came while the most batches ran: it runs, full or not, when one of them ends."""
        self.error: BaseException | None = None
        """What the function raised, if it has run and has raised."""
        self.span: ServedSpan | None = None
        """Of its run, if calls are traced."""

    def __len__(self) -> int:
        """Callers waiting in it; 0 once it has started."""
        return len(self._entries)

    def tokens(self) -> list[object]:
        """The tokens of the callers that wait in it."""
        return [entry.token for entry in list(self._entries)]

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, for ``run_async``."""
        return self._batcher.is_async

    def begin(self) -> bool:
        """Whether it may run now. If not it waits, and the ``end`` of another batch of its function returns it."""
        return self._batcher._begin(self)

    def end(self) -> Batch | None:
        """It has run, or will not. Returns the next waiting batch, if any. Once after each ``begin``."""
        return self._batcher._end()

    def run(self) -> None:
        """Call the function in this thread and settle every caller. Raises only errors that are no ``Exception``."""
        entries = self._batcher._start(self)
        if not entries:
            return
        try:
            result = self._call(entries)
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise RpcUsageError(f"{self._batcher.name} is asynchronous: its batch needs run_async")
        except BaseException as error:
            self._fail(entries, error)
            return
        self._share(entries, result)

    async def run_async(self) -> None:
        """Call the function in this task, await its result, settle every caller.

        If the task is cancelled meanwhile, every caller gets RpcCancelled and the cancellation goes on.
        """
        entries = self._batcher._start(self)
        if not entries:
            return
        try:
            result = self._call(entries)
            if inspect.isawaitable(result):
                result = await result
        except BaseException as error:
            self._fail(entries, error)
            return
        self._share(entries, result)

    def abort(self, error: BaseException) -> None:
        """Settle every caller with the error, without a call. Does nothing if the batch has started."""
        for entry in self._batcher._start(self):
            _tell(entry.done, None, error)

    def _call(self, entries: Sequence[_Entry]) -> object:
        for entry in entries:
            if entry.join is not None:
                entry.join(self.number)
        columns = [list(column) for column in zip(*(entry.args for entry in entries), strict=True)]
        named = {key: [entry.kwargs[key] for entry in entries] for key in entries[0].kwargs}
        return self._target(*columns, **named)

    def _share(self, entries: Sequence[_Entry], result: object) -> None:
        try:
            rows = _rows(self._batcher.name, result, len(entries))
        except Exception as error:
            self._fail(entries, error)
            return
        for entry, row in zip(entries, rows, strict=True):
            if foreign.is_a(row, BaseException):  # as `asyncio.gather(..., return_exceptions=True)` gives cancellations
                _tell(entry.done, None, self._told(cast("BaseException", row)))
            else:
                _tell(entry.done, row, None)

    def _fail(self, entries: Sequence[_Entry], error: BaseException) -> None:
        """Settle every caller; an exit or a cancellation is then raised in the thread or task that runs the batch."""
        told = self._told(error)
        self.error = error
        for entry in entries:
            _tell(entry.done, None, told)
        if not foreign.is_a(error, Exception):
            raise error

    def _told(self, error: BaseException) -> BaseException:
        """The error for the callers."""
        if not foreign.is_a(error, asyncio.CancelledError):
            return error
        told = RpcCancelled(f"the batched call of {self._batcher.name} was cancelled while it ran")
        told.__cause__ = error
        return told


class Batcher(Generic[T_co]):
    """Gathers the callers of one function, or of one method of one instance, into batches. Thread-safe.

    Made by ``batched``; found with ``get_batcher``. T_co: the result of each caller, for checkers.
    """

    def __init__(
        self,
        function: Function,
        max_size: int | Callable[[], int],
        max_wait: float | None,
        concurrency: int | None,
        owner: weakref.ref[object] | None = None,
    ) -> None:
        """owner: the instance of a method; None for a function."""
        self.function = function
        self.max_wait = max_wait
        self.concurrency = concurrency
        self.name: str = getattr(function, "__qualname__", None) or repr(function)
        self.is_async: bool = inspect.iscoroutinefunction(inspect.unwrap(function))
        self._max_size = max_size
        self._signature, self._plain_count = _signature(function, owner is not None)
        self._owner = owner
        self.numbers: itertools.count[int] = itertools.count(1)
        self._lock = Lock()
        self._open: Batch | None = None
        self._waiting: dict[Batch, None] = {}
        self._ready: deque[Batch] = deque()
        self._running = 0
        self._armed = False
        self._instances = _Siblings()
        self._scopes = _Siblings()

    def __reduce__(self) -> NoReturn:
        """It is in the ``__dict__`` of its function, and pickled if the function would travel by value."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
        raise RpcUsageError(
            f"{self.name}{where} is batched and cannot travel by value: each caller would bring a copy, and copies "
            "gather no other callers; write it as a function with a name at the top of a module that both workers "
            "can import"
        )

    def __repr__(self) -> str:
        return f"<Batcher {self.name}, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Callers in the open batch."""
        batch = self._open
        return len(batch) if batch is not None else 0

    def add(
        self,
        args: Args,
        kwargs: Mapping[str, object],
        done: Done,
        arm: Arm | None = None,
        token: object = None,
        join: Callable[[int], None] | None = None,
    ) -> Batch | None:
        """A caller arrives. Returns the batch, ready to run, if this arrival filled it.

        done: called once, with the caller's result or error; at once for a call that fits no batch. arm: ``arm(seconds,
        take)`` must call ``take()`` after so many seconds, in any thread, and run the batch it returns, if any. It is
        called at most once per ``max_wait``, not once per batch; without it only full batches run. token: identifies
        this caller for ``discard``: an object, a number or a text; ``done`` if None. join: called with the number of
        the batch before the function, in the function's thread.
        """
        try:
            entry = _Entry(*self._normalise(args, kwargs), done, done if token is None else token, join)
            size = self._size()
            target = self._target()
        except Exception as error:
            _tell(done, None, error)
            return None
        with self._lock:
            accepted = self._accept(entry, target)
            ready = self._take_open() if accepted and self.waiting >= size else None
            timer = self._timer(arm) if accepted else None
        if not accepted:
            _tell(done, None, self._shape_error(entry))
        if timer is not None and arm is not None:
            self._arm(arm, *timer)
        return ready

    def discard(self, token: object) -> bool:
        """Remove a caller whose batch has not started; its ``done`` is not called. False if it was not found."""
        with self._lock:
            for batch in self._waiting:
                for index, entry in enumerate(batch._entries):
                    # Bound methods, numbers and texts are compared by value, other objects by identity.
                    if not (entry.token is token or (isinstance(token, _BY_VALUE) and entry.token == token)):
                        continue
                    del batch._entries[index]
                    self._forget_if_empty(batch)
                    return True
        return False

    # What an arrival passes through.

    def _normalise(self, args: Args, kwargs: Mapping[str, object]) -> tuple[Args, Mapping[str, object]]:
        """The arguments in the one form all callers share: by position where possible, defaults filled in."""
        if self._signature is None or (not kwargs and len(args) == self._plain_count):
            return args, kwargs
        try:
            call = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        call.apply_defaults()
        return call.args, call.kwargs

    def _size(self) -> int:
        size = self._max_size() if callable(self._max_size) else self._max_size
        if isinstance(size, bool) or not isinstance(size, int):
            raise RpcUsageError(f"max_size of {self.name} must give an integer, not {size!r}")
        # An empty group has no callers to wait for.
        return max(1, size)

    def _target(self) -> Function:
        if self._owner is None:
            return self.function
        owner = self._owner()
        if owner is None:
            raise RpcUsageError(f"the object whose method {self.name} was called no longer exists")
        # Bound by hand: the instance's attribute of that name may have changed.
        return cast("Function", self.function.__get__(owner))

    def _accept(self, entry: _Entry, target: Function) -> bool:
        batch = self._open
        if batch is None:
            deadline = None if self.max_wait is None else time.monotonic() + self.max_wait
            self._open = batch = Batch(self, target, deadline)
            self._waiting[batch] = None
        elif _shape(batch._entries[0]) != _shape(entry):
            return False
        batch._entries.append(entry)
        return True

    def _shape_error(self, entry: _Entry) -> RpcUsageError:
        count, names = _shape(entry)
        return RpcUsageError(
            f"{self.name} is batched: all callers of one batch must pass the same number of arguments under the same "
            f"names; this one passed {count} by position and {sorted(names)} by name, unlike the first"
        )

    # Batches: open, then waiting to be run, then started. Called with the lock held, but for _start.

    def _take_open(self) -> Batch | None:
        batch, self._open = self._open, None
        return batch

    def _forget_if_empty(self, batch: Batch) -> None:
        if not batch._entries:
            self._waiting.pop(batch, None)
            if self._open is batch:
                self._open = None

    # How many run at once.

    def _begin(self, batch: Batch) -> bool:
        with self._lock:
            if self._busy():
                self._ready.append(batch)
                return False
            self._running += 1
            return True

    def _end(self) -> Batch | None:
        with self._lock:
            self._running -= 1
            while True:
                if not self._ready:
                    break
                batch = self._ready.popleft()
                if batch not in self._waiting:  # all of its callers have left
                    continue
                return batch
            return self._take_open() if self._open is not None and self._open.overdue else None

    def _busy(self) -> bool:
        return self.concurrency is not None and self._running >= self.concurrency

    def _start(self, batch: Batch) -> list[_Entry]:
        """Take the callers of a batch, which cannot be discarded any more; empty the next time."""
        with self._lock:
            entries, batch._entries = batch._entries, []
            self._forget_if_empty(batch)
            return entries

    # The one timer.

    def _timer(self, arm: Arm | None) -> tuple[float, Batch] | None:
        """The seconds and the batch to arm the timer for; None if it is armed already. With the lock held."""
        batch = self._open
        if arm is None or self._armed or batch is None or batch.deadline is None or batch.overdue:
            return None
        self._armed = True
        return max(0.0, batch.deadline - time.monotonic()), batch

    def _arm(self, arm: Arm, seconds: float, batch: Batch) -> None:
        def take() -> Batch | None:
            with self._lock:
                self._armed = False
                ready, waiting = None, self._open
                # The batch of this timer runs even if the timer's clock is a little ahead of ours.
                if waiting is batch or (waiting is not None and (waiting.deadline or 0.0) <= time.monotonic()):
                    if self._busy():
                        waiting.overdue = True
                    else:
                        ready = self._take_open()
                again = self._timer(arm)
            if again is not None:
                self._arm(arm, *again)
            return ready

        arm(seconds, take)

    # Methods: a queue for each instance. Workers: a queue for each.

    def of(self, owner: object) -> Batcher[object]:
        """The batcher of this method for one instance, or class of a class method, which is held weakly."""
        try:
            return self._instances.get(owner, lambda: self._like(self.function, weakref.ref(owner)))
        except TypeError:
            raise RpcUsageError(
                f"{self.name} is batched for each instance, but {type(owner).__qualname__} cannot be weakly "
                "referenced: add '__weakref__' to its __slots__"
            ) from None

    def within(self, scope: object) -> Batcher[object]:
        """A batcher of the same function for one scope, held weakly: callers of two workers do not share a batch."""
        return self._scopes.get(scope, lambda: self._like(self.function, self._owner))

    def _like(self, function: Function, owner: weakref.ref[object] | None) -> Batcher[object]:
        return Batcher(function, self._max_size, self.max_wait, self.concurrency, owner)


class _Siblings:
    """Batchers by the identity of a weakly held object, which may be unhashable or equal to another one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[int, tuple[weakref.ref[object], Batcher[object]]] = {}

    def get(self, key: object, make: Callable[[], Batcher[object]]) -> Batcher[object]:
        """The batcher for this object, made on first use. TypeError if it cannot be weakly referenced."""
        with self._lock:
            known = self._known.get(id(key))
            if known is not None and known[0]() is key:
                return known[1]
            batcher = make()
            self._known[id(key)] = (weakref.ref(key, self._forgetter(id(key))), batcher)
            return batcher

    def _forgetter(self, number: int) -> Callable[[weakref.ref[object]], None]:
        # It may run in a thread that holds the lock: single dictionary steps only.
        known = self._known

        def forget(reference: weakref.ref[object]) -> None:
            entry = known.get(number)
            if entry is not None and entry[0] is reference:
                known.pop(number, None)

        return forget


def get_batcher(function: Any, scope: object = None) -> Batcher[object] | None:
    """The batcher of a function, bound method or callable instance decorated with ``batched``; None for others.

    scope: an object (the worker) whose callers form batches of their own; held weakly. A wrapper that took over the
    mark (``functools.wraps``, ``torch.no_grad``) has a batcher of its own, and runs once for each batch. Cheap for
    functions that are not batched.
    """
    batcher = getattr(function, MARK, None)
    if batcher is None and callable(function) and not isinstance(function, type):
        function = function.__call__
        batcher = getattr(function, MARK, None)
    if not isinstance(batcher, Batcher):
        return None
    if inspect.ismethod(function):
        batcher = _of_wrapper(function.__func__, batcher).of(function.__self__)
    else:
        batcher = _of_wrapper(function, batcher)
    return batcher if scope is None else batcher.within(scope)


def _of_wrapper(function: Function, batcher: Batcher[object]) -> Batcher[object]:
    """The function's own batcher: the mark of a wrapper is that of the wrapped function."""
    if batcher.function is function:
        return batcher
    with batcher._lock:
        current: Batcher[object] = getattr(function, MARK)
        if current is batcher:
            current = batcher._like(function, None)
            setattr(function, MARK, current)
    return current


def _signature(function: Function, bound: bool) -> tuple[inspect.Signature | None, int]:
    """The signature (None if unknown) and the number of arguments at which a call by position needs no binding."""
    try:
        known = signature(function)
    except (TypeError, ValueError):
        return None, -1
    parameters = list(known.parameters.values())
    if bound and parameters and parameters[0].kind is not parameters[0].VAR_POSITIONAL:
        del parameters[0]
    simple = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return known.replace(parameters=parameters), len(parameters) if simple else -1


def _shape(entry: _Entry) -> tuple[int, frozenset[str]]:
    return len(entry.args), frozenset(entry.kwargs)


def _rows(name: str, result: object, count: int) -> list[object]:
    """One result per caller, or RpcUsageError naming function, expected and got."""
    expected = f"{name} is batched and was called for {count} callers: expected {count} results"
    if isinstance(result, torch.Tensor):
        if result.dim() == 0:
            raise RpcUsageError(f"{expected}, got a tensor without dimensions")
        if result.shape[0] != count:
            raise RpcUsageError(f"{expected}, got a tensor of shape {tuple(result.shape)}")
        return [result[index] for index in range(count)] if result.is_sparse else list(result.unbind(0))
    if not isinstance(result, (list, tuple)):
        raise RpcUsageError(f"{expected} in a list, a tuple or the rows of a tensor, got {type(result).__qualname__}")
    rows = list(result)  # first: the length of a subclass may be wrong
    if len(rows) != count:
        raise RpcUsageError(f"{expected}, got {len(rows)}")
    return rows


def _tell(done: Done, result: object | None, error: BaseException | None) -> None:
    """Settle one caller; an error of `done` does not reach the other callers."""
    try:
        done(result, error)
    except Exception as broken:
        foreign.log_error(logger, logging.ERROR, broken, "a caller of a batch could not be told its result")
