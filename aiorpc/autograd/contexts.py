"""Autograd contexts: opening and leaving them, and the verbs of one.

Leaving a context tells every worker that took part, with the next message to it or a little later (`Trailing`). Their
answers are not waited for: what is asked of a worker later comes there behind what it was told. Contexts of which a
worker has not dropped its share cannot pile up, as leaving one waits until those have answered for the one before, for
a few seconds at most. A worker that does not answer forgets the context when it learns that we are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..callbacks import Again
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
    """An autograd context: its id, which is what other functions take, with the verbs of the one who opened it.

    Travels as a plain int.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def _take_apart(self) -> dict[str, int]:
        """The same without pickle (`protocol.trees`)."""
        return {"id": int(self)}

    @classmethod
    def _put_together(cls, parts: dict[str, Any]) -> int:
        """What `_take_apart` was asked of, as a plain int. Raises RpcUsageError for anything else."""
        number = parts.get("id")
        if type(number) is not int:
            raise RpcUsageError(f"an autograd context that is a {type(number).__name__}")
        return number

    def backward(self, roots: Sequence[Tensor], retain_graph: bool = False) -> Future[None]:
        """Start a backward pass; to be awaited, or waited for. See `aiorpc.autograd.backward`.

        To cancel it ends the pass on all workers. Gradients that were added by then stay in the context, and graphs
        that it has gone through are gone unless `retain_graph` is set. It does not wait for what runs at that moment,
        on this worker or another: that ends by itself, and its gradients are dropped.
        """
        one = make_pass(int(self), roots, retain_graph)
        one.done._site = call_site(sys._getframe(1))
        registry.get().engine.pool.submit(one.start)
        return one.done

    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients at this worker, by leaf. See `aiorpc.autograd.get_gradients`."""
        return registry.get().gradients.get(int(self)).gradients()


class context:
    """``with context() as context_id``, or ``async with context() as ctx``: what is inside is recorded.

    Calls made inside, and what their handlers call, belong to the context; several may be open at once, and never mix.
    Leaving it drops the graph and the gradients on all workers: here at once, on those that were called from here
    before anything that they are asked later, and on those that only these have called soon after. It waits, for a few
    seconds at most, until the workers have dropped those of the context that was left before it. On the worker's loop
    only ``async with`` is possible.
    """

    def __init__(self) -> None:
        self._node: Node
        self._id = 0
        self._token: contextvars.Token[int | None]

    def _open(self, node: Node) -> Context:
        node.engine.lifetime.check_open()
        if self._id:  # nobody could leave the one before any more
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
        """It has ended: here, and on all workers that know of it. Returns what to wait for."""
        gradients, id, known = self._node.gradients, self._id, set[Any]()
        try:
            found = gradients.find(id)
            known = known if found is None else found.known
            self._forget_here(id)
            return _Farewell(self._node, id, gradients.leave(id)).tell(later=True)
        except RpcError:
            raise
        except BaseException:  # a signal handler has raised it, and nobody else would tell the others
            self._id = 0
            self._node.engine.call_on_loop(self._leave_again, id, known)
            raise

    def _leave_again(self, id: int, known: Iterable[Any]) -> None:
        """On the loop. known: workers that took part."""
        self._node.gradients.leave(id)
        with contextlib.suppress(RpcError):  # we leave
            _Farewell(self._node, id, known).tell_all()

    def _forget_here(self, id: int) -> None:
        """What is done from now on is not done in it."""
        self._id = 0
        # Else somebody is in another one, which was entered behind it and goes on, as where two generators take turns.
        if current_autograd.get() == id:
            try:
                current_autograd.reset(self._token)
            except ValueError:
                # Another task or thread leaves it than has entered it, as where a generator is closed for a consumer
                # that has stopped early. The variable of the one who entered it stays: it names a context that is open
                # nowhere.
                current_autograd.set(None)


async def _ended(call: Future[Any]) -> None:
    with contextlib.suppress(RpcError):
        await call


class _Farewell:
    """Tells all workers that took part in a context that it has ended, also those that others name in their answers."""

    def __init__(self, node: Node, context_id: int, known: Iterable[Any]) -> None:
        """known: workers that took part (`Peer`), also those that have not come yet: calls wait for these."""
        self._node = node
        self._id = context_id
        self._told = {node.engine.id}
        self._newcomers, self._todo = _apart(known)

    def tell(self, later: bool = False) -> list[Future[bytes]]:
        """Tell those that are known by now, and were not told. Any thread.

        later: with the next message to them, those that have answered for the context before. Returns the calls by
        which the others were told of that one.
        """
        if self._node.engine.closed:
            return []
        while self._newcomers:
            peer = self._newcomers.pop()
            # Behind the calls that wait, as they say that they belong to the context.
            self._forget_at(peer)._when_settled(Again(self._came, peer))
        last, earlier = self._node.gradients.farewells, []
        for worker_id in self._todo - self._told:
            before, peer = last.get(worker_id), self._node.peers.by_id(worker_id)
            trailing = later and before is None  # else the one before may be waiting for a message to leave with
            try:
                self._told.add(worker_id)
                call = last[worker_id] = self._forget_at(peer, trailing)
                call._when_settled(Again(self._answered, worker_id))
            except BaseException:  # a signal handler has raised it, and what this one says may be heard by nobody
                self._told.discard(worker_id)
                self._todo.update(self._everybody())
                raise
            finally:  # also if a signal handler raises in it: it may be queued by then
                if trailing:
                    self._node.gradients.trailing.add(peer)
            if before is not None:
                earlier.append(before)
        return earlier

    def tell_all(self) -> None:
        """Tell all members, as some of those that took part may have been told, and not have been heard. Any thread."""
        self._todo.update(self._everybody())
        self.tell()

    def _everybody(self) -> list[int]:
        return [record.id for record in self._node.group.live()]

    def _forget_at(self, peer: Any, later: bool = False) -> Future[bytes]:
        """Tell that worker (`Peer`), in no call: nobody is to forget because of a deadline that he had to forget."""
        serving = current_call.set(None)
        try:
            options = CallOptions(later=later, part_of=("context", self._id))
            call: Future[bytes] = peer.call(forget, (self._id,), None, 0.0, system=True, options=options)
            return call
        finally:
            current_call.reset(serving)

    def _came(self, peer: Any, call: Future[bytes]) -> None:
        """A worker that was not there has answered, or never came. It may run twice, as `_answered` may."""
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
            # In place: several threads may. Members alone: whoever invents others must not have them all called.
            self._todo.update(new and new.intersection(self._everybody()))
        else:  # it is gone, and with it what it knew of others
            self._todo.update(self._everybody())
        with contextlib.suppress(RpcError):  # we leave
            self.tell()


@brief
def forget(context_id: Id) -> bytes:
    """Handler: a context has ended. Which workers it is known to that this one knows of; packed ids.

    Of the one who has opened it that is believed. Others that take part say so as well, of what they had called before
    that worker was told of them: then it is asked, so that nobody ends the contexts of others.
    """
    node, call = serving()
    opener = opener_of(context_id)
    if call.caller_id != opener:
        context = node.gradients.find(context_id)
        if context is not None and context.takes_part(call.caller_id):
            _doubt(node, context_id, opener)
        return pack_ids(())
    newcomers, known = _apart(node.gradients.leave(context_id))
    if newcomers:  # which others cannot tell
        _Farewell(node, context_id, newcomers).tell()
    return pack_ids(known)


def _doubt(node: Node, context_id: int, opener: int) -> None:
    """Somebody else says of that context that it has ended: it has if the worker that has opened it says so."""
    doubted = node.gradients.doubted
    if opener == node.engine.id or context_id in doubted:
        return
    doubted.add(context_id)
    serving = current_call.set(None)  # as in `_Farewell`
    try:
        call: Future[bool] = node.peers.by_id(opener).call(has_ended, (context_id,), None, 0.0, system=True)
    except BaseException:
        doubted.discard(context_id)
        raise
    finally:
        current_call.reset(serving)

    def answered(call: Future[bool]) -> None:
        doubted.discard(context_id)
        if call.exception() is None and call.value() is True:  # else it goes with that worker
            _Farewell(node, context_id, node.gradients.leave(context_id)).tell()

    call._when_settled(Again(answered))


@brief
def has_ended(context_id: Id) -> bool:
    """Handler: whether a context of this worker was left, or is none. It says no more of one than the caller knows."""
    node, _ = serving()
    return node.gradients.has_ended(context_id)


def _apart(known: Iterable[Any]) -> tuple[list[Any], set[int]]:
    """Of these workers (`Peer`) those that have not come yet, and the ids of the others."""
    newcomers, ids = [], set()
    for peer in known:
        record = peer.record
        if record is None:
            newcomers.append(peer)
        else:
            ids.add(record.id)
    return newcomers, ids


def make_pass(
    context_id: int, roots: Sequence[Tensor], retain_graph: bool, node: Node | None = None, last: Last | None = None
) -> Pass:
    """A pass that has not started; any thread. Raises RpcUsageError for roots, or a context, that cannot be.

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
