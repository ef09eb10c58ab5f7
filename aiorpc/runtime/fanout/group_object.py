"""The objects that the members of a group serve under one name, as they are called together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ..._typing import Args, Kwargs
from ...protocol.messages import ObjectMethod
from ...rights import is_public
from ...sites import CallSite, call_site
from ..caller.misuse import stays_here
from .group_call import GroupCall
from .group_stream import GroupStream
from .outcomes import Outcomes
from .proxies import GroupProxy
from .rref_group import RRefGroup

#: Calls a method of all objects: verb, seconds (negative for the group's), method, its arguments, site of the call.
Caller = Callable[[str, float, ObjectMethod, Args, Kwargs, CallSite], Any]


class GroupObject:
    """Objects of one name on all members: ``rpc.group(...).object(name)``. Any thread.

    ``await handle.method(*args, **kwargs)`` runs a public method of each and gives `Outcomes`, as `PeerGroup.call`
    does; where the method has one of the names below: ``handle.rpc_async().method(...)``.
    """

    __slots__ = ("_call", "_name")

    def __init__(self, name: str, call: Caller) -> None:
        self._name = name
        self._call = call

    def rpc_sync(self, timeout: float = -1.0) -> GroupProxy[Outcomes[Any]]:
        """A proxy whose methods block for the `Outcomes`; not on the worker's loop.

        timeout: seconds for each call; negative for that of the group, 0 for no limit.
        """
        return self._proxy("rpc_sync", timeout)

    def rpc_async(self, timeout: float = -1.0) -> GroupProxy[GroupCall[Any]]:
        """A proxy whose methods return a `GroupCall` at once. timeout: as in `rpc_sync`."""
        return self._proxy("rpc_async", timeout)

    def remote(self, timeout: float = -1.0) -> GroupProxy[RRefGroup[Any]]:
        """A proxy whose methods return an `RRefGroup` of their results at once. timeout: as in `rpc_sync`."""
        return self._proxy("remote", timeout)

    def stream(self, timeout: float = -1.0) -> GroupProxy[GroupStream[Any]]:
        """A proxy whose methods are generators, and return a `GroupStream`. timeout: seconds for each item."""
        return self._proxy("stream", timeout)

    def __getattr__(self, name: str) -> Callable[..., GroupCall[Any]]:
        if name in self.__slots__:  # not set yet: a copy is being made
            raise AttributeError(name)
        method: Callable[..., GroupCall[Any]] = getattr(self.rpc_async(), name)
        return method

    def __call__(self, *args: object, **kwargs: object) -> GroupCall[Any]:
        method = ObjectMethod(self._name, "__call__")
        call: GroupCall[Any] = self._call("rpc_async", -1.0, method, args, kwargs, call_site(sys._getframe(1)))
        return call

    def __copy__(self) -> GroupObject:
        return GroupObject(self._name, self._call)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        """Not supported: it makes calls of this worker."""
        raise stays_here(self, f"rpc.group(...).object({self._name!r})")

    def __repr__(self) -> str:
        return f"<aiorpc.types.GroupObject {self._name!r}>"

    def _proxy(self, verb: str, timeout: float) -> GroupProxy[Any]:
        def make(name: str, args: Args, kwargs: Kwargs, site: CallSite) -> Any:
            return self._call(verb, timeout, ObjectMethod(self._name, name), args, kwargs, site)

        return GroupProxy(make, self._check)

    def _check(self, name: str) -> None:
        if not is_public(name):
            raise AttributeError(f"{name!r} of objects {self._name!r} is private: an object serves its public methods")
