"""Autograd contexts: opening and leaving them, and their verbs.

Leaving a context tells every worker that took part, with the next message to it or a little later (`Piggybacked`), and
does not wait for the answers; later calls arrive after the notice. Contexts cannot pile up at a worker: leaving one
waits, for a few seconds at most, until the workers have answered for the one before. A worker that does not answer
forgets the context when it learns that its opener is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import ProtocolError, RpcError, RpcUsageError
from ..futures import Future
from ..protocol.registered import register_safe
from ..runtime.calls.current import current_call, deadline
from ..runtime.calls.functions import brief
from ..runtime.calls.options import CallOptions
from ..runtime.gradients.contexts import current_autograd, opener_of
from ..runtime.node import Node, registry, serving
from ..sites import call_site
from .parts import Id
from .passes import Last, Pass
from .wire import pack_ids, unpack_ids

Tensor = torch.Tensor


@register_safe
class Context(int):
    """An autograd context at the worker that opened it: its id, which other functions take, with its verbs.

    Travels as a plain int.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def _take_apart(self) -> dict[str, int]:
        """The same without pickle (`protocol.trees`)."""
        return {"id": int(self)}

    @classmethod
    def _put_together(cls, parts: dict[str, Any]) -> int:
        """The id from the parts of `_take_apart`, as a plain int. Raises RpcUsageError for anything other."""
        number = parts.get("id")
        if type(number) is not int:
            raise RpcUsageError(f"an autograd context that is a {type(number).__name__}")
        return number

    def backward(self, roots: Sequence[Tensor], retain_graph: bool = False) -> Future[None]:
        """Start a backward pass; to be awaited, or waited for. See `aiorpc.autograd.backward`.

        Cancelling the Future ends the pass on all workers. Gradients that were added before stay in the context, and
        graphs that the pass has gone through are gone unless `retain_graph` is set. Cancelling does not wait for
        running parts, on any worker: they end by themselves, and their gradients are dropped.
        """
        one = make_pass(int(self), roots, retain_graph)
        one.done._site = call_site(sys._getframe(1))
        registry.get().engine.pool.submit(one.start)
        return one.done

    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients at this worker, by leaf. See `aiorpc.autograd.get_gradients`."""
        return registry.get().gradients.get(int(self)).gradients()


class context:
    """``with context() as context_id``, or ``async with context() as ctx``: records the calls inside.

    Calls made inside, and the calls of their handlers, belong to the context; several may be open at once, and never
    mix. Leaving it drops the graph and the gradients on all workers: here at once; on workers that were called from
    here before any later call of this worker; on workers that only these have called soon after. It waits, for a few
    seconds at most, until the workers have dropped the context that was left before. On the worker's loop only ``async
    with`` is possible.
    """

    def __init__(self) -> None:
        self._node: Node
        self._id = 0
        self._token: contextvars.Token[int | None]

    def _open(self, node: Node) -> Context:
        node.engine.lifetime.check_open()
        if self._id:  # the first one could not be left any more
            raise RpcUsageError(
                f"autograd context {self._id} of this `context()` is still open, and it holds one at a time: call "
                "context() for each block"
            )
        self._node = node
        self._id = node.gradients.open().id
        self._token = current_autograd.set(self._id)
        return Context(self._id)

    def __enter__(self) -> Context:
        node = registry.only or registry.get()
        node.engine.refuse_on_loop("`with autograd.context()`", "async with autograd.context() as ctx")
        return self._open(node)

    def __exit__(self, *exc_info: object) -> None:
        limit = 0.0
        for call in self._leave():
            limit = limit or time.monotonic() + self._node.engine.bounds.leave_context
            with contextlib.suppress(RpcError):
                call.wait(max(0.0, limit - time.monotonic()))

    async def __aenter__(self) -> Context:
        return self._open(registry.get())

    async def __aexit__(self, *exc_info: object) -> None:
        if earlier := self._leave():
            waits = [asyncio.ensure_future(_ended(call)) for call in earlier]
            await asyncio.wait(waits, timeout=self._node.engine.bounds.leave_context)

    def _leave(self) -> list[Future[bytes]]:
        """End it here and on all workers that know of it. Returns the calls to wait for."""
        id, self._id = self._id, 0
        # A context that was entered later may go on, for example if two generators take turns.
        if current_autograd.get() == id:
            try:
                current_autograd.reset(self._token)
            except ValueError:
                # Another task or thread leaves it, for example when a generator is closed. The variable of the entering
                # task keeps the id of a context that is open nowhere.
                current_autograd.set(None)
        return _Farewell(self._node, id, self._node.gradients.leave(id)).tell(later=True)


async def _ended(call: Future[Any]) -> None:
    with contextlib.suppress(RpcError):
        await call


class _Farewell:
    """Tells all workers that took part in a context of its end, also workers that others name in their answers."""

    def __init__(self, node: Node, context_id: int, known: Collection[Any]) -> None:
        """known: peers that took part, also ones that have not joined yet: calls wait for them."""
        self._node = node
        self._id = context_id
        self._told = {node.engine.id}
        self._joining, self._todo = _apart(known)

    def tell(self, later: bool = False) -> list[Future[bytes]]:
        """Tell the known workers that were not told yet.

        Any thread.

        later: with the next message, to workers that have answered for the context before. Returns the unanswered calls
        of the others.
        """
        if self._node.engine.closed:
            return []
        while self._joining:
            peer = self._joining.pop()
            # Sent after the waiting calls, which belong to the context.
            _call(peer, forget, self._id)._when_settled(partial(self._joined, peer))
        last, earlier = self._node.gradients.farewells, []
        for worker_id in self._todo - self._told:
            before, peer = last.get(worker_id), self._node.peers.by_id(worker_id)
            piggybacked = later and before is None  # if not, the former call may itself wait for a message
            self._told.add(worker_id)
            call = last[worker_id] = _call(peer, forget, self._id, piggybacked)
            call._when_settled(partial(self._answered, worker_id))
            if piggybacked:
                self._node.gradients.piggybacked.add(peer)
            if before is not None:
                earlier.append(before)
        return earlier

    def _everybody(self) -> list[int]:
        return [record.id for record in self._node.group.live()]

    def _joined(self, peer: Any, call: Future[bytes]) -> None:
        """A worker that had not joined has answered, or never joined."""
        if peer.record is not None:
            self._told.add(peer.record.id)
            self._answered(peer.record.id, call)
        else:
            call._mark_seen()

    def _answered(self, worker_id: int, call: Future[bytes]) -> None:
        last = self._node.gradients.farewells
        if last.get(worker_id) is call:
            last.pop(worker_id, None)
        try:
            told = None if call.exception() is not None else unpack_ids(call.value())
        except ProtocolError:
            told = None
        if told is not None:
            new = set(told) - self._told
            # In place, for several threads. Members alone: invented ids are not called.
            self._todo.update(new and new.intersection(self._everybody()))
        else:  # it is gone, with its knowledge of others: tell all members
            self._todo.update(self._everybody())
        with contextlib.suppress(RpcError):  # we leave
            self.tell()


@brief
def forget(context_id: Id) -> bytes:
    """Handler: a context has ended. Returns the packed ids of workers that this one knows to take part.

    Only the opener of the context can end it. If another worker that takes part reports the end, because this worker
    joined after it, this worker asks the opener.
    """
    node, call = serving()
    opener, gradients = opener_of(context_id), node.gradients
    if call.caller_id == opener:
        joining, known = _apart(gradients.leave(context_id))
        if joining:  # the opener cannot tell them
            _Farewell(node, context_id, joining).tell()
        return pack_ids(known)
    context = gradients.find(context_id)
    if context is None or opener == node.engine.id or context_id in gradients.doubted:
        return pack_ids(())
    if context.takes_part(call.caller_id):
        gradients.doubted.add(context_id)
        _call(node.peers.by_id(opener), has_ended, context_id)._when_settled(partial(_doubted, node, context_id))
    return pack_ids(())


def _doubted(node: Node, context_id: int, asked: Future[bool]) -> None:
    """The opener has answered whether a context has ended, or is gone."""
    node.gradients.doubted.discard(context_id)
    if asked.exception() is None and asked.value() is True:
        _Farewell(node, context_id, node.gradients.leave(context_id)).tell()


@brief
def has_ended(context_id: Id) -> bool:
    """Handler: whether a context of this worker was left, or never existed: the answer is the same for both."""
    node, _ = serving()
    return node.gradients.has_ended(context_id)


def _call(peer: Any, function: Any, context_id: int, later: bool = False) -> Future[Any]:
    """Call a handler of this module at a peer, outside of any served call, so no deadline of a handler ends it."""
    serving = current_call.set(None)
    try:
        options = CallOptions(later=later, part_of=("context", context_id))
        call: Future[Any] = peer.call(function, (context_id,), None, 0.0, system=True, options=options)
        return call
    finally:
        current_call.reset(serving)


def _apart(known: Collection[Any]) -> tuple[list[Any], set[int]]:
    """The peers that have not joined yet, and the ids of the others."""
    joining = [peer for peer in known if peer.record is None]
    return joining, {peer.record.id for peer in known if peer.record is not None}


def make_pass(
    context_id: int, roots: Sequence[Tensor], retain_graph: bool, node: Node | None = None, last: Last | None = None
) -> Pass:
    """A pass that has not started; any thread. Raises RpcUsageError for invalid roots or an unknown context.

    node: of the worker that has the roots; None: the current one. last: as of `Pass`.
    """
    node = node or registry.only or registry.get()
    node.engine.lifetime.check_open()
    if isinstance(context_id, bool) or not isinstance(context_id, int):
        raise RpcUsageError(f"a context is named by its id, an int, not {context_id!r:.80}")
    limit = node.engine.default_timeout or None
    if current_call.get() is not None:
        left = deadline()
        limit = left if limit is None or (left is not None and left < limit) else limit
    until = None if limit is None else time.monotonic() + limit
    return Pass(node, node.gradients.get(context_id), roots, retain_graph, until, last)
