"""Types that several modules share, for type checkers and readers.

A verb that runs a function has three signatures; the first that fits counts: for a `batched` function, whose callers
get one row each of its result; for a function whose result comes later (`Later`); for all other functions. Arguments
after the function are checked by its parameters (``ParamSpec``), and arguments in a tuple, as in torch, by the tuple
(``TypeVarTuple``). ``kwargs=`` cannot be checked.
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

#: The return type of an ``async def``, or of a function with `async_execution`. Awaiting the call gives the result, not
#: the coroutine or Future.
Later: TypeAlias = Union[Coro[T], torch.futures.Future[T]]  # noqa: UP007  # a generic alias needs it

#: The return type of a function whose result is a stream of items.
Items: TypeAlias = Union[AsyncIterable[T], Iterable[T]]  # noqa: UP007

#: Any function; its arguments come from a caller.
Function: TypeAlias = Callable[..., object]

#: One argument of a function, for classes with a method of the name `object`.
Arg: TypeAlias = object

#: The arguments of a function, by position and by name.
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]
