"""Proxies for the methods of several values that are called together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from ..._typing import Args, Kwargs
from ...errors import RpcUsageError
from ...sites import CallSite, call_site

R = TypeVar("R")
Make = Callable[[str, Args, Kwargs, CallSite], R]


class GroupProxy(Generic[R]):
    """A proxy. make: calls the method of a name. check: raises for an invalid name."""

    __slots__ = ("_check", "_make")

    def __init__(self, make: Make[R], check: Callable[[str], object] | None = None) -> None:
        self._make = make
        self._check = check

    def __getattr__(self, name: str) -> Callable[..., R]:
        if name in self.__slots__:  # not set yet: a copy is being made
            raise AttributeError(name)
        if self._check is not None:
            self._check(name)
        make = self._make
        return lambda *args, **kwargs: make(name, args, kwargs, call_site(sys._getframe(1)))

    def __copy__(self) -> GroupProxy[R]:
        return GroupProxy(self._make, self._check)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        """Not supported. Without this, Python would call a method of that name of all values."""
        said = "what stands for the methods of several values has no deep copy, and cannot be pickled or sent"
        raise RpcUsageError(said)

    def __call__(self, *args: object, **kwargs: object) -> R:
        return self._make("__call__", args, kwargs, call_site(sys._getframe(1)))
