"""The decorator ``@batched``, and the type of a decorated function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast, overload

import torch

from ..._typing import Coro, Function, P, T_co
from ...errors import RpcUsageError
from .annotations import signature
from .batching import MARK, Batcher

Q = ParamSpec("Q")
R = TypeVar("R")
S_co = TypeVar("S_co", covariant=True)  # what the function returns: a list, a tuple or a tensor


def _takes_nothing(function: Function) -> bool:
    """Whether it can be called without arguments; True if unknown."""
    try:
        signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # of a C function without a signature
        pass
    return True


class Batched(Protocol[P, S_co, T_co]):
    """A function decorated with `batched`, for checkers: called locally it is unchanged.

    A remote caller passes one argument in place of each list, which types cannot express, and gets a `T_co`.
    """

    @property
    def __aiorpc_batched__(self) -> Batcher[T_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> S_co: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...

    @overload
    def __get__(
        self: Batched[Concatenate[Any, Q], S_co, T_co], instance: object, owner: type | None = None, /
    ) -> Batched[Q, S_co, T_co]: ...


class Batching(Protocol):
    """The decorator that ``batched(...)`` returns."""

    @overload
    def __call__(
        self, function: Callable[P, Coro[torch.Tensor]], /
    ) -> Batched[P, Coro[torch.Tensor], torch.Tensor]: ...

    @overload
    def __call__(self, function: Callable[P, torch.Tensor], /) -> Batched[P, torch.Tensor, torch.Tensor]: ...

    @overload
    def __call__(self, function: Callable[P, Coro[list[R]]], /) -> Batched[P, Coro[list[R]], R]: ...

    @overload
    def __call__(self, function: Callable[P, list[R]], /) -> Batched[P, list[R], R]: ...

    @overload
    def __call__(self, function: Callable[P, Coro[Sequence[R]]], /) -> Batched[P, Coro[Sequence[R]], R]: ...

    @overload
    def __call__(self, function: Callable[P, Sequence[R]], /) -> Batched[P, Sequence[R], R]: ...


def batched(
    max_size: int | Callable[[], int], max_wait: float | timedelta | None = None, *, concurrency: int | None = 1
) -> Batching:
    """One call of the decorated function serves many remote callers.

    The function (``def`` or ``async def``, also a method, class method or static method) receives, in place of each
    argument, a list of the callers' arguments, and returns one result per caller: a list or tuple of that length, or a
    tensor whose row ``i`` goes to caller ``i``. An exception among the results is raised at that caller alone; if the
    function raises, every caller of the batch gets the error.

    max_size: callers that make a batch, or a function that says so, asked at every arrival ("all peers of the group").
    max_wait: seconds after its first caller when an incomplete batch goes; None: only when it is full.
    concurrency: how many batches of the function (of a method: for one instance) run at once on one worker. None: as
        many as there are threads, and for coroutines any number. A batch that waits for its turn grows meanwhile, up to
        `max_size`.

    Arguments may be passed by position or by name; a default stands in for callers that left it out. Each instance
    gathers its own callers. Called locally, the function takes and returns lists. It goes to other workers by name
    alone, so it stands at the top of a module. It must not wait for a call that needs a batch of its own, unless it may
    run so often at once.

    Raised here: RpcUsageError for values that cannot be.

    Raised at every caller of a batch: RpcUsageError if the number of results is wrong.
    """
    if not callable(max_size) and (isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1):
        raise RpcUsageError(f"max_size must be an integer >= 1 or a function that returns one, not {max_size!r}")
    if callable(max_size) and not _takes_nothing(max_size):
        raise RpcUsageError(
            f"max_size must be an integer >= 1 or a function without arguments that returns one, not {max_size!r:.80}; "
            "to decorate that function write @rpc.batched(max_size=..., max_wait=...) above it"
        )
    wait = _max_wait(max_wait)
    if concurrency is not None and (isinstance(concurrency, bool) or not isinstance(concurrency, int)):
        raise RpcUsageError(f"concurrency must be an integer >= 1, or None for no limit, not {concurrency!r:.80}")
    if concurrency is not None and concurrency < 1:
        raise RpcUsageError(f"concurrency must be >= 1, or None for no limit, not {concurrency}")

    def decorate(function: Function) -> Function:
        plain = getattr(function, "__func__", function)
        if not callable(plain):
            raise RpcUsageError(f"batched decorates a function, not {function!r}")
        whole = inspect.unwrap(plain)
        if inspect.isgeneratorfunction(whole) or inspect.isasyncgenfunction(whole):
            raise RpcUsageError(f"{whole.__qualname__} is a generator: it can be streamed, not batched")
        setattr(plain, MARK, Batcher(plain, max_size, wait, concurrency))
        return function

    return cast(Batching, decorate)  # it returns the function itself, with a mark


def _max_wait(value: float | timedelta | None) -> float | None:
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
        raise RpcUsageError(f"max_wait must be a number of seconds >= 0 or None, not {value!r}")
    return float(number)
