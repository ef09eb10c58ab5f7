"""`collect_all` and `wait_all`, for aiorpc's and torch's Futures; and `wait_alone` for a single Future."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch

from .callbacks import settle_within
from .futures import AnyFuture, Future, is_future, twin_of, when_done
from .undoing import on_error

T = TypeVar("T")
F = TypeVar("F", bound=AnyFuture)


class _Collection(Future[list[AnyFuture]]):
    """The Future of a list of Futures. torch's half gets twins in place of failed Futures: an error's traceback has
    frames, which usually hold this Future, and the garbage collector does not see cycles through C++.
    """

    _twins = True
    twins: list[AnyFuture] | None = None  # the list of torch's half, if it differs

    def _twin(self, value: list[AnyFuture]) -> list[AnyFuture]:
        for each in value:  # usually none has failed, and there may be many: no function call for each
            if isinstance(each, _Collection) and each.twins is not None:
                break
            if isinstance(each, Future) and each._error is not None:
                break
        else:
            return value
        self.twins = [_twin_of(each) for each in value]
        return self.twins


def _twin_of(future: AnyFuture) -> AnyFuture:
    """A Future with the same outcome and no frames; the Future itself if it leads to no error."""
    if not isinstance(future, Future):
        return future
    twins = future.twins if isinstance(future, _Collection) else None
    error = future._error
    if twins is None and error is None:
        return future
    twin: Future[Any] = Future()
    twin._subject = future._subject
    twin._settle(twins, None if error is None else twin_of(error))
    return twin


def collect_all(futures: Sequence[F]) -> Future[list[F]]:
    """A Future of the list `futures`, which settles when all of them have settled, also if some failed.

    Unlike ``torch.futures.collect_all`` it keeps the Python objects, and its callbacks never run on loop threads. Any
    thread.

    Raised here: TypeError for an object that is not a torch Future.
    """
    futures = list(futures)
    for future in futures:
        if not is_future(future):
            raise TypeError(f"collect_all() takes torch Futures, not {type(future).__name__}")
    result = _Collection()
    result._subject = f"collect_all of {len(futures)} Futures"
    for future in futures:
        if isinstance(future, Future):
            result._loop = result._loop or future._loop
            result._executor = result._executor or future._executor
    result._sources = [future for future in futures if isinstance(future, Future)]
    left = dict.fromkeys(range(len(futures)))  # `pop` is atomic: no lock is needed
    if not futures:
        result._settle(futures)
    for place, future in enumerate(futures):
        when_done(future, partial(_count, place, left, futures, result))
    return cast("Future[list[F]]", result)  # of the same objects


def _count(place: int, left: dict[int, None], futures: Sequence[AnyFuture], result: _Collection, _: AnyFuture) -> None:
    """The callback of `collect_all` for one of its Futures. May run twice, so it counts places."""
    left.pop(place, None)
    if not left:
        settle_within(result, result._executor, lambda _: result._settle(futures))


def wait_all(futures: Iterable[torch.futures.Future[T]]) -> list[T]:
    """Block until all are complete, and return their values in order.

    Raised here: the first error in that order; WouldBlockLoop on the thread of a loop that has to settle one of them;
    TypeError for an object that is not a torch Future.
    """
    done = collect_all(list(futures)).wait()
    for future in done:
        if isinstance(future, Future):
            future._mark_seen()
    return [future.wait() for future in done]


def wait_alone(future: Future[T]) -> T:
    """Wait for a Future that only the caller has. An interrupt cancels it, because no other code could."""
    try:
        with on_error(future.cancel):  # no effect if the Future itself has raised
            return future.wait()
    finally:
        del future  # see `Future._outcome`
