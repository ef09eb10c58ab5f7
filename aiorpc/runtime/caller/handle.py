"""What `aiorpc.peer` gives: a worker, with options for the calls made to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...futures import Future
from ..references.rref import RRef
from .peers import To
from .streams import Stream

if TYPE_CHECKING:
    from ..worker import Worker


class PeerHandle:
    """A worker with options for the calls made through this handle; see `aiorpc.peer`. Any thread."""

    def __init__(self, worker: Worker, to: To, timeout: float) -> None:
        self._worker = worker
        self._to = to
        self._timeout = timeout

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `aiorpc.call`, with this handle's options."""
        return self._worker.peers.find(self._to).call(function, args, kwargs, self._timeout)

    def remote(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """An RRef of the function's result on that worker, with this handle's options."""
        worker = self._worker
        return worker.references.create(worker.peers.find(self._to), function, args, kwargs, self._timeout, depth=2)

    def stream(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream:
        """As `aiorpc.stream`, with this handle's options."""
        worker = self._worker
        return worker.open_stream(worker.peers.find(self._to), function, args, kwargs, self._timeout)

    def __repr__(self) -> str:
        return f"<aiorpc.peer {self._to!r}, timeout {self._timeout:g} s>"
