"""Futures as torch has them: ``wait_all`` and ``collect_all`` that end with the first error, errors of ``then``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ...futures import AnyFuture, Future, outcome, when_done
from ...futures import collect_all as all_done

__all__ = ["collect_all", "torch_then", "wait_all"]


def collect_all(futures: Sequence[AnyFuture]) -> Future[list[AnyFuture]]:
    """A Future of the list of `futures`; complete when all have a value, or with the first error of any of them."""
    futures = list(futures)
    gathered = all_done(futures)

    def failed(future: AnyFuture) -> None:
        if isinstance(future, Future) and future._error is None:
            return
        error = outcome(future)[1]
        if error is not None:
            gathered._settle(None, error)

    for future in futures:
        when_done(future, failed)
    return gathered


def wait_all(futures: Sequence[AnyFuture]) -> list[Any]:
    """Block until all are complete; their values in order. Raises the first error as soon as it is there."""
    return [future.wait() for future in collect_all(futures).wait()]


def torch_then(future: Future[Any], callback: Callable[[Future[Any]], Any]) -> Future[Any]:
    """``then`` as torch has it: whatever the callback raises is a RuntimeError; here it is also what it was."""

    def call(done: Future[Any]) -> Any:
        try:
            return callback(done)
        except Exception as error:
            if isinstance(error, RuntimeError) or error is done._error:
                raise
            raise _as_runtime_error(error).with_traceback(error.__traceback__) from error

    return _then(future, functools.wraps(callback)(call) if callable(callback) else callback)


_then = Future.then


def _as_runtime_error(error: Exception) -> RuntimeError:
    """An error of the same type that is a RuntimeError besides; a plain one where there can be none."""
    kind = type(error)
    try:
        made = type(kind.__name__, (kind, RuntimeError), {"__module__": kind.__module__})(*error.args)
        assert isinstance(made, RuntimeError)
    except Exception:  # a constructor of its own, or a memory layout of its own
        return RuntimeError(f"{kind.__name__}: {error}")
    return made
