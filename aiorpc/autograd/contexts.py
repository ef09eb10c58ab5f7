"""Autograd contexts: opening and leaving them, and the verbs of one.

Leaving a context tells every worker that took part, and waits for them, for a few seconds at most: a worker that does
not answer forgets the context when it learns that we are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import RpcError, RpcUsageError
from ..futures import Future
from ..runtime.calls.current import current_call, deadline
from ..runtime.calls.functions import inline
from ..runtime.gradients.contexts import current_autograd
from ..runtime.node import Node, registry, serving
from .parts import ask
from .passes import Pass

Tensor = torch.Tensor


class Context(int):
    """An autograd context: its id, which is what other functions take, with the verbs of the one who opened it.

    Travels as a plain int.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def backward(self, roots: Sequence[Tensor], retain_graph: bool = False) -> Future[None]:
        """Start a backward pass; to be awaited, or waited for. See `aiorpc.autograd.backward`."""
        one = make_pass(int(self), roots, retain_graph)
        registry.get().engine.pool.submit(one.start)
        return one.done

    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients at this worker, by leaf. See `aiorpc.autograd.get_gradients`."""
        return registry.get().gradients.get(int(self)).gradients()


class context:
    """``with context() as context_id``, or ``async with context() as ctx``: what is inside is recorded.

    Calls made inside, and what their handlers call, belong to the context; several may be open at once, and never mix.
    Leaving it drops the graph and the gradients on all workers. On the worker's loop only ``async with`` is possible.
    """

    def __init__(self) -> None:
        self._node: Node
        self._id = 0
        self._token: contextvars.Token[int | None]

    def _open(self, node: Node) -> Context:
        node.engine.lifetime.check_open()
        self._node = node
        self._id = node.gradients.open().id
        self._token = current_autograd.set(self._id)
        return Context(self._id)

    def __enter__(self) -> Context:
        node = registry.only or registry.get()
        node.engine.refuse_on_loop("`with autograd.context()`", "async with autograd.context() as ctx")
        return self._open(node)

    def __exit__(self, *exc_info: object) -> None:
        for calls, seconds in self._leave():
            limit = time.monotonic() + seconds
            for call in calls:
                with contextlib.suppress(RpcError):
                    call.wait(max(0.0, limit - time.monotonic()))

    async def __aenter__(self) -> Context:
        return self._open(registry.get())

    async def __aexit__(self, *exc_info: object) -> None:
        for calls, seconds in self._leave():
            await asyncio.wait([asyncio.ensure_future(_ended(call)) for call in calls], timeout=seconds)

    def _leave(self) -> Iterator[tuple[list[Future[bytes]], float]]:
        """It has ended: here, and on all workers that know of it. Yields calls to wait for, and for how long."""
        current_autograd.reset(self._token)
        farewell = _Farewell(self._node, self._id)
        limit = time.monotonic() + self._node.engine.bounds.leave_context
        while (calls := farewell.tell()) and time.monotonic() < limit:
            yield calls, limit - time.monotonic()
        farewell.go_on()


async def _ended(call: Future[Any]) -> None:
    with contextlib.suppress(RpcError):
        await call


class _Farewell:
    """Tells all workers that took part in a context that it has ended, also those that answer late."""

    def __init__(self, node: Node, context_id: int) -> None:
        self._node = node
        self._id = context_id
        known = {peer.record.id for peer in node.gradients.leave(context_id) if peer.record is not None}
        self._told = {node.engine.id}
        self._todo = known
        self._alone = False  # nobody waits for it any more

    def tell(self) -> list[Future[bytes]]:
        """Tell those that are known by now, and were not told: the calls. Any thread."""
        new = self._todo - self._told
        if not new or self._node.engine.closed:
            return []
        self._told |= new
        # Without a deadline: nobody is to forget because of it that he had to forget.
        calls = [ask(self._node, worker_id, forget, self._id, until=None) for worker_id in new]
        for call in calls:
            call.when_settled(self._answered)
        return calls

    def go_on(self) -> None:
        """Those that answer from now on may name others, too."""
        self._alone = True
        if self._todo - self._told:
            self.tell()

    def _answered(self, call: Future[bytes]) -> None:
        if call.exception() is None:
            self._todo = self._todo.union(*struct.iter_unpack("<q", call.value()))
        else:  # it is gone, and with it what it knew of others
            self._todo = self._todo | {record.id for record in self._node.group.live()}
        if self._alone:
            self.tell()


@inline
def forget(context_id: int) -> bytes:
    """Handler: a context has ended. Which workers it is known to that this one knows of; packed ids."""
    node, _ = serving()
    known = [peer.record.id for peer in node.gradients.leave(context_id) if peer.record is not None]
    return struct.pack(f"<{len(known)}q", *known)


def make_pass(context_id: int, roots: Sequence[Tensor], retain_graph: bool) -> Pass:
    """A pass that has not started; any thread. Raises RpcUsageError for roots, or a context, that cannot be."""
    node = registry.only or registry.get()
    node.engine.lifetime.check_open()
    if isinstance(context_id, bool) or not isinstance(context_id, int):
        raise RpcUsageError(f"a context is named by its id, an int, not {context_id!r:.80}")
    limit = node.engine.default_timeout or None
    if current_call.get() is not None:
        left = deadline()
        limit = left if limit is None or (left is not None and left < limit) else limit
    until = None if limit is None else time.monotonic() + limit
    return Pass(node, node.gradients.get(context_id), roots, retain_graph, until)
