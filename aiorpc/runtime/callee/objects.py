"""The objects that a worker serves under names: `aiorpc.serve`.

They live from the making of the worker, before it joins, to its end: a worker that meets it finds all of them. A call
looks its object up on arrival, so ending the service of an object does not affect earlier calls.
"""

from __future__ import annotations

from typing import NoReturn

from ...errors import RpcUsageError, UnknownObject
from ...locks import Lock
from ...protocol.identity import check_object_name
from ..engine.lifetime import Lifetime


class ServedObject:
    """An object served under a name, until `close`; as a context manager, until its block ends. Any thread.

    name: for callers.
    """

    def __init__(self, objects: Objects, name: str, value: object) -> None:
        self.name = name
        self._objects = objects
        self._value = value

    def close(self) -> None:
        """End the service: later calls raise UnknownObject, running ones go on. Idempotent.

        Does nothing if another object has taken its name.
        """
        self._objects.end(self)
        self._value = None

    def __enter__(self) -> ServedObject:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """It ends a service of this worker only."""
        raise RpcUsageError(
            f"{self!r} stays with its worker, and cannot be copied, pickled or sent; others call the object by its "
            f"name, rpc.peer({self._objects.worker!r}).object({self.name!r}); a handler that serves one returns None"
        )

    def __repr__(self) -> str:
        return f"<aiorpc.serve {self.name!r} on worker {self._objects.worker!r}>"


class NameTaken(RpcUsageError):
    """An object of that name is served already."""


class Objects:
    """The objects of one worker, by their names. Any thread. worker: its name."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.by_name: dict[str, ServedObject] = {}
        self._lock = Lock()

    def serve(self, name: str, value: object, lifetime: Lifetime, *, replace: bool = False) -> ServedObject:
        """See `aiorpc.serve`. lifetime: of the worker."""
        check_object_name(name)
        if value is None:
            raise RpcUsageError(f"under the name {name!r} an object is served, and what was given is None")
        if not isinstance(replace, bool):
            raise RpcUsageError(f"replace must be True or False, not {replace!r:.40}")
        served = ServedObject(self, name, value)
        with self._lock:
            if lifetime.ended:
                raise lifetime.why_closed()
            held = self.by_name.get(name)
            if held is not None and not replace:
                kind = type(held._value).__qualname__
                raise NameTaken(
                    f"worker {self.worker!r} serves an object {name!r} already, a {kind}: give this one another name, "
                    "close() the other one, or put this one in its place with rpc.serve(..., replace=True)"
                )
            self.by_name[name] = served
        return served

    def find(self, name: str, method: str, caller: str, *, tell: bool) -> object:
        """The object of that name, for a call of its method. tell: whether the error may name the served objects.

        Raises UnknownObject.
        """
        served = self.by_name.get(name)
        value = None if served is None else served._value  # read once: another thread may close it
        if value is None:
            raise self._unknown(name, method, caller, tell)
        return value

    def _unknown(self, name: str, method: str, caller: str, tell: bool) -> UnknownObject:
        names = sorted(self.by_name) if tell else []
        there = f"; it serves {', '.join(map(repr, names))}" if names else "; it serves none" if tell else ""
        return UnknownObject(
            f"worker {self.worker!r} serves no object {name!r:.130}, whose {method:.130} worker {caller!r} has "
            f"called{there}. Nothing was run. There it has to be served: rpc.serve({name!r:.130}, object)",
            worker=self.worker,
            name=name,
            names=tuple(names),
        )

    def end(self, served: ServedObject) -> None:
        """End the service of an object."""
        with self._lock:
            if self.by_name.get(served.name) is served:
                del self.by_name[served.name]

    def close(self) -> None:
        """The worker leaves: end the service of all objects, and free them."""
        with self._lock:
            served, self.by_name = list(self.by_name.values()), {}
        for each in served:
            each.close()
