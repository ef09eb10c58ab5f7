"""torch's semantics of Futures: ``wait_all`` and ``collect_all`` end with the first error; errors of ``then``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import foreign
from ...callbacks import settle_within
from ...collecting import collect_all as all_done
from ...errors import RpcUsageError
from ...futures import AnyFuture, Future, outcome, when_done
from ...runtime.calls.functions import is_loaded, resolve

__all__ = ["collect_all", "error_of_call", "torch_then", "wait_all"]


def collect_all(futures: Sequence[AnyFuture]) -> Future[list[AnyFuture]]:
    """A Future of the list of `futures`; complete when all have a value, or with the first error of any of them."""
    futures = list(futures)
    gathered = all_done(futures)
    result: Future[list[AnyFuture]] = Future()
    result._subject, result._loop, result._executor = gathered._subject, gathered._loop, gathered._executor
    result._sources = [gathered]

    def failed(future: AnyFuture) -> None:
        if error_of(future) is not None:
            settle_within(result, result._executor, lambda _: result._settle(None, error_of(future)))

    def complete(_: AnyFuture) -> None:
        errors = (error for error in map(error_of, futures) if error is not None)
        error = next(errors, None)  # `failed` of the last one may not have run
        result._settle(futures if error is None else None, error)

    for future in futures:
        when_done(future, failed)
    when_done(gathered, complete)
    return result


def error_of(future: AnyFuture) -> BaseException | None:
    """The error of a completed Future, marked as seen; None if it has a value."""
    return None if isinstance(future, Future) and future._error is None else outcome(future)[1]


def wait_all(futures: Sequence[AnyFuture]) -> list[object]:
    """Block until all are complete; returns their values in order. Raises the first error at once."""
    return [future.wait() for future in collect_all(futures).wait()]


def torch_then(future: Future[Any], callback: Callable[[Future[Any]], object]) -> Future[Any]:
    """torch's ``then``: an error of the callback is a RuntimeError; here it also keeps its own type."""

    def call(done: Future[Any]) -> Any:
        try:
            return callback(done)
        except Exception as error:
            if foreign.is_a(error, RuntimeError):
                raise
            made = _as_runtime_error(error) or RuntimeError(foreign.said(error))
            raise foreign.with_traceback(made, error.__traceback__) from error

    return _then(future, functools.wraps(callback)(call) if callable(callback) else callback)


def error_of_call(function: str, error: BaseException) -> BaseException:
    """The error of a call, as in torch a RuntimeError; here it also keeps its own type, if such a type is possible.

    A call of an operator with wrong arguments has torch's text.
    """
    if foreign.is_a(error, RuntimeError):
        return error
    if foreign.is_a(error, TypeError) and _is_operator(function):
        failed = RpcUsageError(f"Overloaded torch operator invoked from Python failed to match any schema:\n{error}")
        failed.__cause__ = error
        return failed
    return _as_runtime_error(error) or error


def _is_operator(function: str) -> bool:
    if ":" not in function or not is_loaded(function):  # without: a method, or what has no name on the wire
        return False
    return torch.jit._builtins._find_builtin(resolve(function).function) is not None


_then = Future.then


def _as_runtime_error(error: BaseException) -> BaseException | None:
    """An equal error of a type that also inherits from RuntimeError; None if there can be none."""
    kind = type(error)
    try:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        both = type(kind.__name__, (kind, RuntimeError), names)
    except Exception:  # a metaclass, or a memory layout, that does not allow it
        return None
    return foreign.copy_of(error, both)
