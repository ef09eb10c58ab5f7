"""The objects that the members of a group serve under one name, as they are called together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ...futures import CallSite, call_site
from ...protocol.messages import ObjectMethod
from ...rights import is_public


class ObjectCall(NamedTuple):
    """A call of a method of all of them. verb: in which manner. timeout: seconds, negative for that of the group."""

    verb: str
    timeout: float
    function: ObjectMethod
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: CallSite


Caller = Callable[[ObjectCall], Any]


class GroupObject:
    """Objects of one name on all members: ``rpc.group(...).object(name)``. Any thread.

    ``await handle.method(*args, **kwargs)`` runs a public method of each and gives `Outcomes`, as `PeerGroup.call`
    does; where the method has one of the names below: ``handle.rpc_async().method(...)``.
    """

    __slots__ = ("_call", "_name")

    def __init__(self, name: str, call: Caller) -> None:
        """call: makes a call."""
        self._name = name
        self._call = call

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        """A proxy whose methods block for the `Outcomes`; not on the worker's loop.

        timeout: seconds for each call; negative for that of the group, 0 for no limit.
        """
        return _ProxyOfObjects(self._name, "rpc_sync", timeout, self._call)

    def rpc_async(self, timeout: float = -1.0) -> Any:
        """A proxy whose methods return a `GroupCall` at once. timeout: as in `rpc_sync`."""
        return _ProxyOfObjects(self._name, "rpc_async", timeout, self._call)

    def remote(self, timeout: float = -1.0) -> Any:
        """A proxy whose methods return an `RRefGroup` of their results at once. timeout: as in `rpc_sync`."""
        return _ProxyOfObjects(self._name, "remote", timeout, self._call)

    def stream(self, timeout: float = -1.0) -> Any:
        """A proxy whose methods are generators, and return a `GroupStream`. timeout: seconds for each item."""
        return _ProxyOfObjects(self._name, "stream", timeout, self._call)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.rpc_async(), name)
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = ObjectMethod(self._name, "__call__")
        return self._call(ObjectCall("rpc_async", -1.0, method, args, kwargs, call_site(sys._getframe(1))))

    def __repr__(self) -> str:
        return f"<aiorpc.GroupObject {self._name!r}>"


class _ProxyOfObjects:
    """Methods of the objects, to be called in one manner."""

    __slots__ = ("_call", "_object", "_timeout", "_verb")

    def __init__(self, name: str, verb: str, timeout: float, call: Caller) -> None:
        self._object = name
        self._verb = verb
        self._timeout = timeout
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not is_public(name):
            raise AttributeError(
                f"{name!r} of objects {self._object!r} is private: an object serves its public methods"
            )

        def method(*args: Any, **kwargs: Any) -> Any:
            called = ObjectMethod(self._object, name)
            return self._call(ObjectCall(self._verb, self._timeout, called, args, kwargs, call_site(sys._getframe(1))))

        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = ObjectMethod(self._object, "__call__")
        return self._call(ObjectCall(self._verb, self._timeout, called, args, kwargs, call_site(sys._getframe(1))))
