"""Many Futures as one: `collect_all` and `wait_all`, for Futures of torch as well. And one that is waited for alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from .callbacks import Repeatable
from .futures import AnyFuture, Future, is_future, when_done

T = TypeVar("T")


class _Counted(Repeatable):
    """The callback of `collect_all` for one of its Futures. It may run twice: it counts places, and not its calls."""

    __slots__ = ("futures", "left", "place", "result")

    def __init__(
        self, place: int, left: dict[int, None], futures: list[AnyFuture], result: Future[list[AnyFuture]]
    ) -> None:
        self.place = place
        self.left = left
        self.futures = futures
        self.result = result

    def __call__(self, _: AnyFuture) -> None:
        self.left.pop(self.place, None)
        if not self.left:
            self.result.settle(self.futures)


def collect_all(futures: Sequence[AnyFuture]) -> Future[list[AnyFuture]]:
    """A Future of the list of `futures`, complete when all of them are, whether they failed or not.

    Unlike ``torch.futures.collect_all`` it keeps their Python identity, and its callbacks stay off loop threads.
    TypeError if one is no torch Future.
    """
    futures = list(futures)
    for future in futures:
        if not is_future(future):
            raise TypeError(f"collect_all() takes torch Futures, not {type(future).__name__}")
    result: Future[list[AnyFuture]] = Future()
    result.subject = f"collect_all of {len(futures)} Futures"
    for future in futures:
        if isinstance(future, Future):
            result.loop = result.loop or future.loop
            result.executor = result.executor or future.executor
    result.sources = [future for future in futures if isinstance(future, Future)]
    left = dict.fromkeys(range(len(futures)))  # to take one out of it is atomic: no lock is needed
    if not futures:
        result.settle(futures)
    for place, future in enumerate(futures):
        when_done(future, _Counted(place, left, futures, result))
    return result


def wait_all(futures: Iterable[AnyFuture]) -> list[Any]:
    """Block until all are complete and return their values in order; raises the first error in that order.

    WouldBlockLoop on the thread that runs the loop which has to settle one of them; TypeError as for `collect_all`.
    """
    done = collect_all(list(futures)).wait()
    for future in done:
        if isinstance(future, Future):
            future.mark_seen()
    return [future.wait() for future in done]


def wait_alone(future: Future[T]) -> T:
    """Wait for a Future that nobody else has. Who is interrupted cancels it: else nobody could, nor ever look at it."""
    try:
        return future.wait()
    except BaseException:
        future.cancel()  # nothing if its error is what was raised
        raise
    finally:
        del future  # see `Future._outcome`
