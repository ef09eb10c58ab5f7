"""Many Futures as one: `collect_all` and `wait_all`, for Futures of torch as well. And one that is waited for alone."""

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
    """Of the list of its Futures.

    torch's half has others in the place of those that failed: the error of one leads to the frames that it was raised
    in, and these to whatever they had, which is this Future, as a rule. The garbage collector does not see through C++.
    """

    _twins = True
    twins: list[AnyFuture] | None = None  # what torch's half has, if that is something else

    def _twin(self, value: list[AnyFuture]) -> list[AnyFuture]:
        for each in value:  # most have none that failed, and they may be many: no function for each
            if isinstance(each, _Collection) and each.twins is not None:
                break
            if isinstance(each, Future) and each._error is not None:
                break
        else:
            return value
        self.twins = [_twin_of(each) for each in value]
        return self.twins


def _twin_of(future: AnyFuture) -> AnyFuture:
    """One that has ended in the same way; the Future itself if it leads to no error of a Future."""
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
    """A Future of the list of `futures`, complete when all of them are, whether they failed or not.

    Unlike ``torch.futures.collect_all`` it keeps their Python identity, and its callbacks stay off loop threads. Any
    thread.

    Raised here: TypeError if one is no torch Future.
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
    left = dict.fromkeys(range(len(futures)))  # to take one out of it is atomic: no lock is needed
    if not futures:
        result._settle(futures)
    for place, future in enumerate(futures):
        when_done(future, partial(_count, place, left, futures, result))
    return cast("Future[list[F]]", result)  # of the same objects


def _count(place: int, left: dict[int, None], futures: Sequence[AnyFuture], result: _Collection, _: AnyFuture) -> None:
    """The callback of `collect_all` for one of its Futures. It may run twice: it counts places, and not its calls."""
    left.pop(place, None)
    if not left:
        settle_within(result, result._executor, lambda _: result._settle(futures))


def wait_all(futures: Iterable[torch.futures.Future[T]]) -> list[T]:
    """Block until all are complete, and return their values in order.

    Raised here: the first error in that order; WouldBlockLoop on the thread of the loop that has to settle one of them;
    TypeError if one is no torch Future.
    """
    done = collect_all(list(futures)).wait()
    for future in done:
        if isinstance(future, Future):
            future._mark_seen()
    return [future.wait() for future in done]


def wait_alone(future: Future[T]) -> T:
    """Wait for a Future that nobody else has. Who is interrupted cancels it: else nobody could, nor ever look at it."""
    try:
        with on_error(future.cancel):  # nothing if its error is what was raised
            return future.wait()
    finally:
        del future  # see `Future._outcome`
