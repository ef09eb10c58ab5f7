"""What `aiorpc.peer` returns: another worker, with options for the calls that are made to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...futures import Future
from ..references.references import References
from ..references.rref import RRef
from .peers import Peers, To
from .stream import Stream, open_stream


class Home(Protocol):
    """What a handle needs of the worker whose calls are made through it."""

    peers: Peers
    references: References


class PeerHandle:
    """A worker with options for the calls made through this handle; see `aiorpc.peer`. Any thread."""

    def __init__(self, home: Home, to: To, timeout: float, *, wait: bool = False) -> None:
        self._home = home
        self._to = to
        self._timeout = timeout
        self._wait = wait

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `aiorpc.call`, with this handle's options."""
        return self._home.peers.find(self._to).call(function, args, kwargs, self._timeout, wait=self._wait)

    def remote(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """An RRef of the function's result on that worker, with this handle's timeout; it waits for nobody to join."""
        home = self._home
        return home.references.create(home.peers.find(self._to), function, args, kwargs, self._timeout, depth=2)

    def stream(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream:
        """As `aiorpc.stream`, with this handle's options."""
        peer = self._home.peers.find(self._to)
        return open_stream(peer, function, args, kwargs, self._timeout, wait=self._wait)

    def __repr__(self) -> str:
        return f"<aiorpc.peer {self._to!r}, timeout {self._timeout:g} s>"
