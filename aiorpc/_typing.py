"""Types that several modules share. They are for checkers and readers; nothing here does anything when a program runs.

A verb that runs a function has three signatures, of which the first that fits counts: for a function that is decorated
with `batched`, whose callers get one row each of what it returns; for one whose result comes later (`Later`); and for
any other. Where arguments follow the function they are checked by its parameters (``ParamSpec``); where they come in a
tuple, as with torch, by the tuple (``TypeVarTuple``); what stands in ``kwargs=`` cannot be checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeAlias, TypeVar, TypeVarTuple, Union

import torch

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")

#: What an ``async def`` returns when it is called.
Coro: TypeAlias = Coroutine[Any, Any, T]

#: What a function returns whose result comes later: an ``async def``, or one with `async_execution`. Awaiting the call
#: gives the result, and not the coroutine or Future.
Later: TypeAlias = Union[Coro[T], torch.futures.Future[T]]  # noqa: UP007  # a generic alias needs it

#: What a function returns whose result is a stream of items.
Items: TypeAlias = Union[AsyncIterable[T], Iterable[T]]  # noqa: UP007

#: Some function, which is passed on, looked at or called with whatever a caller has sent.
Function: TypeAlias = Callable[..., object]

#: One argument of a function. Also where a class has a method of the name `object`.
Arg: TypeAlias = object

#: What a function is called with, by position and by name.
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]
